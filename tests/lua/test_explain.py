"""Explain: where a message is for a subscription, whatever became of it."""

import pytest

from keylane.errors import Unavailable
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.filters import Filter
from keylane_broker.engine.messages import Whereabouts
from keylane_broker.engine.values import Capacity, SubscriptionSettings
from keylane_broker.inspect.topic_checker import check_topic
from tests.support.clock import ManualTime
from tests.support.story import Story, message, must_acquire, part, receipts


async def explain(story: Story, entry: int, name: str = "s") -> Whereabouts:
    """Where an entry is."""
    _, found = await story.engine.explain(story.topic, name, f"0:{story.id(entry)}")
    return found


async def states(story: Story, *entries: int, name: str = "s") -> list[str]:
    """The states of entries."""
    return [(await explain(story, entry, name)).state for entry in entries]


@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive", "failover"])
async def test_a_message_goes_from_fresh_to_leased_to_waiting_to_settled(
    timed: ManualTime, topic: str, mode: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode=mode)
    await story.publish("a", "a", "b")
    third = await explain(story, 3)
    assert (third.state, third.fresh, third.key, third.sessions) == ("fresh", 2, "b", 1)
    [first, *_] = receipts(await story.fetch(permits=1))
    held = await explain(story, 1)
    assert (held.state, held.consumer, held.at_ms) == ("leased", "c", timed.now_ms + 30_000)
    await story.nack(first, delay_ms=5_000)
    waits = await explain(story, 1)
    assert (waits.state, waits.retries, waits.at_ms) == ("waiting", 1, timed.now_ms + 5_000)
    assert (waits.consumer, waits.ahead) == ("", "")
    await timed.advance(5_000)
    await story.ack(*receipts(await story.fetch()))
    assert await states(story, 1, 3, 4) == ["settled", "settled", "never_existed"]


async def test_what_waits_behind_another_of_its_key_says_behind_which_and_who_has_that(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared", consumers=("c", "d"))
    await story.publish("a", "a", "b")
    await engine.fetch(story.lease, "s", [Capacity("c", 1, 30_000, 9), Capacity("d", 1, 30_000, 8)])
    await engine.fetch(story.lease, "s", [Capacity("d", 1)])
    second = await explain(story, 2)
    assert (second.state, second.ahead, second.ahead_consumer) == ("waiting", story.id(1), "c")
    assert (await explain(story, 3)).consumer == "d"


@pytest.mark.parametrize("mode", ["key_shared", "exclusive", "failover"])
async def test_a_fresh_message_says_what_comes_before_it_in_its_lane(
    timed: ManualTime, topic: str, mode: str
) -> None:
    """Whether or not a fetch has looked at it: what the lane waits for holds for it as well."""
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode=mode)
    await story.publish("b", "a", "a", "a")
    lane_head = 2 if mode == "key_shared" else 1
    found = await explain(story, 4)
    assert (found.state, found.fresh, found.ahead) == ("fresh", 3, story.id(lane_head))
    assert (await explain(story, lane_head)).ahead == ""
    held_now = receipts(await story.fetch(permits=2))
    held = await explain(story, 4)
    assert (held.state, held.ahead, held.ahead_consumer) == ("waiting", story.id(lane_head), "c")
    await story.nack(held_now[-1], delay_ms=5_000)
    due = await explain(story, 4)
    assert (due.state, due.ahead, due.ahead_consumer) == ("waiting", story.id(lane_head), "")
    assert due.at_ms == timed.now_ms + 5_000


