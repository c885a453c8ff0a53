"""The columns of the data source."""

from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from keylane.errors import InvalidArgument
from keylane_spark.source.options import ReadOptions

_MESSAGES: dict[str, DataType] = {
    "key": StringType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "message_id": StringType(),
    "timestamp": TimestampType(),
    "event_time": TimestampType(),
    "attributes": MapType(StringType(), StringType()),
}
_JOURNAL: dict[str, DataType] = {
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "transition": StringType(),
    "subscription": StringType(),
    "by": StringType(),
    "first": LongType(),
    "last": LongType(),
}

MESSAGES = StructType([StructField(name, kind) for name, kind in _MESSAGES.items()])
JOURNAL = StructType([StructField(name, kind) for name, kind in _JOURNAL.items()])


def columns_for(options: ReadOptions) -> StructType:
    """The columns that the options ask for."""
    whole = JOURNAL if options.journal else MESSAGES
    if options.columns is not None:
        return _chosen(whole, options.columns)
    return StructType([field for field in whole if options.include_value or field.name != "value"])


def check_columns(options: ReadOptions, schema: StructType) -> StructType:
    """The columns of a schema, which may be the user's own, if we have them; InvalidArgument if not."""
    columns = columns_for(options)
    kinds = {field.name: field.dataType for field in columns}
    if not schema.names or any(kinds.get(field.name) != field.dataType for field in schema):
        raise InvalidArgument(
            f"keylane has its own columns ({', '.join(columns.names)}): leave .schema(…) out, and choose "
            "some of them with .option('columns', …)"
        )
    return StructType([columns[name] for name in schema.names])


def _chosen(whole: StructType, names: list[str]) -> StructType:
    """Columns by their names, in that order."""
    fields = {field.name: field for field in whole}
    for name in names:
        if name.lower() not in fields:
            raise InvalidArgument(
                f"option 'columns' is {','.join(names)!r}: there is no column {name!r}, but "
                f"{', '.join(fields)}"
            )
    if len({name.lower() for name in names}) < len(names):
        raise InvalidArgument(f"option 'columns' is {','.join(names)!r}: it names a column twice")
    return StructType([fields[name.lower()] for name in names])
