"""A fetch names a few of many consumers: nobody starves for it, no key either, and no message is skipped."""

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from keylane import AsyncClient, Consumer, Message, OutgoingMessage, StaleReceipt, wire
from keylane.types import Mode
from keylane_broker.config import Settings
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Outgoing
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.worker import dispatcher
from keylane_broker.worker.worker import Worker
from loadtest.topology import single_server
from tests.support.peer import Stream, connect

SOON = 60.0  # seconds; a session ends after 600, and has everything looked at
MESSAGES = 300
KEYS = 12
MODES: list[Mode] = ["key_shared", "shared", "failover"]


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """A server whose partitions no other test has."""
    with single_server() as server:
        yield server.url


@pytest.fixture
async def worker(server_url: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Worker]:
    """A worker in this process, whose fetches name two consumers or three."""
    for name in ("FEW", "OWN"):
        monkeypatch.setattr(dispatcher, name, 1)
    monkeypatch.setattr(dispatcher, "MANY", 2)
    worker, ready = Worker(Settings(port=0, session=600.0), server_url, worker_id=topic), asyncio.Event()
    serving = asyncio.create_task(worker.serve(ready.set))
    await ready.wait()
    yield worker
    worker.stop()
    await serving


class Crowd:
    """Consumers who ack, nack and dawdle as chance has it."""

    def __init__(
        self, chance: random.Random, stack: AsyncExitStack, url: str, topic: str, mode: Mode
    ) -> None:
        self.chance, self.stack, self.url, self.topic, self.mode = chance, stack, url, topic, mode
        self.done: dict[str, list[int]] = defaultdict(list)  # key -> numbers, as they were acked
        self.takers: set[str] = set()
        self.finished = asyncio.Event()

    async def join(self, count: int, permits: int) -> list[Consumer]:
        """Open so many consumers on two connections."""
        clients = [await self.stack.enter_async_context(AsyncClient(self.url)) for _ in range(2)]
        return [
            await self.stack.enter_async_context(
                clients[number % 2].subscribe(
                    self.topic, "s", mode=self.mode, permits=permits, start="earliest", name=f"c{number}"
                )
            )
            for number in range(count)
        ]

    async def consume(self, consumer: Consumer) -> None:
        """Settle whatever comes, one way or another."""
        async for message in consumer:
            self.takers.add(consumer.name)
            with contextlib.suppress(StaleReceipt):  # it went back with one before it
                await self._settle(message)
            if self.chance.random() < 0.02:
                await consumer.pause()
                await asyncio.sleep(0.01)
                await consumer.resume()

    async def _settle(self, message: Message) -> None:
        luck = self.chance.random()
        if luck < 0.15:
            await message.nack(delay=self.chance.choice((0, 0, 0.01, 0.05)))
        else:
            if luck < 0.4:
                await asyncio.sleep(self.chance.choice((0, 0.001, 0.01)))
            await message.ack()
            self.done[message.key or ""].append(int(message.attributes["number"]))
            if sum(map(len, self.done.values())) == MESSAGES:
                self.finished.set()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
async def test_many_consumers_get_everything_in_order_however_few_a_fetch_names(
    worker: Worker, server_url: str, topic: str, mode: Mode, seed: int
) -> None:
    chance = random.Random(seed)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(f"keylane://{worker.address}"))
        await client.create_topic(topic, partitions=2)
        crowd = Crowd(chance, stack, f"keylane://{worker.address}", topic, mode)
        consumers = await crowd.join(count=9, permits=chance.choice((1, 3, 8)))
        async with asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
            consuming = [tasks.create_task(crowd.consume(consumer)) for consumer in consumers]
            number = 0
            while number < MESSAGES:
                count = min(chance.choice((1, 5, 40)), MESSAGES - number)
                batch = [
                    OutgoingMessage(key=f"k{chance.randrange(KEYS)}", attributes={"number": str(at)})
                    for at in range(number, number + count)
                ]
                await client.publish_many(topic, batch)
                number += count
            await crowd.finished.wait()
            for task in consuming:
                task.cancel()
        if mode != "shared":
            assert all(numbers == sorted(numbers) for numbers in crowd.done.values())
        if mode != "failover":
            assert len(crowd.takers) == len(consumers)
        engine = Engine.connect(server_url)
        assert await check_topic(engine, topic) == []
        await engine.close()


