"""Fetching in shared mode: runs of entries, spread over whoever has room."""

from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Capacity, TopicSettings
from tests.support.clock import ManualTime
from tests.support.story import Story, entries, fetch_settled, part, receipts


async def test_a_delivery_is_one_run_under_one_receipt(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish("a", "b", "a")
    [delivery] = await story.fetch()
    assert (delivery.consumer, delivery.receipt.first, delivery.receipt.last) == ("c", 1, 3)
    assert delivery.receipt.lane == ""
    assert await story.take() == []


async def test_a_consumer_never_holds_more_than_its_permits(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish_many(5)
    assert await story.take(permits=2) == [1, 2]
    assert await story.take(permits=0) == []
    assert await story.take(permits=2) == [3, 4]
    assert await story.take(permits=2) == [5]


async def test_a_backlog_is_shared_evenly_and_nobody_gets_what_another_has(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(consumers=("c1", "c2", "c3"))
    await story.publish_many(30)
    rooms = [Capacity("c1", 100), Capacity("c2", 100), Capacity("c3", 100)]
    result = await engine.fetch(story.lease, "s", rooms)
    got = {delivery.consumer: entries([delivery]) for delivery in result.deliveries}
    assert sorted(len(found) for found in got.values()) == [10, 10, 10]
    assert sorted(entries(result.deliveries)) == list(range(1, 31))


async def test_the_limit_ends_a_call_that_says_there_is_more(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish_many(5)
    first = await engine.fetch(story.lease, "s", [Capacity("c", 100)], limit=3)
    assert (entries(first.deliveries), first.more) == ([1, 2, 3], True)
    second = await engine.fetch(story.lease, "s", [Capacity("c", 97)], limit=3)
    assert (entries(second.deliveries), second.more) == ([4, 5], False)


async def test_a_consumer_without_a_session_is_named_and_gets_nothing(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    await timed.engine.join(story.lease, "s", "brief", session_ms=1_000)
    await story.publish_many(2)
    await timed.advance(1_000)
    rooms = [Capacity("stranger", 10), Capacity("brief", 10)]
    result = await timed.engine.fetch(story.lease, "s", rooms)
    assert result.unknown_consumers == ["stranger", "brief"]
    assert result.deliveries == []


async def test_every_subscription_gets_every_message(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    for name in ("s", "t"):
        await story.subscribe(name)
    await story.publish_many(3)
    assert await story.take(name="s") == await story.take(name="t") == [1, 2, 3]


async def test_tokens_only_grow_even_through_a_subscription_made_anew(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    tokens = []
    for _ in range(3):
        await story.publish_many(1)
        tokens += [receipt.token for receipt in receipts(await story.fetch())]
    await engine.delete_subscription(topic, "s")
    await story.subscribe()
    await story.publish_many(1)
    tokens += [receipt.token for receipt in receipts(await story.fetch())]
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 4


async def test_what_came_back_and_what_is_fresh_take_turns(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish_many(4)
    [delivery] = await story.fetch(permits=2)
    await story.nack(delivery.receipt)
    assert sorted([await story.take(permits=2), await story.take(permits=2)]) == [[1, 2], [3, 4]]


async def test_a_run_that_came_back_is_served_in_parts_to_small_consumers(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(consumers=("c", "d"))
    await story.publish_many(5)
    [delivery] = await story.fetch()
    await story.nack(delivery.receipt)
    assert await story.take("c", 2) == [1, 2]
    assert await story.take("d", 2) == [3, 4]
    assert await story.take("c", 2) == [5]


async def test_the_answer_names_the_instant_of_the_next_deadline(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    await story.publish_many(2)
    rooms = [Capacity("c", 1, lease_ms=7_000)]
    first = await timed.engine.fetch(story.lease, "s", rooms)
    assert first.now_ms == timed.now_ms
    assert first.deliveries[0].deadline_ms == first.next_due_ms == timed.now_ms + 7_000


async def test_the_answer_names_the_instant_at_which_a_delayed_message_comes_back(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    await story.publish_many(1)
    [delivery] = await story.fetch()
    await story.nack(delivery.receipt, delay_ms=500)
    waiting = await timed.engine.fetch(story.lease, "s", [Capacity("c", 1)])
    assert (waiting.deliveries, waiting.next_due_ms) == ([], timed.now_ms + 500)
    await timed.advance(499)
    assert await story.take() == []
    await timed.advance(1)
    assert await story.take() == [1]


async def test_a_subscription_that_starts_in_a_log_with_holes_skips_them(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("old")
    await story.publish_many(9)
    [delivery] = await story.fetch(name="old")
    for first, last in ((1, 2), (5, 5), (8, 8)):
        await story.ack(part(delivery.receipt, first, last), name="old")
    assert await story.log() == [3, 4, 6, 7, 9]
    await story.subscribe("new", start="earliest")
    await story.publish_many(2)
    assert await story.take(permits=3, name="new") == [3, 4, 6]
    assert await story.take(name="new") == [7, 9, 10, 11]


async def test_at_most_once_is_settled_before_anybody_sees_it(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish_many(3)
    result = await fetch_settled(engine, story.lease, "s", [Capacity("c", 2)])
    assert entries(result.deliveries) == [1, 2]
    assert await story.log() == [3]
    assert await engine.list_leases(story.lease, "s", "c") == []
    assert (await fetch_settled(engine, story.lease, "s", [Capacity("c", 0)])).deliveries == []


async def test_partitions_of_one_topic_do_not_see_each_other(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, TopicSettings(partitions=2))
    lease = await engine.acquire(topic, 1, "w1", 60_000)
    assert lease is not None
    other = Story(engine, lease)
    await story.subscribe()
    await engine.join(other.lease, "s", "c")
    await story.publish_many(2)
    await other.publish_many(1)
    assert await story.take() == [1, 2]
    assert await other.take() == [1]


async def test_a_run_that_came_back_is_shared_among_all_who_have_room(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(consumers=("c", "d"))
    await story.publish_many(6)
    await story.nack(*receipts(await story.fetch()))
    fetched = await engine.fetch(story.lease, "s", [Capacity("c", 3), Capacity("d", 3)])
    assert sorted(entries(fetched.deliveries)) == [1, 2, 3, 4, 5, 6]
