"""Uids made of what a row holds: a task that runs again makes the same ones, in whatever order rows come."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_BYTES = 18  # of a digest: 24 characters, and no padding
_TEXT = 24
_HEAD = 8  # bytes of a digest by which rows are counted

Hashes = "np.ndarray[Any, np.dtype[np.uint64]]"


class Uids:
    """The uids of rows: of a seed, a row's content, and how many such rows came before.

    >>> uids = Uids("query-1", 7)
    >>> first, second, third = uids.take([pa.array([b"a", b"b", b"a"])])
    >>> first == third.removesuffix("-1")
    True
    """

    def __init__(self, *seed: object) -> None:
        text = "\0".join(map(str, seed)).encode()
        self._salt = blake2b(text, digest_size=blake2b.SALT_SIZE).digest()
        self.seen = Counts()  # by the heads of digests

    def plain(self, columns: Sequence[Any]) -> list[str]:
        """The uids of rows of which no two are the same, given as arrays of binary or text of one length."""
        return _texts(self._digests(columns))

    def take(self, columns: Sequence[Any]) -> list[str]:
        """The uids of the next rows."""
        digests = self._digests(columns)
        uids = _texts(digests)
        heads = np.frombuffer(digests, np.uint8).reshape(-1, _BYTES)[:, :_HEAD].copy().view(np.uint64).ravel()
        for row, before in self.seen.add(heads):
            uids[row] = numbered(uids[row], before)
        return uids

    def _digests(self, columns: Sequence[Any]) -> bytes:
        salt = self._salt
        return b"".join(
            [blake2b(row, digest_size=_BYTES, salt=salt).digest() for row in joined(columns).to_pylist()]
        )


def _texts(digests: bytes) -> list[str]:
    text = urlsafe_b64encode(digests).decode()
    return [text[start : start + _TEXT] for start in range(0, len(text), _TEXT)]


def numbered(uid: str, before: int) -> str:
    """The uid of a row like that of `uid`, of which so many have come before."""
    return f"{uid}-{before}" if before else uid


def is_first(uid: str) -> bool:
    """Whether it is of the first of the rows that are the same."""
    return len(uid) == _TEXT


def head_of(uid: str) -> int:
    """What the rows of a first uid are counted by."""
    return int(np.frombuffer(urlsafe_b64decode(uid)[:_HEAD], np.uint64)[0])


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

    def all(self) -> Any:
        """The numbers that have come, each once, in their order."""
        return np.sort(np.concatenate([np.empty(0, np.uint64), *self._runs]), kind="stable")

    @property
    def repeated(self) -> dict[int, int]:
        """How often those have come that came more than once."""
        return self._repeated

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
