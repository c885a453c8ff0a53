"""spark.readStream.format("keylane") against a real broker: a query is a subscription."""

import json
from collections.abc import Callable

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery
from redis import Redis

from keylane import Client, OutgoingMessage
from keylane_broker.store.keys import PartitionKeys
from tests.pipeline.tables import Table, numbers, wait
from tests.support.running import RunningBroker

Stream = Callable[..., DataFrame]
DEADLINE = 120


@pytest.fixture(autouse=True)
def _kept(client: Client, topic: str) -> None:
    """The topic, whose messages stay since a subscription is owed them."""
    client.create_topic(topic, partitions=2)
    client.create_subscription(topic, "keeps", start="earliest")


def fill(client: Client, topic: str, count: int, *, first: int = 0) -> None:
    """Publish numbered messages with keys."""
    each = range(first, first + count)
    client.publish_many(topic, [OutgoingMessage(str(at), key=f"key-{at % 5}") for at in each])


def backlog(client: Client, topic: str, subscription: str = "spark") -> int:
    """What the query still has to read."""
    return client.describe_subscription(topic, subscription).backlog


def failure(query: StreamingQuery) -> str:
    """Why a query ended."""
    try:
        ended = query.awaitTermination(DEADLINE)
    except Exception as error:
        return str(error)
    raise AssertionError("the query has not failed" if ended else "the query goes on")


def test_a_first_run_reads_from_the_earliest_and_drains_to_the_last(
    client: Client, topic: str, stream: Stream, table: Table
) -> None:
    fill(client, topic, 3_000)
    table.run(stream())
    assert numbers(table) == list(range(3_000))
    assert backlog(client, topic) == 0
    assert client.describe_subscription(topic, "spark").mode == "cursor"
    client.delete_subscription(topic, "keeps")
    assert client.describe_topic(topic).messages == 0


def test_runs_go_on_from_one_another(client: Client, topic: str, stream: Stream, table: Table) -> None:
    for run in range(3):
        fill(client, topic, 10, first=run * 10)
        table.run(stream())
        assert numbers(table) == list(range(run * 10 + 10))
        assert backlog(client, topic) == 0


def test_a_query_keeps_up_with_what_is_published(
    client: Client, topic: str, stream: Stream, table: Table
) -> None:
    fill(client, topic, 10)
    query = table.start(stream())
    try:
        wait(lambda: query.lastProgress is not None and backlog(client, topic) == 0, query=query)
        fill(client, topic, 10, first=10)
        wait(lambda: backlog(client, topic) == 0, query=query)
        # What is drained was written before: nothing is owed that the table does not hold.
        assert numbers(table) == list(range(20))
        assert len(client.describe_subscription(topic, "spark").consumers) == 1
    finally:
        query.stop()


def test_a_batch_is_no_larger_than_asked_for_and_takes_of_both_partitions(
    client: Client, topic: str, stream: Stream, table: Table
) -> None:
    client.publish_many(topic, [OutgoingMessage(str(at), partition=0) for at in range(300)])
    client.publish_many(topic, [OutgoingMessage(str(at), partition=1) for at in range(300, 400)])
    query = table.run(stream(maxOffsetsPerTrigger="100"))
    batches = [progress for progress in query.recentProgress if progress.numInputRows]
    assert [progress.numInputRows for progress in batches] == [100, 100, 100, 100]
    assert json.loads(batches[0].sources[0].endOffset)[topic] == {"0": 76, "1": 26}
    assert numbers(table) == list(range(400))


def test_lag_is_in_the_progress(client: Client, topic: str, stream: Stream, table: Table) -> None:
    fill(client, topic, 100)
    query = table.run(stream(maxOffsetsPerTrigger="60"))
    first = next(progress for progress in query.recentProgress if progress.numInputRows)
    source = first.sources[0]
    end, latest = (json.loads(text)[topic] for text in (source.endOffset, source.latestOffset))
    assert sum(latest.values()) - sum(end.values()) == 40
    assert json.loads(first["sources"][0]["latestOffset"])["#lag"] == 40


def test_available_now_ends_where_the_topic_ended(
    client: Client, topic: str, stream: Stream, table: Table
) -> None:
    fill(client, topic, 100)
    late = [False]

    def publish_more(batch: DataFrame, number: int) -> None:
        batch.write.mode("append").parquet(str(table.folder / "rows"))
        if not late[0]:
            late[0] = True
            fill(client, topic, 50, first=100)

    writer = (
        stream(maxOffsetsPerTrigger="30").writeStream.foreachBatch(publish_more).trigger(availableNow=True)
    )
    query = writer.option("checkpointLocation", str(table.folder / "checkpoint")).start()
    try:
        assert query.awaitTermination(DEADLINE)
    finally:
        query.stop()
    assert numbers(table) == list(range(100))
    assert backlog(client, topic) == 50


