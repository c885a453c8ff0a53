"""Proves the keyspace's invariants: walks a topic and names everything that cannot be right.

    problems = await check_topic(engine, "orders")      # [] when all is well

The rules are about one state at one instant. On a live topic a snapshot may straddle a change, and that of a
large partition is read in many steps, so a problem counts only if it is found in the same words when the
partition is looked at again. Those of one partition are in partition_rules.
"""

from collections.abc import Awaitable, Callable, Iterator

from keylane_broker.engine.engine import Engine
from keylane_broker.engine.settings import partition_fields
from keylane_broker.engine.subscriptions import SubscriptionRecord, read_records
from keylane_broker.inspect.partition_rules import problems_of
from keylane_broker.inspect.snapshot import PartitionSnapshot, Scanned, scan, take_snapshot
from keylane_broker.store.keys import ALL_SUFFIXES, PLACE, REMAINS, TOPICS, PartitionKeys, topic_key

_LOOKS = 3


async def check_topic(engine: Engine, topic: str, scanned: Scanned | None = None) -> list[str]:
    """Return every broken invariant of a topic as a sentence; empty if there is none.

    `scanned` are the keys of all topics, where somebody has walked over the keyspace already.
    """
    partitions = (await engine.describe_topic(topic)).partitions
    scanned = scanned or await scan(engine.store, topic)
    problems = await _lasting(lambda: _half_made(engine, topic))
    problems += await _lasting(lambda: _half_changed(engine, topic))
    for partition in range(partitions):
        keys = scanned.partitions.get((topic, partition), set())
        found = await check_partition(engine, topic, partition, keys)
        problems += [f"partition {partition}: {problem}" for problem in found]
    return problems


async def check_partition(engine: Engine, topic: str, partition: int, scanned: set[str]) -> list[str]:
    """Return every broken invariant of one partition that lasts over several looks."""

    async def look() -> list[str]:
        about, records = await engine.describe_topic(topic), await read_records(engine.store, topic)
        snapshot = await take_snapshot(engine.store, topic, partition)
        strays = sorted(scanned - _expected_keys(snapshot))
        there = await engine.store.read_all([("EXISTS", key) for key in strays])
        return [
            *problems_of(snapshot),
            *_record_problems(snapshot, about.incarnation, records),
            *(f"key {key} belongs to nothing" for key, exists in zip(strays, there, strict=True) if exists),
        ]

    return await _lasting(look)


async def check_leftovers(engine: Engine, scanned: Scanned) -> list[str]:
    """Return topics that are half-created, and partitions that belong to none."""

    async def look() -> list[str]:
        listed = set((await engine.store.fields(TOPICS)).values())
        names = sorted(listed | scanned.topics)
        states = dict(
            zip(names, await engine.store.field_of_each([topic_key(name) for name in names]), strict=True)
        )
        counts = await engine.partition_counts()
        lost = sorted(
            (name, number)
            for name, number in scanned.partitions
            if not states.get(name) or number >= counts.get(name, number + 1)
        )
        [left] = await engine.store.read_all([("SMEMBERS", REMAINS)])  # only their bodies are left to delete
        lost = [(name, number) for name, number in lost if f"{name}:{number}" not in set(left)]
        keys = [min(scanned.partitions[place]) for place in lost]
        there = await engine.store.read_all([("EXISTS", key) for key in keys])
        return [
            *(
                f"topic {name} is half-created, in state {state}: `keylane topic create {name}` or "
                f"`keylane topic delete {name}` finishes it"
                for name, state in states.items()
                if state in ("creating", "deleting")
            ),
            *(
                f"topic {name} is ready and not listed: delete it and create it again"
                for name, state in states.items()
                if state == "ready" and name not in listed
            ),
            *(
                f"partition {number} of {name} belongs to no topic: `keylane topic create {name} "
                f"--partitions {number + 1}`, then `keylane topic delete {name}`, removes it"
                for (name, number), exists in zip(lost, there, strict=True)
                if exists
            ),
        ]

    return await _lasting(look)


