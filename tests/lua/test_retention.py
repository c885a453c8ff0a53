"""What stays after everybody has settled it: for how long, how much of it, and that it goes."""

from collections.abc import Iterable

from keylane.wire import pack_about
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Outgoing, TopicSettings
from keylane_broker.limits import FOREVER
from tests.support.clock import ManualTime
from tests.support.story import Story, must_acquire, part, receipts

KEPT_MS = 60_000


def sized(*sizes: int) -> list[Outgoing]:
    """Messages with bodies of these sizes."""
    return [Outgoing("k", f"sized-{n}-{size}", pack_about(1, size=size)) for n, size in enumerate(sizes)]


async def trim(story: Story, limit: int = 500) -> tuple[int, int]:
    """Trim until nothing is due; answers how many went, and in how many ms to call again."""
    dropped = 0
    while True:
        result = await story.engine.trim(story.lease, limit)
        dropped += result.dropped
        if result.next_due_ms <= 0 or result.next_due_ms > result.now_ms:
            return dropped, result.next_due_ms - result.now_ms if result.next_due_ms > 0 else 0


async def settle(story: Story, *names: str) -> None:
    """Let subscriptions take and ack all that they are owed."""
    for name in names or ("s",):
        while held := receipts(await story.fetch(name=name)):
            await story.ack(*held, name=name)


async def begin(timed: ManualTime, topic: str, modes: Iterable[str] = ("shared",), n: int = 4) -> Story:
    """A topic that retains for a minute, with a subscription s, t, ... of each mode, and messages."""
    story = await Story.begin(timed.engine, topic, TopicSettings(retention_ms=KEPT_MS))
    for name, mode in zip("stu", modes, strict=False):
        await story.subscribe(name, mode, consumers=() if mode == "cursor" else ("c",))
    await timed.engine.publish(story.lease, sized(*[10] * n))
    return story


async def test_what_all_have_settled_stays_for_a_while_after_the_last_ack_and_goes_with_its_body(
    timed: ManualTime, topic: str
) -> None:
    story = await begin(timed, topic, ("shared", "key_shared"))
    await settle(story, "s")
    await timed.advance(2 * KEPT_MS)  # however long it took until the last one settled it
    assert await trim(story) == (0, KEPT_MS)
    await settle(story, "t")
    await timed.advance(KEPT_MS - 1)
    assert await trim(story) == (0, 1)
    assert await story.log() == [1, 2, 3, 4]
    await timed.advance(1)
    assert await trim(story) == (4, 0)
    assert await story.log() == []
    assert sorted(await story.take_names()) == [f"sized-{n}-10" for n in range(4)]
    assert not await story.exists(story.keys.retained)


async def test_each_message_has_its_own_time(timed: ManualTime, topic: str) -> None:
    story = await begin(timed, topic)
    [held] = receipts(await story.fetch())
    await story.ack(part(held, 2, 3))
    await timed.advance(1_000)
    await story.ack(part(held, 1), part(held, 4))
    await timed.advance(KEPT_MS - 1_000)
    assert await trim(story) == (2, 1_000)
    assert await story.log() == [1, 4]
    await timed.advance(1_000)
    assert (await trim(story))[0] == 2


async def test_what_is_still_owed_is_never_trimmed(timed: ManualTime, topic: str) -> None:
    story = await begin(timed, topic, ("key_shared", "shared", "exclusive"))
    await settle(story, "s", "u")
    [held] = receipts(await story.fetch(name="t"))
    await story.ack(part(held, 1), part(held, 3), name="t")
    await timed.advance(10 * KEPT_MS)
    assert (await trim(story))[0] == 2
    assert await story.log() == [2, 4]
    await story.ack(part(held, 2), part(held, 4), name="t")
    assert await story.log() == [2, 4]
    await timed.advance(KEPT_MS)
    assert (await trim(story))[0] == 2


async def test_a_replay_gets_what_is_retained_and_holds_it(timed: ManualTime, topic: str) -> None:
    story = await begin(timed, topic)
    await settle(story)
    await timed.advance(KEPT_MS - 1)
    await timed.engine.seek(topic, "s", "earliest")
    await story.subscribe("late", "key_shared", start=3)
    await timed.advance(KEPT_MS)
    assert (await trim(story))[0] == 0  # it is owed again
    assert await story.take() == [1, 2, 3, 4]
    assert await story.take(name="late") == [3, 4]
    await timed.engine.delete_subscription(topic, "s")
    await timed.engine.delete_subscription(topic, "late")
    assert await story.log() == [1, 2, 3, 4]
    await timed.advance(KEPT_MS)
    assert await trim(story) == (4, 0)


