"""A checkpoint is of one topic, one subscription and one history of them, and of no other of that name."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from keylane import Client, OutgoingMessage
from keylane.errors import ConsumerReplaced, InvalidArgument, SubscriptionMoved
from keylane_spark.archiving.archive import ArchiveOptions
from keylane_spark.archiving.archive import run as run_archive
from keylane_spark.errors import DataLoss
from tests.pipeline.power import PowerCut
from tests.pipeline.spark_calls import Checkpoint, Run, run
from tests.support.running import RunningBroker
from tests.support.waiting import wait_until

DEADLINE = 120.0
ADVICE = r"new checkpointLocation.*failOnDataLoss"


@pytest.fixture
def options(broker: RunningBroker, topic: str) -> dict[str, str]:
    """Those of a query of the test's topic."""
    return {"server": broker.url, "subscribe": topic, "subscription": "spark"}


def make(client: Client, topic: str, count: int, *, partitions: int = 1, what: str = "new") -> list[str]:
    """A topic with a subscription that is owed so many messages; answers their values."""
    client.create_topic(topic, partitions=partitions)
    client.create_subscription(topic, "spark", mode="cursor", start="earliest")
    return publish(client, topic, count, what)


def publish(client: Client, topic: str, count: int, what: str) -> list[str]:
    """So many messages; answers their values."""
    values = [f"{what} {at}" for at in range(count)]
    client.publish_many(topic, [OutgoingMessage(value, key=value) for value in values])
    return values


def owed(client: Client, topic: str) -> int:
    """What the subscription has not been read of."""
    return client.describe_subscription(topic, "spark").backlog


def claimed(client: Client, topic: str) -> bool:
    """Whether anybody has ever claimed the subscription."""
    try:
        client.commit(topic, "spark", "nobody", {0: 1}, sought={0: client.offsets(topic, "spark")[0].sought})
    except InvalidArgument:  # it has no reader
        return False
    except ConsumerReplaced:
        return True
    raise AssertionError("a commit without a claim")


# Made anew


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("what", ["topic", "subscription"])
def test_a_checkpoint_of_what_was_made_anew_is_refused_every_time_and_nothing_is_claimed_or_drained(
    client: Client, topic: str, options: dict[str, str], what: str, partitions: int
) -> None:
    make(client, topic, 100)
    checkpoint = run(options).checkpoint
    if what == "topic":
        client.delete_topic(topic)
        make(client, topic, 300, partitions=partitions)
    else:
        client.delete_subscription(topic, "spark")
        client.create_subscription(topic, "spark", mode="cursor", start="earliest")
        publish(client, topic, 300, "new")
    for _ in range(3):
        with pytest.raises(DataLoss, match=rf"{what} .*recreated.*{ADVICE}"):
            run(options, checkpoint)
        assert owed(client, topic) == 300
        assert not claimed(client, topic)


def test_a_checkpoint_of_a_subscription_that_is_gone_is_refused_and_none_is_made(
    client: Client, topic: str, options: dict[str, str]
) -> None:
    make(client, topic, 10)
    checkpoint = run(options).checkpoint
    client.delete_subscription(topic, "spark")
    for _ in range(2):
        with pytest.raises(DataLoss, match=rf"subscription 'spark' .*deleted.*{ADVICE}"):
            run(options, checkpoint)
    assert client.describe_topic(topic).subscriptions == []


