"""Fetching in key-shared mode: every key is a lane, leased as a prefix to one consumer at a time."""

import asyncio
from collections import Counter
from itertools import pairwise

import pytest

from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Backoff, Capacity
from tests.support.clock import ManualTime
from tests.support.story import Story, entries, part, receipts

MODE = "key_shared"


async def lanes(story: Story, consumer: str, permits: int = 100) -> dict[str, list[int]]:
    """What a consumer gets, by lane."""
    found: dict[str, list[int]] = {}
    for delivery in await story.fetch(consumer, permits):
        found.setdefault(delivery.receipt.lane, []).extend(entries([delivery]))
    return found


async def test_each_key_is_a_lane_with_a_receipt_of_its_own(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=MODE)
    await story.publish("a", "a", "b", "a", "b")
    assert await lanes(story, "c") == {"=a": [1, 2, 4], "=b": [3, 5]}


async def test_a_key_stays_with_its_consumer_while_any_of_it_is_leased(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=MODE, consumers=("c", "d"))
    await story.publish("a")
    [head] = await story.fetch("c")
    await story.publish("a", "b")
    assert await lanes(story, "d") == {"=b": [3]}
    assert await lanes(story, "c") == {"=a": [2]}
    await story.ack(head.receipt)
    await story.publish("a")
    assert await lanes(story, "d") == {}  # entry 2 is still with c
    assert await lanes(story, "c") == {"=a": [4]}


async def test_a_key_moves_when_nothing_of_it_is_leased(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=MODE, consumers=("c", "d"))
    await story.publish("a", "a")
    given = receipts(await story.fetch("c"))
    await story.ack(*given)
    await story.publish("a")
    assert await lanes(story, "d") == {"=a": [3]}


async def test_messages_parked_behind_a_busy_consumer_go_to_another_once_the_key_is_free(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=MODE, consumers=("c", "d"))
    await story.publish("a", "a", "a")
    [head] = await story.fetch("c", permits=1)
    assert await lanes(story, "d") == {}
    await story.ack(head.receipt)
    assert await lanes(story, "d") == {"=a": [2, 3]}


async def test_a_stuck_key_delays_no_other(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=MODE, consumers=("stuck", "c"))
    await story.publish("slow")
    await story.fetch("stuck", permits=1)
    await story.publish(*["slow"] * 50, "fast", *["slow"] * 50, "fast")
    assert await lanes(story, "c") == {"=fast": [52]}
    assert await lanes(story, "c") == {"=fast": [103]}


async def test_a_free_key_goes_to_the_consumer_with_the_most_room(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=MODE, consumers=("c", "d"))
    await story.publish("a", "b", "a", "c")
    result = await engine.fetch(story.lease, "s", [Capacity("c", 1), Capacity("d", 100)])
    assert {delivery.consumer for delivery in result.deliveries} == {"d"}
    await story.publish(*[f"k{number}" for number in range(10)])
    result = await engine.fetch(story.lease, "s", [Capacity("c", 5), Capacity("d", 5)])
    got = [delivery.consumer for delivery in result.deliveries]
    assert (got.count("c"), got.count("d")) == (5, 5)


async def test_a_message_without_a_key_is_a_lane_of_its_own(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=MODE, consumers=("c", "d"))
    await story.publish("", "", "a", "", "")
    [first] = await story.fetch("c", permits=1)
    assert first.receipt.lane == ""
    rest = await story.fetch("d")
    assert sorted(entries(rest)) == [2, 3, 4, 5]
    runs = [delivery.receipt for delivery in rest if not delivery.receipt.lane]
    assert await story.nack(part(runs[-1], 4)) == ["settled"]  # 5 does not go back with it
    assert await story.take("c") == [4]


async def test_messages_without_a_key_are_spread_over_consumers_as_runs(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=MODE, consumers=("c", "d"))
    await story.publish_many(20)
    result = await engine.fetch(story.lease, "s", [Capacity("c", 50), Capacity("d", 50)])
    got = {delivery.consumer: len(entries([delivery])) for delivery in result.deliveries}
    assert got == {"c": 10, "d": 10}


