"""Subscriptions: where they start, where they are moved to, and what goes when they go."""

from datetime import UTC, datetime

import msgspec
import pytest

from keylane.errors import InvalidArgument, SubscriptionExists, SubscriptionNotFound, TopicNotFound
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Backoff, SubscriptionSettings, TopicSettings
from keylane_broker.limits import FOREVER
from tests.support.clock import ManualTime
from tests.support.story import Story, must_acquire, part, receipts


def instant(ms: int) -> datetime:
    """A time of the test clock."""
    return datetime.fromtimestamp(ms / 1000, UTC)


async def publish_over_time(timed: ManualTime, story: Story) -> list[int]:
    """Entries 1 to 6, two at a time, a second apart; answers the three instants."""
    instants = []
    for _ in range(3):
        await timed.advance(1_000)
        await story.publish("a", "b")
        instants.append(timed.now_ms)
    return instants


async def test_latest_is_everything_after_the_call_and_earliest_everything_there_is(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("first")
    await story.publish_many(2)
    await story.subscribe("latest", start="latest")
    await story.subscribe("earliest", start="earliest")
    await story.subscribe("entry", start=2)
    await story.publish_many(1)
    assert await story.take(name="latest") == [3]
    assert await story.take(name="earliest") == [1, 2, 3]
    assert await story.take(name="entry") == [2, 3]


async def test_a_start_beyond_the_log_is_brought_inside_it(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("first")
    await story.publish_many(3)
    [receipt] = receipts(await story.fetch(name="first"))
    await story.ack(part(receipt, 1), name="first")
    await story.subscribe("before", start=1)
    await story.subscribe("after", start=99)
    await story.publish_many(1)
    assert await story.take(name="before") == [2, 3, 4]
    assert await story.take(name="after") == [4]


async def test_a_start_in_time_is_the_first_message_published_at_or_after_it(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe("keeper", consumers=())
    _, second, third = await publish_over_time(timed, story)
    for name, at, expected in (
        ("long-ago", 0, [1, 2, 3, 4, 5, 6]),
        ("exactly", second, [3, 4, 5, 6]),
        ("just-after", second + 1, [5, 6]),
        ("future", third + 1, []),
    ):
        await story.subscribe(name, start=instant(at))
        assert await story.take(name=name) == expected


async def test_a_time_is_found_in_a_log_with_holes_and_several_ledgers(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe("keeper")
    instants = []
    for _ in range(6):
        await timed.advance(1_000)
        await story.publish_many(3)
        instants.append(timed.now_ms)
        story.lease = await must_acquire(timed.engine, topic)
    [receipt] = receipts(await story.fetch(name="keeper"))
    for first, last in ((2, 5), (8, 8), (10, 12)):
        await story.ack(part(receipt, first, last), name="keeper")
    left = [1, 6, 7, 9, 13, 14, 15, 16, 17, 18]
    assert await story.log() == left
    for number, at in enumerate(instants):
        name = f"from-{number}"
        await story.subscribe(name, start=instant(at))
        assert await story.take(name=name) == [entry for entry in left if entry > 3 * number]


async def test_a_subscription_exists_once_and_keeps_its_settings(engine: Engine, topic: str) -> None:
    await engine.create_topic(topic, TopicSettings(partitions=3))
    settings = SubscriptionSettings("key_shared", "at_most_once", 1_234, Backoff(0.5, 3.0, 60.0, 0.25))
    await engine.create_subscription(topic, "s", settings)
    made = await engine.describe_subscription(topic, "s")
    assert made == msgspec.structs.replace(settings, incarnation=made.incarnation)
    with pytest.raises(SubscriptionExists):
        await engine.create_subscription(topic, "s", settings)
    await engine.create_subscription(topic, "s", settings, exist_ok=True)
    with pytest.raises(SubscriptionExists, match="key_shared, not shared"):
        await engine.create_subscription(topic, "s", exist_ok=True)
    assert await engine.describe_subscription(topic, "s") == made


async def test_deleting_a_subscription_frees_what_only_it_owed(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("s")
    await story.subscribe("t", "key_shared")
    await story.publish("a", "b", "a", "b")
    for receipt in receipts(await story.fetch(name="s")):
        await story.ack(part(receipt, 1), part(receipt, 4), name="s")
    lane = next(
        receipt for receipt in receipts(await story.fetch(name="t", permits=3)) if receipt.lane == "=a"
    )
    await story.ack(part(lane, 1), name="t")
    assert await story.log() == [2, 3, 4]
    await engine.delete_subscription(topic, "t")
    assert await story.log() == [2, 3]
    assert not await story.exists(*set(story.sub("t")) - set(story.keys))
    with pytest.raises(SubscriptionNotFound):
        await engine.describe_subscription(topic, "t")


async def test_deleting_the_last_subscription_empties_a_long_log_step_by_step(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(consumers=())
    for _ in range(2):
        await story.publish_many(600)
    await engine.delete_subscription(topic, "s")
    assert await story.log() == []


async def test_deleting_twice_says_that_it_is_gone(engine: Engine, topic: str) -> None:
    await engine.create_topic(topic)
    await engine.create_subscription(topic, "s")
    await engine.delete_subscription(topic, "s")
    with pytest.raises(SubscriptionNotFound):
        await engine.delete_subscription(topic, "s")


async def test_seek_ends_leases_and_retry_counts(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, TopicSettings(retention_ms=FOREVER))
    await story.subscribe(mode="key_shared")
    await story.publish("a", "a", "b", "")
    held = receipts(await story.fetch())
    await story.nack(held[0])
    await engine.seek(topic, "s", "earliest")
    assert await story.retries() == {}
    assert set(await story.ack(*held[1:])) == {"stale"}
    assert sorted(await story.take()) == [1, 2, 3, 4]


async def test_seek_to_latest_skips_and_frees_what_nobody_else_owes(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("s")
    await story.subscribe("t")
    await story.publish_many(3)
    [receipt] = receipts(await story.fetch(name="t"))
    await story.ack(part(receipt, 1), name="t")
    await engine.seek(topic, "s", "latest")
    assert await story.log() == [2, 3]
    await story.publish_many(1)
    assert await story.take(name="s") == [4]


async def test_seek_to_an_entry_is_inclusive_and_touches_one_partition(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, TopicSettings(partitions=2, retention_ms=FOREVER))
    other = Story(engine, await must_acquire(engine, topic, 1))
    await story.subscribe()
    await engine.join(other.lease, "s", "c")
    for place in (story, other):
        await place.publish_many(3)
        await place.ack(*receipts(await place.fetch()))
    await engine.seek(topic, "s", 2, partition=1)
    assert await story.take() == []
    assert await other.take() == [2, 3]


async def test_seek_to_a_time_moves_every_partition(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic, TopicSettings(partitions=2, retention_ms=FOREVER))
    other = Story(timed.engine, await must_acquire(timed.engine, topic, 1))
    await story.subscribe()
    await timed.engine.join(other.lease, "s", "c", 3_600_000)
    _, second, _ = await publish_over_time(timed, story)
    await other.publish_many(1)
    for place in (story, other):
        await place.ack(*receipts(await place.fetch()))
    await timed.engine.seek(topic, "s", instant(second))
    assert await story.take() == [3, 4, 5, 6]
    assert await other.take() == [1]


async def test_subscriptions_need_a_topic(engine: Engine, topic: str) -> None:
    for call in (
        lambda: engine.create_subscription(topic, "s"),
        lambda: engine.delete_subscription(topic, "s"),
        lambda: engine.describe_subscription(topic, "s"),
        lambda: engine.seek(topic, "s", "latest"),
    ):
        with pytest.raises(TopicNotFound, match=topic):
            await call()
    await engine.create_topic(topic)
    with pytest.raises(SubscriptionNotFound):
        await engine.seek(topic, "s", "latest")
    with pytest.raises(InvalidArgument, match=f"no partition 7 in topic '{topic}': it has 0 to 0"):
        await engine.seek(topic, "s", 1, partition=7)


async def test_scripts_on_a_partition_that_was_deleted_answer_no_topic(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await engine.delete_topic(topic)
    keys = story.sub()
    for script, arguments in (
        ("create", ["1", "1", "latest", ""]),
        ("delete", ["1", "1"]),
        ("seek", ["latest", ""]),
        ("drop_unowed", [1, 10]),
        ("fetch", [10, "c", 1, 1]),
        ("expire", [10]),
    ):
        answer = await engine.store.run(f"subscription/{script}", keys, story.lease.text, "s", *arguments)
        assert answer == ["NO_TOPIC"]
    with pytest.raises(TopicNotFound):
        await story.publish("a")
