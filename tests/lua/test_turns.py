"""The scripts for the ordinary case: what they do, and that they do nothing where it is not one."""

import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from keylane.errors import Overloaded
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.filters import Filter
from keylane_broker.engine.values import Capacity, Outgoing, Receipt, SubscriptionSettings, TopicSettings
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.limits import FOREVER
from loadtest.topology import single_server
from tests.support.story import HOUR_MS, Story, entries, message, part, receipts
from tests.support.turns import ack_whole, lease_fresh, turn

ROOM = [Capacity("c", 100)]


async def opened(engine: Engine, topic: str, mode: str = "shared", **settings: int) -> Story:
    """A subscription that has passed what was published."""
    story = await Story.begin(engine, topic, TopicSettings(**settings))
    await story.subscribe(mode=mode, consumers=("c", "d"))
    await story.publish("a")  # the first one begins a generation of marks
    await story.ack(*receipts(await story.fetch()))
    return story


async def leased(story: Story, *keys: str, name: str = "s") -> list[Receipt]:
    """Receipts of messages that a turn has published and leased."""
    told = await turn(story.engine, story.lease, name, [message(key) for key in keys], ROOM)
    assert told is not None
    return receipts(story.engine.as_result(story.lease, ROOM, told.fetched).deliveries)


async def state(story: Story) -> list[object]:
    """All that there is of the partition but its time."""
    prefix = story.keys.lease.removesuffix("lease")
    found = sorted(await story.engine.store.keys_like(prefix.replace("[", "\\[") + "*"))
    commands = {"hash": ("HGETALL",), "zset": ("ZRANGE", "0", "-1", "WITHSCORES"), "string": ("GET",)}
    values: list[object] = []
    for key in found:
        kind = str(await story.engine.store.command("TYPE", key))
        word, *rest = commands.get(kind, ("XRANGE", "-", "+"))
        value = await story.engine.store.command(word, key, *rest)
        values.append((key, {**value, "clock": ""} if key == story.keys.meta else value))
    return values


async def leases(story: Story, consumer: str = "c") -> list[tuple[str, float]]:
    """The lanes that a consumer holds, and when that ends."""
    key = f"{story.sub().deadlines}:{consumer}"
    found = await story.engine.store.command("ZRANGE", key, "0", "-1", "WITHSCORES")
    return list(zip(found[::2], map(float, found[1::2]), strict=True))


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
async def test_a_turn_publishes_and_leases_and_the_next_one_settles(
    engine: Engine, topic: str, mode: str
) -> None:
    story = await opened(engine, topic, mode)
    messages = [message("a"), message("b")]
    first = await turn(engine, story.lease, "s", messages, ROOM)
    assert first is not None
    assert (first.published.first, first.published.stored, first.fetched.cursor) == (2, 2, 3)
    [share] = first.fetched.shares
    assert (share.consumer, share.flat[1::3]) == ("c", [one.uid for one in messages])
    held = await engine.list_leases(story.lease, "s", "c")
    assert entries(held) == [2, 3]
    given = receipts(engine.as_result(story.lease, ROOM, first.fetched).deliveries)
    assert sorted(receipts(held)) == sorted(given)
    second = await turn(engine, story.lease, "s", [message("a")], ROOM, given)
    assert second is not None
    assert await story.log() == [4]
    assert entries(await engine.list_leases(story.lease, "s", "c")) == [4]
    rest = receipts(engine.as_result(story.lease, ROOM, second.fetched).deliveries)
    assert await ack_whole(engine, story.lease, "s", rest)
    assert await story.log() == []