async def test_what_is_gone_or_not_for_this_subscription(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("old")
    await story.publish_many(2)
    await story.subscribe()
    await story.publish_many(3)
    await engine.skip(topic, "s", f"0:{story.id(3)}")
    await engine.delete_message(topic, f"0:{story.id(4)}")
    expected = ["not_subscribed", "not_subscribed", "settled", "deleted", "fresh"]
    assert await states(story, 1, 2, 3, 4, 5) == expected
    assert await states(story, 1, 3, 4, 5, name="old") == ["fresh", "fresh", "deleted", "fresh"]
    _, other_ledger = await engine.explain(topic, "s", "0:1-5")
    assert other_ledger.state == "never_existed"


async def test_a_delayed_message_and_a_known_uid(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await engine.delay(story.lease, [message(uid="later")], [timed.now_ms + 5_000])
    _, found = await engine.explain(topic, "s", "later")
    assert (found.state, found.at_ms) == ("delayed", timed.now_ms + 5_000)
    await timed.advance(5_000)
    await engine.promote(story.lease)
    _, found = await engine.explain(topic, "s", "later")
    assert (found.state, found.id) == ("fresh", story.id(1))
    _, unknown = await engine.explain(topic, "s", "no-such-uid")
    assert unknown.state == "never_existed"


async def test_what_a_filter_does_not_match_is_filtered(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("all")
    for name in ("s", "late"):
        start = "latest" if name == "s" else "earliest"
        settings = SubscriptionSettings(filter=Filter(keys="eu-*"))
        await engine.create_subscription(topic, name, settings, start=start)
        await engine.join(story.lease, name, "c", 60_000)
        await story.publish("eu-1", "us-1", "eu-2")
    assert await states(story, 1, 2, 3, 5) == ["fresh", "filtered", "fresh", "filtered"]
    assert await states(story, 1, 2, 3, name="late") == ["fresh", "filtered", "fresh"]
    assert (await explain(story, 3)).fresh == 1
    await story.ack(*receipts(await story.fetch()))
    assert await states(story, 1, 2, 3) == ["settled", "filtered", "settled"]


async def test_what_is_in_the_way(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(consumers=())
    await engine.create_subscription(topic, "spark", SubscriptionSettings("cursor"))
    await story.publish_many(1)
    await engine.pause_subscription(topic, "s", True)
    found = await explain(story, 1)
    assert (found.paused, found.sessions, found.mode) == (True, 0, "shared")
    assert (await explain(story, 1, "spark")).mode == "cursor"


@pytest.mark.parametrize("mode", ["key_shared", "exclusive", "failover"])
async def test_a_parked_lane_says_at_which_message_and_why(engine: Engine, topic: str, mode: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=mode, max_retries=0, poison="park")
    await story.publish("a", "a", "b")
    [first, *_] = receipts(await story.fetch(permits=1))
    await engine.nack(story.lease, "s", [first], delay_ms=0, reason="no such account")
    await story.publish("a")
    head = await explain(story, 1)
    assert (head.state, head.ahead, head.why, head.retries) == ("parked", "", "no such account", 1)
    fresh = await explain(story, 4)
    assert (fresh.state, fresh.ahead, fresh.why) == ("parked", story.id(1), "no such account")
    other = await explain(story, 3)
    assert other.state == ("fresh" if mode == "key_shared" else "parked")
    await story.fetch()
    assert await states(story, 2, 4) == ["parked", "parked"], "also what a fetch has sorted into the lane"
    [lane] = await engine.parked(topic, "s", 1)
    await engine.unpark(topic, "s", lane, "resume")
    assert "parked" not in await states(story, 1, 2, 4)


async def test_a_message_without_a_key_is_parked_alone(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared", max_retries=0, poison="park")
    await story.publish_many(2)
    [run] = receipts(await story.fetch())
    await story.nack(part(run, 1))
    assert await states(story, 1, 2) == ["parked", "leased"]


@pytest.mark.parametrize("others", [False, True], ids=["leaves the log", "is owed to others"])
async def test_a_dead_letter_says_where_it_is_at_each_step_of_its_way(
    engine: Engine, topic: str, others: bool
) -> None:
    dead = f"{topic}.dead"
    story = await Story.begin(engine, topic)
    await story.subscribe(max_retries=0)
    if others:
        await story.subscribe("other")
    await story.publish_many(2)
    [run] = receipts(await story.fetch())
    await story.nack(part(run, 1))
    await story.ack(part(run, 2))

    async def look() -> tuple[str, bool, str]:
        found = await explain(story, 1)
        assert found.dead_topic == dead
        return found.state, found.handing, found.dead_id

    assert await look() == ("dead_lettered", True, ""), "noted"
    await engine.bury(topic, 0)
    assert await look() == ("dead_lettered", True, ""), "in the outbox"
    with pytest.raises(Unavailable):
        await engine.empty_outbox(topic, 0)
    kept = await must_acquire(engine, dead)
    await engine.empty_outbox(topic, 0)
    assert await look() == ("dead_lettered", False, f"0:{kept.epoch}-1"), "kept"
    second = await explain(story, 2)
    assert (second.state, second.dead_id) == ("settled", "")
    if others:
        assert (await explain(story, 1, "other")).state == "fresh"
    assert await check_topic(engine, dead) == []
    await engine.delete_topic(dead)


async def test_what_has_expired_says_so_before_and_after_it_is_gone(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    for name in ("s", "quick", "busy"):
        await story.subscribe(name, "key_shared")
    expires = dict.fromkeys(range(3), (timed.now_ms + 1000, 0))
    await engine.publish(story.lease, [message("k") for _ in range(4)], extras=expires)
    [first] = receipts(await story.fetch(permits=1))
    await story.nack(first, delay_ms=60_000)
    await story.ack(*receipts(await story.fetch(permits=2, name="quick")), name="quick")
    await story.fetch(permits=1, name="busy")
    await timed.advance(1_000)
    assert await states(story, 1, 2, 3, 4) == ["expired", "expired", "expired", "fresh"]
    await engine.expire_messages(story.lease)
    assert await states(story, 1, 2, 3) == ["expired", "expired", "expired"]
    assert await states(story, 1, 2, 3, 4, name="quick") == ["settled", "settled", "expired", "fresh"]
    assert await states(story, 1, 2, name="busy") == ["leased", "expired"]
    await story.subscribe("late", start="earliest")
    assert await states(story, 2, name="late") == ["deleted"], "gone before it was there"
    assert 0 < await engine.store.command("PTTL", story.keys.expired) <= 3_600_000


async def test_what_expired_while_it_was_leased_has_expired_as_soon_as_a_seek_ends_the_lease(
    timed: ManualTime, topic: str
) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe()
    expires = {0: (timed.now_ms + 1000, 0)}
    await engine.publish(story.lease, [message("k"), message("k")], extras=expires)
    await story.fetch(permits=1)
    await timed.advance(1_000)
    await engine.expire_messages(story.lease)
    assert await states(story, 1, 2) == ["leased", "fresh"]
    await engine.seek(topic, "s", "earliest")
    assert await states(story, 1, 2) == ["expired", "fresh"]


async def test_what_is_before_the_start_of_a_subscription_is_not_filtered(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("all")
    await story.publish("us-1")
    await engine.create_subscription(topic, "s", SubscriptionSettings(filter=Filter(keys="eu-*")))
    assert await states(story, 1) == ["not_subscribed"]
    await story.publish("us-2")
    await story.ack(*receipts(await story.fetch(name="all")), name="all")
    gone = await explain(story, 2)
    assert (gone.state, gone.chosen) == ("settled", True), "it is gone, so that nobody knows any more"