@pytest.mark.slow
async def test_what_waits_for_its_time_with_one_consumer_comes_though_fetches_name_others(
    worker: Worker, topic: str
) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(f"keylane://{worker.address}"))
        await client.create_topic(topic, partitions=1)
        crowd = Crowd(random.Random(1), stack, f"keylane://{worker.address}", topic, "key_shared")
        consumers = await crowd.join(count=6, permits=10)
        await client.publish_many(topic, [OutgoingMessage(key="k") for _ in range(2)])
        first = [asyncio.ensure_future(consumer.receive()) for consumer in consumers]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED, timeout=SOON)
        [holder] = [consumer for consumer, task in zip(consumers, first, strict=True) if task.done()]
        second = await holder.receive(SOON)
        await second.nack(delay=0.3)
        for number in range(20):
            await client.publish(topic, key=f"other-{number}")
        again = asyncio.ensure_future(_until(holder, second.id))
        await asyncio.wait_for(again, SOON)
        for task in first:
            task.cancel()


async def _until(consumer: Consumer, id: str) -> None:
    while (await consumer.receive(SOON)).id != id:
        continue


async def test_a_partition_that_found_nobody_with_room_is_told_when_somebody_has(
    worker: Worker, topic: str
) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(f"keylane://{worker.address}"))
        await client.create_topic(topic, partitions=2)
        crowd = Crowd(random.Random(1), stack, f"keylane://{worker.address}", topic, "shared")
        consumers = await crowd.join(count=3, permits=1)
        await client.publish_many(topic, [OutgoingMessage(partition=0) for _ in consumers])
        held = [await consumer.receive(SOON) for consumer in consumers]
        await client.publish_many(topic, [OutgoingMessage(partition=1) for _ in consumers])
        for message, consumer in zip(held, consumers, strict=True):
            await message.ack()
            await consumer.receive(SOON)


@pytest.mark.parametrize("what", ["connection", "session"])
async def test_who_goes_amid_a_fetch_leaves_nobody_waiting(
    worker: Worker, topic: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its room was no sign that there is nothing more for the others."""
    run, gone = worker.engine.store.run, list[str]()

    async def run_and_go(script: str, keys: list[str], *arguments: Any) -> list[Any]:
        name = msgspec.msgpack.decode(arguments[5])[0] if script == "subscription/fetch" else ""
        if name and not gone and what == "session":
            gone.append(name)
            await worker.engine.store.command("ZREM", keys[11], name)
        answer = await run(script, keys, *arguments)
        if name and not gone:
            gone.append(name)
            consumer = worker.partitions.consumers.get(topic, "s", name)
            assert consumer is not None
            consumer.forget()  # as the end of its connection does
        return answer

    url = f"keylane://{worker.address}"
    async with AsyncClient(url) as client, connect(url) as peer:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s")
        streams = [Stream(peer, topic, "s", f"c{number}") for number in range(5)]
        for stream in streams:
            await stream.open(permits=1)
        partition = worker.partitions.get(topic, 0)
        await partition.dispatchers["s"].wait_for_fetch()
        messages = [Outgoing("", uid, wire.pack_about(1)) for uid in "abcdefgh"]
        await worker.engine.publish(await partition.lease(), messages)
        monkeypatch.setattr(worker.engine.store, "run", run_and_go)
        partition.dispatchers["s"].notify()
        async with asyncio.timeout(SOON):
            for stream in streams:
                if stream.name not in gone:
                    await stream.receive(1)
        assert len(gone) == 1
