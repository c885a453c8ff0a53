"""What a producer has numbered is stored once, and leaves nothing behind but one record."""

import pytest

from keylane.errors import Fenced
from keylane_broker.engine import tail
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.filters import Filter
from keylane_broker.engine.values import (
    STALE,
    Capacity,
    NumberedFrame,
    Published,
    SubscriptionSettings,
    TopicSettings,
)
from keylane_broker.inspect.topic_checker import check_topic
from tests.support.clock import ManualTime
from tests.support.story import Story, message, must_acquire, receipts
from tests.support.turns import turn

WINDOW_MS = 60_000


async def send(
    story: Story, number: int, size: int = 2, *, oldest: int | None = None, producer: str = "p"
) -> list[Published]:
    """Publish a frame; the uids are those of the numbers."""
    frame = NumberedFrame(producer, number, number if oldest is None else oldest, size)
    messages = [message("a", f"{producer}{one}") for one in range(number, number + size)]
    return (await story.engine.publish(story.lease, messages, frames=[frame])).each()


async def test_a_frame_that_is_sent_again_answers_with_the_first_ids(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    assert await send(story, 1) == [Published(story.id(1)), Published(story.id(2))]
    assert await send(story, 1, producer="q") == [Published(story.id(3)), Published(story.id(4))]
    assert await send(story, 3, oldest=1) == [Published(story.id(5)), Published(story.id(6))]
    assert await send(story, 1, 4) == [
        Published(story.id(entry), duplicate=True) for entry in (1, 2, 5, 6)
    ], "others have published between"
    assert await story.log() == [1, 2, 3, 4, 5, 6]


async def test_what_had_no_subscribers_is_not_stored_behind_what_came_after_it(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    unowed = [Published(None, no_subscribers=True)] * 2
    assert await send(story, 1) == unowed
    await story.subscribe()
    assert await send(story, 3, oldest=1) == [Published(story.id(1)), Published(story.id(2))]
    assert await send(story, 1, 5) == [
        *unowed,
        *[Published(story.id(entry), duplicate=True) for entry in (1, 2)],
        Published(story.id(3)),
    ], "all answers were lost"
    assert await story.log() == [1, 2, 3]


async def test_nothing_goes_before_what_the_backlog_had_no_room_for_while_its_answer_is_waited_for(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic, TopicSettings(backlog_quota=3))
    await story.subscribe()
    full = Published(None, full=True)
    assert await send(story, 1, 4) == [*[Published(story.id(entry)) for entry in (1, 2, 3)], full]
    await story.ack(*receipts(await story.fetch()))
    assert await send(story, 5, 1, oldest=1) == [full], "there is room, but it must not overtake"
    assert await send(story, 1, 1, producer="q") == [Published(story.id(4))], "another producer may"
    assert await send(story, 1, 6) == [
        *[Published(story.id(entry), duplicate=True) for entry in (1, 2, 3)],
        Published(story.id(5)),
        Published(story.id(6)),
        full,
    ], "all answers were lost"
    await story.ack(*receipts(await story.fetch()))
    assert await send(story, 7, 1, oldest=6) == [full]
    assert await send(story, 8, 1, oldest=7) == [full], "7 was"
    assert await send(story, 9, 1, oldest=9) == [Published(story.id(7))], "it knows what was refused"


async def test_a_record_of_what_had_no_room_goes_with_the_window(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic, TopicSettings(dedupe_ms=0, backlog_quota=1))
    await story.subscribe()
    await story.publish("a")
    assert await send(story, 1, 1) == [Published(None, full=True)]
    assert await check_topic(timed.engine, topic) == []
    await timed.advance(2 * WINDOW_MS)
    await timed.engine.promote(story.lease)
    assert not await story.exists(*story.keys.producers)


@pytest.mark.parametrize("in_turn", [True, False])
async def test_uids_that_somebody_chose_are_known_as_well(engine: Engine, topic: str, in_turn: bool) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await send(story, 1)
    await story.fetch("c", 10)
    messages = [message("a", "chosen-1"), message("a", "chosen-2")]
    frame = NumberedFrame("p", 3, 3, 2, named=True)
    if in_turn:
        assert await turn(engine, story.lease, "s", messages, [Capacity("c", 9, 30_000)], frames=[frame])
    else:
        await engine.publish(story.lease, messages, frames=[frame])
    again = [Published(story.id(3), duplicate=True), Published(story.id(4), duplicate=True)]
    assert (await engine.publish(story.lease, messages)).each() == again
    other = frame._replace(producer="q", number=7, oldest=7)
    assert (await engine.publish(story.lease, messages, frames=[other])).each() == again
    assert (await engine.publish(story.lease, messages, frames=[frame])).each() == again


async def test_what_no_filter_let_through_is_not_stored_behind_what_came_after_it(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await engine.create_subscription(topic, "s", SubscriptionSettings(filter=Filter("b")))
    frame, messages = NumberedFrame("p", 1, 1, 2), [message("a", "p1"), message("b", "p2")]
    answers = (await engine.publish(story.lease, messages, frames=[frame])).each()
    assert answers == [Published(None, no_subscribers=True), Published(story.id(1))]
    await engine.create_subscription(topic, "all", SubscriptionSettings())
    again = (await engine.publish(story.lease, messages, frames=[frame])).each()
    assert again == [Published(None, no_subscribers=True), Published(story.id(1), duplicate=True)]


async def test_a_late_copy_of_what_nobody_waits_for_is_not_stored(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await send(story, 1)
    await send(story, 9, oldest=9)
    assert await send(story, 1) == [Published(STALE, duplicate=True)] * 2, "it was answered"
    assert await send(story, 7) == [Published(STALE, duplicate=True)] * 2, "it was given up"
    assert await story.log() == [1, 2, 3, 4]


async def test_the_next_owner_knows_what_was_stored(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    stored = await send(story, 1)
    story.lease = await must_acquire(engine, topic)
    again = await send(story, 1, 3)
    assert [one.id for one in again[:2]] == [one.id for one in stored]
    assert [one.duplicate for one in again] == [True, True, False]


async def test_a_turn_stores_what_is_new_and_leaves_the_rest_to_publish(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await send(story, 1)
    await story.fetch("c", 10)

    async def take_turn(number: int) -> bool:
        messages, room = [message("a", f"p{number}")], [Capacity("c", 100, 30_000)]
        frame = NumberedFrame("p", number, min(number, 3), 1)
        return await turn(engine, story.lease, "s", messages, room, frames=[frame]) is not None

    assert await take_turn(3)
    assert not await take_turn(3), "it was stored"
    assert not await take_turn(2), "it was stored by a publish"
    assert await take_turn(4)
    assert await send(story, 3, 3, oldest=3) == [
        Published(story.id(3), duplicate=True),
        Published(story.id(4), duplicate=True),
        Published(story.id(5)),
    ]


async def test_there_is_one_record_for_a_producer_and_it_goes_with_the_window(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic, TopicSettings(dedupe_ms=0))
    await story.subscribe()
    for number in range(1, 100, 2):
        await send(story, number, oldest=number)
    records = [await timed.engine.store.fields(key) for key in story.keys.producers]
    assert sorted(map(len, records)) == [0, 1]
    assert not await story.exists(story.keys.marks_0, story.keys.marks_1)
    assert await send(story, 99) == [Published(story.id(n), duplicate=True) for n in (99, 100)], (
        "what is sent again is known, however short the window is"
    )
    await timed.advance(WINDOW_MS)
    assert (await timed.engine.promote(story.lease)).marks_due_ms == timed.now_ms + WINDOW_MS
    assert (await send(story, 99))[0].duplicate
    await timed.advance(WINDOW_MS)
    assert (await timed.engine.promote(story.lease)).marks_due_ms == 0
    assert not await story.exists(*story.keys.producers)


async def test_records_go_with_their_topic(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await send(story, 1)
    assert await story.exists(*story.keys.producers)
    await engine.delete_topic(topic)
    assert not await story.exists(*story.keys.producers)


async def test_what_a_record_has_no_room_for_is_known_by_its_uid(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    for number in range(1, 201, 2):  # a gap before each, and nothing is ever answered
        await send(story, number, 1, oldest=1)
    [marks] = [
        fields
        for key in (story.keys.marks_0, story.keys.marks_1)
        if (fields := await engine.store.fields(key))
    ]
    assert len(marks) == 100 - 64
    for number in (1, 127, 129, 199):
        assert await send(story, number, 1, oldest=1) == [
            Published(story.id((number + 1) // 2), duplicate=True)
        ]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("dedupe_ms", [0, 1_000])
async def test_what_a_record_has_no_room_for_is_known_however_short_the_window_is(
    timed: ManualTime, topic: str, dedupe_ms: int, named: bool
) -> None:
    story = await Story.begin(timed.engine, topic, TopicSettings(dedupe_ms=dedupe_ms))
    await timed.engine.create_subscription(topic, "s", SubscriptionSettings(filter=Filter("a")))
    messages = [message("ab"[number % 2], f"p{number}") for number in range(300)]  # every other is stored

    async def publish(producer: str = "p") -> list[str | None]:
        frame = NumberedFrame(producer, 1, 1, 300, named)
        answers = await story.engine.publish(story.lease, messages, frames=[frame])
        return [answer.id for answer in answers.each()]

    first = await publish()
    assert len(await story.log()) == 150
    await timed.advance(30_000)
    assert await publish() == first, "the answer was lost"
    assert len(await story.log()) == 150
    await publish("another")
    assert len(await story.log()) == 300, "the window has passed"


async def test_nothing_goes_behind_what_a_record_has_no_room_for(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await engine.create_subscription(topic, "s", SubscriptionSettings(filter=Filter("a")))
    frame = NumberedFrame("p", 1, 1, 300)
    messages = [message("ba"[number % 2], f"p{number}") for number in range(300)]
    first = (await engine.publish(story.lease, messages, frames=[frame])).each()
    await engine.create_subscription(topic, "all", SubscriptionSettings())
    again = (await engine.publish(story.lease, messages, frames=[frame])).each()
    assert [answer.id for answer in again] == [answer.id for answer in first], "nobody was owed the others"
    assert await check_topic(engine, topic) == []


async def test_a_frame_by_itself_leaves_the_record_that_others_would(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await send(story, 1, 1)
    await story.ack(*receipts(await story.fetch()))

    async def record_after(number: int, oldest: int, size: int = 1) -> str:
        frame = NumberedFrame("p", number, oldest, size)
        messages = [message("a", f"p{one}") for one in range(number, number + size)]
        assert await turn(engine, story.lease, "s", messages, [Capacity("c", 9)], frames=[frame])
        keys = [f"{marks}:producers" for marks in (story.keys.marks_0, story.keys.marks_1)]
        [record] = [found for key in keys if (found := await engine.store.command("HGET", key, "p"))]
        return str(record).replace(f"{story.lease.epoch}-", "")

    assert await record_after(2, 1) == "1 1-2:1"
    assert await record_after(3, 2, 2) == "2 1-4:1"
    assert await record_after(5, 5) == "5 5-5:5"
    assert await record_after(7, 5) == "5 5-5:5 7-7:6", "what comes between is not there yet"
    assert await record_after(8, 8, 3) == "8 8-10:7"


async def know_again(story: Story, *uids: str) -> int:
    """Have what is published again under these uids known; answers for how many that was done."""
    flat = [text for uid in uids for text in message("a", uid)]
    found = story.engine.stored_before(story.lease, flat)
    if found:
        await story.engine.mark(story.lease, found)
    return len(found) // 3


def made(number: int) -> str:
    """A uid as clients make them."""
    return f"{number:027}"


async def numbered(story: Story, number: int, size: int = 2) -> list[Published]:
    """Publish a frame of numbered messages with uids as clients make them."""
    messages = [message("a", made(one)) for one in range(number, number + size)]
    frame = NumberedFrame("p", number, number, size)
    return (await story.engine.publish(story.lease, messages, frames=[frame])).each()


async def test_what_was_numbered_is_known_by_a_uid_that_somebody_publishes_again(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await numbered(story, 1)
    await story.ack(*receipts(await story.fetch()))
    assert await know_again(story, made(1), made(2), made(3), "order-1") == 2
    again = [message("a", made(number)) for number in (1, 2, 3)]
    assert (await engine.publish(story.lease, again)).each() == [
        Published(story.id(1), duplicate=True),
        Published(story.id(2), duplicate=True),
        Published(story.id(3)),
    ]
    assert await know_again(story, made(3)) == 1, "by its own mark, which stays"
    assert await check_topic(engine, topic) == []


@pytest.mark.parametrize("window_ms", [0, 2_000, WINDOW_MS])
async def test_it_is_known_for_no_longer_than_the_window(
    timed: ManualTime, topic: str, window_ms: int
) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic, TopicSettings(dedupe_ms=window_ms))
    await story.subscribe()
    await numbered(story, 1, 1)
    for ahead_ms, is_known in ((window_ms // 2, window_ms > 0), (window_ms // 2 + 1, False)):
        await timed.advance(ahead_ms)
        await know_again(story, made(1))
        [told] = (await engine.publish(story.lease, [message("a", made(1))])).each()
        assert told.duplicate == is_known
        if not is_known:
            return
        await engine.store.command("DEL", story.keys.marks_0, story.keys.marks_1)


async def test_what_redis_has_lost_is_not_taken_for_stored(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await numbered(story, 1)
    # A failover to a replica that had not seen the second.
    fields = ("key", "a", "uid", made(1), "about", "1  0 ")
    await engine.store.command("DEL", story.keys.log)
    await engine.store.command("XADD", story.keys.log, story.id(1), *fields)
    await engine.store.command("HSET", story.keys.meta, "last", 1)
    assert await know_again(story, made(1), made(2)) == 2
    told = (await engine.publish(story.lease, [message("a", made(1)), message("a", made(2))])).each()
    assert [one.duplicate for one in told] == [True, False]


async def test_only_who_holds_the_partition_has_uids_known(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await numbered(story, 1, 1)
    old = story.lease
    story.lease = await must_acquire(engine, topic)
    with pytest.raises(Fenced):
        await engine.mark(old, [made(1), 1, 1])
    assert await know_again(story, made(1)) == 0, "of another epoch nothing is remembered"


async def test_the_newest_messages_are_known_by_their_uids_however_many_there_were(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few at a time, as time goes on, and all that has come since the last look."""
    monkeypatch.setattr(tail, "NEWEST", 10)
    story = await Story.begin(engine, topic)
    await story.subscribe()
    number = 1
    for size in (4, 1, 9, 3, 30, 1, 10, 7, 7):
        await numbered(story, number, size)
        number += size
        uids = [made(one) for one in range(1, number + 1)]
        found = engine.stored_before(story.lease, [text for uid in uids for text in message("a", uid)])
        newest = range(max(1, number - 10), number)
        assert [(uid, entry) for uid, entry in zip(found[::3], found[1::3], strict=True)] == [
            (made(one), one) for one in newest
        ]
