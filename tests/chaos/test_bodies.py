"""Workers and consumers are killed under load: in the payload store is what is owed, and nothing else."""

import asyncio
import os
import random
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from keylane import AsyncClient, OutgoingMessage, ksuid
from tests.support.running import ROOT, RunningBroker

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

KILLS = 6
PARTITIONS = 3
PAUSE = 1.5  # seconds between two kills
PATIENCE = 240.0  # seconds; it takes some where there is nothing else to do


class Takers:
    """Processes that consume, each of which can be killed."""

    def __init__(self, url: str, topic: str, subscription: str) -> None:
        self._command = [sys.executable, "-m", "tests.chaos.taker", url, topic, subscription]
        self._running: list[subprocess.Popen[str]] = []
        self.said = ""

    def __enter__(self) -> "Takers":
        return self

    def start(self) -> None:
        """One more."""
        process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self._running.append(process)

    def kill_one(self) -> None:
        """End one with SIGKILL, whatever it is at."""
        process = self._running.pop(random.randrange(len(self._running)))
        process.kill()
        self.said += process.communicate()[0]

    def __exit__(self, *_: object) -> None:
        while self._running:
            self.kill_one()


@pytest.fixture(params=["redis", "files"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Where bodies are, if not in Redis."""
    return tmp_path if request.param == "files" else None


async def owed(redis: Any, topic: str) -> set[str]:
    """The names of the bodies of all messages in the logs."""
    found = set()
    for partition in range(PARTITIONS):
        for _, fields in await redis.xrange(f"kl:{{{topic}:{partition}}}:log"):
            found.add(fields["about"].split(" ", 4)[3].partition(":")[2] or fields["uid"])
    return found


async def stored(redis: Any, topic: str, folder: Path | None) -> set[str]:
    """The names of all bodies in the payload store; of files as they are named there."""
    if folder is not None:
        return {file for _, _, files in os.walk(folder / topic) for file in files}
    keys = [key async for key in redis.scan_iter(match=f"kl:bodies:{topic}:*", count=1_000)]
    return {name for key in keys for name in await redis.hkeys(key)}


async def publish(client: AsyncClient, topic: str, until: asyncio.Event) -> int:
    """Publish as long as there is no end."""
    count = 0
    while not until.is_set():
        await client.publish_many(
            topic, [OutgoingMessage(f"{count} {n}", key=f"k{n % 40}") for n in range(100)]
        )
        count += 100
        await asyncio.sleep(0.05)
    return count


async def test_bodies_are_those_of_messages_that_are_owed_whoever_is_killed(
    folder: Path | None, topic: str
) -> None:
    """One subscription takes all, another stops somewhere: what it is owed still is what is left."""
    settings: dict[str, Any] = {"partition_lease": 2.0, "session": 2.0}
    if folder is not None:
        settings["payloads"] = f"file://{folder}"
    with RunningBroker(workers=2, **settings) as broker, ExitStack() as stack:
        async with (
            AsyncClient(broker.url) as client,
            Redis.from_url(broker.redis_url, decode_responses=True) as redis,
        ):
            await client.create_topic(topic, partitions=PARTITIONS)
            await client.create_subscription(topic, "all", mode="key_shared")
            await client.create_subscription(topic, "some")
            takers = [stack.enter_context(Takers(broker.url, topic, name)) for name in ("all", "some")]
            for taker in takers:
                taker.start()
                taker.start()
            end = asyncio.Event()
            publishing = asyncio.ensure_future(publish(client, topic, end))
            for number in range(KILLS):
                await asyncio.sleep(PAUSE)
                if number % 2:
                    takers[number // 2 % 2].kill_one()
                    takers[number // 2 % 2].start()
                else:
                    broker.kill_worker(number // 2 % 2)
                    broker.start_worker(number // 2 % 2)
            takers[1].__exit__()  # from now on nobody takes for this one
            await asyncio.sleep(PAUSE)
            end.set()
            published = await publishing
            async with asyncio.timeout(PATIENCE):
                while (await client.describe_subscription(topic, "all")).backlog:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                await client.delete_subscription(topic, "all")
                left: set[str] = set()
                there: set[str] = set()
                try:
                    while True:
                        left, there = await owed(redis, topic), await stored(redis, topic, folder)
                        if (left if folder is None else {ksuid.raw(name).hex() for name in left}) == there:
                            break
                        await asyncio.sleep(0.2)
                except TimeoutError:
                    raise AssertionError(f"{len(left)} are owed, {len(there)} are stored") from None
            assert 0 < len(left) < published
            assert [taker.said for taker in takers] == ["", ""]
