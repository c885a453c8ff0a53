"""Bodies that a store refuses whatever one does: each fails by itself, and at once."""

import asyncio
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from keylane import AsyncClient, MessageTooLarge, Published
from keylane_broker.supervise.embedded_server import Server
from tests.support.running import RunningBroker

PATIENCE = 25.0  # seconds, of the 30 in which a publish is tried again
LIMIT = 1024 * 1024


@pytest.fixture
def narrow() -> Iterator[RunningBroker]:
    """A broker whose Redis takes no value over a megabyte."""
    with Server(config={"proto-max-bulk-len": "1mb"}) as server, RunningBroker(server) as broker:
        yield broker


async def publish_among_small_ones(client: AsyncClient, topic: str) -> list[Published | BaseException]:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s")
    sizes = [10, 10, 2 * LIMIT, 10, 10]
    async with asyncio.timeout(PATIENCE):
        answers = await asyncio.gather(
            *(client.publish(topic, b"x" * size, key="k") for size in sizes), return_exceptions=True
        )
        async with client.subscribe(topic, "s") as consumer:
            for _ in range(4):
                message = await consumer.receive()
                assert await message.data() == b"x" * 10
                await message.ack()
    assert (await client.describe_subscription(topic, "s")).backlog == 0
    return answers


async def test_a_body_that_redis_refuses_fails_by_itself(narrow: RunningBroker, topic: str) -> None:
    async with AsyncClient(narrow.url) as client:
        answers = await publish_among_small_ones(client, topic)
    assert [type(answer) for answer in answers] == [
        Published,
        Published,
        MessageTooLarge,
        Published,
        Published,
    ]


async def test_a_body_that_is_too_large_for_a_file_fails_by_itself(
    broker: RunningBroker, topic: str, tmp_path: Path
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        async with AsyncClient(broker.url, payloads=f"file://{tmp_path}") as client:
            answers = await publish_among_small_ones(client, topic)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [type(answer) for answer in answers] == [
        Published,
        Published,
        MessageTooLarge,
        Published,
        Published,
    ]
    assert list(tmp_path.rglob("*.*")) == []  # noqa: ASYNC240 - no part of a file is left
