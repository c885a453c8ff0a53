"""A free key moves to a named consumer: that is the one who gets it next."""

import pytest

from keylane.errors import InvalidArgument, MessageLeased, Overloaded, SubscriptionNotFound
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Capacity
from keylane_broker.inspect.topic_checker import check_topic
from tests.support.clock import ManualTime
from tests.support.story import Story, entries, message, receipts
from tests.support.turns import turn


async def begin(engine: Engine, topic: str) -> Story:
    """A key-shared subscription with two consumers."""
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared", consumers=("c", "d"))
    return story


async def fetch(story: Story, **permits: int) -> dict[str, list[int]]:
    """What consumers with so many permits get; the first one has most spare capacity."""
    rooms = [
        Capacity(name, count, 30_000, 100 - place) for place, (name, count) in enumerate(permits.items())
    ]
    result = await story.engine.fetch(story.lease, "s", rooms)
    return {name: entries([one for one in result.deliveries if one.consumer == name]) for name in permits}


async def test_what_is_published_next_goes_to_that_consumer(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    assert await engine.move_key(topic, "s", 0, "a", "d") == 0
    await story.publish("a", "b", "a")
    assert await fetch(story, c=9, d=9) == {"c": [2], "d": [1, 3]}
    assert not await story.exists(story.sub().sub + ":wishes")
    await story.publish("a")
    assert (await fetch(story, c=9, d=9))["d"] == [4], "it holds the key"


async def test_what_waits_goes_to_that_consumer(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    await story.publish("a", "a", "b")
    [first, *_] = receipts(await story.fetch("c", 2))
    await story.nack(first)
    assert await engine.move_key(topic, "s", 0, "a", "d") == 2
    assert await fetch(story, c=9, d=9) == {"c": [3], "d": [1, 2]}


async def test_it_waits_for_room_and_no_longer_than_the_session(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await begin(engine, topic)
    await engine.join(story.lease, "s", "e", 5_000)
    await engine.move_key(topic, "s", 0, "a", "e")
    await story.publish("a", "b")
    result = await engine.fetch(story.lease, "s", [Capacity("c", 9)])
    assert entries(result.deliveries) == [2], "nobody else gets it, and no other key waits for it"
    while result.more:
        result = await engine.fetch(story.lease, "s", [Capacity("c", 9)])
        assert result.deliveries == []
    assert timed.now_ms < result.next_due_ms <= timed.now_ms + 250, "it is looked at again"
    await timed.advance(1_000)
    assert await fetch(story, c=9, e=1) == {"c": [], "e": [1]}
    await story.ack(*receipts(await engine.list_leases(story.lease, "s", "e")))
    await engine.move_key(topic, "s", 0, "a", "e")
    await timed.advance(5_000)
    await story.publish("a")
    assert await fetch(story, c=9) == {"c": [3]}
    assert not await story.exists(story.sub().sub + ":wishes")


async def test_what_is_refused(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    await story.subscribe("shared")
    await story.publish("a")
    await story.fetch("c")
    with pytest.raises(MessageLeased, match="consumer 'c' has messages of key 'a'"):
        await engine.move_key(topic, "s", 0, "a", "d")
    with pytest.raises(InvalidArgument, match="no consumer 'x' is connected"):
        await engine.move_key(topic, "s", 0, "b", "x")
    with pytest.raises(InvalidArgument, match="has mode shared"):
        await engine.move_key(topic, "shared", 0, "b", "c")
    with pytest.raises(SubscriptionNotFound):
        await engine.move_key(topic, "none", 0, "b", "c")
    for number in range(100):
        await engine.move_key(topic, "s", 0, f"k{number}", "d")
    with pytest.raises(Overloaded):
        await engine.move_key(topic, "s", 0, "one-more", "d")
    await engine.move_key(topic, "s", 0, "k7", "c")  # which is known


async def test_the_fast_path_steps_aside(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    await story.publish("x")
    await story.ack(*receipts(await story.fetch()))
    await engine.move_key(topic, "s", 0, "a", "d")
    rooms = [Capacity("c", 9), Capacity("d", 9)]
    assert await turn(engine, story.lease, "s", [message("a")], rooms) is None
    await story.publish("a")
    assert await fetch(story, c=9, d=9) == {"c": [], "d": [2]}
    assert await turn(engine, story.lease, "s", [message("b")], rooms) is not None
    assert await check_topic(engine, topic) == []
