"""How much a batch of a stream takes, without Spark."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from keylane import Client, OutgoingMessage
from keylane.types import Page
from keylane_spark.source.batch_limits import BatchLimiter
from keylane_spark.source.options import BatchLimits, ReadOptions
from keylane_spark.source.positions import Positions, Range
from keylane_spark.source.schema import MESSAGES
from keylane_spark.source.stream import StreamReader
from tests.support.running import RunningBroker

BODIES = [1_000, 0, 10, 300_000, 7, 20_000]


def said(range_: Range, limit: int) -> Page:
    """A page of messages whose sizes are those of BODIES in turn, without every eleventh message."""
    entries = [at for at in range(range_.start, range_.end) if at % 11][:limit]
    following = entries[-1] + 1 if len(entries) == limit else range_.end
    pairs = [bound for entry in entries for bound in (entry, entry)]
    texts = [text for entry in entries for text in ("", "uid", f"1 1 - {size(entry) or ''} ")]
    return Page(pairs, texts, "1:1", following)


def size(entry: int) -> int:
    return BODIES[entry % len(BODIES)]


def taken(start: Positions, end: Positions) -> tuple[int, int]:
    """Messages and bytes between."""
    entries = [
        entry
        for topic, of in start.items()
        for partition, at in of.items()
        for entry in range(at, end[topic][partition])
        if entry % 11
    ]
    return len(entries), sum(map(size, entries))


@pytest.mark.parametrize("most", [1, 50_000, 10_000_000, 700_000_000])
def test_a_batch_has_no_more_bytes_than_allowed_and_nearly_as_many(most: int) -> None:
    admission = BatchLimiter(BatchLimits(max_bytes=most))
    start = {"a": {0: 1, 1: 17}, "b": {0: 5}}
    latest = {"a": {0: 9_001, 1: 3_017}, "b": {0: 5}}
    batches = 0
    while start != latest and batches < 200:
        end = admission.end(start, latest, said, wait=True)
        count, found = taken(start, end)
        assert end != start
        assert found <= most or count <= 1, "one that is too large comes alone"
        if end != latest:
            assert found > most - 4 * max(BODIES) or most < 4 * max(BODIES)
        start, batches = end, batches + 1


def test_sizes_are_looked_at_once() -> None:
    looked: list[Range] = []

    def read(range_: Range, limit: int) -> Page:
        page = said(range_, limit)
        looked.append(Range(range_.topic, range_.partition, range_.start, page.next))
        return page

    admission = BatchLimiter(BatchLimits(max_bytes=5_000_000))
    start, latest = {"a": {0: 1}}, {"a": {0: 20_001}}
    while start != latest:
        start = admission.end(start, latest, read, wait=True)
    assert sum(range_.size for range_ in looked) == 20_000


def test_a_limit_of_messages_counts_besides_that_of_bytes() -> None:
    admission = BatchLimiter(BatchLimits(max_offsets=3, max_bytes=10**9))
    start, latest = {"a": {0: 1}}, {"a": {0: 1_001}}
    assert admission.end(start, latest, said, wait=True) == {"a": {0: 4}}


def test_too_few_messages_wait_for_more_or_until_it_was_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000.0]
    monkeypatch.setattr("keylane_spark.source.batch_limits.time.monotonic", lambda: now[0])
    admission = BatchLimiter(BatchLimits(min_offsets=10, delay=60.0))
    start, few, enough = ({"a": {0: at}} for at in (1, 10, 11))
    assert admission.end(start, few, said, wait=True) == few, "the first does not wait"
    assert admission.end(start, few, said, wait=True) == start
    assert admission.end(start, few, said, wait=False) == few, "availableNow does not"
    assert admission.end(start, enough, said, wait=True) == enough
    now[0] += 59.0
    assert admission.end(start, few, said, wait=True) == start
    now[0] += 1.0
    assert admission.end(start, start, said, wait=True) == start
    assert admission.end(start, few, said, wait=True) == few
    assert admission.end(start, few, said, wait=True) == start, "the wait begins anew"


Open = Callable[..., StreamReader]


@pytest.fixture
def reader(broker: RunningBroker, topic: str) -> Iterator[Open]:
    """Makes readers of the test's topic."""
    with ExitStack() as stack:

        def reader(**options: str) -> StreamReader:
            given = {"server": broker.url, "subscribe": topic, "subscription": "spark", **options}
            made = StreamReader(ReadOptions.parse(given, streaming=True), MESSAGES)
            stack.callback(made.stop)
            return made

        yield reader


def rows(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[dict[str, Any]]:
    """What a batch has."""
    return [
        row
        for piece in reader.partitions(start, end)
        for batch in reader.read(piece)
        for row in batch.to_pylist()
    ]


def test_batches_of_a_stream_are_limited_by_bytes(client: Client, topic: str, reader: Open) -> None:
    client.create_topic(topic, partitions=2)
    client.create_subscription(topic, "spark", mode="cursor", start="earliest")
    client.publish_many(topic, [OutgoingMessage(b"x" * 100, partition=at % 2) for at in range(100)])
    made = reader(maxBytesPerTrigger="1000")
    limit = made.getDefaultReadLimit()
    start, batches = made.initialOffset(), []
    while (end := made.latestOffset(start, limit)) != start:
        batches.append(sum(len(row["value"]) for row in rows(made, start, end)))
        start = end
    assert batches == [1_000] * 10
    assert client.describe_subscription(topic, "spark").backlog == 0


def test_a_batch_that_is_to_have_all_has(client: Client, topic: str, reader: Open) -> None:
    client.create_topic(topic, partitions=1)
    client.create_subscription(topic, "spark", mode="cursor", start="earliest")
    client.publish_many(topic, [OutgoingMessage(str(at)) for at in range(5)])
    made = reader(maxOffsetsPerTrigger="2", minOffsetsPerTrigger="2")
    start = made.initialOffset()
    assert len(rows(made, start, made.latestOffset(start, ReadAllAvailable()))) == 5
    assert len(rows(made, start, made.latestOffset(start, made.getDefaultReadLimit()))) == 2
