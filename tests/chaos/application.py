"""An application in a process of its own: `python -m tests.chaos.application`.

It knows the client's API and nothing of what happens to the broker. The order comes as a line of JSON on
stdin; what it sees goes to stdout, many events to a line. It ends in good order when stdin closes.
"""

import asyncio
import random
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import BinaryIO

import anyio
import msgspec

from keylane import AsyncClient, BrokerError, Consumer, Message, StaleReceipt
from keylane.types import Mode, Outcome

FLUSH = 0.05  # seconds between lines
UNANSWERED = 1_000  # publishes that a producer has under way
ENOUGH = 3_000  # publishes, from which on it slows down: where all takes long, there is no end otherwise
GIVEN_BACK = 0.02  # share of the batches of which something is nacked
TIMEOUT = 200.0  # seconds that an operation may take, whatever happens


class Order(msgspec.Struct, frozen=True):
    """What an application is to do: to publish at a rate, or to consume."""

    url: str
    topic: str
    name: str
    seed: int
    rate: float = 0.0  # messages a second
    keys: list[list[str]] = []  # of each partition; "" for a message without
    subscriptions: dict[str, Mode] = {}  # name -> mode


class Event(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Something that an application did or saw, by the clock that all processes share."""

    at: float


class Publishing(Event, frozen=True):
    """A publish is about to be sent."""

    number: int
    key: str
    partition: int


class Published(Event, frozen=True):
    """It was answered."""

    number: int
    partition: int
    ledger: int
    entry: int
    uid: str
    duplicate: bool


class Delivered(Event, frozen=True):
    """A message was handed to the application; with what the recorder wants to see of it."""

    subscription: str
    consumer: str
    id: str
    key: str | None
    uid: str
    token: int
    retry_count: int
    attributes: dict[str, str]


class Acking(Event, frozen=True):
    """Acks are about to be sent, of messages by their names."""

    subscription: str
    names: list[str]


class Acked(Event, frozen=True):
    """They were answered."""

    subscription: str
    names: list[str]
    outcomes: list[Outcome]


class Nacking(Event, frozen=True):
    """A nack is about to be sent."""

    subscription: str
    name: str


class Failed(Event, frozen=True):
    """An operation raised what the application did not count on."""

    text: str


class Open(Event, frozen=True):
    """Everything is open: consumers consume, a producer begins."""


Seen = Publishing | Published | Delivered | Acking | Acked | Nacking | Failed | Open


class Application:
    """Publishes or consumes until told to stop."""

    def __init__(self, order: Order, out: BinaryIO) -> None:
        self.order = order
        self._out = out
        self._events: list[Seen] = []
        self._chance = random.Random(f"{order.seed} {order.name}")

    async def run(self, stopped: asyncio.Event) -> None:
        """Do as ordered."""
        async with asyncio.TaskGroup() as tasks:
            flushing = tasks.create_task(self._flush_regularly())
            try:
                async with AsyncClient(self.order.url, timeout=TIMEOUT) as client:
                    await (self._produce if self.order.rate else self._consume)(client, stopped)
            except* BrokerError as group:
                self._note(Failed(time.monotonic(), f"{self.order.name}: {group.exceptions!r}"))
            flushing.cancel()
        self._flush()

    def _note(self, event: Seen) -> None:
        self._events.append(event)

    def _flush(self) -> None:
        if self._events:
            self._out.write(msgspec.json.encode(self._events) + b"\n")
            self._out.flush()
            self._events = []

    async def _flush_regularly(self) -> None:
        while True:
            await asyncio.sleep(FLUSH)
            self._flush()

    # Publishing

    async def _produce(self, client: AsyncClient, stopped: asyncio.Event) -> None:
        """Publish at a steady rate, to one partition after the other; who waits does not hold up the rest."""
        self._note(Open(time.monotonic()))
        room = asyncio.Semaphore(UNANSWERED)
        pause = 1 / self.order.rate
        number, due = 0, time.monotonic()
        partitions: list[int] = []
        async with asyncio.TaskGroup() as calls:
            while not stopped.is_set():
                partitions = partitions or self._chance.sample(
                    range(len(self.order.keys)), len(self.order.keys)
                )
                partition = partitions.pop()
                key = self._chance.choice(self.order.keys[partition])
                await room.acquire()
                calls.create_task(self._publish(client, number, key, partition, room))
                number += 1
                if number == ENOUGH:
                    pause *= 10
                due = max(due + pause, time.monotonic() - 1)
                await asyncio.sleep(due - time.monotonic())  # the call begins before the next

    async def _publish(
        self, client: AsyncClient, number: int, key: str, partition: int, room: asyncio.Semaphore
    ) -> None:
        name = f"{self.order.name} {number}"
        self._note(Publishing(time.monotonic(), number, key, partition))
        try:
            answer = await client.publish(
                self.order.topic,
                key=key or None,
                partition=None if key else partition,
                attributes={"name": name},
            )
        except BrokerError as error:
            self._note(Failed(time.monotonic(), f"publish of {name} to {partition}: {error!r}"))
            return
        finally:
            room.release()
        now = time.monotonic()
        place = (answer.partition, answer.ledger, answer.entry)
        self._note(Published(now, number, *place, answer.uid, answer.duplicate))

    # Consuming

    async def _consume(self, client: AsyncClient, stopped: asyncio.Event) -> None:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            working = []
            for number, (subscription, mode) in enumerate(self.order.subscriptions.items()):
                name = f"{self.order.name}-{subscription}"
                opened = client.subscribe(self.order.topic, subscription, mode=mode, name=name, permits=200)
                consumer = await stack.enter_async_context(opened)
                consume = self._consume_one_by_one if number % 2 else self._consume_in_batches
                working.append(tasks.create_task(consume(consumer, subscription)))
            self._note(Open(time.monotonic()))
            await stopped.wait()
            for task in working:
                task.cancel()

    async def _consume_in_batches(self, consumer: Consumer, subscription: str) -> None:
        """Take what is there, now and then give something back, ack the rest together."""
        async for batch in consumer.batches(max_messages=self._chance.randint(20, 100)):
            messages = list(batch)
            for message in messages:
                self._delivered(subscription, consumer.name, message)
            if self._chance.random() < GIVEN_BACK:
                back = messages.pop(self._chance.randrange(len(messages)))
                self._note(Nacking(time.monotonic(), subscription, back.attributes["name"]))
                await consumer.nack([back], delay=self._chance.choice((0, 0.1)))
            names = [message.attributes["name"] for message in messages]
            self._note(Acking(time.monotonic(), subscription, names))
            outcomes = await consumer.ack(messages)
            self._note(Acked(time.monotonic(), subscription, names, list(outcomes)))

    async def _consume_one_by_one(self, consumer: Consumer, subscription: str) -> None:
        """Ack each message by itself and wait for the answer, with a few under way."""
        room = asyncio.Semaphore(50)
        async with asyncio.TaskGroup() as acks:
            async for message in consumer:
                self._delivered(subscription, consumer.name, message)
                await room.acquire()
                name = message.attributes["name"]
                self._note(Acking(time.monotonic(), subscription, [name]))
                acks.create_task(self._ack(message, subscription, name, room))

    async def _ack(self, message: Message, subscription: str, name: str, room: asyncio.Semaphore) -> None:
        outcome: Outcome = "settled"
        try:
            await message.ack()
        except StaleReceipt:
            outcome = "stale"
        finally:
            room.release()
        self._note(Acked(time.monotonic(), subscription, [name], [outcome]))

    def _delivered(self, subscription: str, consumer: str, message: Message) -> None:
        self._note(
            Delivered(
                time.monotonic(),
                subscription,
                consumer,
                message.id,
                message.key,
                message.uid,
                message.token,
                message.retry_count,
                dict(message.attributes),
            )
        )


def decode(line: bytes) -> Sequence[Seen]:
    """The events of a line."""
    return msgspec.json.decode(line, type=list[Seen])


async def main() -> None:
    """Run the application that stdin describes."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)

    def wait_for_the_end() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(stopped.set)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    await Application(order, sys.stdout.buffer).run(stopped)


if __name__ == "__main__":
    anyio.run(main, backend_options={"use_uvloop": True})