async def test_a_turn_leases_as_much_as_there_is_room_for(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic)
    rooms = [Capacity("c", 1), Capacity("d", 1)]
    told = await turn(engine, story.lease, "s", [message() for _ in range(3)], rooms)
    assert told is not None
    assert [(share.consumer, share.ranges) for share in told.fetched.shares] == [("c", [2, 2]), ("d", [3, 3])]
    assert (told.fetched.cursor, told.fetched.more) == (3, True)
    assert await story.take() == [4]


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
async def test_a_message_by_itself_goes_to_whoever_has_the_most_room(
    engine: Engine, topic: str, mode: str
) -> None:
    story = await opened(engine, topic, mode)
    rooms = [Capacity("c", 1, spare=3), Capacity("d", 1, spare=7)]
    told = await turn(engine, story.lease, "s", [message("b")], rooms)
    assert told is not None
    assert [(share.consumer, share.ranges) for share in told.fetched.shares] == [("d", [2, 2])]
    assert (told.fetched.cursor, told.fetched.more) == (2, False)
    assert entries(await engine.list_leases(story.lease, "s", "d")) == [2]


async def test_a_message_by_itself_for_which_nobody_has_room_is_stored(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic)
    told = await turn(engine, story.lease, "s", [message()], [Capacity("c", 0)])
    assert told is not None
    assert (told.fetched.shares, told.fetched.cursor, told.fetched.more) == ([], 1, True)
    assert await story.take() == [2]


async def test_somebody_without_a_session_is_told_so_by_a_fetch(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic)
    rooms = [Capacity("c", 1, spare=7), Capacity("e", 1)]
    assert await turn(engine, story.lease, "s", [message()], rooms) is None


async def test_those_who_are_not_named_get_their_shares_later(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic)
    told = await turn(engine, story.lease, "s", [message() for _ in range(6)], ROOM, others=2)
    assert told is not None
    assert told.fetched.shares[0].ranges == [2, 3]


async def test_a_message_joins_those_of_its_key_with_their_deadline(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic, "key_shared")
    await leased(story, "a")
    rooms = [Capacity("d", 100, 60_000), Capacity("c", 1, 60_000)]
    told = await turn(engine, story.lease, "s", [message("a")], rooms)
    assert told is not None
    assert [share.consumer for share in told.fetched.shares] == ["c"]
    [before, after] = (await engine.list_leases(story.lease, "s", "c"))[:2]
    assert before.deadline_ms == after.deadline_ms == told.fetched.kept[1]


async def _journal(story: Story) -> None:
    await story.engine.change_topic(story.topic, journal=100)


async def _other_worker(story: Story) -> None:
    await story.engine.release(story.lease)
    await story.engine.acquire(story.topic, 0, "w2", 60_000)


async def _expired_lease(story: Story) -> None:
    await story.engine.store.command("DEL", story.keys.lease)


async def _behind(story: Story) -> None:
    await story.publish("a")


async def _waiting(story: Story) -> None:
    await story.publish("a")
    await story.nack(*receipts(await story.fetch()), delay_ms=HOUR_MS)


async def _delayed(story: Story) -> None:
    later = int(time.time() * 1_000) + HOUR_MS
    await story.engine.delay(story.lease, [message()], [later])


async def _paused(story: Story) -> None:
    await story.engine.pause_subscription(story.topic, "s", True)


async def _gone(story: Story) -> None:
    await story.engine.leave(story.lease, "s", "c")


async def _deleted(story: Story) -> None:
    await story.engine.delete_subscription(story.topic, "s")


async def _filtered(story: Story) -> None:
    settings = SubscriptionSettings(filter=Filter(keys="b*"))
    await story.engine.create_subscription(story.topic, "some", settings)


@pytest.mark.parametrize(
    "change",
    [
        _journal,
        _other_worker,
        _expired_lease,
        _behind,
        _waiting,
        _delayed,
        _paused,
        _gone,
        _deleted,
        _filtered,
    ],
)
async def test_a_turn_that_is_not_ordinary_changes_nothing(
    engine: Engine, topic: str, change: Callable[[Story], Awaitable[None]]
) -> None:
    story = await opened(engine, topic)
    await change(story)
    before = await state(story)
    assert await turn(engine, story.lease, "s", [message("a")], ROOM) is None
    assert await state(story) == before


async def _expiring(story: Story) -> None:
    later = int(time.time() * 1_000) + HOUR_MS
    await story.engine.publish(story.lease, [message("x")], extras={0: (later, 0)})


