"""Counts of topics and subscriptions, and the ledgers of partitions: looks, and changes nothing."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from keylane.wire.ledgers import id_maker, parse_ledgers
from keylane_broker.engine.answers import checked
from keylane_broker.engine.codec import rows
from keylane_broker.engine.lanes import Lane, parse_lane
from keylane_broker.engine.subscriptions import read_records
from keylane_broker.store.keys import PLACE, SubscriptionKeys, partition_keys, subscription_keys
from keylane_broker.store.store import Store

PAGE = 1_000  # entries, lanes or members that are read at once
_PAGES = 10  # of a log with holes, that are read to count what is owed there
_TOGETHER = 50  # partitions that are asked for at once


class TopicCounts(msgspec.Struct):
    """All partitions of a topic together."""

    messages: int = 0
    published: int = 0
    subscriptions: list[str] = []
    delayed: int = 0


class SubscriptionCounts(msgspec.Struct):
    """What a subscription has not settled, all partitions together."""

    fresh: int = 0
    leased: int = 0
    waiting: int = 0
    consumers: set[str] = msgspec.field(default_factory=set)
    paused: bool = False


class Ledger(NamedTuple):
    """One ownership epoch of a partition: its first entry, and how many entries are left of it."""

    ledger: int
    first: int
    entries: int


class PartitionLedgers(msgspec.Struct):
    """Who holds a partition ("" for nobody), for how long still, and its ledgers, newest last."""

    partition: int
    worker: str
    epoch: int
    left_ms: int
    ledgers: list[Ledger]


async def count_topic(store: Store, topic: str, partitions: int) -> TopicCounts:
    """Count what is in a topic's logs, and list who subscribes."""
    counts = TopicCounts()

    async def count(partition: int) -> None:
        keys = partition_keys(topic, partition)
        length, last, delayed = await store.read_all(
            [
                ("XLEN", keys.log),
                ("HGET", keys.meta, "last"),
                ("ZCARD", keys.delayed),
            ]
        )
        counts.delayed += delayed
        counts.messages += length
        counts.published += int(last or 0)

    await _each(count, partitions)
    records = await read_records(store, topic)
    counts.subscriptions = [name for name, record in records.items() if record.state == "ready"]
    return counts


async def count_subscription(
    store: Store, topic: str, subscription: str, partitions: int, now_ms: int, *, multicast: bool = False
) -> SubscriptionCounts:
    """Count what a subscription has not settled, and list who consumes it now; if it is multicast, of all
    consumers together."""
    counts = SubscriptionCounts()

    async def count(partition: int) -> None:
        names = [subscription]
        if multicast:
            found = await store.command("HKEYS", partition_keys(topic, partition).subs)
            names = [name for name in found if name.startswith(subscription + PLACE)]
        for name in names:
            await count_one(partition, name)

    async def count_one(partition: int, subscription: str) -> None:
        keys = subscription_keys(topic, partition, subscription)
        lead, sessions, paused, matches = await store.read_all(
            [
                ("HGET", keys.meta, "lead"),
                ("ZRANGE", keys.consumers, "0", "-1", "WITHSCORES"),
                ("HGET", keys.sub, "paused"),
                ("ZCARD", keys.matches),
            ]
        )
        fresh = await _count_fresh(store, keys, subscription) - await _count_skipped(store, keys)
        counts.fresh += fresh + matches
        # Sessions end by the partition's time, which may be ahead of the caller's.
        counts.consumers.update(
            name for name, end in rows(sessions, 2) if float(end) > now_ms + int(lead or 0)
        )
        counts.paused |= paused == "1"
        async for lane in each_lane(store, keys):
            counts.waiting += lane.waiting
            if lane.consumer:
                counts.leased += sum(last - first + 1 for _, first, last in lane.listed) + lane.counted

    await _each(count, partitions)
    return counts


