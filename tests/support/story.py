"""Short words for what the script tests do all the time, on one partition served by one worker."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import count

import msgspec

from keylane.wire import pack_about
from keylane_broker.engine.bodies import read_body_records, remove_body_records
from keylane_broker.engine.codec import retry_count
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import (
    Backoff,
    Capacity,
    Delivery,
    FetchResult,
    Lease,
    Outgoing,
    PublishResult,
    Receipt,
    SubscriptionSettings,
    TopicSettings,
)
from keylane_broker.store.keys import PartitionKeys, SubscriptionKeys, records_key

HOUR_MS = 3_600_000
_numbers = count(1)


def message(key: str = "", uid: str = "") -> Outgoing:
    """A message, with a uid of its own unless one is given."""
    return Outgoing(key, uid or f"uid-{next(_numbers)}", pack_about(1))


def entries(deliveries: Iterable[Delivery]) -> list[int]:
    """The numbers of all delivered entries, in the order of delivery."""
    return [message.entry for delivery in deliveries for message in delivery.messages]


def receipts(deliveries: Iterable[Delivery]) -> list[Receipt]:
    """The receipts of deliveries."""
    return [delivery.receipt for delivery in deliveries]


def part(receipt: Receipt, first: int, last: int | None = None) -> Receipt:
    """The receipt for a part of what it covers."""
    return receipt._replace(first=first, last=last or first)


class Story:
    """A topic whose partition 0 is held by worker w1."""

    def __init__(self, engine: Engine, lease: Lease) -> None:
        self.engine = engine
        self.lease = lease
        self.topic = lease.topic
        self.keys = PartitionKeys.of(lease.topic, lease.partition)

    @classmethod
    async def begin(cls, engine: Engine, topic: str, settings: TopicSettings | None = None) -> "Story":
        """Make the topic and take the partition."""
        await engine.create_topic(topic, settings)
        return cls(engine, await must_acquire(engine, topic))

    async def subscribe(
        self,
        name: str = "s",
        mode: str = "shared",
        *,
        consumers: Sequence[str] = ("c",),
        start: str | int | datetime = "latest",
        backoff: Backoff | None = None,
        max_retries: int | None = None,
        poison: str = "skip",
    ) -> None:
        """Make a subscription, with consumers that stay for an hour."""
        settings = SubscriptionSettings(mode, backoff=backoff, max_retries=max_retries, poison=poison)
        await self.engine.create_subscription(self.topic, name, settings, start=start)
        for consumer in consumers:
            await self.engine.join(self.lease, name, consumer, HOUR_MS)

    async def publish(self, *keys: str) -> PublishResult:
        """Publish one message for each key."""
        return await self.engine.publish(self.lease, [message(key) for key in keys])

    async def publish_many(self, n: int) -> PublishResult:
        """Publish messages without a key."""
        return await self.publish(*[""] * n)

    async def fetch(
        self, consumer: str = "c", permits: int = 100, *, name: str = "s", lease_ms: int = 30_000
    ) -> list[Delivery]:
        """What one consumer gets."""
        result = await self.engine.fetch(self.lease, name, [Capacity(consumer, permits, lease_ms)])
        return result.deliveries

    async def take(self, consumer: str = "c", permits: int = 100, *, name: str = "s") -> list[int]:
        """The entries that one consumer gets."""
        return entries(await self.fetch(consumer, permits, name=name))

    async def ack(self, *given: Receipt, name: str = "s") -> list[str]:
        """Settle; answers an outcome for each receipt."""
        return (await self.engine.ack(self.lease, name, given)).outcomes(len(given))

    async def nack(self, *given: Receipt, delay_ms: int | None = 0, name: str = "s") -> list[str]:
        """Give back, by default at once; answers an outcome for each receipt."""
        result = await self.engine.nack(self.lease, name, given, delay_ms=delay_ms)
        return result.outcomes(len(given))

    async def take_names(self) -> list[str]:
        """The names of the bodies that were written down to be deleted since the last call."""
        place = (self.topic, self.lease.partition)
        [found] = await read_body_records(self.engine.store, [place], 1_000)
        if found:
            await remove_body_records(self.engine.store, place, [record.id for record in found])
        return [name for record in found for name in record.names]

    async def log(self) -> list[int]:
        """The entries that are in the partition's log."""
        found = await self.engine.store.entries(self.keys.log, [("-", "+")])
        return [int(id.partition("-")[2]) for id, _ in found[0]]

    def sub(self, name: str = "s") -> SubscriptionKeys:
        """The keys of a subscription."""
        return self.keys.subscription(name)

    def id(self, entry: int) -> str:
        """The id of an entry that was published under the lease."""
        return f"{self.lease.epoch}-{entry}"

    async def drop(self, name: str = "s", *, keep_record: bool = False) -> None:
        """Delete a subscription in this partition, and let nobody sweep what only it was owed."""
        topic = await self.engine.describe_topic(self.topic)
        sub = await self.engine.describe_subscription(self.topic, name)
        numbers = [str(topic.incarnation), str(sub.incarnation)]
        answer = await self.engine.store.run("subscription/delete", self.sub(name), "", name, *numbers)
        assert answer[0] == "OK"
        if not keep_record:
            await self.engine.store.command("HDEL", records_key(self.topic), name)

    async def retries(self, name: str = "s") -> dict[int, int]:
        """How often each entry was charged."""
        stored = await self.engine.store.command("HGETALL", self.sub(name).retries)
        return {int(entry): retry_count(times) for entry, times in stored.items()}

    async def exists(self, *keys: str) -> bool:
        """Whether any of the keys is there."""
        answers = [await self.engine.store.command("EXISTS", key) for key in keys]
        return any(answers)


async def must_acquire(
    engine: Engine, topic: str, partition: int = 0, worker: str = "w1", known_epoch: int = 0
) -> Lease:
    """Take a partition that is free."""
    lease = await engine.acquire(topic, partition, worker, HOUR_MS, known_epoch)
    assert lease is not None
    return lease


async def fetch_settled(
    engine: Engine, lease: Lease, subscription: str, consumers: Sequence[Capacity]
) -> FetchResult:
    """Fetch, and settle before anybody sees the messages, as a worker does at most once."""
    result = await engine.fetch(lease, subscription, consumers)
    given = receipts(result.deliveries)
    if not given:
        return result
    outcomes = (await engine.ack(lease, subscription, given)).outcomes(len(given))
    kept = [
        delivery
        for delivery, outcome in zip(result.deliveries, outcomes, strict=True)
        if outcome == "settled"
    ]
    return msgspec.structs.replace(result, deliveries=kept)
