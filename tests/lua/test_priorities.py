"""Priorities: of what waits in mode shared, larger goes first; elsewhere they change nothing."""

import pytest

from keylane.errors import InvalidArgument
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.filters import Filter
from keylane_broker.engine.values import Capacity, SubscriptionSettings, TopicSettings
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.limits import FOREVER
from tests.support.clock import ManualTime
from tests.support.story import Story, entries, message, part, receipts
from tests.support.turns import ack_whole


async def publish(story: Story, *priorities: int, key: str = "") -> None:
    """Publish messages with these priorities; without one where that is 0."""
    extras = {place: (0, priority) for place, priority in enumerate(priorities) if priority}
    await story.engine.publish(story.lease, [message(key) for _ in priorities], extras=extras)


async def one_by_one(story: Story, count: int, name: str = "s") -> list[int]:
    """The entries that somebody gets who asks for one at a time."""
    return [entry for _ in range(count) for entry in await story.take(permits=1, name=name)]


async def test_larger_goes_first_and_equals_in_the_order_of_their_publish(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await publish(story, 0, 3, 0, 9, 3, 0, 1)
    assert await one_by_one(story, 5) == [4, 2, 5, 7, 1]
    await publish(story, 5)
    assert await one_by_one(story, 3) == [8, 3, 6]
    assert await story.take() == []


async def test_what_lay_between_them_comes_before_what_is_newer_also_when_they_are_gone(
    timed: ManualTime, topic: str
) -> None:
    """Each message is acked before the next one is asked for."""
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    for first in (1, 10):
        await publish(story, 0, 0, 9, 0, 5, 0, 0, 0, 0)
        found = []
        for _ in range(9):
            await timed.advance(1)
            one = await story.fetch(permits=1)
            found += entries(one)
            await story.ack(*receipts(one))
        assert found == [first + place for place in (2, 4, 0, 1, 3, 5, 6, 7, 8)]
    assert await story.take() == []
    assert await timed.engine.store.command("HGET", story.sub().sub, "aside") is None


async def test_all_of_them_come_and_nothing_is_left_behind(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(consumers=("c", "d"))
    await publish(story, *[number % 10 for number in range(600)])
    assert await story.exists(story.keys.priority)
    found: list[int] = []
    while True:
        result = await engine.fetch(story.lease, "s", [Capacity("c", 70), Capacity("d", 50)])
        if not result.deliveries and not result.more:
            break
        found += entries(result.deliveries)
        if result.deliveries:
            await story.ack(*receipts(result.deliveries))
    assert sorted(found) == list(range(1, 601))
    assert not await story.exists(story.keys.priority, story.sub().lanes, story.sub().ready)
    assert await engine.store.command("HGET", story.keys.meta, "priorities") is None


async def test_the_largest_comes_first_however_many_others_have_one(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await publish(story, *[1] * 450, 9, 0)
    calls, found = 0, list[int]()
    while not found:
        calls, found = calls + 1, await story.take(permits=1)
    assert (calls, found) == (3, [451])
    assert await one_by_one(story, 2) == [1, 2]


@pytest.mark.parametrize("mode", ["key_shared", "exclusive", "failover"])
async def test_where_order_is_promised_it_is_kept(engine: Engine, topic: str, mode: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=mode)
    await publish(story, 0, 9, 5, key="k")
    assert await one_by_one(story, 3) == [1, 2, 3]


async def test_what_comes_back_waits_like_any_other(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    await publish(story, 0, 9)
    [urgent] = receipts(await story.fetch(permits=1))
    await story.nack(urgent, delay_ms=1_000)
    assert await one_by_one(story, 1) == [1]
    await timed.advance(1_000)
    await publish(story, 1)
    assert await one_by_one(story, 2) == [3, 2]


async def test_what_was_skipped_or_deleted_is_passed(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await publish(story, 0, 2, 9, 9, 0, 5)
    await engine.skip(topic, "s", f"0:{story.id(3)}")
    await engine.delete_message(topic, f"0:{story.id(4)}")
    assert await one_by_one(story, 4) == [6, 2, 1, 5]
    assert await story.take() == []
    assert await check_topic(engine, topic) == []


async def test_each_subscription_sees_them_for_itself_also_again(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, TopicSettings(retention_ms=FOREVER))
    await story.subscribe()
    await story.subscribe("t")
    await publish(story, 0, 5, 0)
    assert await one_by_one(story, 3) == [2, 1, 3]
    assert await one_by_one(story, 3, "t") == [2, 1, 3]
    await engine.seek(topic, "s", "earliest")
    assert await one_by_one(story, 3) == [2, 1, 3]


async def test_with_a_filter_the_larger_of_those_that_match_goes_first(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("all")
    await engine.create_subscription(topic, "s", SubscriptionSettings(filter=Filter(keys="a")))
    await engine.join(story.lease, "s", "c", 60_000)
    for key in "ab":
        await publish(story, 0, 2, 7, key=key)
    assert await one_by_one(story, 3) == [3, 2, 1]
    await publish(story, 0, 1, key="a")
    assert await one_by_one(story, 2) == [8, 7]
    assert await story.take() == []


async def test_a_delayed_message_has_its_priority_when_it_is_due(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await engine.delay(story.lease, [message()], [timed.now_ms + 1_000], extras={0: (0, 4)})
    await publish(story, 0, 3)
    await timed.advance(1_000)
    await engine.promote(story.lease)
    assert await one_by_one(story, 3) == [3, 2, 1]


async def test_the_fast_path_steps_aside_while_there_are_any(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await publish(story, 1)
    [held] = await story.fetch()
    assert not await ack_whole(engine, story.lease, "s", receipts([held]))
    await story.ack(part(held.receipt, 1))
    await story.publish("")
    [held] = await story.fetch()
    assert await ack_whole(engine, story.lease, "s", receipts([held]))


async def test_ten_is_too_much(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    with pytest.raises(InvalidArgument, match="priority"):
        await publish(story, 10)
