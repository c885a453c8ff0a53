"""Runs with holes: what matches a filter and is fetched together is leased as one, whatever lies between."""

import random
from collections.abc import Sequence

import pytest

from keylane.errors import MessageNotFound, Unavailable
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.filters import Filter
from keylane_broker.engine.values import Capacity, SubscriptionSettings
from keylane_broker.inspect.topic_checker import check_topic
from tests.support.clock import ManualTime
from tests.support.story import HOUR_MS, Story, entries, message, must_acquire, part, receipts

EU = Filter(keys="eu-*")


async def begin(
    engine: Engine,
    topic: str,
    keys: Sequence[str] = ("eu-1", "us-1", "eu-2", "us-2", "us-3", "eu-3", "eu-4", "us-4", "eu-5"),
    consumers: Sequence[str] = ("c",),
) -> Story:
    """A topic with messages, of which a subscription is owed some, beside another one that is owed all."""
    story = await Story.begin(engine, topic)
    await story.subscribe("all")
    await engine.create_subscription(topic, "s", SubscriptionSettings("shared", filter=EU))
    for consumer in consumers:
        await engine.join(story.lease, "s", consumer, HOUR_MS)
    await story.publish(*keys)
    return story


async def runs(story: Story) -> dict[str, str]:
    """Every run of the subscription, and of its record who has it and its entries; "" is nobody."""
    stored = await story.engine.store.command("HGETALL", story.sub().lanes)
    found = {}
    for lane, record in stored.items():
        consumer, *_, leased = record.split("|")
        found[lane] = " ".join([consumer, *(item.partition(":")[2] for item in leased.split())])
    return dict(sorted(found.items(), key=lambda item: int(item[0][1:])))


async def test_what_is_fetched_together_is_one_run(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    deliveries = await story.fetch()
    assert [delivery.receipt[3:] for delivery in deliveries] == [(1, 1), (3, 3), (6, 7), (9, 9)]
    assert await runs(story) == {"#1": "c 1 3 6-7 9"}
    assert await story.ack(*receipts(deliveries)) == ["settled"] * 4
    assert await runs(story) == {}
    assert not await story.exists(story.sub().lanes, story.sub().runs, story.sub().leases("c"))
    assert await story.log() == [*range(1, 10)], "the other one is owed them still"


async def test_each_consumer_gets_a_run_of_its_share(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic, consumers=("c", "d"))
    result = await engine.fetch(story.lease, "s", [Capacity("c", 9), Capacity("d", 9)])
    assert {name: entries(one for one in result.deliveries if one.consumer == name) for name in "cd"} == {
        "c": [1, 3, 6],
        "d": [7, 9],
    }
    assert await runs(story) == {"#1": "c 1 3 6", "#7": "d 7 9"}


async def test_a_run_has_a_hundred_stretches_at_most(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic, ["eu-1", "us-1"] * 201)
    deliveries = await story.fetch(permits=1_000)
    assert [*await runs(story)] == ["#1", "#201", "#401"]
    assert await story.ack(*receipts(deliveries)) == ["settled"] * 201
    assert await runs(story) == {}


async def test_what_lies_in_the_holes_goes_when_the_others_have_settled_it(
    engine: Engine, topic: str
) -> None:
    story = await begin(engine, topic)
    deliveries = await story.fetch()
    await story.ack(*receipts(await story.fetch(name="all")), name="all")
    assert await story.log() == [1, 3, 6, 7, 9]
    await story.ack(deliveries[1].receipt)
    assert await story.log() == [1, 6, 7, 9]
    await story.ack(*receipts(deliveries[:1] + deliveries[2:]))
    assert await story.log() == []


@pytest.mark.parametrize("size", [1, 7, 60, 150])
async def test_of_what_others_settle_that_stays_which_a_long_run_has(
    size: int, engine: Engine, topic: str
) -> None:
    keys = [("eu" if number % 7 in (0, 1, 4) else "us") + f"-{number}" for number in range(300)]
    story = await begin(engine, topic, keys)
    await story.take(permits=1_000)
    owed = {place + 1 for place, key in enumerate(keys) if key.startswith("eu")}
    [run] = receipts(await story.fetch(permits=1_000, name="all"))
    rest = random.Random(size).sample(range(1, 301), 300)
    while rest:
        some, rest = rest[:size], rest[size:]
        assert {*await story.ack(*(part(run, entry) for entry in some), name="all")} == {"settled"}
        assert set(await story.log()) == owed | {*rest}


async def test_a_receipt_across_a_hole_holds_what_is_leased_and_nothing_else(
    engine: Engine, topic: str
) -> None:
    story = await begin(engine, topic)
    deliveries = await story.fetch()
    result = await engine.ack(story.lease, "s", [part(deliveries[0].receipt, 2, 6)])
    assert [(one.first, one.last) for one in result.stale] == [(2, 2), (4, 5)]
    assert await runs(story) == {"#1": "c 1", "#7": "c 7 9"}


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ([0], {"#3": "c 3 6-7 9"}),
        ([3], {"#1": "c 1 3 6-7"}),
        ([1], {"#1": "c 1", "#6": "c 6-7 9"}),
        ([1, 2], {"#1": "c 1", "#9": "c 9"}),
        ([2, 1], {"#1": "c 1", "#9": "c 9"}),
        ([0, 3], {"#3": "c 3 6-7"}),
        ([3, 0, 3], {"#3": "c 3 6-7"}),
        ([0, 2], {"#3": "c 3", "#9": "c 9"}),
    ],
)
async def test_a_part_that_is_settled_leaves_the_rest_leased(
    given: list[int], left: dict[str, str], engine: Engine, topic: str
) -> None:
    story = await begin(engine, topic)
    deliveries = await story.fetch()
    outcomes = await story.ack(*[deliveries[at].receipt for at in given])
    assert outcomes == ["settled" if given.index(at) == place else "stale" for place, at in enumerate(given)]
    assert await runs(story) == left
    rest = [one.receipt for at, one in enumerate(deliveries) if at not in given]
    assert await story.ack(*rest) == ["settled"] * len(rest)