@pytest.mark.parametrize("change", [_journal, _other_worker, _expired_lease, _deleted, _filtered, _expiring])
async def test_an_ack_that_is_not_ordinary_changes_nothing(
    engine: Engine, topic: str, change: Callable[[Story], Awaitable[None]]
) -> None:
    story = await opened(engine, topic)
    given = await leased(story, "a")
    await change(story)
    before = await state(story)
    assert not await ack_whole(engine, story.lease, "s", given)
    assert await state(story) == before


async def test_a_turn_with_a_duplicate_changes_nothing(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic)
    await engine.publish(story.lease, [message("a", f"{topic}-u")])
    await story.ack(*receipts(await story.fetch()))
    before = await state(story)
    for messages in ([message("a", f"{topic}-u")], [message("a", "twice"), message("a", "twice")]):
        assert await turn(engine, story.lease, "s", messages, ROOM) is None
    assert await state(story) == before


@pytest.mark.parametrize("dedupe_ms", [0, 30_000])
async def test_a_turn_with_a_short_window_changes_nothing(engine: Engine, topic: str, dedupe_ms: int) -> None:
    story = await opened(engine, topic, dedupe_ms=dedupe_ms)
    before = await state(story)
    assert await turn(engine, story.lease, "s", [message("a")], ROOM) is None
    assert await state(story) == before


async def test_a_key_whose_consumer_has_no_room_is_not_ordinary(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic, "key_shared")
    await leased(story, "a")
    before = await state(story)
    assert await turn(engine, story.lease, "s", [message("a")], [Capacity("d", 5)]) is None
    assert await state(story) == before


async def test_only_current_leases_are_settled_and_of_a_run_the_first_messages(
    engine: Engine, topic: str
) -> None:
    story = await opened(engine, topic)
    [receipt] = await leased(story, "", "", "")
    before = await state(story)
    for given in (
        [part(receipt, 3)],
        [part(receipt, 3, 4)],
        [part(receipt, 2, 5)],
        [receipt._replace(token=receipt.token - 1)],
        [part(receipt, 2)._replace(token=receipt.token - 1)],
        [receipt, receipt],
        [part(receipt, 2), part(receipt, 2)],
        [part(receipt, 2), part(receipt, 4)],
        [part(receipt, 2), part(receipt, 3, 5)],
        [part(receipt, 2), receipt],
        [receipt, part(receipt, 9)],
    ):
        assert not await ack_whole(engine, story.lease, "s", given)
        assert await turn(engine, story.lease, "s", [message("a")], ROOM, given) is None
    assert await state(story) == before
    assert await ack_whole(engine, story.lease, "s", [receipt])


@pytest.mark.parametrize("steps", [[(2, 2)], [(2, 4)], [(2, 2), (3, 4)], [(2, 3), (4, 4), (5, 6)]])
@pytest.mark.parametrize(("mode", "key"), [("shared", "a"), ("key_shared", "")])
async def test_the_first_messages_of_a_run_are_settled_and_the_rest_stays_as_it_was_leased(
    engine: Engine, topic: str, mode: str, key: str, steps: list[tuple[int, int]]
) -> None:
    story = await opened(engine, topic, mode)
    [receipt] = await leased(story, *[key] * 6)
    [deadline] = await leases(story)
    last = steps[-1][1]
    assert await ack_whole(engine, story.lease, "s", [part(receipt, *step) for step in steps])
    assert await story.log() == list(range(last + 1, 8))
    assert await leases(story) == [(f"#{last + 1}", deadline[1])]
    assert await engine.store.command("ZRANGE", story.sub().runs, "0", "-1") == [f"#{last + 1}"]
    assert receipts(await engine.list_leases(story.lease, "s", "c")) == [part(receipt, last + 1, 7)]
    assert await check_topic(engine, topic) == []
    rest = [part(receipt, last + 1, 6), part(receipt, 7)] if last < 6 else [part(receipt, 7)]
    assert await turn(engine, story.lease, "s", [message(key)], ROOM, rest) is not None
    assert [lane for lane, _ in await leases(story)] == ["#8"]
    assert await story.log() == [8]


