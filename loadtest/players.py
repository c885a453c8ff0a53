"""The processes of a benchmark: producers and consumers, ours and those of Redis Streams by hand.

Each runs in a process of its own and takes orders through a pipe; it answers with the instants between which
it worked, by the clock that all processes of a machine share. A warm process is used for every round.
"""

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple, Self

import anyio
import uvloop
from redis import Redis

from keylane import AsyncClient, OutgoingMessage

BATCH = 100  # of Redis Streams by hand: XADD pipelined, XREADGROUP COUNT, XACK and XDEL pipelined
OUR_BATCH = 500  # of publish_many
PUBLISHES = 4  # calls of publish_many under way
PERMITS = 4_000
KEYS = [f"customer-{number:07}" for number in range(1_000)]  # 16 bytes each


class Order(NamedTuple):
    """What to do in one round."""

    name: str  # of the topic or stream
    subscription: str
    messages: int
    body: bytes = b""
    rate: float = 0.0  # messages a second, 0: as fast as possible
    mode: str = "shared"
    alone: bool = True  # there is one subscription


class Report(NamedTuple):
    """When a round began and ended, and how long each message took on its way, in seconds."""

    began: float
    ended: float
    latencies: list[float]


class Player:
    """A process that plays its part whenever it is told to."""

    def __init__(self, part: Callable[[Connection, Any], None], where: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=part, args=(theirs, where), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        assert self.report() == "ready"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has failed, and said so
            self._pipe.send(None)
        self._process.join(20)
        self._process.kill()

    def tell(self, order: Order) -> None:
        """Begin a round."""
        self._pipe.send(order)

    def report(self) -> Any:
        """Wait for what it has to say."""
        if not self._pipe.poll(120):
            raise TimeoutError(f"{self._process.name} says nothing")
        return self._pipe.recv()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid


# Ours


def produce(pipe: Connection, url: str) -> None:
    """Publish with the client, every message confirmed."""
    uvloop.run(_produce(pipe, url))


async def _produce(pipe: Connection, url: str) -> None:
    async with AsyncClient(url) as client:
        pipe.send("ready")
        while order := await anyio.to_thread.run_sync(pipe.recv):
            began = time.monotonic()
            if order.rate:
                await _publish_at(client, order)
            else:
                await _publish_all(client, order)
            pipe.send(Report(began, time.monotonic(), []))


async def _publish_all(client: AsyncClient, order: Order) -> None:
    batches = iter(range(0, order.messages, OUR_BATCH))

    async def publish() -> None:
        for first in batches:
            last = min(first + OUR_BATCH, order.messages)
            await client.publish_many(
                order.name,
                [
                    OutgoingMessage(order.body, key=KEYS[number * 7 % len(KEYS)])
                    for number in range(first, last)
                ],
            )

    async with anyio.create_task_group() as tasks:
        for _ in range(PUBLISHES):
            tasks.start_soon(publish)


async def _publish_at(client: AsyncClient, order: Order) -> None:
    async with anyio.create_task_group() as tasks:
        due = time.monotonic()
        for number in range(order.messages):
            await anyio.sleep(max(due - time.monotonic(), 0))
            due += 1 / order.rate
            tasks.start_soon(_publish_one, client, order, KEYS[number % len(KEYS)])


async def _publish_one(client: AsyncClient, order: Order, key: str) -> None:
    sent = {"sent": repr(time.monotonic())}
    await client.publish(order.name, order.body, key=key, attributes=sent)


def consume(pipe: Connection, url: str) -> None:
    """Consume with the client, reading every body and acking every message."""
    uvloop.run(_consume(pipe, url))


async def _consume(pipe: Connection, url: str) -> None:
    async with AsyncClient(url) as client:
        pipe.send("ready")
        while order := await anyio.to_thread.run_sync(pipe.recv):
            async with client.subscribe(
                order.name, order.subscription, mode=order.mode, permits=PERMITS
            ) as consumer:
                pipe.send("listening")
                began, left, latencies = time.monotonic(), order.messages, list[float]()
                async for batch in consumer.batches(max_messages=1_000, max_wait=0):
                    if order.rate:
                        now = time.monotonic()
                        latencies += [now - float(message.attributes["sent"]) for message in batch]
                    if order.body:
                        bodies = await batch.data()
                        assert all(len(body) == len(order.body) for body in bodies)
                    await consumer.ack(batch)
                    left -= len(batch)
                    if left <= 0:
                        break
                pipe.send(Report(began, time.monotonic(), latencies))


# Redis Streams by hand


def produce_by_hand(pipe: Connection, url: str) -> None:
    """XADD, pipelined."""
    redis: Any = Redis.from_url(url)
    pipe.send("ready")
    while order := pipe.recv():
        began = due = time.monotonic()
        step = 1 if order.rate else BATCH
        for first in range(0, order.messages, step):
            if order.rate:
                time.sleep(max(due - time.monotonic(), 0))
                due += 1 / order.rate
            pipeline = redis.pipeline(transaction=False)
            for number in range(first, first + step):
                fields = {"key": KEYS[number * 7 % len(KEYS)]}
                if order.body:
                    fields["body"] = order.body
                if order.rate:
                    fields["sent"] = repr(time.monotonic())
                pipeline.xadd(order.name, fields)
            pipeline.execute()
        pipe.send(Report(began, time.monotonic(), []))


def consume_by_hand(pipe: Connection, url: str) -> None:
    """XREADGROUP, then XACK and XDEL, pipelined; with several groups nobody can tell when to delete."""
    redis: Any = Redis.from_url(url)
    pipe.send("ready")
    while order := pipe.recv():
        group, alone = order.subscription, order.alone
        redis.xgroup_create(order.name, group, "0", mkstream=True)
        pipe.send("listening")
        began, left, latencies = time.monotonic(), order.messages, list[float]()
        while left > 0:
            [[_, entries]] = redis.xreadgroup(group, "c", {order.name: ">"}, count=BATCH, block=60_000)
            if order.rate:
                now = time.monotonic()
                latencies += [now - float(fields[b"sent"]) for _, fields in entries]
            pipeline = redis.pipeline(transaction=False)
            for id, _ in entries:
                pipeline.xack(order.name, group, id)
                if alone:
                    pipeline.xdel(order.name, id)
            pipeline.execute()
            left -= len(entries)
        pipe.send(Report(began, time.monotonic(), latencies))


def play(producer: Player, consumers: Sequence[Player], order: Order) -> tuple[float, list[float]]:
    """One round; answers how long it took from the first publish to the last ack, and the latencies."""
    for index, consumer in enumerate(consumers):
        consumer.tell(order._replace(subscription=f"s{index}"))
    for consumer in consumers:
        assert consumer.report() == "listening"
    producer.tell(order)
    reports = [consumer.report() for consumer in consumers]
    published = producer.report()
    ended = max(report.ended for report in reports)
    return ended - published.began, [latency for report in reports for latency in report.latencies]
