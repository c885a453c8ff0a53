"""Filters of a query that tell where to read, held against looking at each row."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from keylane import Client, OutgoingMessage
from keylane_spark.source.batch import FilteredReader
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.pushdown import Narrowing, spans
from keylane_spark.source.schema import MESSAGES
from tests.support.running import RunningBroker

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Line(NamedTuple):
    """What filters see of a message."""

    topic: str
    partition: int
    offset: int
    timestamp: datetime


# Of each partition the milliseconds never go back.
LINES = [
    Line(topic, partition, offset, EPOCH + timedelta(milliseconds=offset // 2))
    for topic in ("orders", "payments")
    for partition in range(3)
    for offset in range(1, 30)
]


def passes(line: Line, one: Filter) -> bool | None:
    """What SQL says; None is unknown, which does not pass."""
    match one:
        case Not(child=child):
            said = passes(line, child)
            return None if said is None else not said
        case IsNotNull():
            return True
        case StringStartsWith(attribute=(name,), value=start):
            return str(getattr(line, name)).startswith(start)
    value, other = getattr(line, one.attribute[0]), one.value  # type: ignore[attr-defined]
    match one:
        case In():
            return True if value in other else None if None in other else False
        case EqualNullSafe():
            return bool(value == other)
    if other is None:
        return None
    match one:
        case EqualTo():
            return bool(value == other)
        case GreaterThan():
            return bool(value > other)
        case GreaterThanOrEqual():
            return bool(value >= other)
        case LessThan():
            return bool(value < other)
        case LessThanOrEqual():
            return bool(value <= other)
    raise AssertionError(one)


def all_pass(lines: Sequence[Line], filters: Sequence[Filter]) -> list[Line]:
    """The lines that are left."""
    return [line for line in lines if all(passes(line, one) is True for one in filters)]


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "topic": st.sampled_from(["orders", "p", "payments", "zebra"]),
    "partition": st.integers(-1, 4),
    "offset": st.integers(-1, 35),
    "timestamp": st.builds(
        lambda ms, beside: EPOCH + timedelta(milliseconds=ms, microseconds=beside),
        st.integers(-2, 17),
        st.sampled_from([0, 0, 1, -1, 500]),
    ),
}
COMPARISONS = (EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)


@st.composite
def filters(draw: st.DrawFn) -> Filter:
    """Any filter that Spark may hand to a source, with nulls where SQL allows them."""
    name = draw(st.sampled_from(sorted(VALUES)))
    values = st.none() | VALUES[name]
    one: Filter = draw(
        st.one_of(
            st.sampled_from(COMPARISONS).flatmap(lambda kind: st.builds(kind, st.just((name,)), values)),
            st.builds(In, st.just((name,)), st.lists(values, min_size=1, max_size=4).map(tuple)),
            st.just(IsNotNull((name,))),
            st.just(StringStartsWith(("topic",), "p")),
        )
    )
    return Not(one) if draw(st.booleans()) else one


def read_by(narrowing: Narrowing) -> Iterator[Line]:
    """The lines that are where a narrowing says that rows are."""
    times = narrowing.times()
    for line in LINES:
        if not narrowing.has(line.topic, line.partition):
            continue
        if times and not times.start <= (line.timestamp - EPOCH) // timedelta(milliseconds=1) < times.end:
            continue
        if any(span.start <= line.offset < span.end for span in narrowing.offsets(1, 30)):
            yield line


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(filters(), max_size=4), st.booleans())
@example([In(("offset",), (2, 5))], True)
@example([LessThanOrEqual(("timestamp",), EPOCH + timedelta(milliseconds=5))], True)
@example([GreaterThan(("timestamp",), EPOCH + timedelta(milliseconds=5, microseconds=1))], True)
def test_what_is_read_and_passes_what_came_back_is_what_passes_all(some: list[Filter], times: bool) -> None:
    narrowing = Narrowing(times=times)
    back = list(narrowing.take(some))
    assert all(any(one is other for other in some) for one in back)
    assert all_pass(list(read_by(narrowing)), back) == all_pass(LINES, some)


def test_numbers_that_are_far_apart_are_read_by_themselves() -> None:
    assert spans(In(("offset",), (900_000, 7, 9))) == [(7, 10), (900_000, 900_001)]
    many = tuple(range(0, 5_000_000, 1_000))
    assert spans(In(("offset",), many)) == [(0, 4_999_001)]


def test_a_column_of_something_else_is_left_to_spark() -> None:
    some = [EqualTo(("key",), "7"), EqualTo(("offset", "inner"), 7), EqualTo(("offset",), True)]
    naive = GreaterThan(("timestamp",), datetime(2026, 11, 17))
    assert list(Narrowing(times=True).take([*some, naive])) == [*some, naive]


@pytest.fixture
def lines(client: Client, broker: RunningBroker, topic: str) -> list[Line]:
    """Messages in a topic with three partitions, in steps so that their times differ."""
    client.create_topic(topic, partitions=3)
    client.create_subscription(topic, "keeps", start="earliest")
    for step in range(12):
        client.publish_many(topic, [OutgoingMessage(partition=at % 3) for at in range(6 + step % 3)])
    found = read_with(broker, topic, [])
    assert len(found) == sum(6 + step % 3 for step in range(12))
    return found


def read_with(broker: RunningBroker, topic: str, some: Sequence[Filter]) -> list[Line]:
    """What a reader that was told of filters reads, less what Spark takes out of it."""
    reader = FilteredReader(ReadOptions.parse({"server": broker.url, "subscribe": topic}), MESSAGES)
    back = list(reader.pushFilters(list(some)))
    rows = [row for share in reader.partitions() for batch in reader.read(share) for row in batch.to_pylist()]
    lines = [Line(row["topic"], row["partition"], row["offset"], row["timestamp"]) for row in rows]
    return all_pass(lines, back)


def test_a_reader_finds_the_same_rows_with_filters_as_spark_without(
    broker: RunningBroker, topic: str, lines: list[Line]
) -> None:
    moments = sorted({line.timestamp for line in lines})
    middle, micro = moments[len(moments) // 2], timedelta(microseconds=1)
    for some in (
        [EqualTo(("partition",), 1), GreaterThan(("offset",), 5), LessThanOrEqual(("offset",), 9)],
        [In(("offset",), (2, 3, 11)), Not(EqualTo(("partition",), 0))],
        [EqualTo(("topic",), "another")],
        [GreaterThanOrEqual(("timestamp",), middle)],
        [GreaterThan(("timestamp",), middle)],
        [LessThan(("timestamp",), middle)],
        [LessThanOrEqual(("timestamp",), middle), GreaterThan(("offset",), 2)],
        [EqualTo(("timestamp",), middle)],
        [EqualTo(("timestamp",), middle + micro)],
        [In(("timestamp",), (moments[1], middle, moments[-1]))],
        [GreaterThan(("timestamp",), middle - micro), LessThan(("timestamp",), middle + micro)],
        [GreaterThan(("timestamp",), moments[-1])],
        [LessThan(("timestamp",), moments[0])],
    ):
        assert read_with(broker, topic, some) == all_pass(lines, some), some


def test_a_reader_with_filters_asks_only_for_what_they_leave(
    broker: RunningBroker, topic: str, lines: list[Line]
) -> None:
    reader = FilteredReader(ReadOptions.parse({"server": broker.url, "subscribe": topic}), MESSAGES)
    back = reader.pushFilters([EqualTo(("partition",), 1), EqualTo(("offset",), 7)])
    (share,) = reader.partitions()
    assert list(back) == []
    ranges = [piece.range for piece in share.pieces]  # type: ignore[attr-defined]
    assert [(range_.partition, range_.start, range_.end) for range_ in ranges] == [(1, 7, 8)]
    last = max(line.timestamp for line in lines)
    reader.pushFilters([GreaterThan(("timestamp",), last)])
    assert reader.partitions() == []
