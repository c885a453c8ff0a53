"""kill -9 of the worker, of the server, and of both, under load: the applications need no help."""

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import pytest

from keylane import (
    AsyncClient,
    Consumer,
    Message,
    OutgoingMessage,
    PayloadMissing,
    StaleReceipt,
    Unavailable,
)
from keylane.connect.connection import Connection
from keylane.produce.outbox import Outbox
from keylane.produce.publish_frame import PublishFrame
from keylane.types import Mode
from keylane.wire import Data, Frame
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.supervise.embedded_server import Server
from tests.chaos.recorder import MODES, ORDERED, SHARED, Name, Recorder
from tests.support.running import RunningBroker, broker_with_scripts_of_its_own

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PARTITIONS = 4
KEYS = 60
PRODUCERS = 4
CONSUMERS = 3  # of each subscription
PATIENCE = 300.0  # seconds for a load that takes ten to twenty where there is nothing else to do
UNANSWERED = 4  # calls that a producer has under way
BODY = b"x" * 100

Chaos = Callable[["Load"], Coroutine[Any, Any, None]]


class Load:
    """Applications at work: they know the client's API, and nothing of what happens to the broker."""

    def __init__(
        self, broker: RunningBroker, topic: str, messages: int, seed: int, modes: Mapping[str, Mode]
    ) -> None:
        self.broker = broker
        self.topic = topic
        self.messages = messages
        self.seed = seed
        self.modes = modes  # of the subscriptions
        self.record = Recorder(modes)
        self._moved = asyncio.Event()

    # Producers

    async def produce(self, client: AsyncClient, producer: str, count: int) -> None:
        """Publish in calls of all sizes, some of which overlap."""
        chance = random.Random(f"{self.seed} {producer}")
        room = asyncio.Semaphore(UNANSWERED)
        async with asyncio.TaskGroup() as calls:
            start = 0
            while start < count:
                await room.acquire()
                stop = min(count, start + chance.choice((1, 1, 10, 50, 200)))
                names = [(producer, number) for number in range(start, stop)]
                keys = [chance.choice(("", *map(str, range(KEYS)))) for _ in names]
                calls.create_task(self._publish(client, names, keys, room))
                await asyncio.sleep(0)  # the call begins before the next: that is their order
                start = stop

    async def _publish(
        self, client: AsyncClient, names: list[Name], keys: list[str], room: asyncio.Semaphore
    ) -> None:
        messages = []
        for name, key in zip(names, keys, strict=True):
            self.record.publishing(name, key)
            body = BODY if name[1] % 4 == 0 else None
            messages.append(OutgoingMessage(body, key or None, {"name": f"{name[0]} {name[1]}"}))
        try:
            answers = await client.publish_many(self.topic, messages)
        finally:
            room.release()
        for name, answer in zip(names, answers, strict=True):
            self.record.published(name, answer)
        self._moved.set()

    # Consumers

    async def consume_in_batches(self, consumer: Consumer, subscription: str) -> None:
        """Take what is there, now and then give something back, ack the rest together."""
        chance = random.Random(f"{self.seed} {consumer.name}")
        async for batch in consumer.batches(max_messages=chance.randint(50, 500)):
            messages = list(batch)
            names = [self.record.delivered(subscription, consumer.name, message) for message in messages]
            if chance.random() < 0.05:
                at = chance.randrange(len(messages))
                self.record.nacking(subscription, names[at])
                await consumer.nack([messages[at]], delay=0)
                del messages[at], names[at]
            missing = await self._missing_body(messages) if chance.random() < 0.1 else None
            since = self.record.acking(subscription, names)
            outcomes = await consumer.ack(messages)
            if missing is not None and "stale" not in outcomes:
                self.record.problems.append(f"{subscription}: {missing}")
            for name, outcome in zip(names, outcomes, strict=True):
                self.record.acked(subscription, name, outcome, since)
            self._moved.set()

    async def _missing_body(self, messages: list[Message]) -> str | None:
        """Read the bodies; one may be missing only where the message is somebody else's by now."""
        try:
            for message in messages:
                if await message.data() != (BODY if message.size else b""):
                    return f"{message.id} has another body"
        except PayloadMissing as error:
            return str(error)
        except Unavailable:  # the server is away for longer than a client insists: nobody knows
            return None
        return None

    async def consume_one_by_one(self, consumer: Consumer, subscription: str) -> None:
        """Ack each message by itself and wait for the answer, with a few under way."""
        room = asyncio.Semaphore(50)
        async with asyncio.TaskGroup() as acks:
            async for message in consumer:
                name = self.record.delivered(subscription, consumer.name, message)
                await room.acquire()
                since = self.record.acking(subscription, [name])
                acks.create_task(self._ack(message.ack, subscription, name, since, room))

    async def _ack(
        self,
        ack: Callable[[], Awaitable[None]],
        subscription: str,
        name: Name,
        since: int,
        room: asyncio.Semaphore,
    ) -> None:
        try:
            await ack()
            self.record.acked(subscription, name, "settled", since)
        except StaleReceipt:
            self.record.acked(subscription, name, "stale", since)
        finally:
            room.release()
        self._moved.set()

    # All together

    async def run(self, chaos: Chaos) -> None:
        """Publish everything and consume everything, come what may."""
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncClient(self.broker.url, timeout=200)) for _ in range(4)
            ]
            await clients[0].create_topic(self.topic, partitions=PARTITIONS)
            consumers = []
            for subscription, mode in self.modes.items():
                for number in range(CONSUMERS):
                    opened = clients[2 + number % 2].subscribe(
                        self.topic,
                        subscription,
                        mode=mode,
                        name=f"{subscription}-{number}",
                    )
                    consumers.append((await stack.enter_async_context(opened), subscription, number))
            async with asyncio.TaskGroup() as tasks:
                working = [
                    tasks.create_task(
                        (self.consume_one_by_one if number == 0 else self.consume_in_batches)(consumer, name)
                    )
                    for consumer, name, number in consumers
                ]
                each = self.messages // PRODUCERS
                for number in range(PRODUCERS):
                    working.append(tasks.create_task(self.produce(clients[number % 2], f"p{number}", each)))
                working.append(tasks.create_task(chaos(self)))
                await self._until_done(clients[0])
                for task in working:
                    task.cancel()

    async def _until_done(self, client: AsyncClient) -> None:
        while not self.record.finished(self.messages) and not self.record.problems:
            await self._progress()
        while not self.record.problems:
            described = [await client.describe_subscription(self.topic, name) for name in self.modes]
            if not any(item.backlog for item in described):
                return
            await self._progress()

    async def _progress(self) -> None:
        """Wait until something has been answered, or for a second."""
        self._moved.clear()
        with anyio.move_on_after(1):
            await self._moved.wait()

    async def after(self, share: float) -> None:
        """Wait until so much of everything has been published and delivered."""
        record, wanted = self.record, share * self.messages * (1 + len(self.modes))
        while len(record.answered) + sum(len(told.delivered) for told in record.told.values()) < wanted:
            await self._progress()


