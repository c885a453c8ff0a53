"""Proves the keyspace's invariants: walks a topic and names everything that cannot be right.

    problems = await check_topic(engine, "orders")      # [] when all is well

The rules are about one state at one instant. On a live topic a snapshot may straddle a change, and that of a
large partition is read in many steps, so a problem counts only if it is found in the same words when the
partition is looked at again. Each is about one lane, entry or consumer, and has the record that it is about,
with its tokens and times: if that is the same, nothing has moved there meanwhile.
"""

import re
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise

from keylane.wire.ledgers import parse_ledgers
from keylane_broker.engine.codec import retry_count
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.lanes import Lane, parse_beyond, parse_lane, parse_queued
from keylane_broker.engine.settings import partition_fields
from keylane_broker.engine.subscriptions import SubscriptionRecord, read_records
from keylane_broker.inspect.snapshot import (
    PartitionSnapshot,
    Scanned,
    SubscriptionSnapshot,
    scan,
    take_snapshot,
)
from keylane_broker.store.keys import ALL_SUFFIXES, PLACE, REMAINS, TOPICS, PartitionKeys, topic_key

_LOOKS = 3
NUL = "\0"
PARKED = 10**14 - 1  # the due of a lane that is parked

_PRODUCER_RECORD = re.compile(r"\d+(!\d+-\d+)?(~\d+)?( \d+-\d+:\d+-\d+)*")  # as in lua/lib/producers.lua
_STRETCH = re.compile(r" (\d+)-(\d+):(\d+)-(\d+)")


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


def _backlog_problems(partition: PartitionSnapshot) -> Iterator[str]:
    """Yield where the bytes of the backlog are not what the log has; messages for later may come on top."""
    if (counted_at := partition.meta.get("counted_at")) is None:
        return
    start = int(counted_at.rpartition("-")[2])
    there = sum(size for entry, (_, _, size) in partition.log.items() if entry > start)
    counted = int(partition.meta.get("backlog_bytes", 0))
    if counted < there or (counted > there and not partition.delayed):
        yield f"the bodies of its backlog have {there} bytes, and {counted} are counted: limit them anew"


def _producer_problems(partition: PartitionSnapshot) -> Iterator[str]:
    """Yield what is wrong with the records of producers: a number is one message, and an entry one number."""
    for records in partition.producers:
        taken: list[tuple[int, int, str]] = []
        for producer, text in records.items():
            if not _PRODUCER_RECORD.fullmatch(text):
                yield f"the record of producer {producer} is {text!r:.100}"
                continue
            stretches = [tuple(map(int, found)) for found in _STRETCH.findall(text)]
            numbers = sorted((first, last) for first, last, _, _ in stretches)
            if any(later[0] <= earlier[1] for earlier, later in pairwise(numbers)):
                yield f"producer {producer} has numbers that were stored twice: {text!r:.100}"
            taken += [(entry, entry + last - first, producer) for first, last, _, entry in stretches]
        taken.sort()
        for earlier, later in pairwise(taken):
            if later[0] <= earlier[1]:
                yield f"entry {later[0]} is a message of producers {earlier[2]} and {later[2]}"
        if taken and taken[-1][1] > int(partition.meta.get("last", 0)):
            yield f"producer {taken[-1][2]} has entry {taken[-1][1]}, which was not given yet"


