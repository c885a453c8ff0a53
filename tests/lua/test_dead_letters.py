"""Bounded retries: what has none left goes to the dead-letter topic, once, with its history and its body."""

import asyncio

import pytest

from keylane.errors import InvalidArgument, MessageNotFound, Unavailable
from keylane.wire import About, pack_about, unpack_about, with_body
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.held_bodies import let_go
from keylane_broker.engine.values import Backoff, Outgoing, SubscriptionSettings
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.limits import FOREVER
from keylane_broker.store.keys import partition_keys
from tests.support.clock import ManualTime
from tests.support.story import HOUR_MS, Story, must_acquire, receipts


async def letters(engine: Engine, topic: str) -> list[tuple[str, str, About]]:
    """Key, uid and the rest of all dead letters of a topic, after they have been sent."""
    dead = f"{topic}.dead"
    try:
        await engine.empty_outbox(topic, 0)
    except Unavailable:  # the topic has just been made
        await must_acquire(engine, dead)
        await engine.empty_outbox(topic, 0)
    if dead not in await engine.topics():
        return []
    [found] = await engine.store.entries(partition_keys(dead, 0).log, [("-", "+")])
    return [(fields[1], fields[3], unpack_about(fields[5], fields[3])) for _, fields in found]


async def ids(engine: Engine, topic: str) -> list[str]:
    """Of which messages there are dead letters."""
    return [about.attributes["dead.id"] for _, _, about in await letters(engine, topic)]


async def leave(engine: Engine, topic: str) -> None:
    """Check the dead-letter topic, and delete it: the fixture looks at the other."""
    dead = f"{topic}.dead"
    assert await check_topic(engine, dead) == []
    assert await check_topic(engine, topic) == []
    await engine.delete_topic(dead)


@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive", "failover"])
async def test_after_the_last_retry_a_message_is_a_dead_letter(engine: Engine, topic: str, mode: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=mode, max_retries=2)
    await story.publish("k")
    for retry in range(3):
        [first, *_] = await story.fetch(permits=1)
        assert (first.messages[0].entry, first.messages[0].retries) == (1, retry)
        assert await story.nack(first.receipt) == ["settled"]
    assert await ids(engine, topic) == [f"0:{story.id(1)}"]
    assert await story.log() == []
    await story.publish("k")
    [second] = await story.fetch()
    assert (second.messages[0].entry, second.messages[0].retries) == (2, 0)
    await story.ack(second.receipt)
    assert not await story.exists(story.sub().retries, story.sub().lanes, story.keys.held)
    await leave(engine, topic)


