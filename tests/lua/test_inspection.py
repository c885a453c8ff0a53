"""What a subscription has not settled, counted and looked at, also in logs with holes."""

import random
from collections.abc import AsyncIterator

import pytest

from keylane_broker.engine.engine import Engine
from keylane_broker.engine.filters import Filter
from keylane_broker.engine.values import SubscriptionSettings
from keylane_broker.inspect import counts as inspection
from keylane_broker.inspect.peek import peek
from tests.support.servers import CLUSTERS, SERVERS, Backends, look_and_leave
from tests.support.story import Story, part


@pytest.fixture(params=[*SERVERS, *CLUSTERS])
async def engine(request: pytest.FixtureRequest, backends: Backends, topic: str) -> AsyncIterator[Engine]:
    """An engine on servers whose answers come as they are: fakeredis has redis-py's shapes of them."""
    engine = Engine.connect(backends.url(request.param))
    yield engine
    await look_and_leave(engine, topic)


async def fresh(story: Story, name: str = "late") -> int:
    """How many messages a subscription has still to deliver for the first time."""
    counts = await inspection.count_subscription(
        story.engine.store, story.topic, name, 1, await story.engine.time_ms()
    )
    return counts.fresh


async def peeked(story: Story, limit: int = 10, name: str = "late") -> list[int]:
    """The entries that a look at a subscription shows."""
    found = await peek(story.engine.store, story.topic, name, [0], limit)
    return [item.message.entry for item in found]


async def with_holes(engine: Engine, topic: str, published: int, *settled: tuple[int, int]) -> Story:
    """A partition whose one subscription holds all that was published, and has settled some of it."""
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish_many(published)
    [delivery] = await story.fetch(permits=published)
    for first, last in settled:
        await story.ack(part(delivery.receipt, first, last))
    return story


async def test_what_is_not_in_the_log_is_neither_counted_nor_looks_like_the_end(
    engine: Engine, topic: str
) -> None:
    story = await with_holes(engine, topic, 300, (2, 299))
    await engine.create_subscription(topic, "late", start="earliest")
    assert (await fresh(story), await peeked(story)) == (2, [1, 300])
    assert await peeked(story, 1) == [1]
    await engine.seek(topic, "late", 100, 0)
    assert (await fresh(story), await peeked(story)) == (1, [300])
    await story.publish_many(3)
    assert (await fresh(story), await peeked(story, 3)) == (4, [300, 301, 302])
    await engine.seek(topic, "late", "latest")
    assert (await fresh(story), await peeked(story)) == (0, [])


async def test_a_log_of_which_nothing_is_left_owes_nothing(engine: Engine, topic: str) -> None:
    story = await with_holes(engine, topic, 9, (1, 9))
    await engine.create_subscription(topic, "late", start="earliest")
    assert (await fresh(story), await peeked(story)) == (0, [])
    assert await fresh(story, "nobody") == 0


async def test_every_position_in_a_log_with_holes_has_its_own_count(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("counts", "peek"):
        monkeypatch.setattr(f"keylane_broker.inspect.{module}.PAGE", 4)
    chance = random.Random(11)
    story = await with_holes(
        engine, topic, 40, *((entry, entry) for entry in chance.sample(range(1, 41), 20))
    )
    await engine.create_subscription(topic, "late", start="earliest")
    await story.publish_many(3)
    there = await story.log()
    for position in range(1, 44):
        await engine.seek(topic, "late", position, 0)
        owed = [entry for entry in there if entry >= position]
        assert (await fresh(story), await peeked(story, 3)) == (len(owed), owed[:3])


async def test_counting_a_large_log_with_holes_stops_at_a_bound_and_answers_no_less_than_is_owed(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = await with_holes(engine, topic, 60, (25, 29))
    await engine.create_subscription(topic, "late", start=15)
    assert await fresh(story) == 41
    monkeypatch.setattr(inspection, "PAGE", 2)
    monkeypatch.setattr(inspection, "_PAGES", 3)
    assert await fresh(story) == 46  # the hole lies behind the six that were read
    await engine.seek(topic, "late", 3, 0)
    assert await fresh(story) == 55  # of 53; there are no more in the log


async def test_what_matches_a_filter_is_counted_and_shown(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("all")
    await story.publish("us-1", "eu-1")
    europe = SubscriptionSettings(filter=Filter(keys="eu-*"))
    await engine.create_subscription(topic, "late", europe, start="earliest")
    await engine.join(story.lease, "late", "c")
    await story.publish("us-2", "eu-2", "us-3", "eu-3")
    assert (await fresh(story), await fresh(story, "all")) == (3, 6)
    assert await peeked(story) == [2, 4, 6]
    assert await peeked(story, 2) == [2, 4]
    assert await story.take(permits=1, name="late") == [2]
    assert await fresh(story) == 2
    assert await peeked(story) == [2, 4, 6]