async def test_nack_rewinds_the_lane_voids_later_receipts_and_charges_only_the_given_one(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=MODE)
    await story.publish("a", "b", "a", "b", "a")
    given = {delivery.receipt.lane: delivery.receipt for delivery in await story.fetch()}
    whole = given["=a"]._replace(first=1, last=5)
    assert await story.nack(part(whole, 3)) == ["settled"]
    assert await story.retries() == {3: 1}
    assert await story.ack(part(whole, 5)) == ["stale"]
    assert await story.ack(part(whole, 1)) == ["settled"]
    assert await lanes(story, "c") == {"=a": [3, 5]}
    assert await story.ack(part(given["=b"], 2), part(given["=b"], 4)) == ["settled", "settled"]


async def test_a_delayed_nack_holds_the_key_and_what_is_published_behind_it(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode=MODE, consumers=("c", "d"))
    await story.publish("a", "a")
    [delivery] = await story.fetch("c")
    await story.nack(part(delivery.receipt, 1), delay_ms=1_000)
    await story.publish("a", "b")
    assert await lanes(story, "d") == {"=b": [4]}
    await timed.advance(1_000)
    assert await lanes(story, "d") == {"=a": [1, 2, 3]}


async def test_the_kept_prefix_must_be_settled_before_a_held_lane_moves_on(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode=MODE, consumers=("c", "d"))
    await story.publish("a", "a")
    [delivery] = await story.fetch("c")
    await story.nack(part(delivery.receipt, 2), delay_ms=1_000)
    await timed.advance(1_000)
    assert await lanes(story, "d") == {}
    assert await lanes(story, "c") == {"=a": [2]}


async def test_a_timeout_returns_the_whole_lane_and_charges_its_head_with_backoff(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode=MODE, backoff=Backoff(2.0, jitter=0.0))
    await story.publish("a", "a", "b")
    await timed.engine.fetch(story.lease, "s", [Capacity("c", 2, lease_ms=1_000)])
    await timed.advance(1_000)
    assert (await timed.engine.expire(story.lease, "s")).released == 1
    assert await story.retries() == {1: 1}
    assert await lanes(story, "c") == {"=b": [3]}
    await timed.advance(2_000)
    assert await lanes(story, "c") == {"=a": [1, 2]}


async def test_settling_the_head_restarts_the_deadline_of_what_is_buffered_behind_it(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode=MODE)
    await story.publish("a", "a", "a")
    [delivery] = await story.fetch(lease_ms=1_000)
    for entry in (1, 2):
        await timed.advance(900)
        assert await story.ack(part(delivery.receipt, entry)) == ["settled"]
    await timed.advance(999)
    assert (await timed.engine.expire(story.lease, "s")).released == 0
    await timed.advance(1)
    assert (await timed.engine.expire(story.lease, "s")).released == 1
    assert await story.retries() == {3: 1}


async def test_permits_bound_a_lane_and_the_rest_follows_in_order(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=MODE)
    await story.publish(*["a"] * 5)
    assert await lanes(story, "c", permits=2) == {"=a": [1, 2]}
    assert await lanes(story, "c", permits=1) == {"=a": [3]}
    assert await lanes(story, "c") == {"=a": [4, 5]}


async def test_lanes_wait_their_turn_so_that_a_long_one_does_not_starve_the_rest(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode=MODE)
    await story.publish(*["a"] * 20, "b")
    await story.nack(*receipts(await story.fetch()))
    await timed.advance(1)
    held = receipts(await story.fetch(permits=2))
    served: list[str] = []
    while held and "=b" not in served and len(served) < 20:
        await story.ack(part(held[0], held[0].first))  # the oldest; one is always in flight
        held = [part(held[0], held[0].last)] if held[0].first < held[0].last else held[1:]
        held += receipts(await story.fetch(permits=1))
        served.append(held[-1].lane)
        await timed.advance(1)
    assert len(served) < 5, served


async def test_keys_of_every_kind_keep_to_their_own_lanes(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=MODE)
    keys = ["a", "a|b", "#1", "=", "a:b", "{a}", "*", "ключ", "a\x01", "a b\n", " ", "0", "a" * 1_024]
    await story.publish(*keys, *keys)
    assert await lanes(story, "c") == {
        f"={key}": [index + 1, index + 1 + len(keys)] for index, key in enumerate(keys)
    }
    given = receipts(await engine.list_leases(story.lease, "s", "c"))
    await story.nack(*given)
    again = receipts(await story.fetch())
    assert set(await story.ack(*again)) == {"settled"}
    assert await story.log() == []


