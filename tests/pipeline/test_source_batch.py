"""spark.read.format("keylane") against a real broker."""

import json
from collections.abc import Callable
from datetime import UTC

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from keylane import Client, OutgoingMessage
from keylane_spark.source.schema import MESSAGES
from tests.support.running import RunningBroker

Read = Callable[..., DataFrame]


@pytest.fixture(autouse=True)
def _kept(client: Client, topic: str) -> None:
    """The topic, whose messages stay since a subscription is owed them."""
    client.create_topic(topic, partitions=3)
    client.create_subscription(topic, "keeps", start="earliest")


def fill(client: Client, topic: str, count: int) -> None:
    """Publish messages with keys and bodies."""
    client.publish_many(topic, [OutgoingMessage(f"body-{at}", key=f"key-{at % 7}") for at in range(count)])


def test_a_topic_is_a_table_with_the_columns_of_the_contract(client: Client, topic: str, read: Read) -> None:
    sent = client.publish(topic, b"42", key="customer-7", attributes={"region": "eu west"})
    frame = read()
    assert frame.schema == MESSAGES
    (row,) = frame.collect()
    assert (row.key, bytes(row.value), row.topic) == ("customer-7", b"42", topic)
    assert (row.partition, row.offset, row.message_id) == (sent.partition, sent.entry, sent.id)
    assert row.attributes == {"region": "eu west"}
    (peeked,) = client.peek(topic, "keeps")
    assert row.timestamp.timestamp() == peeked.published_at.timestamp()
    assert row.event_time.timestamp() == peeked.produced_at.timestamp()


def test_a_message_of_nothing_has_a_null_key_no_attributes_and_an_empty_value(
    client: Client, topic: str, read: Read
) -> None:
    client.publish(topic)
    (row,) = read().collect()
    assert (row.key, bytes(row.value), row.attributes) == (None, b"", {})


def test_every_message_is_there_once_and_in_order_within_its_partition(
    client: Client, topic: str, read: Read
) -> None:
    fill(client, topic, 12_000)
    rows = read().select("key", "value", "partition", "offset").collect()
    assert sorted(bytes(row.value) for row in rows) == sorted(b"body-%d" % at for at in range(12_000))
    for partition in range(3):
        offsets = [row.offset for row in rows if row.partition == partition]
        assert offsets == list(range(1, len(offsets) + 1))
    for key in {row.key for row in rows}:
        numbers = [int(bytes(row.value).removeprefix(b"body-")) for row in rows if row.key == key]
        assert numbers == sorted(numbers)


def test_a_value_that_is_left_out_is_not_fetched(client: Client, topic: str, read: Read) -> None:
    fill(client, topic, 100)
    # A store that cannot be reached is one that nobody asked.
    frame = read(includeValue="false", payloads="redis://127.0.0.1:1/0")
    assert "value" not in frame.columns
    assert frame.count() == 100


def test_large_bodies_come_in_batches_that_fit_into_memory(client: Client, topic: str, read: Read) -> None:
    body = bytes(5 * 1024 * 1024)
    client.publish_many(topic, [OutgoingMessage(body, partition=0) for _ in range(10)])
    sizes = read().selectExpr("length(value) AS size").collect()
    assert [row.size for row in sizes] == [len(body)] * 10


def test_ranges_are_cut_for_as_many_tasks_as_asked_for(client: Client, topic: str, read: Read) -> None:
    fill(client, topic, 1_000)
    whole, fine = read(), read(minPartitions="10")
    assert whole.rdd.getNumPartitions() == 1
    assert 8 <= fine.rdd.getNumPartitions() <= 12
    ids = [sorted(row.message_id for row in frame.select("message_id").collect()) for frame in (whole, fine)]
    assert ids[0] == ids[1]
    assert len(set(ids[1])) == 1_000


def test_offsets_choose_what_is_read(client: Client, topic: str, read: Read) -> None:
    client.publish_many(topic, [OutgoingMessage(str(at), partition=0) for at in range(10)])
    client.publish_many(topic, [OutgoingMessage(str(at), partition=1) for at in range(10)])
    frame = read(
        startingOffsets=json.dumps({topic: {"0": 4, "1": -1}}), endingOffsets=json.dumps({topic: {"0": 7}})
    )
    assert sorted((row.partition, row.offset) for row in frame.collect()) == [(0, 4), (0, 5), (0, 6)]
    assert read(startingOffsets="latest").count() == 0


