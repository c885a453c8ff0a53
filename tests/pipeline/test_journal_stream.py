"""The journal as a stream, without Spark: it is read by number, and what is trimmed under it is a loss."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from redis import Redis

from keylane import Client, OutgoingMessage
from keylane.errors import InvalidArgument
from keylane_broker.store.keys import PartitionKeys
from keylane_spark.errors import DataLoss
from keylane_spark.source.journal_stream import JournalStreamReader
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.schema import JOURNAL
from tests.pipeline.power import PowerCut
from tests.pipeline.tables import Table
from tests.support.running import RunningBroker

Open = Callable[..., JournalStreamReader]


@pytest.fixture
def reader(broker: RunningBroker, topic: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Makes readers of the test's topic, which look at once for what is new."""
    monkeypatch.setattr("keylane_spark.source.journal_query._ASK", 0.0)
    monkeypatch.setattr("keylane_spark.source.topic_watch._LOOK", 0.0)
    with ExitStack() as stack:

        def reader(**options: str) -> JournalStreamReader:
            given = {"server": broker.url, "journal": "true", **options}
            if not options.keys() & {"subscribePattern", "assign"}:
                given["subscribe"] = topic
            made = JournalStreamReader(ReadOptions.parse(given, streaming=True), JOURNAL)
            stack.callback(made.stop)
            return made

        yield reader


def published(reader: JournalStreamReader, start: dict[str, Any], end: dict[str, Any]) -> int:
    """How many messages a batch says were published."""
    rows = [
        row
        for piece in reader.partitions(start, end)
        for batch in reader.read(piece)
        for row in batch.to_pylist()
    ]
    return sum(row["last"] - row["first"] + 1 for row in rows if row["transition"] == "published")


def latest(reader: JournalStreamReader, start: dict[str, Any]) -> dict[str, Any]:
    return reader.latestOffset(start, ReadAllAvailable())


def make(client: Client, topic: str, *, partitions: int = 1) -> None:
    client.create_topic(topic, partitions=partitions, journal=1_000)
    client.create_subscription(topic, "keeps", start="earliest")


def fill(client: Client, topic: str, count: int) -> None:
    """One record each."""
    for at in range(count):
        client.publish(topic, str(at), key=str(at))


def test_a_stream_of_the_journal_goes_on_from_batch_to_batch_and_start_to_start(
    client: Client, topic: str, reader: Open
) -> None:
    make(client, topic, partitions=2)
    fill(client, topic, 5)
    made = reader()
    start = made.initialOffset()
    end = latest(made, start)
    assert published(made, start, end) == 5
    assert latest(made, end) == end
    fill(client, topic, 3)
    checkpoint = json.loads(json.dumps(end))
    again = reader()
    end = latest(again, checkpoint)
    assert published(again, checkpoint, end) == 3
    assert published(again, start, end) == 8, "a batch can be read again"
    assert client.describe_topic(topic).subscriptions == ["keeps"], "nothing is claimed"


def test_a_batch_of_records_is_no_larger_than_asked_for(client: Client, topic: str, reader: Open) -> None:
    make(client, topic)
    fill(client, topic, 9)
    made = reader(maxOffsetsPerTrigger="4")
    start = made.initialOffset()
    end = made.latestOffset(start, made.getDefaultReadLimit())
    assert end[topic]["0"] - start[topic]["0"] == 4
    lag = made.reportLatestOffset()
    assert lag is not None
    assert lag["#lag"] == lag[topic]["0"] - end[topic]["0"] > 0


def test_available_now_ends_where_the_journal_ended(client: Client, topic: str, reader: Open) -> None:
    make(client, topic)
    fill(client, topic, 3)
    made = reader(startingOffsets="earliest")
    made.prepareForTriggerAvailableNow()
    start = made.initialOffset()
    fill(client, topic, 3)
    end = latest(made, start)
    assert published(made, start, end) == 3
    assert latest(made, end) == end


def test_a_stream_starts_at_the_end_if_asked_to(client: Client, topic: str, reader: Open) -> None:
    make(client, topic)
    fill(client, topic, 3)
    made = reader(startingOffsets="latest")
    start = made.initialOffset()
    assert latest(made, start) == start


def test_a_journal_trimmed_under_a_stream_is_a_loss(
    broker: RunningBroker, client: Client, topic: str, reader: Open
) -> None:
    make(client, topic)
    fill(client, topic, 10)
    made, careless = reader(), reader(failOnDataLoss="false")
    start = made.initialOffset()
    end = latest(made, start)
    careless_end = latest(careless, start)
    pieces = made.partitions(start, end)
    with Redis.from_url(broker.redis_url) as redis:
        redis.xtrim(PartitionKeys.of(topic, 0).journal, maxlen=4, approximate=False)
    with pytest.raises(DataLoss, match=f"records of the journal of topic '{topic}', partition 0 are gone"):
        [rows for piece in pieces for rows in made.read(piece)]
    gone = end[topic]["0"] - 1 - 4
    with pytest.raises(
        DataLoss, match=rf"{gone} records of the journal of topic '{topic}'.* are gone, 1-{gone}:"
    ):
        latest(made, start)
    assert published(careless, start, careless_end) == 4
    assert latest(careless, start) == careless_end


def test_a_topic_made_anew_under_a_stream_is_a_loss(client: Client, topic: str, reader: Open) -> None:
    make(client, topic)
    fill(client, topic, 4)
    made, careless = reader(), reader(failOnDataLoss="false")
    start = made.initialOffset()
    end = latest(made, start)
    client.delete_topic(topic)
    make(client, topic)
    fill(client, topic, 9)
    with pytest.raises(DataLoss, match="was deleted and recreated"):
        latest(made, end)
    assert published(careless, end, latest(careless, end)) == 9


