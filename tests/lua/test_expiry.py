"""Messages that expire: delivered to nobody any more, settled for all, and gone with their bodies."""

import pytest

from keylane.wire import pack_about
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Outgoing, TopicSettings
from tests.support.clock import ManualTime
from tests.support.story import HOUR_MS, Story, must_acquire, part, receipts

TTL_MS = 5_000
MODES = ("shared", "key_shared", "exclusive", "failover")


def with_bodies(*keys: str) -> list[Outgoing]:
    """Messages of these keys, each with a body that is named after its place."""
    return [Outgoing(key, f"u{n}", pack_about(1, size=7)) for n, key in enumerate(keys, 1)]


async def begin(timed: ManualTime, topic: str, mode: str, *keys: str, journal: int = 0) -> Story:
    """A subscription of a mode, and messages of which the second expires."""
    story = await Story.begin(timed.engine, topic, TopicSettings(journal=journal))
    await story.subscribe(mode=mode)
    expires = timed.clock_ms + TTL_MS
    result = await timed.engine.publish(story.lease, with_bodies(*keys), extras={1: (expires, 0)})
    assert result.expires_due_ms == timed.now_ms + TTL_MS
    return story


async def journal_of(story: Story) -> list[tuple[str, str, str]]:
    """What the journal says of subscriptions: word, consumer, entries."""
    found = await story.engine.store.entries(story.keys.journal, [("-", "+")])
    fields = [dict(zip(flat[::2], flat[1::2], strict=True)) for _, flat in found[0]]
    return [(one["what"], one["by"], one["entries"]) for one in fields if one["sub"] == "s"]


@pytest.mark.parametrize("mode", MODES)
async def test_what_has_expired_is_not_delivered_and_the_next_of_its_key_goes_on(
    timed: ManualTime, topic: str, mode: str
) -> None:
    story = await begin(timed, topic, mode, "a", "a", "a", "b", journal=100)
    await timed.advance(TTL_MS - 1)
    await timed.engine.expire_messages(story.lease)
    assert await story.log() == [1, 2, 3, 4]
    await timed.advance(1)
    assert await story.take() == [1, 3, 4]
    assert await story.log() == [1, 3, 4]
    assert await story.take_names() == ["u2"]
    assert ("expired", "", "2") in await journal_of(story)
    assert not await story.exists(story.keys.expiring, story.keys.overdue)


