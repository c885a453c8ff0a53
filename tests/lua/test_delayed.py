"""Messages for later: kept apart, each uid once, and appended to the log in the order of their times."""

import pytest

from keylane.errors import Fenced, InvalidArgument
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Outgoing, Published, TopicSettings
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.limits import FOREVER
from tests.support.clock import ManualTime
from tests.support.story import Story, message, must_acquire, receipts

pytestmark = pytest.mark.anyio

START = 1_000_000  # where the test's clock begins


async def keys_of(story: Story) -> list[str]:
    """The keys of what a consumer gets, in the order of delivery."""
    return [one.key for delivery in await story.fetch() for one in delivery.messages]


async def delay(story: Story, *messages: tuple[str, int]) -> list[int]:
    """Publish messages of these keys, due so many ms from the start; answers the places of duplicates."""
    batch = [message(key) for key, _ in messages]
    result = await story.engine.delay(story.lease, batch, [START + due for _, due in messages])
    return list(result.duplicates)


async def test_a_delayed_message_is_delivered_when_it_is_due_and_not_before(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    kept = await timed.engine.delay(story.lease, [message("a")], [START + 500])
    assert (kept.kept, kept.next_due_ms) == (1, START + 500)
    assert await story.log() == []
    await timed.advance(499)
    early = await timed.engine.promote(story.lease)
    assert (early.appended, early.next_due_ms) == (0, START + 500)
    await timed.advance(1)
    late = await timed.engine.promote(story.lease)
    assert (late.appended, late.last, late.next_due_ms) == (1, 1, 0)
    [delivery] = await story.fetch()
    [delivered] = delivery.messages
    assert (delivered.id, delivered.key) == (story.id(1), "a")
    assert delivered.about.startswith(f"{START + 500} "), "published when it was due"
    assert not await story.exists(story.keys.delayed, story.keys.delayed_data)


async def test_what_is_due_at_the_beginning_of_time_is_due_at_once(timed: ManualTime, topic: str) -> None:
    """1970, as who has no time may write: 0 is not never."""
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    kept = await timed.engine.delay(story.lease, [message("a"), message("b")], [0, START + 500])
    assert 0 < kept.next_due_ms < START
    done = await timed.engine.promote(story.lease)
    assert (done.appended, done.next_due_ms) == (1, START + 500)
    assert await keys_of(story) == ["a"]


async def test_they_come_in_the_order_in_which_they_are_due_and_then_of_publishing(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="exclusive")
    await delay(story, ("c", 300), ("z", 200), ("a", 200))
    await delay(story, ("b", 200), ("first", 100))
    await timed.advance(300)
    await timed.engine.promote(story.lease)
    assert await keys_of(story) == ["first", "z", "a", "b", "c"]


async def test_a_call_appends_a_bounded_part(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    await delay(story, *[(str(number), number) for number in range(1, 8)])
    await timed.advance(7)
    result = await timed.engine.promote(story.lease, limit=3)
    assert (result.appended, result.last, result.next_due_ms) == (3, 3, START + 4)
    assert (await timed.engine.promote(story.lease, limit=3)).last == 6
    await story.publish("between")
    result = await timed.engine.promote(story.lease, limit=3)
    assert (result.appended, result.last, result.next_due_ms) == (1, 8, 0)
    assert await keys_of(story) == ["1", "2", "3", "4", "5", "6", "between", "7"]


async def test_a_uid_is_kept_once(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic, TopicSettings(dedupe_ms=1_000))
    await story.subscribe()
    one, two = message("k", "one"), message("k", "two")
    first = await engine.delay(story.lease, [one, one, two], [START + 5_000, START + 1, START + 5_000])
    assert (first.kept, first.duplicates) == (2, {1: "0-0"})
    again = await engine.delay(story.lease, [one], [START + 1])
    assert (again.kept, again.duplicates, again.next_due_ms) == (0, {0: "0-0"}, START + 5_000)
    plain = await engine.publish(story.lease, [one])
    assert plain.each() == [Published("0-0", duplicate=True)], "not even without a delay"
    await timed.advance(4_000)
    late = await engine.delay(story.lease, [two], [START + 9_000])
    assert late.duplicates == {0: "0-0"}, "as long as it waits, whatever the window"
    await timed.advance(1_000)
    assert (await engine.promote(story.lease)).appended == 2
    known = await engine.delay(story.lease, [one], [START + 99_000])
    assert known.duplicates == {0: story.id(1)}, "by the id that it has taken"
    assert (await engine.publish(story.lease, [two])).duplicates == {0: story.id(2)}


async def test_what_was_published_already_is_not_delayed(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await engine.publish(story.lease, [message("k", "one")])
    result = await engine.delay(story.lease, [message("k", "one")], [10**12])
    assert (result.kept, result.duplicates) == (0, {0: story.id(1)})


async def test_without_a_subscription_when_it_is_due_it_is_dropped(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await delay(story, ("early", 100), ("late", 200))
    await timed.advance(100)
    result = await timed.engine.promote(story.lease)
    assert (result.appended, result.dropped, result.next_due_ms) == (0, 1, START + 200)
    await story.subscribe()
    await timed.advance(100)
    assert (await timed.engine.promote(story.lease)).appended == 1
    assert await keys_of(story) == ["late"]


async def test_what_nobody_owed_when_it_was_due_can_be_published_again(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await engine.delay(story.lease, [message("k", "one")], [START + 100])
    await timed.advance(100)
    assert (await engine.promote(story.lease)).dropped == 1
    await story.subscribe()
    assert (await engine.publish(story.lease, [message("k", "one")])).each() == [Published(story.id(1))]
    assert await keys_of(story) == ["k"]


async def test_what_waits_is_not_published_besides_however_long_it_waits(
    timed: ManualTime, topic: str
) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic, TopicSettings(dedupe_ms=1_000))
    await story.subscribe()
    await engine.delay(story.lease, [message("k", "one")], [START + 10_000])
    await timed.advance(9_999)
    again = await engine.publish(story.lease, [message("k", "one"), message("k", "two")])
    assert again.each() == [Published("0-0", duplicate=True), Published(story.id(1))]
    await timed.advance(1)
    assert (await engine.promote(story.lease)).appended == 1
    assert (await engine.publish(story.lease, [message("k", "one")])).duplicates == {0: story.id(2)}


async def test_a_topic_that_retains_keeps_what_is_due(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic, TopicSettings(retention_ms=FOREVER))
    await delay(story, ("k", 100))
    await timed.advance(100)
    assert (await timed.engine.promote(story.lease)).appended == 1


async def test_the_next_owner_is_told_when_the_next_is_due(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    assert story.lease.due_ms == 0
    await story.subscribe()
    await delay(story, ("b", 700), ("a", 400))
    await timed.engine.release(story.lease)
    lease = await must_acquire(timed.engine, topic, worker="w2")
    assert lease.due_ms == START + 400
    with pytest.raises(Fenced):
        await timed.engine.promote(story.lease)
    with pytest.raises(Fenced):
        await timed.engine.delay(story.lease, [message()], [START])
    await timed.advance(400)
    assert (await timed.engine.promote(lease)).next_due_ms == START + 700
    story.lease = lease
    [delivery] = await story.fetch()
    assert delivery.messages[0].id == story.id(1), "in the ledger of the new owner"


async def test_the_journal_tells_of_it_when_it_is_due(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic, TopicSettings(journal=100))
    await story.subscribe()
    await delay(story, ("a", 100), ("b", 100))
    await timed.advance(100)
    await timed.engine.promote(story.lease)
    [found] = await timed.engine.store.entries(story.keys.journal, [("-", "+")])
    assert [fields[1::2] for _, fields in found][2:] == [
        [str(START + 100), "published", "", str(story.lease.epoch), "1-2"]
    ]


async def test_any_text_comes_out_as_it_went_in(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    sent = [
        Outgoing("a key", "uid with spaces", '1 g 5:x {"a":"b c"}'),
        Outgoing("", "ключ", "2   "),
        Outgoing("\x01\n|=#", "u3", "3 \0 x"),
    ]
    await engine.delay(story.lease, sent, [1, 1, 1])
    assert (await engine.promote(story.lease)).appended == 3
    got = [one for delivery in await story.fetch() for one in delivery.messages]
    assert [(one.key, one.uid, one.about.partition(" ")[2]) for one in got] == [tuple(one) for one in sent]


async def test_entries_go_on_and_everything_is_settled_as_ever(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish("a", "b")
    await delay(story, ("a", 100))
    await timed.advance(100)
    await timed.engine.promote(story.lease)
    await story.publish("a")
    await story.ack(*receipts(await story.fetch()))
    assert await story.log() == []
    assert await check_topic(timed.engine, topic) == []


@pytest.mark.parametrize("dues", [[], [1, 2], ["1"], [-1], [10**14], [True]])
async def test_each_message_has_a_time(engine: Engine, topic: str, dues: list[int]) -> None:
    story = await Story.begin(engine, topic)
    with pytest.raises(InvalidArgument, match=r"due time|due_ms is out of range"):
        await engine.delay(story.lease, [message()], dues)
