"""A cluster to which things happen, and how to see from outside who serves what."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import anyio.to_thread

from keylane import AsyncClient, BrokerError, InvalidArgument
from keylane.types import Mode
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.cluster_checker import check_cluster
from keylane_broker.inspect.snapshot import take_snapshot
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.store.keys import PartitionKeys
from keylane_broker.supervise.embedded_server import Server
from tests.chaos.gaps import Disturbance
from tests.chaos.plan import Step
from tests.support.running import RunningBroker

T = TypeVar("T")

PATIENCE = 60.0  # seconds until what should be so counts as wrong
LOOK = 0.05  # seconds between looks at Redis


class Cluster:
    """Carries out a plan, and keeps what was done when."""

    def __init__(
        self,
        broker: RunningBroker,
        servers: Sequence[Server],
        engine: Engine,
        client: AsyncClient,
        topic: str,
    ) -> None:
        self.broker = broker
        self.engine = engine
        self.disturbances: list[Disturbance] = []
        self.started = 0.0
        self._servers = servers
        self._client = client
        self._topic = topic

    @classmethod
    @asynccontextmanager
    async def open(
        cls, broker: RunningBroker, servers: Sequence[Server], topic: str
    ) -> AsyncIterator["Cluster"]:
        """With a client for the operator, and an engine to look at Redis."""
        engine = Engine.connect(broker.redis_url)
        try:
            async with AsyncClient(broker.url, timeout=200) as client:
                yield cls(broker, servers, engine, client, topic)
        finally:
            await engine.close()

    async def create_topic(self, partitions: int, modes: Mapping[str, Mode]) -> None:
        """Make the topic and its subscriptions, and wait until all of it is served."""
        await self._client.create_topic(self._topic, partitions=partitions)
        for name, mode in modes.items():
            await self._client.create_subscription(self._topic, name, mode=mode)
        await self.settle_down()

    # What happens

    async def carry_out(self, steps: Sequence[Step]) -> None:
        """Everything, each at its time or when the one before is done, and until all are served."""
        self.started = start = time.monotonic()
        owners = await self.owners()
        for number, step in enumerate(steps):
            await asyncio.sleep(max(0.0, start + step.at - time.monotonic()))
            before, began = owners, time.monotonic()
            refused = ""
            try:
                await self._do(step)
            except InvalidArgument:  # a worker that has just come back may not have been heard of yet
                refused = ", refused"
            ended = time.monotonic()
            if number + 1 < len(steps):  # placement has until the next step to react
                await asyncio.sleep(max(0.0, start + steps[number + 1].at - time.monotonic()))
            else:
                await self.settle_down()
            owners = await self.owners()
            concerned = [] if refused else self._concerned(step, before, owners)
            self.disturbances.append(Disturbance(f"{step}{refused}", began, ended, concerned))

    async def _do(self, step: Step) -> None:
        broker, worker = self.broker, step.worker
        match step.what:
            case "kill":
                await anyio.to_thread.run_sync(broker.kill_worker, worker)
            case "start":
                await anyio.to_thread.run_sync(broker.start_worker, worker)
            case "stop":
                assert await anyio.to_thread.run_sync(broker.stop_worker, worker) == 0
            case "pause":
                broker.pause(worker)
            case "resume":
                broker.resume(worker)
            case "add":
                assert await anyio.to_thread.run_sync(broker.add_worker) == worker
            case "drain":
                await self._client.drain_worker(broker.ids[worker])
            case "undrain":
                await self._client.undrain_worker(broker.ids[worker])
            case "move":
                await self._client.move_partition(self._topic, step.partition, broker.ids[worker])
            case "server":
                server = self._servers[step.node]
                server.kill()
                await asyncio.sleep(step.outage)
                await anyio.to_thread.run_sync(server.start)
                await self.holders()  # a worker that starts gives up, for its supervisor, while Redis is away

    def _concerned(self, step: Step, before: list[str], after: list[str]) -> list[int]:
        """The partitions whose service it may interrupt."""
        match step.what:
            case "kill" | "stop" | "pause":
                return [n for n, owner in enumerate(before) if owner == self.broker.ids[step.worker]]
            case "server":
                return list(range(len(before)))
            case "move":
                return [step.partition]
        return [number for number, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]

    @property
    def instants(self) -> list[float]:
        """When something began or had been done: around these an answer may be lost."""
        return [instant for item in self.disturbances for instant in (item.began, item.ended)]

    # What is seen from outside

    async def owners(self) -> list[str]:
        """Which worker is to serve each partition; empty while nobody has placed the topic."""
        return (await insist(self.engine.owners)).topics.get(self._topic, [])

    async def owned_by(self, worker: str) -> list[int]:
        """The partitions that a worker is to serve."""
        return [number for number, owner in enumerate(await self.owners()) if owner == worker]

    async def share_of(self, worker: str) -> list[int]:
        """The same, when all workers have as many and hold them."""
        await self.settle_down()
        while len(set(Counter(await self.owners()).values())) > 1 or await self.trouble():  # noqa: ASYNC110
            await asyncio.sleep(LOOK)
        return await self.owned_by(worker)

    async def holders(self) -> list[str]:
        """Which worker has the lease of each partition, "" for nobody."""
        names = [PartitionKeys.of(self._topic, number).lease for number in range(len(await self.owners()))]
        leases = await insist(lambda: self.engine.store.read_all([("GET", name) for name in names]))
        return [(lease or "").partition(" ")[0] for lease in leases]

    async def settle_down(self) -> None:
        """Wait until every partition is held by its owner, and that one runs."""
        while await self.trouble():  # noqa: ASYNC110 - Redis does not tell
            await asyncio.sleep(LOOK)

    async def trouble(self) -> list[str]:
        """What keeps partitions from being served."""
        running = {place.id for place in self.broker.workers if place.process is not None}
        owners, holders = await self.owners(), await self.holders()
        if not owners or len(owners) != len(holders):
            return ["the topic is being placed"]
        return [
            f"partition {number} is {owner}'s and {holder or 'nobody'} holds it"
            for number, (owner, holder) in enumerate(zip(owners, holders, strict=True))
            if owner != holder or owner not in running
        ]

    async def until_nothing_is_owed(self, subscriptions: Iterable[str]) -> None:
        """Wait until every message has been settled in each subscription."""
        while any((await self.backlog(subscriptions)).values()):  # noqa: ASYNC110 - it does not tell
            await asyncio.sleep(LOOK)

    async def backlog(self, subscriptions: Iterable[str]) -> dict[str, int]:
        """What each subscription still owes."""
        described = [await self._client.describe_subscription(self._topic, name) for name in subscriptions]
        return {item.name: item.backlog for item in described}

    async def owed(self) -> list[str]:
        """What is not settled, as Redis has it: to explain why something did not come to an end."""
        found = []
        for number, holder in enumerate(await self.holders()):
            partition = await take_snapshot(self.engine.store, self._topic, number)
            for item in partition.subscriptions:
                fresh = int(partition.meta["last"]) - item.cursor
                if fresh or item.lanes:
                    found.append(
                        f"{item.name} on partition {number} of {holder}: {fresh} fresh, active "
                        f"{item.settings.get('active')}, sessions {item.consumers}, lanes {item.lanes}"
                    )
        return found

    async def check(self) -> list[str]:
        """What is wrong in the keyspace and in the workers' logs."""
        problems = await check_topic(self.engine, self._topic) + await check_cluster(self.engine)
        problems += await self._misplaced()
        if "a bug" in (log := self.broker.log()):
            problems.append(log[max(0, log.index("a bug") - 500) :][:3_000])
        return problems

    async def _misplaced(self) -> list[str]:
        """The partitions that a client is told are not held by their owner, long after anything happened."""
        end = time.monotonic() + PATIENCE
        while True:
            found = [
                f"clients hear that partition {seen.partition} is {seen.worker}'s, held by {seen.holder!r}"
                for seen in await self._client.partitions(self._topic)
                if seen.worker != seen.holder
            ]
            if not found or time.monotonic() > end:
                return found
            await asyncio.sleep(LOOK)


async def insist(look: Callable[[], Awaitable[T]]) -> T:
    """Look at Redis, and again while it is away."""
    while True:
        try:
            return await look()
        except BrokerError as error:
            if not error.retriable:
                raise
        await asyncio.sleep(LOOK)
