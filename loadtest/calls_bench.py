"""The longest call of each script in a large keyspace: `python -m loadtest.calls_bench`.

One partition with 1,000 consumers, 100,000 lanes in flight, 10 subscriptions, 3,000 ledgers that one stuck
entry keeps. A script blocks every partition of its server, so none may take 10 ms. Each script is called as a
worker calls it, some times over. Two figures: the longest call as the server counts it (commandstats), for
which the machine should be otherwise idle; and the most CPU time of the server for a call, its log included.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import uvloop

from keylane.wire import pack_about
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Capacity, Outgoing, Receipt, SubscriptionSettings, TopicSettings
from keylane_broker.store.keys import PartitionKeys
from keylane_broker.supervise.embedded_server import Server
from keylane_broker.worker import dispatcher
from loadtest.report import Figure, print_table

CONSUMERS, LANES, SUBSCRIPTIONS, LEDGERS = 1_000, 100_000, 10, 3_000
NAMED = getattr(dispatcher, "MANY", CONSUMERS) + 2 * getattr(dispatcher, "OWN", 0)  # in one fetch, at most
BAR_MS = 10.0
HOUR_MS = 3_600_000
TOPIC = "bench-calls"
ROUNDS = 3


class Watched:
    """An engine whose script calls are timed at the server."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.wall: Counter[str] = Counter()  # script -> microseconds
        self.cpu: Counter[str] = Counter()
        self._run = engine.store.run

    def __enter__(self) -> "Watched":
        self.engine.store.run = self._timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.store.run = self._run  # type: ignore[method-assign]

    async def _timed(self, script: str, keys: Sequence[str], *arguments: str | bytes | int) -> list[Any]:
        before = await spent_of(self.engine)
        answer = await self._run(script, keys, *arguments)
        after = await spent_of(self.engine)
        self.wall[script] = max(self.wall[script], after[0] - before[0])
        self.cpu[script] = max(self.cpu[script], after[1] - before[1])
        return answer


