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

from client.errors import InvalidArgument
from pipeline.options import ReadOptions

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
    if options.journal:
        return JOURNAL
    return MESSAGES if options.include_value else StructType([f for f in MESSAGES if f.name != "value"])


def check_columns(options: ReadOptions, schema: StructType) -> StructType:
    """The columns, if a schema that the user gave is the same; InvalidArgument if not."""
    columns = columns_for(options)
    wanted = [(field.name, field.dataType) for field in schema]
    if wanted != [(field.name, field.dataType) for field in columns]:
        raise InvalidArgument(
            f"keylane has its own columns ({', '.join(columns.names)}): leave .schema(…) out, and select "
            "from them"
        )
    return columns
