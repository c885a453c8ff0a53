"""Expiry: deadlines and sessions that end, and what they cost."""

from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Backoff, Capacity, ExpireResult
from tests.support.clock import ManualTime
from tests.support.story import HOUR_MS, Story, part, receipts


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


async def test_a_timeout_charges_the_oldest_message_alone_and_the_receipt_is_stale(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    await story.publish_many(1_000)
    [receipt] = receipts(await story.fetch(permits=1_000, lease_ms=1_000))
    await timed.advance(1_000)
    await timed.engine.expire(story.lease, "s")
    assert await story.retries() == {1: 1}
    assert await story.ack(receipt) == ["stale"]
    assert len(await story.take(permits=1_000)) == 1_000


async def test_the_one_that_is_charged_waits_for_the_backoff_and_the_rest_comes_at_once(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(backoff=Backoff(5.0, jitter=0.0))
    await story.publish_many(3)
    await story.fetch(lease_ms=1_000)
    await timed.advance(1_000)
    await timed.engine.expire(story.lease, "s")
    assert await story.take() == [2, 3]
    await timed.advance(5_000)
    assert await story.take() == [1]


async def test_what_was_leased_before_a_charge_times_out_uncharged_and_what_came_after_counts_anew(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(consumers=("c", "d"))
    await story.publish_many(8)
    await story.fetch(permits=2, lease_ms=1_000)
    await story.fetch(permits=2, lease_ms=2_000)
    await story.fetch("d", permits=2, lease_ms=2_000)
    await timed.advance(1_000)
    await timed.engine.expire(story.lease, "s")
    assert await story.retries() == {1: 1}
    await story.fetch(permits=2, lease_ms=2_000)  # 1 and 2 again
    await story.fetch(permits=2, lease_ms=2_000)  # 7 and 8
    await timed.advance(1_000)
    await timed.engine.expire(story.lease, "s")
    assert await story.retries() == {1: 1, 5: 1}  # 3 and 4 had been leased by then; 5 and 6 to another one
    await timed.advance(1_000)
    await timed.engine.expire(story.lease, "s")
    assert await story.retries() == {1: 2, 5: 1}  # of 1, 2, 7 and 8 the oldest


async def test_a_charge_is_remembered_no_longer_than_the_session(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    await story.publish_many(1)
    await story.fetch(lease_ms=1_000)
    await timed.advance(1_000)
    await timed.engine.expire(story.lease, "s")
    assert await story.exists(story.sub().charged)
    await timed.engine.leave(story.lease, "s", "c")
    assert not await story.exists(story.sub().charged)


async def test_the_oldest_of_more_late_runs_than_one_step_is_charged(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    for count in (1_000, 300):
        await story.publish_many(count)
    [run] = await story.fetch(permits=1_000, lease_ms=900)
    await story.ack(*(part(run.receipt, entry) for entry in range(1, 1_000, 2)))
    [last] = await story.fetch(permits=300, lease_ms=800)
    await story.ack(*(part(last.receipt, entry) for entry in range(1_001, 1_300, 2)))
    await timed.advance(900)  # by their deadlines the youngest come first
    assert (await timed.engine.expire(story.lease, "s")).released == 650
    assert await story.retries() == {2: 1}


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
        await timed.engine.fetch(story.lease, "s", [Capacity("c", 1_000, lease_ms=500)])
    await timed.advance(500)
    result = await timed.engine.expire(story.lease, "s")
    assert (result.released, result.expired_consumers) == (2_000, ["brief"])
    assert len(await story.retries()) == 2_000


async def test_a_timeout_of_lanes_of_keys_charges_the_head_of_each(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish("a", "b", "a", "", "", "b")
    await story.fetch(lease_ms=1_000)
    await timed.advance(1_000)
    assert (await timed.engine.expire(story.lease, "s")).released == 3
    assert await story.retries() == {1: 1, 2: 1, 4: 1}


async def test_a_crash_of_many_consumers_goes_step_by_step_and_nobody_waits_for_all_of_it(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="key_shared", consumers=("d",))
    for number in range(60):
        await timed.engine.join(story.lease, "s", f"c{number}", session_ms=1_000)
        await story.publish(*(f"key-{number}-{key}" for key in range(20)))
        assert len(await story.take(f"c{number}", permits=20)) == 20
    await timed.advance(1_000)
    steps: list[ExpireResult] = []
    while not steps or steps[-1].more:
        steps.append(await timed.engine.expire_some(story.lease, "s"))
        assert await story.take("d", permits=10)  # somebody else is served in between
    assert len(steps) > 2
    assert sum(step.released for step in steps) == 1_200
    assert len(await story.retries()) == 1_200
