"""Workers and the server are killed while messages are trimmed: nothing that is owed goes, all else does."""

import asyncio
from pathlib import Path

import pytest

from keylane import AsyncClient, OutgoingMessage
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.supervise.embedded_server import Server
from tests.support.running import RunningBroker
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

PARTITIONS = 3
KILLS = 6
PAUSE = 1.0  # seconds between two kills
RETENTION = 0.3  # seconds: something is trimmed all the time
SOON = 240.0


async def publish(client: AsyncClient, topic: str, until_then: asyncio.Event) -> set[str]:
    """Publish as long as there is no end; answers what was confirmed."""
    sent: set[str] = set()
    while not until_then.is_set():
        batch = [f"{len(sent) + n}" for n in range(100)]
        await client.publish_many(topic, [OutgoingMessage(text, key=f"k{int(text) % 40}") for text in batch])
        sent.update(batch)
        await asyncio.sleep(0.02)
    return sent


async def consume(client: AsyncClient, topic: str, name: str, got: set[str]) -> None:
    """Take all that comes, and its body."""
    async with client.subscribe(topic, name, mode=None) as consumer:
        async for batch in consumer.batches(max_messages=200, max_wait=0.05):
            for message in batch:
                got.add((await message.data()).decode())
            await consumer.ack(batch)


@pytest.mark.parametrize("victim", ["workers", "server"])
async def test_nothing_that_is_owed_is_trimmed_and_nothing_else_stays(
    victim: str, topic: str, tmp_path: Path
) -> None:
    """One subscription takes all at once, the other one comes later: it finds every message and body.

    The server has on disk what it has answered: else its death can take a message that was delivered and
    acked, and leave the body that was stored just before.
    """
    with (
        Server(data_dir=tmp_path / "data", appendfsync="always") as server,
        RunningBroker(server, workers=2, partition_lease=2.0, session=2.0) as broker,
    ):
        async with AsyncClient(broker.url, timeout=SOON) as client:
            await client.create_topic(topic, partitions=PARTITIONS, retention=RETENTION)
            await client.create_subscription(topic, "fast", mode="key_shared")
            await client.create_subscription(topic, "slow")
            end = asyncio.Event()
            fast: set[str] = set()
            slow: set[str] = set()
            publishing = asyncio.ensure_future(publish(client, topic, end))
            tasks = [asyncio.ensure_future(consume(client, topic, "fast", fast))]
            for number in range(KILLS):
                await asyncio.sleep(PAUSE)
                if number == KILLS // 2:
                    tasks.append(asyncio.ensure_future(consume(client, topic, "slow", slow)))
                if victim == "workers":
                    broker.kill_worker(number % 2)
                    broker.start_worker(number % 2)
                else:
                    server.kill()
                    await asyncio.to_thread(server.start)
            end.set()
            async with asyncio.timeout(SOON):
                sent = await publishing
                await until(lambda: sent <= fast and sent <= slow)

            async def is_empty() -> bool:
                return (await client.describe_topic(topic)).messages == 0

            await until(is_empty)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        engine = Engine.connect(broker.redis_url)

        async def has_no_bodies() -> bool:
            return not await engine.store.keys_like(f"kl:bodies:{topic}:*")

        await until(has_no_bodies)
        assert await check_topic(engine, topic) == []
        await engine.close()
