"""Journals and snapshots that tests write down by hand."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from pyspark.sql import DataFrame, SparkSession

from pipeline.columns import JOURNAL
from pipeline.snapshot import PartitionState, Snapshot, SubscriptionState, local
from tests.pipeline.plain_audit import records_of
from tests.pipeline.simulation import Look

NOON_MS = 1_794_830_400_000
MARKS = ("begun", "subscribed", "sought", "unsubscribed", "moved")

Line = (
    tuple[str, str, str] | tuple[str, str, str, int]
)  # what, subscription, entries, ms after the one before


def journal_of(spark: SparkSession, lines: dict[int, Sequence[Line]], *, first: int = 1) -> DataFrame:
    """A journal by partition: ("delivered", "billing", "1-5 7"), or ("published", "", "2:1-5"), ledger 2."""
    rows = []
    for partition, records in lines.items():
        at = NOON_MS
        for offset, (what, subscription, entries, *wait) in enumerate(records, first):
            at += wait[0] if wait else 1_000
            by, _, entries = entries.rpartition(":")
            for text in entries.split():
                begin, _, end = text.partition("-")
                last = None if what in MARKS else int(end or begin)
                who = (by or "1") if what == "published" else by or ("" if what in MARKS else "c1")
                rows.append((partition, offset, at, what, subscription, who, int(begin), last))
    return _frame(spark, rows)


def log_of(spark: SparkSession, entries: dict[int, Iterable[int]]) -> DataFrame:
    """A log: the entries that are there, by partition."""
    rows = [
        (partition, entry, f"k{entry}", f"{partition}:1-{entry}")
        for partition in entries
        for entry in entries[partition]
    ]
    return local(spark, rows, "partition int, offset long, key string, message_id string")


def snapshot_of(
    latest: Sequence[int],
    *,
    journal: int = 1_000_000,
    earliest: Sequence[int] = (),
    **positions: Sequence[int | None],
) -> Snapshot:
    """A snapshot: the next entry of each partition, and how far subscriptions are (mode shared)."""
    return Snapshot(
        topic="orders",
        taken_at=datetime(2026, 11, 16, 13, tzinfo=UTC),
        journal=journal,
        partitions=[
            PartitionState(number, 1, at, earliest[number] if earliest else 1, 1_000_000)
            for number, at in enumerate(latest)
        ],
        subscriptions=[SubscriptionState(name, "shared", list(at)) for name, at in positions.items()],
    )


def frames_of(spark: SparkSession, looks: Sequence[Look]) -> tuple[Snapshot, DataFrame, DataFrame]:
    """Partitions that were simulated, as the snapshot of one topic."""
    rows = [
        (partition, record.offset, record.at, record.what, record.sub, record.by, first, last)
        for partition, look in enumerate(looks)
        for record in records_of(look)
        for first, last in record.ranges
    ]
    modes = sorted({(name, mode) for look in looks for name, (mode, _) in look.positions.items()})
    snapshot = Snapshot(
        topic="orders",
        taken_at=datetime(2026, 11, 16, 13, tzinfo=UTC),
        journal=1_000_000,
        partitions=[
            PartitionState(number, 1, look.latest, look.first, look.looked)
            for number, look in enumerate(looks)
        ],
        # One for each mode that it has anywhere: partitions have nothing to do with each other here.
        subscriptions=[
            SubscriptionState(
                name,
                mode,
                [
                    look.positions[name][1] if look.positions.get(name, ("",))[0] == mode else None
                    for look in looks
                ],
            )
            for name, mode in modes
        ],
    )
    return (
        snapshot,
        _frame(spark, rows),
        log_of(spark, {number: sorted(look.log) for number, look in enumerate(looks)}),
    )


def _frame(spark: SparkSession, rows: Sequence[tuple[object, ...]]) -> DataFrame:
    columns = (
        "partition int, offset long, at long, transition string, subscription string, by string, "
        "first long, last long"
    )
    made = local(spark, rows, columns).selectExpr("*", "timestamp_millis(at) AS timestamp")
    return made.select(*[name for name in JOURNAL.names if name != "topic"])
