"""After the clock of Redis went back: workers and clients go on as if nothing had happened."""

import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from redis.asyncio import Redis

from keylane import AsyncClient
from keylane_broker.store.keys import partition_keys
from tests.support.running import RunningBroker

SOON = 60.0  # seconds
HOUR_MS = 3_600_000


@pytest.fixture
async def client(broker: RunningBroker) -> AsyncIterator[AsyncClient]:
    """A client of the broker that tests share."""
    async with AsyncClient(broker.url) as client:
        yield client


async def set_back(broker: RunningBroker, topic: str) -> None:
    """Let the partition have seen a clock that was an hour ahead of the one that it sees now."""
    async with Redis.from_url(broker.redis_url) as redis:
        meta = partition_keys(topic, 0).meta
        await redis.hset(meta, "clock", str(int(time.time() * 1000) + HOUR_MS))


@pytest.mark.slow
async def test_a_lease_ends_and_deadlines_are_right(
    broker: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    await set_back(broker, topic)
    async with client.subscribe(topic, "s", lease=3.0, auto_extend=False) as consumer:
        await client.publish(topic, b"x")
        first = await consumer.receive(SOON)
        assert first.deadline <= datetime.now(UTC) + timedelta(seconds=3.1)
        again = await consumer.receive(SOON)
        assert (again.id, again.retry_count) == (first.id, 1)
        assert again.deadline > datetime.now(UTC), "it is still ours"
        await again.extend(60.0)
        left = again.deadline - datetime.now(UTC)
        assert timedelta(seconds=30) < left <= timedelta(seconds=60.1)
        await again.ack()


@pytest.mark.slow
async def test_delays_end(broker: RunningBroker, client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s") as consumer:
        await client.publish(topic, b"before", delay=0.3)
        await set_back(broker, topic)
        due = datetime.now(UTC) + timedelta(seconds=0.6)
        await client.publish(topic, b"after", deliver_at=due)
        found = []
        for _ in range(2):
            async with await consumer.receive(SOON) as message:
                found.append(await message.data())
        assert datetime.now(UTC) >= due - timedelta(milliseconds=5), "not before its time"
        assert found == [b"before", b"after"]
