"""Receipts, checked and as the scripts want them; large batches of them are settled in steps."""

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import gt
from typing import Any

import msgspec

from keylane.errors import InvalidArgument
from keylane.wire import MAX_BATCH
from keylane_broker.engine.codec import pack, rows
from keylane_broker.engine.values import Lease, Receipt, Stale

MAX_ENTRIES = 10_000  # messages that the receipts of one call stand for
AT_ONCE = 200  # receipts that one call gives back or extends

_TOO_LARGE = 10**14  # for an entry or a token
_starts: Any = str.startswith
_RECEIPTS = list[tuple[int, str, int, int, int]]


class Receipts:
    """Lane, token, first and last of each, flat, and where each stands in what the caller gave."""

    __slots__ = ("flat", "places")

    def __init__(self, flat: list[Any], places: Sequence[int] | None = None) -> None:
        self.flat = flat
        self.places = range(len(flat) // 4) if places is None else places

    def __bool__(self) -> bool:
        return bool(self.flat)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """First and last entry of each."""
        return list(zip(self.flat[2::4], self.flat[3::4], strict=True))

    @property
    def messages(self) -> int:
        """How many they stand for."""
        return int(sum(self.flat[3::4]) - sum(self.flat[2::4])) + len(self.flat) // 4

    @property
    def columns(self) -> list[list[Any]]:
        """All lanes, all tokens, all first and all last entries."""
        return [self.flat[::4], self.flat[1::4], self.flat[2::4], self.flat[3::4]]

    def pack(self) -> bytes:
        """Return them for a script."""
        return pack(self.columns)

    def by_lane(self) -> "Receipts":
        """Return those of each lane one after the other, in their order, if all are too many for one step."""
        lanes = self.flat[::4]
        if len(lanes) <= AT_ONCE:
            return self
        places = sorted(range(len(lanes)), key=lanes.__getitem__)
        return Receipts([part for at in places for part in self.flat[at * 4 : at * 4 + 4]], places)

    def first(self, *, lanes: bool = False) -> "Receipts":
        """Return as many as one step takes; with whole `lanes`, the others of the last one, too."""
        names = self.flat[::4]
        end = min(AT_ONCE, len(names))
        while lanes and end < len(names) and names[end] == names[end - 1] != "":
            end += 1
        return self if end == len(names) else Receipts(self.flat[: end * 4], self.places[:end])

    def split(self, receipt: int, entry: int) -> tuple["Receipts", "Receipts"]:
        """Return what is before an entry of a receipt, which is counted from 0, and the rest."""
        at = receipt * 4
        done, rest = self.flat[:at], self.flat[at:]
        if rest and entry > rest[2]:
            done += [*rest[:3], entry - 1]
            rest[2] = entry
            return Receipts(done, self.places[: receipt + 1]), Receipts(rest, self.places[receipt:])
        return Receipts(done, self.places[:receipt]), Receipts(rest, self.places[receipt:])

    def stale_parts(self, flat: Sequence[int]) -> list[Stale]:
        """Return what a script says is stale of these, by the caller's places."""
        return [Stale(self.places[index], first, last) for index, first, last in rows(flat, 3)]

    def settled_parts(self, stale: Iterable[Stale]) -> list[tuple[int, int, int]]:
        """Return token, first, last of what they have settled: all but the stale parts."""
        refused = {(part.receipt, entry) for part in stale for entry in range(part.first, part.last + 1)}
        return [
            (token, entry, entry)
            for place, (_, token, first, last) in zip(self.places, rows(self.flat, 4), strict=True)
            for entry in range(first, last + 1)
            if (place, entry) not in refused
        ]


def checked_receipts(lease: Lease, receipts: Sequence[Receipt]) -> Receipts:
    """Return receipts of this partition, checked."""
    try:
        checked = msgspec.convert(receipts, _RECEIPTS)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"not receipts: {error}") from error
    for receipt in checked:
        if receipt[0] != lease.partition:
            raise InvalidArgument(
                f"{receipt!r:.100} is not of partition {lease.partition} of {lease.topic!r}"
            )
    return receipts_of([part for receipt in checked for part in receipt[1:]])


def receipts_of(flat: list[str | int]) -> Receipts:
    """Return receipts out of lane, token, first and last of each, flat; checked."""
    lanes, tokens, firsts, lasts = flat[::4], flat[1::4], flat[2::4], flat[3::4]
    numbers: Any = tokens + firsts + lasts
    if len(flat) % 4 or not 1 <= len(lanes) <= MAX_BATCH:
        raise InvalidArgument(
            f"a call takes 1 to {MAX_BATCH} receipts of four values, not {len(flat)} values"
        )
    if set(map(type, lanes)) != {str} or set(map(type, numbers)) != {int}:
        raise InvalidArgument("a receipt is a lane, which is text, and three numbers: token, first, last")
    if (
        min(numbers) <= 0
        or max(numbers) >= _TOO_LARGE
        or any(map(gt, firsts, lasts))
        or not all(map(_starts, {*lanes} - {""}, repeat("=")))
    ):
        raise InvalidArgument(
            f"not receipts: a lane is '' or begins with '=', and 0 < token, 0 < first <= last < {_TOO_LARGE}"
        )
    receipts = Receipts(flat)
    if receipts.messages > MAX_ENTRIES:
        raise InvalidArgument(f"the receipts stand for more than {MAX_ENTRIES} messages")
    return receipts