async def _lasting(look: Callable[[], Awaitable[list[str]]]) -> list[str]:
    """Return what is found at every look."""
    lasting = await look()
    for _ in range(_LOOKS - 1):
        if not lasting:
            break
        found = set(await look())
        lasting = [text for text in lasting if text in found]
    return lasting


async def _half_made(engine: Engine, topic: str) -> list[str]:
    """Return subscriptions whose creation or deletion is not finished."""
    return [
        f"subscription {name} (number {record.incarnation}) is half-created, in state {record.state}: "
        f"`keylane subscription describe {topic} {name}` finishes it"
        for name, record in (await read_records(engine.store, topic)).items()
        if record.state != "ready"
    ]


async def _half_changed(engine: Engine, topic: str) -> list[str]:
    """Return what was changed in some partitions only: whoever did it has crashed in between."""
    about, names = await engine.describe_topic(topic), await engine.subscriptions(topic)
    all_keys = [PartitionKeys.of(topic, number) for number in range(about.partitions)]
    problems = []
    if left := await engine.purge_left(topic):
        problems.append(f"a purge is not finished, of {left}: purge it once more")
    for field in ("journal", "retain", "ttl_ms", "quota"):
        wanted = partition_fields(about)[field]
        there = await engine.store.field_of_each([keys.meta for keys in all_keys], field)
        if others := [number for number, kept in enumerate(there) if kept not in (None, wanted)]:
            what = {
                "journal": "the journal",
                "retain": "the retention",
                "ttl_ms": "the TTL",
                "quota": "the quota",
            }[field]
            problems.append(
                f"{what} of partitions {others} is not what the topic says, {wanted!r}: change it once more"
            )
    for name in names:
        paused = await engine.store.field_of_each(
            [keys.subscription(name).sub for keys in all_keys], "paused"
        )
        if len(set(paused)) > 1:
            some = [number for number, here in enumerate(paused) if here]
            problems.append(
                f"subscription {name} is paused in partitions {some} alone: pause or resume it once more"
            )
    return problems


def _record_problems(
    partition: PartitionSnapshot, incarnation: int, records: dict[str, SubscriptionRecord]
) -> Iterator[str]:
    """Yield what is not as the topic and the records of its subscriptions say."""
    if not partition.meta:
        return
    if partition.meta.get("incarnation") != str(incarnation):
        yield (
            f"is of number {partition.meta.get('incarnation')}, and the topic is {incarnation}: what is in "
            "it belongs to one that was deleted; delete the topic and create it again"
        )
    here = {found.name: found.settings.get("incarnation") for found in partition.subscriptions}
    for name, record in records.items():
        if record.settings["mode"] == "multicast":  # only its consumers have places here
            for place in [place for place in here if place.startswith(name + PLACE)]:
                if here.pop(place) != str(record.incarnation):
                    yield f"place {place} is of another subscription than its record says"
            continue
        number = here.pop(name, None)
        if record.state == "ready" and number != str(record.incarnation):
            yield (
                f"subscription {name} is {f'of number {number}' if number else 'not'} here, and its record "
                f"says {record.incarnation}: create it, or subscribe to it, to repair that"
            )
    for name in here:
        yield f"subscription {name} has no record, and is owed messages forever: create it, and delete it"


def _expected_keys(partition: PartitionSnapshot) -> set[str]:
    keys = PartitionKeys.of(partition.topic, partition.partition)
    expected = {
        *keys,
        keys.delayed,
        keys.delayed_data,
        keys.bodies,
        keys.retained,
        keys.filters,
        keys.expiring,
        keys.overdue,
        keys.expired,
        keys.priority,
    }
    expected |= {*keys.producers, keys.dead, keys.outbox, keys.held, keys.received}
    for subscription in partition.subscriptions:
        prefix = keys.subscription_prefix + subscription.name
        expected |= {prefix + suffix for suffix in ALL_SUFFIXES}
        expected |= {keys.subscription(subscription.name).leases(name) for name in subscription.leases}
    return expected
