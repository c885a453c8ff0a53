"""The sink in a batch job: rows become messages, each once, with what their columns say."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, StructField, StructType

from keylane import Client, Tally
from keylane_spark.sink.writer import Written, batch_writer, report
from tests.pipeline.inbox import Arrived, arrivals, by_key, make_topic, problems_of
from tests.support.running import RunningBroker


@pytest.fixture
def write(broker: RunningBroker) -> Callable[..., None]:
    def write(frame: DataFrame, **options: str) -> None:
        frame.write.format("keylane").options(server=broker.url, **options).mode("append").save()

    return write


def contents(messages: list[Arrived]) -> Counter[tuple[str | None, bytes]]:
    return Counter((message.key, message.data) for message in messages)


def test_rows_arrive_with_keys_bodies_and_attributes(
    spark: SparkSession, broker: RunningBroker, client: Client, topic: str, write: Callable[..., None]
) -> None:
    make_topic(client, topic)
    rows = [
        ("a", b"1", {"colour": "blue", "size": "7"}),
        ("Zürich", b"2", None),
        (None, b"3", {}),
        ("a", None, None),
    ]
    frame = spark.createDataFrame(rows, "key string, value binary, attributes map<string,string>").coalesce(1)
    write(frame, topic=topic)
    found = arrivals(client, topic)
    assert contents(found) == Counter([("a", b"1"), ("Zürich", b"2"), (None, b"3"), ("a", b"")])
    assert [message.attributes for message in found if message.attributes] == [
        {"colour": "blue", "size": "7"}
    ]
    assert by_key(found)["a"] == [b"1", b""]
    assert problems_of(broker, topic) == []


def test_text_values_and_binary_keys_are_taken(
    spark: SparkSession, client: Client, topic: str, write: Callable[..., None]
) -> None:
    make_topic(client, topic)
    write(spark.sql("SELECT 'Grüße' AS value, cast('käse' AS binary) AS key"), topic=topic)
    [message] = arrivals(client, topic)
    assert (message.key, message.data) == ("käse", "Grüße".encode())


def test_rows_name_partition_uid_and_topic(
    spark: SparkSession, client: Client, make_topic_name: Callable[[], str], write: Callable[..., None]
) -> None:
    one, two = (make_topic(client, make_topic_name()) for _ in range(2))
    rows = [(one, 3, "u-1", "a"), (two, 1, "u-1", "b"), (one, None, None, "c"), (one, 3, "u-1", "again")]
    frame = spark.createDataFrame(rows, "topic string, partition int, uid string, value string").coalesce(1)
    write(frame)
    first, second = arrivals(client, one), arrivals(client, two)
    assert contents(first) == Counter([(None, b"a"), (None, b"c")]), "the second of a uid is a duplicate"
    assert [(message.partition, message.data) for message in first if message.uid == "u-1"] == [(3, b"a")]
    assert [(message.partition, message.uid, message.data) for message in second] == [(1, "u-1", b"b")]


def test_the_option_counts_where_rows_name_another_topic(
    spark: SparkSession, client: Client, topic: str, write: Callable[..., None]
) -> None:
    make_topic(client, topic)
    write(spark.sql("SELECT 'elsewhere' AS topic, 'x' AS value"), topic=topic)
    assert [message.data for message in arrivals(client, topic)] == [b"x"]


def test_rows_that_are_the_same_are_all_published(
    spark: SparkSession, client: Client, topic: str, write: Callable[..., None]
) -> None:
    make_topic(client, topic)
    frame = spark.range(0, 30_000, 1, 3).selectExpr("'k' AS key", "cast(id % 7 AS string) AS value")
    write(frame, topic=topic)
    write(frame, topic=topic)
    expected = Counter(str(number % 7).encode() for number in range(30_000))
    assert Counter(message.data for message in arrivals(client, topic)) == expected + expected


def test_the_order_of_a_key_in_a_task_is_kept(
    spark: SparkSession, client: Client, topic: str, write: Callable[..., None]
) -> None:
    make_topic(client, topic, partitions=3)
    frame = spark.range(0, 40_000, 1, 2).selectExpr(
        "concat('k', id % 97) AS key", "cast(id AS string) AS value"
    )
    write(frame, topic=topic)
    lanes = by_key(arrivals(client, topic))
    assert sum(map(len, lanes.values())) == 40_000
    for values in lanes.values():
        for half in (range(20_000), range(20_000, 40_000)):  # a task each
            numbers = [int(value) for value in values if int(value) in half]
            assert numbers == sorted(numbers)


def stumble(topic: str, server: str, shuffled: bool) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """For mapPartitions: the first attempt fails when a part is published, the second may shuffle rows."""

    def run(partition: Iterable[Any]) -> Iterator[Any]:
        task, rows = TaskContext.get(), list(partition)
        assert task is not None
        if task.attemptNumber() == 0:
            yield from rows[:1_500]
            with Client(server) as client:
                end = time.monotonic() + 120
                while not client.describe_topic(topic).published:
                    assert time.monotonic() < end
                    time.sleep(0.02)
            raise ConnectionError("planted")
        if shuffled:
            random.Random(7).shuffle(rows)
        yield from rows

    return run


@contextmanager
def small_batches(spark: SparkSession) -> Iterator[None]:
    """A row leaves a task before all of them have come."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, 100)
    try:
        yield
    finally:
        assert before is not None
        spark.conf.set(name, before)


