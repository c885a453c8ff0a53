"""Multicast: a consumer's place is made with its session, is owed what comes meanwhile, and goes with it."""

import asyncio

import pytest

from keylane.errors import SubscriptionNotFound
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.filters import Filter
from keylane_broker.engine.values import SubscriptionSettings
from keylane_broker.store.scripts import read_sources
from tests.support.clock import ManualTime
from tests.support.servers import SERVERS, Backends
from tests.support.story import HOUR_MS, Story, entries, receipts

MULTICAST = SubscriptionSettings("multicast")


async def begin(engine: Engine, topic: str, settings: SubscriptionSettings = MULTICAST) -> Story:
    """A topic with a multicast subscription."""
    story = await Story.begin(engine, topic)
    await engine.create_subscription(topic, "news", settings)
    return story


async def register(story: Story, consumer: str, session_ms: int = HOUR_MS) -> bool:
    """Open a session."""
    settings = await story.engine.describe_subscription(story.topic, "news")
    return await story.engine.register(story.lease, "news", consumer, settings, session_ms)


async def settle(story: Story, consumer: str) -> list[int]:
    """What a consumer gets, acked."""
    found = await story.fetch(consumer, name=f"news@{consumer}")
    if found:
        await story.ack(*receipts(found), name=f"news@{consumer}")
    return entries(found)


async def test_everybody_who_is_registered_gets_everything(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    assert (await story.publish("a")).no_subscribers == 1
    assert not await register(story, "anna")
    await story.publish("a", "b")
    assert not await register(story, "bert")
    await story.publish("c")
    assert await settle(story, "anna") == [1, 2, 3]
    assert await story.log() == [3], "bert was not there for the others"
    assert await register(story, "anna"), "it is there"
    assert await settle(story, "bert") == [3]
    assert await story.log() == []
    assert await engine.subscriptions(topic) == ["news"]
    assert await engine.places(topic, 0, "news") == ["news@anna", "news@bert"]


async def test_a_place_goes_with_a_leave_and_with_it_what_only_it_was_owed(
    engine: Engine, topic: str
) -> None:
    story = await begin(engine, topic)
    for consumer in ("anna", "bert"):
        await register(story, consumer)
    await story.publish("a", "b")
    await story.fetch("anna", 1, name="news@anna")
    assert await settle(story, "bert") == [1, 2]
    assert await story.log() == [1, 2]
    await engine.leave(story.lease, "news@anna", "anna")
    assert await story.log() == []
    assert await engine.places(topic, 0, "news") == ["news@bert"]
    assert not await story.exists(*story.sub("news@anna")[4:14])
    await engine.leave(story.lease, "news@bert", "bert")
    assert (await story.publish("c")).no_subscribers == 1


async def test_a_place_goes_when_its_session_ends(timed: ManualTime, topic: str) -> None:
    story = await begin(timed.engine, topic)
    await register(story, "anna", 10_000)
    await register(story, "bert", 60_000)
    await story.publish("a")
    await story.fetch("anna", name="news@anna")
    await timed.advance(9_999)
    assert await register(story, "anna", 10_000), "away for less than its session"
    [held] = await timed.engine.list_leases(story.lease, "news@anna", "anna")
    assert entries([held]) == [1]
    await timed.advance(10_000)
    result = await timed.engine.expire(story.lease, "news@anna")
    assert result.expired_consumers == ["anna"]
    assert await timed.engine.places(topic, 0, "news") == ["news@bert"]
    assert await story.log() == [1]
    assert not await register(story, "anna"), "it begins anew"
    assert await settle(story, "anna") == []


async def test_who_comes_back_too_late_begins_anew(timed: ManualTime, topic: str) -> None:
    """Though nobody has cleared its session yet."""
    story = await begin(timed.engine, topic)
    await register(story, "anna", 10_000)
    await story.publish("a")
    before = await story.fetch("anna", name="news@anna")
    await timed.advance(10_000)
    assert not await register(story, "anna")
    assert await story.log() == []
    await story.publish("b")
    after = await story.fetch("anna", name="news@anna")
    assert entries(after) == [2]
    assert after[0].receipt.token > before[0].receipt.token
    assert await story.ack(*receipts(before), name="news@anna") == ["stale"]


PLANTS = {
    "a place stays when its session ends": ("lib/departures", "return remove()", "return"),
    "a place begins with what was there": (
        "subscription/register",
        "redis.call('HSET', subs, name, last_entry)",
        "redis.call('HSET', subs, name, 0)",
    ),
    "who comes back too late goes on": (
        "subscription/register",
        "if session and session <= now then",
        "if false then",
    ),
    "who comes back in time begins anew": ("subscription/register", "if cursor then", "if false then"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
async def test_these_stories_find_out_that(name: str, backends: Backends, topic: str) -> None:
    file, text, becomes = PLANTS[name]
    sources = read_sources()
    assert sources[file].count(text) == 1, f"{text!r} is there once in {file}.lua"
    sources[file] = sources[file].replace(text, becomes)
    stories = (test_a_place_goes_when_its_session_ends, test_who_comes_back_too_late_begins_anew)
    failed = 0
    for number, story in enumerate(stories):
        time = ManualTime(backends.url(SERVERS[0]), sources)
        await time.start()
        try:
            async with asyncio.timeout(20):
                await story(time, f"{topic}-{number}")
        except (AssertionError, ValueError, TimeoutError):
            failed += 1
        finally:
            await time.engine.delete_topic(f"{topic}-{number}")
            await time.engine.close()
    assert failed


async def test_a_subscription_that_was_deleted_takes_nobody_in(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    settings = await engine.describe_subscription(topic, "news")
    await register(story, "anna")
    await story.publish("a")
    await engine.delete_subscription(topic, "news")
    assert (await story.log(), await engine.places(topic, 0, "news")) == ([], [])
    with pytest.raises(SubscriptionNotFound):
        await engine.register(story.lease, "news", "bert", settings)
    assert (await story.publish("a")).no_subscribers == 1


async def test_a_filter_holds_for_each_place(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic, SubscriptionSettings("multicast", filter=Filter(keys="eu-*")))
    for consumer in ("anna", "bert"):
        await register(story, consumer)
    await story.publish("eu-1", "us-1", "eu-2")
    assert await settle(story, "anna") == await settle(story, "bert") == [1, 2]
    for consumer in ("anna", "bert"):
        await engine.leave(story.lease, f"news@{consumer}", consumer)
    assert not await story.exists(story.keys.filters)
