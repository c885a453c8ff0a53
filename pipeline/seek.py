"""From what was asked for to positions in the partitions of a topic."""

from collections.abc import Sequence
from datetime import datetime

from client import AsyncClient
from client.errors import InvalidArgument
from client.types import PartitionOffsets
from pipeline.loss import report
from pipeline.offsets import EARLIEST, LATEST, Start, wanted


class Bounds:
    """Where a partition can be read: from `floor` up to, not including, `end`; the rest as in Piece."""

    __slots__ = ("dense", "end", "floor", "incarnation", "partition")

    def __init__(self, said: PartitionOffsets, *, journal: bool = False) -> None:
        self.partition, self.incarnation = said.partition, said.incarnation
        if journal:
            self.floor, self.end, self.dense = said.journal_earliest, said.journal_latest, said.journal_latest
        elif said.position is None:
            self.floor, self.end, self.dense = said.earliest, said.latest, said.latest
        else:
            self.floor, self.end, self.dense = said.position, said.latest, said.sparse


def check_partitions(option: str, start: Start, topic: str, count: int) -> None:
    """Refuse positions in partitions that there are not."""
    if not isinstance(start, str) and (beyond := [p for p in start.get(topic, {}) if p >= count]):
        raise InvalidArgument(
            f"option {option!r} has a position in partition {beyond[0]} of {topic!r}, which has {count}: "
            f"0 to {count - 1}"
        )


def start_in(topic: str, bounds: Bounds, start: Start, *, fail: bool) -> int:
    """Where to start in a partition; what lies before its floor is lost."""
    at = wanted(start, topic, bounds.partition, EARLIEST)
    if at in (EARLIEST, LATEST):
        return bounds.floor if at == EARLIEST else bounds.end
    _check_end("startingOffsets", topic, bounds, at)
    if at < bounds.floor:
        report(
            fail,
            f"startingOffsets asks for offset {at} of topic {topic!r}, partition {bounds.partition}, and the "
            f"oldest that is left is {bounds.floor}",
        )
    return max(at, bounds.floor)


def end_in(topic: str, bounds: Bounds, end: Start) -> int:
    """Where to end in a partition."""
    at = wanted(end, topic, bounds.partition, LATEST)
    if at in (EARLIEST, LATEST):
        return bounds.floor if at == EARLIEST else bounds.end
    _check_end("endingOffsets", topic, bounds, at)
    return at


def _check_end(option: str, topic: str, bounds: Bounds, at: int) -> None:
    if at > bounds.end:
        raise InvalidArgument(
            f"option {option!r} has position {at} in partition {bounds.partition} of {topic!r}, which ends "
            f"at {bounds.end}"
        )


async def since(client: AsyncClient, topic: str, all_bounds: Sequence[Bounds], moment: datetime) -> list[int]:
    """The position of the first message in each partition that was published at that time or later."""
    ms = int(moment.timestamp() * 1000)
    return [await first_at(client, topic, bounds, bounds.floor, bounds.end, ms) for bounds in all_bounds]


async def first_at(client: AsyncClient, topic: str, bounds: Bounds, low: int, high: int, ms: int) -> int:
    """The position of the first message from `low` on of that time or later; `high` if none is before it."""
    # Times of publishing never go back in a partition.
    while low < high:
        middle = (low + high) // 2
        page = await client.read(
            topic, bounds.partition, middle, high, limit=1, incarnation=bounds.incarnation
        )
        if not page.ranges or int(page.flat[2].partition(" ")[0]) >= ms:
            high = middle
        else:
            low = page.ranges[0] + 1
    return low
