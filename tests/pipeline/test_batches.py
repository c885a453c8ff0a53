"""Batches of an archive, without Spark: each row once, whatever is killed when and whoever else is there."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from keylane import ConsumerReplaced, InvalidArgument, Overloaded, SubscriptionBusy
from keylane_spark.archiving.batches import Batches
from keylane_spark.archiving.compaction import Compactor, MergeLimits
from keylane_spark.archiving.locks import archiving, check_topics, compacting, enter_topics, state_of
from keylane_spark.commandline.command import Job
from keylane_spark.commandline.main import pipeline
from keylane_spark.files import LocalFiles
from tests.pipeline.archives import (
    KILL,
    TODAY,
    YESTERDAY,
    files_in,
    ids_in,
    ids_of,
    merge_plainly,
    write_rows,
)

QUERY = "11112222-query"


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is killed here is a process: the disk need not be waited for."""
    monkeypatch.setattr("os.fsync", lambda number: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "archive"


def batches(path: Path, subscription: str = "archive") -> Batches:
    return Batches(LocalFiles(), str(path), state_of(str(path), subscription))


def compactor(path: Path) -> Compactor:
    return Compactor(LocalFiles(), str(path), MergeLimits(files=2), merge_plainly, lambda: None)


def stage(batches: Batches, batch: int, folders: dict[str, list[int]], query: str = QUERY) -> str:
    """Write a batch as Spark does: a file for each task and folder."""
    staged = Path(batches.stage(query, batch))
    for folder, offsets in folders.items():
        for task, part in enumerate((offsets[::2], offsets[1::2])):
            if part:
                write_rows(staged / folder / f"part-{task:05}-{staged.name}.parquet", part)
    (staged / "_SUCCESS").touch()
    return str(staged)


def add(batches: Batches, batch: int, folders: dict[str, list[int]], query: str = QUERY) -> None:
    """What a query does with a batch that Spark hands over."""
    if batches.find(query, batch) is None:
        staged = stage(batches, batch, folders, query)
        batches.add(query, batch, staged, sum(len(offsets) for offsets in folders.values()))


# A row of yesterday that arrives today, with batch 2, goes to yesterday's folder.
BATCHES = [
    {YESTERDAY: [1, 2, 3]},
    {YESTERDAY: [4, 5], TODAY: [6, 7]},
    {YESTERDAY: [8], TODAY: [9]},
]
ROWS = ids_of(range(1, 10))


def test_late_rows_go_to_the_folder_of_their_day(path: Path) -> None:
    archive = batches(path)
    for number, folders in enumerate(BATCHES):
        add(archive, number, folders)
        add(archive, number, folders)  # a batch that comes again is done
    assert ids_in(path / YESTERDAY) == ids_of([1, 2, 3, 4, 5, 8])
    assert ids_in(path / TODAY) == ids_of([6, 7, 9])
    state = path.parent / "archive.keylane" / "subscriptions" / "archive"
    assert [Path(file).name for file in files_in(state)] == [f"{QUERY}-00000002.json"], "nothing is left over"


@pytest.mark.slow
def test_a_kill_at_any_step_leaves_each_row_once(tmp_path: Path) -> None:
    for step in count():
        path = tmp_path / str(step) / "archive"
        done: list[int] = []  # what Spark's checkpoint says

        def work(path: Path = path, done: list[int] = done) -> None:
            archive = batches(path)
            archive.recover()
            for number in range(len(done), len(BATCHES)):
                add(archive, number, BATCHES[number])
                done.append(number)

        killed = KILL.run(step, work)
        seen = ids_in(path)
        assert set(seen.values()) <= {1}, (step, KILL.steps)
        for number in done:
            for offsets in BATCHES[number].values():
                assert ids_of(offsets) <= seen, "what the broker forgets is there"
        # and what is done about it is killed as well
        again = KILL.run(step // 2, work)
        assert set(ids_in(path).values()) <= {1}, (step, KILL.steps)
        work()
        assert ids_in(path) == ROWS, (step, KILL.steps)
        assert not [file for file in files_in(path.parent) if "staging" in file]
        if not killed and not again:
            break
    assert step > 40


class Slow(LocalFiles):
    """Somebody else is faster at the moment when a note is made."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action: Callable[[], object] | None = action

    def _wait(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()

    def create(self, path: str, text: str) -> bool:
        self._wait()
        return super().create(path, text)

    def write(self, path: str, text: str) -> None:
        self._wait()
        super().write(path, text)


@pytest.mark.parametrize("moment", ["before", "while"])
def test_of_two_that_have_the_same_batch_one_adds_it(path: Path, moment: str) -> None:
    other = batches(path)
    files = Slow(lambda: add(other, 0, BATCHES[0])) if moment == "while" else LocalFiles()
    zombie = Batches(files, str(path), state_of(str(path), "archive"))
    staged = stage(zombie, 0, BATCHES[0])
    if moment == "before":
        add(other, 0, BATCHES[0])
        stage(other, 1, BATCHES[1])
    note = zombie.add(QUERY, 0, staged, 3)  # it was taken for dead while it wrote
    assert ids_in(path) == ids_of([1, 2, 3])
    assert note == other.find(QUERY, 0)
    assert sorted(place for _, place in note.moves) == files_in(path), "it is that of who was first"


def test_who_was_taken_for_dead_cannot_add_what_others_did_long_ago(path: Path) -> None:
    zombie, other = batches(path), batches(path)
    staged = stage(zombie, 0, BATCHES[0])
    for number, folders in enumerate(BATCHES):
        add(other, number, folders)
    with pytest.raises(ConsumerReplaced, match=r"batch 0 of .* another process continues this archive"):
        zombie.add(QUERY, 0, staged, 3)
    assert ids_in(path) == ROWS


def test_a_batch_that_was_planned_anew_is_not_taken_for_done(path: Path) -> None:
    """The checkpoint has lost what batch 0 was, and its note is there."""
    archive = batches(path)
    archive.add(QUERY, 0, stage(archive, 0, {TODAY: [1, 2]}), 2, "up to 3")
    found = archive.find(QUERY, 0, "up to 3")
    assert found is not None
    assert found.rows == 2
    refused = rf"batch 0 of {path} is planned with other rows than .*{QUERY}-00000000.json .*delete this file"
    with pytest.raises(ConsumerReplaced, match=refused):
        archive.find(QUERY, 0, "up to 4")
    with pytest.raises(ConsumerReplaced, match=refused):  # it was not there when we looked for it
        archive.add(QUERY, 0, stage(archive, 0, {TODAY: [1, 2, 3]}), 3, "up to 4")
    assert ids_in(path) == ids_of([1, 2])


def test_a_note_of_a_version_that_did_not_know_plans_counts(path: Path) -> None:
    archive = batches(path)
    archive.add(QUERY, 0, stage(archive, 0, {TODAY: [1, 2]}), 2)
    [note] = path.parent.rglob("notes/*.json")
    note.write_text(json.dumps({k: v for k, v in json.loads(note.read_text()).items() if k != "plan"}))
    assert archive.find(QUERY, 0, "up to 3") is not None


def test_batches_that_are_counted_again_have_files_of_their_own(path: Path) -> None:
    add(batches(path), 0, {TODAY: [1, 2]})
    for note in (path.parent / "archive.keylane" / "subscriptions" / "archive" / "notes").iterdir():
        note.unlink()  # as in a backup from before
    add(batches(path), 0, {TODAY: [3, 4]})
    assert ids_in(path) == ids_of([1, 2, 3, 4])


def test_a_file_that_was_merged_since_does_not_come_again(path: Path) -> None:
    """The archive was killed while it moved files, and somebody has merged those that were there."""
    archive = batches(path)
    for step in count():
        if path.exists():
            for file in path.rglob("*.parquet"):
                file.unlink()
        staged = stage(archive, step, {TODAY: list(range(10))})
        killed = KILL.run(step, lambda number=step, staged=staged: archive.add(QUERY, number, staged, 10))  # type: ignore[misc]
        compactor(path).compact([TODAY], lambda text: None)
        batches(path).recover()
        seen = ids_in(path)
        assert seen in (Counter(), ids_of(range(10))), (step, KILL.steps)
        if not killed:
            break
    assert step > 10


# Who may write


def test_a_second_process_is_refused_and_hears_of_the_first(path: Path) -> None:
    with archiving(LocalFiles(), str(path), "archive"):
        with (
            pytest.raises(
                SubscriptionBusy, match=r"process \d+ on \S+ is archiving into .* with subscription 'arch"
            ),
            archiving(LocalFiles(), str(path), "archive"),
        ):
            pass
        with archiving(LocalFiles(), str(path), "other"):  # of other topics
            pass
    with archiving(LocalFiles(), str(path), "archive"):
        pass


def test_a_second_compaction_is_refused(path: Path) -> None:
    with (
        compacting(LocalFiles(), str(path)),
        pytest.raises(Overloaded, match=r"process \d+ on \S+ is compacting"),
        compacting(LocalFiles(), str(path)),
    ):
        pass


def test_a_topic_is_archived_by_one_subscription(path: Path) -> None:
    files, root = LocalFiles(), str(path)
    check_topics(files, root, "archive", ["orders", "payments"])
    enter_topics(files, root, "archive", ["orders"])
    enter_topics(files, root, "archive", ["orders", "payments"])
    enter_topics(files, root, "other", ["visits"])
    with pytest.raises(InvalidArgument, match=r"'payments' is archived into .* by subscription 'archive'"):
        check_topics(files, root, "other", ["visits", "payments"])
    with pytest.raises(InvalidArgument, match="'visits'") as error:
        enter_topics(files, root, "archive", ["visits"])
    Path(str(error.value).rpartition("delete ")[2]).unlink()
    enter_topics(files, root, "archive", ["visits"])


def test_who_cannot_archive_hears_so_without_java(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "spark", lambda *_: pytest.fail("it starts Java"))
    monkeypatch.setattr(Job, "check_topics", lambda *_: None, raising=False)  # there is no broker
    enter_topics(LocalFiles(), str(path), "archive", ["orders"])
    command = ["archive", "orders", "--to", f"{path}/"]
    result = CliRunner().invoke(pipeline, [*command, "--subscription", "other"])
    assert (result.exit_code, "by subscription 'archive', and its rows" in result.stderr) == (1, True)
    with archiving(LocalFiles(), str(path), "archive"):
        result = CliRunner().invoke(pipeline, command)
    assert (result.exit_code, f"is archiving into {path} with" in result.stderr) == (1, True)


def test_names_as_long_as_they_may_be_have_room(path: Path) -> None:
    files, root, name = LocalFiles(), str(path), "x" * 200
    with archiving(files, root, name):
        enter_topics(files, root, name, [name])
        archive = batches(path, name)
        add(archive, 0, {f"topic={name}/date=2026-11-17": [1, 2]})
    assert ids_in(path) == ids_of([1, 2])


@pytest.mark.slow
def test_two_archives_and_compactions_at_the_same_moment_keep_each_row_once(path: Path) -> None:
    """Of one topic that two have no business to have at once: even their files do not get lost."""
    rounds = 25
    errors: list[BaseException] = []
    done = threading.Event()

    def write(subscription: str, first: int) -> None:
        try:
            archive = batches(path, subscription)
            for number in range(rounds):
                at = first + 4 * number
                add(archive, number, {TODAY: [at, at + 1], YESTERDAY: [at + 2, at + 3]}, subscription)
        except BaseException as error:
            errors.append(error)

    def merge() -> None:
        try:
            while not done.is_set():
                compactor(path).compact([TODAY, YESTERDAY], lambda text: None)
        except BaseException as error:
            errors.append(error)

    writers = [
        threading.Thread(target=write, args=(name, at)) for name, at in (("one-----", 0), ("two-----", 1_000))
    ]
    merger = threading.Thread(target=merge)
    for thread in (*writers, merger):
        thread.start()
    seen: list[Counter[str]] = []
    while any(writer.is_alive() for writer in writers):
        try:
            seen.append(ids_in(path))
        except (FileNotFoundError, pa.ArrowInvalid):
            continue  # it has listed files that went: it knows, and looks again
    done.set()
    merger.join()
    assert not errors
    assert ids_in(path) == ids_of([*range(4 * rounds), *range(1_000, 1_000 + 4 * rounds)])
    assert all(set(counts.values()) <= {1} for counts in seen)
