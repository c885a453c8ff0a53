"""Publishes are cancelled while Redis stands still: order, room and bodies are those of what is stored."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
from redis.asyncio import Redis

from keylane import AsyncClient, Columns, OutgoingMessage, Published
from keylane_broker.supervise.embedded_server import Server
from tests.support.running import ROOT, RunningBroker

pytestmark = pytest.mark.anyio

PARTITIONS = 2
KEYS = 6
MEGABYTE = 1024 * 1024
DEADLINE = 150.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that can be stopped: nobody else uses it."""
    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def broker(server: Server) -> Iterator[RunningBroker]:
    with RunningBroker(server) as broker:
        yield broker


@contextmanager
def frozen(server: Server) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def logged(redis: Any, topic: str) -> list[tuple[str, str, str]]:
    """Key, uid and name of the body of all messages, in the order of each partition."""
    found = []
    for partition in range(PARTITIONS):
        for _, fields in await redis.xrange(f"kl:{{{topic}:{partition}}}:log"):
            where = fields["about"].split(" ", 4)[3]
            found.append((fields["key"], fields["uid"], where and (where.partition(":")[2] or fields["uid"])))
    return found


async def stored(redis: Any, topic: str) -> set[str]:
    """The names of all bodies."""
    keys = [key async for key in redis.scan_iter(match=f"kl:bodies:{topic}:*", count=1_000)]
    return {name for key in keys for name in await redis.hkeys(key)}


async def bodies_are_those_of_messages(redis: Any, topic: str) -> list[tuple[str, str, str]]:
    """Wait until it is so; the messages."""
    messages: list[tuple[str, str, str]] = []
    names: set[str] = set()
    try:
        async with asyncio.timeout(DEADLINE):
            while True:
                messages, names = await logged(redis, topic), await stored(redis, topic)
                if names == {name for _, _, name in messages if name}:
                    return messages
                await asyncio.sleep(0.05)
    except TimeoutError:
        owed = {name for _, _, name in messages if name}
        raise AssertionError(f"{len(names - owed)} bodies too many, {len(owed - names)} missing") from None


async def room_is_whole(client: AsyncClient) -> None:
    room = client._producer._limit
    async with asyncio.timeout(DEADLINE):
        while (room._messages, room._length) != (100_000, 64 * MEGABYTE):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)


