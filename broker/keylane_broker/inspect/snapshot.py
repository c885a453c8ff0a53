"""Reads all that a partition holds, for the checker and for those who look into a topic."""

import itertools
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec

from keylane_broker.engine.codec import to_flat
from keylane_broker.store.keys import (
    CONTROLLER,
    OWNERS,
    TOPICS,
    WORKERS,
    PartitionKeys,
    SubscriptionKeys,
    partition_of,
    topic_key,
    worker_key,
)
from keylane_broker.store.store import Store, as_fields

_PAGE = 1_000
_OWN = 13  # keys that every subscription has
_SMALL = 2_000  # fields and members that are read in one transaction, at most


class SubscriptionSnapshot(msgspec.Struct):
    """One subscription's keys on one partition, as they are stored."""

    name: str
    cursor: int
    settings: dict[str, str]
    lanes: dict[str, str]
    runs: dict[str, float]
    deadlines: dict[str, float]
    leases: dict[str, dict[str, float]]  # consumer -> lane -> deadline
    ready: list[str]
    queue: list[str]
    beyond: list[str]
    retries: dict[str, str]
    consumers: dict[str, float]
    charged: dict[str, str]
    skipped: list[str]  # entries
    matches: list[str]
    parked: dict[str, str]


class PartitionSnapshot(msgspec.Struct):
    """One partition; `log` maps entries to (ledger, key, bytes of the body)."""

    topic: str
    partition: int
    lease: str
    lease_ms: int  # -1: forever; -2: there is none
    meta: dict[str, str]
    log: dict[int, tuple[int, str, int]]
    subscriptions: list[SubscriptionSnapshot]
    journal: list[str]  # the ids of its records
    journal_end: int  # the number that the next one was to have before these were read
    delayed: list[str]  # "<number> <uid>"
    delayed_data: set[str]  # uids
    expiring: set[int]
    overdue: set[int]
    retained: list[tuple[int, int]]  # ranges that were written down, to be trimmed
    filters: dict[str, str]  # of the subscriptions that have one
    held: list[str]  # "<entry> <incarnation of a subscription>.<note>": what dead letters hold
    priority: set[int]  # entries that have one
    producers: list[dict[str, str]]  # their records, of each generation


class ClusterSnapshot(msgspec.Struct):
    """What workers tell each other, as it is stored, and the topics that it is about."""

    now_ms: int
    heartbeats: dict[str, float]
    workers: dict[str, tuple[dict[str, str], int]]  # by worker: fields, and how long they last in ms
    controller: str
    controller_ms: int  # as lease_ms
    owners: dict[str, str]
    topics: dict[str, dict[str, str]]


async def take_cluster_snapshot(store: Store) -> ClusterSnapshot:
    """Read all that is stored outside of partitions; each key at an instant of its own."""
    _, now_ms, heartbeats = await store.run("cluster/list", [WORKERS])
    controller, controller_ms, names = await store.read_all(
        [("GET", CONTROLLER), ("PTTL", CONTROLLER), ("HVALS", TOPICS)]
    )
    workers = sorted(key.removeprefix(worker_key("")) for key in await store.keys_like(worker_key("*")))
    fields = await store.all_fields([worker_key(worker) for worker in workers])
    lasting = await store.read_all([("PTTL", worker_key(worker)) for worker in workers])
    owners = await store.fields(OWNERS)
    stored = await store.all_fields([topic_key(name) for name in sorted(set(names))])
    return ClusterSnapshot(
        now_ms,
        _scores(heartbeats),
        {
            worker: (found, left_ms)
            for worker, found, left_ms in zip(workers, fields, lasting, strict=True)
            if found
        },
        controller or "",
        controller_ms,
        owners,
        dict(zip(sorted(set(names)), stored, strict=True)),
    )


class Scanned(msgspec.Struct):
    """Which keys there are: of partitions, by topic and number, and of topics."""

    partitions: dict[tuple[str, int], set[str]]
    topics: set[str]


