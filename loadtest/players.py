"""The processes of a benchmark: a producer and the consumers, through the client as applications use it.

Each part runs in a process of its own and takes orders through a pipe; it answers with the instants between
which it worked, by the clock that all processes of a machine share, and with the CPU time that it took. Warm
processes play every round. loadtest.raw has the same parts for Redis Streams by hand.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import resource
import time
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import anyio
import uvloop

from keylane import AsyncClient, Consumer, Message, OutgoingMessage
from keylane.types import Mode

MOST_TAKEN = 1_000  # messages together: the most that `batches` hands out by default
CONNECTIONS = 20  # that many consumers share
LATE = 180.0  # seconds to wait for what a process has to say


class Order(NamedTuple):
    """What to do in one round; both sides read it alike."""

    name: str  # of the topic, or of the streams
    messages: int = 0
    partitions: int = 1  # or streams
    batch: int = 100  # messages published by a call; 1: each by itself
    taken: int = 100  # messages taken together, at most, of each partition
    calls: int = 4  # under way at once
    body: int = 0  # bytes; 0: metadata only
    inline: int = 0  # bytes of a body up to which the topic has it inline
    keys: int = 1_000
    mode: Mode = "shared"
    subscriptions: int = 1  # or groups
    consumers: int = 1  # of all subscriptions together
    loop: Literal["batches", "messages"] = "batches"  # `batches` and `ack`, or the README's loop
    rate: float = 0.0  # messages a second, each by itself; 0: as fast as possible
    numbered: bool = False  # each message says which of its key it is

    @property
    def deliveries(self) -> int:
        """How many messages consumers get."""
        return self.messages * self.subscriptions

    def subscription_of(self, consumer: int) -> str:
        """The name of a consumer's subscription or group."""
        return f"s{consumer % self.subscriptions}"

    def keys_of(self, call: int) -> Iterator[str]:
        """The keys of one of the calls under way: no other call has them, so that their order is defined."""
        return itertools.cycle([f"customer-{number:07}" for number in range(self.keys)][call :: self.calls])

    def portions(self) -> Iterator[int]:
        """How many messages each call publishes, one call after the other."""
        return (min(self.batch, self.messages - first) for first in range(0, self.messages, self.batch))

    def instants(self) -> Iterator[None]:
        """Wait for the instant of each message."""
        due = time.monotonic()
        for _ in range(self.messages):
            time.sleep(max(due - time.monotonic(), 0))
            yield
            due += 1 / self.rate


class Report(NamedTuple):
    """What a process did in a round."""

    began: float
    ended: float
    cpu: float  # seconds
    latencies: list[float]  # seconds from just before the publish to the application
    handled: list[tuple[str, int]]  # key and number of each message, as they were handled