async def test_what_is_left_of_runs_of_several_consumers_is_theirs(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic)
    rooms = [Capacity("c", 3), Capacity("d", 3)]
    told = await turn(engine, story.lease, "s", [message("a") for _ in range(6)], rooms)
    assert told is not None
    given = receipts(engine.as_result(story.lease, rooms, told.fetched).deliveries)
    mine, theirs = sorted(given, key=lambda receipt: receipt.first)
    assert await ack_whole(
        engine, story.lease, "s", [part(theirs, theirs.first), part(mine, mine.first, mine.last - 1)]
    )
    left = receipts(await engine.list_leases(story.lease, "s", "c"))
    left += receipts(await engine.list_leases(story.lease, "s", "d"))
    assert sorted(left) == sorted([part(mine, mine.last), part(theirs, theirs.first + 1, theirs.last)])
    assert await check_topic(engine, topic) == []
    assert await ack_whole(engine, story.lease, "s", left)
    assert await story.log() == []


@pytest.mark.parametrize("way", ["fetch", "turn"])
@pytest.mark.parametrize(("mode", "key"), [("shared", "a"), ("key_shared", "")])
async def test_neighbouring_shares_of_a_consumer_are_settled_as_they_came(
    engine: Engine, topic: str, mode: str, key: str, way: str
) -> None:
    """Who has more room than others gets several shares, which come as one range, and is answered as one."""
    story = await opened(engine, topic, mode)
    rooms = [Capacity("c", 10), Capacity("d", 10, spare=7)]
    messages = [message(key) for _ in range(8)]
    if way == "turn":
        told = await turn(engine, story.lease, "s", messages, rooms, others=6)
        assert told is not None
        found = told.fetched
    else:
        await engine.publish(story.lease, messages)
        found = await engine.fetch_flat(story.lease, "s", rooms, others=6)
    [first, *_] = found.shares
    assert (first.consumer, first.ranges[1] - first.ranges[0] + 1) == ("c", 2), "of eight messages two"
    given = [Receipt(0, "", found.token, *first.ranges)]
    assert await ack_whole(engine, story.lease, "s", given, "c")


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
async def test_behind_a_turn_another_subscription_leases_the_same(
    engine: Engine, topic: str, mode: str
) -> None:
    story = await opened(engine, topic)
    await story.subscribe("other", mode, consumers=("c",))
    messages = [message("a"), message("b"), message("")]
    told = await turn(engine, story.lease, "s", messages, ROOM)
    assert told is not None
    found = await lease_fresh(engine, story.lease, "other", messages, told.published, ROOM)
    assert found is not None
    assert found.shares == told.fetched.shares
    assert await lease_fresh(engine, story.lease, "other", messages, told.published, ROOM) is None, "once"
    mine = receipts(engine.as_result(story.lease, ROOM, told.fetched).deliveries)
    theirs = receipts(engine.as_result(story.lease, ROOM, found).deliveries)
    assert await ack_whole(engine, story.lease, "s", mine)
    assert await story.log() == [2, 3, 4], "the other one is owed them"
    assert await ack_whole(engine, story.lease, "other", theirs)
    assert await story.log() == []


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
async def test_behind_a_turn_of_one_message_another_subscription_leases_it(
    engine: Engine, topic: str, mode: str
) -> None:
    story = await opened(engine, topic)
    await story.subscribe("other", mode, consumers=("c",))
    messages = [message("a")]
    told = await turn(engine, story.lease, "s", messages, ROOM)
    assert told is not None
    found = await lease_fresh(engine, story.lease, "other", messages, told.published, ROOM)
    assert found is not None
    assert found.shares == told.fetched.shares
    for name, left, fetched in (("s", [2], told.fetched), ("other", [], found)):
        mine = receipts(engine.as_result(story.lease, ROOM, fetched).deliveries)
        assert await ack_whole(engine, story.lease, name, mine)
        assert await story.log() == left