async def scan(store: Store, topic: str = "") -> Scanned:
    """Return the keys of a topic, or of all, found with one walk over the keyspace."""
    found = Scanned(defaultdict(set), set())
    for key in await store.keys_like(f"kl:{{{topic}:*" if topic else "kl:[{t]*"):
        if key.startswith(topic_key("")):
            found.topics.add(key.removeprefix(topic_key("")))
        with suppress(ValueError):  # it is none of a partition
            found.partitions[partition_of(key)].add(key)
    return found


async def take_snapshot(store: Store, topic: str, partition: int) -> PartitionSnapshot:
    """Read a partition: a small one in one transaction, else in steps that hold nobody up."""
    keys = PartitionKeys.of(topic, partition)
    names = sorted(await store.command("HKEYS", keys.subs))
    holders = [await store.command("ZRANGE", keys.subscription(name).deadlines, 0, -1) for name in names]
    commands: list[tuple[str, ...]] = [
        ("GET", keys.lease),
        ("PTTL", keys.lease),
        ("HGETALL", keys.meta),
        ("HGETALL", keys.subs),
        ("ZRANGE", keys.delayed, "0", "-1"),
        ("HKEYS", keys.delayed_data),
        ("HGETALL", keys.filters),
        ("ZRANGE", keys.expiring, "0", "-1"),
        ("ZRANGE", keys.overdue, "0", "-1"),
        ("ZRANGE", keys.held, "0", "-1"),
        ("ZRANGE", keys.priority, "0", "-1"),
        *(("HGETALL", key) for key in keys.producers),
    ]
    for name, holding in zip(names, holders, strict=True):
        commands += _subscription_commands(keys.subscription(name), holding)
    lease, lease_ms, meta, subs, delayed, delayed_data, filters, *others = await _read(store, commands)
    expiring, overdue, held, priority, *rest = others
    producers, rest = rest[:2], rest[2:]
    no_sub = keys.subscription("").sub
    end = await store.run("partition/offsets", [keys.meta, keys.log, keys.subs, no_sub, keys.journal], "", 0)
    cursors = as_fields(subs)
    subscriptions = []
    for name, holding in zip(names, holders, strict=True):
        own, rest = rest[: _OWN + len(holding)], rest[_OWN + len(holding) :]
        if name in cursors:
            subscriptions.append(_subscription_snapshot(name, int(cursors[name]), holding, own))
    return PartitionSnapshot(
        topic,
        partition,
        lease or "",
        lease_ms,
        as_fields(meta),
        await _read_log(store, keys.log),
        subscriptions,
        [id async for id, _ in _walk(store, keys.journal)],
        end[6] if end[0] == "OK" else 1,
        delayed,
        set(delayed_data),
        set(map(int, expiring)),
        set(map(int, overdue)),
        await _read_retained(store, keys.retained, as_fields(meta).get("replays", "")),
        as_fields(filters),
        held,
        {int(member.partition(" ")[0]) for member in priority},
        [as_fields(records) for records in producers],
    )


def _subscription_commands(own: SubscriptionKeys, holding: list[str]) -> list[tuple[str, ...]]:
    """Return the commands that read a subscription and what each of some consumers holds."""
    return [
        ("HGETALL", own.sub),
        ("HGETALL", own.lanes),
        ("ZRANGE", own.runs, "0", "-1", "WITHSCORES"),
        ("ZRANGE", own.deadlines, "0", "-1", "WITHSCORES"),
        ("ZRANGE", own.ready, "0", "-1"),
        ("ZRANGE", own.queue, "0", "-1"),
        ("ZRANGE", own.beyond, "0", "-1"),
        ("HGETALL", own.retries),
        ("ZRANGE", own.consumers, "0", "-1", "WITHSCORES"),
        ("HGETALL", own.charged),
        ("ZRANGE", own.skipped, "0", "-1"),
        ("ZRANGE", own.matches, "0", "-1"),
        ("HGETALL", own.parked),
        *(("ZRANGE", own.leases(consumer), "0", "-1", "WITHSCORES") for consumer in holding),
    ]


