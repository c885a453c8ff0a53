"""Looking into topics and subscriptions without changing them: counts, and messages that are not settled."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from keylane.wire.ledgers import id_maker, parse_ledgers
from keylane_broker.engine.answers import checked
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.codec import rows
from keylane_broker.engine.lanes import Lane, parse_lane, parse_queued
from keylane_broker.engine.subscriptions import read_records
from keylane_broker.engine.values import Message
from keylane_broker.store.keys import SubscriptionKeys, partition_keys, subscription_keys
from keylane_broker.store.store import Store

_PAGE = 1_000
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


class Unsettled(msgspec.Struct):
    """A message that a subscription is owed: `state` is fresh, leased or waiting."""

    partition: int
    message: Message
    state: str
    consumer: str = ""
    due_ms: int = 0


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


class _Place(msgspec.Struct):
    """Where a message behind the cursor is."""

    state: str
    consumer: str
    due_ms: int


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
    store: Store, topic: str, subscription: str, partitions: int, now_ms: int
) -> SubscriptionCounts:
    """Count what a subscription has not settled, and list who consumes it now."""
    counts = SubscriptionCounts()

    async def count(partition: int) -> None:
        keys = subscription_keys(topic, partition, subscription)
        lead, sessions, paused = await store.read_all(
            [
                ("HGET", keys.meta, "lead"),
                ("ZRANGE", keys.consumers, "0", "-1", "WITHSCORES"),
                ("HGET", keys.sub, "paused"),
            ]
        )
        fresh = await _count_fresh(store, keys, subscription)
        counts.fresh += fresh
        # Sessions end by the partition's time, which may be ahead of the caller's.
        counts.consumers.update(
            name for name, end in rows(sessions, 2) if float(end) > now_ms + int(lead or 0)
        )
        counts.paused |= paused == "1"
        async for lane in _lanes(store, keys):
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
    first = _entry(oldest[0])
    if cursor < first:
        return length
    if cursor >= sparse or length == last - first + 1:
        return max(last - cursor, 0)
    id_of = id_maker(ledgers)
    counted, passed = 0, cursor
    for _ in range(_PAGES):
        command = ("XRANGE", keys.log, id_of(passed + 1), id_of(sparse), "COUNT", str(_PAGE))
        [page] = await store.read_all([command])
        counted += len(page)
        passed = _entry(page[-1]) if len(page) == _PAGE else sparse
        if passed == sparse:
            break
    return min(counted + last - passed, length)


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
            _PAGE,
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


async def peek(
    store: Store, topic: str, subscription: str, partitions: range | list[int], limit: int
) -> list[Unsettled]:
    """Return the oldest messages of each partition that a subscription has not settled, at most `limit`.

    Of what waits in lanes, and of what is leased beyond their records, a thousand are looked at: where there
    are more, there may be older ones.
    """
    check_int("limit", limit, 1, _PAGE)
    found: list[Unsettled] = []
    for partition in partitions:
        if len(found) >= limit:
            break
        found += await _peek(store, topic, subscription, partition, limit - len(found))
    return found


async def _peek(store: Store, topic: str, subscription: str, partition: int, limit: int) -> list[Unsettled]:
    keys = subscription_keys(topic, partition, subscription)
    (ledgers, lead), cursor, queued, beyond = await store.read_all(
        [
            ("HMGET", keys.meta, "ledgers", "lead"),
            ("HGET", keys.subs, subscription),
            ("ZRANGE", keys.queue, "0", str(_PAGE - 1)),
            ("ZRANGE", keys.beyond, "0", str(_PAGE - 1)),
        ]
    )
    places = await _places(store, keys, queued, beyond, int(lead or 0))
    entries = sorted(places)[:limit]
    id_of = id_maker(ledgers or "0:0")
    commands: list[tuple[str, ...]] = [("XRANGE", keys.log, id_of(entry), id_of(entry)) for entry in entries]
    if len(entries) < limit and cursor:
        commands.append(("XRANGE", keys.log, id_of(int(cursor) + 1), "+", "COUNT", str(limit - len(entries))))
    ids = [(id, fields) for part in await store.read_all(commands) for id, fields in part]
    numbers = [_entry(item) for item in ids]
    [counts] = await store.read_all([("HMGET", keys.retries, *map(str, numbers))]) if numbers else [[]]
    return [
        _unsettled(
            partition, Message(id, fields[1], fields[3], fields[5], int(count or 0)), places.get(number)
        )
        for (id, fields), number, count in zip(ids, numbers, counts, strict=True)
    ]


def _unsettled(partition: int, message: Message, place: _Place | None) -> Unsettled:
    if place is None:
        return Unsettled(partition, message, "fresh")
    return Unsettled(partition, message, place.state, place.consumer, place.due_ms)


async def _places(
    store: Store, keys: SubscriptionKeys, queued: list[str], beyond: list[str], lead_ms: int
) -> dict[int, _Place]:
    """Return where the messages behind the cursor are; times by the clock that is `lead_ms` behind."""
    places: dict[int, _Place] = {}
    dues: dict[str, int] = {}
    leased_by: dict[str, str] = {}
    [holders] = await store.read_all([("ZRANGE", keys.deadlines, "0", str(_PAGE - 1))])
    leases = [("ZRANGE", keys.leases(name), "0", str(_PAGE - 1), "WITHSCORES") for name in holders]
    deadlines = {
        lane: score
        for scores in (await store.read_all(leases) if leases else [])
        for lane, score in zip(scores[::2], scores[1::2], strict=True)
    }
    async for found in _lanes(store, keys):
        due = dues[found.name] = found.due - lead_ms
        leased_by[found.name] = found.consumer
        deadline = int(deadlines.get(found.name, 0)) - lead_ms
        state = _Place("leased", found.consumer, deadline) if found.consumer else _Place("waiting", "", due)
        places.update(dict.fromkeys(found.entries, state))
        if len(places) > 10 * _PAGE:
            break
    for member in beyond:
        lane, entries = parse_queued(member)
        state = _Place("leased", leased_by.get(lane, ""), int(deadlines.get(lane, 0)) - lead_ms)
        places.update(dict.fromkeys(entries[:_PAGE], state))
    for member in queued:
        lane, entries = parse_queued(member)
        for entry in entries[:_PAGE]:
            places[entry] = _Place("waiting", "", dues.get(lane, 0))
    return places


async def _lanes(store: Store, keys: SubscriptionKeys) -> AsyncIterator[Lane]:
    """Yield every lane, without what is leased beyond its record."""
    cursor = "0"
    while True:
        [(cursor, found)] = await store.read_all([("HSCAN", keys.lanes, cursor, "COUNT", str(_PAGE))])
        for name, record in rows(found, 2):
            yield parse_lane(name, record)
        if cursor == "0":
            return


def _entry(item: Sequence[Any]) -> int:
    """Return the number of what was read from a log."""
    return int(item[0].partition("-")[2])


async def _each(count: Callable[[int], Awaitable[None]], partitions: int) -> None:
    """Run a coroutine function for every partition, some at a time."""
    for start in range(0, partitions, _TOGETHER):
        numbers = range(start, min(start + _TOGETHER, partitions))
        await asyncio.gather(*(count(number) for number in numbers))