def test_a_time_chooses_what_is_read(client: Client, topic: str, read: Read) -> None:
    fill(client, topic, 50)
    fill(client, topic, 30)
    # The clock of the cluster is that of its Redis, so the messages themselves say when they came.
    times = sorted(row.timestamp for row in read().collect())
    found = read(startingTimestamp=times[50].astimezone(UTC).isoformat()).collect()
    assert sorted(row.timestamp for row in found) == times[times.index(times[50]) :]
    assert found
    assert read(startingTimestamp="0").count() == 80
    assert read(startingTimestamp="2100-01-01T00:00:00Z").count() == 0


def test_with_a_subscription_a_batch_reads_what_that_is_owed_and_drains_nothing(
    client: Client, topic: str, read: Read
) -> None:
    fill(client, topic, 20)
    client.create_subscription(topic, "report", mode="cursor", start="latest")
    fill(client, topic, 5)
    assert read(subscription="report").count() == 5
    assert read(subscription="report").count() == 5
    assert client.describe_subscription(topic, "report").backlog == 5
    assert read().count() == 25


def test_several_topics_are_read_together(
    client: Client, make_topic_name: Callable[[], str], topic: str, read: Read
) -> None:
    other = make_topic_name()
    client.create_topic(other, partitions=1)
    client.create_subscription(other, "keeps", start="earliest")
    fill(client, topic, 4)
    fill(client, other, 2)
    counts = {
        row.topic: row["count"]
        for row in read(subscribe=f"{topic},{other}").groupBy("topic").count().collect()
    }
    assert counts == {topic: 4, other: 2}


def test_an_empty_topic_is_an_empty_table(read: Read) -> None:
    assert read().collect() == []


def test_offsets_that_are_gone_are_a_loss_that_is_named(client: Client, topic: str, read: Read) -> None:
    client.publish_many(topic, [OutgoingMessage(str(at), partition=0) for at in range(10)])
    client.create_subscription(topic, "spark", mode="cursor", start="earliest")
    client.delete_subscription(topic, "keeps")
    client.claim(topic, "spark", "test")
    client.commit(topic, "spark", "test", {0: 6})
    start = json.dumps({topic: {"0": 3}})
    with pytest.raises(
        PySparkException, match=rf"asks for offset 3 of topic '{topic}', partition 0.*left is 6"
    ):
        read(startingOffsets=start).collect()
    assert [row.offset for row in read(startingOffsets=start, failOnDataLoss="false").collect()] == [
        6,
        7,
        8,
        9,
        10,
    ]


def test_a_message_that_is_missing_is_a_loss_that_is_named(
    broker: RunningBroker, client: Client, topic: str, read: Read
) -> None:
    client.create_subscription(topic, "spark", mode="cursor", start="earliest")
    client.publish_many(topic, [OutgoingMessage(str(at), partition=1) for at in range(10)])
    import redis

    with redis.Redis.from_url(broker.redis_url) as server:
        entries = server.xrange(f"kl:{{{topic}:1}}:log")
        server.xdel(f"kl:{{{topic}:1}}:log", entries[3][0], entries[4][0], entries[8][0])
    with pytest.raises(
        PySparkException, match=rf"3 messages of topic '{topic}', partition 1 are gone: offsets 4-5, 9"
    ):
        read(subscription="spark").collect()
    rows = read(subscription="spark", failOnDataLoss="false").collect()
    assert [row.offset for row in rows] == [1, 2, 3, 6, 7, 8, 10]


def test_a_body_that_is_missing_is_a_loss_that_names_the_message(
    broker: RunningBroker, client: Client, topic: str, read: Read
) -> None:
    sent = client.publish_many(topic, [OutgoingMessage(str(at), partition=2) for at in range(4)])
    import redis

    with redis.Redis.from_url(broker.redis_url) as server:
        for key in server.scan_iter(f"kl:bodies:{topic}:*"):
            server.hdel(key, sent[1].uid)
    with pytest.raises(PySparkException, match=f"no body for 1 messages of topic '{topic}': {sent[1].id}"):
        read().collect()
    rows = read(failOnDataLoss="false").collect()
    assert [row.value and bytes(row.value) for row in rows] == [b"0", None, b"2", b"3"]