async def test_behind_a_turn_nothing_is_leased_that_is_not_known(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic)
    await story.subscribe("other", consumers=("c",))
    messages = [message("a"), message("b")]
    told = await turn(engine, story.lease, "s", messages, ROOM)
    assert told is not None
    before = await state(story)
    for count, first in ((1, 2), (2, 1), (2, 3)):
        published = msgspec.structs.replace(told.published, first=first)
        assert not await lease_fresh(engine, story.lease, "other", messages[:count], published, ROOM)
    assert await state(story) == before
    await engine.skip(topic, "other", f"0:{story.id(2)}")
    assert not await lease_fresh(engine, story.lease, "other", messages, told.published, ROOM)
    assert await story.take(name="other", consumer="c") == [3], "one was skipped meanwhile"


async def test_what_came_instead_of_a_turn_is_not_leased_by_its_keys(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic, "key_shared")
    await story.subscribe("other", "key_shared", consumers=("c", "d"))
    came = await story.publish("x")  # it was for later, or redriven: no dispatcher has heard of it
    messages = [message("y")]
    assert await turn(engine, story.lease, "s", messages, ROOM) is None
    assert not await lease_fresh(engine, story.lease, "other", messages, came, ROOM)
    assert await story.take(name="other") == [2]
    await story.publish("x")
    assert await story.take("d", name="other") == [], "the key is with another"
    await story.ack(*receipts(await story.fetch()))
    assert await story.log() == [2, 3], "the other one is owed them"


async def test_what_came_instead_of_a_turn_is_left_to_a_fetch_also_where_the_key_is_the_same(
    engine: Engine, topic: str
) -> None:
    story = await opened(engine, topic)
    await story.subscribe("other")
    came = await story.publish("x")  # if it was redriven for "s", a fetch for "other" passes it
    assert not await lease_fresh(engine, story.lease, "other", [message("x")], came, ROOM)
    assert await story.take(name="other") == [2]


async def spread(story: Story, count: int) -> list[list[Receipt]]:
    """Messages of as many keys, each receipt of one; every other one is with the other of two consumers."""
    await story.publish(*(f"key-{number}" for number in range(count)))
    rooms = [Capacity("c", 1_000), Capacity("d", 1_000)]
    found: dict[str, list[Receipt]] = {"c": [], "d": []}
    for delivery in (await story.engine.fetch(story.lease, "s", rooms)).deliveries:
        found[delivery.consumer].append(delivery.receipt)
    return list(found.values())


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
async def test_the_first_message_of_a_partition_is_settled(engine: Engine, topic: str, mode: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=mode)
    await story.publish("a")
    assert await ack_whole(engine, story.lease, "s", receipts(await story.fetch()))
    assert await story.log() == []


async def test_many_are_settled_together_whoever_held_them(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic, "key_shared")
    first, second = await spread(story, 400)
    assert await ack_whole(engine, story.lease, "s", first[:150] + second[:150])
    assert await story.log() == sorted(one.first for one in first[150:] + second[150:])
    assert await ack_whole(engine, story.lease, "s", second[150:])
    assert await story.log() == sorted(one.first for one in first[150:])
    held = await engine.list_leases(story.lease, "s", "c")
    assert sorted(entries(held)) == sorted(one.first for one in first[150:])
    assert await engine.list_leases(story.lease, "s", "d") == []


async def test_what_lies_before_those_that_are_settled_together_stays(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic, "key_shared")
    first, second = await spread(story, 100)
    given = sorted(first + second, key=lambda receipt: receipt.first)
    assert await ack_whole(engine, story.lease, "s", given[1:40])
    assert await story.log() == [given[0].first, *(one.first for one in given[40:])]
    assert await ack_whole(engine, story.lease, "s", given[:1] + given[40:60])
    assert await story.log() == [one.first for one in given[60:]]
    assert await ack_whole(engine, story.lease, "s", given[60:90])  # the start of the log
    assert await story.log() == [one.first for one in given[90:]]
    assert await ack_whole(engine, story.lease, "s", given[90:])
    assert await story.log() == []


async def test_several_of_a_lane_are_settled_together_and_the_rest_stays(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic, "key_shared")
    given = await leased(story, *"abababa")
    assert await ack_whole(engine, story.lease, "s", given[:4])
    held = await engine.list_leases(story.lease, "s", "c")
    assert sorted((item.receipt.lane, entries([item])) for item in held if "b" in item.receipt.lane) == [
        ("=b", [7])
    ]
    before = await state(story)
    assert not await ack_whole(
        engine, story.lease, "s", [given[4], given[2]]
    )  # the second is not held any more
    assert not await ack_whole(engine, story.lease, "s", [given[6]])  # nor is it the first in flight
    assert await state(story) == before
    assert await ack_whole(engine, story.lease, "s", given[4:])
    assert await story.log() == []


