"""What has arrived in a topic: every message, read through a subscription that was there before."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import anyio

from keylane import Client, SyncMessage
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.store.store import Store
from tests.support.running import RunningBroker

SUBSCRIPTION = "inbox"


class Arrived(NamedTuple):
    """A message as it was delivered."""

    key: str | None
    data: bytes
    attributes: dict[str, str]
    partition: int
    entry: int
    uid: str


def make_topic(client: Client, topic: str, *, partitions: int = 4, dedupe_window: float = 7_200.0) -> str:
    """A topic with a subscription that is owed everything."""
    client.create_topic(topic, partitions=partitions, dedupe_window=dedupe_window)
    client.create_subscription(topic, SUBSCRIPTION)
    return topic


def arrivals(client: Client, topic: str) -> list[Arrived]:
    """All messages that were ever published to a topic of make_topic, in the order of their partitions."""
    count = client.describe_topic(topic).published
    found: list[Arrived] = []
    if count:
        with client.subscribe(topic, SUBSCRIPTION, permits=10_000) as consumer:
            for messages in consumer.batches():
                found += [_arrived(message) for message in messages]
                consumer.ack(messages)
                if len(found) >= count:
                    break
    assert client.describe_topic(topic).published == count, "nothing came after it was counted"
    return sorted(found, key=lambda one: (one.partition, one.entry))


def problems_of(broker: RunningBroker, topic: str) -> list[str]:
    """What the keyspace checker finds wrong with a topic."""

    async def check() -> list[str]:
        store = Store.connect(broker.redis_url)
        try:
            return await check_topic(Engine(store), topic)
        finally:
            await store.close()

    return anyio.run(check)


def by_key(messages: Iterable[Arrived]) -> dict[str | None, list[bytes]]:
    """The bodies of each key, in the order of the topic."""
    lanes = defaultdict(list)
    for message in messages:
        lanes[message.key].append(message.data)
    return dict(lanes)


def _arrived(message: SyncMessage) -> Arrived:
    entry = int(message.id.rpartition("-")[2])
    return Arrived(message.key, message.data(), message.attributes, message.partition, entry, message.uid)