def problems_of(partition: PartitionSnapshot) -> Iterator[str]:
    """Yield what breaks a rule in one snapshot."""
    if not partition.meta:
        yield "has no meta hash"
        return
    yield from _lease_problems(partition)
    yield from _log_problems(partition)
    yield from _journal_problems(partition)
    waiting = {member[16:] for member in partition.delayed}
    for uid in sorted(waiting ^ partition.delayed_data):
        yield f"delayed messages and their data differ: {[uid]}"
    if len(waiting) < len(partition.delayed):
        yield "delayed messages have a uid twice"
    yield from _producer_problems(partition)
    yield from _filter_problems(partition)
    yield from _backlog_problems(partition)
    for entry in sorted(partition.expiring - partition.log.keys()):
        yield f"entry {entry} is to expire and not in the log"
    for entry in sorted(partition.priority - partition.log.keys()):
        yield f"entry {entry} has a priority and is not in the log"
    if partition.priority and "priorities" not in partition.meta:
        yield "messages have a priority, and meta does not say so"
    for entry in sorted(partition.overdue & partition.expiring):
        yield f"entry {entry} is both to expire and overdue"
    owed: set[int] = set()
    for subscription in partition.subscriptions:
        for problem in _subscription_problems(partition, subscription):
            yield f"subscription {subscription.name}: {problem}"
        owed |= unsettled(subscription)
        skipped = set(map(int, subscription.skipped))
        owed |= {entry for entry in partition.log if entry > subscription.cursor} - skipped
    held = {int(member.partition(" ")[0]) for member in partition.held}
    owed |= held
    swept = partition.meta.get("sweep") == partition.meta.get("swept")
    if partition.meta["retain"] != "1" and swept:
        for entry in sorted(set(partition.log) - owed):
            if not any(first <= entry <= last for first, last in partition.retained):
                kept = "" if partition.meta["retain"] == "0" else ", and never trimmed"
                yield f"entry {entry} is in the log and owed to nobody{kept}"


def _lease_problems(partition: PartitionSnapshot) -> Iterator[str]:
    if partition.lease_ms == -1:
        yield f"its lease, {partition.lease!r}, never ends"
    epoch = partition.lease.rpartition(" ")[2]
    if partition.lease and epoch != partition.meta["epoch"]:
        yield f"its lease, {partition.lease!r}, is not of the newest epoch {partition.meta['epoch']}"


def _log_problems(partition: PartitionSnapshot) -> Iterator[str]:
    last = int(partition.meta["last"])
    ledgers, firsts = parse_ledgers(partition.meta["ledgers"])
    starts = list(zip(firsts, map(int, ledgers), strict=True))
    epochs = range(int(partition.meta.get("first_epoch", 0)), int(partition.meta["epoch"]) + 1)
    if starts != sorted(starts) or any(ledger not in epochs for _, ledger in starts):
        yield f"ledgers are out of order: {partition.meta['ledgers']}"
    newest = partition.meta["ledgers"].rpartition(" ")[2]
    if partition.meta.get("ledger", "") != newest:
        yield f"the ledger in use is {partition.meta.get('ledger')}, and the newest of all is {newest}"
    for entry, (ledger, *_) in partition.log.items():
        if entry > last:
            yield f"entry {entry} is in the log, but the last one given was {last}"
        right = next((name for first, name in reversed(starts) if entry >= first), None)
        if ledger != right:
            yield f"entry {entry} is in the log under ledger {ledger}, not {right}"


def _journal_problems(partition: PartitionSnapshot) -> Iterator[str]:
    numbers = [int(id.rpartition("-")[2]) for id in partition.journal]
    for before, after in pairwise(numbers):
        if after != before + 1:
            yield f"the journal goes on with record {after} after record {before}"
    written = partition.journal_end - 1
    if (numbers[-1] if numbers else 0) < written:
        ends = f"ends with record {numbers[-1]}" if numbers else "is empty"
        yield f"the journal {ends}, and record {written} was the last one written"


def _lanes(subscription: SubscriptionSnapshot) -> list[Lane]:
    beyond = _beyond(subscription)
    return [parse_lane(name, record, beyond.get(name, [])) for name, record in subscription.lanes.items()]


def _beyond(subscription: SubscriptionSnapshot) -> dict[str, list[tuple[int, int, int]]]:
    lanes: dict[str, list[tuple[int, int, int]]] = {}
    for member in subscription.beyond:
        lane, leased = parse_beyond(member)
        lanes.setdefault(lane, []).append(leased)
    return lanes


def _queued(subscription: SubscriptionSnapshot) -> dict[str, list[int]]:
    lanes: dict[str, list[int]] = {}
    for member in subscription.queue:
        lane, entries = parse_queued(member)
        lanes.setdefault(lane, []).extend(entries)
    return lanes


def unsettled(subscription: SubscriptionSnapshot) -> set[int]:
    """Return the entries behind the cursor that are still owed to a subscription."""
    entries = {
        entry for member in subscription.queue + subscription.beyond for entry in parse_queued(member)[1]
    }
    for lane in _lanes(subscription):
        entries.update(lane.entries)
    return entries.union(map(int, subscription.matches))


