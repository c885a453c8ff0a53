"""The guided tour of `keylane demo`: every step really happens, and what it shows is checked."""

import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import anyio
from anyio.streams.text import TextReceiveStream
from rich.padding import Padding
from rich.text import Text

from keylane import AsyncClient, Consumer, Message, OutgoingMessage
from keylane.commandline.output import CommandError
from keylane.errors import StaleReceipt, SubscriptionBusy
from keylane.types import Mode
from keylane_broker.commandline.command import BrokerRun
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic

__all__ = ["Tour"]

PATIENCE = 60.0  # seconds for anything that has to come, on a machine that has much to do
READING_SECONDS = 0.7  # between steps, where somebody watches


class Tour:
    """A walk through one topic, a subscription for each step."""

    def __init__(self, client: AsyncClient, server: str, topic: str, run: BrokerRun) -> None:
        self.client = client
        self.server = server
        self.topic = topic
        self.run = run
        self.steps: list[str] = []

    def title(self, text: str) -> None:
        """Begin a step."""
        self.steps.append(text)
        if not self.run.json:
            self.run.out.print(f"\n{len(self.steps)}. {text}", style="bold", markup=False)

    def line(self, text: str) -> None:
        """Say what has just happened."""
        if not self.run.json:
            self.run.out.print(Padding(Text(text), (0, 0, 0, 3), expand=False))

    async def walk(self) -> None:
        """Take every step; raise CommandError if one fails."""
        await self.client.create_topic(self.topic, partitions=4)
        steps: list[Callable[[], Awaitable[None]]] = [
            self.publishing,
            self.shared,
            self.key_shared,
            self.exclusive,
            self.failover,
            self.retries,
            self.timeout,
            self.crash,
            self.idempotence,
        ]
        for step in steps:
            await step()
            if self.run.out.is_terminal:
                await anyio.sleep(READING_SECONDS)

    async def publishing(self) -> None:
        """Bodies go to the payload store, everything else to the broker."""
        self.title("A topic, a subscription, a message")
        async with self._subscription("billing", "shared"):
            published = await self.client.publish(
                self.topic, b"two teas", key="customer-7", attributes={"region": "eu"}
            )
            self.line(f"published {published.id}: key customer-7, region eu; the answer says it is stored")
            async with self._consumer("billing", "anna") as anna:
                message = await _receive(anna)
                body = await message.data()
                self.line(f"anna receives {message.id}: {body.decode()!r}, {message.age * 1000:.0f} ms old")
                _expect(message.id == published.id and body == b"two teas", "the message that was published")
                await message.ack()

    async def shared(self) -> None:
        """Consumers split the work."""
        self.title("shared: consumers split the work")
        async with (
            self._subscription("parcels", "shared"),
            self._consumer("parcels", "anna", permits=3) as anna,
            self._consumer("parcels", "bert", permits=3) as bert,
        ):
            await self._publish([("", f"parcel {number}") for number in range(6)])
            got = await _collect({"anna": anna, "bert": bert}, 6)
            for name in ("anna", "bert"):
                self.line(f"{name} has {', '.join([await _text(m) for who, m in got if who == name])}")
            _expect(sum(who == "anna" for who, _ in got) == 3, "three parcels each")
            await _ack(got)

    async def key_shared(self) -> None:
        """Each key has one consumer at a time, and its order."""
        self.title("key_shared: each key is a lane, in order, with one consumer at a time")
        keys = ("cat", "dog", "owl")
        async with (
            self._subscription("pets", "key_shared"),
            self._consumer("pets", "anna") as anna,
            self._consumer("pets", "bert") as bert,
        ):
            await self._publish([(key, f"{key} {number}") for number in (1, 2, 3) for key in keys])
            got = await _collect({"anna": anna, "bert": bert}, 9)
            for key in keys:
                holders = {who for who, message in got if message.key == key}
                texts = [await _text(message) for _, message in got if message.key == key]
                self.line(f"{' and '.join(sorted(holders))} has {', '.join(texts)}")
                _expect(len(holders) == 1, f"one consumer for {key}")
                _expect(texts == [f"{key} {number}" for number in (1, 2, 3)], f"{key} in order")
            await _ack(got)

    async def exclusive(self) -> None:
        """One consumer; a second one is refused."""
        self.title("exclusive: one consumer, nobody else")
        async with self._subscription("ledger", "exclusive"), self._consumer("ledger", "anna") as anna:
            await self._publish([("", "entry")])
            message = await _receive(anna)
            self.line(f"anna has {message.id}")
            try:
                async with self._consumer("ledger", "bert"):
                    raise CommandError("the demo failed: a second consumer of an exclusive subscription")
            except SubscriptionBusy as error:
                self.line(f"bert is refused: {error}")
            await message.ack()

    async def failover(self) -> None:
        """The standby goes on where the active one stopped."""
        self.title("failover: a standby goes on where the active one stopped")
        async with self._subscription("meter", "failover"), contextlib.AsyncExitStack() as while_she_stays:
            anna = await while_she_stays.enter_async_context(self._consumer("meter", "anna"))
            async with self._consumer("meter", "bert") as bert:
                await self._publish([("sensor", f"reading {number}") for number in (1, 2)])
                first = await _receive(anna)
                self.line(f"anna acks {await _text(first)}, has the next one, and leaves")
                await first.ack()
                await while_she_stays.aclose()
                second = await _receive(bert)
                text, retries = await _text(second), second.retry_count
                self.line(f"bert receives {text}, retry count {retries}: she left in good order")
                _expect((text, retries) == ("reading 2", 0), "reading 2, not charged")
                await second.ack()

    async def retries(self) -> None:
        """A nack brings a message back, counted."""
        self.title("nack: a message comes back after a while, with its retries counted")
        async with self._subscription("mails", "shared"), self._consumer("mails", "anna") as anna:
            await self._publish([("", "mail")])
            message = await _receive(anna)
            await message.nack(delay=0.5)
            self.line(f"anna gives {message.id} back for half a second")
            again = await _receive(anna)
            self.line(f"it is here again: retry count {again.retry_count}")
            _expect((again.id, again.retry_count) == (message.id, 1), "the same message, one retry")
            await again.ack()

    async def timeout(self) -> None:
        """A lease that runs out brings a message back, and voids the old receipt."""
        self.title("leases: what is not settled in time comes back")
        async with (
            self._subscription("calls", "shared"),
            self._consumer("calls", "anna", lease=1.0, auto_extend=False, permits=1) as anna,
        ):
            await self._publish([("", "call")])
            message = await _receive(anna)
            self.line(f"anna has {message.id} for one second and forgets about it")
            async with self._consumer("calls", "bert") as bert:
                again = await _receive(bert)
                self.line(f"bert receives it: retry count {again.retry_count}")
                _expect((again.id, again.retry_count) == (message.id, 1), "the same message, one retry")
                try:
                    await message.ack()
                    raise CommandError("the demo failed: an ack after the lease ran out")
                except StaleReceipt as error:
                    self.line(f"anna's ack comes too late: {error}")
                await again.ack()

    async def crash(self) -> None:
        """What a killed consumer held comes back."""
        self.title("crash: what a dead consumer held comes back")
        async with self._subscription("jobs", "shared"):
            await self._publish([("", f"job {number}") for number in (1, 2, 3)])
            held = await self._consume_in_a_process_and_kill_it("jobs", 3)
            async with self._consumer("jobs", "bert") as bert:
                got = await _collect({"bert": bert}, 3)
                for _, message in got:
                    self.line(f"bert receives {message.id}: retry count {message.retry_count}")
                _expect({message.id for _, message in got} == held, "all that it held")
                await _ack(got)

    async def idempotence(self) -> None:
        """The same uid twice is one message."""
        self.title("uid: publishing again changes nothing")
        async with self._subscription("payments", "shared"), self._consumer("payments", "anna") as anna:
            first, again = [
                await self.client.publish(self.topic, b"10 EUR", key="customer-7", uid="payment-1")
                for _ in (1, 2)
            ]
            self.line(f"published {first.id}; the same uid again: {again.id}, duplicate={again.duplicate}")
            _expect(again.duplicate and again.id == first.id, "a duplicate of the first")
            message = await _receive(anna)
            _expect(message.id == first.id, "one message")
            await message.ack()

    async def check(self, redis_url: str) -> None:
        """Prove that every invariant of the keyspace holds."""
        self.title("The keyspace checker: every invariant, proven")
        engine = Engine.connect(redis_url)
        try:
            problems = [text for topic in await engine.topics() for text in await check_topic(engine, topic)]
        finally:
            await engine.close()
        self.line(f"the keyspace checker finds {len(problems)} problems")
        _expect(not problems, f"no problems, but: {'; '.join(problems)}")

    @contextlib.asynccontextmanager
    async def _subscription(self, name: str, mode: Mode) -> AsyncIterator[None]:
        await self.client.create_subscription(self.topic, name, mode=mode)
        yield
        await self.client.delete_subscription(self.topic, name)

    def _consumer(self, subscription: str, name: str, **options: Any) -> Consumer:
        return self.client.subscribe(self.topic, subscription, mode=None, name=name, **options)

    async def _publish(self, messages: Sequence[tuple[str, str]]) -> None:
        outgoing = [OutgoingMessage(body.encode(), key=key or None) for key, body in messages]
        await self.client.publish_many(self.topic, outgoing)

    async def _consume_in_a_process_and_kill_it(self, subscription: str, count: int) -> set[str]:
        arguments = ["subscribe", self.topic, subscription, "--no-ack", "--json", "--server", self.server]
        command = [sys.executable, "-P", "-m", "keylane_broker.commandline.main", *arguments]
        async with await anyio.open_process(command, stdin=None, stderr=None) as process:
            assert process.stdout is not None
            text = ""
            with _patience():
                async for part in TextReceiveStream(process.stdout):
                    text += part
                    if text.count("\n") == count:
                        break
            held = [json.loads(line)["id"] for line in text.splitlines()]
            self.line(f"process {process.pid} holds {', '.join(held)}")
            process.send_signal(signal.SIGKILL)
            await process.wait()
            self.line(f"kill -9 {process.pid}: its session ends in a moment")
        return set(held)


async def _receive(consumer: Consumer) -> Message:
    with _patience():
        return await consumer.receive()


async def _collect(consumers: Mapping[str, Consumer], count: int) -> list[tuple[str, Message]]:
    """Receive from several consumers until there are so many messages."""
    got: list[tuple[str, Message]] = []

    async def receive(name: str, consumer: Consumer) -> None:
        async for message in consumer:
            got.append((name, message))
            if len(got) == count:
                tasks.cancel_scope.cancel()

    with _patience():
        async with anyio.create_task_group() as tasks:
            for name, consumer in consumers.items():
                tasks.start_soon(receive, name, consumer)
    return got


async def _ack(got: Sequence[tuple[str, Message]]) -> None:
    for _, message in got:
        await message.ack()


async def _text(message: Message) -> str:
    return (await message.data()).decode()


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise CommandError(f"the demo failed: expected {what}")


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Wait for something, but not forever."""
    try:
        with anyio.fail_after(PATIENCE):
            yield
    except TimeoutError:
        raise CommandError(f"the demo failed: nothing came within {PATIENCE:.0f} s") from None