# What happens to the broker


class Kills:
    """Kills the worker or the server at given shares of the work, and starts it again."""

    def __init__(self, *kills: tuple[float, str]) -> None:
        self.kills = sorted(kills)

    async def __call__(self, load: Load) -> None:
        """Run it beside the load."""
        for share, what in self.kills:
            await load.after(share)
            load.record.crashes += 1
            if what == "worker":
                load.broker.kill_worker()
                await anyio.to_thread.run_sync(load.broker.start_worker)
            else:
                assert isinstance(load.broker.server, Server)
                load.broker.server.kill()
                await anyio.to_thread.run_sync(load.broker.server.start)


async def run(
    broker: RunningBroker,
    topic: str,
    messages: int,
    seed: int,
    chaos: Chaos,
    modes: Mapping[str, Mode] = MODES,
) -> list[str]:
    """Run a load through chaos; everything that was not as promised."""
    load = Load(broker, topic, messages, seed, modes)
    record = load.record
    with anyio.move_on_after(PATIENCE) as limit:
        await load.run(chaos)
    engine = Engine.connect(broker.redis_url)
    try:
        with anyio.fail_after(60):
            problems = record.verdict() + await check_topic(engine, topic)
        if limit.cancelled_caught:
            problems.append("it did not come to an end")
        elif not problems and (left := await bodies_left(engine, topic)):
            problems.append(f"{len(left)} bodies were not deleted, such as {min(left)}")
    finally:
        await engine.close()
    if "a bug" in (log := broker.log()):
        problems.append(log[max(0, log.index("a bug") - 500) :][:3_000])
    for name, told in record.told.items():
        print(f"{name}: {told.redelivered} came again, {len(told.stale)} acks were stale")
    return problems


async def bodies_left(engine: Engine, topic: str) -> set[str]:
    """The names of the bodies that are in Redis after the time that deleting them may take."""
    left: set[str] = set()
    with anyio.move_on_after(BODIES):
        while True:
            keys = await engine.store.command("KEYS", f"kl:bodies:{topic}:*")
            left = {name for key in keys for name in await engine.store.command("HKEYS", key)}
            if not left:
                break
            await anyio.sleep(0.1)
    return left


MESSAGES = 50_000
BODIES = 120  # seconds in which the bodies of what everybody has settled are deleted, whoever crashed


@pytest.fixture(autouse=True)
def _no_errors_in_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The client, and asyncio under it, log no error."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.fixture(
    params=[
        ("always", MODES),
        ("never", MODES),
        ("always", {ORDERED: "key_shared"}),
        ("always", {SHARED: "shared"}),
    ],
    ids=["in turns", "one by one", f"{ORDERED} in turns", f"{SHARED} in turns"],
)
def modes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Mode]:
    """The modes of the subscriptions; acks are settled in turns where there is one subscription only."""
    turns, modes = request.param
    monkeypatch.setenv("TURNS", turns)
    found: Mapping[str, Mode] = modes
    return found


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[RunningBroker]:
    """A broker on a server that has on disk what it has answered: so its death loses nothing.

    With `everysec` the server may answer before it writes, while an earlier fsync is under way.
    """
    with Server(data_dir=tmp_path / "data", appendfsync="always") as server, RunningBroker(server) as broker:
        yield broker


