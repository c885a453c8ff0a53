"""Reads all that a partition holds, for the checker and for those who look into a topic."""

from typing import Any

import msgspec

from broker.keys import PartitionKeys
from broker.store import Store

_PAGE = 1_000


class SubscriptionSnapshot(msgspec.Struct):
    """One subscription's keys on one partition, as they are stored."""

    name: str
    cursor: int
    settings: dict[str, str]
    lanes: dict[str, str]
    runs: dict[str, float]
    deadlines: dict[str, float]
    ready: list[str]
    queue: list[str]
    retries: dict[str, str]
    consumers: dict[str, float]


class PartitionSnapshot(msgspec.Struct):
    """One partition; `log` maps entries to (ledger, key)."""

    topic: str
    partition: int
    meta: dict[str, str]
    log: dict[int, tuple[int, str]]
    subscriptions: list[SubscriptionSnapshot]
    keys: set[str]


async def take_snapshot(store: Store, topic: str, partition: int) -> PartitionSnapshot:
    """Read a partition: its state in one transaction, then its log page by page."""
    keys = PartitionKeys.of(topic, partition)
    names = sorted(await store.command("HKEYS", keys.subs))
    commands: list[tuple[str | int, ...]] = [("HGETALL", keys.meta), ("HGETALL", keys.subs)]
    for name in names:
        own = keys.subscription(name)
        commands += [
            ("HGETALL", own.sub),
            ("HGETALL", own.lanes),
            ("ZRANGE", own.runs, 0, -1, "WITHSCORES"),
            ("ZRANGE", own.deadlines, 0, -1, "WITHSCORES"),
            ("ZRANGE", own.ready, 0, -1),
            ("ZRANGE", own.queue, 0, -1),
            ("HGETALL", own.retries),
            ("ZRANGE", own.consumers, 0, -1, "WITHSCORES"),
        ]
    meta, cursors, *rest = await store.atomically(commands)
    subscriptions = []
    for index, name in enumerate(names):
        settings, lanes, runs, deadlines, ready, queue, retries, consumers = rest[index * 8 : index * 8 + 8]
        if name in cursors:
            subscriptions.append(
                SubscriptionSnapshot(
                    name,
                    int(cursors[name]),
                    settings,
                    lanes,
                    _scores(runs),
                    _scores(deadlines),
                    ready,
                    queue,
                    retries,
                    _scores(consumers),
                )
            )
    return PartitionSnapshot(
        topic,
        partition,
        meta,
        await _read_log(store, keys.log),
        subscriptions,
        await store.keys_like(f"kl:{{{topic}:{partition}}}:*"),
    )


async def _read_log(store: Store, log: str) -> dict[int, tuple[int, str]]:
    entries: dict[int, tuple[int, str]] = {}
    start = "-"
    while True:
        page = await store.command("XRANGE", log, start, "+", "COUNT", _PAGE)
        for id, fields in page:
            ledger, _, entry = id.partition("-")
            entries[int(entry)] = (int(ledger), fields[1])
        if len(page) < _PAGE:
            return entries
        start = f"({page[-1][0]}"


def _scores(flat: list[Any]) -> dict[str, float]:
    return {member: float(score) for member, score in zip(flat[::2], flat[1::2], strict=True)}
