"""Single messages: skipped for one subscription, deleted for all, purged, cancelled before they are due."""

import pytest

from keylane.errors import Forbidden, InvalidArgument, MessageLeased, MessageNotFound
from keylane.wire import pack_about
from keylane.wire import with_body as wire_with_body
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.lanes import parse_lane
from keylane_broker.engine.values import Backoff, Capacity, Outgoing, SubscriptionSettings, TopicSettings
from keylane_broker.inspect.snapshot import take_snapshot
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.store.keys import topic_key
from tests.support.clock import ManualTime
from tests.support.story import Story, entries, message, part, receipts
from tests.support.turns import ack_whole

MODES = ("shared", "key_shared", "exclusive", "failover")


def with_body(key: str, uid: str, group: str = "") -> Outgoing:
    """A message that has a body, named after its uid."""
    return Outgoing(key, uid, pack_about(1, group, size=3))


async def test_an_inline_body_goes_with_its_message_and_is_nobodys_to_delete(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    about = wire_with_body(pack_about(1), b"42")
    assert about is not None
    await engine.publish(story.lease, [Outgoing("a", uid, about) for uid in ("one", "two", "three")])
    await skip(story, 1)
    await engine.delete_message(topic, f"0:{story.id(2)}")
    await story.ack(*receipts(await story.fetch()))
    assert await story.log() == []
    assert await story.take_names() == []


async def skip(story: Story, entry: int, name: str = "s") -> list[tuple[str, str]]:
    """Settle a message; answers whose lease of which subscription ended with that."""
    _, ended = await story.engine.skip(story.topic, name, f"0:{story.id(entry)}")
    return [(lease.subscription, lease.consumer) for lease in ended]


async def backlog(story: Story, name: str = "s") -> tuple[int, int, int]:
    """How many messages are fresh, leased and waiting."""
    found = await take_snapshot(story.engine.store, story.topic, 0)
    [its] = [one for one in found.subscriptions if one.name == name]
    fresh = {entry for entry in found.log if entry > its.cursor} - set(map(int, its.skipped))
    lanes = [parse_lane(lane, record) for lane, record in its.lanes.items()]
    leased = sum(len(lane.entries) for lane in lanes if lane.consumer)
    return len(fresh), leased, sum(lane.waiting for lane in lanes)


@pytest.mark.parametrize("mode", MODES)
async def test_what_is_skipped_before_it_is_delivered_never_is(engine: Engine, topic: str, mode: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=mode)
    await story.publish(*"ababa")
    for entry in (1, 3, 5):
        assert await skip(story, entry) == []
    assert await backlog(story) == (2, 0, 0)
    assert await story.log() == [2, 4]
    assert await story.take(permits=1) == [2]
    await story.publish("b")
    assert await story.take() == [4, 6]
    assert not await story.exists(story.sub().skipped)


@pytest.mark.parametrize("mode", MODES)
async def test_what_another_subscription_is_owed_stays_until_it_has_settled_it(
    engine: Engine, topic: str, mode: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=mode)
    await story.subscribe("other", "key_shared")
    await engine.publish(story.lease, [with_body("a", "one"), with_body("a", "two"), with_body("a", "three")])
    await skip(story, 2)
    assert await story.log() == [1, 2, 3]
    taken = receipts(await story.fetch(name="other"))
    await story.ack(*taken, name="other")
    assert await story.log() == [1, 3], "skipped here, settled there"
    assert await story.take_names() == ["two"]
    await story.ack(*receipts(await story.fetch()))
    assert await story.log() == []


async def test_what_is_skipped_ahead_goes_with_the_last_subscription_that_was_owed_it(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.subscribe("other")
    await story.publish_many(3)
    await skip(story, 3)
    await engine.delete_subscription(topic, "other")
    assert await story.log() == [1, 2]
    await story.subscribe("other", start="earliest")
    assert await story.take(name="other") == [1, 2]


async def test_a_reader_by_position_takes_along_what_others_have_skipped(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await engine.create_subscription(topic, "spark", SubscriptionSettings("cursor"))
    await story.publish_many(3)
    await skip(story, 2)
    await engine.claim(topic, "spark", "r", 60_000)
    await engine.commit(topic, "spark", "r", 0, 4)
    assert await story.log() == [1, 3]


async def test_what_is_settled_already_is_not_skipped_and_leaves_its_lane_as_it_was(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.subscribe("other")
    await story.publish(*"ab" * 35)  # so that the record of a lane lists many ranges
    held = await story.fetch()
    assert await ack_whole(engine, story.lease, "s", [held[0].receipt])
    with pytest.raises(MessageNotFound):
        await skip(story, 1)
    assert await check_topic(engine, topic) == []


@pytest.mark.parametrize("mode", MODES)
async def test_a_lease_that_is_skipped_ends_and_its_receipt_is_stale(
    engine: Engine, topic: str, mode: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=mode)
    await engine.publish(story.lease, [with_body("a", "one"), with_body("a", "two")])
    delivered = await story.fetch(permits=2)
    assert await skip(story, 1) == [("s", "c")]
    assert await story.take_names() == ["one"]
    outcomes = await story.ack(*[receipt._replace(last=receipt.first) for receipt in receipts(delivered)][:1])
    assert outcomes == ["stale"]
    assert await backlog(story) == (0, 1, 0)
    with pytest.raises(MessageNotFound, match="is not owed a message"):
        await skip(story, 1)


@pytest.mark.parametrize("mode", ["key_shared", "exclusive", "failover"])
async def test_a_lane_that_waits_for_its_head_goes_on_when_that_is_skipped(
    timed: ManualTime, topic: str, mode: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode=mode, backoff=Backoff(60, 2, 600, 0))
    await story.publish("a", "a")
    [receipt] = {one.token: one for one in receipts(await story.fetch())}.values()
    await story.nack(receipt._replace(first=1, last=1), delay_ms=None)
    assert await story.take() == []
    assert await story.retries() == {1: 1}
    assert await skip(story, 1) == []
    assert await story.retries() == {}
    assert await story.take() == [2]


async def test_a_hold_stays_where_another_message_than_the_head_is_skipped(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish("a", "a", "a")
    await story.nack(*receipts(await story.fetch())[:1], delay_ms=60_000)
    await skip(story, 2)
    assert await story.take() == []
    await timed.advance(60_000)
    assert await story.take() == [1, 3]


async def test_what_is_read_by_position_cannot_be_skipped(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await engine.create_subscription(topic, "spark", SubscriptionSettings("cursor"))
    await story.publish_many(1)
    with pytest.raises(InvalidArgument, match="read by position"):
        await skip(story, 1, "spark")


@pytest.mark.parametrize("id", ["0:1-99", "0:99-1"])
async def test_what_never_existed_is_not_found(engine: Engine, topic: str, id: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish_many(1)
    with pytest.raises(MessageNotFound):
        await engine.skip(topic, "s", id)
    with pytest.raises(MessageNotFound):
        await engine.delete_message(topic, id)


@pytest.mark.parametrize("id", ["1-1", "", "7:1-1", "x:1-1", "0:1"])
async def test_what_is_no_id_of_the_topic_is_an_invalid_argument(engine: Engine, topic: str, id: str) -> None:
    await Story.begin(engine, topic)
    with pytest.raises(InvalidArgument):
        await engine.delete_message(topic, id)


@pytest.mark.parametrize("mode", MODES)
async def test_a_fetch_goes_on_behind_more_that_is_skipped_than_it_looks_at(
    engine: Engine, topic: str, mode: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=mode)
    for _ in range(6):
        await story.publish(*["a"] * 1_000)
    await story.publish("b")
    marks = [str(entry) for entry in range(1, 6_001) for _ in range(2)]
    await engine.store.command("ZADD", story.sub().skipped, *marks)
    await engine.store.command("HSET", story.sub().sub, "sparse", "6000")
    result = await engine.fetch(story.lease, "s", [Capacity("c", 1)])
    while not result.deliveries:
        assert result.more
        result = await engine.fetch(story.lease, "s", [Capacity("c", 1)])
    assert entries(result.deliveries) == [6_001]
    await engine.purge(topic)


# Deleting


@pytest.mark.parametrize("mode", MODES)
async def test_a_message_is_deleted_for_all_whether_it_waits_or_is_fresh(
    engine: Engine, topic: str, mode: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=mode)
    await story.subscribe("fresh", mode)
    await engine.create_subscription(topic, "spark", SubscriptionSettings("cursor"))
    await engine.publish(story.lease, [with_body("a", "one"), with_body("a", "two")])
    await story.nack(*receipts(await story.fetch()))
    await engine.delete_message(topic, f"0:{story.id(1)}")
    assert await story.take_names() == ["one"]
    assert await story.log() == [2]
    assert await story.take() == [2]
    assert await story.take(name="fresh") == [2]


async def test_a_message_that_anybody_holds_is_not_deleted(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.subscribe("other", "key_shared")
    await story.publish("a", "a")
    await story.take(name="other")
    with pytest.raises(MessageLeased, match="consumer 'c' of subscription 'other'"):
        await engine.delete_message(topic, f"0:{story.id(2)}")
    assert await story.take() == [1, 2], "nothing has happened to it"


async def test_only_its_producer_group_deletes_a_message(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await engine.publish(story.lease, [with_body("", "mine", "shop"), with_body("", "nobodys")])
    for group in ("", "web"):
        with pytest.raises(Forbidden, match="producer group 'shop'"):
            await engine.delete_message(topic, f"0:{story.id(1)}", group=group)
    await engine.delete_message(topic, f"0:{story.id(1)}", group="shop")
    await engine.delete_message(topic, f"0:{story.id(2)}", group="web")
    assert await story.log() == []


async def test_a_message_is_deleted_by_a_uid_that_is_known(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await engine.publish(story.lease, [with_body("", "order-1"), with_body("", "order-2")])
    await engine.delete_by_uid(topic, "order-1")
    assert await story.log() == [2]
    for uid in ("order-1", "order-3"):
        with pytest.raises(MessageNotFound):
            await engine.delete_by_uid(topic, uid)


async def test_a_delayed_message_is_cancelled_by_its_uid_and_its_uid_is_free(
    timed: ManualTime, topic: str
) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe()
    due = timed.now_ms + 5_000
    delayed = [with_body("a", "later", "shop"), with_body("b", "kept")]
    await engine.delay(story.lease, delayed, [due, due])
    with pytest.raises(Forbidden, match="producer group 'shop'"):
        await engine.delete_by_uid(topic, "later")
    await engine.delete_by_uid(topic, "later", group="shop")
    assert await story.take_names() == ["later"]
    told = await engine.delay(story.lease, [with_body("c", "later")], [due + 1])
    assert not told.duplicates
    await timed.advance(6_000)
    await engine.promote(story.lease)
    assert await keys(story) == ["b", "c"]


async def keys(story: Story) -> list[str]:
    """The keys of all that consumer c gets."""
    return [found.key for delivery in await story.fetch() for found in delivery.messages]


# Purging


async def half(story: Story) -> None:
    """Some messages leased, some waiting, some skipped, some fresh."""
    await story.publish(*"abcabcabca")
    newest = receipts(await story.fetch(permits=6))[-1]
    await story.nack(part(newest, newest.last))
    await skip(story, 9)


@pytest.mark.parametrize("mode", MODES)
async def test_a_purged_subscription_is_owed_nothing_and_others_notice_nothing(
    engine: Engine, topic: str, mode: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=mode)
    await story.subscribe("other")
    await half(story)
    purged = await engine.purge(topic, "s")
    assert (purged.messages, purged.done) == (9, True)
    assert await backlog(story) == (0, 0, 0)
    assert await story.retries() == {}
    assert await backlog(story, "other") == (10, 0, 0)
    await story.publish("a")
    assert await story.take() == [11]


@pytest.mark.parametrize("mode", MODES)
async def test_a_purged_topic_is_empty_with_what_is_retained_and_delayed(
    timed: ManualTime, topic: str, mode: str
) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic, TopicSettings(retention_ms=3_600_000))
    await story.subscribe(mode=mode)
    await story.subscribe("other", "key_shared")
    await engine.create_subscription(topic, "spark", SubscriptionSettings("cursor"))
    await half(story)
    await engine.publish(story.lease, [with_body("a", "body")])
    later = [with_body("a", f"later-{number}") for number in range(3)]
    await engine.delay(story.lease, later, [timed.now_ms + 9] * 3)
    ended: list[str] = []

    async def hear(_: int, leases: list[tuple[str, str, int, int, int]]) -> None:
        ended.extend(lease[1] for lease in leases)

    purged = await engine.purge(topic, on_ended=hear)  # type: ignore[arg-type]
    assert (purged.messages, purged.done) == (14, True)
    assert set(ended) == {"c"}
    assert await story.log() == []
    assert sorted(await story.take_names()) == ["body", "later-0", "later-1", "later-2"]
    assert not await story.exists(story.keys.delayed, story.keys.delayed_data)
    await story.publish("z")
    assert await story.take() == await story.take(name="other") == [12]


async def test_a_purge_takes_bounded_steps_and_goes_on_where_it_was(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keylane_broker.engine.purging.STEP", 10)
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish(*"abcde" * 9)
    await story.take(permits=20)
    told = await engine.purge(topic, "s", seconds=0)
    assert (told.messages, told.done) == (10, False)
    await story.publish("z")
    counts = []
    while not told.done:
        told = await engine.purge(topic, "s", told.number, seconds=0)
        counts.append(told.messages)
    assert counts == [20, 30, 40, 45]
    assert await backlog(story) == (1, 0, 0), "what came after the call stays"
    again = await engine.purge(topic, "s", told.number)
    assert (again.messages, again.done) == (45, True), "whoever asks late is told the same"


async def test_a_purge_that_was_left_is_finished_by_the_next_which_counts_both(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keylane_broker.engine.purging.STEP", 10)
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish_many(25)
    await engine.purge(topic, "s", seconds=0)
    [problem] = await check_topic(engine, topic)
    assert "a purge is not finished, of subscription 's', 10 messages gone" in problem
    await story.publish_many(5)
    told = await engine.purge(topic, "s")
    assert (told.messages, told.done) == (30, True)
    assert await engine.store.command("HGET", topic_key(topic), "purge") is None


async def test_a_purge_of_another_subscription_is_finished_before_the_next_begins(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keylane_broker.engine.purging.STEP", 10)
    story = await Story.begin(engine, topic)
    await story.subscribe("one")
    await story.subscribe("two")
    await story.publish_many(25)
    await engine.purge(topic, "one", seconds=0)
    assert not (await engine.purge(topic, "two", seconds=0)).number, "ask again"
    told = await engine.purge(topic, "two")
    assert (told.messages, told.done) == (25, True)
    assert await backlog(story, "one") == (0, 0, 0)
    assert await story.log() == []


async def test_a_purge_leaves_what_a_server_that_lost_writes_gives_anew(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish_many(5)
    [(last, ledger, _)] = await engine._ends(topic, await engine.describe_topic(topic))
    assert last == 5
    await engine.store.command("HSET", story.keys.meta, "last", "3")
    for entry in (4, 5):
        await engine.store.command("XDEL", story.keys.log, story.id(entry))
    await engine.release(story.lease)
    lease = await engine.acquire(topic, 0, "w2", 60_000)
    assert lease is not None
    await engine.publish(lease, [message(), message()])
    keys = [*story.sub(), story.keys.delayed, story.keys.delayed_data]
    answer = await engine.store.run("message/purge", keys, "", "s", "1", last, ledger, 0, 500)
    assert answer[:3] == ["OK", 0, 3]
    assert await story.log() == [4, 5]
