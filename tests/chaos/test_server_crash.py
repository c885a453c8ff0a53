"""kill -9 of the server under load: what was answered is still so when it is back."""

import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from keylane.errors import Unavailable
from keylane.wire import pack_about
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import (
    Capacity,
    Delivery,
    Lease,
    Outgoing,
    Receipt,
    SubscriptionSettings,
    TopicSettings,
)
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.supervise.embedded_server import Server

pytestmark = pytest.mark.slow

ROUNDS = 5
PARTITIONS = 2
MODES = {"s": "shared", "k": "key_shared", "o": "exclusive"}
HOUR_MS = 3_600_000

Place = tuple[str, int]  # subscription, partition
Entry = tuple[int, int]  # partition, entry


class Record:
    """What the clients know: what they were answered, and what they cannot be sure of."""

    def __init__(self) -> None:
        self.published: dict[Entry, Outgoing] = {}
        self.unanswered: dict[int, list[Outgoing]] = {}
        self.settled: dict[Place, set[int]] = defaultdict(set)
        self.maybe_settled: dict[Place, set[int]] = defaultdict(set)
        self.delivered: dict[Place, set[int]] = defaultdict(set)
        self.newest: dict[tuple[Place, str], int] = defaultdict(int)
        self.problems: list[str] = []

    def note_published(self, partition: int, batch: list[Outgoing], ids: list[str | None]) -> None:
        for message, id in zip(batch, ids, strict=True):
            if id is None:
                self.problems.append(f"{message.uid} was answered without an id")
                continue
            entry = (partition, int(id.partition("-")[2]))
            if self.published.setdefault(entry, message).uid != message.uid:
                self.problems.append(f"{entry} was given to {message.uid} and {self.published[entry].uid}")

    def note_delivered(self, place: Place, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            for message in delivery.messages:
                entry, lane = message.entry, (place, message.key if MODES[place[0]] == "key_shared" else "")
                if entry in self.settled[place]:
                    self.problems.append(f"{place} got {entry} again after its ack was answered")
                ordered = MODES[place[0]] == "exclusive" or (MODES[place[0]] == "key_shared" and message.key)
                if entry not in self.delivered[place]:
                    if ordered and entry < self.newest[lane]:
                        self.problems.append(f"{lane} got {entry} first after {self.newest[lane]}")
                    self.newest[lane] = max(entry, self.newest[lane])
                self.delivered[place].add(entry)


class Load:
    """One life of the server: publishers and consumers until it is killed."""

    def __init__(self, engine: Engine, leases: list[Lease], record: Record, chance: random.Random) -> None:
        self.engine = engine
        self.leases = leases
        self.record = record
        self.chance = chance
        self.until_kill = chance.randint(500, 4_000)
        self.kill_now = anyio.Event()

    async def publish(self, lease: Lease) -> None:
        """Publish batches; what is not answered is repeated in the next life, with the same uids."""
        number = 0
        while True:
            batch = self.record.unanswered.get(lease.partition)
            if batch is None:
                size = self.chance.randint(1, 40)
                batch = [
                    Outgoing(
                        self.chance.choice(["", "a", "b", "c", "d", "e"]),
                        f"{lease.partition}-{lease.epoch}-{number + index}",
                        pack_about(1),
                    )
                    for index in range(size)
                ]
                number += size
            self.record.unanswered[lease.partition] = batch
            result = await self.engine.publish(lease, batch, durability="fsync")
            del self.record.unanswered[lease.partition]
            self.record.note_published(lease.partition, batch, [item.id for item in result.each()])
            self.until_kill -= len(batch)
            if self.until_kill <= 0:
                self.kill_now.set()

    async def consume(self, lease: Lease, subscription: str, consumer: str) -> None:
        """Take, settle most, give some back; a consumer that returns begins with what it holds."""
        place = (subscription, lease.partition)
        await self.engine.join(lease, subscription, consumer, HOUR_MS)
        deliveries = await self.engine.list_leases(lease, subscription, consumer)
        while True:
            self.record.note_delivered(place, deliveries)
            given = [delivery.receipt for delivery in deliveries]
            if given and self.chance.random() < 0.1:
                back = given.pop(self.chance.randrange(len(given)))
                await self.engine.nack(lease, subscription, [back], delay_ms=0)
                given = [receipt for receipt in given if receipt.lane != back.lane or not receipt.lane]
            if given:
                await self.settle(lease, place, given)
            room = Capacity(consumer, self.chance.randint(1, 60), HOUR_MS)
            deliveries = (await self.engine.fetch(lease, subscription, [room])).deliveries
            if not deliveries:
                await anyio.lowlevel.checkpoint()
                deliveries = await self.engine.list_leases(lease, subscription, consumer)

    async def settle(self, lease: Lease, place: Place, given: list[Receipt]) -> None:
        """Ack, and remember what is certain and what is not."""
        entries = {entry for receipt in given for entry in range(receipt.first, receipt.last + 1)}
        self.record.maybe_settled[place] |= entries
        result = await self.engine.ack(lease, place[0], given)
        for stale in result.stale:
            entries -= set(range(stale.first, stale.last + 1))
        self.record.settled[place] |= entries & self.record.delivered[place]

    async def run(self, server: Server) -> None:
        """Work until the server is killed in the middle of it."""

        async def until_away(work: object, *arguments: object) -> None:
            try:
                await work(*arguments)  # type: ignore[operator]
            except Unavailable:
                return

        async with anyio.create_task_group() as tasks:
            for lease in self.leases:
                tasks.start_soon(until_away, self.publish, lease)
                for name, mode in MODES.items():
                    for consumer in ["c1"] if mode == "exclusive" else ["c1", "c2"]:
                        tasks.start_soon(until_away, self.consume, lease, name, consumer)
            await self.kill_now.wait()
            server.kill()


async def take_over(engine: Engine, topic: str) -> list[Lease]:
    """Acquire every partition, as the worker that held them before."""
    leases = [await engine.acquire(topic, partition, "w1", HOUR_MS) for partition in range(PARTITIONS)]
    return [lease for lease in leases if lease is not None]


async def look(engine: Engine, topic: str, record: Record) -> None:
    """Every answered publish is in the log under its uid, unless every subscription may have settled it."""
    for partition in range(PARTITIONS):
        [found] = await engine.store.entries(f"kl:{{{topic}:{partition}}}:log", [("-", "+")])
        stored = {int(id.partition("-")[2]): fields[3] for id, fields in found}
        gone = set.intersection(*(record.maybe_settled[name, partition] for name in MODES))
        for (where, entry), message in record.published.items():
            if where == partition and stored.get(entry) != message.uid and entry not in gone:
                record.problems.append(f"{(partition, entry)}: {message.uid} was answered and is not there")
        for name in MODES:
            for entry in record.settled[name, partition] - record.maybe_settled[name, partition]:
                record.problems.append(f"{name} settled {entry} without asking")


async def drain(engine: Engine, leases: list[Lease], record: Record) -> None:
    """Publish what was left unanswered, then consume everything that is owed."""
    load = Load(engine, leases, record, random.Random(0))
    for lease in leases:
        if batch := record.unanswered.pop(lease.partition, None):
            ids = [item.id for item in (await engine.publish(lease, batch)).each()]
            record.note_published(lease.partition, batch, ids)
        for name in MODES:
            place = (name, lease.partition)
            for consumer in ("c1", "c2") if MODES[name] != "exclusive" else ("c1",):
                await engine.join(lease, name, consumer, HOUR_MS)
                held = await engine.list_leases(lease, name, consumer)
                while held:
                    record.note_delivered(place, held)
                    await load.settle(lease, place, [delivery.receipt for delivery in held])
                    held = await engine.list_leases(lease, name, consumer)
            while deliveries := (await engine.fetch(lease, name, [Capacity("c1", 1_000)])).deliveries:
                record.note_delivered(place, deliveries)
                await load.settle(lease, place, [delivery.receipt for delivery in deliveries])


@asynccontextmanager
async def closing_engine(server: Server) -> AsyncIterator[Engine]:
    """An engine for one life of the server."""
    engine = Engine.connect(server.url)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
def server(server_binary: Path, tmp_path: Path) -> Iterator[Server]:
    """A server that writes each answer's data to disk before it gives it."""
    with Server(binary=server_binary, data_dir=tmp_path / "data", appendfsync="always") as server:
        yield server


@pytest.mark.parametrize("seed", [random.SystemRandom().randrange(10**6), 1], ids=["new seed", "seed 1"])
async def test_what_was_answered_survives_a_kill_of_the_server(server: Server, topic: str, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    record = Record()
    with anyio.fail_after(60):
        async with closing_engine(server) as engine:
            await engine.create_topic(topic, TopicSettings(PARTITIONS))
            for name, mode in MODES.items():
                await engine.create_subscription(topic, name, SubscriptionSettings(mode))
        for _ in range(ROUNDS):
            async with closing_engine(server) as engine:
                await Load(engine, await take_over(engine, topic), record, chance).run(server)
            server.start()
            async with closing_engine(server) as engine:
                await look(engine, topic, record)
                assert record.problems == []
                assert await check_topic(engine, topic) == []
        async with closing_engine(server) as engine:
            await drain(engine, await take_over(engine, topic), record)
            assert record.problems == []
            assert await check_topic(engine, topic) == []
            await look_at_the_end(engine, topic, record)


async def look_at_the_end(engine: Engine, topic: str, record: Record) -> None:
    """Everything was delivered to everybody, and nothing is left."""
    for partition in range(PARTITIONS):
        published = {entry for where, entry in record.published if where == partition}
        assert published
        for name in MODES:
            place = (name, partition)
            assert published <= record.delivered[place] | record.maybe_settled[place]
        [left] = await engine.store.entries(f"kl:{{{topic}:{partition}}}:log", [("-", "+")])
        assert left == []
