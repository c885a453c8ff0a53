"""From what was asked for to positions in the partitions of a topic."""

from collections.abc import Sequence

from keylane import AsyncClient
from keylane.errors import InvalidArgument
from keylane.types import PartitionOffsets
from keylane_spark.source.data_loss import report
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.positions import EARLIEST, LATEST, Start, Times, wanted


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


def check_partitions(option: str, start: Start | Times, topic: str, count: int) -> None:
    """Refuse positions in partitions that there are not."""
    of = start.each if isinstance(start, Times) else {} if isinstance(start, str) else start
    if beyond := [partition for partition in of.get(topic, {}) if partition >= count]:
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


async def limits(
    client: AsyncClient, topic: str, all_bounds: Sequence[Bounds], count: int, options: ReadOptions
) -> tuple[list[int], list[int]]:
    """Where a batch starts and ends in partitions of a topic with `count` of them."""
    for option, asked in (
        ("startingOffsets", options.since or options.start),
        ("endingOffsets", options.until or options.end),
    ):
        check_partitions(asked.option if isinstance(asked, Times) else option, asked, topic, count)
    since = await at_times(client, topic, all_bounds, options.since or Times(""))
    until = await at_times(client, topic, all_bounds, options.until or Times(""))
    starts = [
        start_in(topic, bounds, options.start, fail=options.fail_on_data_loss) if at is None else at
        for bounds, at in zip(all_bounds, since, strict=True)
    ]
    ends = [
        end_in(topic, bounds, options.end) if at is None else at
        for bounds, at in zip(all_bounds, until, strict=True)
    ]
    return starts, ends


async def at_times(
    client: AsyncClient, topic: str, all_bounds: Sequence[Bounds], times: Times
) -> list[int | None]:
    """The position of the first message in each partition that was published at its time or later.

    That is the end where there is none; None for a partition for which no time was given.
    """
    return [
        None
        if (ms := times.of(topic, bounds.partition)) is None
        else await first_at(client, topic, bounds, bounds.floor, bounds.end, ms)
        for bounds in all_bounds
    ]


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
