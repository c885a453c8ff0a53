"""Bodies that are to be deleted, as the scripts have written them down when their messages left the log.

[found] = await read_body_records(store, [("orders", 3)], 100)
await remove_body_records(store, ("orders", 3), [record.id for record in found])      # once they are deleted
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from keylane.wire.about import body_name
from keylane_broker.engine.values import Place
from keylane_broker.store.keys import REMAINS, partition_keys
from keylane_broker.store.store import Store

log = logging.getLogger("keylane.broker")


class BodyRecord(NamedTuple):
    """One record: names of bodies, and whether they may be in a payload store that clients brought along."""

    id: str
    names: list[str]
    own: bool


async def read_body_records(store: Store, places: Sequence[Place], limit: int) -> list[list[BodyRecord]]:
    """Return the oldest records of each partition."""
    keys = [partition_keys(*place).bodies for place in places]
    found = await store.read_all([("XRANGE", key, "-", "+", "COUNT", str(limit)) for key in keys])
    return [[_record_of(id, fields) for id, fields in records] for records in found]


async def count_body_records(store: Store, places: Sequence[Place]) -> list[int]:
    """Return how many records each partition has."""
    return list(await store.read_all([("XLEN", partition_keys(*place).bodies) for place in places]))


async def remove_body_records(store: Store, place: Place, records: Sequence[str]) -> None:
    """Forget records whose bodies are gone."""
    await store.read_all([("XDEL", partition_keys(*place).bodies, *records)])


async def add_orphans(store: Store, places: Sequence[Place]) -> None:
    """List partitions whose topic is being deleted as ones that have records."""
    await store.read_all([("SADD", REMAINS, *(f"{topic}:{number}" for topic, number in places))])


async def list_orphans(store: Store) -> list[Place]:
    """Return partitions that no longer exist and have records; those without are taken off the list."""
    [found] = await store.read_all([("SMEMBERS", REMAINS)])
    names = [name.partition(":") for name in found]
    places = [(topic, int(number)) for topic, _, number in names]
    left = await _left_of(store, places)
    done = [place for place in places if place not in left]
    for topic, number in done:
        # All is deleted, or a topic of that name was made: then who serves the partition sees to it.
        keys = partition_keys(topic, number)
        await store.run("partition/delete", [*keys, keys.delayed, keys.delayed_data, keys.bodies], "0", 0)
        await store.read_all([("SREM", REMAINS, f"{topic}:{number}")])
    if again := await _left_of(store, done):  # that topic was deleted meanwhile
        await add_orphans(store, list(again))
    return [*left, *again]


async def _left_of(store: Store, places: Sequence[Place]) -> dict[Place, None]:
    """Return those of the partitions that have records and are not served."""
    counts = await count_body_records(store, places)
    served = await store.field_of_each([partition_keys(*place).meta for place in places], "last")
    return {
        place: None
        for place, count, last in zip(places, counts, served, strict=True)
        if count and last is None
    }


def names_within(flat: Any, ranges: Sequence[tuple[int, int]]) -> list[str]:
    """Return those names, out of entry, name, …, whose entries are in ranges."""
    pairs = zip(flat[::2], flat[1::2], strict=True)
    if len(ranges) == 1:
        [(first, last)] = ranges
        return [name for entry, name in pairs if first <= entry <= last]
    within = {entry for first, last in ranges for entry in range(first, last + 1)}
    return [name for entry, name in pairs if entry in within]


def _record_of(id: str, fields: list[str]) -> BodyRecord:
    record = dict(zip(fields[::2], fields[1::2], strict=True))
    try:
        flat: Any = msgspec.json.decode(record["names"], type=list[int | str])
        names = flat[1::2]
        if record["left"]:
            texts = [text.partition("-") for text in record["left"].split(" ")]
            names = names_within(flat, [(int(first), int(last or first)) for first, _, last in texts])
        return BodyRecord(id, list(map(str, names)), record["own"] == "1")
    except (KeyError, TypeError, ValueError):  # no script has written that
        log.warning("a record of bodies to be deleted that cannot be read: %r", record)
        return BodyRecord(id, [], False)


def body_names(entries: Iterable[tuple[int, Sequence[str]]]) -> str:
    """Return entry and name of each body as scripts store them, out of key, uid and about; "" for none."""
    names: list[int | str] = []
    for entry, (_, uid, about) in entries:
        if name := body_name(uid, about):
            names += (entry, name)
    return pack_names(names) if names else ""


def pack_names(names: list[int | str]) -> str:
    """Return entry and name of each body as scripts store them."""
    return msgspec.json.encode(names).decode()