def _subscription_snapshot(
    name: str, cursor: int, holding: list[str], answers: list[Any]
) -> SubscriptionSnapshot:
    """Return what the answers of _subscription_commands say."""
    settings, lanes, runs, deadlines, ready, queue, beyond, retries, *rest = answers
    consumers, charged, skipped, matches, parked, *leases = rest
    return SubscriptionSnapshot(
        name,
        cursor,
        as_fields(settings),
        as_fields(lanes),
        _scores(runs),
        _scores(deadlines),
        dict(zip(holding, map(_scores, leases), strict=True)),
        ready,
        queue,
        beyond,
        as_fields(retries),
        _scores(consumers),
        as_fields(charged),
        skipped,
        [match.partition(" ")[0] for match in matches],
        as_fields(parked),
    )


async def _read(store: Store, commands: list[tuple[str, ...]]) -> list[Any]:
    """Return the answers of commands that read whole keys: of one instant, unless that took too long."""
    counting = {"H": "HLEN", "Z": "ZCARD"}
    sizes = [(counting[name[0]], key) for name, key, *_ in commands if name[0] in counting]
    if sum(await store.read_all(sizes)) <= _SMALL:
        return await store.atomically(commands)
    return [await _in_pages(store, command) for command in commands]


async def _in_pages(store: Store, command: tuple[str, ...]) -> Any:
    """Return the answer of a command that reads a whole key, in steps; changes meanwhile may be missing."""
    name, key, *options = command
    found: list[Any] = []
    if name == "ZRANGE":
        for start in itertools.count(0, _PAGE):
            page = ("ZRANGE", key, str(start), str(start + _PAGE - 1), *options[2:])
            [members] = await store.read_all([page])
            found += members
            if not members:
                return found
    if name in ("HGETALL", "HKEYS"):
        cursor = "0"
        while True:
            [(cursor, pairs)] = await store.read_all([("HSCAN", key, str(cursor), "COUNT", str(_PAGE))])
            fields = as_fields(pairs)
            found += to_flat(fields) if name == "HGETALL" else fields
            if int(cursor) == 0:
                return found
    [answer] = await store.read_all([command])
    return answer


async def _read_log(store: Store, log: str) -> dict[int, tuple[int, str, int]]:
    entries: dict[int, tuple[int, str, int]] = {}
    async for id, fields in _walk(store, log):
        ledger, _, entry = id.partition("-")
        size = "".join(fields[5].split(" ")[3:4]).partition(":")[0] if len(fields) > 5 else ""
        entries[int(entry)] = (int(ledger), fields[1], int(size) if size.isdecimal() else 0)
    return entries


async def _walk(store: Store, stream: str) -> AsyncIterator[tuple[str, list[str]]]:
    start = "-"
    while True:
        page = await store.command("XRANGE", stream, start, "+", "COUNT", _PAGE)
        for id, fields in page:
            yield id, fields
        if len(page) < _PAGE:
            return
        start = f"({page[-1][0]}"


async def _read_retained(store: Store, stream: str, replays: str) -> list[tuple[int, int]]:
    """Return the ranges that are written down and hold: those before what a later replay has begun with."""
    begun = [(_numbers(id), int(first)) for id, _, first in (one.partition(":") for one in replays.split())]
    found = []
    async for id, (kind, text) in _walk(store, stream):
        void = min((first for at, first in begun if at > _numbers(id)), default=None)
        for word in text.split() if kind == "entries" else ():
            first, _, last = word.partition("-")
            bound = int(last or first) if void is None else min(int(last or first), void - 1)
            found.append((int(first), bound))
    return found


def _numbers(id: str) -> tuple[int, int]:
    ms, _, number = id.partition("-")
    return int(ms), int(number)


def _scores(flat: list[Any]) -> dict[str, float]:
    return {member: float(score) for member, score in zip(flat[::2], flat[1::2], strict=True)}
