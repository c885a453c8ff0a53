"""Pages of a partition as Arrow columns; nothing here is done row by row in Python.

The texts of an entry are described in docs/keyspace.md: `about` is
`<published ms> <produced ms> <producer group> <body> <attributes as JSON>`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from keylane.errors import ProtocolError
from keylane.types import RawPage
from keylane.wire.ledgers import parse_ledgers
from keylane_spark.source.arrow_lines import Lines

_KEY, _UID, _ABOUT = 1, 2, 3  # fields of a line
_PARTS = 5  # of an about, of which these are of use here:
_PUBLISHED, _PRODUCED, _BODY, _ATTRIBUTES = 0, 1, 3, 4
_MANY = 32  # ranges, from which on a list of all entries is cheaper than an array for each
_MAP = pa.map_(pa.string(), pa.string())
_decode = msgspec.json.Decoder(dict[str, str]).decode


class Messages:
    """The messages of a page, or of a part of it; of what they say only that is read which is asked for."""

    def __init__(self, topic: str, partition: int, page: RawPage) -> None:
        self.topic = topic
        self.partition = partition
        self._lines, self._ledgers = Lines(page.answers, 3), page.ledgers
        self.entries = self._lines.entries()
        self._slice: slice | None = None  # of the lines, where it is a part

    def __len__(self) -> int:
        return len(self.entries)

    def cut(self, limit: int) -> Iterator["Messages"]:
        """The same in parts, whose bodies together have no more bytes than that, unless one alone does."""
        if not len(self) or not self._has_bodies():
            yield self
            return
        sums = pc.cumulative_sum(self._sizes())
        start = before = 0
        while start < len(self):
            stop = max(start + 1, bisect_right(sums, before + limit, start, key=_plain))
            yield self if (start, stop) == (0, len(self)) else self._part_of(start, stop)
            start, before = stop, _plain(sums[stop - 1])

    def names(self) -> list[str]:
        """The names of the bodies in the payload store, leaving out messages that have none."""
        if not self._has_bodies():
            return []
        named = pc.list_slice(self._wheres, 1, 2, return_fixed_size_list=True)
        names = named.flatten()
        if names.null_count:
            names = pc.coalesce(names, self._texts(_UID)).filter(self._present())
        return list(names.to_pylist())

    def values(self, bodies: Sequence[bytes | None]) -> pa.BinaryArray:
        """The column of bodies as names() has them: null for one that is gone, empty where there is none."""
        found = pa.array(bodies, pa.binary())
        if len(found) == len(self):
            return found
        empty = pa.repeat(pa.scalar(b"", pa.binary()), len(self))
        return pc.replace_with_mask(empty, self._present(), found)

    def ids(self) -> pa.StringArray:
        """`<partition>:<ledger>-<entry>`, as Message.id."""
        return ids_of(self.partition, self.entries, self._ledgers)

    def batch(self, schema: pa.Schema, values: pa.BinaryArray | None) -> pa.RecordBatch:
        """Those columns of the data source that are in the schema."""
        ways: dict[str, Callable[[], pa.Array]] = {
            "key": self._texts_of_keys,
            "value": lambda: values,
            "topic": lambda: pa.repeat(pa.scalar(self.topic, pa.string()), len(self)),
            "partition": lambda: pa.repeat(pa.scalar(self.partition, pa.int32()), len(self)),
            "offset": lambda: self.entries,
            "message_id": self.ids,
            "timestamp": lambda: moments(self._part(_PUBLISHED)),
            "event_time": lambda: moments(self._part(_PRODUCED)),
            "attributes": lambda: attributes_of(self._part(_ATTRIBUTES)),
        }
        return pa.RecordBatch.from_arrays([ways[name]() for name in schema.names], schema=schema)

    def _texts_of_keys(self) -> pa.StringArray:
        keys = self._texts(_KEY)
        return pc.if_else(pc.equal(keys, ""), pa.scalar(None, pa.string()), keys)

    @cached_property
    def _parts(self) -> pa.StringArray:
        return parts_of(self._texts(_ABOUT))

    def _part(self, at: int) -> pa.StringArray:
        return self._parts.take(pa.arange(at, len(self._parts), _PARTS))

    @cached_property
    def _bodies(self) -> pa.StringArray:
        return self._part(_BODY)

    @cached_property
    def _wheres(self) -> pa.ListArray:
        """Of each body its size and, unless that is the uid, its name."""
        return pc.split_pattern(self._bodies, ":", max_splits=1)

    def _has_bodies(self) -> bool:
        return bool(pc.any(self._present()).as_py())

    def _present(self) -> pa.BooleanArray:
        return pc.not_equal(self._bodies, "")

    def _sizes(self) -> pa.Int64Array:
        digits = pc.list_element(self._wheres, 0)
        return pc.cast(pc.if_else(pc.equal(digits, ""), "0", digits), pa.int64())

    def _part_of(self, start: int, stop: int) -> "Messages":
        part = Messages.__new__(Messages)
        part.topic, part.partition = self.topic, self.partition
        part._lines, part._ledgers, part._slice = self._lines, self._ledgers, slice(start, stop)
        part.entries = self.entries[start:stop]
        return part

    def _texts(self, field: int) -> pa.StringArray:
        column = self._lines.column(field)
        return column if self._slice is None else column[self._slice]


def entries_of(ranges: Sequence[int]) -> pa.Int64Array:
    """The entries of first, last, first, last, …"""
    if len(ranges) > 2 * _MANY:
        each = (range(ranges[at], ranges[at + 1] + 1) for at in range(0, len(ranges), 2))
        return pa.array(list(chain.from_iterable(each)), pa.int64())
    if not ranges:
        return pa.array([], pa.int64())
    return pa.concat_arrays([pa.arange(ranges[at], ranges[at + 1] + 1) for at in range(0, len(ranges), 2)])


def ids_of(partition: int, entries: pa.Int64Array, ledgers: str) -> pa.StringArray:
    """`<partition>:<ledger>-<entry>` of each entry; `ledgers` is `<ledger>:<first entry> …`, oldest first."""
    names, starts = parse_ledgers(ledgers)
    if not names:
        raise ProtocolError("a page that does not say which ledgers its entries are of")
    cuts = [bisect_left(entries, first, key=_plain) for first in starts[1:]]
    numbers = pc.cast(entries, pa.string())
    pieces = [
        pc.binary_join_element_wise(f"{partition}:{ledger}-", numbers[start:stop], "")
        for ledger, start, stop in zip(names, [0, *cuts], [*cuts, len(entries)], strict=True)
        if start < stop
    ]
    return pa.concat_arrays(pieces) if pieces else pa.array([], pa.string())


def parts_of(abouts: pa.StringArray) -> pa.StringArray:
    """The five parts of each `about`, one after another."""
    parts = pc.split_pattern(abouts, " ", max_splits=_PARTS - 1)
    if len(wrong := abouts.filter(pc.not_equal(pc.list_value_length(parts), _PARTS))):
        raise ProtocolError(f"a message is described by {wrong[0].as_py()!r:.80}")
    return parts.flatten()


def moments(milliseconds: pa.StringArray) -> pa.TimestampArray:
    """Texts of milliseconds since 1970 as times."""
    numbers = pc.multiply(pc.cast(milliseconds, pa.int64()), 1_000)
    return numbers.cast(pa.timestamp("us", tz="UTC"))


def attributes_of(texts: pa.StringArray) -> pa.MapArray:
    """Texts of JSON as maps, each distinct one read once; "" is an empty map."""
    encoded = texts.dictionary_encode()
    distinct = [list(_decode(text).items()) if text else [] for text in encoded.dictionary.to_pylist()]
    return pa.array(distinct, _MAP).take(encoded.indices)


def _plain(scalar: pa.Int64Scalar) -> int:
    return int(scalar.as_py())