def fresh_seed() -> int:
    """A seed that is printed, to repeat what has gone wrong."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    return seed


class Cuts:
    """Aborts connections of the clients just when something comes in, which is then lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int, share: float) -> None:
        self.record: Recorder | None = None
        chance = random.Random(seed)
        receive = Connection.data_received

        def receive_or_lose(connection: Connection, data: bytes) -> None:
            if self.record is not None and chance.random() < share:
                self.record.crashes += 1
                connection._transport.abort()
            else:
                receive(connection, data)

        monkeypatch.setattr(Connection, "data_received", receive_or_lose)

    async def __call__(self, load: Load) -> None:
        """Cut from now on, for most of the load."""
        self.record = load.record
        await load.after(0.9)
        self.record = None


async def test_kills_of_the_worker_lose_nothing_repeat_nothing_settled_and_keep_order(
    modes: Mapping[str, Mode], topic: str
) -> None:
    with RunningBroker() as broker:
        chaos = Kills(*((share, "worker") for share in (0.1, 0.25, 0.4, 0.6, 0.8)))
        problems = await run(broker, topic, MESSAGES, fresh_seed(), chaos, modes)
        assert not problems, "\n".join(problems)


async def test_kills_of_the_server_lose_nothing_repeat_nothing_settled_and_keep_order(
    modes: Mapping[str, Mode], durable: RunningBroker, topic: str
) -> None:
    chaos = Kills(*((share, "server") for share in (0.15, 0.35, 0.55, 0.8)))
    problems = await run(durable, topic, MESSAGES, fresh_seed(), chaos, modes)
    assert not problems, "\n".join(problems)


async def test_kills_of_both_lose_nothing_repeat_nothing_settled_and_keep_order(
    modes: Mapping[str, Mode], durable: RunningBroker, topic: str
) -> None:
    seed = fresh_seed()
    chance = random.Random(seed)
    chaos = Kills(*((chance.uniform(0.02, 0.95), chance.choice(("worker", "server"))) for _ in range(7)))
    print(chaos.kills)
    problems = await run(durable, topic, MESSAGES, seed, chaos, modes)
    assert not problems, "\n".join(problems)


async def test_lost_connections_lose_nothing_repeat_nothing_settled_and_keep_order(
    modes: Mapping[str, Mode], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = fresh_seed()
    with RunningBroker() as broker:
        problems = await run(broker, topic, 10_000, seed, Cuts(monkeypatch, seed, 0.05), modes)
    assert not problems, "\n".join(problems)


# The record must be able to find something


class Defect(NamedTuple):
    """A change of a script that breaks a promise, and what the record says to it."""

    file: str
    text: str
    becomes: str
    complaint: str


DEFECTS = {
    "a publish that comes again is stored again": Defect(
        "partition/publish.lua", "first_ids[index] or seen[uid]", "nil", "was stored twice"
    ),
    "an ack is answered and not carried out": Defect(
        "subscription/ack.lua", "    record.ranges = {}\n    touch(record)\n", "", "came again after its ack"
    ),
    "a message overtakes those of its lane that wait": Defect(
        "lib/fetch/keyed.lua", "holder.permits > 0 and record.waiting == 0", "holder.permits > 0", "of key"
    ),
}


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
async def test_the_record_finds_a_defect_in_a_script(
    defect: Defect, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = broker_with_scripts_of_its_own(tmp_path)
    script = scripts / defect.file
    assert script.read_text().count(defect.text) == 1
    script.write_text(script.read_text().replace(defect.text, defect.becomes))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with RunningBroker() as broker:
        problems = await run(broker, topic, 10_000, 1, Cuts(monkeypatch, 1, 0.05))
    assert any(defect.complaint in problem for problem in problems), problems


async def test_the_record_finds_a_client_that_gives_a_message_a_new_number_when_it_tries_again(
    broker: RunningBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Outbox._send

    def send_renumbered(outbox: Outbox, frame: PublishFrame, connection: Connection) -> None:
        frame.number = 0
        send(outbox, frame, connection)

    monkeypatch.setattr(Outbox, "_send", send_renumbered)
    problems = await run(broker, topic, 10_000, 1, Cuts(monkeypatch, 1, 0.05))
    assert any("was stored twice" in problem for problem in problems), problems


async def test_the_record_finds_a_client_that_loses_a_delivery(
    broker: RunningBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, chance = Consumer._received, random.Random(1)

    def receive_most(consumer: Consumer, frame: Frame, data: Data) -> None:
        if chance.random() > 0.1:
            receive(consumer, frame, data)

    monkeypatch.setattr(Consumer, "_received", receive_most)
    problems = await run(broker, topic, 10_000, 1, Kills())
    assert any("of key" in problem for problem in problems), problems
