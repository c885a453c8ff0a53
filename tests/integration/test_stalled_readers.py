"""Readers that do not read: what a worker holds for them is bounded, and nobody else notices."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import psutil
import pytest

from keylane import AsyncClient, OutgoingMessage, wire
from keylane.types import Mode
from tests.support.running import RunningBroker

pytestmark = [pytest.mark.anyio, pytest.mark.slow]  # 60 MB each

SOON = 60.0  # seconds
LARGE = 60_000  # bytes of attributes
MIB = 1024 * 1024
PARTITIONS, EACH = 2, 500  # of LARGE messages: 60 MB


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    """A broker that does not close a client soon because it is silent."""
    with RunningBroker(heartbeat=60.0) as broker:
        yield broker


@pytest.fixture
async def client(broker: RunningBroker) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(broker.url) as client:
        yield client


def stall(broker: RunningBroker, topic: str, *subscriptions: str) -> socket.socket:
    """A client that subscribes and then reads nothing."""
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8_192)
    deaf.connect(("127.0.0.1", broker.settings.port))
    deaf.sendall(wire.frame(wire.Info(), 1))
    for stream, subscription in enumerate(subscriptions, 1):
        request = wire.Subscribe(stream, topic, subscription, "deaf", mode=None, permits=10_000)
        deaf.sendall(wire.frame(request, stream + 1))
    return deaf


def memory(broker: RunningBroker) -> int:
    """What the worker has in memory, in bytes."""
    return int(psutil.Process(broker.pid).memory_info().rss)


async def publish_large(client: AsyncClient, topic: str, partitions: int = PARTITIONS) -> None:
    attributes = {"large": "x" * LARGE}
    for partition in range(partitions):
        await client.publish_many(
            topic, [OutgoingMessage(attributes=attributes, partition=partition) for _ in range(EACH)]
        )


async def read_all(client: AsyncClient, topic: str, subscription: str, count: int) -> None:
    """Take and ack so many messages, whoever else there is."""
    async with asyncio.timeout(SOON), client.subscribe(topic, subscription, mode=None) as consumer:
        async for batch in consumer.batches(50):
            assert {len(message.attributes["large"]) for message in batch} == {LARGE}
            await consumer.ack(batch)
            count -= len(batch)
            if not count:
                break


async def leased(client: AsyncClient, topic: str, *subscriptions: str) -> int:
    """How many messages are with consumers."""
    return sum([(await client.describe_subscription(topic, name)).leased for name in subscriptions])


@pytest.mark.slow
async def test_a_stalled_reader_holds_a_few_megabytes_and_no_other_notices(
    broker: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=PARTITIONS)
    for name in ("one", "two", "other", "warm"):
        await client.create_subscription(topic, name)
    await publish_large(client, topic)
    await read_all(client, topic, "warm", PARTITIONS * EACH)
    before = memory(broker)
    with stall(broker, topic, "one", "two"):
        await read_all(client, topic, "other", PARTITIONS * EACH)
        async with asyncio.timeout(SOON):
            while not await leased(client, topic, "one", "two"):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)
        assert await leased(client, topic, "one", "two") * LARGE < 24 * MIB
        assert memory(broker) - before < 48 * MIB
    await read_all(client, topic, "one", PARTITIONS * EACH)


@pytest.mark.slow
async def test_many_stalled_readers_share_a_bound_and_the_slowest_are_closed(topic: str) -> None:
    with RunningBroker(heartbeat=60.0, max_unsent_bytes=8 * MIB) as broker, ExitStack() as stack:
        async with AsyncClient(broker.url) as client:
            await client.create_topic(topic, partitions=1)
            names = [f"s{number}" for number in range(20)]
            for name in (*names, "other", "warm"):
                await client.create_subscription(topic, name)
            await publish_large(client, topic, 1)
            await read_all(client, topic, "warm", EACH)
            before = memory(broker)
            for name in names:
                stack.enter_context(stall(broker, topic, name))
            async with asyncio.timeout(SOON):
                while "closing" not in broker.log():  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.05)
            await read_all(client, topic, "other", EACH)
            assert memory(broker) - before < 40 * MIB


@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive", "failover"])
async def test_what_is_too_much_at_once_comes_later_in_order_and_uncharged(
    client: AsyncClient, topic: str, mode: Mode
) -> None:
    """Small ones first, so that many are asked for at once, then such that few of them fit."""
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", mode=mode)
    sizes = [10] * 900 + [LARGE, 10, 30_000, LARGE, 10] * 40
    await client.publish_many(
        topic,
        [
            OutgoingMessage(key=f"k{number % 7}", attributes={"large": "x" * size, "number": str(number)})
            for number, size in enumerate(sizes)
        ],
    )
    got: list[int] = []
    async with asyncio.timeout(SOON), client.subscribe(topic, "s", mode=mode) as consumer:
        async for batch in consumer.batches(50):
            for message in batch:
                assert message.retry_count == 0
                got.append(int(message.attributes["number"]))
                assert len(message.attributes["large"]) == sizes[got[-1]]
            await consumer.ack(batch)
            if len(got) >= len(sizes):
                break
    assert sorted(got) == list(range(len(sizes)))
    for key in range(7) if mode != "shared" else ():
        ours = [number for number in got if number % 7 == key]
        assert ours == sorted(ours)
    assert (await client.describe_subscription(topic, "s")).backlog == 0


@pytest.mark.slow
async def test_at_most_once_loses_nothing_to_the_bound(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", delivery="at_most_once")
    await publish_large(client, topic, 1)
    async with asyncio.timeout(SOON), client.subscribe(topic, "s") as consumer:
        got = [(await consumer.receive()).id for _ in range(EACH)]
    assert sorted(got) == sorted(set(got))


async def test_more_partitions_than_may_be_fetched_from_at_once_all_have_their_turn(
    client: AsyncClient, topic: str
) -> None:
    partitions, each = 60, 3
    await client.create_topic(topic, partitions=partitions)
    for name in ("one", "two"):
        await client.create_subscription(topic, name)
    await client.publish_many(
        topic, [OutgoingMessage(partition=number % partitions) for number in range(partitions * each)]
    )
    async with (
        asyncio.timeout(SOON),
        client.subscribe(topic, "one", permits=10_000) as one,
        client.subscribe(topic, "two", permits=10_000) as two,
    ):
        for consumer in (one, two):
            left = partitions * each
            async for batch in consumer.batches():
                await consumer.ack(batch)
                left -= len(batch)
                if not left:
                    break
