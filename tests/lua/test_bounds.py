"""Nothing waits longer than it must, and no script works longer than it may."""

from broker.engine import Engine
from broker.results import Room
from tests.lua.story import Story, entries, receipts
from tests.support import ManualTime


async def test_a_stuck_key_delays_no_other_even_for_a_consumer_with_one_permit(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish("stuck")
    await story.nack(*receipts(await story.fetch()), delay_ms=600_000)
    await story.publish(*["stuck"] * 300, "other")
    fetched = await engine.fetch(story.lease, "s", [Room("c", 1)])
    assert entries(fetched.deliveries) == [302]


async def test_parking_takes_no_room_from_lanes_that_are_ready(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish("stuck", "ready")
    stuck, ready = await story.fetch()
    await story.nack(stuck.receipt, delay_ms=600_000)
    await story.nack(ready.receipt, delay_ms=1_000)
    for _ in range(3):
        await story.publish(*["stuck"] * 1_000)
    await timed.advance(1_000)
    fetched = [await story.take(permits=10) for _ in range(2)]
    assert [2] in fetched


async def test_a_log_full_of_holes_is_read_in_one_go(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("first", mode="shared")
    await story.publish_many(200)
    [delivery] = await story.fetch(permits=200, name="first")
    odd = [delivery.receipt._replace(first=entry, last=entry) for entry in range(1, 200, 2)]
    await story.ack(*odd, name="first")
    for name, mode in (("runs", "shared"), ("lane", "exclusive"), ("keys", "key_shared")):
        await story.subscribe(name, mode, start="earliest")
        fetched = await engine.fetch(story.lease, name, [Room("c", 60)])
        assert entries(fetched.deliveries) == list(range(2, 121, 2)), mode
        fetched = await engine.fetch(story.lease, name, [Room("c", 60)])
        assert entries(fetched.deliveries) == list(range(122, 201, 2)), mode
        assert await engine.store.command("HGET", story.keys.subs, name) == "200"


async def test_expire_and_leave_go_step_by_step_and_reach_the_end(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="shared")
    for _ in range(3):
        await story.publish_many(400)
        await story.fetch(permits=400, lease_ms=1_000)
    await timed.advance(1_000)
    assert (await engine.expire(story.lease, "s")).released == 3
    assert (
        sum(len(d.messages) for d in (await engine.fetch(story.lease, "s", [Room("c", 1_000)])).deliveries)
        == 1_000
    )
    assert await engine.leave(story.lease, "s", "c") >= 3
    assert await story.exists(story.sub().deadlines, story.sub().consumers) is False


async def test_a_crash_charges_only_the_oldest_however_late_it_is_noticed(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="shared", consumers=())
    await timed.engine.join(story.lease, "s", "c", session_ms=10_000)
    await story.publish_many(20)
    await story.fetch(permits=20, lease_ms=30_000)
    await timed.advance(60_000)  # the session ended, and then the deadline passed
    assert (await timed.engine.expire(story.lease, "s")).expired_consumers == ["c"]
    assert await story.retries() == {1: 1}


async def test_clearing_an_old_session_leaves_the_new_one_alone(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="shared", consumers=())
    await engine.join(story.lease, "s", "c", session_ms=10_000)
    await story.publish_many(5)
    await timed.advance(10_000)
    # Two workers' tasks notice the end; one clears it and the consumer comes back before the other does.
    await engine.join(story.lease, "s", "c", session_ms=10_000)
    assert await story.take() == [1, 2, 3, 4, 5]
    answer = await engine.store.run(
        "subscription/leave", story.sub(), story.lease.text, "s", "c", "ended", 500, "", "", ""
    )
    assert answer[:3] == ["OK", 1, 0]
    assert len(await engine.held(story.lease, "s", "c")) == 1


async def test_tokens_grow_over_a_failover_that_lost_the_newest(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="shared")
    await story.publish_many(2)
    before = await timed.engine.store.command("HGET", story.sub().sub, "token")
    [lost] = await story.fetch(permits=1)
    await timed.engine.seek(topic, "s", "earliest")  # the replica knew neither the lease nor the token
    await timed.engine.store.command("HSET", story.sub().sub, "token", before)
    await timed.advance(5)
    [again] = await story.fetch(permits=1)
    assert again.receipt.token > lost.receipt.token
    assert await story.ack(lost.receipt) == ["stale"]


async def test_an_ack_looks_once_at_what_another_subscription_holds(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("s", mode="shared")
    await story.subscribe("one", mode="exclusive")
    await story.publish_many(200)
    held = [delivery for _ in range(200) for delivery in await story.fetch(permits=1, name="one")]
    await story.ack(*receipts(held[::2]), name="one")
    await story.ack(*receipts(await story.fetch(permits=200)))
    assert await story.log() == list(range(2, 201, 2))
    await story.nack(held[1].receipt, name="one")
    await story.ack(*receipts(await story.fetch(permits=200, name="one")), name="one")
    assert await story.log() == []


async def test_a_leave_cut_short_by_its_limit_does_not_end_a_session_opened_meanwhile(
    timed: ManualTime, topic: str
) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="shared")
    for _ in range(3):
        await story.publish_many(400)
        await story.fetch(permits=400)
    step = [story.sub(), story.lease.text, "s", "c", "left", 500]
    first = await engine.store.run("subscription/leave", *step, "", "", "")  # type: ignore[arg-type]
    assert first[:3] == ["OK", 0, 2]
    await engine.join(story.lease, "s", "c", session_ms=60_000)
    assert len(await story.take(permits=10)) == 10
    second = await engine.store.run("subscription/leave", *step, *first[3:])  # type: ignore[arg-type]
    assert second[:3] == ["OK", 1, 0]
    assert await engine.touch(story.lease, "s", ["c"]) == []


async def test_a_leave_left_unfinished_is_due_at_once(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="failover", consumers=("a", "b"))
    await story.publish_many(5)
    assert await story.take("a") == [1, 2, 3, 4, 5]
    step = [story.sub(), story.lease.text, "s", "a", "left", 500, "", "", ""]
    assert (await engine.store.run("subscription/leave", *step))[1] == 0  # type: ignore[arg-type]
    fetched = await engine.fetch(story.lease, "s", [Room("b", 10)])  # the worker died in between
    assert (fetched.deliveries, fetched.next_due_ms) == ([], timed.now_ms)
    await engine.expire(story.lease, "s")
    assert await story.take("b") == [1, 2, 3, 4, 5]