def _filter_problems(partition: PartitionSnapshot) -> Iterator[str]:
    """Yield what is wrong with filters, and with what was found to match them."""
    if bool(partition.filters) != (partition.meta.get("filters") == "1"):
        yield f"meta says filters {partition.meta.get('filters')!r}, and these have one: {partition.filters}"
    for name in sorted(partition.filters.keys() - {found.name for found in partition.subscriptions}):
        yield f"there is a filter of subscription {name}, which does not exist"
    for subscription in partition.subscriptions:
        if subscription.matches and subscription.name not in partition.filters:
            yield f"subscription {subscription.name} has matches and no filter"


def _subscription_problems(partition: PartitionSnapshot, subscription: SubscriptionSnapshot) -> Iterator[str]:
    mode = subscription.settings.get("mode")
    lanes = _lanes(subscription)
    if PLACE in subscription.name and not subscription.consumers:
        yield "it is a consumer's place, and there is no session"
    last = int(partition.meta["last"])
    if subscription.cursor > last:
        yield f"its cursor {subscription.cursor} is beyond the last entry {last}"
    strangers = subscription.consumers.keys() - {subscription.settings.get("reader")}
    if mode == "cursor" and strangers:
        yield f"it is read by position, and these have a session who have not claimed it: {sorted(strangers)}"
    yield from _index_problems(subscription, lanes)
    yield from _lost_problems(partition, subscription)

    queued = _queued(subscription)
    holders = dict.fromkeys(map(int, subscription.matches), "matches")
    for lane in lanes:
        for problem in _lane_problems(partition, subscription, lane, queued.get(lane.name, [])):
            yield f"lane {lane.name!r}: {problem}"
        if not _belongs(lane, mode):
            yield f"lane {lane.name!r} has no place in mode {mode}"
        for entry in lane.entries + ([] if lane.is_run else queued.get(lane.name, [])):
            if entry in holders:
                yield f"entry {entry} is in lane {holders[entry]!r} and in {lane.name!r}"
            holders[entry] = lane.name
    for name in sorted(queued.keys() - subscription.lanes.keys()):
        yield f"lane {name!r} has messages waiting and no record"
    for name in sorted(_beyond(subscription).keys() - subscription.lanes.keys()):
        yield f"lane {name!r} has messages leased beyond its record, and no record"
    yield from _parked_problems(subscription, lanes, queued)
    yield from _mixed_runs(lanes)
    for text, count in subscription.retries.items():
        if holders.get(int(text), "matches") == "matches":
            yield f"entry {text} has a retry count and is not unsettled"
        if retry_count(count) < 1:
            yield f"entry {text} has the retry count {count}"


def _mixed_runs(lanes: list[Lane]) -> Iterator[str]:
    """Yield runs among whose entries others lie: who looks for an entry finds one run, and no other."""
    runs = sorted(
        (lane.entries[0], lane.entries[-1], lane.name) for lane in lanes if lane.is_run and lane.ranges
    )
    for (_, last, name), (first, _, other) in pairwise(runs):
        if first <= last:
            yield f"run {other!r} begins at {first}, and run {name!r} goes on up to {last}"


def _parked_problems(
    subscription: SubscriptionSnapshot, lanes: list[Lane], queued: dict[str, list[int]]
) -> Iterator[str]:
    stopped = {lane.name: lane for lane in lanes if lane.due == PARKED}
    for name in sorted(stopped.keys() ^ subscription.parked.keys()):
        state = "parked and not listed" if name in stopped else "listed as parked and is not"
        yield f"lane {name!r} is {state}"
    for name in stopped.keys() & subscription.parked.keys():
        entry = subscription.parked[name].partition(" ")[0]
        if int(entry) not in (*stopped[name].entries, *queued.get(name, [])):
            yield f"lane {name!r} is parked at {entry}, which does not wait in it"


def _belongs(lane: Lane, mode: str | None) -> bool:
    if mode == "cursor":
        return False
    if mode == "key_shared":
        return lane.name != "="
    return lane.is_run if mode == "shared" else lane.name == "="


