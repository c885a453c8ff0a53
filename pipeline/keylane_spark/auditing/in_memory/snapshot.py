"""The snapshot of a topic, read from the broker without Spark: pages of its log and journal as Arrow."""

from collections.abc import Iterator

import pyarrow as pa

from keylane.types import Page, PartitionOffsets
from keylane_spark.background_client import BackgroundClient
from keylane_spark.connection import Connection
from keylane_spark.snapshot import SnapshotTaker
from keylane_spark.source.arrow import entries_of, ids_of
from keylane_spark.source.arrow_journal import journal_batch

_PAGE = 5_000  # messages or records
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


def log_batches(connection: Connection, taker: SnapshotTaker) -> Iterator[pa.RecordBatch]:
    """The log of a topic as it is now."""
    bounds = [(at, at.earliest, at.latest) for at in taker.first]
    for partition, page in _pages(connection, taker.topic, bounds, journal=False):
        yield _log_batch(partition, page)


def journal_batches(connection: Connection, taker: SnapshotTaker) -> Iterator[pa.RecordBatch]:
    """The journal up to the end that was noted before."""
    bounds = [(at, at.journal_earliest, at.journal_latest) for at in taker.before_journal]
    for partition, page in _pages(connection, taker.topic, bounds, journal=True):
        yield journal_batch(JOURNAL_COLUMNS, taker.topic, partition, page).drop_columns(["topic"])


def _pages(
    connection: Connection, topic: str, bounds: list[tuple[PartitionOffsets, int, int]], *, journal: bool
) -> Iterator[tuple[int, Page]]:
    """Pages of all partitions, the next one always under way."""
    with BackgroundClient(connection) as remote:
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