def test_positions_that_there_are_not_are_refused(client: Client, topic: str, read: Read) -> None:
    fill(client, topic, 3)
    for options, error in [
        ({"endingOffsets": json.dumps({topic: {"0": 99}})}, "'endingOffsets' has position 99 in partition 0"),
        (
            {"startingOffsets": json.dumps({topic: {"0": 99}})},
            "'startingOffsets' has position 99 in partition 0",
        ),
        ({"startingOffsets": json.dumps({topic: {"7": 1}})}, "partition 7 of .* which has 3: 0 to 2"),
    ]:
        with pytest.raises(PySparkException, match=error):
            read(**options).collect()


def test_a_topic_that_there_is_not_is_named(topic: str, read: Read) -> None:
    with pytest.raises(PySparkException, match="no topic 'nowhere'"):
        read(subscribe="nowhere").collect()


def test_a_wrong_option_is_refused_before_anything_runs(read: Read) -> None:
    with pytest.raises(PySparkException, match=r"'startingoffset' .*did you mean 'startingOffsets'"):
        read(startingOffset="latest")


def test_columns_are_chosen_by_an_option_or_by_a_schema(
    client: Client, topic: str, read: Read, spark: SparkSession, broker: RunningBroker
) -> None:
    fill(client, topic, 20)
    whole = read()
    chosen = read(columns="Value, offset,key,attributes")
    assert chosen.columns == ["value", "offset", "key", "attributes"]
    assert sorted(chosen.collect()) == sorted(whole.select(*chosen.columns).collect())
    reader = spark.read.format("keylane").schema("partition INT, key STRING")
    given = reader.options(server=broker.url, subscribe=topic, payloads="redis://127.0.0.1:1/0").load()
    assert sorted(given.collect()) == sorted(whole.select("partition", "key").collect())


@pytest.mark.parametrize("pushed", ["true", "false"])
def test_filters_leave_the_same_rows_whether_or_not_spark_tells_of_them(
    client: Client, topic: str, read: Read, spark: SparkSession, pushed: str
) -> None:
    fill(client, topic, 300)
    rows = [(row.partition, row.offset, row.timestamp) for row in read().collect()]
    middle = sorted(row[2] for row in rows)[len(rows) // 2]
    setting = "spark.sql.python.filterPushdown.enabled"
    before = spark.conf.get(setting, "false") or "false"
    spark.conf.set(setting, pushed)
    try:
        for where, expected in (
            ("offset BETWEEN 5 AND 13", [row for row in rows if 5 <= row[1] <= 13]),
            ("partition = 1 AND offset IN (2, 900, 40)", [r for r in rows if r[0] == 1 and r[1] in (2, 40)]),
            (f"timestamp >= '{middle}'", [row for row in rows if row[2] >= middle]),
            (f"topic = '{topic}' AND key IS NOT NULL AND partition <> 2", [r for r in rows if r[0] != 2]),
        ):
            found = read().where(where)
            kept = [(row.partition, row.offset, row.timestamp) for row in found.collect()]
            assert sorted(kept) == sorted(expected), where
            plan = found._jdf.queryExecution().optimizedPlan().toString()
            assert ("Filter" not in plan) == (pushed == "true" and where.startswith("offset")), plan
    finally:
        spark.conf.set(setting, before)


def test_a_schema_of_the_users_own_is_refused(spark: SparkSession, broker: RunningBroker, topic: str) -> None:
    reader = spark.read.format("keylane").schema("a INT").options(server=broker.url, subscribe=topic)
    with pytest.raises(PySparkException, match=r"keylane has its own columns \(key, value"):
        reader.load().collect()


def test_the_journal_is_a_table_too(client: Client, make_topic_name: Callable[[], str], read: Read) -> None:
    topic = make_topic_name()
    client.create_topic(topic, partitions=1, journal=True)
    client.create_subscription(topic, "billing", mode="shared")
    client.publish_many(topic, [OutgoingMessage(str(at)) for at in range(10)])
    with client.subscribe(topic, "billing", mode="shared", name="c1") as consumer:
        for _ in range(10):
            with next(iter(consumer)):
                pass
    rows = read(subscribe=topic, journal="true").collect()
    assert [row.offset for row in rows] == sorted(row.offset for row in rows)
    covered = {
        what: sorted(at for row in rows if row.transition == what for at in range(row.first, row.last + 1))
        for what in ("published", "delivered", "acked")
    }
    assert covered == {what: list(range(1, 11)) for what in covered}
    assert {row.by for row in rows if row.transition == "acked"} == {"c1"}
    assert all(row.last is None for row in rows if row.transition == "subscribed")