async def test_settling_the_first_of_several_apart_restarts_the_deadline_of_the_rest(
    timed: ManualTime, topic: str
) -> None:
    """Messages of a key with others between them, under two tokens: what is in flight is a list."""
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="key_shared")
    await timed.engine.join(story.lease, "s", "c", 60_000)
    await story.publish(*"abab")
    room = [Capacity("c", 100, 1_000)]
    first = (await timed.engine.fetch(story.lease, "s", room)).deliveries
    await story.publish("a")
    await timed.advance(600)
    later = (await timed.engine.fetch(story.lease, "s", room)).deliveries
    assert [delivery.deadline_ms for delivery in later] == [timed.now_ms + 400]  # that of the lane
    assert await story.ack(next(item.receipt for item in first if item.receipt.lane == "=a")) == ["settled"]
    held = await timed.engine.list_leases(story.lease, "s", "c")
    deadlines = {delivery.receipt.lane: delivery.deadline_ms for delivery in held}
    assert deadlines == {"=a": timed.now_ms + 1_000, "=b": timed.now_ms + 400}


async def test_a_fetch_asks_for_another_where_its_shares_left_out_a_free_lane(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared", consumers=("c", "d", "e"))
    await story.publish("x", "x")
    assert await story.take("d", 1) == [1]
    assert await story.take("e", 10) == []  # the second one waits for d
    await story.publish("a", "b")
    assert await story.take("e", 10) == [3, 4]
    await engine.leave(story.lease, "s", "e")
    rooms = [Capacity("c", 1), Capacity("d", 2)]
    first = await engine.fetch(story.lease, "s", rooms, 3)
    assert sorted(entries(first.deliveries)) == [2, 3]
    assert first.more
    second = await engine.fetch(story.lease, "s", [Capacity("c", 0), Capacity("d", 1)], 3)
    assert (entries(second.deliveries), second.more) == ([4], False)


@pytest.mark.parametrize(("keys", "apart"), [(20, 1), (800, 25)])
async def test_free_keys_are_spread_evenly_and_of_many_some_go_together(
    engine: Engine, topic: str, keys: int, apart: int
) -> None:
    story = await Story.begin(engine, topic)
    names = ("c", "d", "e", "f")
    await story.subscribe(mode=MODE, consumers=names)
    await story.publish(*(f"key-{number}" for number in range(keys)))
    result = await engine.fetch(story.lease, "s", [Capacity(name, 1_000) for name in names])
    holders = {entry: item.consumer for item in result.deliveries for entry in entries([item])}
    assert Counter(holders.values()) == dict.fromkeys(names, keys // 4)
    in_order = [holders[entry] for entry in range(1, keys + 1)]
    assert sum(one != other for one, other in pairwise(in_order)) == keys // apart - 1


async def test_free_keys_go_to_whoever_has_the_most_room_also_where_many_go_together(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=MODE, consumers=("c", "d"))
    await story.publish(*(f"key-{number}" for number in range(600)))
    result = await engine.fetch(story.lease, "s", [Capacity("c", 700), Capacity("d", 300)])
    shares = Counter(item.consumer for item in result.deliveries for _ in entries([item]))
    assert shares.total() == 600
    assert abs((700 - shares["c"]) - (300 - shares["d"])) <= 2 * 600 // (2 * 8)  # as much is left to either


async def test_a_fetch_does_not_read_the_keys_of_what_is_just_being_published(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=MODE)
    await story.publish("a")
    assert await story.take() == [1]
    many = [f"key-{number}" for number in range(100)]
    _, found = await asyncio.gather(story.publish(*many), story.take())
    assert found == []
    assert await story.take() == list(range(2, 102))
    _, found = await asyncio.gather(story.publish("a"), story.take())
    assert found == [102]  # of a few it reads them


async def test_one_ack_settles_several_of_a_lane_and_leaves_the_rest_in_order(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode=MODE)
    await story.publish(*"abababa")
    given = {entry: part(item.receipt, entry) for item in await story.fetch() for entry in entries([item])}
    assert await story.ack(given[1], given[2], given[3]) == ["settled"] * 3
    assert await story.ack(given[1], given[4], given[7], given[4]) == ["stale", "settled", "settled", "stale"]
    held = await timed.engine.list_leases(story.lease, "s", "c")
    assert {item.receipt.lane: entries([item]) for item in held} == {"=a": [5], "=b": [6]}
    await story.nack(*receipts(held))
    await timed.advance(1)
    assert await lanes(story, "c") == {"=a": [5], "=b": [6]}
