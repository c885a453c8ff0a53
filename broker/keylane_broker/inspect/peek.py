"""Messages that a subscription has not settled, and why each is not delivered: looks, and changes nothing."""

import msgspec

from keylane.wire.ledgers import id_maker
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.codec import retry_count
from keylane_broker.engine.lanes import parse_queued
from keylane_broker.engine.values import Message
from keylane_broker.inspect.counts import PAGE, each_lane, entry_of
from keylane_broker.store.keys import SubscriptionKeys, subscription_keys
from keylane_broker.store.store import Store


class Unsettled(msgspec.Struct):
    """A message that a subscription is owed: `state` is fresh, leased or waiting."""

    partition: int
    message: Message
    state: str
    consumer: str = ""
    due_ms: int = 0


class _Where(msgspec.Struct):
    """Where a message behind the cursor is."""

    state: str
    consumer: str
    due_ms: int


async def peek(
    store: Store, topic: str, subscription: str, partitions: range | list[int], limit: int
) -> list[Unsettled]:
    """Return the oldest messages of each partition that a subscription has not settled, at most `limit`.

    Of what waits in lanes, and of what is leased beyond their records, a thousand are looked at: where there
    are more, there may be older ones.
    """
    check_int("limit", limit, 1, PAGE)
    found: list[Unsettled] = []
    for partition in partitions:
        if len(found) >= limit:
            break
        found += await _peek(store, topic, subscription, partition, limit - len(found))
    return found


async def _peek(store: Store, topic: str, subscription: str, partition: int, limit: int) -> list[Unsettled]:
    keys = subscription_keys(topic, partition, subscription)
    (ledgers, lead), cursor, queued, beyond, matches = await store.read_all(
        [
            ("HMGET", keys.meta, "ledgers", "lead"),
            ("HGET", keys.subs, subscription),
            ("ZRANGE", keys.queue, "0", str(PAGE - 1)),
            ("ZRANGE", keys.beyond, "0", str(PAGE - 1)),
            ("ZRANGE", keys.matches, "0", str(limit - 1)),
        ]
    )
    places = await _places(store, keys, queued, beyond, int(lead or 0))
    entries = sorted({*places, *(int(match.partition(" ")[0]) for match in matches)})[:limit]
    id_of = id_maker(ledgers or "0:0")
    commands: list[tuple[str, ...]] = [("XRANGE", keys.log, id_of(entry), id_of(entry)) for entry in entries]
    if len(entries) < limit and cursor:
        commands.append(("XRANGE", keys.log, id_of(int(cursor) + 1), "+", "COUNT", str(limit - len(entries))))
    ids = [(id, fields) for part in await store.read_all(commands) for id, fields in part]
    numbers = [entry_of(item) for item in ids]
    [counts] = await store.read_all([("HMGET", keys.retries, *map(str, numbers))]) if numbers else [[]]
    return [
        _unsettled(
            partition, Message(id, fields[1], fields[3], fields[5], retry_count(count)), places.get(number)
        )
        for (id, fields), number, count in zip(ids, numbers, counts, strict=True)
    ]


def _unsettled(partition: int, message: Message, place: _Where | None) -> Unsettled:
    if place is None:
        return Unsettled(partition, message, "fresh")
    return Unsettled(partition, message, place.state, place.consumer, place.due_ms)


async def _places(
    store: Store, keys: SubscriptionKeys, queued: list[str], beyond: list[str], lead_ms: int
) -> dict[int, _Where]:
    """Return where the messages behind the cursor are; times by the clock that is `lead_ms` behind."""
    places: dict[int, _Where] = {}
    dues: dict[str, int] = {}
    leased_by: dict[str, str] = {}
    [holders] = await store.read_all([("ZRANGE", keys.deadlines, "0", str(PAGE - 1))])
    leases = [("ZRANGE", keys.leases(name), "0", str(PAGE - 1), "WITHSCORES") for name in holders]
    deadlines = {
        lane: score
        for scores in (await store.read_all(leases) if leases else [])
        for lane, score in zip(scores[::2], scores[1::2], strict=True)
    }
    async for found in each_lane(store, keys):
        due = dues[found.name] = found.due - lead_ms
        leased_by[found.name] = found.consumer
        deadline = int(deadlines.get(found.name, 0)) - lead_ms
        state = _Where("leased", found.consumer, deadline) if found.consumer else _Where("waiting", "", due)
        places.update(dict.fromkeys(found.entries, state))
        if len(places) > 10 * PAGE:
            break
    for member in beyond:
        lane, entries = parse_queued(member)
        state = _Where("leased", leased_by.get(lane, ""), int(deadlines.get(lane, 0)) - lead_ms)
        places.update(dict.fromkeys(entries[:PAGE], state))
    for member in queued:
        lane, entries = parse_queued(member)
        for entry in entries[:PAGE]:
            places[entry] = _Where("waiting", "", dues.get(lane, 0))
    return places