def test_only_what_is_new_is_read_from_the_latest(
    client: Client, topic: str, stream: Stream, table: Table
) -> None:
    fill(client, topic, 10)
    table.run(stream(startingOffsets="latest"))
    fill(client, topic, 5, first=10)
    table.run(stream(startingOffsets="latest"))
    assert numbers(table) == list(range(10, 15))


def test_a_first_run_starts_at_the_offsets_asked_for(
    client: Client, topic: str, stream: Stream, table: Table
) -> None:
    client.publish_many(topic, [OutgoingMessage(str(at), partition=0) for at in range(10)])
    client.publish_many(topic, [OutgoingMessage(str(at), partition=1) for at in range(10, 20)])
    table.run(stream(startingOffsets=json.dumps({topic: {"0": 8, "1": -1}})))
    assert numbers(table) == [7, 8, 9]
    assert backlog(client, topic) == 0


def test_a_first_run_starts_at_the_time_asked_for(
    client: Client, topic: str, stream: Stream, table: Table
) -> None:
    for at in range(10):
        fill(client, topic, 1, first=at)
    # The clock of the cluster is that of its Redis, so the messages themselves say when they came.
    times = sorted(
        round(one.published_at.timestamp() * 1000) for one in client.peek(topic, "keeps", limit=100)
    )
    table.run(stream(startingTimestamp=str(times[5])))
    assert numbers(table) == list(range(times.index(times[5]), 10))


def test_a_restart_with_nothing_new_drains_what_a_crash_left(
    broker: RunningBroker, client: Client, topic: str, stream: Stream, table: Table
) -> None:
    fill(client, topic, 20)
    table.run(stream())
    # As if the last run had ended between the checkpoint's commit and the broker's.
    with Redis.from_url(broker.redis_url) as redis:
        for partition in range(2):
            redis.hset(PartitionKeys.of(topic, partition).subs, "spark", "0")
    assert backlog(client, topic) == 20
    table.run(stream())
    assert backlog(client, topic) == 0
    assert numbers(table) == list(range(20))


def test_a_seek_ends_a_query_with_its_checkpoint_and_one_with_a_new_one_follows(
    client: Client, topic: str, stream: Stream, table: Table
) -> None:
    fill(client, topic, 20)
    table.run(stream())
    client.seek(topic, "spark", "earliest")
    writer = stream().writeStream.foreachBatch(lambda batch, number: None).trigger(availableNow=True)
    why = failure(writer.option("checkpointLocation", str(table.folder / "checkpoint")).start())
    assert "SubscriptionMoved" in why
    assert "start the query with a new checkpointLocation" in why
    assert backlog(client, topic) == 20, "the seek was not undone"
    anew = stream().writeStream.foreachBatch(lambda batch, number: None).trigger(availableNow=True)
    query = anew.option("checkpointLocation", str(table.folder / "another")).start()
    assert query.awaitTermination(DEADLINE)
    assert backlog(client, topic) == 0


def test_a_batch_that_fails_is_not_drained(client: Client, topic: str, stream: Stream, table: Table) -> None:
    fill(client, topic, 20)

    def fail(batch: DataFrame, number: int) -> None:
        assert batch.count() == 20
        raise RuntimeError("the sink is full")

    writer = stream().writeStream.foreachBatch(fail).trigger(availableNow=True)
    assert "the sink is full" in failure(
        writer.option("checkpointLocation", str(table.folder / "checkpoint")).start()
    )
    assert backlog(client, topic) == 20
    table.run(stream())
    assert numbers(table) == list(range(20))
    assert backlog(client, topic) == 0


def test_a_second_query_on_a_subscription_is_refused_and_the_first_goes_on(
    client: Client, topic: str, stream: Stream, table: Table, other_table: Table
) -> None:
    fill(client, topic, 10)
    first = table.start(stream(sessionTimeout="6"))
    try:
        wait(lambda: first.lastProgress is not None and backlog(client, topic) == 0, query=first)
        (holder,) = client.describe_subscription(topic, "spark").consumers
        why = failure(other_table.start(stream(sessionTimeout="6")))
        assert f"{holder} reads subscription 'spark' of topic '{topic}'" in why
        assert "both are of this Spark application" in why
        fill(client, topic, 10, first=10)
        wait(lambda: backlog(client, topic) == 0, query=first)
        assert numbers(table) == list(range(20))
    finally:
        first.stop()


def test_a_stopped_query_leaves_its_subscription_to_others_at_once(
    client: Client, topic: str, stream: Stream, table: Table, other_table: Table
) -> None:
    fill(client, topic, 10)
    query = table.start(stream(sessionTimeout="600"))
    wait(lambda: query.lastProgress is not None and backlog(client, topic) == 0, query=query)
    query.stop()
    fill(client, topic, 10, first=10)
    other_table.run(stream())
    assert numbers(other_table) == list(range(10, 20))
    wait(lambda: client.describe_subscription(topic, "spark").consumers == [])


