"""A query towards the broker, without Spark: its claim, its commits, and what it notices."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event, Thread

import msgspec
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from keylane import Client, OutgoingMessage
from keylane.errors import SubscriptionBusy, SubscriptionMoved, TopicReplaced
from keylane_spark.source.batch import BatchReader
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.positions import Positions
from keylane_spark.source.query import Query
from keylane_spark.source.schema import MESSAGES
from keylane_spark.source.stream import StreamReader
from tests.support.running import RunningBroker

DEADLINE = 120.0


@pytest.fixture(autouse=True)
def _made(client: Client, topic: str) -> None:
    client.create_topic(topic, partitions=2)
    client.create_subscription(topic, "spark", mode="cursor", start="earliest")
    client.publish_many(topic, [OutgoingMessage(str(at), key=str(at)) for at in range(100)])


@pytest.fixture
def start(broker: RunningBroker, topic: str) -> Iterator[Callable[..., Query]]:
    """Makes queries of the test's topic."""
    with ExitStack() as stack:

        def start(**options: str) -> Query:
            given = {"server": broker.url, "subscribe": topic, "subscription": "spark", **options}
            parsed = ReadOptions.parse(given, streaming=True)
            connection = msgspec.structs.replace(parsed.connection, timeout=5.0)
            query = Query(msgspec.structs.replace(parsed, connection=connection))
            stack.callback(query.close)
            return query

        yield start


def until_it_lets_go(query: Query) -> None:
    """Wait until the query has noticed that it has no claim any more."""
    end = time.monotonic() + DEADLINE
    while query.holds():
        assert time.monotonic() < end, "it notices nothing"
        query.check()
        time.sleep(0.02)


def commit(query: Query, positions: Positions) -> None:
    """Drain, with what the query has found."""
    query.commit(positions, query.identities(positions, {}, {}), wait=True)


@pytest.mark.slow
def test_a_reader_that_is_gone_without_a_word_is_waited_for(
    client: Client, topic: str, start: Callable[..., Query]
) -> None:
    assert client.claim(topic, "spark", "gone", session=1.0).granted
    assert sum(start().begin()[topic].values()) == 2
    assert client.describe_subscription(topic, "spark").consumers != ["gone"]


@contextmanager
def reading(client: Client, topic: str) -> Iterator[None]:
    """Somebody who has claimed the topic's subscription and renews the claim."""
    assert client.claim(topic, "spark", "busy", session=30.0).granted
    done = Event()

    def renew() -> None:
        while not done.wait(0.5):
            client.claim(topic, "spark", "busy", session=30.0)

    renewing = Thread(target=renew)
    renewing.start()
    try:
        yield
    finally:
        done.set()
        renewing.join()


@pytest.mark.slow
def test_a_reader_that_renews_its_claim_is_not(
    client: Client, topic: str, start: Callable[..., Query]
) -> None:
    with (
        reading(client, topic),
        pytest.raises(SubscriptionBusy, match=f"busy reads subscription 'spark' of topic '{topic}'"),
    ):
        start().begin()
    assert client.describe_subscription(topic, "spark").consumers == ["busy"]


@pytest.mark.slow
def test_a_query_that_is_refused_one_topic_lets_go_of_the_others(
    client: Client, make_topic_name: Callable[[], str], topic: str, start: Callable[..., Query]
) -> None:
    other = make_topic_name()
    client.create_topic(other, partitions=1)
    client.create_subscription(other, "spark", mode="cursor")
    with reading(client, other), pytest.raises(SubscriptionBusy, match=f"of topic '{other}'"):
        start(subscribe=f"{topic},{other}", sessionTimeout="600").begin()
    assert client.claim(topic, "spark", "next").granted


def test_a_subscription_made_anew_under_a_running_query_is_noticed(
    client: Client, topic: str, start: Callable[..., Query]
) -> None:
    query = start(sessionTimeout="1")
    query.begin()
    client.delete_subscription(topic, "spark")
    client.create_subscription(topic, "spark", mode="cursor")
    until_it_lets_go(query)  # what there is now is somebody else's
    assert client.describe_subscription(topic, "spark").consumers == []


