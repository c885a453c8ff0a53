"""Engine workloads: publish, fetch and ack through the scripts, in one keyspace against in another."""

import statistics
import time
from collections.abc import Awaitable
from typing import TypeVar

from keylane.wire import pack_about
from keylane_broker.engine.checks import check_flat
from keylane_broker.engine.codec import flat_receipts
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.receipts import receipts_of
from keylane_broker.engine.values import Capacity, Lease, Outgoing, SubscriptionSettings, TopicSettings
from loadtest.report import Figure

BATCH = 100
ROUNDS = 25
BATCHES = 20  # in each round
KEYS = [f"customer-{number:07}" for number in range(1_000)]  # 16 bytes each
HOUR_MS = 3_600_000

T = TypeVar("T")

_serial = 0


def messages(count: int, keys: list[str] = KEYS) -> list[Outgoing]:
    """Messages with fresh uids as long as a KSUID, their keys taken in turn."""
    global _serial
    first, _serial = _serial, _serial + count
    about = pack_about(1_700_000_000_000)
    return [
        Outgoing(keys[number * 7 % len(keys)], f"uid{number:024}", about)
        for number in range(first, first + count)
    ]


class Lane:
    """One topic of one partition with one subscription, held by this process."""

    def __init__(self, engine: Engine, lease: Lease) -> None:
        self.engine, self.lease = engine, lease

    @classmethod
    async def make(
        cls, engine: Engine, topic: str, mode: str, subscriptions: int = 1, journal: int = 0
    ) -> "Lane":
        """Make the topic anew."""
        if topic in await engine.topics():
            await engine.delete_topic(topic)
        await engine.create_topic(topic, TopicSettings(journal=journal))
        for number in range(subscriptions):
            await engine.create_subscription(topic, f"s{number}", SubscriptionSettings(mode=mode))
        lease = await engine.acquire(topic, 0, "bench", HOUR_MS)
        assert lease is not None
        await engine.join(lease, "s0", "c", HOUR_MS)
        return cls(engine, lease)

    async def publish(self, batch: list[Outgoing]) -> None:
        """Publish one batch, the way a worker does."""
        flat = [text for message in batch for text in message]
        check_flat(flat)
        result = await self.engine.publish_flat(self.lease, flat)
        assert result.stored == len(batch)

    async def fetch(self, permits: int = BATCH) -> list[str | int]:
        """Fetch one batch and answer its receipts."""
        fetched = await self.engine.fetch_flat(self.lease, "s0", [Capacity("c", permits)])
        [share] = fetched.shares
        assert len(share.flat) == permits * 3
        return flat_receipts(fetched, share)

    async def ack(self, receipts: list[str | int]) -> None:
        """Ack one batch."""
        assert not (await self.engine.ack(self.lease, "s0", receipts_of(receipts))).stale


class Stopwatch:
    """Microseconds per message of steps that are taken in turn."""

    def __init__(self) -> None:
        self._costs: dict[str, list[float]] = {}

    async def time(self, name: str, step: Awaitable[T]) -> T:
        """Await a step that handles one batch."""
        start = time.perf_counter()
        answer = await step
        self._costs.setdefault(name, []).append((time.perf_counter() - start) / BATCH * 1e6)
        return answer

    def median(self, name: str) -> float:
        """What the step costs."""
        return statistics.median(self._costs[name])


async def fan_out(engine: Engine) -> list[Figure]:
    """What publishing costs with 50 subscriptions and with one."""
    one = await Lane.make(engine, "bench-one", "shared")
    fifty = await Lane.make(engine, "bench-fifty", "shared", subscriptions=50)
    watch = Stopwatch()
    for _ in range(ROUNDS * BATCHES):
        await watch.time("one", one.publish(messages(BATCH)))
        await watch.time("fifty", fifty.publish(messages(BATCH)))
    await engine.delete_topic("bench-one")
    await engine.delete_topic("bench-fifty")
    ours, baseline = watch.median("fifty"), watch.median("one")
    return [Figure("publish: 50 subscriptions against one", ours, baseline, 1.2, "us/message", at_most=True)]


async def journal(engine: Engine) -> list[Figure]:
    """What each operation costs with a journal, against without; its cap is reached early."""
    figures = []
    for mode in ("shared", "key_shared"):
        lanes = {
            name: await Lane.make(engine, f"bench-journal-{name}", mode, journal=records)
            for name, records in (("off", 0), ("on", 1_000))
        }
        watch = Stopwatch()
        for _ in range(ROUNDS * BATCHES):
            for name, lane in lanes.items():
                await watch.time(f"publish {name}", lane.publish(messages(BATCH)))
                receipts = await watch.time(f"fetch {name}", lane.fetch())
                await watch.time(f"ack {name}", lane.ack(receipts))
        for step in ("publish", "fetch", "ack"):
            ours, baseline = watch.median(f"{step} on"), watch.median(f"{step} off")
            title = f"{mode} {step}: with a journal, against without"
            figures.append(Figure(title, ours, baseline, 1.2, "us/message", at_most=True))
        for name in lanes:
            await engine.delete_topic(f"bench-journal-{name}")
    return figures


async def _block_keys(lane: Lane, count: int) -> None:
    """Leave `count` keys waiting for a far instant, a message behind each."""
    keys = [f"blocked-{number:06}" for number in range(count)]
    for first in range(0, count, BATCH):
        await lane.publish(messages(BATCH, keys[first : first + BATCH]))
    for _ in range(count // BATCH):
        receipts = receipts_of(await lane.fetch())
        await lane.engine.nack(lane.lease, "s0", receipts, delay_ms=HOUR_MS)
    for first in range(0, count, BATCH):
        await lane.publish(messages(BATCH, keys[first : first + BATCH]))
    while (await lane.engine.fetch(lane.lease, "s0", [Capacity("c", BATCH)])).more:
        pass


async def deep_backlog(engine: Engine, url: str, backlog: int = 1_000_000) -> list[Figure]:
    """What each operation costs with a million messages waiting, and with 10,000 keys blocked too.

    Fetches are made by a second engine, which reads every message from the log: the tail cache of the first
    one would make fetching from an empty topic look cheaper still.
    """
    figures = []
    reader = Engine.connect(url)
    for mode, blocked in (("shared", 0), ("key_shared", 0), ("key_shared", 10_000)):
        lanes = {name: await Lane.make(engine, f"bench-{name}", mode) for name in ("empty", "full")}
        if blocked:
            await _block_keys(lanes["full"], blocked)
        for _ in range(backlog // 1_000):
            await lanes["full"].publish(messages(1_000))
        watch = Stopwatch()
        for _ in range(ROUNDS * 10):
            for name, lane in lanes.items():
                await watch.time(f"publish {name}", lane.publish(messages(BATCH)))
                receipts = await watch.time(f"fetch {name}", Lane(reader, lane.lease).fetch())
                await watch.time(f"ack {name}", lane.ack(receipts))
        waiting = f"{backlog:,} waiting" + (f", {blocked:,} keys blocked" if blocked else "")
        for step in ("publish", "fetch", "ack"):
            ours, baseline = watch.median(f"{step} full"), watch.median(f"{step} empty")
            title = f"{mode} {step}: {waiting}, against empty"
            figures.append(Figure(title, ours, baseline, 1.2, "us/message", at_most=True))
        for name in lanes:
            await engine.delete_topic(f"bench-{name}")
    await reader.close()
    return figures
