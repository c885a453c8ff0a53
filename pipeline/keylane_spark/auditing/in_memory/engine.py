"""A snapshot of a topic and an audit of it without Spark and Java, where all of it fits into memory."""

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from keylane_spark.archiving.folders import archive_folder
from keylane_spark.archiving.parquet_reader import read_columns
from keylane_spark.auditing.findings import Audit
from keylane_spark.auditing.in_memory.archive_check import InMemoryArchive
from keylane_spark.auditing.in_memory.audit import examine
from keylane_spark.auditing.in_memory.snapshot import (
    JOURNAL_COLUMNS,
    LOG_COLUMNS,
    journal_batches,
    log_batches,
)
from keylane_spark.connection import Connection
from keylane_spark.files import LocalFiles
from keylane_spark.snapshot import JOURNAL, LOG, Snapshot, SnapshotTaker

MOST_ROWS = 8_000_000  # in memory; a record may have a thousand

_PART = "part-0.parquet"


class TooLarge(Exception):
    """There is more than memory should hold: this is one for Spark."""


class InMemoryEngine:
    """Reads, writes and judges in this process."""

    def __init__(self, out: str) -> None:
        self.files = LocalFiles()
        self._out = out

    def write_log(self, connection: Connection, taker: SnapshotTaker) -> None:
        """Write the log of a topic as it is now."""
        self._write(LOG, LOG_COLUMNS, log_batches(connection, taker))

    def write_journal(self, connection: Connection, taker: SnapshotTaker) -> None:
        """Write the journal up to the end that was noted before."""
        self._write(JOURNAL, JOURNAL_COLUMNS.remove(0), journal_batches(connection, taker))

    def archive(self, path: str, topic: str, subscription: str) -> InMemoryArchive:
        """The archive of a topic."""
        folder = self.files.plain(archive_folder(path, topic, self.files))
        return InMemoryArchive(path, subscription, read_columns(Path(folder), LOG_COLUMNS))

    def examine(
        self,
        seen: Snapshot,
        folder: str,
        archive: InMemoryArchive | None,
        since: datetime | None,
        listed: int,
        lines: int,
    ) -> Audit:
        """Judge the snapshot in a folder."""
        place = Path(self.files.plain(folder))
        journal, log = (
            read_columns(place / JOURNAL, JOURNAL_COLUMNS.remove(0)),
            read_columns(place / LOG, LOG_COLUMNS),
        )
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
