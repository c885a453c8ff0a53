"""Publishing: dense ids, each uid once, and no trace of what nobody owes."""

import pytest

from keylane.wire import pack_about, unpack_about
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Outgoing, Published, TopicSettings
from keylane_broker.limits import FOREVER
from tests.support.clock import ManualTime
from tests.support.story import Story, entries, message, must_acquire

WINDOW_MS = 60_000  # marks are kept for so long at least
SHORT_MEMORY = TopicSettings(dedupe_ms=WINDOW_MS)


async def test_a_batch_takes_consecutive_entries_in_its_order(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    first = await engine.publish(story.lease, [message("a", "u1"), message("", "u2"), message("a", "u3")])
    second = await engine.publish(story.lease, [message("b", "u4")])
    assert [published.id for published in first.each() + second.each()] == [
        story.id(entry) for entry in (1, 2, 3, 4)
    ]
    assert first.durability == "memory"
    [delivery] = await story.fetch()
    assert [(item.key, item.uid) for item in delivery.messages] == [
        ("a", "u1"),
        ("", "u2"),
        ("a", "u3"),
        ("b", "u4"),
    ]


async def test_what_a_producer_says_about_a_message_arrives_with_the_broker_s_time(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    about = pack_about(999, "shop", {"naïve": 'a "quoted" | piped\nline'})
    await timed.engine.publish(story.lease, [message("schlüssel")._replace(about=about)])
    [delivery] = await story.fetch()
    arrived = unpack_about(delivery.messages[0].about)
    assert delivery.messages[0].key == "schlüssel"
    assert (arrived.published_ms, arrived.produced_ms) == (timed.now_ms, 999)
    assert arrived.attributes == {"naïve": 'a "quoted" | piped\nline'}


async def test_the_same_uid_again_answers_with_the_first_id(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await engine.publish(story.lease, [message("a", "u1")])
    again = await engine.publish(story.lease, [message("a", "u0"), message("a", "u1"), message("a", "u2")])
    assert again.each() == [
        Published(story.id(2)),
        Published(story.id(1), duplicate=True),
        Published(story.id(3)),
    ]
    assert await story.log() == [1, 2, 3]


async def test_a_uid_twice_in_one_batch_is_stored_once(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    result = await engine.publish(story.lease, [message("a", "u1"), message("b", "u1"), message("a", "u1")])
    assert result.each() == [
        Published(story.id(1)),
        Published(story.id(1), duplicate=True),
        Published(story.id(1), duplicate=True),
    ]
    assert await story.log() == [1]


async def test_a_duplicate_is_known_after_its_message_was_acked(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await engine.publish(story.lease, [message("a", "u1")])
    [delivery] = await story.fetch()
    await story.ack(delivery.receipt)
    assert (await engine.publish(story.lease, [message("a", "u1")])).duplicates == {0: story.id(1)}
    assert await story.log() == []


async def test_a_duplicate_is_known_until_the_window_ends_over_two_generations_of_marks(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic, SHORT_MEMORY)
    await story.subscribe()

    async def is_duplicate(uid: str) -> bool:
        return bool((await timed.engine.publish(story.lease, [message("a", uid)])).duplicates)

    assert not await is_duplicate("early")
    await timed.advance(WINDOW_MS - 1)
    assert not await is_duplicate("late")
    await timed.advance(1)  # the first generation is a window old: new marks go to the second
    assert not await is_duplicate("new")
    assert await is_duplicate("early")  # it may be remembered for longer than asked
    await timed.advance(WINDOW_MS - 2)
    assert await is_duplicate("late")  # still inside its own window
    assert await is_duplicate("new")
    await timed.advance(2)  # the third generation replaces the first
    assert not await is_duplicate("late")
    assert await is_duplicate("new")


async def test_after_two_windows_of_silence_no_mark_counts(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic, SHORT_MEMORY)
    await story.subscribe()
    await timed.engine.publish(story.lease, [message("a", "u1")])
    await timed.advance(2 * WINDOW_MS)
    assert (await timed.engine.publish(story.lease, [message("a", "u1")])).each() == [Published(story.id(2))]


async def test_marks_go_with_the_window_when_the_topic_falls_silent(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic, SHORT_MEMORY)
    await story.subscribe()
    assert story.lease.marks_due_ms == 0
    due_ms = (await story.publish("a")).marks_due_ms
    assert due_ms == timed.now_ms + WINDOW_MS
    await timed.advance(WINDOW_MS - 1)
    assert (await engine.promote(story.lease)).marks_due_ms == due_ms, "not yet"
    await timed.advance(1)
    due_ms = (await engine.promote(story.lease)).marks_due_ms
    assert due_ms == timed.now_ms + WINDOW_MS, "new marks would go to the other generation now"
    story.lease = await must_acquire(engine, topic)
    assert story.lease.marks_due_ms == due_ms, "the next owner is told"
    await timed.advance(WINDOW_MS)
    assert (await engine.promote(story.lease)).marks_due_ms == 0
    assert not await story.exists(story.keys.marks_0, story.keys.marks_1)


async def test_a_window_of_nothing_remembers_nothing(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, TopicSettings(dedupe_ms=0))
    await story.subscribe()
    for id in (story.id(1), story.id(2)):
        assert (await engine.publish(story.lease, [message("a", "u1")])).each() == [Published(id)]
    assert not await story.exists(story.keys.marks_0, story.keys.marks_1)


@pytest.mark.parametrize("window_ms", [0, 10_000])
async def test_what_is_sent_again_with_its_body_is_the_same_message_however_short_the_window(
    timed: ManualTime, topic: str, window_ms: int
) -> None:
    story = await Story.begin(timed.engine, topic, TopicSettings(dedupe_ms=window_ms))
    await story.subscribe()
    sent = Outgoing("a", "u1", pack_about(1, size=7))

    async def publish(message: Outgoing) -> Published:
        return (await timed.engine.publish(story.lease, [message])).each()[0]

    first = Published(story.id(1))
    assert await publish(sent) == first
    await timed.advance(30_000)
    assert await publish(sent) == Published(first.id, duplicate=True)
    story.lease = await must_acquire(timed.engine, topic)
    await timed.advance(29_999)
    assert await publish(sent) == Published(first.id, duplicate=True), "the next owner knows"
    other = Outgoing("a", "u1", pack_about(1, size=7, body="another"))
    assert await publish(other) == Published(story.id(2)), "the application has published the uid again"
    assert await publish(other) == Published(story.id(2), duplicate=True)
    await timed.advance(120_000)
    assert await publish(sent) == Published(story.id(3))


async def test_a_short_window_is_as_short_as_asked_for(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic, TopicSettings(dedupe_ms=10_000))
    await story.subscribe()
    for number in (1, 2):
        for _ in range(2):
            answer = await timed.engine.publish(story.lease, [message("a", "u1")])
            assert answer.each()[0].id == story.id(number)
            await timed.advance(5_000)


@pytest.mark.parametrize(("before", "after"), [(10_000, 600_000), (600_000, 10_000), (0, 600_000)])
async def test_what_was_marked_before_the_window_is_changed_is_known_still(
    timed: ManualTime, topic: str, before: int, after: int
) -> None:
    """A mark says more in a short window; both kinds are read in both."""
    story = await Story.begin(timed.engine, topic, TopicSettings(dedupe_ms=before))
    await story.subscribe()
    sent = [Outgoing("a", "u1", pack_about(1, size=7)), Outgoing("a", "u2", pack_about(1, size=7))]
    first = (await timed.engine.publish(story.lease, sent)).each()
    assert (await timed.engine.change_topic(topic, dedupe_ms=after)).dedupe_ms == after
    again = (await timed.engine.publish(story.lease, [*sent, message("a", "u3")])).each()
    assert again == [*(Published(one.id, duplicate=True) for one in first), Published(story.id(3))]
    assert (await timed.engine.publish(story.lease, [message("a", "u3")])).each()[0].duplicate
    await timed.advance(120_000 + 2 * after)
    assert not (await timed.engine.publish(story.lease, [message("a", "u1")])).each()[0].duplicate


async def test_what_was_for_later_and_is_sent_again_with_its_body_is_the_same_message(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic, TopicSettings(dedupe_ms=0))
    await story.subscribe()
    sent = Outgoing("a", "u1", pack_about(1, size=7))
    await timed.engine.delay(story.lease, [sent], [timed.now_ms + 1_000])
    await timed.advance(1_000)
    assert (await timed.engine.promote(story.lease)).appended == 1
    again = await timed.engine.delay(story.lease, [sent], [timed.now_ms + 1_000])
    assert (again.kept, again.duplicates) == (0, {0: story.id(1)})


async def test_a_new_epoch_knows_the_duplicates_of_the_old_one(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await engine.publish(story.lease, [message("a", "u1")])
    newer = await engine.acquire(topic, 0, "w1", 5_000)
    assert newer is not None
    assert (await engine.publish(newer, [message("a", "u1")])).duplicates == {0: story.id(1)}


async def test_without_a_subscription_a_message_leaves_no_trace(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    nobody = Published(None, no_subscribers=True)
    for _ in range(2):  # the second time it is no duplicate either
        assert (await engine.publish(story.lease, [message("a", "u1")])).each() == [nobody]
    assert not await story.exists(story.keys.log, story.keys.marks_0, story.keys.marks_1)
    assert await engine.store.command("HGET", story.keys.meta, "last") == "0"
    await story.subscribe(start="earliest")
    assert await story.take() == []


async def test_duplicates_and_messages_that_nobody_owes_are_told_apart(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await engine.publish(story.lease, [message("a", "u1")])
    await engine.delete_subscription(topic, "s")
    result = await engine.publish(story.lease, [message("a", "u0"), message("a", "u1"), message("a", "u2")])
    nobody = Published(None, no_subscribers=True)
    assert result.each() == [nobody, Published(story.id(1), duplicate=True), nobody]


async def test_a_topic_that_retains_keeps_messages_without_subscriptions_and_after_acks(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic, TopicSettings(retention_ms=FOREVER))
    assert (await story.publish("a", "b")).stored == 2
    await story.subscribe("early", start="earliest")
    deliveries = await story.fetch(name="early")
    result = await engine.ack(story.lease, "early", [delivery.receipt for delivery in deliveries])
    assert result.forgotten == []
    await engine.delete_subscription(topic, "early")
    assert await story.log() == [1, 2]
    await story.subscribe("late", start="earliest")
    assert await story.take(name="late") == [1, 2]


async def test_a_full_batch_is_one_call(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    result = await story.publish_many(1_000)
    assert (result.first, result.stored) == (1, 1_000)
    assert entries(await story.fetch(permits=1_000)) == list(range(1, 1_001))
    again = await story.publish_many(1)
    assert again.first == 1_001
