"""The columns that the sink takes, whatever their case, without Spark."""

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from keylane import Client
from keylane.errors import InvalidArgument
from keylane_spark.sink.options import SinkOptions
from keylane_spark.sink.rows import columns_of
from keylane_spark.sink.uids import Uids
from keylane_spark.sink.writer import publish
from tests.support.running import RunningBroker


def schema(*names: str) -> StructType:
    return StructType([StructField(name, StringType()) for name in names])


def test_columns_are_matched_in_any_case(broker: RunningBroker, client: Client, topic: str) -> None:
    client.create_topic(topic, partitions=1)
    client.create_subscription(topic, "keeps", start="earliest")
    options = SinkOptions.parse({"server": broker.url, "uidColumns": "number,KEY"})
    options = options.check(schema("Key", "VALUE", "Topic", "Number"))
    rows = pa.record_batch(
        {"Key": ["k", "k"], "VALUE": ["1", "2"], "Topic": [topic] * 2, "Number": ["1", "2"]}
    )
    for _ in range(2):
        publish(options, iter([rows]), Uids("job", "1", 0))
    with client.subscribe(topic, "keeps") as consumer:
        found = [consumer.receive(timeout=60) for _ in range(2)]
        assert [(message.key, message.data()) for message in found] == [("k", b"1"), ("k", b"2")]
    assert client.describe_topic(topic).published == 2, "a uid is taken once"


def test_two_columns_that_would_be_one_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="two columns of one name: key, value, Key"):
        SinkOptions.parse({"topic": "orders"}).check(schema("key", "value", "Key"))


def test_a_column_that_cannot_be_published_is_named_as_it_is_written() -> None:
    columns = StructType([StructField("VALUE", IntegerType())])
    with pytest.raises(InvalidArgument, match="column 'VALUE' is int: it has to be binary or string"):
        SinkOptions.parse({"topic": "orders"}).check(columns)
    with pytest.raises(InvalidArgument, match="column 'Wibble' cannot be published"):
        SinkOptions.parse({"topic": "orders"}).check(schema("Wibble"))
    with pytest.raises(InvalidArgument, match="'uidColumns' and a column `uid`, not both"):
        SinkOptions.parse({"topic": "orders", "uidColumns": "value"}).check(schema("value", "UID"))


def test_uids_are_the_same_in_every_time_zone() -> None:
    """Of a session, when a query goes on."""
    made = []
    for zone in ("UTC", "Europe/Berlin"):
        due = pa.array([1_800_000_000_000_000], pa.int64()).cast(pa.timestamp("us", zone))
        batch = pa.record_batch({"value": [b"x"], "deliver_at": due})
        made.append(columns_of(batch, "orders", Uids("query", "1"), None).uids)
    assert made[0] == made[1]


def test_an_empty_key_is_refused() -> None:
    """As the client does: it would be none, and null says that."""
    batch = pa.record_batch({"key": ["k", None, ""], "value": [b"x"] * 3})
    with pytest.raises(InvalidArgument, match="use null for no key"):
        columns_of(batch, "orders", Uids("query", "1"), None)
