"""Settling: ack, nack and extend, in parts, out of order, late, and between several subscriptions."""

import pytest

from keylane.errors import SubscriptionNotFound
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Backoff, Capacity, Receipt, Stale
from tests.support.clock import ManualTime
from tests.support.story import Story, entries, part, receipts


async def one_run(story: Story, n: int = 10, *, name: str = "s") -> Receipt:
    """The receipt of n messages that consumer c was given in one run."""
    await story.publish_many(n)
    [receipt] = receipts(await story.fetch(name=name))
    return receipt


async def test_what_everybody_has_acked_leaves_nothing_behind(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    receipt = await one_run(story)
    result = await engine.ack(story.lease, "s", [receipt])
    assert (result.stale, result.forgotten) == ([], [(1, 10)])
    assert await story.log() == []
    sub = story.sub()
    leases = sub.leases("c")
    assert not await story.exists(sub.lanes, sub.runs, leases, sub.ready, sub.queue, sub.retries)


async def test_a_run_is_acked_in_parts_and_out_of_order(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    receipt = await one_run(story)
    for first, last in ((9, 10), (4, 5), (1, 1), (2, 3), (6, 8)):
        result = await engine.ack(story.lease, "s", [part(receipt, first, last)])
        assert (result.stale, result.forgotten) == ([], [(first, last)])
    assert await story.log() == []


async def test_many_parts_of_one_run_are_acked_in_one_call(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    receipt = await one_run(story)
    parts = [part(receipt, first, last) for first, last in ((7, 8), (3, 4), (1, 1), (10, 10))]
    result = await engine.ack(story.lease, "s", parts)
    assert result.stale == []
    assert sorted(result.forgotten) == [(1, 1), (3, 4), (7, 8), (10, 10)]
    assert await story.log() == [2, 5, 6, 9]


async def test_a_receipt_twice_in_one_call_is_settled_once(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    receipt = await one_run(story)
    assert await story.ack(receipt, receipt) == ["settled", "stale"]
    assert await story.ack(receipt) == ["stale"]


async def test_only_the_part_of_a_receipt_that_does_not_hold_is_stale(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    receipt = await one_run(story)
    await story.ack(part(receipt, 3, 4), part(receipt, 10))
    result = await engine.ack(story.lease, "s", [receipt])
    assert result.stale == [Stale(0, 3, 4), Stale(0, 10, 10)]
    assert result.forgotten == [(1, 2), (5, 9)]


async def test_an_older_receipt_settles_nothing(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    old = await one_run(story, 2)
    await story.nack(old)
    [new] = receipts(await story.fetch())
    assert new.token > old.token
    assert await story.ack(old) == ["stale"]
    assert await story.nack(old) == ["stale"]
    assert (await engine.extend(story.lease, "s", [old], lease_ms=1)).stale == [Stale(0, 1, 2)]
    assert await story.retries() == {1: 1, 2: 1}
    assert await story.ack(new) == ["settled"]


async def test_a_receipt_of_one_subscription_is_worth_nothing_on_another(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("s")
    await story.subscribe("t")
    receipt = await one_run(story, 2)
    assert await story.ack(receipt, name="t") == ["stale"]
    assert await story.log() == [1, 2]


async def test_a_message_leaves_the_log_when_the_last_subscription_acks_it(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    for name, mode in (("s", "shared"), ("k", "key_shared"), ("o", "exclusive")):
        await story.subscribe(name, mode)
    await story.publish("a", "b", "", "a")
    held = {name: receipts(await story.fetch(name=name)) for name in ("s", "k", "o")}
    assert (await engine.ack(story.lease, "s", held["s"])).forgotten == []
    lane = [receipt for receipt in held["k"] if receipt.lane == "=a"]
    await engine.ack(story.lease, "k", [part(lane[0], 1)])
    [ordered] = held["o"]
    assert (await engine.ack(story.lease, "o", [part(ordered, 1, 3)])).forgotten == [(1, 1)]
    rest = [receipt for receipt in held["k"] if receipt.lane != "=a"]
    assert sorted((await engine.ack(story.lease, "k", rest)).forgotten) == [(2, 3)]
    assert (await engine.ack(story.lease, "o", [part(ordered, 4)])).forgotten == []
    assert (await engine.ack(story.lease, "k", [part(lane[-1], 4)])).forgotten == [(4, 4)]
    assert await story.log() == []


async def test_a_subscription_that_has_not_fetched_keeps_everything_after_its_cursor(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("s")
    await story.publish_many(3)
    await story.subscribe("later")  # from entry 4 on
    await story.publish_many(3)
    [receipt] = receipts(await story.fetch(name="s"))
    assert (await engine.ack(story.lease, "s", [receipt])).forgotten == [(1, 3)]
    assert await story.log() == [4, 5, 6]


async def test_acks_across_ledgers_empty_the_log(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    for _ in range(3):
        await story.publish_many(10)
        lease = await engine.acquire(topic, 0, "w1", 60_000)
        assert lease is not None
        story.lease = lease
    [receipt] = receipts(await story.fetch())
    assert (receipt.first, receipt.last) == (1, 30)
    await story.ack(part(receipt, 5, 25))
    assert await story.log() == [1, 2, 3, 4, 26, 27, 28, 29, 30]
    await story.ack(part(receipt, 1, 4), part(receipt, 26, 30))
    assert await story.log() == []


async def test_nack_charges_each_message_of_a_run_and_ack_forgets_the_charge(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    receipt = await one_run(story, 3)
    assert await story.nack(part(receipt, 1, 2)) == ["settled"]
    deliveries = await story.fetch()
    assert [(item.entry, item.retries) for item in deliveries[0].messages] == [(1, 1), (2, 1)]
    assert await story.ack(part(receipt, 3), *receipts(deliveries)) == ["settled", "settled"]
    assert await story.retries() == {}


async def test_many_parts_of_one_run_are_nacked_in_one_call(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    receipt = await one_run(story)
    assert await story.nack(part(receipt, 7), part(receipt, 3), part(receipt, 5)) == ["settled"] * 3
    assert await story.retries() == {3: 1, 5: 1, 7: 1}
    assert sorted(await story.take()) == [3, 5, 7]


async def test_an_uncharged_nack_is_how_a_pause_gives_back(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(backoff=Backoff(3_000.0, maximum=3_000.0, jitter=0.0))
    receipt = await one_run(story, 3)
    assert (await engine.nack(story.lease, "s", [receipt], charged=False)).stale == []
    assert await story.retries() == {}
    assert await story.take() == [1, 2, 3]


async def test_backoff_grows_with_each_retry_up_to_its_maximum(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(backoff=Backoff(1.0, factor=3.0, maximum=5.0, jitter=0.0))
    await story.publish_many(1)
    for wait_ms in (1_000, 3_000, 5_000, 5_000):
        [receipt] = receipts(await story.fetch())
        await story.nack(receipt, delay_ms=None)
        await timed.advance(wait_ms - 1)
        assert await story.take() == []
        await timed.advance(1)
    assert await story.retries() == {1: 4}


async def test_jitter_scatters_a_run_within_its_bounds(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(backoff=Backoff(1.0, jitter=0.5))
    receipt = await one_run(story, 20)
    await story.nack(receipt, delay_ms=None)
    await timed.advance(499)
    assert await story.take() == []
    await timed.advance(250)
    early = await story.take()
    assert 0 < len(early) < 20
    await timed.advance(251)
    assert sorted(early + await story.take()) == list(range(1, 21))


async def test_nack_until_an_instant_waits_for_it(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    receipt = await one_run(story, 2)
    await timed.engine.nack(story.lease, "s", [receipt], until_ms=timed.now_ms + 60_000)
    await timed.advance(59_999)
    assert await story.take() == []
    await timed.advance(1)
    assert await story.take() == [1, 2]


async def test_extend_counts_from_now_and_moves_only_the_part_it_is_given(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    await story.publish_many(5)
    [delivery] = await story.fetch(lease_ms=1_000)
    await timed.advance(900)
    parts = [part(delivery.receipt, 2), part(delivery.receipt, 4, 5)]
    result = await timed.engine.extend(story.lease, "s", parts, lease_ms=1_000)
    assert (result.stale, result.deadline_ms) == ([], timed.now_ms + 1_000)
    await timed.advance(100)
    await timed.engine.expire(story.lease, "s")
    assert await story.take() == [1, 3]
    await timed.advance(900)
    await timed.engine.expire(story.lease, "s")
    assert await story.take() == [2, 4, 5]


@pytest.mark.parametrize("mode", ["key_shared", "exclusive"])
async def test_a_settle_never_cuts_an_extension_of_its_lane_short(
    timed: ManualTime, topic: str, mode: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode=mode)
    deadline = timed.now_ms + 60_000
    for _ in range(4):
        await story.publish("a")
        await story.fetch(lease_ms=1_000)
    one, two, three, four = receipts(await timed.engine.list_leases(story.lease, "s", "c"))
    await timed.engine.extend(story.lease, "s", [one], lease_ms=60_000)
    for settle in (story.ack(one), story.ack(three), story.nack(four)):  # by its text, by its record
        assert await settle == ["settled"]
        held = await timed.engine.list_leases(story.lease, "s", "c")
        assert {delivery.deadline_ms for delivery in held} == {deadline}
    await timed.advance(59_500)
    result = await timed.engine.expire(story.lease, "s")
    assert (result.released, result.next_due_ms) == (0, deadline)
    await story.ack(two)
    await story.fetch(lease_ms=1_000)
    [again] = await timed.engine.list_leases(story.lease, "s", "c")
    assert again.deadline_ms == timed.now_ms + 1_000  # the lane had ended, and with it what it was given


async def test_extend_until_an_instant_moves_the_one_deadline_of_a_lane(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish("a", "a", "b")
    held = receipts(await story.fetch(lease_ms=1_000))
    lane = next(receipt for receipt in held if receipt.lane == "=a")
    until = timed.now_ms + 5_000
    result = await timed.engine.extend(story.lease, "s", [part(lane, 2)], until_ms=until)
    assert (result.stale, result.deadline_ms) == ([], until)
    await timed.advance(1_000)
    await timed.engine.expire(story.lease, "s")
    assert await story.retries() == {3: 1}
    await timed.advance(4_000)
    await timed.engine.expire(story.lease, "s")
    assert await story.retries() == {1: 1, 3: 1}


async def test_extending_a_lane_that_went_back_is_stale(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish("a", "a")
    [receipt] = receipts(await story.fetch())
    await story.nack(part(receipt, 2))
    result = await engine.extend(story.lease, "s", [receipt], lease_ms=1_000)
    assert result.stale == [Stale(0, 2, 2)]


async def test_settling_needs_a_subscription(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    receipt = await one_run(story, 1)
    await engine.delete_subscription(topic, "s")
    for call in (
        lambda: engine.ack(story.lease, "s", [receipt]),
        lambda: engine.nack(story.lease, "s", [receipt]),
        lambda: engine.extend(story.lease, "s", [receipt], lease_ms=1),
        lambda: engine.fetch(story.lease, "s", [Capacity("c", 1)]),
        lambda: engine.expire(story.lease, "s"),
    ):
        with pytest.raises(SubscriptionNotFound, match="'s'"):
            await call()


async def test_a_thousand_receipts_are_settled_in_one_call(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish(*(f"key-{number}" for number in range(1_000)))
    deliveries = await story.fetch(permits=1_000)
    assert sorted(entries(deliveries)) == list(range(1, 1_001))
    result = await engine.ack(story.lease, "s", receipts(deliveries))
    assert (result.stale, result.forgotten) == ([], [(1, 1_000)])
    assert await story.log() == []


async def test_the_wait_doubles_up_to_its_maximum_and_jitter_only_shortens_it(
    timed: ManualTime, topic: str
) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe(backoff=Backoff(1.0, 2.0, 300.0, 0.2))
    await story.publish_many(2)
    found = await story.fetch()
    scattered = set()
    for retry in range(12):
        longest = min(1_000 * 2**retry, 300_000)
        await story.nack(*receipts(found), delay_ms=None)
        waits = await engine.store.command("ZRANGE", story.sub().ready, 0, -1)
        scattered.add(len({text.split("\0")[1] for text in waits}))
        await timed.advance(longest * 8 // 10 - 1)
        assert await story.take() == [], retry
        await timed.advance(longest - longest * 8 // 10 + 1)
        found = await story.fetch()
        assert sorted(entries(found)) == [1, 2], retry
    assert scattered == {2}, "two messages do not wait for the same time"
