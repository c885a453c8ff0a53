"""Small files become large ones, without Spark: a reader sees each row once, whatever is killed when."""

import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keylane_spark.archiving import parquet_reader
from keylane_spark.archiving.compaction import MERGED, Compacted, Compactor, MergeLimits
from keylane_spark.archiving.parquet_reader import rows_in_archive
from keylane_spark.auditing.in_memory.engine import InMemoryEngine
from keylane_spark.commandline.command import Job
from keylane_spark.files import LocalFiles
from keylane_spark.files.folder_swap import link_into, swap
from tests.pipeline.archives import KILL, YESTERDAY, files_in, ids_in, ids_of, merge_plainly, write_rows

ROWS = ids_of(range(0, 400, 2))
LIMITS = MergeLimits()


def pieces(path: Path) -> Path:
    """An archive of twelve small files in one folder, in no order."""
    for number in range(12):
        write_rows(path / YESTERDAY / f"part-{number}.parquet", range(2 * number, 400, 24))
    return path


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is killed here is a process: the disk need not be waited for."""
    monkeypatch.setattr("os.fsync", lambda number: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = pieces(tmp_path / "archive")
    assert ids_in(path) == ROWS
    return path


Wait = Callable[[], None]


def at_once() -> None:
    """Nobody reads."""


def compactor(path: Path, limits: MergeLimits = LIMITS, wait: Wait = at_once) -> Compactor:
    return Compactor(LocalFiles(), str(path), limits, merge_plainly, wait)


def compact(path: Path, limits: MergeLimits = LIMITS, wait: Wait = at_once) -> Compacted:
    return compactor(path, limits, wait).compact([YESTERDAY], lambda text: None)


def test_small_files_become_one(path: Path) -> None:
    lines: list[str] = []
    done = compactor(path).compact([YESTERDAY], lines.append)
    assert (done.compactions, done.merged, done.rows) == (1, 12, 200)
    assert lines == [f"{YESTERDAY}: merged 12 files into one of 200 rows"]
    assert len(files_in(path)) == 1
    assert ids_in(path) == ROWS
    assert compact(path, MergeLimits(files=2)).compactions == 0, "one file is none too many"
    assert files_in(path.parent / "archive.keylane" / "compaction") == ["lock"], "nothing is left over"


def test_who_has_listed_the_old_files_gets_an_error(path: Path) -> None:
    folder = path / YESTERDAY
    opened = os.scandir(folder)  # one reader has opened the folder, and not looked into it
    listed = list(folder.iterdir())  # another has listed it

    def wait() -> None:
        assert len(list(opened)) == 12
        for file in listed:
            assert file.stat().st_size > 0, "what is not there would be left out in silence"
            with pytest.raises(pa.ArrowInvalid):
                pq.ParquetFile(file)

    compact(path, wait=wait)
    assert len(files_in(path)) == 1


def test_large_files_and_those_that_are_too_few_stay(path: Path) -> None:
    before = files_in(path)
    assert compact(path, MergeLimits(files=13)).compactions == 0
    assert compact(path, MergeLimits(target=100)).compactions == 0
    assert files_in(path) == before


@pytest.mark.slow
def test_a_reader_sees_every_row_once_while_files_are_merged(path: Path) -> None:
    sizes = [file.stat().st_size for file in path.rglob("*.parquet")]
    seen: list[Counter[str]] = []
    done = threading.Event()
    looked = threading.Condition()
    looks = 0

    def look() -> None:
        nonlocal looks
        while not done.is_set():
            try:
                table = pq.read_table(path / YESTERDAY, columns=["message_id"], partitioning=None)
                seen.append(Counter(table.column(0).to_pylist()))
            except (OSError, pa.ArrowInvalid):  # it has listed files that went: it knows, and looks again
                pass
            with looked:
                looks += 1
                looked.notify_all()

    def wait() -> None:
        """Until the reader has begun to look after this, and has seen all that it listed before."""
        with looked:
            before = looks
            looked.wait_for(lambda: looks > before + 1, 60)

    reader = threading.Thread(target=look)
    reader.start()
    compactions = 0
    try:
        for number in range(8):
            compactions += compact(path, MergeLimits(4 * max(sizes), 2), wait).compactions
            wait()
            for file in sorted((path / YESTERDAY).iterdir()):  # and the same again, in small files
                offsets = pq.ParquetFile(file).read(["offset"]).column(0).to_pylist()
                if len(offsets) > 20:
                    cut(file, offsets, path.parent / "cut" / f"{number}-{file.stem}", wait)
            wait()
    finally:
        done.set()
        reader.join()
    assert compactions >= 8
    assert len(seen) > 3
    wrong = [counts for counts in seen if counts != ROWS]
    assert not wrong, [(len(counts), max(counts.values(), default=0)) for counts in wrong]


def cut(file: Path, offsets: list[int], twin: Path, wait: Wait) -> None:
    """Have several files instead of one, as unseen as a compaction."""
    twin.mkdir(parents=True)
    link_into(twin, file.parent, {file.name})
    for start in range(0, len(offsets), 10):
        write_rows(twin / f"{twin.name}-{start}.parquet", offsets[start : start + 10])
    (twin / file.name).write_text(MERGED)
    assert swap(file.parent, twin)
    wait()
    file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("swaps", [True, False])
def test_a_kill_at_any_step_leaves_each_row_once(
    tmp_path: Path, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr("keylane_spark.archiving.compaction.swap", lambda one, other: False)
    for step in count():
        path = pieces(tmp_path / str(step) / "archive")
        killed = KILL.run(step, lambda path=path: compact(path))  # type: ignore[misc]
        again = KILL.run(step // 3, lambda path=path: compactor(path).recover())  # type: ignore[misc]
        with suppress(pa.ArrowInvalid):
            seen = ids_in(path)
            assert seen == ROWS if swaps else seen <= ROWS, (step, KILL.steps)
        compactor(path).recover()
        assert ids_in(path) == ROWS, (step, KILL.steps)
        assert files_in(path.parent / "archive.keylane" / "compaction") == ["lock"]
        compact(path)
        assert len(files_in(path)) == 1
        if not killed and not again:
            break
    assert step > 30


def test_a_file_that_comes_while_a_folder_is_compacted_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(one: Path, other: Path) -> bool:
        write_rows(one / "part-late.parquet", [1_000])
        return swap(one, other)

    monkeypatch.setattr("keylane_spark.archiving.compaction.swap", late)
    compact(path)
    assert ids_in(path) == ROWS + ids_of([1_000])
    assert (path / YESTERDAY / "part-late.parquet").exists()


def test_what_somebody_deletes_after_a_crash_does_not_come_back(path: Path) -> None:
    write_rows(path / YESTERDAY / "part-old.parquet", range(5_000, 5_500))
    small = max(file.stat().st_size for file in path.rglob("part-?.parquet"))
    limits = MergeLimits(target=4 * small, files=8)
    assert KILL.run(10_000, lambda: None) is False
    for step in count():
        killed = KILL.run(step, lambda: compact(path, limits))
        if killed and "os.link" in KILL.steps:
            break
        assert killed, "it makes links"
    (path / YESTERDAY / "part-old.parquet").unlink(missing_ok=True)
    compactor(path).recover()
    assert ids_in(path) == ROWS


def test_a_merged_file_that_is_gone_is_not_taken_for_done(path: Path) -> None:
    state = path.parent / "archive.keylane" / "compaction"
    names = [Path(name).name for name in files_in(path)]
    note = {"id": "lost", "folder": YESTERDAY, "sources": names, "target": "part-lost-merged.parquet"}
    state.mkdir(parents=True)
    (state / "lost.json").write_text(json.dumps(note))
    with pytest.raises(RuntimeError, match=r"is gone from .*: nothing was changed"):
        compactor(path).recover()
    assert ids_in(path) == ROWS
    (state / "lost.json").write_text(json.dumps({**note, "folder": "topic=orders/date=1999-12-31"}))
    compactor(path).recover()  # an operator has deleted that folder
    assert ids_in(path) == ROWS


def test_a_merge_that_lost_rows_changes_nothing(path: Path) -> None:
    def lossy(sources: list[str], folder: str) -> int:
        merge_plainly(sources[1:], folder)
        return 200

    before = files_in(path)
    broken: Callable[..., int] = lossy
    with pytest.raises(Exception, match="wrote 200 rows"):
        Compactor(LocalFiles(), str(path), MergeLimits(), broken).compact([YESTERDAY], print)
    assert files_in(path) == before


# Those who count and read without Spark


@pytest.fixture
def killed(path: Path) -> Path:
    """An archive whose compaction was killed while it waited for readers."""

    def die() -> None:
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        compact(path, wait=die)
    assert len(files_in(path)) == 13
    return path


def test_a_plain_reader_waits_until_files_are_merged(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_reader, "_wait", compactor(killed).recover)
    assert rows_in_archive(str(killed)) == 200
    assert InMemoryEngine("out").archive(str(killed), "orders", "archive").rows.num_rows == 200


def test_a_plain_reader_says_what_to_do_about_files_that_stay(
    killed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parquet_reader, "_PATIENCE", 0.0)
    engine = InMemoryEngine("out")
    job = Job()
    for look in (
        lambda: rows_in_archive(str(killed)),
        lambda: engine.archive(str(killed), "orders", "archive"),
    ):
        assert job.execute(look) == 3, "1 is an audit that found something"
        [line] = capsys.readouterr().err.splitlines()
        assert line.endswith(f"run: keylane pipeline archive --compact --to {killed}")


def test_a_file_that_is_no_parquet_is_not_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    monkeypatch.setattr(parquet_reader, "_wait", lambda: waits.append(None))
    (path / YESTERDAY / "part-x.parquet").write_text("something else")
    with pytest.raises(pa.ArrowInvalid):
        rows_in_archive(str(path))
    assert len(waits) < 10
