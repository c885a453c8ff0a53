"""Rows into and out of Spark, against a plain PySpark job that does the same with redis-py.

The plain job keeps its rows in a stream of its own for each partition, reads it in mapInArrow and writes it
from foreachPartition, a thousand rows to a round trip: what one writes by hand in an afternoon. It has key
and value and nothing else; where it says so, all that our rows have.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow
from pyspark.sql import DataFrame, Row, SparkSession
from redis import Redis

from keylane import Client
from keylane_spark.session import session
from loadtest.report import Figure

PARTITIONS = 4
ROUNDS = 5
ROWS = 200_000
BODY = 100  # bytes
PAGE = 1_000
KEYS = 10_000
BODILESS = "key,topic,partition,offset,message_id,timestamp,event_time,attributes"
WINDOW = 3_600.0  # seconds; with less the sink warns
PLAIN = pyarrow.schema([("key", pyarrow.string()), ("value", pyarrow.binary())])
_TIME = pyarrow.timestamp("us", "UTC")
FULL = pyarrow.schema(
    [
        *PLAIN,
        ("topic", pyarrow.string()),
        ("partition", pyarrow.int32()),
        ("offset", pyarrow.int64()),
        ("message_id", pyarrow.string()),
        ("timestamp", _TIME),
        ("event_time", _TIME),
        ("attributes", pyarrow.map_(pyarrow.string(), pyarrow.string())),
    ]
)

Timed = Callable[[], None]


def stream_of(topic: str, partition: int) -> str:
    """The stream of the plain job that stands beside a partition."""
    return f"plain-{topic}-{partition}"


def rows(spark: SparkSession, count: int, *, value: bool = True) -> DataFrame:
    """Rows to write: a key of ten thousand, and a body."""
    made = spark.range(0, count, 1, PARTITIONS)
    key = f"concat('customer-', id % {KEYS}) AS key"
    return (
        made.selectExpr(key, f"cast(repeat('x', {BODY}) AS binary) AS value")
        if value
        else made.selectExpr(key)
    )


def write(frame: DataFrame, url: str, topic: str) -> None:
    """Publish rows as we do."""
    frame.write.format("keylane").option("server", url).option("topic", topic).mode("append").save()


def write_plainly(frame: DataFrame, redis_url: str, topic: str, *, full: bool = False) -> None:
    """Append rows to streams with a pipeline of redis-py."""

    def append(part: Iterator[Row]) -> None:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        stream = stream_of(topic, context.partitionId())
        more = {"produced": str(time.time_ns() // 1_000_000), "attributes": "{}"} if full else {}
        with Redis.from_url(redis_url) as redis:
            pipe = redis.pipeline(transaction=False)
            for row in part:
                pipe.xadd(stream, {"key": row.key, "value": row.value, **more})
                if len(pipe) == PAGE:
                    pipe.execute()
            pipe.execute()

    frame.foreachPartition(append)


def read(spark: SparkSession, url: str, topic: str, columns: str = "") -> None:
    """Read a topic as we do, the columns named or all; nothing is kept."""
    frame = spark.read.format("keylane").option("server", url).option("subscribe", topic)
    if columns:
        frame = frame.option("columns", columns)
    frame.load().write.format("noop").mode("overwrite").save()


def read_plainly(spark: SparkSession, redis_url: str, topic: str, *, full: bool = False) -> None:
    """Read the streams with redis-py: key and value, or all columns that ours have."""

    def pages(parts: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        with Redis.from_url(redis_url) as redis:
            for part in parts:
                for partition in part.column(0).to_pylist():
                    first, offset = "-", 1
                    while found := redis.xrange(stream_of(topic, partition), first, "+", count=PAGE):
                        first = f"({found[-1][0].decode()}"
                        yield (full_batch if full else plain_batch)(topic, partition, offset, found)
                        offset += len(found)

    columns = "key string, value binary"
    if full:
        columns += """, topic string, partition int, offset long, message_id string, timestamp timestamp,
            event_time timestamp, attributes map<string, string>"""
    frame = spark.range(0, PARTITIONS, 1, PARTITIONS).mapInArrow(pages, columns)
    frame.write.format("noop").mode("overwrite").save()


def plain_batch(_topic: str, _partition: int, _offset: int, found: list[Any]) -> pyarrow.RecordBatch:
    """Key and value."""
    keys = pyarrow.array([fields[b"key"] for _, fields in found]).cast(pyarrow.string())
    return pyarrow.RecordBatch.from_arrays(
        [keys, pyarrow.array([fields[b"value"] for _, fields in found])], schema=PLAIN
    )


def full_batch(topic: str, partition: int, offset: int, found: list[Any]) -> pyarrow.RecordBatch:
    """Every column that ours have."""
    ids = [id.decode() for id, _ in found]
    columns = [
        *plain_batch(topic, partition, offset, found).columns,
        pyarrow.array([topic] * len(found)),
        pyarrow.array([partition] * len(found), pyarrow.int32()),
        pyarrow.array(range(offset, offset + len(found))),
        pyarrow.array([f"{partition}:{id}" for id in ids]),
        pyarrow.array([int(id.partition("-")[0]) * 1_000 for id in ids], _TIME),
        pyarrow.array([int(fields[b"produced"]) * 1_000 for _, fields in found], _TIME),
        pyarrow.array(
            [list(json.loads(fields[b"attributes"]).items()) for _, fields in found], FULL[-1].type
        ),
    ]
    return pyarrow.RecordBatch.from_arrays(columns, schema=FULL)


def seconds(job: Timed) -> float:
    """How long a job takes."""
    begun = time.perf_counter()
    job()
    return time.perf_counter() - begun


def in_turn(ours: Timed, plain: Timed, rounds: int = ROUNDS) -> tuple[float, float]:
    """Median seconds of both, in turn; the first of each is to warm up."""
    found: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        pair = seconds(ours), seconds(plain)
        if number:
            found.append(pair)
    return statistics.median(pair[0] for pair in found), statistics.median(pair[1] for pair in found)


def against_plain(spark: SparkSession, url: str, redis_url: str) -> list[Figure]:
    """Rows a second written and read, both ways in the same run."""
    topic, full = "bench-spark", "bench-spark-full"
    with Client(url) as client, Redis.from_url(redis_url) as redis:
        client.create_topic(topic, partitions=PARTITIONS, dedupe_window=WINDOW)
        client.create_subscription(topic, "keeper", mode="cursor")
        frame = rows(spark, ROWS)
        wrote = in_turn(
            lambda: write(frame, url, topic),
            lambda: write_plainly(frame, redis_url, topic),
        )
        total = sum(offsets.latest - offsets.earliest for offsets in client.offsets(topic))
        took = in_turn(
            lambda: read(spark, url, topic, "key,value"), lambda: read_plainly(spark, redis_url, topic), 3
        )
        write_plainly(rows(spark, total), redis_url, full, full=True)
        whole = in_turn(
            lambda: read(spark, url, topic), lambda: read_plainly(spark, redis_url, full, full=True), 3
        )
        client.delete_topic(topic)
        redis.unlink(
            *(stream_of(name, partition) for name in (topic, full) for partition in range(PARTITIONS))
        )
    return [
        Figure("written from Spark, bodies of 100 bytes", ROWS / wrote[0], ROWS / wrote[1], 1.0, "rows/s"),
        Figure(
            "read into Spark, against key and value alone", total / took[0], total / took[1], 1.0, "rows/s"
        ),
        Figure(
            "read into Spark, against the same columns", total / whole[0], total / whole[1], None, "rows/s"
        ),
    ]


def growth(spark: SparkSession, url: str, large: int = 5_000_000, small: int = 100_000) -> list[Figure]:
    """What a row costs in a large topic and in a small one, each read and written whole."""
    found: dict[int, list[float]] = {}
    with Client(url) as client:
        for count in (small, large):
            topic = f"bench-spark-{count}"
            client.create_topic(topic, partitions=PARTITIONS, dedupe_window=WINDOW)
            client.create_subscription(topic, "keeper", mode="cursor")
            frame = rows(spark, count, value=False)
            wrote = seconds(lambda frame=frame, topic=topic: write(frame, url, topic))  # type: ignore[misc]
            took = statistics.median(
                seconds(lambda topic=topic: read(spark, url, topic, BODILESS))  # type: ignore[misc]
                for _ in range(3 if count == large else 7)
            )
            found[count] = [wrote / count * 1e6, took / count * 1e6]
            client.delete_topic(topic)
    return [
        Figure(
            f"a row {what}, {large:,} against {small:,}",
            found[large][at],
            found[small][at],
            1.2,
            "us",
            at_most=True,
        )
        for at, what in enumerate(("written from Spark", "read into Spark"))
    ]


def spark_session(**settings: Any) -> SparkSession:
    """A session for figures: two cores, no web page."""
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
    return session("keylane bench", master="local[2]", **quiet, **settings)


def run(url: str, redis_url: str) -> list[Figure]:
    """All figures of the data source."""
    spark = spark_session()
    try:
        return against_plain(spark, url, redis_url) + growth(spark, url)
    finally:
        spark.stop()