async def test_what_another_holds_is_not_settled(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic, "key_shared")
    given = await leased(story, "a", "b", "a")
    before = await state(story)
    assert not await ack_whole(engine, story.lease, "s", given, "d")
    refused = await engine.ack(story.lease, "s", given, consumer="d")
    assert refused.outcomes(3) == ["stale"] * 3
    assert await state(story) == before
    assert await ack_whole(engine, story.lease, "s", given, "c")


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
async def test_one_that_is_settled_by_itself_is_held_by_who_settles_it_just_so(
    engine: Engine, topic: str, mode: str
) -> None:
    story = await opened(engine, topic, mode)
    [receipt] = await leased(story, "a")
    before = await state(story)
    for given, settler in (
        (receipt, "d"),
        (receipt._replace(token=receipt.token - 1), "c"),
        (receipt._replace(first=3, last=3), "c"),
    ):
        assert not await ack_whole(engine, story.lease, "s", [given], settler)
    assert await state(story) == before
    assert await ack_whole(engine, story.lease, "s", [receipt], "c")
    assert await engine.list_leases(story.lease, "s", "c") == []
    assert not await ack_whole(engine, story.lease, "s", [receipt], "c")


async def test_what_a_deleted_subscription_held_is_not_settled(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic)
    given = await leased(story, "a")
    await story.subscribe("other", consumers=())
    await engine.delete_subscription(topic, "s")
    assert not await ack_whole(engine, story.lease, "s", given)


async def test_an_ack_by_which_a_deadline_moves_keeps_the_time(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic, "key_shared")
    given = await leased(story, "a", "b", "a")
    await engine.store.command("HSET", story.keys.meta, "clock", 1)
    assert await ack_whole(engine, story.lease, "s", given[:1])
    assert int(await engine.store.command("HGET", story.keys.meta, "clock")) > 1


async def test_messages_that_are_retained_for_ever_stay_when_they_are_settled(
    engine: Engine, topic: str
) -> None:
    story = await opened(engine, topic, retention_ms=FOREVER)
    assert await ack_whole(engine, story.lease, "s", await leased(story, "a"))
    assert await story.log() == [1, 2]
    assert await engine.list_leases(story.lease, "s", "c") == []


async def test_what_is_retained_for_a_time_is_left_to_those_who_write_that_down(
    engine: Engine, topic: str
) -> None:
    story = await opened(engine, topic, retention_ms=HOUR_MS)
    assert await turn(engine, story.lease, "s", [message("a")], ROOM) is None
    await story.publish("a")
    given = receipts(await story.fetch())
    before = await state(story)
    assert not await ack_whole(engine, story.lease, "s", given)
    assert await state(story) == before


async def test_what_a_body_was_is_written_down_when_its_message_goes(engine: Engine, topic: str) -> None:
    story = await opened(engine, topic)
    told = await turn(engine, story.lease, "s", [Outgoing("a", f"{topic}-body", "1  7 ")], ROOM)
    assert told is not None
    given = receipts(engine.as_result(story.lease, ROOM, told.fetched).deliveries)
    assert await ack_whole(engine, story.lease, "s", given)
    assert await story.take_names() == [f"{topic}-body"]


async def test_with_full_memory_a_turn_is_refused_as_a_whole_and_acks_go_on(topic: str) -> None:
    with single_server() as server:
        engine = Engine.connect(server.url)
        story = await opened(engine, topic)
        given = await leased(story, "a")
        await engine.store.command("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(Overloaded):
            await turn(engine, story.lease, "s", [message("a")], ROOM, given)
        assert await story.log() == [2]
        assert await ack_whole(engine, story.lease, "s", given)
        assert await story.log() == []
        await engine.store.command("CONFIG", "SET", "maxmemory", "0")
        await engine.close()