class Callers:
    """Publish in every way, number what they publish, and some of them go."""

    def __init__(self, client: AsyncClient, topic: str, seed: int) -> None:
        self.client = client
        self.topic = topic
        self.choice = random.Random(seed)
        self.running: list[asyncio.Task[Any]] = []
        self.confirmed: set[str] = set()
        self.withdrawn: set[str] = (
            set()
        )  # of messages whose bodies could not be stored before they were given up
        self.count = 0
        self._fresh: dict[
            asyncio.Task[Any], list[OutgoingMessage]
        ] = {}  # calls since the server stands still

    def call(self) -> None:
        """One more call."""
        choose = self.choice.random()
        size = 1 if choose < 0.6 else self.choice.randrange(2, 200) if choose < 0.95 else 10_100
        messages = self._messages(size, longest=20_000 if size < 10_000 else 0)
        if choose < 0.6:
            (message,) = messages
            work: Any = partial(self.client.publish, data=message.data, key=message.key, uid=message.uid)
        else:
            work = partial(self.client.publish_many, messages=messages)
        task = asyncio.create_task(self._confirm(work))
        self.running.append(task)
        self._fresh[task] = messages

    def cancel_some(self) -> None:
        for task in self.choice.sample(self.running, len(self.running) // 3):
            task.cancel()
            self.withdrawn |= {message.uid or "" for message in self._fresh.get(task, ()) if message.data}

    def server_goes_on(self) -> None:
        """From now on bodies are stored."""
        self._fresh = {}

    async def end(self) -> None:
        async with asyncio.timeout(DEADLINE):
            ended = await asyncio.gather(*self.running, return_exceptions=True)
        assert {type(error) for error in ended if error} <= {asyncio.CancelledError}, ended

    async def _confirm(self, work: Any) -> None:
        answer: Published | list[Published] = await work(self.topic)
        self.confirmed |= {item.uid for item in (answer if isinstance(answer, list) else [answer])}

    def _messages(self, count: int, longest: int) -> list[OutgoingMessage]:
        found = []
        for _ in range(count):
            self.count += 1
            body = b"x" * self.choice.choice([0, 10, longest])
            key = f"k{self.choice.randrange(KEYS)}"
            found.append(OutgoingMessage(body if longest else None, key=key, uid=f"u{self.count:08}"))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_what_is_left_of_cancelled_publishes_is_what_was_sent_in_its_order(
    server: Server, broker: RunningBroker, topic: str, seed: int
) -> None:
    async with (
        AsyncClient(broker.url) as client,
        Redis.from_url(broker.redis_url, decode_responses=True) as redis,
    ):
        await client.create_topic(topic, partitions=PARTITIONS)
        await client.create_subscription(topic, "s")
        callers = Callers(client, topic, seed)
        for _ in range(6):
            with frozen(server):
                for _ in range(25):
                    callers.call()
                    for _ in range(callers.choice.randrange(3)):
                        await asyncio.sleep(callers.choice.choice([0, 0, 0.01]))
                    if callers.choice.random() < 0.2:
                        callers.cancel_some()
                callers.server_goes_on()
            await asyncio.sleep(callers.choice.choice([0, 0.02, 0.1]))
        callers.cancel_some()
        await callers.end()
        await room_is_whole(client)
        messages = await bodies_are_those_of_messages(redis, topic)
        uids = [uid for _, uid, _ in messages]
        assert len(uids) == len(set(uids))
        assert callers.confirmed <= set(uids)
        assert callers.confirmed, "some were not cancelled"
        assert callers.withdrawn
        assert callers.withdrawn.isdisjoint(uids), "what was given up before it was sent is not stored"
        by_key = defaultdict(list)
        for key, uid, _ in messages:
            by_key[key].append(uid)
        for key, found in by_key.items():
            assert found == sorted(found), f"{key} is not in the order of the calls"


PROGRAM = """
import asyncio, contextlib, gc, os, signal, sys
import uvloop
from keylane import AsyncClient

url, topic, server, loop = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024 // 1024

async def publish(client, number):
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.publish(topic, bytes([number + 1]) * (4 * 1024 * 1024), key="k")

async def main():
    async with AsyncClient(url) as client:
        await client.publish(topic, b"first", key="k")
        before, most = resident(), 0
        os.kill(server, signal.SIGSTOP)
        for _ in range(20):
            await asyncio.gather(*(publish(client, number) for number in range(10)))
            most = max(most, resident() - before)
        os.kill(server, signal.SIGCONT)
        await client.publish(topic, b"last", key="k")
        print(most)

(uvloop if loop == "uvloop" else asyncio).run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
async def test_what_is_given_up_while_redis_stands_still_takes_no_memory_and_is_not_stored_later(
    server: Server, broker: RunningBroker, topic: str, loop: str
) -> None:
    """Two hundred bodies of four megabytes, ten at a time."""
    async with (
        AsyncClient(broker.url) as client,
        Redis.from_url(broker.redis_url, decode_responses=True) as redis,
    ):
        await client.create_topic(topic, partitions=PARTITIONS)
        await client.create_subscription(topic, "s")
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                PROGRAM,
                broker.url,
                topic,
                str(server.pid),
                loop,
                stdout=subprocess.PIPE,
                cwd=ROOT,
            )
            said, _ = await asyncio.wait_for(process.communicate(), DEADLINE)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert process.returncode == 0
        assert int(said) < 64 + 40, "megabytes: what may be queued, and what is on its way to the store"
        messages = await bodies_are_those_of_messages(redis, topic)
        assert len(messages) == 2


@pytest.mark.slow
@pytest.mark.parametrize("many", [True, False])
async def test_calls_that_time_out_over_and_over_leave_room_for_others(
    server: Server, broker: RunningBroker, topic: str, many: bool
) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=PARTITIONS)
        await client.create_subscription(topic, "s")
        await client.publish(topic, key="k")
        messages = [OutgoingMessage(key=f"k{n}") for n in range(10_000)]
        columns = Columns(keys=[f"k{n}" for n in range(10_000)])
        with frozen(server):
            for number in range(14):
                call = (
                    client.publish_many(topic, messages) if many else client.publish_columns(topic, columns)
                )
                with pytest.raises(TimeoutError) if many or number > 9 else nullcontext():
                    async with asyncio.timeout(0.0001 if number % 2 else 0.02):
                        await call
        async with asyncio.timeout(DEADLINE):
            await client.publish(topic, key="k")
        await room_is_whole(client)