@pytest.mark.parametrize("mode", MODES)
async def test_what_waits_to_be_served_again_expires(timed: ManualTime, topic: str, mode: str) -> None:
    story = await begin(timed, topic, mode, "a", "a", "a", journal=100)
    held = receipts(await story.fetch())
    await story.nack(*held, delay_ms=HOUR_MS // 2)
    await timed.advance(TTL_MS)
    result = await timed.engine.expire_messages(story.lease)
    assert (result.dropped, result.next_due_ms) == (1, 0)
    assert await story.log() == [1, 3]
    await timed.advance(HOUR_MS // 2)
    assert sorted(await story.take()) == [1, 3]
    assert await story.retries() == ({1: 1, 3: 1} if mode == "shared" else {1: 1})


async def test_the_lane_of_an_expired_head_does_not_wait_for_its_backoff(
    timed: ManualTime, topic: str
) -> None:
    story = await begin(timed, topic, "key_shared", "b", "a", "a")
    held = {receipt.lane: receipt for receipt in receipts(await story.fetch(permits=2))}
    await story.nack(held["=a"], delay_ms=60_000)
    assert await story.take() == []
    await timed.advance(TTL_MS)
    assert await story.take() == [3]


@pytest.mark.parametrize("mode", MODES)
async def test_what_is_leased_when_it_expires_may_be_finished(
    timed: ManualTime, topic: str, mode: str
) -> None:
    story = await begin(timed, topic, mode, "a", "a", "a")
    await story.subscribe("late", "key_shared", start="earliest")
    held = receipts(await story.fetch(lease_ms=HOUR_MS // 2))
    await timed.advance(TTL_MS)
    assert await story.take(name="late") == [1, 3]  # but nobody else begins with it
    assert await story.log() == [1, 2, 3]
    assert (await timed.engine.list_leases(story.lease, "s", "c"))[0].messages
    assert set(await story.ack(*held)) == {"settled"}
    await timed.engine.expire_messages(story.lease)
    assert await story.log() == [1, 3]
    assert await story.take_names() == ["u2"]
    assert not await story.exists(story.keys.expiring, story.keys.overdue)


@pytest.mark.parametrize("how", ["nack", "timeout", "leave", "seek", "delete"])
@pytest.mark.parametrize("mode", MODES)
async def test_what_is_given_back_after_it_has_expired_is_not_delivered_again(
    timed: ManualTime, topic: str, mode: str, how: str
) -> None:
    story = await begin(timed, topic, mode, "a", "a", "b")
    await timed.advance(TTL_MS - 1)
    held = receipts(await story.fetch(lease_ms=2_000))
    await timed.advance(1)
    result = await timed.engine.expire_messages(story.lease)
    assert (result.dropped, result.next_due_ms - result.now_ms) == (0, 1_000)  # it is looked at again
    if how == "nack":
        await story.nack(*held)
    elif how == "timeout":
        await timed.advance(2_000)
        await timed.engine.expire(story.lease, "s")
    elif how == "leave":
        await timed.engine.leave(story.lease, "s", "c")
        await timed.engine.join(story.lease, "s", "c", HOUR_MS)
    elif how == "seek":
        await timed.engine.seek(topic, "s", "earliest")
    else:
        await timed.engine.delete_subscription(topic, "s")
        await story.subscribe(mode=mode)
        assert await story.log() == []
        return
    await timed.advance(10_000)
    assert sorted(await story.take()) == [1, 3]
    assert await story.log() == [1, 3]
    assert await story.take_names() == ["u2"]


async def test_a_topic_has_a_ttl_which_a_message_overrides_also_when_it_comes_later(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic, TopicSettings(ttl_ms=TTL_MS))
    await story.subscribe()
    now = timed.clock_ms
    await timed.engine.publish(story.lease, with_bodies("", ""), extras={0: (now + 60_000, 0)})
    later = [Outgoing("", f"later-{n}", pack_about(1)) for n in range(3)]
    await timed.engine.delay(story.lease, later, [now + 4_000] * 3, extras={1: (now + 70_000, 0)})
    await timed.advance(4_000)
    assert (await timed.engine.promote(story.lease)).expires_due_ms == timed.now_ms + 1_000
    await timed.advance(1_000)
    assert (await timed.engine.expire_messages(story.lease)).dropped == 1
    assert await story.log() == [1, 3, 4, 5]
    await timed.advance(4_000)
    result = await timed.engine.expire_messages(story.lease)
    assert await story.log() == [1, 4]
    assert result.next_due_ms - result.now_ms == 60_000 - 9_000
    await timed.engine.change_topic(topic, ttl_ms=0)
    await story.publish_many(1)
    await timed.advance(HOUR_MS // 2)
    assert await story.take() == [6]


async def test_what_is_settled_in_time_leaves_nothing_behind(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic, TopicSettings(ttl_ms=TTL_MS))
    await story.subscribe()
    await story.publish_many(20)
    await story.ack(*receipts(await story.fetch()))
    assert not await story.exists(story.keys.expiring)
    await timed.engine.release(story.lease)
    assert (await must_acquire(timed.engine, topic, worker="w2")).expires


async def test_expired_messages_are_not_retained(timed: ManualTime, topic: str) -> None:
    settings = TopicSettings(ttl_ms=TTL_MS, retention_ms=HOUR_MS, retention_bytes=1_000)
    story = await Story.begin(timed.engine, topic, settings)
    await story.subscribe()
    await timed.engine.publish(
        story.lease, with_bodies("", "", ""), extras={2: (timed.clock_ms + HOUR_MS, 0)}
    )
    await story.ack(*receipts(await story.fetch()))
    await timed.engine.trim(story.lease)
    await timed.advance(TTL_MS)
    assert (await timed.engine.expire_messages(story.lease)).dropped == 2
    assert await story.log() == [3]
    assert await timed.engine.store.command("HGET", story.keys.meta, "sized_bytes") == "7"


async def test_many_expire_in_bounded_steps_and_a_reader_by_position_passes_them(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic, TopicSettings(ttl_ms=TTL_MS))
    await story.subscribe("by-position", "cursor", consumers=())
    await story.subscribe()
    for _ in range(3):
        await story.publish_many(1_000)
    await timed.advance(TTL_MS)
    assert (await timed.engine.expire_messages(story.lease)).dropped == 300  # there are two subscriptions
    assert await story.take() == []
    assert await story.log() == []
    await story.publish_many(1)
    assert await story.take() == [3_001]


async def test_an_old_owner_expires_nothing(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await engine.publish(story.lease, with_bodies("a"), extras={0: (1, 0)})
    await engine.release(story.lease)
    again = await must_acquire(engine, topic, worker="w2")
    with pytest.raises(Exception, match="no longer holds"):
        await engine.expire_messages(story.lease)
    assert (await engine.expire_messages(again)).dropped == 1


@pytest.mark.parametrize("how", ["seek", "delete"])
async def test_what_was_leased_when_it_expired_is_looked_at_again_in_bounded_steps(
    timed: ManualTime, topic: str, how: str
) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic, TopicSettings(ttl_ms=TTL_MS))
    await story.subscribe("s")
    await story.subscribe("other")
    for _ in range(2):
        await story.publish_many(650)
        await story.fetch(permits=1_000, lease_ms=HOUR_MS // 2)
    [kept] = receipts(await story.fetch(permits=1, name="other", lease_ms=HOUR_MS // 2))
    await timed.advance(TTL_MS)
    while (result := await engine.expire_messages(story.lease)).next_due_ms == result.now_ms:
        pass
    assert await engine.store.command("ZCARD", story.keys.overdue) == 1_300
    if how == "seek":
        await engine.seek(topic, "s", "earliest")
    else:
        await engine.delete_subscription(topic, "s")
    assert await engine.store.command("ZCARD", story.keys.overdue) == 1_300  # for one call these are too many
    steps = 1
    while (result := await engine.expire_messages(story.lease)).next_due_ms == result.now_ms:
        steps += 1
    assert steps >= 3
    assert await story.log() == [1]
    assert await story.take(name="other") == []
    await story.ack(kept, name="other")
    await engine.expire_messages(story.lease)
    assert await story.log() == []
    assert not await story.exists(story.keys.expiring, story.keys.overdue)


async def test_a_fetch_waits_until_all_that_a_seek_has_ended_is_looked_at(
    timed: ManualTime, topic: str
) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic, TopicSettings(ttl_ms=TTL_MS))
    await story.subscribe("s")
    await story.publish_many(700)
    await story.fetch(permits=1_000, lease_ms=HOUR_MS // 2)
    await timed.advance(TTL_MS)
    await engine.expire_messages(story.lease)
    await engine.expire_messages(story.lease)
    await story.publish("new")
    await engine.seek(topic, "s", "earliest")
    assert await story.take() == [701]


async def test_what_has_expired_is_found_amid_many_others(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic, TopicSettings(ttl_ms=TTL_MS))
    await story.subscribe("s")
    await story.publish_many(200)
    [run] = receipts(await story.fetch(permits=200))
    stays = {*range(1, 200, 7), *range(3, 200, 11), *range(150, 160)}
    await story.ack(*(part(run, entry) for entry in sorted(stays)))
    await engine.leave(story.lease, "s", "c")
    await timed.advance(TTL_MS)
    await engine.expire_messages(story.lease)
    for entry in range(1, 201):
        _, told = await engine.explain(topic, "s", f"0:{story.id(entry)}")
        assert told.state == ("settled" if entry in stays else "expired"), entry
