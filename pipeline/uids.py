"""Uids made of what a row holds: a task that runs again makes the same ones, in whatever order rows come."""

from base64 import urlsafe_b64encode
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_BYTES = 18  # of a digest: 24 characters, and no padding
_TEXT = 24

Hashes = "np.ndarray[Any, np.dtype[np.uint64]]"


class Uids:
    """The uids of one task: of its seed, a row's content, and how many such rows came before.

    >>> uids = Uids("query-1", 7, 0)
    >>> first, second, third = uids.take([pa.array([b"a", b"b", b"a"])])
    >>> first == third.removesuffix("-1")
    True
    """

    def __init__(self, *seed: object) -> None:
        text = "\0".join(map(str, seed)).encode()
        self._salt = blake2b(text, digest_size=blake2b.SALT_SIZE).digest()
        self._seen = Counts()

    def take(self, columns: Sequence[Any]) -> list[str]:
        """The uids of the next rows, given as arrays of binary or text, all of one length."""
        salt = self._salt
        digests = b"".join(
            [blake2b(row, digest_size=_BYTES, salt=salt).digest() for row in joined(columns).to_pylist()]
        )
        text = urlsafe_b64encode(digests).decode()
        uids = [text[start : start + _TEXT] for start in range(0, len(text), _TEXT)]
        heads = np.frombuffer(digests, np.uint8).reshape(-1, _BYTES)[:, :8].copy().view(np.uint64).ravel()
        for row, before in self._seen.add(heads):
            uids[row] += f"-{before}"
        return uids


class Counts:
    """How often each of many numbers has come, at 8 bytes for each: sorted runs, merged as they grow."""

    def __init__(self) -> None:
        self._runs: list[Any] = []  # each longer than all behind it
        self._repeated: dict[int, int] = {}  # number -> how often, if more than once

    def add(self, numbers: Any) -> list[tuple[int, int]]:
        """Count numbers; the place of each that has come before, and how often it had."""
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        again = np.zeros(len(ordered), bool)
        again[1:] = ordered[1:] == ordered[:-1]
        for run in self._runs:
            places = np.searchsorted(run, ordered)
            places[places == len(run)] = 0
            again |= run[places] == ordered
        repeats = []
        for place in np.flatnonzero(again).tolist():
            number = int(ordered[place])
            before = self._repeated.get(number, 1)
            self._repeated[number] = before + 1
            repeats.append((int(order[place]), before))
        self._keep(ordered[~again])
        return repeats

    def _keep(self, run: Any) -> None:
        while self._runs and len(self._runs[-1]) <= len(run):
            run = np.sort(
                np.concatenate((self._runs.pop(), run)), kind="stable"
            )  # of two sorted ones: a merge
        if len(run):
            self._runs.append(run)


def joined(columns: Sequence[Any]) -> Any:
    """One binary value for each row, of which no two different rows have the same."""
    parts = []
    for column in columns:
        content = column.cast(pa.binary())
        length = pc.fill_null(pc.binary_length(content), -1).cast(pa.string()).cast(pa.binary())
        parts += [length, pc.fill_null(content, b"")]
    return pc.binary_join_element_wise(*parts, pa.scalar(b":", pa.binary()))