@pytest.mark.parametrize("shuffled", [False, True], ids=["in the same order", "in another order"])
def test_a_task_that_runs_again_publishes_every_row_once(
    spark: SparkSession,
    broker: RunningBroker,
    client: Client,
    topic: str,
    write: Callable[..., None],
    shuffled: bool,
) -> None:
    make_topic(client, topic)
    frame = spark.range(0, 4_000, 1, 2).selectExpr(
        "concat('k', id % 50) AS key", "concat(id div 2000, '-', id % 500, repeat(' ', 200)) AS value"
    )
    with small_batches(spark):
        rows = frame.rdd.mapPartitions(stumble(topic, broker.url, shuffled))
        write(spark.createDataFrame(rows, frame.schema), topic=topic)
    found = arrivals(client, topic)
    all_rows = [(f"k{n % 50}", f"{n // 2_000}-{n % 500}{' ' * 200}".encode()) for n in range(4_000)]
    assert contents(found) == Counter(all_rows)
    if not shuffled:
        for key, values in by_key(found).items():
            for task in (b"0-", b"1-"):
                ours = [value for value in values if value.startswith(task)]
                assert ours == [value for name, value in all_rows if name == key and value.startswith(task)]
    assert problems_of(broker, topic) == []


def test_rows_wait_for_their_time(
    spark: SparkSession, client: Client, topic: str, write: Callable[..., None]
) -> None:
    make_topic(client, topic)
    rows = "(1, 3600, NULL), (2, 0.5D, NULL), (3, NULL, now() + INTERVAL 1 HOUR), (4, NULL, now())"
    write(
        spark.sql(f"SELECT cast(col1 AS string) value, col2 delay, col3 deliver_at FROM VALUES {rows}"),
        topic=topic,
    )
    end = time.monotonic() + 120
    while client.describe_topic(topic).published < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert sorted(message.data for message in arrivals(client, topic)) == [b"2", b"4"]
    assert client.describe_topic(topic).delayed == 2


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ("'a' AS value, 1 AS offset", "column 'offset' cannot be published: the sink takes value, key"),
        ("1 AS value", "column 'value' is int: it has to be binary or string"),
        ("'a' AS value, map('a', 1) AS attributes", "column 'attributes' is map<string,int>"),
        ("'a' AS value, 'x' AS partition", "column 'partition' is string"),
    ],
)
def test_columns_that_cannot_be_published_are_refused_by_name(
    spark: SparkSession, client: Client, topic: str, write: Callable[..., None], columns: str, complaint: str
) -> None:
    make_topic(client, topic)
    with pytest.raises(PySparkException, match=complaint.replace("(", r"\(")):
        write(spark.sql(f"SELECT {columns}"), topic=topic)
    assert client.describe_topic(topic).published == 0


def test_what_the_broker_refuses_fails_the_job_by_name(
    spark: SparkSession, client: Client, topic: str, write: Callable[..., None]
) -> None:
    make_topic(client, topic)
    frame = spark.sql("SELECT 'x' AS value")
    with pytest.raises(PySparkException, match=r"TopicNotFound: no topic 'no-such-topic'"):
        write(frame, topic="no-such-topic")
    with pytest.raises(PySparkException, match=r"no topic: name it with .option\('topic', …\)"):
        write(frame)
    with pytest.raises(PySparkException, match="no option 'topc' for writing; did you mean 'topic'"):
        write(frame, topc=topic)
    with pytest.raises(PySparkException, match="MessageTooLarge: 5000 bytes in a message's key"):
        write(spark.sql("SELECT repeat('k', 5000) AS key"), topic=topic)
    with pytest.raises(PySparkException, match="partition 9 is out of range: the topic has 0 to 3"):
        write(spark.sql("SELECT 'x' AS value, 9 AS partition"), topic=topic)
    with pytest.raises(PySparkException, match="durability"):
        write(frame, topic=topic, durability="eternal")
    assert client.describe_topic(topic).published == 0


def test_rows_that_nobody_is_owed_are_not_stored(
    spark: SparkSession, client: Client, topic: str, write: Callable[..., None]
) -> None:
    client.create_topic(topic, dedupe_window=60.0)
    write(spark.range(0, 12, 1, 2).selectExpr("cast(id AS string) AS value"), topic=topic)
    assert client.describe_topic(topic).published == 0


def test_the_driver_warns_of_rows_that_nobody_is_owed(caplog: pytest.LogCaptureFixture) -> None:
    tasks = [Written({"a": Tally(no_subscribers=5), "b": Tally(stored=1)}), None, Written({"a": Tally(7)})]
    report(tasks)
    assert [record.message for record in caplog.records] == [
        "5 rows for topic 'a' were not stored: it has no subscription; create one before you write"
    ]


def test_a_short_window_is_warned_of_where_the_job_begins(
    broker: RunningBroker, client: Client, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.create_topic(topic, dedupe_window=60.0)
    schema = StructType([StructField("value", BinaryType())])
    batch_writer({"server": broker.url, "topic": topic}, schema)
    assert f"topic '{topic}' forgets uids after 60 s" in caplog.text
