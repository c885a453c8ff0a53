"""The archive: each message once, in folders by topic and date, for whoever reads the files."""

import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from client import Client, InvalidArgument, OutgoingMessage, Overloaded
from pipeline.archive import COLUMNS, Archive, Archived, Options, run
from pipeline.columns import MESSAGES
from pipeline.compaction import Compactor, Limits, compact
from pipeline.files import LocalFiles
from pipeline.swap import swap
from tests.running import RunningBroker

pytestmark = pytest.mark.slow  # dozens of Spark jobs

MIDNIGHT = datetime(2026, 11, 17, tzinfo=UTC).timestamp()


def ids_in(folder: Path) -> Counter[str]:
    """The message ids that a plain reader finds, which knows nothing but that files end in .parquet."""
    found: Counter[str] = Counter()
    for file in sorted(folder.rglob("*.parquet")):
        found.update(pq.ParquetFile(file).read(["message_id"]).column(0).to_pylist())
    return found


def files_in(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def archive(spark: SparkSession, broker: RunningBroker, topic: str, path: Path) -> Callable[..., Archived]:
    def archive(**options: Any) -> Archived:
        given = {"server": broker.url, "topics": [topic], "path": str(path), **options}
        return run(spark, Options(**given), lambda text: None)

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
    given = Options(server="keylane://nowhere", topics=["orders"], path=str(path), **options)
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


@pytest.mark.parametrize("moved", [0, 2])
def test_a_crash_while_files_are_moved_is_finished_by_the_next_start(
    spark: SparkSession, path: Path, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = iter(range(moved))

    def move(self: LocalFiles, source: str, target: str, real: Callable[..., None] = LocalFiles.move) -> None:
        if next(moves, None) is None:
            raise KeyboardInterrupt
        real(self, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "move", move)
        with pytest.raises(KeyboardInterrupt):
            begun(spark, path).write(made(spark, 40), 0)
    assert max(ids_in(path).values(), default=1) == 1
    archive = restarted(spark, path)
    assert ids_in(path) == Counter(f"{n % 2}:1-{n}" for n in range(40))
    archive.write(made(spark, 40, tasks=3), 0)
    assert ids_in(path) == Counter(f"{n % 2}:1-{n}" for n in range(40))


def test_a_crash_before_the_note_leaves_nothing_to_be_seen(
    spark: SparkSession, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: LocalFiles, path: str, text: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "write", write)
        with pytest.raises(KeyboardInterrupt):
            begun(spark, path).write(made(spark, 10), 0)
    assert not list(path.rglob("*.parquet"))
    restarted(spark, path).write(made(spark, 12), 0)
    assert sum(ids_in(path).values()) == 12
    assert "staging" not in " ".join(files_in(path.parent))


# Compaction


@pytest.fixture
def pieces(path: Path) -> tuple[str, Counter[str]]:
    """An archive of twelve small files in one folder, in no order, and what is in it."""
    folder = "topic=orders/date=2026-11-16"
    (path / folder).mkdir(parents=True)
    at = datetime.fromtimestamp(MIDNIGHT - 1, UTC)
    for number in range(12):
        offsets = range(2 * number, 400, 24)
        rows = {
            "key": ["k"] * len(offsets),
            "value": [b"%d" % offset for offset in offsets],
            "partition": pa.array([0] * len(offsets), pa.int32()),
            "offset": list(offsets),
            "message_id": [f"0:1-{offset}" for offset in offsets],
            "timestamp": pa.array([at] * len(offsets), pa.timestamp("us", "UTC")),
            "event_time": pa.array([at] * len(offsets), pa.timestamp("us", "UTC")),
            "attributes": pa.array([[]] * len(offsets), pa.map_(pa.string(), pa.string())),
        }
        pq.write_table(pa.table(rows), path / folder / f"part-{number}.parquet")
    expected = Counter(f"0:1-{offset}" for offset in range(0, 400, 2))
    assert ids_in(path) == expected
    return folder, expected


def test_small_files_become_one_in_the_order_of_offsets(
    spark: SparkSession, path: Path, pieces: tuple[str, Counter[str]]
) -> None:
    folder, expected = pieces
    lines: list[str] = []
    done = compact(spark, str(path), Limits(), lines.append)
    assert (done.compactions, done.merged, done.rows) == (1, 12, 200)
    assert lines == [f"{folder}: 12 files became one of 200 rows"]
    [file] = path.rglob("*.parquet")
    merged = pq.ParquetFile(file).read()
    assert merged.column("offset").to_pylist() == list(range(0, 400, 2))
    assert str(merged.schema.field("timestamp").type) == "timestamp[us, tz=UTC]"
    assert ids_in(path) == expected
    assert compact(spark, str(path), Limits(files=2), lines.append).compactions == 0, (
        "one file is none too many"
    )
    assert files_in(path.parent / "archive.keylane" / "compaction") == ["lock"], "nothing is left over"


def test_large_files_and_those_that_are_too_few_stay(
    spark: SparkSession, path: Path, pieces: tuple[str, Counter[str]]
) -> None:
    before = files_in(path)
    assert compact(spark, str(path), Limits(files=13), print).compactions == 0
    assert compact(spark, str(path), Limits(target=100), print).compactions == 0
    assert files_in(path) == before


def test_a_reader_sees_every_row_once_while_files_are_merged(
    spark: SparkSession, path: Path, pieces: tuple[str, Counter[str]]
) -> None:
    folder, expected = pieces
    sizes = [file.stat().st_size for file in path.rglob("*.parquet")]
    seen: list[Counter[str]] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                seen.append(ids_in(path))
            except FileNotFoundError:  # it has listed files that went: it knows, and looks again
                continue

    reader = threading.Thread(target=look)
    reader.start()
    try:
        result = Compactor(spark, str(path), Limits(4 * max(sizes), 2)).compact([folder], lambda text: None)
    finally:
        done.set()
        reader.join()
    assert result.compactions >= 3
    assert len(seen) > 3
    assert all(counts == expected for counts in seen)


STEPS = ("note", "link", "swap", "after", "forget")


@pytest.mark.parametrize("step", STEPS)
def test_a_compaction_that_was_cut_short_is_finished_or_undone(
    spark: SparkSession,
    path: Path,
    pieces: tuple[str, Counter[str]],
    step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, expected = pieces
    stop = KeyboardInterrupt("planted")

    def cut(*_: Any) -> Any:
        raise stop

    def swap_and_cut(one: Path, other: Path) -> bool:
        assert swap(one, other)
        raise stop

    with monkeypatch.context() as patch:
        if step == "note":
            patch.setattr(LocalFiles, "write", cut)
        elif step == "link":
            patch.setattr("pipeline.compaction.link_into", cut)
        elif step == "swap":
            patch.setattr("pipeline.compaction.swap", cut)
        elif step == "after":
            patch.setattr("pipeline.compaction.swap", swap_and_cut)
        else:
            patch.setattr(LocalFiles, "delete", cut)
        with pytest.raises(KeyboardInterrupt, match="planted"):
            compact(spark, str(path), Limits(), lambda text: None)
    assert ids_in(path) == expected
    restarted(spark, path)
    assert ids_in(path) == expected
    assert len(list(path.rglob("*.parquet"))) == (12 if step == "note" else 1)
    assert files_in(path.parent / "archive.keylane" / "compaction") == ["lock"]


def test_where_folders_cannot_be_swapped_files_go_before_the_new_one_comes(
    spark: SparkSession, path: Path, pieces: tuple[str, Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = pieces
    monkeypatch.setattr("pipeline.compaction.swap", lambda one, other: False)
    moves = iter([True])

    def move(self: LocalFiles, source: str, target: str, real: Callable[..., None] = LocalFiles.move) -> None:
        if next(moves, None) is None:
            raise KeyboardInterrupt
        real(self, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "move", move)
        with pytest.raises(KeyboardInterrupt):
            compact(spark, str(path), Limits(), lambda text: None)
    assert not ids_in(path), "late, and never twice"
    restarted(spark, path)
    assert ids_in(path) == expected


def test_a_file_that_comes_while_a_folder_is_compacted_stays(
    spark: SparkSession, path: Path, pieces: tuple[str, Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = pieces

    def late(one: Path, other: Path) -> bool:
        newest = sorted(one.iterdir())[0]
        (one / "part-late.parquet").write_bytes(newest.read_bytes())
        expected.update(pq.ParquetFile(newest).read(["message_id"]).column(0).to_pylist())
        return swap(one, other)

    monkeypatch.setattr("pipeline.compaction.swap", late)
    compact(spark, str(path), Limits(), lambda text: None)
    assert ids_in(path) == expected
    assert (path / folder / "part-late.parquet").exists()


def test_two_compactions_do_not_meet(
    spark: SparkSession, path: Path, pieces: tuple[str, Counter[str]]
) -> None:
    def second(text: str) -> None:
        with pytest.raises(Overloaded, match="another process compacts"):
            compact(spark, str(path), Limits(), print)

    assert compact(spark, str(path), Limits(), second).compactions == 1
    with pytest.raises(InvalidArgument, match="there is no archive at"):
        compact(spark, str(path / "nowhere"), Limits(), print)


def test_an_archive_goes_on_while_another_process_merges_its_files(spark: SparkSession, path: Path) -> None:
    lines: list[str] = []
    archive = begun(spark, path, compact_every=1)
    archive._progress = lines.append
    with Compactor(spark, str(path), Limits())._alone():
        archive.write(made(spark, 10), 0)
    assert lines[-1].startswith("no files are merged now: another process compacts")
    assert sum(ids_in(path).values()) == 10


def test_a_merged_file_that_is_gone_is_not_taken_for_done(
    spark: SparkSession, path: Path, pieces: tuple[str, Counter[str]]
) -> None:
    folder, expected = pieces
    state = path.parent / "archive.keylane" / "compaction"
    names = [Path(name).name for name in files_in(path)]
    note = {"id": "lost", "folder": folder, "sources": names, "target": "part-lost-merged.parquet"}
    state.mkdir(parents=True)
    (state / "lost.json").write_text(json.dumps(note))
    with pytest.raises(RuntimeError, match=r"is gone from .*: nothing was changed"):
        restarted(spark, path)
    assert ids_in(path) == expected
    (state / "lost.json").write_text(json.dumps({**note, "folder": "topic=orders/date=1999-12-31"}))
    restarted(spark, path)  # an operator has deleted that folder
    assert ids_in(path) == expected


def test_a_whole_file_system_is_no_place_for_an_archive(spark: SparkSession) -> None:
    for path in ("/", "file:///"):
        with pytest.raises(InvalidArgument, match="is a whole file system: name a folder in it"):
            run(spark, Options(server="keylane://nowhere", topics=["orders"], path=path))


def test_every_so_many_batches_files_are_merged(
    client: Client, topic: str, path: Path, archive: Callable[..., Archived]
) -> None:
    client.create_topic(topic, partitions=4)
    client.create_subscription(topic, "archive", mode="cursor", start="earliest")
    expected = publish(client, topic, 400)
    result = archive(batch_rows=60, compact_every=3)
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
