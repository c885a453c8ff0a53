"""The sink of a streaming query: exactly once, whatever is killed in the middle of a batch."""

import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from keylane import Client
from tests.pipeline.drivers import Driver
from tests.pipeline.inbox import Arrived, arrivals, by_key, make_topic, problems_of
from tests.support.running import RunningBroker

ROWS = 4_000  # of a file


def value_of(file: int, number: int) -> str:
    """Some are the same, also in all files; and of a length that fills the buffers between the processes."""
    return f"{file if number % 10 else 'any'}-{number % 1_000}".ljust(250)


def put_rows(folder: Path, file: int) -> None:
    """A file of rows."""
    numbers = range(file * ROWS, (file + 1) * ROWS)
    table = {"key": [f"k{n % 40}" for n in numbers], "value": [value_of(file, n) for n in numbers]}
    (folder / "rows").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), folder / "rows" / f"{file}.parquet")


def check(found: list[Arrived], files: int) -> None:
    """Every row once, and those of a key and file in the order of the file."""
    rows = [
        (f"k{n % 40}", value_of(file, n).encode())
        for file in range(files)
        for n in range(file * ROWS, (file + 1) * ROWS)
    ]
    assert Counter((message.key, message.data) for message in found) == Counter(rows)
    for key, values in by_key(found).items():
        for file in range(files):
            start = f"{file}-".encode()
            ours = [value for value in values if value.startswith(start)]
            assert ours == [value for name, value in rows if name == key and value.startswith(start)]


@pytest.fixture
def stream(spark: SparkSession, broker: RunningBroker, tmp_path: Path) -> Callable[..., None]:
    def stream(**options: str) -> None:
        frame = spark.readStream.schema("key string, value string").parquet(str(tmp_path / "rows"))
        query = (
            frame.writeStream.format("keylane")
            .options(**{"server": broker.url, "checkpointLocation": str(tmp_path / "checkpoint"), **options})
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(90)
        finally:
            query.stop()

    return stream


def test_a_query_goes_on_where_it_ended(
    client: Client, broker: RunningBroker, topic: str, tmp_path: Path, stream: Callable[..., None]
) -> None:
    make_topic(client, topic)
    put_rows(tmp_path, 0)
    stream(topic=topic)
    assert client.describe_topic(topic).published == ROWS
    put_rows(tmp_path, 1)
    stream(topic=topic)
    stream(topic=topic)
    check(arrivals(client, topic), 2)
    assert problems_of(broker, topic) == []


def test_a_batch_that_runs_again_adds_nothing(
    client: Client, topic: str, tmp_path: Path, stream: Callable[..., None]
) -> None:
    make_topic(client, topic)
    put_rows(tmp_path, 0)
    stream(topic=topic)
    # As if Spark had been killed between the sink's commit and its own.
    for file in (tmp_path / "checkpoint" / "commits").iterdir():
        file.unlink()
    stream(topic=topic)
    check(arrivals(client, topic), 1)


def test_a_query_that_cannot_write_says_why(
    client: Client, topic: str, tmp_path: Path, stream: Callable[..., None]
) -> None:
    put_rows(tmp_path, 0)
    with pytest.raises(PySparkException, match="no topic: name it with"):
        stream()
    with pytest.raises(PySparkException, match=f"TopicNotFound: no topic '{topic}'"):
        stream(topic=topic)
    make_topic(client, topic)
    stream(topic=topic)
    check(arrivals(client, topic), 1)


def test_what_changes_is_published_once_for_each_batch(
    spark: SparkSession, broker: RunningBroker, client: Client, topic: str, tmp_path: Path
) -> None:
    """As docs/spark.md has it for outputMode('update'), which Spark does not let a Python sink have."""
    make_topic(client, topic)
    put_rows(tmp_path, 0)
    rows = spark.readStream.schema("key string, value string").parquet(str(tmp_path / "rows"))
    counts = rows.groupBy("key").count()

    def publish(batch: DataFrame, number: int) -> None:
        uid = f"concat_ws(':', 'counts', {number}, key) AS uid"
        changed = batch.selectExpr("key", "CAST(count AS STRING) AS value", uid)
        changed.write.format("keylane").options(server=broker.url, topic=topic).mode("append").save()

    def run(writer: DataStreamWriter) -> None:
        query = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(90)
        finally:
            query.stop()

    for mode, complaint in (
        ("update", "keylane does not support Update mode"),
        ("complete", "use outputMode.'append'., or foreachBatch, with a column `uid`"),
    ):
        writer = counts.selectExpr("key", "CAST(count AS STRING) AS value").writeStream.outputMode(mode)
        sink = writer.format("keylane").options(server=broker.url, topic=topic)
        with pytest.raises(PySparkException, match=complaint):
            run(sink)
        shutil.rmtree(tmp_path / "c")
    for _ in range(2):
        run(counts.writeStream.outputMode("update").foreachBatch(publish))
        for file in (tmp_path / "c" / "commits").iterdir():
            file.unlink()  # as if Spark had been killed before its own commit
    found = Counter((message.key, message.data) for message in arrivals(client, topic))
    assert found == Counter((f"k{key}", b"100") for key in range(40))


def drive(
    broker: RunningBroker, topic: str, folder: Path, master: str, *more: str, **environment: str
) -> Driver:
    module = "tests.pipeline.sink_driver"
    words = (sys.executable, "-m", module, master, broker.url, topic, str(folder), *more)
    return Driver(*words, **environment)


@pytest.fixture
def held(tmp_path: Path, client: Client, topic: str, new_java: None) -> Path:
    """The folder of a job with two files to write; the pids of Javas that stand still come into `held`."""
    make_topic(client, topic)
    for file in range(2):
        put_rows(tmp_path, file)
    (tmp_path / "held").mkdir()
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_driver_that_is_killed_in_a_batch_goes_on_with_other_tasks_without_loss_or_duplicates(
    client: Client, broker: RunningBroker, topic: str, held: Path
) -> None:
    """The second one has another number of cores, and files are cut by that."""
    with drive(broker, topic, held, "local[2]", "0") as driver:
        driver.until(
            lambda: client.describe_topic(topic).published > 1_000 and any((held / "held").iterdir())
        )
    assert client.describe_topic(topic).published < 2 * ROWS
    (held / "gate").touch()
    with drive(broker, topic, held, "local[1]", "0") as driver:
        driver.finish()
    check(arrivals(client, topic), 2)
    assert problems_of(broker, topic) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_executor_that_is_killed_in_a_task_is_replaced_without_loss_or_duplicates(
    client: Client, broker: RunningBroker, topic: str, held: Path, spark_home: Path
) -> None:
    with drive(broker, topic, held, "local-cluster[2,1,1024]", SPARK_HOME=str(spark_home)) as driver:
        driver.until(
            lambda: len(list((held / "held").iterdir())) == 2 and client.describe_topic(topic).published
        )
        victim = int(sorted((held / "held").iterdir())[0].name)
        assert "CoarseGrainedExecutorBackend" in " ".join(psutil.Process(victim).cmdline())
        os.kill(victim, signal.SIGKILL)
        (held / "gate").touch()
        driver.finish()
    check(arrivals(client, topic), 2)
    assert problems_of(broker, topic) == []
