"""Reading by position with the real clients: logs, offsets, and a reader that says how far it is."""

from collections.abc import Iterator

import pytest

from broker.checker import check_topic
from broker.engine import Engine
from client import AsyncClient, Client, InvalidArgument, OutgoingMessage, SubscriptionBusy
from tests.running import RunningBroker


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    """Two workers on one server, for all tests of this module."""
    with RunningBroker(workers=2) as broker:
        yield broker


async def problems(broker: RunningBroker, topic: str) -> list[str]:
    """What the checker says of a topic."""
    engine = Engine.connect(broker.redis_url)
    try:
        return await check_topic(engine, topic)
    finally:
        await engine.close()


def some(count: int) -> list[OutgoingMessage]:
    """Messages with bodies, all for partition 0."""
    return [OutgoingMessage(b"%d" % number, key="k", partition=0) for number in range(count)]


async def test_what_is_committed_leaves_the_log_and_the_payload_store(
    broker: RunningBroker, topic: str
) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=2)
        await client.create_subscription(topic, "spark", mode="cursor", start="earliest")
        published = await client.publish_many(topic, some(10))

        [here, _] = await client.offsets(topic, "spark")
        assert (here.earliest, here.latest, here.position) == (1, 11, 1)
        assert (await client.claim(topic, "spark", "r1")).granted
        page = await client.read(topic, 0, 1, 11)
        assert (page.ranges, page.next) == ([1, 10], 11)
        assert page.flat[1::3] == [message.uid for message in published]
        names = page.flat[1::3]
        assert (await client.bodies(topic, names))[:2] == [b"0", b"1"]

        await client.commit(topic, "spark", "r1", {0: 5})
        await client._bodies.finish()
        assert await client.bodies(topic, names) == [None] * 4 + [b"%d" % n for n in range(4, 10)]
        [here, _] = await client.offsets(topic, "spark")
        assert (here.earliest, here.latest, here.position) == (5, 11, 5)
        await client.release(topic, "spark", "r1")
    assert await problems(broker, topic) == []


async def test_of_two_readers_the_one_that_claimed_last_commits(broker: RunningBroker, topic: str) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=2)
        await client.create_subscription(topic, "spark", mode="cursor", start="earliest")
        await client.publish_many(topic, some(3))
        assert (await client.claim(topic, "spark", "r1", session=60)).granted
        refused = await client.claim(topic, "spark", "r2")
        assert (refused.granted, refused.holder) == (False, "r1")
        assert 50 < refused.remaining <= 60
        assert (await client.describe_subscription(topic, "spark")).consumers == ["r1"]

        await client.release(topic, "spark", "r1")
        await client.commit(topic, "spark", "r1", {0: 2})  # nobody has taken it over yet
        assert (await client.claim(topic, "spark", "r2")).granted
        with pytest.raises(SubscriptionBusy, match="'r2'"):
            await client.commit(topic, "spark", "r1", {0: 3})
        await client.commit(topic, "spark", "r2", {0: 4})


def test_the_sync_client_has_the_same_words(broker: RunningBroker, topic: str) -> None:
    with Client(broker.url) as client:
        client.create_topic(topic, partitions=1)
        client.create_subscription(topic, "spark", mode="cursor", start="earliest")
        client.publish_many(topic, some(3))
        assert client.claim(topic, "spark", "r1", session=5).granted
        page = client.read(topic, 0, 2, 4, limit=1)
        assert (page.ranges, page.next) == ([2, 2], 3)
        assert client.bodies(topic, page.flat[1::3]) == [b"1"]
        client.commit(topic, "spark", "r1", {0: 4})
        client.release(topic, "spark", "r1")
        [here] = client.offsets(topic)
        assert (here.earliest, here.latest, here.position) == (4, 4, None)


async def test_nobody_consumes_what_is_read_by_position(broker: RunningBroker, topic: str) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "spark", mode="cursor")
        with pytest.raises(InvalidArgument, match="read by position"):
            async with client.subscribe(topic, "spark", mode=None):
                pass
