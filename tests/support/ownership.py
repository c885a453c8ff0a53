"""What Redis says of a cluster, and waiting until it says what it should."""

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from keylane import wire
from keylane.errors import Unavailable
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.snapshot import PartitionSnapshot, take_snapshot
from keylane_broker.store.keys import PartitionKeys
from keylane_broker.supervise.embedded_server import ask
from tests.support.peer import Peer
from tests.support.waiting import until

T = TypeVar("T")


async def owners(engine: Engine) -> dict[tuple[str, int], str]:
    """The worker that is to serve each partition, "" for none."""
    topics = (await engine.owners()).topics
    return {(topic, number): name for topic, names in topics.items() for number, name in enumerate(names)}


async def holders(engine: Engine) -> dict[tuple[str, int], str]:
    """The worker that holds the lease of each partition of each topic, "" for none."""
    places = [
        (topic, number)
        for topic, count in (await engine.partition_counts()).items()
        for number in range(count)
    ]
    if not places:
        return {}
    found = await engine.store.read_all([("GET", PartitionKeys.of(*place).lease) for place in places])
    return {place: (text or "").partition(" ")[0] for place, text in zip(places, found, strict=True)}


async def epochs(engine: Engine) -> dict[tuple[str, int], int]:
    """The newest epoch of each partition."""
    places = list(await holders(engine))
    if not places:
        return {}
    found = await engine.store.read_all(
        [("HGET", PartitionKeys.of(*place).meta, "epoch") for place in places]
    )
    return {place: int(epoch) for place, epoch in zip(places, found, strict=True)}


async def settled(engine: Engine, *workers: str) -> Counter[str]:
    """Wait until these workers hold all partitions as placed, evenly; answers how many each has."""

    async def even() -> Counter[str]:
        held = await holders(engine)
        counts = Counter(dict.fromkeys(workers, 0))
        counts.update(held.values())
        as_placed = held and held == await owners(engine) and counts.keys() == set(workers)
        return counts if as_placed and max(counts.values()) - min(counts.values()) <= 1 else Counter()

    return await until(even)


async def served(engine: Engine, topic: str, partition: int, worker: str) -> None:
    """Wait until a worker holds a partition."""

    async def has() -> bool:
        return (await holders(engine)).get((topic, partition)) == worker

    await until(has)


async def state_of(engine: Engine, topic: str, partition: int) -> PartitionSnapshot:
    """All that a partition holds but what its owner renews from time to time."""
    found = await take_snapshot(engine.store, topic, partition)
    found.lease_ms = 0
    found.meta.pop("clock", None)
    for subscription in found.subscriptions:
        subscription.consumers = dict.fromkeys(subscription.consumers, 0.0)
    return found


async def move(peer: Peer, topic: str, partition: int, worker: str) -> None:
    """Give a partition to a worker by hand."""
    await peer.answer(wire.MovePartition(topic, partition, worker))


async def once_reached(read: Callable[[], Awaitable[T]]) -> T:
    """What an engine reads after a failover: it was idle meanwhile and has to find the new master, too.

    A Sentinel on a busy machine may call a master that it has just promoted down for a moment.
    """

    async def reached() -> list[T]:
        with suppress(Unavailable):
            return [await read()]
        return []

    return (await until(reached))[0]


def slot_of(port: int, topic: str, partition: int) -> str:
    """The slot of a partition's keys, asked of a node of a cluster."""
    return ask(port, "CLUSTER", "KEYSLOT", PartitionKeys.of(topic, partition).meta)


def places_at(port: int, topic: str, partitions: int) -> set[tuple[str, int]]:
    """The partitions of a topic that a node of a cluster holds."""
    return {
        (topic, number)
        for number in range(partitions)
        if int(ask(port, "CLUSTER", "COUNTKEYSINSLOT", slot_of(port, topic, number)))
    }