class Crowd:
    """The keyspace, and what is done in it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.names = [f"consumer-{number}" for number in range(CONSUMERS)]
        self.keys = [f"customer-{number:07}" for number in range(LANES)]
        self.serial = 0
        self.held: dict[str, list[Receipt]] = {}

    def messages(self, keys: list[str]) -> list[Outgoing]:
        """A message for each key."""
        self.serial += len(keys)
        about = pack_about(1_700_000_000_000)
        return [Outgoing(key, f"uid{self.serial + at:024}", about) for at, key in enumerate(keys)]

    async def publish(self, keys: list[str]) -> None:
        """Publish in batches of a thousand."""
        for first in range(0, len(keys), 1_000):
            await self.engine.publish(self.lease, self.messages(keys[first : first + 1_000]))

    async def build(self) -> None:
        """Make ledgers, subscriptions, consumers and lanes."""
        engine = self.engine
        await engine.create_topic(TOPIC, TopicSettings())
        await engine.create_subscription(TOPIC, "stuck")
        await self._open_ledgers()
        self.lease = await self._acquire()
        await engine.create_subscription(TOPIC, "shared")
        for number in range(SUBSCRIPTIONS - 2):
            mode = SubscriptionSettings(mode="key_shared")
            await engine.create_subscription(TOPIC, f"keys-{number}", mode)
            for name in self.names if number == 0 else self.names[:10]:
                await engine.join(self.lease, f"keys-{number}", name, HOUR_MS)
        await engine.join(self.lease, "shared", "c", HOUR_MS)
        await self.publish(self.keys)
        for number in range(SUBSCRIPTIONS - 2):
            await self.take(f"keys-{number}", LANES if number == 0 else 3_000)

    async def _open_ledgers(self) -> None:
        """What as many changes of the owner would leave, with an entry published under each."""
        keys = PartitionKeys.of(TOPIC, 0)
        for at in range(1, LEDGERS + 1):
            fields = ("key", "", "uid", f"ledger{at:021}", "about", f"1 {pack_about(1)}")
            await self.engine.store.command("XADD", keys.log, f"{at}-{at}", *fields)
        ledgers = " ".join(f"{at}:{at}" for at in range(1, LEDGERS + 1))
        stored = ("epoch", LEDGERS, "last", LEDGERS, "ledgers", ledgers)
        await self.engine.store.command("HSET", keys.meta, *stored)

    async def _acquire(self) -> Any:
        lease = await self.engine.acquire(TOPIC, 0, "bench", HOUR_MS)
        assert lease is not None
        return lease

    async def take(self, subscription: str, count: int, permits: int = 1_000) -> list[Receipt]:
        """Lease messages to as many consumers as a fetch names, others each time."""
        taken: list[Receipt] = []
        names = self.names if subscription == "keys-0" else self.names[:10]
        names = ["c"] if subscription == "shared" else names
        at = 0
        while len(taken) < count:
            chosen = [names[(at + place) % len(names)] for place in range(min(NAMED, len(names)))]
            at += len(chosen)
            rooms = [Capacity(name, max(1, permits // len(chosen)), HOUR_MS) for name in chosen]
            result = await self.engine.fetch(self.lease, subscription, rooms)
            if not result.deliveries and not result.more:
                break
            taken += [delivery.receipt for delivery in result.deliveries]
            self.held.setdefault(subscription, []).extend(one.receipt for one in result.deliveries)
        return taken

    async def work(self) -> None:
        """Every call that a worker makes, at its largest."""
        engine, lease = self.engine, self.lease
        names = self.names
        for number in range(ROUNDS):
            mine = self.held["keys-0"][number * 3_000 :]
            await engine.ack(lease, "keys-0", mine[:1_000])
            await engine.nack(lease, "keys-0", mine[1_000:2_000])
            await engine.extend(lease, "keys-0", mine[2_000:3_000], lease_ms=HOUR_MS)
            await self.publish(self.keys[number * 1_000 : number * 1_000 + 1_000])
            await self.take("keys-0", 1_000)
            await engine.renew_sessions(lease, "keys-0", names[:200], HOUR_MS)
            await engine.list_leases(lease, "keys-0", names[number])
            await engine.join(lease, "keys-0", names[number], HOUR_MS)
            await engine.leave(lease, "keys-0", names[number + 10], crashed=True)
            await engine.extend(lease, "keys-0", self.held["keys-0"][-1_000:], lease_ms=1)
            await engine.expire(lease, "keys-0")
            await engine.renew([lease], HOUR_MS)
            await self.acks_of_ranges()
        await engine.seek(TOPIC, "keys-7", "earliest")
        await engine.delete_subscription(TOPIC, "keys-6")
        await engine.release(lease)
        self.lease = await self._acquire()

    async def acks_of_ranges(self) -> None:
        """As much as one ack may settle, beside subscriptions that hold some of it in lanes of keys."""
        room = [Capacity("c", 1_000, HOUR_MS)]
        runs = [await self.engine.fetch(self.lease, "shared", room) for _ in range(9)]
        await self.engine.ack(self.lease, "shared", [one.receipt for run in runs for one in run.deliveries])


async def in_order(engine: Engine) -> list[Figure]:
    """What calls cost with many messages of one lane in flight: a partition in order, or a hot key."""
    # The file shrinks when it is rewritten: no more of that, and the end of what may be under way.
    await engine.store.command("CONFIG", "SET", "auto-aof-rewrite-percentage", "0")
    while True:
        if not int((await engine.store.command("INFO", "persistence"))["aof_rewrite_in_progress"]):
            break
        await asyncio.sleep(0.05)
    sizes = [("exclusive", 5_000), ("exclusive", 50_000), ("key_shared", 50_000)]
    return [figure for mode, in_flight in sizes for figure in await _one_lane(engine, mode, in_flight)]


async def _one_lane(engine: Engine, mode: str, in_flight: int) -> list[Figure]:
    """Bytes of the append-only file and CPU time for an ack, and the longest call when all goes back."""
    topic = "bench-in-order"
    await engine.create_topic(topic)
    await engine.create_subscription(topic, "s", SubscriptionSettings(mode=mode))
    lease = await engine.acquire(topic, 0, "bench", HOUR_MS)
    assert lease is not None
    await engine.join(lease, "s", "c", HOUR_MS)
    lane: list[Receipt] = []
    others: list[Receipt] = []  # between the messages of a hot key

    async def take(permits: int) -> None:
        for delivery in (await engine.fetch(lease, "s", [Capacity("c", permits, HOUR_MS)])).deliveries:
            (lane if delivery.receipt.lane in ("=", "=hot") else others).append(delivery.receipt)

    async def ack(receipts: list[Receipt]) -> tuple[float, float]:
        bytes_before, (_, spent_before) = await _aof_bytes(engine), await spent_of(engine)
        for receipt in receipts:
            await engine.ack(lease, "s", [receipt])
        (_, spent), used = await spent_of(engine), await _aof_bytes(engine)
        return (used - bytes_before) / len(receipts), (spent - spent_before) / len(receipts)

    step, few = 1_000, 0.0
    for start in range(0, in_flight, step):
        for key in ("hot", "other") if mode == "key_shared" else ("",):
            keys = ("hot", "other") if key else ("",)
            uids = [f"{key}{start + number:020}" for number in range(step)]
            await engine.publish(
                lease, [Outgoing(keys[at % len(keys)], uid, pack_about(1)) for at, uid in enumerate(uids)]
            )
        while len(lane) < start + step:
            await take(step if mode == "key_shared" else 1)
        if start == 0:
            _, few = await ack(lane[:100])
    used, spent = await ack(lane[100:200])
    with Watched(engine) as watched:
        await engine.list_leases(lease, "s", "c")
        await engine.nack(lease, "s", lane[200:201], delay_ms=0)
        for _ in range(in_flight // step):
            await take(step)
        await engine.leave(lease, "s", "c", crashed=True)
    await engine.delete_topic(topic)
    about = f"{'exclusive' if mode == 'exclusive' else 'hot key'}, {in_flight:,} in flight"
    return [
        Figure(f"{about}: AOF for an ack", used, 1_024, 1.0, "bytes", at_most=True),
        Figure(f"{about}: CPU of an ack, against {step:,}", spent, few, 1.5, "us", at_most=True),
        *(
            Figure(f"{about}: longest {script}, CPU", spent / 1_000, BAR_MS, 1.0, "ms", at_most=True)
            for script, spent in watched.cpu.most_common()
        ),
    ]


async def spent_of(engine: Engine) -> tuple[int, int]:
    """What scripts have taken so far; and the CPU time of the server's one thread that runs commands."""
    stats = await engine.store.command("INFO", "commandstats")
    calls = (stats.get(f"cmdstat_{name}") for name in ("eval", "evalsha", "fcall"))
    wall = sum(int(call["usec"]) for call in calls if call)
    used = await engine.store.command("INFO", "cpu")
    cpu = sum(float(used[f"used_cpu_{kind}_main_thread"]) for kind in ("user", "sys"))
    return wall, round(cpu * 1e6)


async def _aof_bytes(engine: Engine) -> int:
    info = await engine.store.command("INFO", "persistence")
    return int(info["aof_current_size"]) + int(info.get("aof_buffer_length", 0))


async def longest_calls(engine: Engine) -> list[Figure]:
    """A figure for each script, in ms."""
    crowd = Crowd(engine)
    await crowd.build()
    with Watched(engine) as watched:
        await crowd.work()
    await engine.delete_topic(TOPIC)
    return [
        Figure(f"longest call: {script}{kind}", spent[script] / 1_000, BAR_MS, 1.0, "ms", at_most=True)
        for script, _ in watched.wall.most_common()
        for kind, spent in (("", watched.wall), (", CPU", watched.cpu))
    ]


async def _main(url: str) -> list[Figure]:
    engine = Engine.connect(url)
    try:
        return [*await in_order(engine), *await longest_calls(engine)]
    finally:
        await engine.close()


if __name__ == "__main__":
    with Server() as server:
        print_table(uvloop.run(_main(server.url)))
