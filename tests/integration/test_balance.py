"""A free key goes to the consumer with the most spare capacity, over all partitions together."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from keylane import AsyncClient, Consumer, Message, OutgoingMessage
from tests.support.running import RunningBroker

SOON = 60.0
CONSUMERS = 4
KEYS = 200
FAIR = 1.2  # times the mean, at most


async def take_all(consumers: list[Consumer], count: int) -> list[tuple[str, Message]]:
    """Who got which message, none of them acked, until so many have come."""
    got: list[tuple[str, Message]] = []
    all_there = asyncio.Event()

    async def take(consumer: Consumer) -> None:
        async for message in consumer:
            got.append((consumer.name, message))
            if len(got) == count:
                all_there.set()

    async with asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
        taking = [tasks.create_task(take(consumer)) for consumer in consumers]
        await all_there.wait()
        for task in taking:
            task.cancel()
    return got


async def idle_consumers(stack: AsyncExitStack, url: str, topic: str) -> list[Consumer]:
    """Consumers with the same room, on connections of their own."""
    consumers = []
    for number in range(CONSUMERS):
        client = await stack.enter_async_context(AsyncClient(url))
        consumer = client.subscribe(topic, "s", mode="key_shared", name=f"c{number}")
        consumers.append(await stack.enter_async_context(consumer))
    return consumers


async def publish_burst(client: AsyncClient, topic: str, one_by_one: bool) -> None:
    """A message of each key, in one call or in many at once."""
    if one_by_one:
        await asyncio.gather(*(client.publish(topic, key=f"key-{number}") for number in range(KEYS)))
    else:
        await client.publish_many(topic, [OutgoingMessage(key=f"key-{number}") for number in range(KEYS)])


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("partitions", [1, 8])
async def test_a_burst_of_new_keys_over_several_partitions_makes_no_hot_consumer(
    broker: RunningBroker, topic: str, partitions: int, one_by_one: bool
) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(broker.url))
        await client.create_topic(topic, partitions=partitions)
        consumers = await idle_consumers(stack, broker.url, topic)
        for _ in range(3):
            await publish_burst(client, topic, one_by_one)
            got = await take_all(consumers, KEYS)
            shares = Counter(name for name, _ in got)
            assert max(shares.values()) <= FAIR * KEYS / CONSUMERS, shares
            assert len(shares) == CONSUMERS
            await asyncio.gather(*(message.ack() for _, message in got))


async def test_a_burst_of_new_keys_over_the_partitions_of_two_workers_makes_no_hot_consumer(
    topic: str,
) -> None:
    with RunningBroker(workers=2) as broker:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncClient(broker.url))
            await client.create_topic(topic, partitions=8)
            consumers = await idle_consumers(stack, broker.url, topic)
            await publish_burst(client, topic, one_by_one=False)
            shares = Counter(name for name, _ in await take_all(consumers, KEYS))
            assert max(shares.values()) <= FAIR * KEYS / CONSUMERS, shares