async def test_messages_without_a_subscription_are_retained_from_their_publish_on(
    timed: ManualTime, topic: str
) -> None:
    story = await begin(timed, topic, ())
    await timed.engine.delay(story.lease, sized(1, 2, 3), [timed.now_ms + 10] * 3)
    await timed.advance(10)
    await timed.engine.promote(story.lease)
    await timed.advance(KEPT_MS - 10)
    assert await trim(story) == (4, 10)
    await timed.advance(10)
    assert await trim(story) == (3, 0)
    await story.subscribe(start="earliest")
    assert await story.take() == []


async def test_a_deleted_subscription_leaves_what_only_it_was_owed_for_the_retention(
    timed: ManualTime, topic: str
) -> None:
    story = await begin(timed, topic, ("shared", "key_shared"), 700)
    await settle(story, "s")
    await story.fetch(name="t", permits=3)
    await timed.advance(KEPT_MS)
    await timed.engine.delete_subscription(topic, "t")
    assert await trim(story) == (0, KEPT_MS)
    await timed.advance(KEPT_MS)
    assert await trim(story) == (700, 0)


async def test_a_reader_by_position_leaves_what_it_has_passed_for_the_retention(
    timed: ManualTime, topic: str
) -> None:
    story = await begin(timed, topic, ("cursor",), 1_000)
    await timed.engine.claim(topic, "s", "r", 60_000)
    while not (await timed.engine.commit(topic, "s", "r", 0, 901)).done:
        pass
    assert len(await story.log()) == 1_000
    await timed.advance(KEPT_MS)
    assert (await trim(story))[0] == 900
    assert len(await story.log()) == 100


async def test_bytes_are_limited_too_and_the_oldest_go(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic, TopicSettings(retention_bytes=100))
    await story.subscribe()
    await timed.engine.publish(story.lease, sized(60, 30, 20, 5))
    assert await trim(story) == (0, 30_000)  # nothing is retained yet
    await settle(story)
    assert await trim(story) == (4 - 3, 30_000)
    assert await story.log() == [2, 3, 4]
    await timed.engine.publish(story.lease, sized(70, 1))
    await timed.engine.seek(topic, "s", "earliest")
    assert (await trim(story))[0] == 0  # it is owed again
    await settle(story)  # a replay does not count twice
    assert (await trim(story))[0] == 1
    assert await story.log() == [3, 4, 5, 6]
    assert await story.take_names() == ["sized-0-60", "sized-1-30"]


async def test_bytes_are_shared_out_among_partitions(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, TopicSettings(partitions=3, retention_bytes=100))
    await engine.publish(story.lease, sized(20, 14, 10))
    assert (await trim(story))[0] == 1
    assert await story.log() == [2, 3]
    assert (await engine.describe_topic(topic)).retention_bytes == 100


async def test_trimming_takes_a_bounded_part_per_call_and_goes_on(timed: ManualTime, topic: str) -> None:
    story = await begin(timed, topic, n=100)
    await settle(story)
    held_back = await timed.engine.publish(story.lease, sized(1, 2, 3))
    assert held_back.stored == 3
    await timed.advance(KEPT_MS)
    for left in range(100, 0, -30):
        assert len(await story.log()) == left + 3
        result = await timed.engine.trim(story.lease, 30)
        assert (result.next_due_ms == result.now_ms) is (left > 30)
    assert await story.log() == [101, 102, 103]


async def test_a_new_owner_is_told_to_trim_and_an_old_one_is_fenced(timed: ManualTime, topic: str) -> None:
    story = await begin(timed, topic)
    await settle(story)
    await timed.engine.release(story.lease)
    again = await must_acquire(timed.engine, topic, worker="w2")
    assert again.retains
    await timed.advance(KEPT_MS)
    assert (await timed.engine.trim(again)).dropped == 4
    forever = await timed.engine.change_topic(topic, retention_ms=FOREVER)
    assert forever.retention_ms == FOREVER
    await timed.engine.release(again)
    assert not (await must_acquire(timed.engine, topic, worker="w3")).retains


async def test_retention_can_be_changed_at_any_time(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic, TopicSettings(partitions=2, retention_ms=FOREVER))
    await story.subscribe()
    await story.publish_many(600)
    await settle(story)
    assert (await timed.engine.trim(story.lease)).next_due_ms == -1
    await timed.engine.change_topic(topic, retention_ms=KEPT_MS)
    assert await trim(story) == (0, KEPT_MS)
    await timed.advance(KEPT_MS // 2)
    await timed.engine.change_topic(topic, retention_ms=KEPT_MS // 2)
    assert await trim(story) == (600, 0)
    await story.publish_many(600)
    await settle(story)
    await story.publish_many(2)
    settings = await timed.engine.change_topic(topic, retention_ms=0, journal=5)
    assert (settings.retention_ms, settings.retention_bytes, settings.journal) == (0, 0, 5)
    assert await story.log() == [1_201, 1_202]  # nothing is retained any more
    assert not await story.exists(story.keys.retained)
    await settle(story)
    assert await story.log() == []
