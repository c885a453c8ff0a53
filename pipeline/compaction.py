"""Small files of an archive become few large ones, and a reader sees the ones or the others.

What is to be done is noted down before anything changes, so that a crash in the middle is finished by the
next start. On Linux a folder is swapped with its compacted twin in one step of the kernel; where there is no
such step, the old files go before the new one comes, and rows are away for that moment.
"""

import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import msgspec
from pyspark.sql import SparkSession

from client.errors import InvalidArgument, Overloaded
from pipeline.files import Entry, files_at
from pipeline.swap import link_into, swap

MEGABYTE = 1024 * 1024
# Spark's own kind of timestamps has no time zone for other readers.
TIMESTAMPS = ("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")


class Limits(msgspec.Struct, frozen=True):
    """Which files are merged: those of less than half a target, if there are enough of them."""

    target: int = 128 * MEGABYTE
    files: int = 8


class Compacted(msgspec.Struct):
    """What a run has merged."""

    path: str
    compactions: int = 0
    merged: int = 0  # files that went
    rows: int = 0


class Note(msgspec.Struct):
    """What is to become of one folder: `sources` go and `target` comes."""

    id: str
    folder: str
    sources: list[str]
    target: str


class Compactor:
    """Merges files of the archive at `root`; one at a time, as far as the file system can tell."""

    def __init__(self, spark: SparkSession, root: str, limits: Limits) -> None:
        self._spark = spark.newSession()  # a setting of the caller's stays
        self._spark.conf.set(*TIMESTAMPS)
        self._root = root
        self._state = f"{root}.keylane/compaction"
        self._limits = limits
        self._files = files_at(root, spark)

    def recover(self) -> None:
        """Finish what a crash has left."""
        with self._alone():
            self._recover()

    def compact(self, folders: Sequence[str], progress: Callable[[str], None]) -> Compacted:
        """Merge the small files of folders such as `topic=orders/date=2026-11-16`."""
        done = Compacted(self._root)
        with self._alone():
            self._recover()
            for folder in folders:
                for sources in self._groups(self._files.entries(f"{self._root}/{folder}")):
                    rows = self._merge(folder, sources)
                    done.compactions += 1
                    done.merged += len(sources)
                    done.rows += rows
                    progress(f"{folder}: {len(sources)} files became one of {rows:,} rows")
        return done

    def _groups(self, entries: Sequence[Entry]) -> Iterator[list[str]]:
        """Small files that together make a large one; what would be too few is left for later."""
        small = [
            entry
            for entry in entries
            if entry.name.endswith(".parquet")
            and not entry.name.startswith((".", "_"))
            and entry.size < self._limits.target // 2
        ]
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

    def _merge(self, folder: str, sources: list[str]) -> int:
        note = Note(uuid4().hex[:12], folder, sources, "")
        work = f"{self._state}/{note.id}"
        frame = self._spark.read.parquet(*(f"{self._root}/{folder}/{name}" for name in sources))
        rows = frame.count()
        frame.coalesce(1).sortWithinPartitions("partition", "offset").write.parquet(f"{work}/merged")
        [merged] = [
            entry.name
            for entry in self._files.entries(f"{work}/merged")
            if entry.name.endswith(".parquet") and not entry.name.startswith((".", "_"))
        ]
        written = self._spark.read.parquet(f"{work}/merged/{merged}").count()
        if written != rows:
            raise RuntimeError(f"{folder}: of {rows} rows {written} were merged; the files stay as they are")
        note.target = f"part-{note.id}-merged.parquet"
        self._files.make_folder(f"{work}/twin")
        self._files.move(f"{work}/merged/{merged}", f"{work}/twin/{note.target}")
        self._files.write(f"{self._state}/{note.id}.json", msgspec.json.encode(note).decode())
        self._apply(note)
        return rows

    def _recover(self) -> None:
        for entry in self._files.entries(self._state):
            if entry.name.endswith(".json"):
                text = self._files.read(f"{self._state}/{entry.name}")
                if text is not None:
                    self._apply(msgspec.json.decode(text, type=Note))
        # A merge that was not noted down has changed nothing. Without a lock it may still be going on.
        for entry in self._files.entries(self._state) if self._files.local else ():
            if entry.folder:
                self._files.delete(f"{self._state}/{entry.name}")

    def _apply(self, note: Note) -> None:
        """Do what a note says, or what is missing of it."""
        folder, work = f"{self._root}/{note.folder}", f"{self._state}/{note.id}"
        if self._files.exists(folder):  # else somebody has done away with it, merged or not
            if not any(self._files.exists(f"{place}/{note.target}") for place in (f"{work}/twin", folder)):
                raise RuntimeError(
                    f"the merged file of {note.folder} is gone from {work}: nothing was changed, look at "
                    f"{self._state}/{note.id}.json"
                )
            if not (self._files.local and self._swap(note, Path(self._files.plain(folder)))):
                for name in note.sources:
                    self._files.delete(f"{folder}/{name}")
                if not self._files.exists(f"{folder}/{note.target}"):
                    self._files.move(f"{work}/twin/{note.target}", f"{folder}/{note.target}")
        self._files.delete(f"{self._state}/{note.id}.json")
        self._files.delete(work)

    def _swap(self, note: Note, folder: Path) -> bool:
        """Swap the folder with its twin, which holds the merged file and all that is not merged."""
        twin = Path(self._files.plain(f"{self._state}/{note.id}/twin"))
        gone = set(note.sources)
        if not (folder / note.target).exists():
            link_into(twin, folder, gone)
            if not swap(folder, twin):
                return False
        # What has come into the old folder since it was looked at belongs into the new one.
        if twin.exists():
            link_into(folder, twin, gone)
        return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep another compaction out, where files are local; the lock ends with the process."""
        self._files.make_folder(self._state)
        if not self._files.local:
            yield
            return
        with Path(self._files.plain(f"{self._state}/lock")).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise Overloaded(
                    f"another process compacts {self._root} just now: try again later"
                ) from error
            yield


def compact(
    spark: SparkSession, path: str, limits: Limits, progress: Callable[[str], None] = print
) -> Compacted:
    """Merge the small files of a whole archive."""
    from pipeline.archive import folders_of

    root = path.rstrip("/")
    folders = folders_of(files_at(root, spark), root)
    if not folders:
        raise InvalidArgument(f"there is no archive at {path}: it has no folder topic=…/date=…")
    return Compactor(spark, root, limits).compact(folders, progress)