@pytest.fixture
def records(power: PowerCut, reader: Open, topic: str) -> Iterator[tuple[Client, Open]]:
    """Makes readers of a journal whose server can lose what it has written last."""
    with Client(power.broker.url) as client:
        make(client, topic)
        fill(client, topic, 10)
        yield client, partial(reader, server=power.broker.url)


@pytest.mark.slow
@pytest.mark.parametrize("moves", [False, True])
def test_numbers_that_were_given_again_after_a_power_cut_are_a_loss(
    power: PowerCut, topic: str, records: tuple[Client, Open], moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keylane_spark.source.journal_rollback._LOOK", 7)
    client, reader = records
    power.save()
    kept = latest(made := reader(), made.initialOffset())
    fill(client, topic, 20)
    end = json.loads(json.dumps(latest(made, kept)))
    power.strike()
    fill(client, topic, 30)
    if moves:
        power.broker.kill_worker()
        power.broker.start_worker()
        fill(client, topic, 20)
    again = kept[topic]["0"]
    for one in (reader(), reader()):
        with pytest.raises(DataLoss, match=f"numbers from {again} on were reused"):
            latest(one, end)
        with pytest.raises(DataLoss, match=f"numbers from {again} on were reused"):
            one.partitions(kept, end)
    careless = reader(failOnDataLoss="false")
    now = latest(careless, end)
    assert published(careless, end, now) == (50 if moves else 30)
    assert latest(reader(), now) == now, "it is a checkpoint of what is there now"


def test_as_many_records_as_were_lost_are_read_without_fail_on_data_loss(
    power: PowerCut, topic: str, records: tuple[Client, Open]
) -> None:
    client, reader = records
    power.save()
    end = latest(made := reader(), made.initialOffset())
    fill(client, topic, 20)
    lost = latest(made, end)
    power.strike()
    fill(client, topic, 30)
    many = lost[topic]["0"] - end[topic]["0"]
    careless = reader(failOnDataLoss="false", maxOffsetsPerTrigger=str(many))
    now = careless.latestOffset(lost, careless.getDefaultReadLimit())
    assert now[topic] == lost[topic]
    assert now != lost, "Spark sees that there is something new"
    assert published(careless, lost, now) > 0


def test_records_that_are_not_of_messages_and_were_lost_are_noticed_too(
    power: PowerCut, topic: str, records: tuple[Client, Open]
) -> None:
    client, reader = records
    power.save()
    client.seek(topic, "keeps", "latest")
    client.seek(topic, "keeps", "earliest")
    client.seek(topic, "keeps", "latest")
    end = latest(made := reader(), made.initialOffset())
    power.strike()
    fill(client, topic, 10)
    with pytest.raises(DataLoss, match="were reused"):
        latest(reader(), end)


@pytest.mark.slow
def test_a_new_owner_of_a_partition_and_a_checkpoint_without_ledgers_are_no_loss(
    power: PowerCut, topic: str, records: tuple[Client, Open]
) -> None:
    client, reader = records
    end = latest(made := reader(), made.initialOffset())
    older = {name: of for name, of in end.items() if name != "#ledgers"}
    for _ in range(2):
        power.broker.kill_worker()
        power.broker.start_worker()
        fill(client, topic, 5)
    for start in (end, older):
        made = reader()
        assert published(made, start, latest(made, start)) == 10


def test_a_topic_that_has_never_had_a_journal_is_refused(client: Client, topic: str, reader: Open) -> None:
    client.create_topic(topic, partitions=1)
    with pytest.raises(InvalidArgument, match=f"topic '{topic}' has no journal: switch it on"):
        reader().initialOffset()


def test_topics_that_match_later_are_read_too_and_one_that_is_gone_is_a_loss(
    client: Client, topic: str, reader: Open
) -> None:
    make(client, f"{topic}-1")
    made = reader(subscribePattern=f"{topic}-.*")
    careless = reader(subscribePattern=f"{topic}-.*", failOnDataLoss="false")
    start = made.initialOffset()
    make(client, f"{topic}-2")
    client.publish_many(f"{topic}-2", [OutgoingMessage("x")] * 3)
    end = latest(made, start)
    assert published(made, start, end) == 3
    assert end.keys() == {f"{topic}-1", f"{topic}-2", "#incarnations", "#ledgers"}
    client.delete_topic(f"{topic}-2")
    with pytest.raises(DataLoss, match=f"topic '{topic}-2' was deleted"):
        latest(made, end)
    assert latest(careless, end).keys() == {f"{topic}-1", "#incarnations", "#ledgers"}
    assert published(careless, start, end) == 0


def test_only_partitions_that_are_assigned_are_read(client: Client, topic: str, reader: Open) -> None:
    make(client, topic, partitions=3)
    client.publish_many(topic, [OutgoingMessage("x", partition=at % 3) for at in range(6)])
    made = reader(assign=json.dumps({topic: [0, 2]}))
    start = made.initialOffset()
    assert start[topic].keys() == {"0", "2"}
    assert published(made, start, latest(made, start)) == 4


def test_spark_reads_the_journal_as_a_stream_in_runs_that_go_on(
    broker: RunningBroker, client: Client, topic: str, spark: SparkSession, table: Table
) -> None:
    make(client, topic, partitions=2)
    for run in range(1, 3):
        fill(client, topic, 5)
        options = {"server": broker.url, "subscribe": topic, "journal": "true", "maxOffsetsPerTrigger": "4"}
        table.run(spark.readStream.format("keylane").options(**options).load())
        published = table.rows().where("transition = 'published'").selectExpr("sum(last - first + 1) AS sum")
        assert published.collect()[0]["sum"] == 5 * run
        assert table.rows().count() == table.rows().select("partition", "offset", "first").distinct().count()
