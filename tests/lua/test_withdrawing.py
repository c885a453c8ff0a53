"""Dead letters that are redriven or purged, while the topic that keeps them has subscriptions of its own."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from keylane.wire import pack_about, unpack_about
from keylane.wire.about import home_of
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.held_bodies import let_go
from keylane_broker.engine.values import Delivery, Outgoing
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.store.keys import partition_keys
from keylane_broker.store.scripts import read_sources
from tests.support.clock import ManualTime
from tests.support.servers import SERVERS, Backends
from tests.support.story import Story, must_acquire, receipts

MODES = ["shared", "key_shared", "exclusive", "failover"]


async def with_letters(engine: Engine, topic: str, count: int = 1) -> tuple[Story, Story]:
    """A topic with a subscription in which messages of one key have failed, and the one that keeps them."""
    story, dead = await Story.begin(engine, topic), f"{topic}.dead"
    await engine.create_topic(dead)
    keeper = Story(engine, await must_acquire(engine, dead))
    await story.subscribe(max_retries=0)
    messages = [Outgoing("k", f"uid-{number}", pack_about(1, size=3)) for number in range(count)]
    await engine.publish(story.lease, messages)
    for _ in range(count):
        await story.nack(*receipts(await story.fetch(permits=1)))
    await engine.empty_outbox(topic, 0)
    return story, keeper


async def leave(engine: Engine, *topics: str) -> None:
    """The keyspace is in order."""
    for topic in topics:
        assert await check_topic(engine, topic) == []
    for topic in topics[1:]:  # the fixture looks at the first
        await engine.delete_topic(topic)


async def given_back(keeper: Story, mode: str, *, delay_ms: int = 60_000) -> list[Delivery]:
    """Somebody has had a look at the dead letters, and nacked them."""
    await keeper.subscribe("look", mode, start="earliest")
    had = await keeper.fetch(name="look")
    await keeper.nack(*receipts(had), name="look", delay_ms=delay_ms)
    return had


@pytest.mark.parametrize("purge", [False, True])
@pytest.mark.parametrize("mode", MODES)
async def test_what_waits_for_a_consumer_of_the_dead_letter_topic_goes_all_the_same(
    engine: Engine, topic: str, mode: str, purge: bool
) -> None:
    story, keeper = await with_letters(engine, topic, 3)
    await given_back(keeper, mode)
    assert await engine.withdraw(keeper.topic, 0, [1, 3], purge=purge) == [1, 3]
    assert await keeper.log() == [2]
    assert await keeper.retries("look") == ({2: 1} if mode == "shared" else {})
    assert [uid.removeprefix(f"@{topic}/") for uid in await keeper.take_names()] == (
        ["uid-0", "uid-2"] if purge else []
    )
    await engine.empty_outbox(keeper.topic, 0)
    assert await story.take() == ([] if purge else [4, 5])
    # The head that its lane waited for is gone, so that goes on; in shared there are no lanes.
    assert await keeper.take(name="look") == ([] if mode == "shared" else [2])
    await leave(engine, topic, keeper.topic)


@pytest.mark.parametrize("purge", [False, True])
@pytest.mark.parametrize("mode", MODES)
async def test_what_a_consumer_of_the_dead_letter_topic_has_stays(
    engine: Engine, topic: str, mode: str, purge: bool
) -> None:
    _, keeper = await with_letters(engine, topic, 3)
    await keeper.subscribe("look", mode, start="earliest")
    had = await keeper.fetch(name="look", permits=2)
    assert await engine.withdraw(keeper.topic, 0, [1, 2, 3], purge=purge) == [3]
    assert await keeper.log() == [1, 2]
    await keeper.ack(*receipts(had), name="look")
    assert await engine.withdraw(keeper.topic, 0, [1, 2, 3], purge=purge) == [1, 2]
    await leave(engine, topic, keeper.topic)


async def test_what_waits_for_one_and_is_in_hands_of_another_stays_with_both(
    engine: Engine, topic: str
) -> None:
    _, keeper = await with_letters(engine, topic)
    await given_back(keeper, "key_shared", delay_ms=0)
    await keeper.subscribe("other", start="earliest")
    await keeper.fetch(name="other")
    assert await engine.withdraw(keeper.topic, 0, [1], purge=False) == []
    assert await keeper.take(name="look") == [1]
    await leave(engine, topic, keeper.topic)


async def test_many_that_are_redriven_are_taken_in_some_at_a_time(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where many wait, no call takes them all: each has some ms. The others are as they were."""
    story, keeper = await with_letters(engine, topic)
    await story.publish_many(1_000)
    await story.nack(*receipts(await story.fetch(permits=1_000)))
    await engine.empty_outbox(topic, 0)
    assert await engine.withdraw(keeper.topic, 0, [1], purge=True) == [1]
    assert await engine.withdraw(keeper.topic, 0, range(1, 2_000), purge=False) == [*range(2, 1_002)]
    calls: list[int] = []
    run = engine.store.run

    async def counted(name: str, *arguments: Any) -> Any:
        if name == "partition/receive":
            calls.append(sum(len(msgspec.json.decode(text)) // 3 for text in arguments[4::2]))
        return await run(name, *arguments)

    monkeypatch.setattr(engine.store, "run", counted)
    await engine.empty_outbox(keeper.topic, 0)
    assert sum(calls) == 1_000
    assert max(calls) <= 800
    entries = [entry for _ in range(10) for entry in await story.take()]
    assert entries == [*range(1_002, 2_002)]
    await leave(engine, topic, keeper.topic)


async def test_large_ones_go_a_few_at_a_time(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they say of themselves, no call takes more of it than it can in some ms."""
    story, keeper = await with_letters(engine, topic)
    said = pack_about(1, attributes={"why": "x" * 50_000})
    await engine.publish(story.lease, [Outgoing("k", f"large-{number}", said) for number in range(30)])
    while held := await story.fetch():  # not all at once either
        await story.nack(*receipts(held))
    lengths: list[int] = []
    run = engine.store.run

    async def measured(name: str, *arguments: Any) -> Any:
        if name in ("partition/receive", "subscription/withdraw"):
            lengths.append(sum(len(text) for text in arguments[1:] if isinstance(text, str)))
        return await run(name, *arguments)

    monkeypatch.setattr(engine.store, "run", measured)
    await engine.empty_outbox(topic, 0)
    assert len(await engine.withdraw(keeper.topic, 0, range(1, 32), purge=False)) == 31
    await engine.empty_outbox(keeper.topic, 0)
    assert len(lengths) >= 12
    assert max(lengths) < 600_000
    assert await story.log() == [*range(32, 63)]
    await leave(engine, topic, keeper.topic)


@pytest.mark.parametrize("sent", [False, True], ids=["noted", "sent"])
@pytest.mark.parametrize("purge", [False, True])
async def test_a_dead_letter_that_has_failed_again_keeps_its_body(
    engine: Engine, topic: str, purge: bool, sent: bool
) -> None:
    """Its own dead letter has the body too: a redrive leaves it to that, and so does a purge."""
    story, keeper = await with_letters(engine, topic)
    last = f"{keeper.topic}.dead"
    await engine.create_topic(last)
    await must_acquire(engine, last)
    await keeper.subscribe("alarm", start="earliest", max_retries=0)
    await keeper.nack(*receipts(await keeper.fetch(name="alarm")), name="alarm")
    if sent:
        await engine.empty_outbox(keeper.topic, 0)
    assert await engine.withdraw(keeper.topic, 0, [1], purge=purge) == ([1] if purge else [])
    await engine.empty_outbox(keeper.topic, 0)
    assert await story.take() == []
    [[(_, fields)]] = await engine.store.entries(partition_keys(last, 0).log, [("-", "+")])
    body = unpack_about(fields[5], fields[3]).body
    assert body.endswith("/uid-0")
    assert await keeper.take_names() == []
    assert await engine.withdraw(last, 0, [1], purge=True) == [1]
    gone = await let_go(engine.store, last, [body], lambda *_: None)
    assert gone == ({topic: ["uid-0"]} if purge else {})
    assert await engine.withdraw(keeper.topic, 0, [1], purge=True) == ([] if purge else [1])
    await leave(engine, topic, keeper.topic, last)


@pytest.mark.parametrize("purge", [False, True])
async def test_a_body_that_others_are_owed_outlives_what_fails_again(
    engine: Engine, topic: str, purge: bool
) -> None:
    """A dead letter holds the entry for its body, also when it has been redriven and has failed again."""
    story = await Story.begin(engine, topic)
    await engine.create_topic(f"{topic}.dead")
    keeper = Story(engine, await must_acquire(engine, f"{topic}.dead"))
    await story.subscribe(max_retries=0)
    await story.subscribe("other")
    await engine.publish(story.lease, [Outgoing("k", "uid", pack_about(1, size=3))])
    await story.nack(*receipts(await story.fetch()))
    await engine.empty_outbox(topic, 0)
    assert await engine.withdraw(keeper.topic, 0, [1], purge=False) == [1]
    await engine.empty_outbox(keeper.topic, 0)
    others = await story.fetch(name="other")  # which passes what is not for it
    await story.nack(*receipts(await story.fetch()))
    await engine.empty_outbox(topic, 0)
    assert await engine.withdraw(keeper.topic, 0, [2], purge=purge) == [2]
    await engine.empty_outbox(keeper.topic, 0)
    assert await story.take(name="other") == []
    if not purge:
        await story.ack(*receipts(await story.fetch()))
    names = [*await keeper.take_names(), *await story.take_names()]
    assert await let_go(engine.store, topic, names, lambda *_: None) == {}
    assert await story.log() == [1]
    await story.ack(*receipts(others), name="other")
    assert await story.log() == []
    assert await story.take_names() == ["uid"]
    await leave(engine, topic, keeper.topic)


async def test_a_body_keeps_its_name_whatever_its_uid_begins_with(engine: Engine, topic: str) -> None:
    story, keeper = await with_letters(engine, topic)
    await engine.publish(story.lease, [Outgoing("k", "@odd", pack_about(1, size=3))])
    await story.nack(*receipts(await story.fetch()))
    await engine.empty_outbox(topic, 0)
    assert await engine.withdraw(keeper.topic, 0, [2], purge=False) == [2]
    await engine.empty_outbox(keeper.topic, 0)
    [delivery] = await story.fetch()
    [message] = delivery.messages
    assert home_of(topic, unpack_about(message.about, message.uid).body) == (topic, "@odd")
    await story.ack(delivery.receipt)
    names = await story.take_names()
    assert await let_go(engine.store, topic, names, lambda *_: None) == {topic: ["@odd"]}
    await leave(engine, topic, keeper.topic)


Play = Callable[[Engine, str], Awaitable[None]]


def waits(mode: str) -> Play:
    return lambda engine, topic: test_what_waits_for_a_consumer_of_the_dead_letter_topic_goes_all_the_same(
        engine, topic, mode, False
    )


def is_in_hands(engine: Engine, topic: str) -> Awaitable[None]:
    return test_what_a_consumer_of_the_dead_letter_topic_has_stays(engine, topic, "key_shared", False)


def fails_again(purge: bool, sent: bool) -> Play:
    return lambda engine, topic: test_a_dead_letter_that_has_failed_again_keeps_its_body(
        engine, topic, purge, sent
    )


PLANTS: dict[str, tuple[Play, str, str]] = {
    "what somebody has is redriven": (is_in_hands, "== 'leased'", "== 'nowhere'"),
    "what was given back waits in its lane still": (
        waits("key_shared"),
        "take_within(mode, { keys[entry] }, entry, entry, function() end)",
        "",
    ),
    "what was given back waits in its run still": (
        waits("shared"),
        "take_within(mode, { keys[entry] }, entry, entry, function() end)",
        "",
    ),
    "its retry count stays": (waits("failover"), "drop_retries(settled)", ""),
    "what is redriven is kept as well": (waits("exclusive"), "  delete_entries(ranges)\n", ""),
    "what is redriven is lost": (waits("exclusive"), "if how == 'redriven' then", "if false then"),
    "a redrive takes the body that another dead letter has": (
        fails_again(purge=False, sent=True),
        "if how == 'redriven' and retry_limits then",
        "if false then",
    ),
    "a purge deletes the body that another dead letter has": (
        fails_again(purge=True, sent=True),
        "drop(ranges, #names > 0 and cjson.encode(names) or '', true)",
        "delete_entries(ranges) doom_bodies(ranges, #names > 0 and cjson.encode(names) or '', true)",
    ),
    "a dead letter that is noted goes with its message": (
        fails_again(purge=True, sent=False),
        "if must_bury_first(ranges) then",
        "if false then",
    ),
}


@pytest.mark.parametrize("name", PLANTS)
async def test_these_stories_find_out_that(name: str, backends: Backends, topic: str) -> None:
    play, text, becomes = PLANTS[name]
    sources = read_sources()
    assert sources["subscription/withdraw"].count(text) == 1, f"{text!r} is there once"
    sources["subscription/withdraw"] = sources["subscription/withdraw"].replace(text, becomes)
    time = ManualTime(backends.url(SERVERS[0]), sources)
    await time.start()
    try:
        with pytest.raises((AssertionError, ValueError)):
            await play(time.engine, topic)
    finally:
        for left in await time.engine.topics():
            if left.startswith(topic):
                await time.engine.delete_topic(left)
        await time.engine.close()
