"""What topics pay for what they use: `python -m loadtest.semantics_bench`; --backlog 100000 is quicker.

Retention, TTL and filters, each against a topic without, in turn: the CPU time of the server's main thread
and of this process together, which is what a worker and Redis take for a message. Then redriving through the
real client, and what `explain` takes of Redis where a million messages wait.
"""

import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, NamedTuple, TypeVar

import typer
import uvloop

from keylane import AsyncClient, OutgoingMessage
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.filters import Filter
from keylane_broker.engine.values import Capacity, Outgoing, SubscriptionSettings, TopicSettings
from keylane_broker.supervise.embedded_server import Server
from loadtest.calls_bench import spent_of
from loadtest.engine_bench import BATCH, HOUR_MS, Lane, messages
from loadtest.matched import cpu_of, running_broker
from loadtest.players import cpu_seconds
from loadtest.report import Figure, print_table

ROUNDS = 7
BATCHES = 10  # in each round
ONE_IN = 10  # messages that the filter matches
WANTED = [f"wanted-{number:09}" for number in range(1_000)]
OTHERS = [f"others-{number:09}" for number in range(1_000)]
BACKLOG = 1_000_000
LETTERS = 20_000
BAR_PER_SECOND = 20_000
EXPLAINED = 200
SEED = 7

T = TypeVar("T")