def test_a_seek_wins_over_the_query_that_runs_and_over_its_checkpoint(
    client: Client, topic: str, start: Callable[..., Query]
) -> None:
    query = start()
    begin = query.begin()
    middle = {topic: {0: begin[topic][0] + 5, 1: begin[topic][1] + 5}}
    commit(query, middle)
    client.seek(topic, "spark", f"1:0-{begin[topic][1] + 2}")
    further = {topic: {0: middle[topic][0], 1: begin[topic][1] + 9}}
    checkpoint = query.identities(middle, {}, {})
    with pytest.raises(SubscriptionMoved, match="moved by a seek to position 6 of partition 1"):
        commit(query, further)
    query.close()
    assert [at.position for at in client.offsets(topic, "spark")] == [6, 6]

    with pytest.raises(SubscriptionMoved, match=r"at offset 6 of partition 1.*new checkpointLocation"):
        (late := start()).resume(middle, checkpoint)
    late.close()
    anew = start()
    assert anew.begin() == {topic: {0: 6, 1: 6}}
    anew.resume(six := {topic: {0: 6, 1: 6}}, anew.identities(six, {}, {}))
    commit(anew, {topic: {0: 7, 1: 8}})
    assert [at.position for at in client.offsets(topic, "spark")] == [7, 8]


def make_anew(client: Client, topic: str, partitions: int) -> None:
    """Delete the topic, and make another one of that name with as much in it."""
    client.delete_topic(topic)
    client.create_topic(topic, partitions=partitions)
    client.create_subscription(topic, "spark", mode="cursor", start="earliest")
    client.publish_many(topic, [OutgoingMessage(str(at), key=str(at)) for at in range(100)])


@pytest.mark.parametrize("partitions", [2, 5])
@pytest.mark.parametrize("streaming", [True, False])
def test_what_was_planned_for_a_topic_is_not_read_from_another_one_of_that_name(
    broker: RunningBroker, client: Client, topic: str, partitions: int, streaming: bool
) -> None:
    given = {"server": broker.url, "subscribe": topic, "subscription": "spark"}
    options = ReadOptions.parse(given, streaming=streaming)
    if streaming:
        stream = StreamReader(options, MESSAGES)
        begin = stream.initialOffset()
        pieces = stream.partitions(begin, stream.latestOffset(begin, ReadAllAvailable()))
        stream.stop()
        read = stream.read
    else:
        batch = BatchReader(options, MESSAGES)
        pieces, read = batch.partitions(), batch.read
    assert sum(len(rows) for piece in pieces for rows in read(piece)) == 100
    make_anew(client, topic, partitions)
    for piece in pieces:
        with pytest.raises(TopicReplaced):
            list(read(piece))


@pytest.mark.slow
def test_a_commit_for_which_the_broker_was_away_is_made_again(topic: str) -> None:
    with RunningBroker() as broker:
        with Client(broker.url) as client:
            client.create_topic(topic, partitions=1)
            client.create_subscription(topic, "spark", mode="cursor")
            client.publish_many(topic, [OutgoingMessage(str(at)) for at in range(10)])
        given = {"server": broker.url, "subscribe": topic, "subscription": "spark"}
        parsed = ReadOptions.parse(given, streaming=True)
        connection = msgspec.structs.replace(parsed.connection, timeout=5.0)
        query = Query(msgspec.structs.replace(parsed, connection=connection))
        try:
            query.begin()
            broker.kill_worker()
            commit(query, {topic: {0: 6}})
            query.check()
            broker.start_worker()
            end = time.monotonic() + DEADLINE
            with Client(broker.url) as client:
                while client.describe_subscription(topic, "spark").backlog > 5:
                    assert time.monotonic() < end, "nothing is drained"
                    commit(query, {topic: {0: 6}})
        finally:
            query.close()
