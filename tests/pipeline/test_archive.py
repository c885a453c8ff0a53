"""The archive: each message once, in folders by topic and date, for whoever reads the files."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from keylane import Client, ConsumerReplaced, InvalidArgument, OutgoingMessage, SubscriptionBusy
from keylane_spark.archiving.archive import COLUMNS, Archive, Archived, ArchiveOptions, run
from keylane_spark.archiving.compaction import MergeLimits, compact
from keylane_spark.archiving.locks import archiving, compacting
from keylane_spark.files import LocalFiles
from keylane_spark.source.schema import MESSAGES
from tests.pipeline.archives import MIDNIGHT, YESTERDAY, files_in, ids_in, write_rows
from tests.support.running import RunningBroker

pytestmark = pytest.mark.slow  # dozens of Spark jobs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def archive(spark: SparkSession, broker: RunningBroker, topic: str, path: Path) -> Callable[..., Archived]:
    def archive(**options: Any) -> Archived:
        given = {"server": broker.url, "topics": [topic], "path": str(path), **options}
        return run(spark, ArchiveOptions(**given), lambda text: None)

    return archive


def publish(client: Client, topic: str, count: int) -> Counter[str]:
    messages = [
        OutgoingMessage(b"%d" % n, key=f"k{n % 5}", attributes={"n": str(n)} if n % 2 else None)
        for n in range(count)
    ]
    return Counter(str(published.id) for published in client.publish_many(topic, messages))


def test_runs_add_what_is_new_and_nothing_twice(
    client: Client, topic: str, path: Path, archive: Callable[..., Archived]
) -> None:
    client.create_topic(topic, partitions=3)
    client.create_subscription(topic, "archive", mode="cursor", start="earliest")
    expected = publish(client, topic, 300)
    first = archive()
    assert (first.rows, first.batches) == (300, 1)
    assert ids_in(path) == expected
    expected += publish(client, topic, 200)
    second = archive(batch_rows=90)
    assert second.rows == 200
    assert second.batches >= 3
    assert ids_in(path) == expected
    assert archive().rows == 0
    assert client.describe_subscription(topic, "archive").backlog == 0, "drained, the tail too"


def test_topics_come_and_go_and_each_row_is_there_once(
    client: Client, topic: str, path: Path, archive: Callable[..., Archived]
) -> None:
    a, b = topic, f"{topic}-b"
    expected: Counter[str] = Counter()
    for name in (a, b):
        client.create_topic(name, partitions=1, exist_ok=True)
        client.create_subscription(name, "archive", mode="cursor", start="earliest")
    for topics in ([a], [a, b], [b], [b, a]):
        for name in (a, b):
            expected += Counter(f"{name}/{one}" for one in publish(client, name, 10).elements())
        archive(topics=topics)
    found: Counter[str] = Counter()
    for name in (a, b):
        found += Counter(f"{name}/{one}" for one in ids_in(path / f"topic={name}").elements())
    assert found == expected


def test_a_second_writer_is_refused_and_hears_of_the_first(
    client: Client, topic: str, path: Path, archive: Callable[..., Archived]
) -> None:
    client.create_topic(topic, partitions=1)
    for name in ("archive", "other"):
        client.create_subscription(topic, name, mode="cursor", start="earliest")
    expected = publish(client, topic, 10)
    with (
        archiving(LocalFiles(), str(path), "archive"),
        pytest.raises(
            SubscriptionBusy, match=r"process \d+ on \S+ is archiving into .* with subscription 'archive'"
        ),
    ):
        archive()
    assert archive().rows == 10
    with pytest.raises(
        InvalidArgument, match=r"is archived into .* by subscription 'archive', and its rows wo"
    ):
        archive(subscription="other")
    assert ids_in(path) == expected


def test_a_row_holds_all_that_a_message_has(
    client: Client, topic: str, path: Path, archive: Callable[..., Archived]
) -> None:
    client.create_topic(topic, partitions=1)
    client.create_subscription(topic, "archive", mode="cursor")
    published = client.publish(topic, b"42", key="customer-7", attributes={"colour": "blue"})
    archive()
    [file] = path.rglob("*.parquet")
    [row] = pq.ParquetFile(file).read().to_pylist()
    day = row["timestamp"].astimezone(UTC).date()  # of UTC for every reader
    assert file.parent == path / f"topic={topic}" / f"date={day}"
    assert tuple(row) == COLUMNS
    assert (row["key"], row["value"], row["message_id"]) == ("customer-7", b"42", published.id)
    assert (row["partition"], row["offset"], dict(row["attributes"])) == (0, 1, {"colour": "blue"})


# A batch at a time, as Spark hands them over.


def made(spark: SparkSession, count: int, tasks: int = 2) -> DataFrame:
    """Rows as the source has them: half of them before a midnight of UTC, half after it."""
    moments = [datetime.fromtimestamp(MIDNIGHT + second, UTC) for second in (-1, 0)]
    rows: list[Any] = [
        (f"k{n}", b"%d" % n, "orders", n % 2, n, f"{n % 2}:1-{n}", moments[n % 2], moments[0], {})
        for n in range(count)
    ]
    return spark.createDataFrame(rows, MESSAGES).repartition(tasks, "offset")


def begun(spark: SparkSession, path: Path, **options: Any) -> Archive:
    """An archive at which the query has begun, and has been killed."""
    given = ArchiveOptions(server="keylane://nowhere", topics=["orders"], path=str(path), **options)
    metadata = Path(given.state) / "checkpoint" / "metadata"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(json.dumps({"id": "11112222-query"}))
    return Archive(spark, given, lambda text: None)


def restarted(spark: SparkSession, path: Path) -> Archive:
    archive = begun(spark, path)
    archive.recover()
    return archive


def test_the_date_is_that_of_utc_wherever_the_session_is(spark: SparkSession, path: Path) -> None:
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        begun(spark, path).write(made(spark, 10), 0)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert ids_in(path / "topic=orders" / "date=2026-11-16") == Counter(f"0:1-{n}" for n in range(0, 10, 2))
    assert ids_in(path / "topic=orders" / "date=2026-11-17") == Counter(f"1:1-{n}" for n in range(1, 10, 2))


def test_a_batch_that_comes_again_is_not_added_again(spark: SparkSession, path: Path) -> None:
    begun(spark, path).write(made(spark, 10), 0)
    before = files_in(path)
    restarted(spark, path).write(made(spark, 10, tasks=1), 0)
    assert files_in(path) == before
    restarted(spark, path).write(made(spark, 10), 1)
    assert set(ids_in(path).values()) == {2}, "another batch is"


# Compaction


def test_small_files_become_one_in_the_order_of_offsets(spark: SparkSession, path: Path) -> None:
    for number in range(12):
        write_rows(path / YESTERDAY / f"part-{number}.parquet", range(2 * number, 400, 24))
    lines: list[str] = []
    done = compact(spark, str(path), MergeLimits(), lines.append)
    assert (done.compactions, done.merged, done.rows) == (1, 12, 200)
    [file] = path.rglob("*.parquet")
    merged = pq.ParquetFile(file).read()
    assert merged.column("offset").to_pylist() == list(range(0, 400, 2))
    assert str(merged.schema.field("timestamp").type) == "timestamp[us, tz=UTC]"
    assert merged.column_names == list(COLUMNS)
    with pytest.raises(InvalidArgument, match="there is no archive at"):
        compact(spark, str(path / "nowhere"), MergeLimits(), print)


def test_an_archive_goes_on_while_another_process_merges_its_files(spark: SparkSession, path: Path) -> None:
    lines: list[str] = []
    archive = begun(spark, path, compact_every=1)
    archive._progress = lines.append
    with compacting(LocalFiles(), str(path)):
        archive.write(made(spark, 10), 0)
    assert "not merging files now: process" in lines[-1]
    assert sum(ids_in(path).values()) == 10


def test_a_whole_file_system_is_no_place_for_an_archive(spark: SparkSession) -> None:
    for path in ("/", "file:///"):
        with pytest.raises(InvalidArgument, match="is a whole file system: name a folder in it"):
            run(spark, ArchiveOptions(server="keylane://nowhere", topics=["orders"], path=path))


def test_every_so_many_batches_files_are_merged(
    client: Client, topic: str, path: Path, archive: Callable[..., Archived]
) -> None:
    client.create_topic(topic, partitions=4)
    client.create_subscription(topic, "archive", mode="cursor", start="earliest")
    expected = publish(client, topic, 400)
    result = archive(batch_rows=100, compact_every=3, limits=MergeLimits(files=3))
    assert result.compactions >= 1
    assert len(list(path.rglob("*.parquet"))) == result.files - result.merged + result.compactions
    assert ids_in(path) == expected


def test_a_state_from_a_backup_does_not_take_the_place_of_rows(
    client: Client, topic: str, path: Path, archive: Callable[..., Archived]
) -> None:
    client.create_topic(topic, partitions=1)
    client.create_subscription(topic, "archive", mode="cursor", start="earliest")
    expected = publish(client, topic, 30)
    archive()
    state = path.parent / "archive.keylane"
    shutil.copytree(state, path.parent / "backup")
    expected += publish(client, topic, 20)
    archive()  # batch 1
    shutil.rmtree(state)
    (path.parent / "backup").rename(state)
    expected += publish(client, topic, 10)
    result = archive(fail_on_data_loss=False)  # batch 1 again, with other rows
    assert result.rows == 10
    assert ids_in(path) == expected


def test_a_batch_that_the_checkpoint_has_lost_is_not_taken_for_done(
    client: Client,
    topic: str,
    path: Path,
    archive: Callable[..., Archived],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client.create_topic(topic, partitions=1)
    client.create_subscription(topic, "archive", mode="cursor", start="earliest")
    publish(client, topic, 10)
    archive()
    publish(client, topic, 10)
    write = Archive.write

    def write_and_die(self: Archive, frame: DataFrame, batch: int) -> None:
        write(self, frame, batch)
        raise RuntimeError("power cut")

    monkeypatch.setattr(Archive, "write", write_and_die)
    with pytest.raises(StreamingQueryException, match="power cut"):
        archive()  # batch 1
    monkeypatch.setattr(Archive, "write", write)
    state = path.parent / "archive.keylane"
    for file in state.rglob("checkpoint/offsets/*1*"):
        file.unlink()
    expected = publish(client, topic, 10)
    with pytest.raises(StreamingQueryException, match=r"batch 1 of .* is planned with other rows"):
        archive()
    with pytest.raises(ConsumerReplaced, match=r"batch 1 of .* is planned with other rows"):
        archive()
    assert client.describe_subscription(topic, "archive").backlog == 20, "nothing of it is drained"
    [note] = state.rglob("notes/*.json")
    note.unlink()  # as the error says
    assert archive().rows == 20
    assert expected <= ids_in(path)


def test_an_archive_can_be_on_any_file_system_of_hadoop(
    client: Client, topic: str, elsewhere: str, path: Path, archive: Callable[..., Archived]
) -> None:
    client.create_topic(topic, partitions=1)
    for name in ("archive", "other"):
        client.create_subscription(topic, name, mode="cursor", start="earliest")
    expected = publish(client, topic, 30)
    options = {"path": f"{elsewhere}/archive", "compact_every": 2, "limits": MergeLimits(files=2)}
    first = archive(**options, batch_rows=15)
    assert (first.rows, first.batches, first.compactions) == (30, 2, 1)
    expected += publish(client, topic, 10)
    assert archive(**options).rows == 10
    assert ids_in(path) == expected
    assert len(list(path.rglob("*.parquet"))) == 2
    with pytest.raises(InvalidArgument, match="by subscription 'archive', and its rows would"):
        archive(**options, subscription="other")
    assert not list(Path().glob("viewfs*")), "nobody took it for a path of this machine"
