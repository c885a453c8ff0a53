"""What a worker remembers of its newest messages never stands in the way of what Redis says."""

from keylane_broker.engine.engine import Engine
from keylane_broker.engine.tail import TailCache
from keylane_broker.engine.values import Capacity, Lease, PublishResult
from tests.support.story import HOUR_MS, Story, entries, message, must_acquire, receipts


async def test_a_topic_made_anew_starts_without_the_messages_of_the_old_one(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish(*"abcdefghij")
    await story.fetch(permits=2)  # from now on the engine knows the cursor, and keys after it
    await engine.delete_topic(topic)

    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish("x", "y")
    assert await story.take() == [1, 2]
    await story.publish("z")
    [delivery] = await story.fetch()
    assert [found.key for found in delivery.messages] == ["z"]


async def test_what_redis_has_lost_is_not_delivered_from_memory(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish(*"abcdef")
    await story.fetch(permits=2)
    # A failover to a replica that had not seen the newest three, with the lease as it was.
    for entry in (4, 5, 6):
        await engine.store.command("XDEL", story.keys.log, story.id(entry))
    await engine.store.command("HSET", story.keys.meta, "last", 3)
    assert await story.take() == [3]

    other = await must_acquire(engine, topic)
    assert other.epoch > story.lease.epoch
    story.lease = other
    await engine.publish(other, [message("x"), message("y")])
    assert [found.key for delivery in await story.fetch() for found in delivery.messages] == ["x", "y"]
    await engine.store.command("XTRIM", story.keys.log, "MAXLEN", 0)
    await engine.ack(other, "s", receipts(await engine.list_leases(other, "s", "c")))


async def test_an_engine_never_goes_below_an_epoch_that_it_has_held(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await engine.store.command("HSET", story.keys.meta, "epoch", 0)  # as a failover may leave it
    assert (await must_acquire(engine, topic)).epoch > story.lease.epoch


async def test_another_worker_s_fetch_does_not_confuse_the_first(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish("a")
    assert await story.take() == [1]
    await story.publish(*"bcd")
    other = Engine(engine.store)  # the same lease, another memory
    fetched = await other.fetch(story.lease, "s", [Capacity("c", 2, HOUR_MS)])
    assert entries(fetched.deliveries) == [2, 3]
    await story.publish("e")
    assert await story.take() == [4, 5]


def _published(first: int, stored: int) -> PublishResult:
    return PublishResult(1, first, stored, 0, 5, {}, "memory", stored)


def test_the_memory_is_bounded_and_drops_the_oldest_first() -> None:
    lease = Lease("t", 0, "w", 1)
    cache = TailCache(limit=100)
    cache.begin(lease)
    for first in range(1, 5_001, 500):
        flat = [text for n in range(500) for text in ("k", f"u{first + n}", "1   ")]
        cache.add(lease, flat, _published(first, 500), size=30)
    tail = cache.of(lease)
    assert [first for first in range(1, 5_001, 500) if first in tail] == [3_501, 4_001, 4_501]
    assert tail.read(3_500, 3_501) is None
    assert tail.read(4_000, 4_001) == ["k", "u4000", "5 1   ", "k", "u4001", "5 1   "]
    assert tail.read(5_000, 5_001) is None
    # Redis gives an entry again: it has lost the old one, and what came after it.
    cache.add(lease, ["k", "new", "1   "], _published(4_001, 1), size=30)
    assert cache.of(lease).read(4_001, 4_001) == ["k", "new", "5 1   "]
    assert 4_000 not in cache.of(lease)
    assert 4_002 not in cache.of(lease)
