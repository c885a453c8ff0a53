"""What each partition had to do: messages published and delivered, and time that scripts took."""

from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Capacity, TopicSettings
from tests.support.story import HOUR_MS, Story, message, must_acquire, receipts


async def test_the_load_of_each_partition_since_the_last_look(engine: Engine, topic: str) -> None:
    await engine.create_topic(topic, TopicSettings(partitions=3))
    await engine.create_subscription(topic, "s")
    leases = [await must_acquire(engine, topic, partition) for partition in range(3)]
    engine.take_loads()
    await engine.publish(leases[0], [message() for _ in range(500)])
    await engine.publish(leases[2], [message() for _ in range(5)])
    await engine.join(leases[2], "s", "c", HOUR_MS)
    result = await engine.fetch(leases[2], "s", [Capacity("c", 3)])
    await engine.ack(leases[2], "s", receipts(result.deliveries))
    loads = engine.take_loads()
    assert {key: messages for key, (messages, _) in loads.items()} == {(topic, 0): 500, (topic, 2): 8}
    assert all(0 < microseconds < 10_000_000 for _, microseconds in loads.values())
    assert engine.take_loads() == {}


async def test_more_work_takes_more_time(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()

    async def time_of(count: int) -> int:
        spent = []
        for _ in range(5):
            engine.take_loads()
            await story.publish_many(count)
            spent.append(engine.take_loads()[topic, 0][1])
        return min(spent)

    assert await time_of(1_000) > await time_of(1)


async def test_a_refused_call_takes_time_too_and_counts_no_messages(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    published = await story.publish("a")
    engine.take_loads()
    again = await engine.publish(story.lease, [message(uid="twice"), message(uid="twice")])
    assert (published.stored, again.stored) == (1, 1)
    [(messages, microseconds)] = engine.take_loads().values()
    assert messages == 1
    assert microseconds > 0