def test_without_fail_on_data_loss_a_query_goes_on_from_the_beginning_of_the_new_topic(
    client: Client, topic: str, options: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    make(client, topic, 100)
    checkpoint = run(options).checkpoint
    client.delete_topic(topic)
    values = make(client, topic, 300, partitions=2)
    with caplog.at_level(logging.WARNING):
        done = run({**options, "failOnDataLoss": "false"}, checkpoint)
    assert sorted(done.values) == sorted(values)
    assert owed(client, topic) == 0
    assert "recreated" in caplog.text
    assert "failOnDataLoss is false" in caplog.text
    assert run(options, done.checkpoint).values == []  # it is a checkpoint of the new one


def test_without_fail_on_data_loss_a_subscription_that_is_gone_is_made_again(
    client: Client, topic: str, options: dict[str, str]
) -> None:
    make(client, topic, 10)
    checkpoint = run(options).checkpoint
    client.delete_topic(topic)
    client.create_topic(topic, partitions=1)
    client.create_subscription(topic, "other", start="earliest")
    values = publish(client, topic, 20, "kept for another")
    done = run({**options, "failOnDataLoss": "false"}, checkpoint)
    assert done.values == values


@pytest.mark.parametrize("fail", [True, False])
def test_a_topic_made_anew_under_a_running_query_is_noticed_at_the_next_batch(
    client: Client, topic: str, options: dict[str, str], fail: bool
) -> None:
    make(client, topic, 100, what="old")
    query = Run({**options, "failOnDataLoss": str(fail).lower(), "sessionTimeout": "600"})
    try:
        assert query.batch()
        client.delete_topic(topic)
        values = make(client, topic, 300)
        if fail:
            for _ in range(3):
                with pytest.raises(DataLoss, match=rf"(recreated|made since).*{ADVICE}"):
                    wait_until(lambda: not query.batch() and False)
            assert owed(client, topic) == 300
            assert not claimed(client, topic)
        else:
            wait_until(lambda: not query.batch() and owed(client, topic) == 0)
            assert query.values[100:] == values
    finally:
        query.reader.stop()


def test_a_batch_that_was_planned_and_not_done_is_not_read_from_a_topic_made_since(
    client: Client, topic: str, options: dict[str, str]
) -> None:
    make(client, topic, 100)
    planned = Run(options)
    assert planned.batch()
    end = planned.checkpoint
    planned.reader.stop()
    assert end is not None
    client.delete_topic(topic)
    values = make(client, topic, 300)
    again = Run(options)
    start = again.reader.initialOffset()  # the first batch has no start in the checkpoint
    with pytest.raises(DataLoss, match="recreated"):
        again.read(start, end)
    again.reader.stop()
    assert owed(client, topic) == 300

    lenient = {**options, "failOnDataLoss": "false"}
    again = Run(lenient)
    again.read(again.reader.initialOffset(), end)
    again.reader.stop()
    assert again.values == []
    assert run(lenient, end).values == values


def test_a_seek_is_no_data_loss_and_wins_also_without_fail_on_data_loss(
    client: Client, topic: str, options: dict[str, str]
) -> None:
    make(client, topic, 10)
    checkpoint = run(options).checkpoint
    client.seek(topic, "spark", "latest")
    with pytest.raises(SubscriptionMoved, match="new checkpointLocation"):
        run({**options, "failOnDataLoss": "false"}, checkpoint)


def test_a_checkpoint_that_does_not_say_what_it_is_of_is_refused(
    client: Client, topic: str, options: dict[str, str]
) -> None:
    make(client, topic, 10)
    for fail in ("true", "false"):
        with pytest.raises(InvalidArgument, match=r"older Keylane.*new checkpointLocation"):
            run({**options, "failOnDataLoss": fail}, {topic: {"0": 5}})
    assert owed(client, topic) == 10


# Offsets that were given twice


@contextmanager
def cut_in_the_middle(
    power: PowerCut, topic: str, *, moves: bool
) -> Iterator[tuple[Client, dict[str, str], Checkpoint]]:
    """A query has read 100 messages, of which the server has lost 20; 300 others came since.

    With `moves` the partition has changed hands among them, so that its newest ledger begins behind.
    """
    options = {"server": power.broker.url, "subscribe": topic, "subscription": "spark"}
    with Client(power.broker.url) as client:
        make(client, topic, 80, what="kept")
        power.save()
        publish(client, topic, 20, "lost")
        before = run(options)
        assert len(before.values) == 100
        assert before.checkpoint is not None
        assert owed(client, topic) == 0
        power.strike()
        publish(client, topic, 150, "new")
        if moves:
            power.broker.kill_worker()
            power.broker.start_worker()
        publish(client, topic, 150, "newer")
        assert owed(client, topic) == 380
        yield client, options, before.checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("moves", [False, True])
def test_offsets_that_were_given_twice_after_a_power_cut_are_noticed_every_time(
    power: PowerCut, topic: str, moves: bool
) -> None:
    with cut_in_the_middle(power, topic, moves=moves) as (client, options, checkpoint):
        for _ in range(2):
            with pytest.raises(DataLoss, match=rf"offset 101 .*offsets from 81 on.*{ADVICE}"):
                run(options, checkpoint)
            assert owed(client, topic) == 380
            assert not claimed(client, topic)


@pytest.mark.slow
def test_without_fail_on_data_loss_what_has_the_offsets_now_is_read(power: PowerCut, topic: str) -> None:
    with cut_in_the_middle(power, topic, moves=True) as (client, options, checkpoint):
        done = run({**options, "failOnDataLoss": "false"}, checkpoint)
        assert done.values == [f"new {at}" for at in range(150)] + [f"newer {at}" for at in range(150)]
        assert owed(client, topic) == 0
        assert run(options, done.checkpoint).values == []


@pytest.mark.parametrize("waiting", [20, 60])
def test_as_many_messages_as_were_lost_are_read_without_fail_on_data_loss(
    power: PowerCut, topic: str, waiting: int
) -> None:
    options = {"server": power.broker.url, "subscribe": topic, "subscription": "spark"}
    with Client(power.broker.url) as client:
        make(client, topic, 80, what="kept")
        power.save()
        publish(client, topic, 20, "lost")
        checkpoint = run(options).checkpoint
        power.strike()
        values = publish(client, topic, waiting, "new")
        query = Run({**options, "failOnDataLoss": "false", "maxOffsetsPerTrigger": "20"}, checkpoint)
        try:
            limit = query.reader.getDefaultReadLimit()
            while query.batch(limit):
                pass
        finally:
            query.reader.stop()
        assert query.values == values
        assert owed(client, topic) == 0
        assert run(options, query.checkpoint).values == []  # it is a checkpoint of what is there now


@pytest.mark.slow
def test_a_power_cut_under_a_running_query_is_noticed_before_anything_more_is_drained(
    power: PowerCut, topic: str
) -> None:
    options = {"server": power.broker.url, "subscribe": topic, "subscription": "spark"}
    with Client(power.broker.url) as client:
        make(client, topic, 80)
        power.save()
        publish(client, topic, 20, "lost")
        query = Run(options)
        try:
            assert query.batch()
            power.strike()
            for _ in range(2):  # also before anything has the offsets again
                with pytest.raises(DataLoss, match=rf"the server has lost .*{ADVICE}"):
                    wait_until(lambda: not query.batch() and False)
            publish(client, topic, 300, "new")
            for _ in range(2):
                with pytest.raises(DataLoss, match=rf"the server has lost .*{ADVICE}"):
                    wait_until(lambda: not query.batch() and False)
            assert owed(client, topic) == 380
        finally:
            query.reader.stop()


def test_what_was_planned_before_a_power_cut_is_not_read_from_what_came_since(
    power: PowerCut, topic: str
) -> None:
    options = {"server": power.broker.url, "subscribe": topic, "subscription": "spark"}
    with Client(power.broker.url) as client:
        make(client, topic, 80)
        power.save()
        publish(client, topic, 20, "lost")
        for fail in (True, False):
            query = Run({**options, "failOnDataLoss": str(fail).lower()})
            try:
                start = query.reader.initialOffset()
                end = query.reader.latestOffset(start, ReadAllAvailable())
                shares = query.reader.partitions(start, end)
            finally:
                query.reader.stop()
            assert sum(len(rows) for share in shares for rows in query.reader.read(share)) == 100
            power.strike()
            publish(client, topic, 20, "new")
            if fail:
                with pytest.raises(DataLoss, match="from offset 81 on are others"):
                    list(query.reader.read(shares[0]))
            else:
                assert sum(len(rows) for share in shares for rows in query.reader.read(share)) == 100


@pytest.mark.slow
def test_a_restart_that_loses_nothing_and_a_new_owner_are_no_loss(power: PowerCut, topic: str) -> None:
    options = {"server": power.broker.url, "subscribe": topic, "subscription": "spark"}
    with Client(power.broker.url) as client:
        make(client, topic, 10)
        checkpoint = run(options).checkpoint
        for _ in range(2):
            power.broker.kill_worker()
            power.broker.start_worker()
            values = publish(client, topic, 10, "more")
        assert run(options, checkpoint).values == [*values, *values]


# Topics that come and go


def test_a_topic_that_is_taken_out_of_subscribe_does_not_stop_the_query(
    client: Client, make_topic_name: Callable[[], str], options: dict[str, str], topic: str
) -> None:
    other = make_topic_name()
    make(client, topic, 10)
    make(client, other, 10)
    both = run({**options, "subscribe": f"{topic},{other}"})
    assert len(both.values) == 20
    more = publish(client, topic, 5, "more")
    publish(client, other, 5, "not read")
    one = run(options, both.checkpoint)
    assert one.values == more
    assert (owed(client, topic), owed(client, other)) == (0, 5)
    none = run(options, one.checkpoint)
    assert none.values == []


# With Spark


def test_an_archive_of_a_topic_made_anew_is_refused_every_time(
    spark: SparkSession, broker: RunningBroker, client: Client, topic: str, tmp_path: Path
) -> None:
    def archive(*, fail: bool = True) -> int:
        options = ArchiveOptions(
            server=broker.url,
            topics=[topic],
            path=str(tmp_path / "archive"),
            subscription="spark",
            fail_on_data_loss=fail,
        )
        return run_archive(spark, options, lambda line: None).rows

    make(client, topic, 100)
    assert archive() == 100
    client.delete_topic(topic)
    make(client, topic, 300)
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match=rf"(?s)recreated.*{ADVICE}"):
            archive()
        assert owed(client, topic) == 300
        assert not claimed(client, topic)
    assert archive(fail=False) == 300
    assert owed(client, topic) == 0
    assert spark.read.parquet(str(tmp_path / "archive")).count() == 400
