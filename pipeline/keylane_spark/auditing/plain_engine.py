"""A snapshot of a topic and an audit of it without Spark and Java, where all of it fits into memory."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from keylane.types import Page, PartitionOffsets
from keylane_spark.archiving.compaction import GRACE, MERGED
from keylane_spark.auditing.findings import Audit
from keylane_spark.auditing.looks import JOURNAL, LOG, Looks, Snapshot, archive_folder
from keylane_spark.auditing.plain_audit import PlainArchive, examine
from keylane_spark.commandline.command import Trouble
from keylane_spark.files import LocalFiles, local_at
from keylane_spark.remote import Remote
from keylane_spark.source.arrow import entries_of, ids_of
from keylane_spark.source.arrow_journal import journal_batch
from keylane_spark.source.options import Connection

MOST_ROWS = 8_000_000  # in memory; a record may have a thousand

_PAGE = 5_000
_LOOKS = 5
_PATIENCE = 10 * GRACE  # seconds, of who finds files that are merged just then
_PART = "part-0.parquet"
_TEXT, _NUMBER = pa.string(), pa.int64()
LOG_COLUMNS = pa.schema(
    [("partition", pa.int32()), ("offset", _NUMBER), ("key", _TEXT), ("message_id", _TEXT)]
)
JOURNAL_COLUMNS = pa.schema(
    [
        ("topic", _TEXT),
        ("partition", pa.int32()),
        ("offset", _NUMBER),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("transition", _TEXT),
        ("subscription", _TEXT),
        ("by", _TEXT),
        ("first", _NUMBER),
        ("last", _NUMBER),
    ]
)


class TooLarge(Exception):
    """There is more than memory should hold: this is one for Spark."""


class Merging(Trouble):
    """Files of an archive were merged all the time, or nobody is there to finish it."""

    status = 3  # 1 would be the finding of an audit


class PlainEngine:
    """Reads, writes and judges in this process."""

    def __init__(self, out: str) -> None:
        self.files = LocalFiles()
        self._out = out

    def write_log(self, connection: Connection, looks: Looks) -> None:
        """Write the log of a topic as it is now."""
        bounds = [(at, at.earliest, at.latest) for at in looks.first]
        pages = _pages(connection, looks.topic, bounds, journal=False)
        self._write(LOG, LOG_COLUMNS, (_log_batch(partition, page) for partition, page in pages))

    def write_journal(self, connection: Connection, looks: Looks) -> None:
        """Write the journal up to where the look before has seen its end."""
        bounds = [(at, at.journal_earliest, at.journal_latest) for at in looks.before_journal]
        pages = _pages(connection, looks.topic, bounds, journal=True)
        batches = (
            journal_batch(JOURNAL_COLUMNS, looks.topic, partition, page).drop_columns(["topic"])
            for partition, page in pages
        )
        self._write(JOURNAL, JOURNAL_COLUMNS.remove(0), batches)

    def archive(self, path: str, topic: str, subscription: str) -> PlainArchive:
        """The archive of a topic."""
        folder = self.files.plain(archive_folder(path, topic, self.files))
        return PlainArchive(path, subscription, _read(Path(folder), LOG_COLUMNS))

    def examine(
        self,
        seen: Snapshot,
        folder: str,
        archive: PlainArchive | None,
        since: datetime | None,
        listed: int,
        lines: int,
    ) -> Audit:
        """Judge the snapshot in a folder."""
        place = Path(self.files.plain(folder))
        journal, log = _read(place / JOURNAL, JOURNAL_COLUMNS.remove(0)), _read(place / LOG, LOG_COLUMNS)
        return examine(seen, journal, log, archive=archive, since=since, listed=listed, lines=lines)

    def _write(self, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
        folder = f"{self._out}/{name}"
        self.files.make_folder(folder)
        rows = 0
        with pq.ParquetWriter(Path(self.files.plain(folder)) / _PART, schema) as writer:
            for batch in batches:
                rows += batch.num_rows
                if rows > MOST_ROWS:
                    raise TooLarge
                writer.write_batch(batch)


def rows_in(folder: str, *names: str) -> int:
    """How many rows the parquet files of some folders have, by what their ends say."""
    files = LocalFiles()
    places = [Path(files.plain(f"{folder}/{name}" if name else folder)) for name in names]
    return sum(_of(place, lambda found: found.count_rows()) for place in places if place.is_dir())


def rows_at(path: str) -> int | None:
    """How many rows an archive has, if that can be said without Java."""
    return None if local_at(path) is None else rows_in(path, "")


def _read(folder: Path, schema: pa.Schema) -> pa.Table:
    """The columns of a schema; what Spark keeps beside them (_SUCCESS, .crc) does not count."""
    return _of(folder, lambda found: found.to_table(schema.names).cast(schema))


def _of(folder: Path, look: Callable[[ds.Dataset], Any]) -> Any:
    """Look at the files of a folder, again if they are merged just then: old ones go for a new one."""
    end, looks = time.monotonic() + _PATIENCE, 0
    while True:
        try:
            return look(ds.dataset(folder, format="parquet"))
        except (FileNotFoundError, pa.ArrowInvalid):
            looks = 0 if _merging(folder) else looks + 1
            if looks == _LOOKS:
                raise
            if time.monotonic() >= end and not looks:
                raise _stuck(folder) from None
        _wait()


def _wait() -> None:
    time.sleep(GRACE / 10)


def _merging(folder: Path) -> bool:
    """Whether there are files that a compaction has put in the place of old ones."""
    for file in folder.rglob("*.parquet"):
        with suppress(FileNotFoundError):  # it went while we looked
            if file.stat().st_size == len(MERGED) and file.read_bytes() == MERGED.encode():
                return True
    return False


def _stuck(folder: Path) -> Merging:
    root = folder.parent if folder.name.startswith("topic=") else folder
    return Merging(
        f"files of {folder} are being merged, or the process that did so was killed: try again later; to "
        f"have it finished, run: keylane pipeline archive --compact --to {root}"
    )


def _pages(
    connection: Connection, topic: str, bounds: list[tuple[PartitionOffsets, int, int]], *, journal: bool
) -> Iterator[tuple[int, Page]]:
    """Pages of all partitions, the next one always under way."""
    with Remote(connection) as remote:
        for at, position, end in bounds:
            options = {"limit": _PAGE, "journal": journal, "incarnation": at.incarnation}
            coming = remote.start(remote.client.read, topic, at.partition, position, end, **options)
            while position < end:
                page = coming.result()
                position = page.next
                if position < end:
                    coming = remote.start(remote.client.read, topic, at.partition, position, end, **options)
                if page.ranges:
                    yield at.partition, page


def _log_batch(partition: int, page: Page) -> pa.RecordBatch:
    entries = entries_of(page.ranges)
    keys = [key or None for key in page.flat[0::3]]
    where = pa.array([partition] * len(entries), pa.int32())
    columns = [where, entries, pa.array(keys, _TEXT), ids_of(partition, entries, page.ledgers)]
    return pa.RecordBatch.from_arrays(columns, schema=LOG_COLUMNS)
