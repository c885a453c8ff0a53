"""Who holds a partition, and what is left of its ledgers, counted exactly."""

import random
from collections import Counter

import pytest

from keylane.errors import TopicNotFound
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Capacity, TopicSettings
from keylane_broker.inspect import counts as inspection
from keylane_broker.inspect.counts import Ledger, PartitionLedgers, ledgers
from tests.support.story import HOUR_MS, Story, must_acquire, part


async def look(story: Story) -> PartitionLedgers:
    """The ledgers of the story's partition."""
    [found] = await ledgers(story.engine.store, story.topic, [0])
    return found


async def in_log(story: Story) -> Counter[int]:
    """How many entries of each ledger there are, counted one by one."""
    log = await story.engine.store.command("XRANGE", story.keys.log, "-", "+")
    return Counter(int(id.partition("-")[0]) for id, _ in log)


async def assert_exact(story: Story) -> None:
    """Compare with the log."""
    found = (await look(story)).ledgers
    counted = await in_log(story)
    assert {ledger.ledger: ledger.entries for ledger in found if ledger.entries} == dict(counted)
    assert [ledger.ledger for ledger in found] == sorted(ledger.ledger for ledger in found)


async def next_ledger(story: Story) -> None:
    """Take the partition once more."""
    story.lease = await must_acquire(story.engine, story.topic)


async def test_a_partition_that_nobody_holds_has_neither_owner_nor_ledgers(
    engine: Engine, topic: str
) -> None:
    await engine.create_topic(topic, TopicSettings(partitions=120))
    lease = await must_acquire(engine, topic, 60, worker="w7")
    found = await ledgers(engine.store, topic, range(120))
    assert [item.partition for item in found] == list(range(120))
    assert found[0] == PartitionLedgers(0, "", 0, 0, [])
    held = found[60]
    assert (held.worker, held.epoch, held.ledgers) == ("w7", lease.epoch, [Ledger(lease.epoch, 1, 0)])
    assert 0 < held.left_ms <= HOUR_MS
    await engine.release(lease)
    [item] = await ledgers(engine.store, topic, [60])
    assert (item.worker, item.left_ms, item.epoch) == ("", 0, lease.epoch)
    with pytest.raises(TopicNotFound):
        await ledgers(engine.store, topic, [120])


async def test_ledgers_of_a_log_without_holes_are_counted_by_arithmetic(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    epochs = []
    for count in (30, 20, 7):
        await next_ledger(story)
        epochs.append(story.lease.epoch)
        await story.publish_many(count)
    one, two, three = epochs
    assert (await look(story)).ledgers == [Ledger(one, 1, 30), Ledger(two, 31, 20), Ledger(three, 51, 7)]
    [delivery] = await story.fetch(permits=40)
    await engine.ack(story.lease, "s", [delivery.receipt])
    assert (await look(story)).ledgers == [Ledger(one, 1, 0), Ledger(two, 31, 10), Ledger(three, 51, 7)]


async def test_ledgers_of_a_log_with_holes_are_counted_entry_by_entry(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "PAGE", 7)
    story = await Story.begin(engine, topic)
    await story.subscribe()
    for count in (30, 20, 7):
        await story.publish_many(count)
        await next_ledger(story)
    [delivery] = await story.fetch(permits=45)
    chance = random.Random(17)
    settled = sorted(chance.sample(range(2, 46), 30))
    for entry in settled:
        await engine.ack(story.lease, "s", [part(delivery.receipt, entry)])
        await assert_exact(story)
    await story.publish_many(3)
    await assert_exact(story)
    assert sum(ledger.entries for ledger in (await look(story)).ledgers) == 60 - 30
    await engine.ack(story.lease, "s", [part(delivery.receipt, 1)])
    await assert_exact(story)


async def test_a_subscription_that_is_behind_or_went_back_is_counted_too(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "PAGE", 5)
    story = await Story.begin(engine, topic)
    await story.subscribe("s", "key_shared")
    await story.publish(*(f"key-{number % 4}" for number in range(40)))
    await next_ledger(story)
    for delivery in await story.fetch(permits=25):
        if delivery.receipt.lane != "=key-1":
            await engine.ack(story.lease, "s", [delivery.receipt])
    await assert_exact(story)
    await engine.seek(topic, "s", "earliest")
    await assert_exact(story)
    await story.publish(*(f"key-{number % 4}" for number in range(9)))
    await engine.create_subscription(topic, "late", start=30)
    await assert_exact(story)
    result = await engine.fetch(story.lease, "s", [Capacity("c", 6)])
    await engine.ack(story.lease, "s", [delivery.receipt for delivery in result.deliveries[1:]])
    await assert_exact(story)
    await engine.delete_subscription(topic, "s")
    await assert_exact(story)
    await engine.delete_subscription(topic, "late")
    assert await in_log(story) == {}
    await assert_exact(story)
