"""The rows that the sink takes: which columns there may be, and what becomes of them."""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from keylane.errors import InvalidArgument
from keylane.produce.columns import Columns
from keylane_spark.sink.uids import Uids

_TYPES: dict[str, tuple[type[DataType], ...]] = {
    "value": (BinaryType, StringType),
    "key": (StringType, BinaryType),
    "attributes": (MapType,),
    "topic": (StringType,),
    "partition": (IntegerType, LongType, ShortType, ByteType),
    "uid": (StringType,),
    "delay": (DoubleType, FloatType, IntegerType, LongType, DecimalType),
    "deliver_at": (TimestampType,),
}
SINK_COLUMNS = tuple(_TYPES)
_NAMES = ", ".join(SINK_COLUMNS)
_IDENTITIES = (
    StringType,
    BinaryType,
    BooleanType,
    ByteType,
    ShortType,
    IntegerType,
    LongType,
    DecimalType,
    DateType,
    TimestampType,
    TimestampNTZType,
)
_deterministic = msgspec.json.Encoder(order="deterministic").encode


def plain_name(name: str) -> str:
    """How the sink spells a column: `Key` is `key`, as it is to Spark."""
    return name.lower() if name.lower() in _TYPES else name


def plain_names(batch: Any) -> Any:
    """The same rows with the columns as the sink spells them."""
    names = [plain_name(name) for name in batch.schema.names]
    return batch if names == batch.schema.names else batch.rename_columns(names)


def check_columns(schema: StructType, topic: str | None) -> None:
    """Refuse by name what cannot be published; `topic` is that of the option."""
    names = [plain_name(name) for name in schema.names]
    if len(set(names)) < len(names):
        raise InvalidArgument(f"two columns of one name: {', '.join(schema.names)}")
    for name, field in zip(names, schema.fields, strict=True):
        kinds = _TYPES.get(name)
        if kinds is None:
            raise InvalidArgument(
                f"column {field.name!r} cannot be published: the sink takes {_NAMES}; drop it, or put it "
                "into value or attributes"
            )
        fits = isinstance(field.dataType, kinds)
        if isinstance(field.dataType, MapType):
            fits &= isinstance(field.dataType.keyType, StringType)
            fits &= isinstance(field.dataType.valueType, StringType)
        if not fits:
            wanted = "map<string,string>" if name == "attributes" else _simple(kinds)
            raise InvalidArgument(
                f"column {field.name!r} is {field.dataType.simpleString()}: it has to be {wanted}"
            )
    if topic is None and "topic" not in names:
        raise InvalidArgument("no topic: name it with .option('topic', …), or in a column `topic`")


def check_identities(schema: StructType, names: Sequence[str]) -> list[str]:
    """The columns that uids are to be of, as the schema spells them."""
    spelled = {field.name.lower(): field for field in schema.fields}
    found = []
    for name in names:
        field = spelled.get(name.lower())
        if field is None:
            raise InvalidArgument(
                f"option 'uidColumns' names {name!r}: the columns are {', '.join(schema.names)}"
            )
        if not isinstance(field.dataType, _IDENTITIES):
            raise InvalidArgument(
                f"option 'uidColumns' names {name!r}, which is {field.dataType.simpleString()}: use text, "
                "bytes, whole or decimal numbers, dates and times"
            )
        found.append(plain_name(field.name))
    if found and "uid" in map(plain_name, schema.names) and found != ["uid"]:
        raise InvalidArgument("give one of the option 'uidColumns' and a column `uid`, not both")
    return found


def _simple(kinds: tuple[type[DataType], ...]) -> str:
    return " or ".join(kind().simpleString() for kind in kinds)


def by_topic(batch: Any, topic: str | None) -> Iterator[tuple[str, Any]]:
    """The rows of each topic, in the order in which they came; the option's topic is that of all."""
    if topic is not None:
        yield topic, batch
        return
    column = batch.column("topic")
    if column.null_count:
        raise InvalidArgument("a row has no topic: its column `topic` is null")
    for name in pc.unique(column).to_pylist():
        yield name, batch.filter(pc.equal(column, name))


def columns_of(batch: Any, topic: str, uids: Uids | Sequence[str], durability: str | None) -> Columns:
    """Rows for one topic as the client takes them; `uids` makes their uids, or is the columns they are of."""
    keys, values = _texts(batch, "key"), _column(batch, "value")
    if keys is not None and pc.any(pc.equal(keys, "")).as_py():
        raise InvalidArgument("a row's key is empty: use null for no key, for example nullif(key, '')")
    if values is not None:
        values = values.cast(pa.binary())
    attributes, canonical = _attributes(batch)
    partitions = _column(batch, "partition")
    delays, dues = _column(batch, "delay"), _column(batch, "deliver_at")
    content = [pa.repeat(pa.scalar(topic), batch.num_rows), keys, values, canonical]
    content += [None if column is None else _text_of(column) for column in (partitions, delays, dues)]
    return Columns(
        keys=None if keys is None else keys.to_pylist(),
        bodies=None if values is None else values.to_pylist(),
        uids=_uids(batch, [column for column in content if column is not None], uids),
        attributes=attributes,
        partitions=None if partitions is None else partitions.to_pylist(),
        durability=durability,
        delays=None if delays is None else delays.cast(pa.float64()).to_pylist(),
        dues=None
        if dues is None
        else dues.cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64()).to_pylist(),
    )


def _uids(batch: Any, content: list[Any], uids: Uids | Sequence[str]) -> list[str]:
    """The uid of each row: of the columns that are named, or its own, or one of all that it holds."""
    if not isinstance(uids, Uids):
        return _identities(batch, uids)
    given = _column(batch, "uid")
    if given is None:
        return uids.take(content)
    found: list[str] = given.to_pylist()
    without = [row for row, uid in enumerate(found) if not uid]
    if without:
        places = pa.array(without)
        made = uids.take([column.take(places) for column in content])
        for row, uid in zip(without, made, strict=True):
            found[row] = uid
    return found


def _identities(batch: Any, names: Sequence[str]) -> list[str]:
    """Uids of what some columns hold, and of nothing else."""
    columns = [batch.column(name) for name in names]
    nothing = reduce(pc.and_, [column.is_null() for column in columns])
    if pc.any(nothing).as_py():
        raise InvalidArgument(f"a row has nothing in {' and '.join(names)}, so it has no uid: see uidColumns")
    return Uids("columns").plain([_text_of(column) for column in columns])


def _text_of(column: Any) -> Any:
    """What a column holds as text or bytes, whatever the time zone of the session."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    binary = pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)
    return column if binary else column.cast(pa.string())


def _column(batch: Any, name: str) -> Any:
    return batch.column(name) if name in batch.schema.names else None


def _texts(batch: Any, name: str) -> Any:
    """A column as text, None if there is none; bytes have to be UTF-8."""
    column = _column(batch, name)
    if column is None:
        return None
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise InvalidArgument(f"a row's {name} is not UTF-8 text: {error}") from error


def _attributes(batch: Any) -> tuple[list[dict[str, str] | None] | None, Any]:
    """The attributes of each row, and a text that is the same for the same ones in another order."""
    column = _column(batch, "attributes")
    if column is None:
        return None, None
    found = [dict(pairs) if pairs else None for pairs in column.to_pylist()]
    for row in found:
        if row and None in row.values():
            raise InvalidArgument(f"a row has an attribute that is null: {row}")
    return found, pa.array([_deterministic(row) if row else None for row in found], pa.binary())