async def _count_fresh(store: Store, keys: SubscriptionKeys, subscription: str) -> int:
    """Return how many entries lie after the cursor.

    Where the log has holes there, some thousand are counted one by one; if there are more, the rest counts as
    without holes, as far as the length of the log allows.
    """
    (ledgers, last_text), cursor_text, sparse_text, length_text, oldest = await store.read_all(
        [
            ("HMGET", keys.meta, "ledgers", "last"),
            ("HGET", keys.subs, subscription),
            ("HGET", keys.sub, "sparse"),
            ("XLEN", keys.log),
            ("XRANGE", keys.log, "-", "+", "COUNT", "1"),
        ]
    )
    if not (cursor_text and oldest):
        return 0
    last, cursor, sparse, length = map(int, (last_text, cursor_text, sparse_text or 0, length_text))
    first = entry_of(oldest[0])
    if cursor < first:
        return length
    if cursor >= sparse or length == last - first + 1:
        return max(last - cursor, 0)
    id_of = id_maker(ledgers)
    counted, passed = 0, cursor
    for _ in range(_PAGES):
        command = ("XRANGE", keys.log, id_of(passed + 1), id_of(sparse), "COUNT", str(PAGE))
        [page] = await store.read_all([command])
        counted += len(page)
        passed = entry_of(page[-1]) if len(page) == PAGE else sparse
        if passed == sparse:
            break
    return min(counted + last - passed, length)


async def _count_skipped(store: Store, keys: SubscriptionKeys) -> int:
    """Return how many entries after the cursor are settled and in the log still; a thousand at most."""
    marks, ledgers = await store.read_all(
        [("ZRANGE", keys.skipped, "0", str(PAGE - 1)), ("HGET", keys.meta, "ledgers")]
    )
    if not marks:
        return 0
    ids = [id_maker(ledgers)(int(entry)) for entry in marks]
    return sum(map(len, await store.read_all([("XRANGE", keys.log, id, id) for id in ids])))


async def ledgers(store: Store, topic: str, partitions: Sequence[int]) -> list[PartitionLedgers]:
    """Return owner and ledgers of some partitions, each with what is left of it."""
    found: list[PartitionLedgers] = []
    for at in range(0, len(partitions), _TOGETHER):
        some = partitions[at : at + _TOGETHER]
        found += await asyncio.gather(*(_ledgers(store, topic, partition) for partition in some))
    return found


async def _ledgers(store: Store, topic: str, partition: int) -> PartitionLedgers:
    keys = partition_keys(topic, partition)
    counts: dict[str, int] = defaultdict(int)
    position = ""
    while True:
        answer = await store.run(
            "partition/ledgers",
            [keys.meta, keys.lease, keys.log, keys.subs],
            keys.subscription_prefix,
            PAGE,
            position,
        )
        _, lease, left_ms, epoch, listed, counted, position = checked(answer, topic, partition=partition)
        for ledger, entries in rows(counted, 2):
            counts[ledger] += entries
        if not position:
            break
    return PartitionLedgers(
        partition,
        lease.partition(" ")[0],
        epoch,
        max(left_ms, 0),
        [
            Ledger(int(ledger), first, counts[ledger])
            for ledger, first in zip(*parse_ledgers(listed), strict=True)
        ],
    )


async def each_lane(store: Store, keys: SubscriptionKeys) -> AsyncIterator[Lane]:
    """Yield every lane, without what is leased beyond its record."""
    cursor = "0"
    while True:
        [(cursor, found)] = await store.read_all([("HSCAN", keys.lanes, cursor, "COUNT", str(PAGE))])
        for name, record in rows(found, 2):
            yield parse_lane(name, record)
        if cursor == "0":
            return


def entry_of(item: Sequence[Any]) -> int:
    """Return the number of what was read from a log."""
    return int(item[0].partition("-")[2])


async def _each(count: Callable[[int], Awaitable[None]], partitions: int) -> None:
    """Run a coroutine function for every partition, some at a time."""
    for start in range(0, partitions, _TOGETHER):
        numbers = range(start, min(start + _TOGETHER, partitions))
        await asyncio.gather(*(count(number) for number in numbers))
