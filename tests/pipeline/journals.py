"""Journals and snapshots that tests write down by hand."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from keylane_spark.auditing.in_memory.snapshot import JOURNAL_COLUMNS, LOG_COLUMNS
from keylane_spark.snapshot import BodiesState, PartitionState, Snapshot, SubscriptionState
from tests.pipeline.reference_audit import records_of
from tests.pipeline.simulation import Look

NOON_MS = 1_794_830_400_000
MARKS = ("begun", "subscribed", "sought", "unsubscribed", "moved")

Line = (
    tuple[str, str, str] | tuple[str, str, str, int]
)  # what, subscription, entries, ms after the one before


def journal_of(lines: dict[int, Sequence[Line]], *, first: int = 1) -> pa.Table:
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
    return _table(rows)


def log_of(entries: dict[int, Iterable[int]]) -> pa.Table:
    """A log: the entries that are there, by partition."""
    return rows_of(f"{partition}:1-{entry}" for partition in entries for entry in entries[partition])


def rows_of(ids: Iterable[str]) -> pa.Table:
    """Messages with these ids, in a log or an archive."""
    places = [(int(name.partition(":")[0]), int(name.rpartition("-")[2]), name) for name in ids]
    rows = [(partition, entry, f"k{entry}", name) for partition, entry, name in places]
    return pa.Table.from_pylist(
        [dict(zip(LOG_COLUMNS.names, row, strict=True)) for row in rows], schema=LOG_COLUMNS
    )


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
            PartitionState(number, 1, at, earliest[number] if earliest else 1, 1_000_000, 1)
            for number, at in enumerate(latest)
        ],
        subscriptions=[SubscriptionState(name, "shared", list(at)) for name, at in positions.items()],
        bodies=BodiesState(0, 0, {}),
    )


def read_to_the_end(seen: Snapshot, journal: pa.Table) -> Snapshot:
    """The snapshot of a journal from whose end nothing is missing."""

    def end(state: PartitionState) -> int:
        here = journal.filter(pc.equal(journal.column("partition"), state.partition))
        return max(here.column("offset").to_pylist(), default=state.journal_earliest - 1) + 1

    states = [msgspec.structs.replace(state, journal_end=end(state)) for state in seen.partitions]
    return msgspec.structs.replace(seen, partitions=states)


def tables_of(looks: Sequence[Look]) -> tuple[Snapshot, pa.Table, pa.Table]:
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
            PartitionState(number, 1, look.latest, look.first, look.looked, len(look.records) + 1)
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
    return snapshot, _table(rows), log_of({number: sorted(look.log) for number, look in enumerate(looks)})


def _table(rows: Sequence[tuple[object, ...]]) -> pa.Table:
    names = ["partition", "offset", "timestamp", "transition", "subscription", "by", "first", "last"]
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    ms = pa.array(columns[2], pa.int64())
    columns[2] = ms.cast(pa.timestamp("ms", "UTC"))
    return pa.table(columns, names).cast(JOURNAL_COLUMNS.remove(0))
