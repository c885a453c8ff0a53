"""On a real cluster of three: partitions spread over the nodes, and every operation works on each."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from keylane.errors import DurabilityNotReached
from keylane.wire import pack_about
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Capacity, Lease, Outgoing, SubscriptionSettings, TopicSettings
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.store.keys import PartitionKeys
from tests.support.story import fetch_settled

PARTITIONS = 24
MODES = ("shared", "key_shared", "exclusive", "failover")


@pytest.fixture
async def engine(cluster_url: str) -> AsyncIterator[Engine]:
    """An engine on the cluster."""
    engine = Engine.connect(cluster_url.replace("redis://", "redis+cluster://"))
    yield engine
    await engine.close()


def node_of(engine: Engine, topic: str, partition: int) -> str:
    """The node that holds a partition, by all of its keys."""
    keys = PartitionKeys.of(topic, partition)
    names = {engine.store.redis.get_node_from_key(key).name for key in (*keys, *keys.subscription("s"))}
    assert len(names) == 1, "all keys of a partition are on one node"
    return str(names.pop())


async def test_the_partitions_of_a_topic_are_on_all_nodes_and_each_holds_its_own(
    engine: Engine, topic: str
) -> None:
    await engine.create_topic(topic, TopicSettings(partitions=PARTITIONS))
    holders = {partition: node_of(engine, topic, partition) for partition in range(PARTITIONS)}
    assert len(set(holders.values())) == 3
    for node in engine.store.redis.get_primaries():
        keys = await engine.store.redis.execute_command("KEYS", f"kl:{{{topic}:*", target_nodes=node)
        own = {partition for partition, name in holders.items() if name == node.name}
        assert set(keys) == {PartitionKeys.of(topic, partition).meta for partition in own}
    await engine.delete_topic(topic)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_every_operation_works_on_every_node(engine: Engine, topic: str, mode: str) -> None:
    await engine.create_topic(topic, TopicSettings(partitions=PARTITIONS))
    await engine.create_subscription(topic, "s", SubscriptionSettings(mode))
    partition_on = {node_of(engine, topic, partition): partition for partition in range(PARTITIONS)}
    assert len(partition_on) == 3
    leases = [await acquire(engine, topic, partition) for partition in partition_on.values()]
    for lease in leases:
        await walk_through(engine, lease)
    assert await engine.renew(leases, 60_000) == [True] * 3
    await engine.seek(topic, "s", datetime.now(UTC))
    assert await check_topic(engine, topic) == []
    await engine.delete_subscription(topic, "s")
    for lease in leases:
        assert await engine.release(lease)
    await engine.delete_topic(topic)
    assert await engine.store.keys_like(f"*{topic}*") == set()


async def acquire(engine: Engine, topic: str, partition: int) -> Lease:
    """Take a partition that is free."""
    lease = await engine.acquire(topic, partition, "w1", 60_000)
    assert lease is not None
    return lease


async def walk_through(engine: Engine, lease: Lease) -> None:
    """Each operation that a worker uses, on one partition."""
    messages = [Outgoing(key, f"uid-{index}", pack_about(1)) for index, key in enumerate("abcabc")]
    assert (await engine.publish(lease, messages)).stored == 6
    assert len((await engine.publish(lease, messages)).duplicates) == 6
    await engine.join(lease, "s", "c")
    await engine.renew_sessions(lease, "s", ["c"])
    fetched = await engine.fetch(lease, "s", [Capacity("c", 4)])
    given = [delivery.receipt for delivery in fetched.deliveries]
    assert sum(len(delivery.messages) for delivery in fetched.deliveries) == 4
    held = await engine.list_leases(lease, "s", "c")
    assert sorted(item.id for delivery in held for item in delivery.messages) == sorted(
        item.id for delivery in fetched.deliveries for item in delivery.messages
    )
    assert (await engine.extend(lease, "s", given, lease_ms=60_000)).stale == []
    assert (await engine.ack(lease, "s", given[:1])).stale == []
    if given[1:]:
        assert (await engine.nack(lease, "s", given[1:], delay_ms=0)).stale == []
    await engine.expire(lease, "s")
    await engine.leave(lease, "s", "c")
    await engine.seek(lease.topic, "s", 5, partition=lease.partition)
    await engine.join(lease, "s", "c")
    left = await fetch_settled(engine, lease, "s", [Capacity("c", 10)])
    assert sorted(item.entry for delivery in left.deliveries for item in delivery.messages) == [5, 6]


async def test_a_wait_for_replicas_is_about_the_node_that_holds_the_partition(
    engine: Engine, topic: str
) -> None:
    await engine.create_topic(topic, TopicSettings(partitions=PARTITIONS))
    await engine.create_subscription(topic, "s")
    for partition in {
        node_of(engine, topic, partition): partition for partition in range(PARTITIONS)
    }.values():
        lease = await acquire(engine, topic, partition)
        batch = [Outgoing("a", "u", pack_about(1))]
        with pytest.raises(DurabilityNotReached, match="0 are") as caught:  # these nodes have no replicas
            await engine.publish(lease, batch, durability="replicated", timeout_ms=20)
        assert not caught.value.stored
        assert not (await engine.publish(lease, batch)).duplicates
    await engine.delete_topic(topic)
