"""A thousand idle consumers and two hundred busy ones on one worker: what they cost, and nobody starves."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager

import psutil
import pytest

from keylane import AsyncClient, Consumer, OutgoingMessage, wire
from keylane.types import Mode
from tests.support.running import RunningBroker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

IDLE = 1_000
BUSY = 200
MESSAGES = 4_000
SOON = 300.0  # seconds: it is a lot of work, and a machine may have other
KIB = 1_024
CONNECTION_BYTES = 60 * KIB  # at most, for an idle one with a consumer
CONSUMER_BYTES = 30 * KIB  # at most, for one more on a connection


@pytest.fixture
def many() -> Iterator[RunningBroker]:
    """A broker of its own, whose memory is measured; idle ones that do not answer heartbeats may stay."""
    with RunningBroker(heartbeat=600, session=120) as broker:
        yield broker


class IdleConsumers:
    """Connections with consumers that get nothing to do: sockets, so that they cost this process little."""

    def __init__(self, broker: RunningBroker, topic: str, each: int) -> None:
        self._broker = broker
        self._topic = topic
        self._each = each  # consumers on a connection
        self._sockets = ExitStack()
        self._count = 0

    def __enter__(self) -> "IdleConsumers":
        return self

    def __exit__(self, *_: object) -> None:
        self._sockets.close()

    def open(self, connections: int) -> None:
        """Open so many more."""
        for _ in range(connections):
            self._count += 1
            self._open(self._count)

    def _open(self, number: int) -> None:
        here = self._sockets.enter_context(
            socket.create_connection(("127.0.0.1", self._broker.settings.port), timeout=SOON)
        )
        here.sendall(wire.frame(wire.Info(), 1))
        for stream in range(self._each):
            request = wire.Subscribe(stream, self._topic, "idle", f"idle-{number}-{stream}")
            here.sendall(wire.frame(request, stream + 2))
        reader, answers = wire.FrameReader(), 0
        while answers <= self._each:
            for frame in reader.feed(here.recv(65_536)):
                assert frame.type in (wire.Type.OK, wire.Type.HEARTBEAT), bytes(frame.properties)
                answers += frame.type == wire.Type.OK


def memory(broker: RunningBroker) -> int:
    """Bytes that the worker has."""
    return psutil.Process(broker.pid).memory_info().rss


async def warm_up(client: AsyncClient, topic: str) -> None:
    """Let the worker do everything once, so that what is measured then is due to the consumers."""
    await client.create_topic(topic, partitions=4)
    async with client.subscribe(topic, "warm") as consumer:
        await client.publish_many(topic, [OutgoingMessage(key=str(number)) for number in range(2_000)])
        for _ in range(2_000):
            await (await consumer.receive(SOON)).ack()
    await client.delete_subscription(topic, "warm")


@asynccontextmanager
async def busy_consumers(broker: RunningBroker, topic: str, mode: Mode) -> AsyncIterator[list[Consumer]]:
    """Consumers on ten connections, with permits for the messages in all, so that each is needed."""
    clients = [AsyncClient(broker.url) for _ in range(10)]
    async with asyncio.TaskGroup() as opening:
        for client in clients:
            opening.create_task(client.__aenter__())
    consumers = [
        clients[number % 10].subscribe(
            topic, mode, mode=mode, name=f"busy-{number}", permits=MESSAGES // BUSY
        )
        for number in range(BUSY)
    ]
    try:
        for consumer in consumers:
            await consumer.__aenter__()
        yield consumers
    finally:
        for client in clients:
            await client.close()


async def consume(consumer: Consumer, seen: dict[str, list[str]], done: asyncio.Event) -> None:
    """Ack everything, until all that there is has been seen."""
    async for message in consumer:
        seen.setdefault(message.id, []).append(consumer.name)
        if len(seen) == MESSAGES:
            done.set()
        async with message:
            await asyncio.sleep(0)


@pytest.mark.parametrize("connections", [100, 1_000])
async def test_idle_consumers_cost_little_and_busy_ones_among_them_get_everything(
    many: RunningBroker, topic: str, connections: int
) -> None:
    async with AsyncClient(many.url) as client:
        await warm_up(client, f"{topic}-warm")
        await client.create_topic(topic, partitions=4)
        await client.create_topic(f"{topic}-busy", partitions=4)
        with IdleConsumers(many, topic, IDLE // connections) as idle:
            idle.open(connections // 5)  # these use what memory was left over from the warming up
            before = memory(many)
            idle.open(connections - connections // 5)
            used = (memory(many) - before) / 0.8
            print(
                f"{IDLE} idle consumers on {connections} connections: {used / KIB:.0f} KiB, "
                f"{used / KIB / connections:.1f} KiB a connection, {used / KIB / IDLE:.1f} KiB a consumer"
            )
            assert used < connections * CONNECTION_BYTES + (IDLE - connections) * CONSUMER_BYTES
            modes: list[Mode] = ["shared", "key_shared"]
            for mode in modes:
                await all_get_something(many, client, f"{topic}-busy", mode)
            print(f"with 200 busy ones besides: {(memory(many) - before) / KIB:.0f} KiB")
            assert len((await client.describe_subscription(topic, "idle")).consumers) == IDLE


async def all_get_something(broker: RunningBroker, client: AsyncClient, topic: str, mode: Mode) -> None:
    """Busy consumers share the messages: each message goes to one of them, and each of them gets some."""
    seen: dict[str, list[str]] = {}
    done = asyncio.Event()
    async with busy_consumers(broker, topic, mode) as consumers, asyncio.TaskGroup() as tasks:
        consuming = [tasks.create_task(consume(consumer, seen, done)) for consumer in consumers]
        async with asyncio.timeout(SOON):
            for start in range(0, MESSAGES, 1_000):
                await client.publish_many(
                    topic, [OutgoingMessage(key=str(start + number)) for number in range(1_000)]
                )
            await done.wait()
        for task in consuming:
            task.cancel()
    assert all(len(names) == 1 for names in seen.values())
    assert len({names[0] for names in seen.values()}) == BUSY