class Costs:
    """Microseconds of CPU for a message, by step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._found: dict[str, list[float]] = {}

    async def of(self, step: str, count: int, work: Callable[[], Awaitable[T]]) -> T:
        """Do something to so many messages."""
        server, mine = (await spent_of(self._engine))[1], cpu_seconds()
        answer = await work()
        mine = cpu_seconds() - mine
        server = (await spent_of(self._engine))[1] - server
        self._found.setdefault(step, []).append((server + mine * 1e6) / count)
        return answer

    def against(self, title: str, ours: str, plain: str, bar: float | None = None) -> Figure:
        """The medians of two steps, and the ratios of the rounds."""
        ratios = [one / other for one, other in zip(self._found[ours], self._found[plain], strict=True)]
        return Figure(
            title,
            statistics.median(self._found[ours]),
            statistics.median(self._found[plain]),
            bar,
            "us CPU/message",
            at_most=True,
            spread=(min(ratios), max(ratios)),
        )


class Kind(NamedTuple):
    """A topic that uses something."""

    topic: TopicSettings = TopicSettings()
    filter: Filter = Filter()
    beside: bool = False  # whether another subscription takes everything

    async def make(self, engine: Engine, name: str, mode: str) -> Lane:
        """Make the topic anew; the subscription that is measured is s0."""
        if name in await engine.topics():
            await engine.delete_topic(name)
        await engine.create_topic(name, self.topic)
        await engine.create_subscription(name, "s0", SubscriptionSettings(mode, filter=self.filter))
        if self.beside:
            await engine.create_subscription(name, "all")
        lease = await engine.acquire(name, 0, "bench", HOUR_MS)
        assert lease is not None
        await engine.join(lease, "s0", "c", HOUR_MS)
        return Lane(engine, lease)

    def batch(self) -> list[Outgoing]:
        """Messages of which BATCH are for s0."""
        wanted = messages(BATCH, WANTED)
        if not self.filter.keys:
            return wanted
        others = messages(BATCH * (ONE_IN - 1), OTHERS)
        return [
            one
            for at, message in enumerate(wanted)
            for one in (message, *others[at * (ONE_IN - 1) : (at + 1) * (ONE_IN - 1)])
        ]


KINDS = {
    "plain": Kind(),
    "retention": Kind(TopicSettings(retention_ms=HOUR_MS)),
    "TTL": Kind(TopicSettings(ttl_ms=HOUR_MS)),
    "filter": Kind(filter=Filter(keys="wanted-*")),
    "filter beside one without": Kind(filter=Filter(keys="wanted-*"), beside=True),
}


async def features(engine: Engine) -> list[Figure]:
    """What each operation costs of topics that use something, against one that does not."""
    figures = []
    for mode in ("shared", "key_shared"):
        lanes = {
            name: await kind.make(engine, f"bench-{mode}-{at}", mode)
            for at, (name, kind) in enumerate(KINDS.items())
        }
        costs = Costs(engine)
        for _ in range(ROUNDS):
            for name, lane in lanes.items():
                await _round(costs, name, lane)
        for name in [*KINDS][1:]:
            for step in ("publish", "fetch", "ack"):
                bar = 2.0 if KINDS[name].filter.keys and step == "fetch" else None
                per = " of a matching message" if bar or (KINDS[name].filter.keys and step == "ack") else ""
                title = f"{mode} {step}{per}: {name}, against plain"
                figures.append(costs.against(title, f"{step} {name}", f"{step} plain", bar))
        for lane in lanes.values():
            await engine.delete_topic(lane.lease.topic)
    return figures


async def _round(costs: Costs, name: str, lane: Lane) -> None:
    """Publish, fetch and ack some batches."""
    batches = [[text for message in KINDS[name].batch() for text in message] for _ in range(BATCHES)]

    async def publish() -> None:
        for flat in batches:
            await lane.engine.publish_flat(lane.lease, flat)

    async def fetch() -> list[list[str | int]]:
        return [await lane.fetch() for _ in batches]

    async def ack() -> None:
        for some in receipts:
            await lane.ack(some)

    await costs.of(f"publish {name}", sum(map(len, batches)) // 3, publish)
    receipts = await costs.of(f"fetch {name}", BATCH * BATCHES, fetch)
    await costs.of(f"ack {name}", BATCH * BATCHES, ack)


async def explain(engine: Engine, backlog: int = BACKLOG) -> list[Figure]:
    """What explain takes of Redis, of messages that wait among many, or are in hands."""
    figures = []
    chance = random.Random(SEED)
    for mode in ("shared", "key_shared"):
        lane = await Kind().make(engine, f"bench-explain-{mode}", mode)
        topic = lane.lease.topic
        for _ in range(backlog // 1_000):
            await lane.publish(messages(1_000))
        await engine.fetch(lane.lease, "s0", [Capacity("c", 1_000, HOUR_MS)])
        entries = [chance.randint(1, backlog) for _ in range(EXPLAINED)] + [*range(1, 101)]
        ids = [f"0:{lane.lease.epoch}-{entry}" for entry in entries]
        wall, used = await spent_of(engine)
        for id in ids:
            await engine.explain(topic, "s0", id)
        wall_after, used_after = await spent_of(engine)
        title = f"{mode} explain: {backlog:,} waiting"
        for kind, cost in (
            ("time of its script", wall_after - wall),
            ("CPU of the server", used_after - used),
        ):
            each = cost / len(ids) / 1_000
            figures.append(Figure(f"{title}, {kind}", each, 1.0, 1.0, "ms", at_most=True))
        await engine.delete_topic(topic)
    return figures


async def redrive(url: str, pids: Sequence[int], letters: int = LETTERS) -> list[Figure]:
    """How fast dead letters go back to where they failed, through the real client."""
    topic = "bench-redrive"
    async with AsyncClient(url, timeout=120) as client:
        await client.create_topic(topic, partitions=4)
        await client.create_subscription(topic, "s", max_retries=0)
        many = [OutgoingMessage(None, key=f"k{number % 1_000}") for number in range(letters)]
        for start in range(0, letters, 1_000):
            await client.publish_many(topic, many[start : start + 1_000])
        async with client.subscribe(topic, "s", mode=None) as consumer:
            failed = 0
            async for batch in consumer.batches(max_messages=1_000, max_wait=0.1):
                failed += len(batch)
                await consumer.nack(batch, delay=0)
                if failed >= letters:
                    break
        while (await client.describe_topic(f"{topic}.dead")).messages < letters:
            pass
        start_at, used = time.perf_counter(), sum(map(cpu_of, pids))
        assert await client.redrive(topic) == letters
        while (await client.describe_subscription(topic, "s")).backlog < letters:
            pass
        rate = letters / (time.perf_counter() - start_at)
        per_message = (sum(map(cpu_of, pids)) - used) / letters * 1e6
        for name in (topic, f"{topic}.dead"):
            await client.delete_topic(name)
    return [
        Figure(f"redrive of {letters:,}, 4 partitions", rate, BAR_PER_SECOND, 1.0, "messages/s"),
        Figure(
            f"redrive of {letters:,}, 4 partitions: CPU of worker, server and client, against two cores",
            per_message,
            2e6 / BAR_PER_SECOND,
            1.0,
            "us CPU/message",
            at_most=True,
        ),
    ]


def run(backlog: int = BACKLOG) -> list[Figure]:
    """All of it."""

    async def on_scripts(url: str) -> list[Figure]:
        engine = Engine.connect(url)
        try:
            return [*await features(engine), *await explain(engine, backlog)]
        finally:
            await engine.close()

    with Server() as server:
        figures = uvloop.run(on_scripts(server.url))
    with running_broker() as broker:
        assert broker.server is not None
        [worker] = broker.workers
        return [*figures, *uvloop.run(redrive(broker.url, (worker.pid, broker.server.pid, os.getpid())))]


def main(backlog: Annotated[int, typer.Option(help="Messages that wait for explain.")] = BACKLOG) -> None:
    """Print the figures."""
    print_table(run(backlog))


if __name__ == "__main__":
    typer.run(main)
