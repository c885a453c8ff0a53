"""What subscriptions have before them, of some partitions: by a few reads of each, bounded, and so not exact.

Of a subscription with very many lanes a thousand are looked at, and stand for all of them.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from keylane.wire.ledgers import id_maker
from keylane_broker.engine.codec import rows
from keylane_broker.engine.lanes import parse_lane, parse_queued
from keylane_broker.engine.values import Place
from keylane_broker.inspect.counts import PAGE, entry_of
from keylane_broker.store.keys import PLACE, PartitionKeys, partition_keys, subscription_keys
from keylane_broker.store.store import Store

_TOGETHER = 20  # partitions that are asked for at once
_QUEUED = 200  # members of a queue among which the oldest is looked for


class Backlog(msgspec.Struct):
    """What a subscription has not settled, and when the oldest of it was published, ms; 0 for nothing."""

    waiting: int = 0  # published and with nobody: fresh, or given back
    pending: int = 0  # leased
    oldest_ms: int = 0

    def add(self, other: "Backlog") -> None:
        """Take in what another partition has."""
        self.waiting += other.waiting
        self.pending += other.pending
        oldest = [ms for ms in (self.oldest_ms, other.oldest_ms) if ms]
        self.oldest_ms = min(oldest, default=0)


class Backlogs(msgspec.Struct):
    """Of all partitions that were looked at: by topic and subscription, and by topic what is for later."""

    subscriptions: dict[tuple[str, str], Backlog] = {}
    delayed: dict[str, int] = {}
    messages: dict[str, int] = {}


async def measure(store: Store, places: Sequence[Place]) -> Backlogs:
    """Look at partitions, some at a time."""
    found = Backlogs()
    for start in range(0, len(places), _TOGETHER):
        await asyncio.gather(*(_measure(store, found, *place) for place in places[start : start + _TOGETHER]))
    return found


async def _measure(store: Store, found: Backlogs, topic: str, partition: int) -> None:
    keys = partition_keys(topic, partition)
    meta, length, oldest, subs, delayed = await store.read_all(
        [
            ("HMGET", keys.meta, "ledgers", "last", "lead"),
            ("XLEN", keys.log),
            ("XRANGE", keys.log, "-", "+", "COUNT", "1"),
            ("HGETALL", keys.subs),
            ("ZCARD", keys.delayed),
        ]
    )
    found.delayed[topic] = found.delayed.get(topic, 0) + delayed
    found.messages[topic] = found.messages.get(topic, 0) + length
    cursors = subs.items() if isinstance(subs, dict) else rows(subs, 2)
    for name, cursor in cursors:
        one = await _measure_one(store, keys, topic, partition, name, int(cursor), meta, length, oldest)
        found.subscriptions.setdefault((topic, name.partition(PLACE)[0]), Backlog()).add(one)


async def _measure_one(
    store: Store,
    partition: PartitionKeys,
    topic: str,
    number: int,
    name: str,
    cursor: int,
    meta: list[Any],
    length: int,
    oldest: list[Any],
) -> Backlog:
    keys = subscription_keys(topic, number, name)
    lanes, scanned, runs, queue, matches, first_match = await store.read_all(
        [
            ("HLEN", keys.lanes),
            ("HSCAN", keys.lanes, "0", "COUNT", str(PAGE)),
            ("ZRANGE", keys.runs, "0", "0", "WITHSCORES"),
            ("ZRANGE", keys.queue, "0", str(_QUEUED - 1)),
            ("ZCARD", keys.matches),
            ("ZRANGE", keys.matches, "0", "0"),
        ]
    )
    ledgers, last, lead = meta[0], int(meta[1] or 0), int(meta[2] or 0)
    records = [parse_lane(lane, record) for lane, record in rows(scanned[1], 2)]
    waiting = sum(lane.waiting for lane in records)
    leased = [lane for lane in records if lane.consumer]
    pending = sum(sum(end - start + 1 for _, start, end in lane.listed) + lane.counted for lane in leased)
    if records and lanes > len(records):
        waiting, pending = (round(count * lanes / len(records)) for count in (waiting, pending))
    entries = [int(float(score)) for _, score in rows(runs, 2)]
    entries += [parse_queued(member)[1].start for member in queue]
    entries += [lane.listed[0][1] for lane in leased if lane.listed]
    entries += [int(match.partition(" ")[0]) for match in first_match]  # each is an entry and its key
    fresh = min(max(last - cursor, 0), length)
    if oldest and cursor < (start := entry_of(oldest[0])):
        fresh = length
        entries.append(start)
    elif fresh:
        entries.append(cursor + 1)
    oldest_ms = 0
    if entries and ledgers:
        command = ("XRANGE", partition.log, id_maker(ledgers)(min(entries)), "+", "COUNT", "1")
        [items] = await store.read_all([command])
        if items:
            fields = dict(rows(items[0][1], 2))
            oldest_ms = int(fields["about"].partition(" ")[0]) - lead  # by the clock of Redis
    return Backlog(fresh + matches + waiting, pending, oldest_ms)
