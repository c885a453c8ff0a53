"""Expiry: deadlines and sessions that end, and what they cost."""

from broker.engine import Engine
from broker.results import Room
from tests.lua.story import HOUR_MS, Story, receipts
from tests.support import ManualTime


async def test_nothing_expires_before_its_deadline_and_the_answer_names_it(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    await story.publish_many(2)
    await story.fetch(lease_ms=1_000)
    due = timed.now_ms + 1_000
    await timed.advance(999)
    result = await timed.engine.expire(story.lease, "s")
    assert (result.released, result.next_due_ms, result.expired_consumers) == (0, due, [])
    await timed.advance(1)
    assert (await timed.engine.expire(story.lease, "s")).released == 1


async def test_a_timeout_charges_every_message_of_a_run_and_its_receipt_is_stale(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    await story.publish_many(2)
    [receipt] = receipts(await story.fetch(lease_ms=1_000))
    await timed.advance(1_000)
    await timed.engine.expire(story.lease, "s")
    assert await story.retries() == {1: 1, 2: 1}
    assert await story.ack(receipt) == ["stale"]
    assert await story.take() == [1, 2]


async def test_with_nobody_there_nothing_is_due(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(consumers=())
    result = await engine.expire(story.lease, "s")
    assert (result.released, result.next_due_ms, result.expired_consumers) == (0, 0, [])


async def test_a_crashed_consumer_s_messages_return_when_its_session_ends_and_only_the_oldest_is_charged(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(consumers=("d",))
    await timed.engine.join(story.lease, "s", "c", session_ms=2_000)
    await story.publish_many(2)
    for _ in range(2):
        await story.take("c", permits=1)
    await timed.advance(2_000)
    result = await timed.engine.expire(story.lease, "s")
    assert (result.released, result.expired_consumers) == (2, ["c"])
    assert result.next_due_ms == 1_000_000 + HOUR_MS  # the session of d
    assert await story.retries() == {1: 1}
    assert sorted(await story.take("d")) == [1, 2]


async def test_a_crash_charges_the_head_of_each_lane_of_a_key(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="key_shared", consumers=("d",))
    await timed.engine.join(story.lease, "s", "c", session_ms=2_000)
    await story.publish("a", "b", "a", "", "", "b")
    await story.take("c")
    await timed.advance(2_000)
    assert (await timed.engine.expire(story.lease, "s")).released == 3
    assert await story.retries() == {1: 1, 2: 1, 4: 1}


async def test_more_late_lanes_than_one_step_are_all_released(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="key_shared")
    await timed.engine.join(story.lease, "s", "brief", session_ms=500)
    for start in (0, 1_000):
        await story.publish(*(f"key-{start + number}" for number in range(1_000)))
        await timed.engine.fetch(story.lease, "s", [Room("c", 1_000, lease_ms=500)])
    await timed.advance(500)
    result = await timed.engine.expire(story.lease, "s")
    assert (result.released, result.expired_consumers) == (2_000, ["brief"])
    assert len(await story.retries()) == 2_000
