"""A backlog that is full takes nothing more, of a batch what fits, and none before another."""

from keylane.wire import pack_about
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Outgoing, Published, TopicSettings
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.limits import FOREVER
from tests.support.clock import ManualTime
from tests.support.story import Story, message, part, receipts


def full(story: Story, *entries: int | None) -> list[Published]:
    """Answers: entries that were stored, None for what had no room."""
    return [Published(None, full=True) if entry is None else Published(story.id(entry)) for entry in entries]


async def test_what_fits_is_stored_and_nothing_behind_what_does_not(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, TopicSettings(backlog_quota=4))
    await story.subscribe()
    await story.subscribe("t", "key_shared")
    assert (await story.publish("a", "b", "c")).each() == full(story, 1, 2, 3)
    batch = [message("d"), message("e", "u5"), message("f")]
    assert (await engine.publish(story.lease, batch)).each() == full(story, 4, None, None)
    assert await story.log() == [1, 2, 3, 4]
    again = await engine.publish(story.lease, [batch[0], batch[1]])
    assert again.each() == [Published(story.id(4), duplicate=True), Published(None, full=True)]
    [held] = receipts(await story.fetch())
    await story.ack(part(held, 1, 2))
    assert (await story.publish("x")).full == [0]  # the other one is behind
    for receipt in receipts(await story.fetch(name="t")):
        await story.ack(receipt, name="t")
    assert (await engine.publish(story.lease, batch[1:])).each() == full(story, 5, 6)  # it leaves no mark
    assert (await story.publish("x")).full == [0]
    await engine.change_topic(topic, backlog_quota=0)
    assert (await story.publish("x", "y")).stored == 2


async def test_what_waits_for_its_time_counts(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, TopicSettings(backlog_quota=3))
    await story.subscribe()
    result = await engine.delay(story.lease, [message() for _ in range(2)], [2**41] * 2)
    assert (result.kept, result.full) == (2, [])
    assert (await story.publish("a", "b")).full == [1]
    result = await engine.delay(story.lease, [message()], [2**41])
    assert (result.kept, result.full) == (0, [0])


async def test_partitions_share_it_and_what_is_retained_does_not_count(engine: Engine, topic: str) -> None:
    settings = TopicSettings(partitions=2, backlog_quota=5, retention_ms=FOREVER)
    story = await Story.begin(engine, topic, settings)
    await story.subscribe()
    assert (await story.publish(*"abcd")).full == [3]
    assert (await story.fetch()) != []
    assert (await story.publish(*"abcd")).full == [3]


async def test_without_a_subscription_there_is_no_backlog(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, TopicSettings(backlog_quota=1))
    result = await story.publish("a", "b")
    assert (result.no_subscribers, result.full) == (2, [])


def bodies(*sizes: int) -> list[Outgoing]:
    """Messages with bodies of these sizes."""
    return [message()._replace(about=pack_about(1, size=size)) for size in sizes]


async def counted(story: Story) -> int:
    """The bytes that the backlog has."""
    return int(await story.engine.store.command("HGET", story.keys.meta, "backlog_bytes") or 0)


async def test_bytes_are_limited_and_nothing_goes_before_what_does_not_fit(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic, TopicSettings(backlog_quota_bytes=100))
    await story.subscribe()
    await story.subscribe("t", "key_shared")
    result = await engine.publish(story.lease, bodies(60, 40, 1, 0))
    assert result.each() == full(story, 1, 2, None, None)
    [held] = receipts(await story.fetch())
    await story.ack(held)
    assert await counted(story) == 100, "the other one is owed them"
    [both] = receipts(await story.fetch(name="t"))
    await story.ack(part(both, 2), name="t")
    assert await counted(story) == 60
    assert (await engine.publish(story.lease, bodies(40))).full == []
    await story.ack(part(both, 1), name="t")
    await engine.purge(topic, "")
    assert await counted(story) == 0
    assert (await engine.publish(story.lease, bodies(500, 1))).full == [1], "where there is no other"
    await engine.change_topic(topic, backlog_quota_bytes=501)
    assert (await engine.publish(story.lease, bodies(1, 1))).full == [1]
    await engine.change_topic(topic, backlog_quota_bytes=0)
    assert (await engine.publish(story.lease, bodies(1, 1))).full == []
    await engine.change_topic(topic, backlog_quota_bytes=10)
    assert (await engine.publish(story.lease, bodies(10, 1))).full == [1], "what was there does not count"
    await engine.purge(topic, "")
    assert await counted(story) == 0


async def test_bytes_that_wait_for_their_time_count_once(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic, TopicSettings(backlog_quota=10))
    await story.subscribe()
    early = bodies(70)
    await engine.delay(story.lease, early, [timed.now_ms + 1_000])
    await engine.change_topic(topic, backlog_quota_bytes=100)
    some = bodies(50, 30, 30)
    result = await engine.delay(story.lease, some, [timed.now_ms + 1_000] * 3)
    assert (result.kept, result.full) == (2, [2])
    assert await counted(story) == 80
    await engine.delete_by_uid(topic, some[1].uid)
    assert await counted(story) == 50
    await timed.advance(1_000)
    await engine.promote(story.lease)
    assert await counted(story) == 120, "what was there before counts from now on"
    await story.ack(*receipts(await story.fetch()))
    assert await counted(story) == 0
    await engine.delay(story.lease, bodies(9), [timed.now_ms + 1_000])
    assert await check_topic(engine, topic) == []
    await engine.purge(topic, "")
    assert await counted(story) == 0


async def test_bytes_that_are_retained_do_not_count_until_somebody_goes_back(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic, TopicSettings(backlog_quota_bytes=100, retention_ms=FOREVER))
    await story.subscribe()
    assert (await engine.publish(story.lease, bodies(60, 40, 1))).full == [2]
    await story.fetch()
    assert (await engine.publish(story.lease, bodies(30, 30, 41))).full == [2]
    await engine.seek(topic, "s", "earliest")
    assert (await engine.publish(story.lease, bodies(1))).full == [0]
    assert await counted(story) == 160
    assert await check_topic(engine, topic) == []
