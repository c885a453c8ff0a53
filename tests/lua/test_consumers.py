"""Consumers' sessions: join, renew, leave, and what a consumer holds when it comes back."""

import asyncio

import pytest

from keylane.errors import Fenced, SubscriptionBusy, SubscriptionNotFound
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Backoff, Capacity, SubscriptionSettings
from tests.support.clock import ManualTime
from tests.support.story import HOUR_MS, Story, entries, must_acquire, part, receipts


async def test_joining_again_renews_the_session_and_says_so(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(consumers=())
    assert not await timed.engine.join(story.lease, "s", "c", session_ms=1_000)
    await timed.advance(900)
    assert await timed.engine.join(story.lease, "s", "c", session_ms=1_000)
    await timed.advance(900)
    assert (await timed.engine.expire(story.lease, "s")).expired_consumers == []


async def test_joining_under_the_name_of_a_session_that_ended_clears_it_first(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(consumers=())
    await timed.engine.join(story.lease, "s", "c", session_ms=1_000)
    await story.publish_many(2)
    old = receipts(await story.fetch())
    await timed.advance(1_000)
    assert not await timed.engine.join(story.lease, "s", "c")
    assert await story.ack(*old) == ["stale"]
    assert await story.retries() == {1: 1}
    assert await story.take() == [1, 2]


async def test_touch_renews_who_is_there_and_names_who_is_not(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(consumers=())
    for consumer, session_ms in (("short", 500), ("long", 1_000)):
        await timed.engine.join(story.lease, "s", consumer, session_ms)
    await timed.advance(500)
    missing = await timed.engine.renew_sessions(
        story.lease, "s", ["long", "short", "stranger"], session_ms=1_000
    )
    assert missing == ["short", "stranger"]
    await timed.advance(999)
    assert await timed.engine.renew_sessions(story.lease, "s", ["long"]) == []
    assert await timed.engine.renew_sessions(story.lease, "s", []) == []


async def test_a_graceful_leave_gives_everything_back_at_once_and_uncharged(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(consumers=("c", "d"), backoff=Backoff(60.0, jitter=0.0))
    await story.publish_many(4)
    held = [receipts(await story.fetch("c", permits=2))[0] for _ in range(2)]
    assert await engine.leave(story.lease, "s", "c") == 2
    assert await story.retries() == {}
    assert await story.ack(*held) == ["stale", "stale"]
    assert sorted(await story.take("d")) == [1, 2, 3, 4]
    assert (await engine.fetch(story.lease, "s", [Capacity("c", 1)])).unknown_consumers == ["c"]


async def test_a_graceful_leave_gives_lanes_to_others_in_order(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared", consumers=("c", "d"))
    await story.publish("a", "a", "b", "", "a")
    held = receipts(await story.fetch("c", permits=4))
    lane = next(receipt for receipt in held if receipt.lane == "=a")
    await story.ack(part(lane, 1))
    assert await engine.leave(story.lease, "s", "c") == 3
    assert await story.retries() == {}
    taken: dict[str, list[int]] = {}
    for delivery in await story.fetch("d"):
        taken.setdefault(delivery.receipt.lane, []).extend(entries([delivery]))
    assert taken == {"=a": [2, 5], "=b": [3], "": [4]}


async def test_a_leave_longer_than_one_step_charges_a_crash_only_once(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish_many(1_000)
    [receipt] = receipts(await story.fetch(permits=1_000))
    holes = [part(receipt, entry) for entry in range(2, 1_001, 2)]
    await story.ack(*holes)  # 500 runs of one message are left
    await story.publish_many(2)
    await story.fetch()
    assert await engine.leave(story.lease, "s", "c", crashed=True) == 501
    assert await story.retries() == {1: 1}


async def test_leaving_without_a_session_changes_nothing(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish_many(1)
    await story.fetch()
    assert await engine.leave(story.lease, "s", "stranger") == 0
    assert entries(await engine.list_leases(story.lease, "s", "c")) == [1]


async def test_a_consumer_that_comes_back_finds_what_it_holds(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="key_shared", consumers=("c", "d"))
    await story.publish("a", "", "b", "a")
    given = await story.fetch("c", lease_ms=5_000)
    await story.nack(next(receipt for receipt in receipts(given) if receipt.lane == "=b"))
    again = await story.fetch("c", lease_ms=5_000)
    await story.publish("d")
    await story.take("d")
    held = await timed.engine.list_leases(story.lease, "s", "c")
    assert sorted(entries(held)) == [1, 2, 3, 4]
    assert {delivery.consumer for delivery in held} == {"c"}
    assert {delivery.deadline_ms for delivery in held} == {timed.now_ms + 5_000}
    [back] = [delivery for delivery in held if delivery.receipt.lane == "=b"]
    assert back.receipt == again[0].receipt
    assert back.messages[0].retries == 1
    assert set(await story.ack(*receipts(held))) == {"settled"}


async def test_a_consumer_that_holds_more_than_one_step_finds_all_of_it(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish(*(f"key-{number}" for number in range(600)))
    await story.publish_many(100)
    await story.fetch(permits=1_000)
    held = await engine.list_leases(story.lease, "s", "c")
    assert sorted(set(entries(held))) == list(range(1, 701))


async def test_a_consumer_that_holds_nothing_finds_nothing(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    assert await engine.list_leases(story.lease, "s", "c") == []
    assert await engine.list_leases(story.lease, "s", "stranger") == []


async def test_consumers_need_a_subscription(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    for call in (
        lambda: engine.join(story.lease, "none", "c"),
        lambda: engine.renew_sessions(story.lease, "none", ["c"]),
        lambda: engine.leave(story.lease, "none", "c"),
        lambda: engine.list_leases(story.lease, "none", "c"),
    ):
        with pytest.raises(SubscriptionNotFound, match="'none'"):
            await call()


async def ends(story: Story, timed: ManualTime) -> dict[str, int]:
    """How long each session lasts from now, ms."""
    [scores] = await timed.engine.store.read_all([("ZRANGE", story.sub().consumers, "0", "-1", "WITHSCORES")])
    return {name: int(end) - timed.now_ms for name, end in zip(scores[::2], scores[1::2], strict=True)}


async def test_a_new_owner_spares_sessions_that_would_end_or_have_just_ended(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(consumers=())
    for consumer, session_ms in (("ended", 10), ("open", 1_000), ("long", 90_000)):
        await timed.engine.join(story.lease, "s", consumer, session_ms)
    await timed.advance(50)
    await timed.engine.prolong_sessions(story.lease, "s", 5_000)
    assert await ends(story, timed) == {"ended": 5_000, "open": 5_000, "long": 89_950}
    assert await timed.engine.join(story.lease, "s", "ended", 5_000)
    assert (await timed.engine.expire(story.lease, "s")).expired_consumers == []


async def test_a_new_owner_spares_nobody_who_had_gone_before_the_old_one_did(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(consumers=())
    for consumer in ("dead", "live"):
        await timed.engine.join(story.lease, "s", consumer, 3_000)
    await timed.advance(1_000)
    assert await timed.engine.renew_all_sessions(story.lease, "s", ["live"], 3_000) == []
    await timed.advance(500)
    await timed.engine.join(story.lease, "s", "new", 3_000)
    await timed.advance(500)  # and then the worker died
    await timed.engine.prolong_sessions(story.lease, "s", 3_000)
    assert await ends(story, timed) == {"dead": 1_000, "live": 3_000, "new": 3_000}


async def test_owners_in_a_row_do_not_keep_a_dead_consumer(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(consumers=())
    for consumer in ("dead", "live"):
        await timed.engine.join(story.lease, "s", consumer, 3_000)
    await timed.engine.prolong_sessions(story.lease, "s", 3_000)
    await timed.advance(1_000)
    assert await timed.engine.join(story.lease, "s", "live", 3_000)
    await timed.advance(1_000)
    await timed.engine.prolong_sessions(story.lease, "s", 3_000)
    assert await ends(story, timed) == {"dead": 1_000, "live": 3_000}


@pytest.mark.slow
async def test_more_consumers_than_one_call_renews_are_one_round(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    consumers = [f"c{number:04}" for number in range(1_100)]
    await story.subscribe(consumers=())
    for consumer in ("dead", *consumers):
        await timed.engine.join(story.lease, "s", consumer, 3_000)
    await timed.advance(1_000)
    assert await timed.engine.renew_all_sessions(story.lease, "s", [*consumers, "stranger"], 3_000) == [
        "stranger"
    ]
    await timed.advance(1_000)
    await timed.engine.prolong_sessions(story.lease, "s", 3_000)
    assert await ends(story, timed) == {"dead": 1_000, **dict.fromkeys(consumers, 3_000)}


@pytest.mark.parametrize("name", ["successor", "c"])
async def test_an_exclusive_subscription_takes_the_next_consumer_when_a_session_has_ended(
    timed: ManualTime, topic: str, name: str
) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="exclusive", consumers=())
    await engine.join(story.lease, "s", "c", 1_000)
    await story.publish("a", "b")
    await story.take("c")
    await timed.advance(999)
    if name != "c":
        with pytest.raises(SubscriptionBusy, match="'c'"):
            await engine.join(story.lease, "s", name, 1_000)
    await timed.advance(1)
    assert not await engine.join(story.lease, "s", name, 1_000)
    [delivery] = await story.fetch(name)
    assert [message.retries for message in delivery.messages] == [1, 0]
    assert await engine.renew_sessions(story.lease, "s", ["c"]) == ([] if name == "c" else ["c"])


async def test_a_new_owner_is_told_which_subscriptions_have_consumers(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("empty", consumers=())
    await story.subscribe("one", mode="failover")
    await story.subscribe("two", mode="key_shared", consumers=("c", "d"))
    await engine.create_subscription(topic, "spark", SubscriptionSettings("cursor"))
    await engine.claim(topic, "spark", "reader", 60_000)
    await engine.leave(story.lease, "two", "c")
    lease = await must_acquire(engine, topic)
    found = {lease.in_use[at : at + 3] for at in range(0, len(lease.in_use), 3)}
    assert found == {("one", "failover", "at_least_once"), ("two", "key_shared", "at_least_once")}


@pytest.mark.slow
async def test_many_sessions_are_spared_and_what_consumers_hold_stays_with_them(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    consumers = [f"c{number}" for number in range(1_250)]
    await story.subscribe(consumers=())
    for at in range(0, len(consumers), 500):  # fakeredis has a thousand connections
        some = consumers[at : at + 500]
        await asyncio.gather(*(engine.join(story.lease, "s", consumer, 60_000) for consumer in some))
    await story.publish_many(3)
    await engine.fetch(story.lease, "s", [Capacity("c7", 3)])
    lease = await must_acquire(engine, topic, worker="w1")
    await engine.prolong_sessions(lease, "s", HOUR_MS)
    key = story.keys.subscription("s").consumers
    end = await engine.time_ms() + HOUR_MS - 60_000
    assert await engine.store.command("ZCOUNT", key, end, "+inf") == len(consumers)
    assert entries(await engine.list_leases(lease, "s", "c7")) == [1, 2, 3]
    with pytest.raises(Fenced):
        await engine.prolong_sessions(story.lease, "s", HOUR_MS)
    with pytest.raises(SubscriptionNotFound):
        await engine.prolong_sessions(lease, "none", HOUR_MS)
