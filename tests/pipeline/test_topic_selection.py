"""Which topics and partitions a batch reads, and between which times, without Spark."""

import json
from collections.abc import Callable
from datetime import datetime

import pytest

from keylane import Client, OutgoingMessage
from keylane.errors import InvalidArgument, TopicNotFound
from keylane_spark.source.batch import BatchReader
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.schema import MESSAGES
from tests.support.running import RunningBroker

Read = Callable[..., list[tuple[str, int, int]]]


@pytest.fixture
def rows(broker: RunningBroker) -> Read:
    """Reads as the options say: topic, partition and number of each message."""

    def rows(**options: str) -> list[tuple[str, int, int]]:
        reader = BatchReader(ReadOptions.parse({"server": broker.url, **options}), MESSAGES)
        found = [
            row for piece in reader.partitions() for batch in reader.read(piece) for row in batch.to_pylist()
        ]
        return sorted((row["topic"], row["partition"], int(row["value"])) for row in found)

    return rows


def fill(client: Client, topic: str, numbers: range, *, partitions: int = 3) -> None:
    """Publish numbered messages, one after the other to each partition."""
    messages = [OutgoingMessage(str(at), partition=at % partitions) for at in numbers]
    client.publish_many(topic, messages)


def make(client: Client, topic: str, *, partitions: int = 3) -> None:
    client.create_topic(topic, partitions=partitions)
    client.create_subscription(topic, "keeps", start="earliest")


def published(client: Client, topic: str) -> dict[tuple[int, int], int]:
    """When each was published, ms, by partition and offset."""
    found = {}
    for peeked in client.peek(topic, "keeps", limit=100):
        partition, _, rest = peeked.id.partition(":")
        found[int(partition), int(rest.rpartition("-")[2])] = ms(peeked.published_at)
    return found


def ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def test_topics_are_read_whose_whole_name_matches(client: Client, topic: str, rows: Read) -> None:
    for name in (f"{topic}-1", f"{topic}-2", f"{topic}-2.old"):
        make(client, name, partitions=1)
        fill(client, name, range(2), partitions=1)
    assert {name for name, _, _ in rows(subscribePattern=f"{topic}-[12]")} == {f"{topic}-1", f"{topic}-2"}
    assert len(rows(subscribePattern=f"{topic}.*")) == 6
    with pytest.raises(TopicNotFound, match=f"no topic matches option 'subscribePattern', '{topic}-9'"):
        rows(subscribePattern=f"{topic}-9")


def test_only_partitions_that_are_assigned_are_read(client: Client, topic: str, rows: Read) -> None:
    make(client, topic)
    fill(client, topic, range(9))
    assert rows(assign=json.dumps({topic: [0, 2]})) == [
        *((topic, 0, at) for at in (0, 3, 6)),
        *((topic, 2, at) for at in (2, 5, 8)),
    ]
    start = {topic: {"2": 3}}
    assert rows(assign=json.dumps({topic: [2]}), startingOffsets=json.dumps(start)) == [(topic, 2, 8)]
    with pytest.raises(InvalidArgument, match="names partition 3 of"):
        rows(assign=json.dumps({topic: [0, 3]}))


@pytest.mark.slow
def test_a_batch_is_what_was_published_from_one_time_to_before_another(
    client: Client, topic: str, rows: Read
) -> None:
    make(client, topic)
    for at in range(0, 30, 3):
        fill(client, topic, range(at, at + 3))
    times = published(client, topic)
    distinct = sorted(set(times.values()))
    first, second = distinct[len(distinct) // 3], distinct[-1]

    def between(least: dict[int, int], most: dict[int, int]) -> list[tuple[str, int, int]]:
        """What was published at the least of its partition or later, and before the most of it."""
        return sorted(
            (topic, partition, (entry - 1) * 3 + partition)
            for (partition, entry), at in times.items()
            if least.get(partition, 0) <= at < most.get(partition, at + 1)
        )

    every = range(3)
    lower, upper = dict.fromkeys(every, first), dict.fromkeys(every, second)
    assert rows(subscribe=topic, startingTimestamp=str(first), endingTimestamp=str(second)) == between(
        lower, upper
    )
    assert rows(subscribe=topic, endingTimestamp=str(first)) == between({}, lower)
    assert len(rows(subscribe=topic, endingTimestamp=str(second + 86_400_000))) == 30
    assert rows(subscribe=topic, startingTimestamp=str(second), endingTimestamp=str(first)) == []
    # A partition for which no time is given is read from the earliest and to the latest.
    each = {0: first, 1: second}
    text = json.dumps({topic: each})
    assert rows(subscribe=topic, startingOffsetsByTimestamp=text) == between(each, {})
    assert rows(subscribe=topic, endingOffsetsByTimestamp=text) == between({}, each)
    with pytest.raises(InvalidArgument, match="'endingOffsetsByTimestamp' has a position in partition 5"):
        rows(subscribe=topic, endingOffsetsByTimestamp=json.dumps({topic: {"5": first}}))