def test_a_query_whose_subscription_was_taken_fails_and_drains_no_more(
    client: Client, topic: str, stream: Stream, table: Table
) -> None:
    fill(client, topic, 10)
    query = table.start(stream(sessionTimeout="3"))
    wait(lambda: query.lastProgress is not None and backlog(client, topic) == 0, query=query)
    (holder,) = client.describe_subscription(topic, "spark").consumers
    client.release(topic, "spark", holder)
    assert client.claim(topic, "spark", "thief", session=60).granted
    why = failure(query)
    assert "thief" in why
    fill(client, topic, 10, first=10)
    assert backlog(client, topic) == 10


def test_a_checkpoint_behind_its_subscription_is_a_loss_that_is_named(
    client: Client, topic: str, stream: Stream, table: Table
) -> None:
    client.publish_many(topic, [OutgoingMessage(str(at), partition=1) for at in range(10)])
    table.run(stream())
    client.publish_many(topic, [OutgoingMessage(str(at), partition=1) for at in range(10, 20)])
    wait(lambda: client.claim(topic, "spark", "thief").granted)
    client.commit(topic, "spark", "thief", {1: 16})
    client.release(topic, "spark", "thief")
    client.delete_subscription(topic, "keeps")
    why = failure(table.start(stream()))
    assert f"at offset 11 of topic '{topic}', partition 1, and the subscription 'spark' at 16" in why
    assert "drained 5 messages, offsets 11-15" in why
    table.run(stream(failOnDataLoss="false"))
    assert numbers(table) == [*range(10), *range(15, 20)]


def test_a_topic_made_anew_is_not_taken_for_the_old_one(
    client: Client, topic: str, stream: Stream, table: Table
) -> None:
    fill(client, topic, 10)
    table.run(stream())
    client.delete_topic(topic)
    client.create_topic(topic, partitions=2)
    why = failure(table.start(stream()))
    assert f"subscription 'spark' of topic '{topic}', or the topic itself, was deleted" in why
    client.create_subscription(topic, "spark", mode="cursor")
    fill(client, topic, 100, first=10)
    for _ in range(2):
        why = failure(table.start(stream()))
        assert f"topic '{topic}' was deleted and recreated since this query wrote its checkpoint" in why
        assert "Start the query with a new checkpointLocation" in why
        assert "set option failOnDataLoss to false" in why
        assert backlog(client, topic) == 100
    table.run(stream(failOnDataLoss="false"))
    assert numbers(table) == list(range(110))
    assert backlog(client, topic) == 0


def test_a_stream_joined_with_itself_needs_a_subscription_for_each_use(
    client: Client, topic: str, stream: Stream, table: Table, other_table: Table
) -> None:
    fill(client, topic, 20)

    def joined(left: DataFrame, right: DataFrame) -> DataFrame:
        return left.alias("left").join(right.alias("right"), "value").selectExpr("value", "left.offset")

    frame = stream(sessionTimeout="3")
    why = failure(table.start(joined(frame, frame), now=True))
    assert "A frame that is joined with itself is two sources" in why
    assert backlog(client, topic) == 20

    other_table.run(joined(stream(subscription="left"), stream(subscription="right")))
    fill(client, topic, 20, first=20)
    other_table.run(joined(stream(subscription="left"), stream(subscription="right")))
    assert numbers(other_table) == list(range(40))
    assert (backlog(client, topic, "left"), backlog(client, topic, "right")) == (0, 0)


def test_a_topic_that_is_new_in_the_options_is_read_too(
    client: Client, make_topic_name: Callable[[], str], topic: str, stream: Stream, table: Table
) -> None:
    other = make_topic_name()
    client.create_topic(other, partitions=1)
    client.create_subscription(other, "keeps", start="earliest")
    fill(client, topic, 10)
    fill(client, other, 5, first=10)
    table.run(stream())
    table.run(stream(subscribe=f"{topic},{other}"))
    assert numbers(table) == list(range(15))
    fill(client, other, 5, first=15)
    table.run(stream(subscribe=f"{topic},{other}"))
    assert numbers(table) == list(range(20))
    assert (backlog(client, topic), backlog(client, other)) == (0, 0)
    fill(client, topic, 5, first=20)  # and one that is not there any more is left alone
    fill(client, other, 5, first=100)
    table.run(stream())
    assert numbers(table) == list(range(25))
    assert (backlog(client, topic), backlog(client, other)) == (0, 5)


def test_a_subscription_of_consumers_is_not_for_a_query(
    client: Client, topic: str, stream: Stream, table: Table
) -> None:
    why = failure(table.start(stream(subscription="keeps")))
    assert f"subscription 'keeps' of topic '{topic}' is of mode shared" in why
