"""The journal through client and worker, and messages that somebody has deleted from the log."""

from collections.abc import Iterator

import pytest
from redis import Redis

from keylane import AsyncClient, Client, InvalidArgument, OutgoingMessage, TopicExists, TopicNotFound
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.store.keys import PartitionKeys
from tests.support.running import RunningBroker

SOON = 60.0  # seconds

pytestmark = pytest.mark.slow


@pytest.fixture
def own() -> Iterator[RunningBroker]:
    """A broker whose worker may be restarted."""
    with RunningBroker(partition_lease=1.0) as broker:
        yield broker


def transitions(broker: RunningBroker, topic: str) -> list[tuple[str, str, str, str]]:
    """What, sub, by and entries of every record of partition 0."""
    with Redis.from_url(broker.redis_url, decode_responses=True) as redis:
        found = redis.xrange(PartitionKeys.of(topic, 0).journal)
    return [(f["what"], f["sub"], f["by"], f["entries"]) for _, f in found]


async def test_a_topic_is_made_with_a_journal_and_changed(broker: RunningBroker, topic: str) -> None:
    async with AsyncClient(broker.url) as client:
        assert (await client.create_topic(topic, partitions=1, journal=True)).journal == 100_000
        assert (await client.describe_topic(topic)).journal == 100_000
        async with client.subscribe(topic, "s", name="c") as consumer:
            await client.publish_many(topic, [OutgoingMessage(key="a") for _ in range(5)])
            for message in [await consumer.receive(SOON) for _ in range(5)]:
                await message.ack()
        told = transitions(broker, topic)
        assert {what for what, *_ in told} == {"moved", "subscribed", "published", "delivered", "acked"}
        [moved] = [by for what, _, by, _ in told if what == "moved"]
        assert ("published", "", moved.partition(" ")[2], "1-5") in told
        assert (await client.change_topic(topic, journal=False)).journal == 0
        await client.publish(topic, b"x")
        assert transitions(broker, topic) == told, "off, and still there"
        assert (await client.change_topic(topic, journal=77)).journal == 77
        assert transitions(broker, topic) == [("begun", "", "", "7")]
        with pytest.raises(InvalidArgument, match="journal is -1"):
            await client.change_topic(topic, journal=-1)
        with pytest.raises(InvalidArgument, match="journal is 10000000000"):
            await client.change_topic(topic, journal=10**10)
        await client.delete_topic(topic)
        with pytest.raises(TopicNotFound):
            await client.change_topic(topic, journal=True)
    assert transitions(broker, topic) == []


def test_the_sync_client_does_the_same(broker: RunningBroker, topic: str) -> None:
    with Client(broker.url) as client:
        assert client.create_topic(topic, partitions=1, journal=500).journal == 500
        assert client.change_topic(topic, journal=False).journal == 0
        with pytest.raises(TopicExists, match="exists with journal 0, not 9"):
            client.create_topic(topic, exist_ok=True, journal=9)
        client.delete_topic(topic)


@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive"])
@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
async def test_a_consumer_never_sees_what_was_deleted_from_the_log(
    own: RunningBroker, topic: str, mode: str, delivery: str
) -> None:
    """The worker begins anew, so that it has no copy; some of it had been delivered before."""
    async with AsyncClient(own.url) as client:
        await client.create_topic(topic, partitions=1, journal=True)
        await client.create_subscription(topic, "s", mode=mode, delivery=delivery)  # type: ignore[arg-type]
        keys = ["a", "b", "a", "b", "a", "b"]
        published = await client.publish_many(topic, [OutgoingMessage(key.encode(), key=key) for key in keys])
        if delivery == "at_least_once":
            async with client.subscribe(topic, "s", mode=None, permits=3) as consumer:
                for _ in range(3):
                    await consumer.receive(SOON)
        own.stop_worker()
        with Redis.from_url(own.redis_url) as redis:
            for number in (1, 4):
                id = str(published[number - 1].id).partition(":")[2]
                assert redis.xdel(PartitionKeys.of(topic, 0).log, id) == 1
        own.start_worker()
        async with client.subscribe(topic, "s", mode=None, permits=2) as consumer:
            got = []
            for _ in range(4):
                message = await consumer.receive(SOON)
                got.append((message.id, await message.data()))
                if delivery == "at_least_once":
                    await consumer.ack([message])
        kept = [one.id for number, one in enumerate(published, 1) if number not in (1, 4)]
        assert sorted(id for id, _ in got) == sorted(kept, key=str)
        if mode == "exclusive":
            assert [id for id, _ in got] == kept
        assert (await client.describe_subscription(topic, "s")).backlog == 0
    lost = [(what, entries) for what, _, _, entries in transitions(own, topic) if what == "lost"]
    numbers = sorted(int(text) for _, entries in lost for text in entries.split())
    assert numbers == [1, 4]
    warnings = [line for line in own.log().splitlines() if "not in the log" in line]
    assert warnings
    assert "Traceback" not in own.log()
    engine = Engine.connect(own.redis_url)
    assert await check_topic(engine, topic) == []
    await engine.close()
