"""Exclusive and failover: the whole partition is one lane with one consumer."""

import pytest

from keylane.errors import SubscriptionBusy
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Capacity
from tests.support.clock import ManualTime
from tests.support.story import Story, entries, part, receipts


async def test_an_exclusive_subscription_has_one_consumer(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="exclusive")
    with pytest.raises(SubscriptionBusy, match="'c'"):
        await engine.join(story.lease, "s", "d")
    assert await engine.join(story.lease, "s", "c")
    await engine.leave(story.lease, "s", "c")
    assert not await engine.join(story.lease, "s", "d")


@pytest.mark.parametrize("mode", ["exclusive", "failover"])
async def test_the_partition_s_order_is_kept_across_keys(engine: Engine, topic: str, mode: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=mode)
    await story.publish("a", "b", "", "a")
    assert [delivery.receipt.lane for delivery in await story.fetch(permits=2)] == ["="]
    [delivery] = await story.fetch()
    assert entries([delivery]) == [3, 4]


@pytest.mark.parametrize("mode", ["exclusive", "failover"])
async def test_nack_rewinds_the_partition(engine: Engine, topic: str, mode: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=mode)
    await story.publish("a", "b", "c", "d")
    [delivery] = await story.fetch(permits=3)
    assert await story.ack(part(delivery.receipt, 1)) == ["settled"]
    assert await story.nack(part(delivery.receipt, 2)) == ["settled"]
    assert await story.ack(part(delivery.receipt, 3)) == ["stale"]
    assert await story.retries() == {2: 1}
    assert await story.take() == [2, 3, 4]


async def test_a_delayed_nack_holds_the_whole_partition(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="exclusive")
    await story.publish("a", "b")
    [delivery] = await story.fetch()
    await story.nack(delivery.receipt, delay_ms=100)
    await story.publish("c")
    assert await story.take() == []
    await timed.advance(100)
    assert await story.take() == [1, 2, 3]


async def test_only_the_active_consumer_of_a_failover_subscription_is_served(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="failover", consumers=("c", "d"))
    await story.publish("a", "b")
    rooms = [Capacity("c", 1), Capacity("d", 100)]
    result = await engine.fetch(story.lease, "s", rooms)
    assert [delivery.consumer for delivery in result.deliveries] == ["c"]
    assert await story.take("d") == []
    assert await story.take("c") == [2]


async def test_when_the_active_consumer_leaves_the_next_one_goes_on_in_order(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="failover", consumers=("c", "d"))
    await story.publish("a", "b", "c")
    [delivery] = await story.fetch("c", permits=2)
    await story.ack(part(delivery.receipt, 1))
    assert await engine.leave(story.lease, "s", "c") == 1
    assert await story.retries() == {}
    assert await story.take("d") == [2, 3]


async def test_when_the_active_consumer_s_session_ends_the_next_one_takes_over(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="failover", consumers=("d",))
    await timed.engine.join(story.lease, "s", "c", session_ms=1_000)
    await story.publish("a", "b")
    assert await story.take("c") == [1, 2]
    await timed.advance(1_000)
    result = await timed.engine.expire(story.lease, "s")
    assert (result.released, result.expired_consumers) == (1, ["c"])
    assert await story.retries() == {1: 1}  # only the head: the rest was probably never looked at
    assert await story.take("d") == [1, 2]


async def test_a_subscription_in_order_lets_others_forget_only_what_it_has_settled(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("ordered", "failover")
    await story.subscribe("s")
    await story.publish("a", "b", "c", "d")
    ordered = receipts(await story.fetch(name="ordered", permits=3))
    given = receipts(await story.fetch(name="s"))
    await story.ack(part(ordered[0], 1), name="ordered")
    await story.nack(part(ordered[0], 3), name="ordered")
    result = await engine.ack(story.lease, "s", given)
    assert result.forgotten == [(1, 1)]  # 2 is leased there, 3 waits there, 4 is still ahead of it
    assert await story.log() == [2, 3, 4]
