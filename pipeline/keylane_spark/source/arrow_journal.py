"""Pages of a partition's journal as Arrow columns: a row for each range of entries of each record."""

import pyarrow as pa
import pyarrow.compute as pc

from keylane.errors import ProtocolError
from keylane.types import Page
from keylane_spark.source.arrow import entries_of, moments

_FIELDS = 5  # at, what, sub, by, entries
_POINTS = ["begun", "subscribed", "unsubscribed", "sought", "moved"]  # these say from where on, and not what


def journal_batch(schema: pa.Schema, topic: str, partition: int, page: Page) -> pa.RecordBatch:
    """Those columns of the data source with journal=true that are in the schema."""
    offsets = entries_of(page.ranges)
    if len(page.flat) != _FIELDS * len(offsets):
        raise ProtocolError(f"a page of the journal of {topic!r} whose lists do not belong together")
    at, what, subscription, by, entries = (
        pa.array(page.flat[field::_FIELDS], pa.string()) for field in range(_FIELDS)
    )
    texts = pc.split_pattern(entries, " ")
    record = pc.list_parent_indices(texts)
    what = what.take(record)
    first, last = bounds(texts.flatten())
    columns = {
        "topic": pa.repeat(pa.scalar(topic, pa.string()), len(record)),
        "partition": pa.repeat(pa.scalar(partition, pa.int32()), len(record)),
        "offset": offsets.take(record),
        "timestamp": moments(at).take(record),
        "transition": what,
        "subscription": subscription.take(record),
        "by": by.take(record),
        "first": first,
        "last": pc.if_else(pc.is_in(what, pa.array(_POINTS)), pa.scalar(None, pa.int64()), last),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def bounds(texts: pa.StringArray) -> tuple[pa.Int64Array, pa.Int64Array]:
    """The first and last numbers of texts such as `5-9` and `12`; null for an empty text."""
    parts = pc.split_pattern(texts, "-", max_splits=1)
    first = pc.list_element(parts, 0)
    first = pc.cast(pc.if_else(pc.equal(first, ""), pa.scalar(None, pa.string()), first), pa.int64())
    last = pc.list_slice(parts, 1, 2, return_fixed_size_list=True).flatten()
    return first, pc.coalesce(pc.cast(last, pa.int64()), first)
