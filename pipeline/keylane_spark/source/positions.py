"""Positions: the next entry to read, in each partition of each topic; and the ranges between two of them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec

EARLIEST, LATEST = -2, -1

Positions = dict[str, dict[int, int]]  # topic -> partition -> position
Start = Literal["earliest", "latest"] | Positions


class Range(msgspec.Struct, frozen=True):
    """Entries of a partition from `start` up to, but without, `end`."""

    topic: str
    partition: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """How many entries it spans."""
        return max(0, self.end - self.start)


class Times(msgspec.Struct, frozen=True):
    """Positions by time of publishing, ms, as an option has them: of all partitions, or of each."""

    option: str
    everywhere: int | None = None
    each: dict[str, dict[int, int]] = {}

    def of(self, topic: str, partition: int) -> int | None:
        """The time for a partition, None where none was given."""
        return self.each.get(topic, {}).get(partition) if self.everywhere is None else self.everywhere


def wanted(start: Start, topic: str, partition: int, default: int) -> int:
    """What was asked for in a partition: a position, EARLIEST or LATEST."""
    if isinstance(start, str):
        return EARLIEST if start == "earliest" else LATEST
    return start.get(topic, {}).get(partition, default)


def ranges(start: Positions, end: Positions) -> list[Range]:
    """What lies between, partition by partition, leaving out those where nothing does."""
    return [
        Range(topic, partition, start.get(topic, {}).get(partition, at), at)
        for topic, of in end.items()
        for partition, at in of.items()
        if start.get(topic, {}).get(partition, at) < at
    ]


def split(whole: Sequence[Range], least: int) -> list[Range]:
    """Cut ranges so that there are about `least`, the larger a range the more pieces."""
    total = sum(range_.size for range_ in whole)
    if len(whole) >= least or not total:
        return list(whole)
    pieces: list[Range] = []
    for range_ in whole:
        count = min(range_.size, max(1, round(range_.size / total * least)))
        cuts = [range_.start + range_.size * at // max(1, count) for at in range(count)] + [range_.end]
        pieces += [Range(range_.topic, range_.partition, first, end) for first, end in pairwise(cuts)]
    return pieces


def admit(start: Positions, end: Positions, rows: int) -> Positions:
    """The end of a batch of at most `rows`, each partition getting its share by what waits in it."""
    backlog = {(range_.topic, range_.partition): range_.size for range_ in ranges(start, end)}
    total = sum(backlog.values())
    if total <= rows:
        return end
    share = {place: waiting * rows // total for place, waiting in backlog.items()}
    # What rounding leaves goes to the partitions that lost most by it, so that none waits for ever.
    rest = sorted(backlog, key=lambda place: (-(backlog[place] * rows % total), place))
    for place in rest[: rows - sum(share.values())]:
        share[place] += 1
    return {
        topic: {
            partition: start[topic][partition] + share[topic, partition]
            if (topic, partition) in share
            else at
            for partition, at in of.items()
        }
        for topic, of in end.items()
    }
