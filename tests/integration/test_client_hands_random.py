"""Many tasks that settle, fail, pause and are cancelled at random while Redis stands still now and then.

Nothing is lost, nothing confirmed comes again, no key is out of order, and a retry is charged only where the
application had a message in hands and failed on it.
"""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from keylane import AsyncClient, Message, OutgoingMessage
from keylane.consume.consumer import Consumer
from keylane.consume.message import spans_of
from keylane.consume.receipts import ACK
from keylane.types import Mode
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.supervise.embedded_server import Server
from tests.support.running import RunningBroker

PATIENCE = 90.0
KEYS = 12


@pytest.fixture
def own() -> Iterator[RunningBroker]:
    """A broker whose Redis may stand still: long sessions and leases, so that this alone ends none."""
    with RunningBroker(session=60.0, partition_lease=30.0) as broker:
        yield broker


class Failed(Exception):
    """What an application says that cannot do its work."""


class Story:
    """What became of each message, by key and number, and what should be true of its next delivery."""

    def __init__(self, dice: random.Random, count: int, ordered: bool) -> None:
        self.dice = dice
        self.ordered = ordered
        self.left = {(key, number) for key in range(KEYS) for number in range(count)}
        self.acking: set[tuple[int, int]] = (
            set()
        )  # settled perhaps: the answer comes later than the next message
        self.charged: Counter[tuple[int, int]] = Counter()
        self.paused: set[Consumer] = set()
        self.wrong: list[str] = []
        self.over = asyncio.Event()

    async def handle(self, message: Message) -> None:
        """One delivery: look whether it may be, then end it in some way."""
        key, number = map(int, (await message.data()).split())
        place = key, number
        if place not in self.left:
            self.wrong.append(f"{place} was confirmed, and came again")
        if self.ordered and any((key, earlier) in self.left - self.acking for earlier in range(number)):
            self.wrong.append(f"{place} came before an earlier one of its key was settled")
        if message.retry_count != self.charged[place]:
            self.wrong.append(
                f"{place} has {message.retry_count} retries, and failed {self.charged[place]} times"
            )
        await asyncio.sleep(self.dice.choice((0, 0, 0.001, 0.01)))
        what = self.dice.choices(
            (
                self._acks,
                self._acks_impatiently,
                self._leaves_the_block,
                self._nacks,
                self._raises,
                self._is_cancelled,
            ),
            (2, 4, 4, 1, 1, 2),
        )[0]
        if await what(message, place):
            self.left.discard(place)
            if not self.left:
                self.over.set()

    def begins(self, consumer: Consumer) -> None:
        """Something is handed to the application."""
        if consumer in self.paused:
            self.wrong.append("a message was handed out in a pause")

    # How a delivery may end; whether that settles the message for good.

    async def _acks(self, message: Message, place: tuple[int, int]) -> bool:
        self.acking.add(place)
        await message.ack()
        return True

    async def _acks_impatiently(self, message: Message, place: tuple[int, int]) -> bool:
        self.acking.add(place)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.dice.choice((0.0, 0.0005, 0.002, 0.02))):
                    if self.dice.random() < 0.5:
                        await message.ack()
                    else:
                        spans = spans_of([message], message._origin)
                        assert await message._origin.settler.many(ACK, spans) == ["settled"]
                    return True

    async def _leaves_the_block(self, message: Message, place: tuple[int, int]) -> bool:
        async with message:
            pass
        return True

    async def _nacks(self, message: Message, place: tuple[int, int]) -> bool:
        self.charged[place] += 1
        await message.nack(delay=self.dice.choice((0, 0.01)))
        return False

    async def _raises(self, message: Message, place: tuple[int, int]) -> bool:
        self.charged[place] += 1
        with suppress(Failed):
            async with message:
                raise Failed
        return False

    async def _is_cancelled(self, message: Message, place: tuple[int, int]) -> bool:
        inside = asyncio.Event()

        async def work() -> None:
            async with message:
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await inside.wait()
        task.cancel()
        await asyncio.wait({task})
        return False


@asynccontextmanager
async def consuming(client: AsyncClient, topic: str, mode: Mode, story: Story) -> AsyncIterator[Consumer]:
    """A consumer at work: with handlers where there is an order, else with tasks that receive."""

    async def handle(message: Message) -> None:
        story.begins(consumer)
        try:
            await story.handle(message)
        except Exception as error:
            story.wrong.append(f"{error!r}")
            story.over.set()

    async def loop() -> None:
        async for message in consumer:
            await handle(message)

    options = {"handler": handle} if story.ordered else {}
    consumer = client.subscribe(topic, "s", mode=mode, permits=40, lease=60.0, **options)  # type: ignore[arg-type]
    async with consumer:
        loops = [asyncio.create_task(loop()) for _ in range(0 if story.ordered else 8)]
        yield consumer
        for task in loops:
            task.cancel()
        await asyncio.gather(*loops, return_exceptions=True)


async def pauses(consumer: Consumer, story: Story) -> None:
    """Pause and resume."""
    while not story.over.is_set():
        await asyncio.sleep(story.dice.random() * 0.1)
        await consumer.pause()
        story.paused.add(consumer)
        await asyncio.sleep(story.dice.random() * 0.05)
        story.paused.discard(consumer)
        await consumer.resume()


async def stand_still(server: Server, story: Story) -> None:
    """Stop Redis for a moment, several times."""
    for _ in range(5):
        await asyncio.sleep(0.1 + story.dice.random() * 0.2)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(story.dice.random() * 0.5)
        finally:
            os.kill(server.pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("mode", ["shared", "key_shared"])
async def test_whatever_the_application_does_its_messages_are_what_it_says(
    own: RunningBroker, topic: str, mode: Mode, seed: int
) -> None:
    assert isinstance(own.server, Server)
    story = Story(random.Random(seed), 60, mode != "shared")
    async with AsyncClient(own.url) as client, AsyncClient(own.url) as other:
        await client.create_topic(topic, partitions=3)
        await client.create_subscription(topic, "s", mode=mode, backoff=None)
        outgoing = [
            OutgoingMessage(f"{key} {number}".encode(), key=f"k{key}") for key, number in sorted(story.left)
        ]
        await client.publish_many(topic, outgoing)
        async with (
            consuming(client, topic, mode, story) as first,
            consuming(client, topic, mode, story) as second,
            consuming(other, topic, mode, story) as third,
        ):
            busy = [asyncio.create_task(pauses(consumer, story)) for consumer in (first, second, third)]
            await stand_still(own.server, story)
            with suppress(TimeoutError):
                await asyncio.wait_for(story.over.wait(), PATIENCE)
            left = set(story.left)
            story.over.set()
            await asyncio.gather(*busy)
        assert story.wrong == []
        assert not left, "lost"
        assert (await client.describe_subscription(topic, "s")).backlog == 0
    engine = Engine.connect(own.redis_url)
    assert await check_topic(engine, topic) == []
    await engine.close()
