"""Streams of topics that match a pattern, and of some partitions: the reader without Spark, then with it."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming.datasource import ReadAllAvailable

from keylane import Client, OutgoingMessage
from keylane.errors import InvalidArgument, SubscriptionBusy
from keylane_spark.errors import DataLoss
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.schema import MESSAGES
from keylane_spark.source.stream import StreamReader
from tests.pipeline.tables import Table, numbers, wait
from tests.support.running import RunningBroker

Open = Callable[..., StreamReader]


@pytest.fixture
def reader(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Makes readers that look at once for what is new."""
    monkeypatch.setattr("keylane_spark.source.query._ASK", 0.0)
    monkeypatch.setattr("keylane_spark.source.topic_watch._LOOK", 0.0)
    with ExitStack() as stack:

        def reader(**options: str) -> StreamReader:
            given = {"server": broker.url, "subscription": "spark", **options}
            made = StreamReader(ReadOptions.parse(given, streaming=True), MESSAGES)
            stack.callback(made.stop)
            return made

        yield reader


def rows(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    """The numbers that a batch has."""
    shares = reader.partitions(start, end)
    found = [row for share in shares for batch in reader.read(share) for row in batch.to_pylist()]
    return sorted(int(row["value"]) for row in found)


def latest(reader: StreamReader, start: dict[str, Any]) -> dict[str, Any]:
    """The end of a batch, from and to a checkpoint."""
    end: dict[str, Any] = json.loads(json.dumps(reader.latestOffset(start, ReadAllAvailable())))
    return end


def make(client: Client, topic: str, values: range = range(0), *, partitions: int = 1) -> None:
    """A topic with numbered messages in it, in turn in each partition."""
    client.create_topic(topic, partitions=partitions)
    client.create_subscription(topic, "keeps", start="earliest")
    fill(client, topic, values, partitions=partitions)


def fill(client: Client, topic: str, values: range, *, partitions: int = 1) -> None:
    client.publish_many(topic, [OutgoingMessage(str(at), partition=at % partitions) for at in values])


def backlog(client: Client, topic: str) -> int:
    return client.describe_subscription(topic, "spark").backlog


def test_topics_that_match_later_are_read_from_the_earliest_without_a_restart(
    client: Client, topic: str, reader: Open
) -> None:
    make(client, f"{topic}-1", range(3))
    made = reader(subscribePattern=f"{topic}-[0-9]", startingOffsets="latest")
    start = made.initialOffset()
    make(client, f"{topic}-2", range(10, 14))
    make(client, f"{topic}-other", range(20, 24))
    end = latest(made, start)
    assert not client.claim(f"{topic}-2", "spark", "thief").granted, "it is claimed like the others"
    assert rows(made, start, end) == [10, 11, 12, 13]
    assert latest(made, end) == end
    assert (backlog(client, f"{topic}-1"), backlog(client, f"{topic}-2")) == (0, 0)
    assert client.describe_subscription(f"{topic}-2", "spark").mode == "cursor"
    assert client.describe_topic(f"{topic}-other").subscriptions == ["keeps"]


def test_a_query_that_is_started_before_the_first_topic_waits_for_one(
    client: Client, topic: str, reader: Open
) -> None:
    made = reader(subscribePattern=f"{topic}-.*")
    start = made.initialOffset()
    assert latest(made, start) == start
    make(client, f"{topic}-1", range(3))
    end = latest(made, start)
    assert rows(made, start, end) == [0, 1, 2]


def test_a_batch_with_a_new_topic_is_read_again_after_a_crash(
    client: Client, topic: str, reader: Open
) -> None:
    make(client, f"{topic}-1", range(3))
    made = reader(subscribePattern=f"{topic}-.*", sessionTimeout="1")
    start = made.initialOffset()
    make(client, f"{topic}-2", range(10, 14))
    end = latest(made, start)
    made.stop()
    fill(client, f"{topic}-2", range(14, 20))
    again = reader(subscribePattern=f"{topic}-.*")
    assert rows(again, start, end) == [0, 1, 2, 10, 11, 12, 13]
    further = latest(again, end)
    assert rows(again, end, further) == list(range(14, 20))


@pytest.mark.parametrize("running", [True, False])
def test_a_topic_that_is_deleted_under_a_query_is_a_loss(
    client: Client, topic: str, reader: Open, running: bool
) -> None:
    for at in (1, 2):
        make(client, f"{topic}-{at}", range(at * 10, at * 10 + 3))
    pattern = f"{topic}-.*"
    strict = reader(subscribePattern=pattern)
    start = strict.initialOffset()
    end = latest(strict, start)
    assert latest(strict, end) == end, "and what was read is drained"
    client.delete_topic(f"{topic}-2")
    for _ in range(2):
        if not running:
            strict.stop()
            strict = reader(subscribePattern=pattern)
        with pytest.raises(DataLoss, match=f"topic '{topic}-2' was deleted"):
            latest(strict, end)
    strict.stop()
    careless = reader(subscribePattern=pattern, failOnDataLoss="false")
    assert rows(careless, start, end) == [10, 11, 12], (
        "a batch that was planned is read as far as it is there"
    )
    further = latest(careless, end)
    assert f"{topic}-2" not in further
    fill(client, f"{topic}-1", range(13, 15))
    assert rows(careless, further, latest(careless, further)) == [13, 14]
    if running:
        make(client, f"{topic}-3", range(30, 33))
        start = latest(careless, further)
        client.delete_topic(f"{topic}-3")
        fill(client, f"{topic}-1", range(15, 17))
        assert rows(careless, start, latest(careless, start)) == [15, 16]


@pytest.mark.slow
def test_only_partitions_that_are_assigned_are_read_and_drained(
    client: Client, topic: str, reader: Open
) -> None:
    make(client, topic, range(9), partitions=3)
    made = reader(assign=json.dumps({topic: [0, 2]}))
    start = made.initialOffset()
    assert start[topic].keys() == {"0", "2"}
    end = latest(made, start)
    assert rows(made, start, end) == [0, 2, 3, 5, 6, 8]
    assert latest(made, end) == end
    assert backlog(client, topic) == 3, "what is not assigned is kept for who reads it"
    with pytest.raises(SubscriptionBusy, match="two"):
        reader(assign=json.dumps({topic: [1]}), sessionTimeout="2").initialOffset()
    made.stop()
    other = reader(assign=json.dumps({topic: [1]}))
    start = other.initialOffset()
    end = latest(other, start)
    assert rows(other, start, end) == [1, 4, 7]
    assert latest(other, end) == end
    assert backlog(client, topic) == 0
    other.stop()
    with pytest.raises(InvalidArgument, match="option 'assign' names partition 3"):
        reader(assign=json.dumps({topic: [3]})).initialOffset()


def test_partitions_are_added_to_and_taken_from_what_is_assigned(
    client: Client, topic: str, reader: Open
) -> None:
    make(client, topic, range(9), partitions=3)
    made = reader(assign=json.dumps({topic: [0, 1]}))
    start = made.initialOffset()
    end = latest(made, start)
    assert rows(made, start, end) == [0, 1, 3, 4, 6, 7]
    made.stop()
    fill(client, topic, range(9, 12), partitions=3)
    other = reader(assign=json.dumps({topic: [1, 2]}))
    further = latest(other, end)
    assert rows(other, end, further) == [2, 5, 8, 10, 11]
    assert latest(other, further) == further
    assert backlog(client, topic) == 4, "of partition 0 nothing is drained that was not said to be done"


def test_a_stream_starts_at_the_times_of_its_partitions(client: Client, topic: str, reader: Open) -> None:
    make(client, topic, range(0), partitions=2)
    for at in range(20):
        fill(client, topic, range(at, at + 1), partitions=2)
    times = {
        int(peeked.id.rpartition("-")[2]): round(peeked.published_at.timestamp() * 1000)
        for peeked in client.peek(topic, "keeps", limit=100)
        if peeked.id.startswith("1:")
    }
    moment = times[6]
    made = reader(subscribe=topic, startingOffsetsByTimestamp=json.dumps({topic: {"1": moment}}))
    start = made.initialOffset()
    assert rows(made, start, latest(made, start)) == sorted(
        [*range(0, 20, 2), *(2 * entry - 1 for entry, at in times.items() if at >= moment)]
    )


def test_a_topic_that_is_new_in_the_options_starts_where_they_say(
    client: Client, topic: str, reader: Open
) -> None:
    for at in (1, 2):
        make(client, f"{topic}-{at}", range(at * 10, at * 10 + 4))
    made = reader(subscribe=f"{topic}-1")
    start = made.initialOffset()
    end = latest(made, start)
    made.stop()
    both = f"{topic}-1,{topic}-2"
    positions = json.dumps({f"{topic}-2": {"0": 3}})
    other = reader(subscribe=both, startingOffsets=positions)
    assert rows(other, end, further := latest(other, end)) == [22, 23]
    other.stop()
    again = reader(subscribe=both, startingOffsets=positions)
    assert rows(again, end, further) == [22, 23], "also after a crash"


def test_spark_reads_topics_that_come_while_it_runs_and_waits_for_as_many_as_asked_for(
    client: Client, topic: str, stream: Callable[..., DataFrame], table: Table
) -> None:
    """As a user has it: a pattern, a least number of messages, and the longest wait for them."""
    make(client, f"{topic}-1", range(3))
    options = {"subscribePattern": f"{topic}-.*", "minOffsetsPerTrigger": "5", "maxTriggerDelay": "1h"}
    query = table.start(stream(**options))
    try:
        # The first batch does not wait.
        wait(lambda: _has(query, 3), query=query)
        make(client, f"{topic}-2", range(3, 7))
        # Four are too few: it is found, and waits for one more.
        wait(lambda: "spark" in client.describe_topic(f"{topic}-2").subscriptions, query=query)
        fill(client, f"{topic}-1", range(7, 8))
        wait(lambda: _has(query, 8), query=query)
    finally:
        query.stop()
    assert numbers(table) == list(range(8))
    assert [one.numInputRows for one in query.recentProgress if one.numInputRows] == [3, 5]


def _has(query: Any, count: int) -> bool:
    return bool(sum(one.numInputRows for one in query.recentProgress) == count)