async def test_no_retries_at_all(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(max_retries=0)
    await story.publish_many(5)
    [run] = await story.fetch()
    assert await story.nack(run.receipt) == ["settled"]
    assert await ids(engine, topic) == [f"0:{story.id(entry)}" for entry in range(1, 6)]
    assert await story.log() == []
    await leave(engine, topic)


async def test_of_a_run_only_those_go_that_have_no_retry_left(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(max_retries=1)
    await story.publish_many(6)
    [run] = await story.fetch()
    for entry in (2, 3, 5):
        await story.nack(run.receipt._replace(first=entry, last=entry))
    again = await story.fetch()
    await story.nack(*receipts(again), run.receipt._replace(first=1, last=1))
    assert await ids(engine, topic) == [f"0:{story.id(entry)}" for entry in (2, 3, 5)]
    assert await story.retries() == {1: 1}
    assert await story.take() == [1]
    await leave(engine, topic)


async def test_the_history_tells_where_it_failed_and_why(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared", max_retries=1)
    about = pack_about(7, "group", {"region": "eu", "quote": 'a "b"/c'}, size=3)
    await engine.publish(story.lease, [Outgoing("k", "uid-1", about)])
    [first] = await story.fetch()
    failed_at = timed.now_ms
    await engine.nack(story.lease, "s", [first.receipt], delay_ms=0, reason="ValueError: one")
    await timed.advance(500)
    [second] = await story.fetch()
    await engine.nack(story.lease, "s", [second.receipt], delay_ms=0, reason=' "two"\n ☃ ')
    incarnation = (await engine.describe_topic(topic)).incarnation
    number = (await engine.describe_subscription(topic, "s")).incarnation
    [(key, uid, told)] = await letters(engine, topic)
    assert (key, uid) == ("k", f"dead-{incarnation}-0-1-{number}")
    assert (told.produced_ms, told.producer_group, told.size) == (7, "group", 3)
    assert told.body == f"@{topic}/uid-1"
    assert told.attributes == {
        "region": "eu",
        "quote": 'a "b"/c',
        "dead.topic": topic,
        "dead.subscription": "s",
        "dead.id": f"0:{story.id(1)}",
        "dead.uid": "uid-1",
        "dead.key": "k",
        "dead.retries": "1",
        "dead.reason": '"two" ☃',
        "dead.first_at": str(failed_at),
        "dead.last_at": str(failed_at + 500),
        "dead.consumer": "c",
    }
    await leave(engine, topic)


@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive"])
async def test_a_timeout_and_a_crash_use_up_retries_too(timed: ManualTime, topic: str, mode: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=mode, max_retries=1, backoff=Backoff(1, 1, 1, 0))
    await story.publish("k", "k", "k")
    assert await story.take(permits=2) == [1, 2]
    await timed.advance(30_000)
    await engine.expire(story.lease, "s")
    await timed.advance(1_000)
    assert sorted(await story.take(permits=3)) == [1, 2, 3]
    await engine.leave(story.lease, "s", "c", crashed=True)
    [(_, _, told)] = await letters(engine, topic)
    assert told.attributes["dead.id"] == f"0:{story.id(1)}"
    assert told.attributes["dead.reason"] == "its consumer was gone"
    assert await story.log() == [2, 3]
    await engine.join(story.lease, "s", "c", HOUR_MS)
    assert await story.take() == [2, 3]
    await leave(engine, topic)


async def test_a_lane_goes_on_at_once_behind_a_dead_letter(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="key_shared", max_retries=0, backoff=Backoff(60, 1, 60, 0))
    await story.publish("k", "k", "k")
    [lane] = await story.fetch()
    await story.nack(lane.receipt._replace(first=2, last=2), delay_ms=5_000)
    assert await story.take() == [3], "1 is leased, 2 is dead, 3 has gone back with it"
    assert await ids(timed.engine, topic) == [f"0:{story.id(2)}"]
    await leave(timed.engine, topic)


async def test_a_lane_that_goes_back_in_parts_goes_on_at_once_behind_a_dead_letter(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared", max_retries=0)
    await story.publish(*["hot", "other"] * 500)
    held = [receipt for receipt in receipts(await story.fetch(permits=1_000)) if receipt.lane == "=hot"]
    await story.nack(held[0], delay_ms=HOUR_MS)
    assert await story.take(permits=1) == [3], "1 is dead, and nobody waits for it"
    assert await ids(engine, topic) == [f"0:{story.id(1)}"]
    await leave(engine, topic)


async def test_without_a_limit_there_are_no_dead_letters(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish_many(1)
    for retry in range(20):
        [run] = await story.fetch()
        assert run.messages[0].retries == retry
        await story.nack(run.receipt)
    assert await ids(engine, topic) == []


async def test_settings_change_and_the_limit_counts_what_was_charged_before(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish("k")
    for _ in range(3):
        await story.nack(*receipts(await story.fetch()))
    await engine.change_subscription(topic, "s", {"max_retries": 4, "dead_letter": f"{topic}.bad"})
    settings = await engine.describe_subscription(topic, "s")
    assert (settings.max_retries, settings.dead_letter, settings.mode) == (4, f"{topic}.bad", "key_shared")
    await story.nack(*receipts(await story.fetch()))
    await engine.change_subscription(topic, "s", {"max_retries": None})
    await story.nack(*receipts(await story.fetch()))
    assert await story.retries() == {1: 5}
    await engine.change_subscription(topic, "s", {"max_retries": 5, "dead_letter": ""})
    await story.nack(*receipts(await story.fetch()))
    assert await ids(engine, topic) == [f"0:{story.id(1)}"]
    await leave(engine, topic)


# The hand-off


async def test_each_record_is_taken_in_once_however_often_it_is_sent(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(max_retries=0)
    await story.publish_many(3)
    await story.nack(*receipts(await story.fetch()))
    await letters(engine, topic)
    [sent] = await engine.store.read_all([("XRANGE", story.keys.outbox, "-", "+")])
    assert sent == []
    await story.publish_many(2)
    await story.nack(*receipts(await story.fetch()))
    # What one does up to the last step, and then crashes, another does again.
    read_all, lost = engine.store.read_all, []

    async def all_but_removing(commands: list[tuple[str, ...]]) -> list[object]:
        if commands[0][0] == "XDEL":
            lost.append(commands)
            raise ConnectionError
        return await read_all(commands)

    engine.store.read_all = all_but_removing  # type: ignore[method-assign, assignment]
    with pytest.raises(ConnectionError):
        await engine.empty_outbox(topic, 0)
    engine.store.read_all = read_all  # type: ignore[method-assign]
    assert len(lost) == 1
    assert await ids(engine, topic) == [f"0:{story.id(entry)}" for entry in range(1, 6)]
    await leave(engine, topic)


async def test_a_dead_letter_topic_keeps_its_entries_whoever_settles_them(engine: Engine, topic: str) -> None:
    story, dead = await Story.begin(engine, topic), f"{topic}.dead"
    await engine.create_topic(dead)
    other = Story(engine, await must_acquire(engine, dead))
    await other.subscribe("reader")
    await story.subscribe(max_retries=0)
    await story.publish_many(2)
    await story.nack(*receipts(await story.fetch()))
    assert len(await ids(engine, topic)) == 2
    [run] = await other.fetch(name="reader")
    await other.ack(run.receipt, name="reader")
    assert len(await ids(engine, topic)) == 2
    assert (await engine.describe_topic(dead)).retention_ms == FOREVER
    await leave(engine, topic)


# Bodies


async def poisoned(engine: Engine, topic: str, names: tuple[str, ...], expires_ms: int = 0) -> Story:
    """A message with a body, owed to several subscriptions, each with one consumer and no retries."""
    story = await Story.begin(engine, topic)
    for name in names:
        await story.subscribe(name, max_retries=0)
    extras = {0: (expires_ms, 0)} if expires_ms else {}
    await engine.publish(story.lease, [Outgoing("k", "uid-1", pack_about(1, size=3))], extras=extras)
    return story


async def test_the_one_owner_of_a_body_hands_it_on(engine: Engine, topic: str) -> None:
    story = await poisoned(engine, topic, ("a",))
    await story.nack(*receipts(await story.fetch(name="a")), name="a")
    [(_, _, told)] = await letters(engine, topic)
    assert told.body == f"@{topic}/uid-1"
    assert await story.take_names() == []
    gone = await let_go(engine.store, f"{topic}.dead", [told.body], lambda *_: None)
    assert gone == {topic: ["uid-1"]}
    await leave(engine, topic)


async def test_an_inline_body_is_the_dead_letters_own_and_holds_nothing(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    for name in ("a", "b"):
        await story.subscribe(name, max_retries=0)
    about = with_body(pack_about(1, size=3), b"abc")
    assert about is not None
    await engine.publish(story.lease, [Outgoing("k", "uid-1", about)])
    await story.nack(*receipts(await story.fetch(name="a")), name="a")
    [(_, _, told)] = await letters(engine, topic)
    assert told.body == "=YWJj"
    assert await story.log() == [1], "the other one is owed it"
    await story.ack(*receipts(await story.fetch(name="b")), name="b")
    assert await story.log() == []
    assert not await story.exists(story.keys.lease.removesuffix("lease") + "held")
    await leave(engine, topic)


@pytest.mark.parametrize("uid", ["uid-1", "@a", "=a", "=a/b", "=a:b:c:d:e"])
async def test_a_body_that_is_named_after_its_uid_is_found_whatever_that_is(
    engine: Engine, topic: str, uid: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await engine.publish(story.lease, [Outgoing("", uid, pack_about(1, size=3))])
    await story.ack(*receipts(await story.fetch()))
    names = await story.take_names()
    assert await let_go(engine.store, topic, names, lambda *_: None) == {topic: [uid]}


@pytest.mark.parametrize("first", ["others", "letter"])
async def test_a_body_lives_until_others_and_the_dead_letter_are_done_with_it(
    engine: Engine, topic: str, first: str
) -> None:
    story = await poisoned(engine, topic, ("a", "b"))
    await story.nack(*receipts(await story.fetch(name="a")), name="a")
    [run] = await story.fetch(name="b")
    [(_, _, told)] = await letters(engine, topic)
    assert told.body.startswith(f"@{topic}:0:")
    assert told.body.endswith("/uid-1")
    assert await check_topic(engine, topic) == []

    async def purge(left: dict[str, list[str]] | None = None) -> None:
        gone = await let_go(engine.store, f"{topic}.dead", [told.body], lambda *_: None)
        assert gone == (left or {})

    async def others() -> None:
        await story.ack(run.receipt, name="b")

    for step in (others, purge) if first == "others" else (purge, others):
        assert await story.take_names() == []
        assert await story.log() == [1]
        await step()
    assert await story.take_names() == ["uid-1"]
    await purge({topic: ["uid-1"]})  # it may come again, as the record of it goes last, and does no harm
    assert (await story.log(), await story.take_names()) == ([], [])
    await leave(engine, topic)


@pytest.mark.parametrize("at_once", [True, False])
async def test_each_multicast_consumer_has_dead_letters_of_its_own_also_where_its_session_ends(
    timed: ManualTime, topic: str, at_once: bool
) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await engine.create_subscription(topic, "news", SubscriptionSettings("multicast", max_retries=0))
    settings = await engine.describe_subscription(topic, "news")
    for consumer in ("anna", "bert"):
        await engine.register(story.lease, "news", consumer, settings, 10_000)
    await engine.publish(story.lease, [Outgoing("k", "uid-1", pack_about(1, size=3))])
    [anna] = await story.fetch("anna", name="news@anna")
    await story.fetch("bert", name="news@bert")
    await story.nack(anna.receipt, name="news@anna")
    told = [] if at_once else [about for _, _, about in await letters(engine, topic)]
    await timed.advance(10_001)
    await engine.expire_some(story.lease, "news@bert")
    assert await engine.places(topic, 0, "news") == ["news@anna"]
    both = await letters(engine, topic)
    assert [about.attributes["dead.consumer"] for _, _, about in both] == ["anna", "bert"]
    assert len({uid for _, uid, _ in both}) == 2
    assert [about for _, _, about in both][: len(told)] == told
    for _, _, about in both:
        assert (await story.log(), await story.take_names()) == ([1], [])
        assert await check_topic(engine, topic) == []
        await let_go(engine.store, f"{topic}.dead", [about.body], lambda *_: None)
    assert (await story.log(), await story.take_names()) == ([], ["uid-1"])
    await leave(engine, topic)


async def test_two_dead_letters_of_one_message_share_its_body(engine: Engine, topic: str) -> None:
    story = await poisoned(engine, topic, ("a", "b"))
    for name in ("a", "b"):
        await story.nack(*receipts(await story.fetch(name=name)), name=name)
    told = [about for _, _, about in await letters(engine, topic)]
    assert [about.attributes["dead.subscription"] for about in told] == ["a", "b"]
    for count, about in enumerate(told):
        assert (await story.log(), await story.take_names()) == ([1], []), count
        await let_go(engine.store, f"{topic}.dead", [about.body], lambda *_: None)
    assert (await story.log(), await story.take_names()) == ([], ["uid-1"])
    await leave(engine, topic)


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_body_goes_with_the_last_dead_letter_of_a_message_that_was_purged(
    engine: Engine, topic: str, at_once: bool
) -> None:
    story = await poisoned(engine, topic, ("a", "b", "c"))
    for name in ("a", "b"):
        await story.nack(*receipts(await story.fetch(name=name)), name=name)
    names = [about.body for _, _, about in await letters(engine, topic)]
    await engine.purge(topic)
    assert (await story.log(), await story.take_names()) == ([], [])
    gone = set[str]()
    for some in (names,) if at_once else ([name] for name in names):
        gone.update((await let_go(engine.store, f"{topic}.dead", some, lambda *_: None)).get(topic, []))
    assert gone == {"uid-1"}
    await leave(engine, topic)


@pytest.mark.parametrize("sent", [False, True])
async def test_a_message_that_fails_again_after_a_seek_is_another_dead_letter_of_it(
    engine: Engine, topic: str, sent: bool
) -> None:
    story = await poisoned(engine, topic, ("a", "b"))
    await story.nack(*receipts(await story.fetch(name="a")), name="a")
    [(_, _, first)] = await letters(engine, topic)
    await engine.seek(topic, "a", "earliest")
    await story.nack(*receipts(await story.fetch(name="a")), name="a")
    await story.ack(*receipts(await story.fetch(name="b")), name="b")
    if sent:
        await letters(engine, topic)
    gone = await let_go(engine.store, f"{topic}.dead", [first.body], lambda *_: None)
    assert (gone, await story.log(), await story.take_names()) == ({}, [1], []), "the other has it still"
    [_, (_, _, second)] = await letters(engine, topic)
    gone = await let_go(engine.store, f"{topic}.dead", [second.body], lambda *_: None)
    names = await story.take_names() + gone.get(topic, [])
    assert (names, await story.log()) == (["uid-1"], [])
    await leave(engine, topic)


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
@pytest.mark.parametrize("how", ["expires", "deleted", "purged"])
async def test_what_goes_before_its_dead_letter_was_sent_is_one_still(
    timed: ManualTime, topic: str, how: str, names: tuple[str, ...]
) -> None:
    engine = timed.engine
    story = await poisoned(engine, topic, names, expires_ms=timed.clock_ms + 1_000)
    await story.nack(*receipts(await story.fetch(name="a")), name="a")
    if how == "expires":
        await timed.advance(1_000)
        await engine.expire_messages(story.lease)
    elif how == "purged":
        await engine.purge(topic)
    elif names == ("a",):
        with pytest.raises(MessageNotFound):  # it is in the dead-letter topic now
            await engine.delete_message(topic, f"0:{story.id(1)}")
    else:
        await engine.delete_message(topic, f"0:{story.id(1)}")
    assert (await story.log(), await story.take_names()) == ([], [])
    [(_, _, told)] = await letters(engine, topic)
    assert told.attributes["dead.id"] == f"0:{story.id(1)}"
    gone = await let_go(engine.store, f"{topic}.dead", [told.body], lambda *_: None)
    assert gone == {topic: ["uid-1"]}
    await leave(engine, topic)


async def test_a_body_outlives_the_topic_that_a_dead_letter_has_it_of(engine: Engine, topic: str) -> None:
    story = await poisoned(engine, topic, ("a", "b"))
    await story.nack(*receipts(await story.fetch(name="a")), name="a")
    [(_, _, told)] = await letters(engine, topic)
    doomed: list[str] = []

    async def look(*_: object) -> None:
        doomed.extend(await story.take_names())

    forget, engine.delete_bodies = engine.delete_bodies, look
    await engine.delete_topic(topic)
    engine.delete_bodies = forget
    assert doomed == []
    gone = await let_go(engine.store, f"{topic}.dead", [told.body], lambda *_: None)
    assert gone == {topic: ["uid-1"]}
    await engine.delete_topic(f"{topic}.dead")


async def test_what_has_not_been_sent_when_its_topic_is_deleted_is_sent_first(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await engine.create_topic(f"{topic}.dead")
    await must_acquire(engine, f"{topic}.dead")
    await story.subscribe(max_retries=0)
    await story.publish_many(1)
    await story.nack(*receipts(await story.fetch()))
    await engine.delete_topic(topic)
    [found] = await engine.store.entries(partition_keys(f"{topic}.dead", 0).log, [("-", "+")])
    assert len(found) == 1
    await engine.delete_topic(f"{topic}.dead")


@pytest.mark.parametrize("mode", ["shared", "multicast"])
async def test_park_is_refused_where_there_are_no_lanes(engine: Engine, topic: str, mode: str) -> None:
    await engine.create_topic(topic)
    with pytest.raises(Exception, match=f"in mode {mode} .* use skip"):
        await engine.create_subscription(topic, "s", SubscriptionSettings(mode=mode, poison="park"))
    await engine.create_subscription(topic, "s", SubscriptionSettings(mode=mode))
    with pytest.raises(Exception, match="use skip"):
        await engine.change_subscription(topic, "s", {"poison": "park"})


async def test_a_dead_letter_is_sent_though_its_message_expires_before_that(
    timed: ManualTime, topic: str
) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe(max_retries=0)
    await engine.publish(
        story.lease, [Outgoing("", "u", pack_about(1))], extras={0: (timed.now_ms + 1_000, 0)}
    )
    [run] = receipts(await story.fetch())
    await story.nack(run)
    await timed.advance(1_000)
    await engine.expire_messages(story.lease)
    assert await ids(engine, topic) == [f"0:{story.id(1)}"]
    assert await story.log() == []
    await engine.expire_messages(story.lease)
    assert not await story.exists(story.keys.overdue, story.keys.expiring)
    await leave(engine, topic)


@pytest.mark.parametrize("changed", [False, True], ids=["made", "changed"])
async def test_of_two_subscriptions_whose_dead_letters_would_go_round_one_at_most_is_there(
    engine: Engine, topic: str, changed: bool
) -> None:
    """Each is asked for when the other one is not there yet."""
    dead = f"{topic}.dead"
    ways = {topic: dead, dead: topic}
    for name in ways:
        await engine.create_topic(name)
        if changed:
            await engine.create_subscription(name, "s")

    async def begin(name: str, to: str) -> None:
        if changed:
            await engine.change_subscription(name, "s", {"max_retries": 1, "dead_letter": to})
        else:
            settings = SubscriptionSettings(max_retries=1, dead_letter=to)
            await engine.create_subscription(name, "s", settings)

    answers = await asyncio.gather(*(begin(*way) for way in ways.items()), return_exceptions=True)
    refused = [isinstance(answer, InvalidArgument) for answer in answers]
    assert any(refused), answers
    for name, refusal in zip(ways, refused, strict=True):
        there = await engine.subscriptions(name)
        if changed:
            settings = await engine.describe_subscription(name, "s")
            assert settings.max_retries == (None if refusal else 1)
        else:
            assert there == ([] if refusal else ["s"])
    await leave(engine, topic)
