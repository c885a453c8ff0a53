"""Small files of an archive become few large ones, and a reader sees the ones or the others.

What is to be done is noted down before anything changes, so that a crash in the middle is finished by the
next start. On Linux a folder is swapped with its compacted twin in one step of the kernel; where there is no
such step, the old files go before the new one comes, and rows are away for that moment.

Readers list a folder, ask for each file's size, and open them. Many take a file that went before its size
was asked for as one that never was, and do not notice that rows are missing. So for GRACE seconds the new
folder has something by the old names that is no Parquet: who has listed them gets an error, and reads again.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec

from keylane.commandline.words import count_of
from keylane.errors import InvalidArgument
from keylane_spark.archiving.folders import folders_of
from keylane_spark.archiving.locks import compacting, moving
from keylane_spark.files import Entry, Files, check_written, files_at
from keylane_spark.files.folder_swap import link_into, swap

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MEGABYTE = 1024 * 1024
# Spark's own kind of timestamps has no time zone for other readers.
TIMESTAMPS = ("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")

GRACE = 1.0  # seconds between the listing of a folder and the look at its last file
MERGED = "This file was merged with others: list the folder again."

Merge = Callable[[Sequence[str], str], int]  # files become one in a new folder, of so many rows


def _wait() -> None:
    time.sleep(GRACE)


class MergeLimits(msgspec.Struct, frozen=True):
    """Which files are merged: those of less than half a target, if there are enough of them."""

    target: int = 128 * MEGABYTE
    files: int = 8


class Compacted(msgspec.Struct):
    """What a run has merged."""

    path: str
    compactions: int = 0
    merged: int = 0  # files that went
    rows: int = 0


class MergeNote(msgspec.Struct):
    """What is to become of one folder: `sources` go and `target` comes."""

    id: str
    folder: str
    sources: list[str]
    target: str


class Compactor:
    """Merges files of the archive at `root`; one at a time, as far as the file system can tell."""

    def __init__(
        self, files: Files, root: str, limits: MergeLimits, merge: Merge, wait: Callable[[], None] = _wait
    ) -> None:
        self._files = files
        self._root = root
        self._state = f"{root}.keylane/compaction"
        self._limits = limits
        self._merge = merge
        self._wait = wait

    def recover(self) -> None:
        """Finish what a crash has left."""
        with compacting(self._files, self._root):
            self._recover()

    def compact(self, folders: Sequence[str], progress: Callable[[str], None]) -> Compacted:
        """Merge the small files of folders such as `topic=orders/date=2026-11-16`."""
        done = Compacted(self._root)
        with compacting(self._files, self._root):
            self._recover()
            for folder in folders:
                for sources in self._groups(self._files.entries(f"{self._root}/{folder}")):
                    rows = self._replace(folder, sources)
                    done.compactions += 1
                    done.merged += len(sources)
                    done.rows += rows
                    progress(f"{folder}: merged {len(sources)} files into one of {count_of(rows, 'row')}")
        return done

    def _groups(self, entries: Sequence[Entry]) -> Iterator[list[str]]:
        """Small files that together make a large one; what would be too few is left for later."""
        small = [entry for entry in entries if entry.rows and entry.size < self._limits.target // 2]
        if len(small) < self._limits.files:
            return
        group: list[str] = []
        size = 0
        for entry in small:
            group.append(entry.name)
            size += entry.size
            if size >= self._limits.target:
                yield group
                group, size = [], 0
        if len(group) > 1:
            yield group

    def _replace(self, folder: str, sources: list[str]) -> int:
        """Have one file instead of several."""
        note = MergeNote(uuid4().hex[:12], folder, sources, "")
        work = f"{self._state}/{note.id}"
        rows = self._merge([f"{self._root}/{folder}/{name}" for name in sources], f"{work}/merged")
        check_written(self._files, f"{work}/merged", rows)
        [merged] = [entry.name for entry in self._files.entries(f"{work}/merged") if entry.rows]
        note.target = f"part-{note.id}-merged.parquet"
        self._files.make_folder(f"{work}/twin")
        self._files.move(f"{work}/merged/{merged}", f"{work}/twin/{note.target}")
        self._files.sync(f"{work}/twin/{note.target}")
        self._files.write(f"{self._state}/{note.id}.json", msgspec.json.encode(note).decode())
        self._apply(note)
        return rows

    def _recover(self) -> None:
        for entry in self._files.entries(self._state):
            if entry.name.endswith(".json"):
                text = self._files.read(f"{self._state}/{entry.name}")
                if text is not None:
                    self._apply(msgspec.json.decode(text, type=MergeNote))
        # A merge that was not noted down has changed nothing. Without a lock it may still be going on.
        for entry in self._files.entries(self._state) if self._files.local else ():
            if entry.name != "lock":
                self._files.delete(f"{self._state}/{entry.name}")

    def _apply(self, note: MergeNote) -> None:
        """Do what a note says, or what is missing of it."""
        folder, work = f"{self._root}/{note.folder}", f"{self._state}/{note.id}"
        if self._files.exists(folder):  # else somebody has done away with it, merged or not
            with moving(self._files, self._root):
                swapped = self._move(note, folder, work)
            if swapped:
                self._wait()
            for name in note.sources:
                self._files.delete(f"{folder}/{name}")
        self._files.delete(f"{work}.json")
        self._files.delete(work)

    def _move(self, note: MergeNote, folder: str, work: str) -> bool:
        """Bring the merged file, at once or after the old ones went; whether it was at once."""
        if not any(self._files.exists(f"{place}/{note.target}") for place in (f"{work}/twin", folder)):
            raise RuntimeError(
                f"the merged file of {note.folder} is gone from {work}: nothing was changed, look at "
                f"{work}.json"
            )
        if self._files.local and self._swap(note, Path(self._files.plain(folder))):
            return True
        for name in note.sources:
            self._files.delete(f"{folder}/{name}")
        if not self._files.exists(f"{folder}/{note.target}"):
            self._files.move(f"{work}/twin/{note.target}", f"{folder}/{note.target}")
        return False

    def _swap(self, note: MergeNote, folder: Path) -> bool:
        """Swap the folder with its twin, which holds the merged file and all that is not merged."""
        twin = Path(self._files.plain(f"{self._state}/{note.id}/twin"))
        gone = set(note.sources)
        if not (folder / note.target).exists():
            for file in twin.iterdir():
                if file.name != note.target:  # of a try before this one: it may be deleted by now
                    file.unlink()
            link_into(twin, folder, gone)
            for name in gone:
                (twin / name).write_text(MERGED, "utf-8")
            if not swap(folder, twin):
                return False
        # What has come into the old folder since it was looked at belongs into the new one.
        if twin.exists():
            link_into(folder, twin, gone)
        return True


def merging(spark: "SparkSession") -> Merge:
    """Merge by Spark: in the order of offsets, and counted again."""
    session = spark.newSession()  # a setting of the caller's stays
    session.conf.set(*TIMESTAMPS)

    def merge(sources: Sequence[str], folder: str) -> int:
        frame = session.read.parquet(*sources)
        rows = frame.count()
        frame.coalesce(1).sortWithinPartitions("partition", "offset").write.parquet(folder)
        written = session.read.schema(frame.schema).parquet(folder).count()
        if written != rows:
            raise RuntimeError(f"only {written} of {rows} rows were merged; the files stay as they are")
        return rows

    return merge


def compact(
    spark: "SparkSession", path: str, limits: MergeLimits, progress: Callable[[str], None] = print
) -> Compacted:
    """Merge the small files of a whole archive."""
    root = path.rstrip("/")
    files = files_at(root, spark)
    folders = folders_of(files, root)
    if not folders:
        raise InvalidArgument(f"there is no archive at {path}: it has no folder topic=…/date=…")
    return Compactor(files, root, limits, merging(spark)).compact(folders, progress)