def _index_problems(subscription: SubscriptionSnapshot, lanes: list[Lane]) -> Iterator[str]:

    def record_of(lane: str) -> str:
        # As long as it is the same at every look, its lane has not moved meanwhile.
        return f"record {subscription.lanes.get(lane)!r}"

    leased = {(lane.consumer, lane.name) for lane in lanes if lane.consumer}
    timed = {(consumer, lane) for consumer, lanes in subscription.leases.items() for lane in lanes}
    for pair in sorted(leased ^ timed):
        yield f"leased lanes and deadlines differ: {[pair]}, {record_of(pair[1])}"
    for consumer, ends in subscription.leases.items():
        if ends and min(ends.values()) < subscription.deadlines.get(consumer, 0):
            yield f"a lease of {consumer!r} ends before its deadlines are looked at"
    runs = {lane.name: float(lane.ranges[0][1]) for lane in lanes if lane.is_run and lane.ranges}
    for run in sorted(runs.items() ^ subscription.runs.items()):
        yield f"runs and their index differ: {[run]}, {record_of(run[0])}"
    ready = {f"{lane.consumer}\0{lane.due:015}\0{lane.name}" for lane in lanes if lane.waiting}
    for member in sorted(ready ^ set(subscription.ready)):
        yield f"waiting lanes and ready differ: {[member]}, {record_of(member.split(NUL, 2)[-1])}"
    gone = {lane.consumer for lane in lanes if lane.consumer} - subscription.consumers.keys()
    for consumer in sorted(gone):
        yield f"lanes are leased to consumers without a session: {[consumer]}"
    for what, names in (("deadlines", subscription.deadlines), ("charged", subscription.charged)):
        for consumer in sorted(names.keys() - subscription.consumers.keys()):
            yield f"{what} has consumers without a session: {[consumer]}"


def _lost_problems(partition: PartitionSnapshot, subscription: SubscriptionSnapshot) -> Iterator[str]:
    owed = unsettled(subscription)
    last = int(partition.meta["last"])
    dense_from = max(subscription.cursor, int(subscription.settings.get("sparse", "0")))
    owed |= set(range(dense_from + 1, last + 1))
    for entry in sorted(owed - partition.log.keys()):
        yield f"entry {entry} is owed and not in the log"
    for entry in map(int, subscription.skipped):
        if not subscription.cursor < entry <= dense_from:
            yield f"entry {entry} is skipped, which is none after the cursor and up to {dense_from}"
    for entry in sorted(unsettled(subscription)):
        if entry > subscription.cursor:
            yield f"entry {entry} is leased or waiting beyond the cursor {subscription.cursor}"


def _lane_problems(
    partition: PartitionSnapshot, subscription: SubscriptionSnapshot, lane: Lane, queued: list[int]
) -> Iterator[str]:
    entries = lane.entries
    if entries != sorted(set(entries)):
        yield f"its ranges are out of order: {lane.ranges}"
    newest = int(subscription.settings.get("token", "0"))
    if lane.consumer and any(not 0 < token <= newest for token, _, _ in lane.ranges):
        yield f"it has a token that was never given, the newest is {newest}: {lane.ranges}"
    if lane.is_run:
        if not entries or lane.name != f"#{entries[0]}":
            yield f"a run is named after its first entry, not {lane.ranges}"
        if len({token for token, _, _ in lane.ranges}) > 1:
            yield f"a run is leased as a whole, with one token, not {lane.ranges}"
        if lane.waiting != (0 if lane.consumer else len(entries)):
            yield f"a run waits as a whole or not at all, not {lane.waiting} of {len(entries)}"
        return
    if lane.waiting != len(queued):
        yield f"it counts {lane.waiting} waiting, and {len(queued)} are"
    beyond = sum(last - first + 1 for _, first, last in lane.beyond)
    if lane.counted != beyond:
        yield f"it counts {lane.counted} leased beyond its record, and {beyond} are"
    if bool(lane.consumer) != bool(entries):
        yield f"its consumer is {lane.consumer!r} and {len(entries)} are leased"
    if not entries and not queued:
        yield "it is empty"
    if entries and queued and entries[-1] > queued[0]:
        yield f"leased is not a prefix: {entries[-1]} is leased and {queued[0]} waits"
    for entry in entries + queued:
        if entry in partition.log and lane.name not in ("=", f"={partition.log[entry][1]}"):
            yield f"it holds entry {entry}, whose key is {partition.log[entry][1]!r}"


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
