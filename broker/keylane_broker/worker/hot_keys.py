"""Which keys of a partition most messages are published under: a bounded sketch.

The first messages are all looked at; the more there are the fewer, down to about one in `EVERY`, in random
steps. They are counted as in space-saving: when twice `KEYS` have a count, those with the least make room,
and a new key begins with the highest count that did, since it may have been among them. By that much its
count may be too high, which is kept beside it. When there are many samples all counts are halved: the past
fades.
"""

from math import ceil, sqrt
from random import random
from typing import NamedTuple

EVERY = 32  # messages for one sample, where there are many
KEYS = 256
_FEW = 2_048  # samples from which on half as many messages are looked at, while those are more than that
_SAMPLES = 65_536  # from which on counts are halved


class Counted(NamedTuple):
    """A key, how many messages had it, and by how many that may be wrong."""

    key: str
    messages: int
    error: int


class HotKeys:
    """The keys that messages of one partition were published under."""

    __slots__ = ("_counts", "_errors", "_every", "_floor", "_samples", "_wait")

    def __init__(self) -> None:
        self._every = 1  # messages for one sample
        self._samples = 0
        self._wait = 0  # messages that pass before the next sample
        self._floor = 0  # the highest count that has made room
        self._counts: dict[str, int] = {}
        self._errors: dict[str, int] = {}  # by how much a count may be too high

    @property
    def messages(self) -> int:
        """How many were published of late, as far as the samples tell."""
        return self._samples * self._every

    def add(self, flat: list[str]) -> None:
        """Messages are published, flat as key, uid, about, …"""
        count = len(flat) // 3
        if self._wait >= count:
            self._wait -= count
            return
        at, counts, step = self._wait, self._counts, 2 * self._every - 1
        while at < count:
            key = flat[at * 3]
            if key in counts:
                counts[key] += 1
            elif key:
                self._begin(key)
            self._samples += 1
            at += 1 + int(random() * step)  # whatever the order of keys: a fixed step could follow it
        self._wait = at - count
        if self._samples >= (_FEW if self._every < EVERY else _SAMPLES):
            self._fade()
            self._every = min(EVERY, 2 * self._every)

    def _begin(self, key: str) -> None:
        """Count a key from now on."""
        counts = self._counts
        if len(counts) >= 2 * KEYS:
            for coldest in sorted(counts, key=counts.__getitem__)[:KEYS]:
                self._floor = counts.pop(coldest)
                self._errors.pop(coldest, None)
        counts[key] = self._floor + 1
        if self._floor:
            self._errors[key] = self._floor

    def _fade(self) -> None:
        self._samples, self._floor = self._samples // 2, self._floor // 2
        self._counts = {key: count // 2 for key, count in self._counts.items() if count > 1}
        self._errors = {key: self._errors[key] // 2 for key in self._counts if key in self._errors}

    def hottest(self, most: int) -> list[Counted]:
        """Return the keys with the highest counts, hottest first."""
        keys = sorted(self._counts, key=self._counts.__getitem__, reverse=True)[:most]
        return [Counted(key, self._counts[key] * self._every, self._error(key)) for key in keys]

    def _error(self, key: str) -> int:
        """Return by how many messages the count of a key may be wrong, but for one key in some hundred."""
        chance = 3 * sqrt(self._counts[key] * (1 - 1 / self._every))
        return ceil((self._errors.get(key, 0) + chance) * self._every)
