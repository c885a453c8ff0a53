"""The options of a writer: what .option(…) takes, checked before anything is published."""

from collections.abc import Mapping

import msgspec
from pyspark.sql.types import StructType

from keylane import Client
from keylane_spark.connection import Connection
from keylane_spark.options import known, refuse
from keylane_spark.sink.pace import DUE
from keylane_spark.sink.rows import SINK_COLUMNS, check_columns, check_identities

_OPTIONS = ("server", "token", "payloads", "topic", "durability", "uidColumns")
_SPARKS = ("checkpointlocation", "queryname")  # Spark's own, which it hands on
# For our own jobs: a file that is told what became of the rows; rows that wait, see pace.py; until when
# rows may be published that perhaps were before, in unix time; and whether that is so for all of them.
_OWN = ("_report", "_paced", "_until", "_again")


class SinkOptions(msgspec.Struct, frozen=True):
    """What the options of a writer say."""

    connection: Connection
    topic: str | None
    durability: str | None
    report: str | None = None
    paced: bool = False
    uid_columns: list[str] = []
    until: float | None = None
    again: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> "SinkOptions":
        """From the options as Spark has them; InvalidArgument names the one that cannot be right."""
        own = {name: value for name, value in options.items() if name in _OWN}
        rest = {name: value for name, value in options.items() if name.lower() not in (*_OWN, *_SPARKS)}
        given = known(rest, _OPTIONS, "writing")
        return cls(
            Connection.parse(given),
            given.get("topic") or None,
            given.get("durability") or None,
            own.get("_report"),
            "_paced" in own,
            _names(given.get("uidColumns")),
            float(own["_until"]) if "_until" in own else None,
            "_again" in own,
        )

    def check(self, schema: StructType) -> "SinkOptions":
        """The options as they are meant for these columns; those that cannot be published are refused."""
        names = check_identities(schema, self.uid_columns)
        beside = [name for name in names if name not in SINK_COLUMNS]  # they are only there for the uid
        fields = [
            field
            for field in schema.fields
            if field.name not in beside and not (self.paced and field.name == DUE)
        ]
        check_columns(StructType(fields), self.topic)
        return msgspec.structs.replace(self, uid_columns=names)

    def client(self) -> Client:
        """A client, to be entered with `with`."""
        to = self.connection
        return Client(to.server, token=to.token, payloads=to.payloads, producer_group="spark")


def _names(text: str | None) -> list[str]:
    """What the option uidColumns lists."""
    if text is None:
        return []
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        refuse("uidColumns", text, "the name of a column, or several: order_id,line")
    return names