class Player:
    """A process that plays its part whenever it is told to."""

    def __init__(self, part: Callable[[Connection, Any], None], url: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=part, args=(theirs, url), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        self.expect("ready")
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

    def expect(self, word: str) -> None:
        """Wait until it says so."""
        heard = self._hear()
        assert heard == word, heard

    def report(self) -> Report:
        """Wait until it has done what it was told."""
        heard = self._hear()
        assert isinstance(heard, Report), heard
        return heard

    def _hear(self) -> object:
        if not self._pipe.poll(LATE):
            raise TimeoutError(f"{self._process.name} says nothing")
        return self._pipe.recv()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid


class Tally:
    """What a process does in a round, counted until it has done all of it."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._began, self._cpu = time.monotonic(), cpu_seconds()
        self.latencies: list[float] = []
        self.handled: list[tuple[str, int]] = []
        self.done = asyncio.Event()

    def count(self, messages: int) -> bool:
        """Some are done; answers whether all are."""
        self._left -= messages
        if self._left <= 0:
            self.done.set()
        return self._left <= 0

    def report(self) -> Report:
        """What was done, up to now."""
        ended = time.monotonic()
        return Report(self._began, ended, cpu_seconds() - self._cpu, self.latencies, self.handled)


def cpu_seconds() -> float:
    """The CPU time of this process, ever."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# Publishing


def produce(pipe: Connection, url: str) -> None:
    """Publish with the client, every message confirmed."""
    uvloop.run(_produce(pipe, url))


async def _produce(pipe: Connection, url: str) -> None:
    async with AsyncClient(url) as client:
        pipe.send("ready")
        while order := await anyio.to_thread.run_sync(pipe.recv):
            tally = Tally(order.messages)
            await (_publish_at(client, order) if order.rate else _publish_all(client, order))
            pipe.send(tally.report())


async def _publish_all(client: AsyncClient, order: Order) -> None:
    portions = order.portions()
    async with asyncio.TaskGroup() as tasks:
        for call in range(order.calls):
            tasks.create_task(_publish(client, order, portions, order.keys_of(call)))


async def _publish(client: AsyncClient, order: Order, portions: Iterator[int], keys: Iterator[str]) -> None:
    """Publish one portion after the other, as long as there are any."""
    body = b"x" * order.body or None
    if order.batch == 1:
        for _ in portions:
            await client.publish(order.name, body, key=next(keys))
    elif not order.numbered:
        for count in portions:
            some = itertools.islice(keys, count)
            await client.publish_many(order.name, [OutgoingMessage(body, key=key) for key in some])
    else:
        numbers: dict[str, int] = {}
        for count in portions:
            messages = []
            for key in itertools.islice(keys, count):
                numbers[key] = numbers.get(key, 0) + 1
                messages.append(OutgoingMessage(body, key=key, attributes={"number": str(numbers[key])}))
            await client.publish_many(order.name, messages)


async def _publish_at(client: AsyncClient, order: Order) -> None:
    """Publish at a steady pace, which a thread keeps: the timers of an event loop tick in milliseconds."""
    body, keys = b"x" * order.body or None, order.keys_of(0)
    await keep_pace(order, lambda: _publish_one(client, order.name, body, next(keys)))


async def keep_pace(order: Order, publish: Callable[[], Coroutine[None, None, None]]) -> None:
    """Publish at the instant of each message, and wait for none of them."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:

        def begin() -> None:
            tasks.create_task(publish())

        def tell() -> None:
            for _ in order.instants():
                loop.call_soon_threadsafe(begin)

        await asyncio.to_thread(tell)


async def _publish_one(client: AsyncClient, topic: str, body: bytes | None, key: str) -> None:
    await client.publish(topic, body, key=key, attributes={"sent": repr(time.monotonic())})


# Consuming


def consume(pipe: Connection, url: str) -> None:
    """Consume with the client, reading every body and acking every message."""
    uvloop.run(_consume(pipe, url))


async def _consume(pipe: Connection, url: str) -> None:
    pipe.send("ready")
    while order := await anyio.to_thread.run_sync(pipe.recv):
        async with contextlib.AsyncExitStack() as stack:
            consumers = await _open(stack, url, order)
            pipe.send("listening")
            tally = Tally(order.deliveries)
            takers = [asyncio.create_task(_take(consumer, order, tally)) for consumer in consumers]
            await _first_error(takers, tally.done)
            if order.loop == "messages":  # acks may be under way until the consumer is closed
                await asyncio.gather(*(consumer.close() for consumer in consumers))
            report = tally.report()
        pipe.send(report)


async def _open(stack: contextlib.AsyncExitStack, url: str, order: Order) -> list[Consumer]:
    clients = [
        await stack.enter_async_context(AsyncClient(url)) for _ in range(min(order.consumers, CONNECTIONS))
    ]
    consumers = [
        clients[number % len(clients)].subscribe(order.name, order.subscription_of(number), mode=order.mode)
        for number in range(order.consumers)
    ]
    await asyncio.gather(*map(stack.enter_async_context, consumers))
    return consumers


async def _first_error(takers: list[asyncio.Task[None]], done: asyncio.Event) -> None:
    """Wait until all is done, or one of them has failed; then end them."""
    waiting = asyncio.create_task(done.wait())
    ended, _ = await asyncio.wait([waiting, *takers], return_when=asyncio.FIRST_COMPLETED)
    for task in (waiting, *takers):
        task.cancel()
    await asyncio.gather(waiting, *takers, return_exceptions=True)
    for task in ended:
        task.result()


async def _take(consumer: Consumer, order: Order, tally: Tally) -> None:
    if order.loop == "messages":
        await _take_messages(consumer, order, tally)
    else:
        await _take_batches(consumer, order, tally)


async def _take_batches(consumer: Consumer, order: Order, tally: Tally) -> None:
    async for batch in consumer.batches(max_messages=min(order.taken * order.partitions, MOST_TAKEN)):
        if order.body:
            bodies = await batch.data()
            assert all(len(body) == order.body for body in bodies)
        if order.rate:
            now = time.monotonic()
            tally.latencies += [now - float(message.attributes["sent"]) for message in batch]
        if order.numbered:
            await _handle(list(batch), tally)
        await consumer.ack(batch)
        tally.count(len(batch))


async def _handle(batch: list[Message], tally: Tally) -> None:
    """Take a moment for each, as applications do: whoever has later messages of a key can overtake."""
    for message in batch:
        await asyncio.sleep(0)
        tally.handled.append((message.key or "", int(message.attributes["number"])))


async def _take_messages(consumer: Consumer, order: Order, tally: Tally) -> None:
    """The loop of the README."""
    async for message in consumer:
        async with message:
            if order.body:
                assert len(await message.data()) == order.body
        tally.count(1)
