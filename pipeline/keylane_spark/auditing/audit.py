"""The audit: proves from a topic's journal that every message reached every subscription that was owed it.

keylane pipeline audit orders --out /var/audits/orders --archive /data/archive
spark-submit jobs/audit.py orders --out /var/audits/orders

What fits into memory is judged in this process, without Java; the rest by Spark.
"""

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from keylane.errors import InvalidArgument, Unavailable
from keylane.types import PartitionOffsets
from keylane_spark.archiving.folders import archive_folder
from keylane_spark.archiving.parquet_reader import count_rows
from keylane_spark.auditing.bodies import look_for_bodies
from keylane_spark.auditing.findings import Audit
from keylane_spark.auditing.in_memory.engine import InMemoryEngine, TooLarge
from keylane_spark.connection import Connection
from keylane_spark.files import Files, local_at
from keylane_spark.snapshot import JOURNAL, LOG, Snapshot, SnapshotTaker, check_free, load, prepare, save

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL = 1_000_000  # messages in the log, records and archived rows that are judged without Spark
WITH_SPARK = -1  # none at all
FAR = 2**62  # rows, where nobody here can count them
LISTED = 1_000  # messages, of each kind of finding
LINES = 2_000  # lines of latencies over time
ARCHIVE_SUBSCRIPTION = "archive"


class AuditOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to audit, and how."""

    topic: str
    out: str
    connection: Connection
    journal: str | None = None  # an older snapshot
    archive: str | None = None
    archive_subscription: str = ARCHIVE_SUBSCRIPTION
    since: datetime | None = None
    sample: int | None = None  # bodies to look for; None: all, 0: none
    listed: int = LISTED
    small: int = SMALL


class Engine(Protocol):
    """Who reads, writes and judges."""

    @property
    def files(self) -> Files: ...

    def write_log(self, connection: Connection, taker: SnapshotTaker) -> None: ...
    def write_journal(self, connection: Connection, taker: SnapshotTaker) -> None: ...
    def archive(self, path: str, topic: str, subscription: str) -> Any: ...
    def examine(
        self, seen: Snapshot, folder: str, archive: Any, since: datetime | None, listed: int, lines: int
    ) -> Audit: ...


def run(options: AuditOptions, spark: Callable[[int], "SparkSession"]) -> tuple[Audit, Files]:
    """Audit a topic: a fresh snapshot, written to `out`, or in `journal` what an earlier audit has left.

    Spark is asked for only where it is needed, for so many rows. With the files of `out`, for the report.
    """
    _check_folders(options)
    try:
        return _run(options, spark)
    except TooLarge:
        return _run(msgspec.structs.replace(options, small=WITH_SPARK), spark)


def _run(options: AuditOptions, spark: Callable[[int], "SparkSession"]) -> tuple[Audit, Files]:
    if options.journal is not None:
        return _run_again(options, options.journal, spark)
    with options.connection.sync() as client:
        taker = SnapshotTaker(client, options.topic)
        engine = _engine(options, taker.messages + taker.records, spark)
        prepare(options.out, engine.files)
        engine.write_log(options.connection, taker)
        bodies = None if options.sample == 0 else _bodies(options, taker.first)
        taker.note_journal_end()
        engine.write_journal(options.connection, taker)
        seen = taker.finish(bodies)
        save(seen, options.out, engine.files)
        archive = _archive(options, engine)
        if archive is not None:
            # Asked after the archive's files have been listed: what is in them was published before.
            archive.newest = {at.partition: at.latest for at in client.offsets(options.topic)}
    found = engine.examine(seen, options.out, archive, options.since, options.listed, LINES)
    return found, engine.files


def _run_again(
    options: AuditOptions, path: str, spark: Callable[[int], "SparkSession"]
) -> tuple[Audit, Files]:
    """Judge an older snapshot; the broker is not asked."""
    here = local_at(path)
    if here is not None:
        seen, folder = load(path, options.topic, here)
        engine = _engine(options, count_rows(folder, LOG, JOURNAL), spark)
    else:
        from keylane_spark.files import files_at

        engine = _engine(options, FAR, spark)
        seen, folder = load(path, options.topic, files_at(path, spark(FAR)))
    engine.files.make_folder(options.out)
    archive = _archive(options, engine)
    return engine.examine(seen, folder, archive, options.since, options.listed, LINES), engine.files


def _check_folders(options: AuditOptions) -> None:
    """What is wrong with folders here is said before anything starts."""
    if options.journal is None and (files := local_at(options.out)) is not None:
        check_free(options.out, files)
    if options.archive is not None and (files := local_at(options.archive)) is not None:
        archive_folder(options.archive, options.topic, files)


def _engine(options: AuditOptions, rows: int, spark: Callable[[int], "SparkSession"]) -> Engine:
    """By size; and what is not in a folder here is for Spark."""
    places = [options.out, *filter(None, [options.journal, options.archive])]
    small = rows <= options.small and all(local_at(place) is not None for place in places)
    if small and options.archive is not None:
        small = rows + count_rows(f"{options.archive}/topic={options.topic}", "") <= options.small
    if small:
        return InMemoryEngine(options.out)
    from keylane_spark.auditing.with_spark.engine import SparkEngine

    return SparkEngine(spark(rows), options.out)


def _archive(options: AuditOptions, engine: Engine) -> Any:
    if options.archive is None:
        return None
    return engine.archive(options.archive, options.topic, options.archive_subscription)


def _bodies(options: AuditOptions, first: list[PartitionOffsets]) -> Any:
    try:
        return look_for_bodies(options.connection, options.topic, first, options.sample)
    except (InvalidArgument, Unavailable) as error:
        raise type(error)(
            f"{error} (to check bodies, name their store with --payloads; or use --no-bodies)"
        ) from error