async def test_a_part_that_is_given_back_is_served_again_and_the_rest_stays_leased(
    engine: Engine, topic: str
) -> None:
    story = await begin(engine, topic)
    deliveries = await story.fetch()
    assert await story.nack(deliveries[1].receipt, deliveries[2].receipt) == ["settled"] * 2
    assert await runs(story) == {"#1": "c 1", "#3": " 3 6-7", "#9": "c 9"}
    assert await story.retries() == {3: 1, 6: 1, 7: 1}
    again = await story.fetch(permits=2)
    assert entries(again) == [3, 6]
    assert await runs(story) == {"#1": "c 1", "#3": "c 3 6", "#7": " 7", "#9": "c 9"}
    assert await story.ack(deliveries[1].receipt) == ["stale"], "it has another token"
    assert await story.take() == [7]


async def test_all_of_a_run_is_extended_as_one_and_a_part_by_itself(timed: ManualTime, topic: str) -> None:
    story = await begin(timed.engine, topic)
    deliveries = await story.fetch(lease_ms=1_000)
    await timed.engine.extend(story.lease, "s", receipts(deliveries), lease_ms=5_000)
    assert await runs(story) == {"#1": "c 1 3 6-7 9"}
    await timed.engine.extend(story.lease, "s", receipts(deliveries[1:3]), lease_ms=9_000)
    assert await runs(story) == {"#1": "c 1", "#3": "c 3 6-7", "#9": "c 9"}
    await timed.advance(5_000)
    await timed.engine.expire(story.lease, "s")
    assert await runs(story) == {"#1": " 1", "#3": "c 3 6-7", "#9": " 9"}


async def test_a_timeout_charges_the_oldest_of_a_run(timed: ManualTime, topic: str) -> None:
    story = await begin(timed.engine, topic)
    await story.fetch(lease_ms=1_000)
    await timed.advance(1_000)
    result = await timed.engine.expire(story.lease, "s")
    assert [(first, last) for *_, first, last in result.ended] == [(1, 1), (3, 3), (6, 7), (9, 9)]
    assert await story.retries() == {1: 1}
    assert sorted(await story.take()) == [1, 3, 6, 7, 9]


async def test_what_is_removed_by_hand_leaves_the_rest_of_its_run(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    deliveries = await story.fetch()
    await engine.skip(topic, "s", f"0:{story.id(3)}")
    with pytest.raises(MessageNotFound):
        await engine.skip(topic, "s", f"0:{story.id(4)}")
    assert await runs(story) == {"#1": "c 1", "#6": "c 6-7 9"}
    await story.nack(*receipts(deliveries[2:]))
    await engine.delete_message(topic, f"0:{story.id(7)}")
    assert await runs(story) == {"#1": "c 1", "#6": " 6", "#9": " 9"}
    await engine.purge(topic, "s")
    assert await runs(story) == {}
    assert await story.ack(deliveries[0].receipt) == ["stale"]


async def test_explain_tells_what_is_in_a_run_from_what_is_in_its_holes(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    await story.fetch()
    told = [(await engine.explain(topic, "s", f"0:{story.id(entry)}"))[1] for entry in range(1, 10)]
    assert [one.state == "leased" for one in told] == [entry in (1, 3, 6, 7, 9) for entry in range(1, 10)]
    assert {one.state for one in told} == {"leased", "filtered"}


async def test_what_has_a_priority_among_matches_is_a_run_of_its_own(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic, ["us-1"])
    batch = [message(key) for key in ("eu-1", "us-1", "eu-2", "us-2", "eu-3")]
    await engine.publish(story.lease, batch, extras={2: (0, 9)})
    assert await story.take(permits=1) == [4]
    assert await story.take() == [2, 6]
    assert await runs(story) == {"#2": "c 2", "#4": "c 4", "#6": "c 6"}


async def test_who_comes_back_is_told_each_stretch_of_a_run(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    deliveries = await story.fetch()
    held = await engine.list_leases(story.lease, "s", "c")
    assert receipts(held) == receipts(deliveries)
    assert entries(held) == [1, 3, 6, 7, 9]


async def test_a_message_that_the_log_has_lost_leaves_its_run(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    await engine.store.command("XDEL", story.keys.log, story.id(3))
    story.lease = await must_acquire(engine, topic)  # else the engine still knows it
    assert await story.take() == [1, 6, 7, 9]
    assert await runs(story) == {"#1": "c 1", "#6": "c 6-7 9"}
    await engine.delete_subscription(topic, "all")  # is owed it still


async def test_dead_letters_of_a_run_leave_the_rest_of_it(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("all")
    settings = SubscriptionSettings("shared", filter=EU, max_retries=0)
    await engine.create_subscription(topic, "s", settings)
    await engine.join(story.lease, "s", "c", HOUR_MS)
    await story.publish("eu-1", "us-1", "eu-2", "us-2", "eu-3")
    deliveries = await story.fetch()
    await story.nack(deliveries[1].receipt)
    assert await runs(story) == {"#1": "c 1", "#5": "c 5"}
    await engine.leave(story.lease, "s", "c", crashed=True)
    assert await runs(story) == {"#5": " 5"}
    try:
        await engine.empty_outbox(topic, 0)
    except Unavailable:  # the topic has just been made
        await must_acquire(engine, f"{topic}.dead")
        await engine.empty_outbox(topic, 0)
    assert await check_topic(engine, topic) == []
    await engine.delete_topic(f"{topic}.dead")
