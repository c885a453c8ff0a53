"""Partition leases: acquire, renew, release, and how an old epoch is fenced off."""

import asyncio

import pytest
from redis.crc import key_slot

from keylane.errors import Fenced, TopicNotFound, Unavailable
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Capacity, Lease, TopicSettings
from keylane_broker.store.keys import PartitionKeys
from loadtest.topology import three_node_cluster
from tests.support.clock import ManualTime
from tests.support.story import HOUR_MS, Story, entries, message, must_acquire


async def meta(story: Story, field: str) -> str:
    """A field of the partition's meta hash."""
    return str(await story.engine.store.command("HGET", story.keys.meta, field))


async def test_a_free_partition_is_acquired_and_each_time_opens_a_larger_epoch(
    engine: Engine, topic: str
) -> None:
    await engine.create_topic(topic)
    first = await must_acquire(engine, topic)
    made = await engine.describe_topic(topic)
    assert first == Lease(topic, 0, "w1", first.epoch, now_ms=first.now_ms, incarnation=made.incarnation)
    assert first.epoch == first.now_ms, "epochs are times, unless they come too fast"
    assert await engine.release(first)
    assert (await must_acquire(engine, topic, worker="w2")).epoch > first.epoch


async def test_a_held_partition_is_refused_to_others_and_nothing_changes(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    assert await engine.acquire(topic, 0, "w2", HOUR_MS) is None
    assert await engine.store.command("GET", story.keys.lease) == story.lease.text
    assert await meta(story, "epoch") == str(story.lease.epoch)


async def test_a_lease_does_not_outlast_its_length_when_the_clock_goes_back(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await engine.store.command(
        "PEXPIRE", story.keys.lease, 9 * HOUR_MS
    )  # as it looks when the clock went back
    assert await engine.acquire(topic, 0, "w2", 5_000) is None
    assert await engine.store.command("PTTL", story.keys.lease) <= HOUR_MS


async def test_a_worker_that_restarts_takes_its_own_partition_again_under_a_new_epoch(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    again = await must_acquire(engine, topic, worker="w1")
    assert again.epoch > story.lease.epoch
    assert await engine.renew([story.lease, again], HOUR_MS) == [False, True]


async def test_workers_whose_names_start_alike_are_not_the_same_worker(engine: Engine, topic: str) -> None:
    await engine.create_topic(topic)
    await must_acquire(engine, topic, worker="w1")
    assert await engine.acquire(topic, 0, "w", HOUR_MS) is None
    assert await engine.acquire(topic, 0, "w11", HOUR_MS) is None


async def test_the_lease_runs_out_by_itself_and_renewing_moves_its_end(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    assert await engine.renew([story.lease], 60_000) == [True]
    assert 0 < await engine.store.command("PTTL", story.keys.lease) <= 60_000
    assert await engine.renew([story.lease], HOUR_MS) == [True]
    assert await engine.store.command("PTTL", story.keys.lease) > 60_000


async def test_renewing_nothing_is_no_call_at_all(engine: Engine) -> None:
    assert await engine.renew([], HOUR_MS) == []


async def test_many_leases_are_renewed_at_once_and_each_is_answered(engine: Engine, topic: str) -> None:
    await engine.create_topic(topic, TopicSettings(partitions=9))
    leases = [await must_acquire(engine, topic, number) for number in range(9)]
    await engine.release(leases[4])
    assert await engine.renew(leases, HOUR_MS) == [number != 4 for number in range(9)]


async def test_releasing_a_lost_lease_does_not_take_it_from_its_new_holder(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    assert await engine.release(story.lease)
    newer = await must_acquire(engine, topic, worker="w2")
    assert not await engine.release(story.lease)
    assert await engine.renew([newer], HOUR_MS) == [True]


async def test_a_partition_that_does_not_exist_cannot_be_acquired(engine: Engine, topic: str) -> None:
    with pytest.raises(TopicNotFound):
        await engine.acquire(topic, 0, "w1", HOUR_MS)
    await engine.create_topic(topic, TopicSettings(partitions=2))
    with pytest.raises(TopicNotFound, match="partition 2"):
        await engine.acquire(topic, 2, "w1", HOUR_MS)


@pytest.mark.slow
async def test_the_epoch_grows_past_the_newest_one_that_the_caller_knows(engine: Engine, topic: str) -> None:
    await engine.create_topic(topic)
    known = 9 * 10**12
    assert (await must_acquire(engine, topic, known_epoch=known)).epoch == known + 1
    assert (await must_acquire(engine, topic, known_epoch=7)).epoch == known + 2


async def test_after_a_failover_that_lost_writes_ids_still_increase(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish("a", "b")
    await engine.store.command("HSET", story.keys.meta, "epoch", 0)  # as on a replica that lagged behind
    newer = await must_acquire(engine, topic, known_epoch=story.lease.epoch)
    result = await engine.publish(newer, [message()])
    assert newer.epoch > story.lease.epoch
    assert [published.id for published in result.each()] == [f"{newer.epoch}-3"]


async def test_an_epoch_that_a_failover_lost_is_not_given_twice_to_a_worker_that_never_heard_of_it(
    timed: ManualTime, topic: str
) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe()
    before = await engine.store.command("HGETALL", story.keys.meta)
    await timed.advance(1)
    lost = await must_acquire(
        engine, topic
    )  # of this, and of what is published in it, the replica has nothing
    await engine.publish(lost, [message("a")])
    await engine.store.command("XTRIM", story.keys.log, "MAXLEN", 0)
    await engine.store.command("DEL", story.keys.lease)
    await engine.store.command("HSET", story.keys.meta, *[text for pair in before.items() for text in pair])
    await timed.advance(1)
    other = await must_acquire(Engine(engine.store), topic, worker="w2")  # it remembers nothing
    assert other.epoch > lost.epoch
    [published] = (await engine.publish(other, [message("b")])).each()
    assert published.id == f"{other.epoch}-1"
    story.lease = other


async def test_every_script_that_serves_a_partition_is_fenced_by_the_next_epoch(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish("a", "b")
    [delivery] = await story.fetch()
    old = story.lease
    newer = await must_acquire(engine, topic)
    given = [delivery.receipt]
    for call in (
        lambda: engine.publish(old, [message()]),
        lambda: engine.fetch(old, "s", [Capacity("c", 1)]),
        lambda: engine.ack(old, "s", given),
        lambda: engine.nack(old, "s", given),
        lambda: engine.extend(old, "s", given, lease_ms=1),
        lambda: engine.expire(old, "s"),
        lambda: engine.join(old, "s", "d"),
        lambda: engine.renew_sessions(old, "s", ["c"]),
        lambda: engine.leave(old, "s", "c"),
        lambda: engine.list_leases(old, "s", "c"),
    ):
        with pytest.raises(Fenced, match=f"epoch {old.epoch}"):
            await call()
    # The worker changed, the leases of messages did not.
    assert entries(await engine.list_leases(newer, "s", "c")) == [1, 2]
    assert (await engine.ack(newer, "s", given)).stale == []


async def test_a_lease_that_has_run_out_fences_its_holder_even_when_nobody_took_over(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await engine.store.command("DEL", story.keys.lease)  # what its TTL does
    with pytest.raises(Fenced):
        await story.publish("a")


async def test_ids_carry_the_ledger_and_entries_count_on_through_ledgers(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish("a", "b")
    newer = await must_acquire(engine, topic)
    result = await engine.publish(newer, [message("a"), message("b")])
    assert [published.id for published in result.each()] == [f"{newer.epoch}-3", f"{newer.epoch}-4"]
    fetched = await engine.fetch(newer, "s", [Capacity("c", 10)])
    ids = [message.id for delivery in fetched.deliveries for message in delivery.messages]
    assert ids == [story.id(1), story.id(2), f"{newer.epoch}-3", f"{newer.epoch}-4"]


async def test_ledgers_without_entries_are_forgotten_at_the_next_acquire(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish("a")
    first = story.lease.epoch
    for _ in range(3):  # nothing is published in the first two of these
        story.lease = await must_acquire(engine, topic)
    await story.publish("b")
    second = story.lease.epoch
    story.lease = await must_acquire(engine, topic)
    assert await meta(story, "ledgers") == f"{first}:1 {second}:2 {story.lease.epoch}:3"

    [delivery] = await story.fetch(permits=1)
    assert await story.ack(delivery.receipt) == ["settled"]
    story.lease = await must_acquire(engine, topic)
    assert await meta(story, "ledgers") == f"{second}:2 {story.lease.epoch}:3"

    assert await story.ack(*[delivery.receipt for delivery in await story.fetch()]) == ["settled"]
    story.lease = await must_acquire(engine, topic)
    assert await meta(story, "ledgers") == f"{story.lease.epoch}:3"


async def test_one_old_entry_keeps_no_other_ledger(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish("stuck")
    stuck, first = story.lease.epoch, await story.fetch()
    for _ in range(20):
        story.lease = await must_acquire(engine, topic)
        await story.publish("a")
        assert await story.ack(*[delivery.receipt for delivery in await story.fetch()]) == ["settled"]
    story.lease = await must_acquire(engine, topic)
    newest = f"{story.lease.epoch}:22"
    assert await meta(story, "ledgers") == f"{stuck}:1 {newest}"
    assert await meta(story, "ledger") == newest
    assert entries(await engine.list_leases(story.lease, "s", "c")) == [1]
    assert await story.ack(first[0].receipt) == ["settled"]
    assert await story.log() == []


async def test_of_many_ledgers_only_those_are_named_that_a_delivery_is_of(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    ids = []
    for number in range(12):
        story.lease = await must_acquire(engine, topic)
        await story.publish(str(number), str(number))
        ids += [story.id(number * 2 + 1), story.id(number * 2 + 2)]
    fetched = await engine.fetch_flat(story.lease, "s", [Capacity("c", 3)])
    assert len(fetched.ledgers.split()) == 2
    got = [
        message.id
        for delivery in (await engine.fetch(story.lease, "s", [Capacity("c", 100)])).deliveries
        for message in delivery.messages
    ]
    assert got == ids[3:]
    held = await engine.list_leases(story.lease, "s", "c")
    assert sorted(message.id for delivery in held for message in delivery.messages) == sorted(ids)
    assert await story.ack(*[delivery.receipt for delivery in held]) == ["settled"] * len(held)
    page = await engine.read(topic, 0, 1, 1)
    assert len(page.ledgers.split()) == 1


@pytest.mark.slow
async def test_more_ledgers_than_one_call_looks_for_are_kept(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    ids = []
    for number in range(305):
        story.lease = await must_acquire(engine, topic)
        await story.publish("a")
        ids.append(story.id(number + 1))
    story.lease = await must_acquire(engine, topic)
    assert len((await meta(story, "ledgers") or "").split()) == 306
    delivered = await story.fetch(permits=400)
    assert [message.id for delivery in delivered for message in delivery.messages] == ids
    given = [part for one in delivered for part in [one.receipt]]
    assert set(await story.ack(*given)) == {"settled"}
    story.lease = await must_acquire(engine, topic)
    assert await meta(story, "ledgers") == f"{story.lease.epoch}:306"


async def test_a_sweep_that_a_crash_interrupted_is_left_to_the_next_owner(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish("a", "b")
    # A worker that deletes a subscription and dies before it has swept leaves this behind.
    await story.drop()
    assert await story.log() == [1, 2]
    assert (await must_acquire(engine, topic)).sweep
    await engine.drop_unowed(topic, 0)
    assert await story.log() == []
    assert not (await must_acquire(engine, topic)).sweep


async def test_a_sweep_does_not_cross_out_one_that_was_asked_for_meanwhile(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    for name in ("s", "t"):
        await story.subscribe(name)
    await story.publish("a", "b")
    await story.drop("s")
    first = await engine.store.run("subscription/drop_unowed", story.sub("s"), "", "s", 1, 1, "")
    await story.drop("t")
    await engine.store.run("subscription/drop_unowed", story.sub("s"), "", "s", 3, 1, first[2])
    assert await story.log() == [1, 2]
    assert (await must_acquire(engine, topic)).sweep
    await engine.drop_unowed(topic, 0)
    assert await story.log() == []


async def test_time_never_goes_backwards_on_a_partition(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    before = await story.publish("a")
    await timed.advance(-60_000)
    after = await story.publish("a")
    assert after.published_ms == before.published_ms == 1_000_000


async def calls(engine: Engine) -> int:
    """How many scripts the server has run."""
    info = await engine.store.command("INFO", "commandstats")
    names = ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_fcall")
    return sum(info[name]["calls"] for name in names if name in info)


@pytest.mark.slow
async def test_ten_thousand_leases_are_renewed_and_released_with_some_dozen_calls(
    server_url: str, topic: str
) -> None:
    engine = Engine.connect(server_url)
    await engine.create_topic(topic, TopicSettings(partitions=10_000))
    leases: list[Lease] = []
    for at in range(0, 10_000, 1_000):
        numbers = range(at, at + 1_000)
        leases += await asyncio.gather(*(must_acquire(engine, topic, number) for number in numbers))
    assert await engine.renew(leases, 60_000) == [True] * 10_000
    lost = Lease(topic, 7_777, "w1", leases[7_777].epoch + 1)
    leases[7_777] = lost
    assert await engine.renew([leases[1], lost], 60_000) == [True, False]
    before = await calls(engine)
    renewed = await engine.renew(leases, HOUR_MS)
    assert await calls(engine) - before <= 50
    assert [held for held, kept in zip(leases, renewed, strict=True) if not kept] == [lost]
    for partition in (0, 9_999):
        left = await engine.store.command("PTTL", PartitionKeys.of(topic, partition).lease)
        assert 60_000 < left <= HOUR_MS
    assert not await engine.release(lost)
    before = await calls(engine)
    released = await engine.release_all(leases)
    assert await calls(engine) - before <= 50
    assert released == renewed
    assert len(await engine.store.keys_like(f"kl:{{{topic}:*}}:lease")) == 1
    await engine.delete_topic(topic)
    await engine.close()


@pytest.mark.slow
async def test_many_leases_of_all_nodes_are_renewed_and_released_at_once(engine: Engine, topic: str) -> None:
    await engine.create_topic(topic, TopicSettings(partitions=300))
    leases = [await must_acquire(engine, topic, partition) for partition in range(300)]
    again = await must_acquire(engine, topic, 150)
    kept = [held.partition != 150 for held in leases]
    assert await engine.renew(leases, HOUR_MS) == kept
    assert await engine.release_all([*leases, again]) == [*kept, True]
    assert await engine.release_all(leases) == [False] * 300
    assert await engine.renew([], HOUR_MS) == []
    assert await engine.release_all([]) == []


@pytest.mark.slow
async def test_the_leases_of_a_node_that_is_away_are_none_and_the_others_renewed(topic: str) -> None:
    with three_node_cluster(config={"cluster-require-full-coverage": "no"}) as cluster:
        engine = Engine.connect(cluster.url.replace("redis://", "redis+cluster://"))
        await engine.create_topic(topic, TopicSettings(partitions=30))
        leases = [await must_acquire(engine, topic, partition) for partition in range(30)]
        away = [key_slot(f"{topic}:{partition}".encode()) >= 10_923 for partition in range(30)]
        assert 0 < sum(away) < 30
        cluster.nodes[2].kill()
        assert await engine.renew(leases, HOUR_MS) == [None if gone else True for gone in away]
        with pytest.raises(Unavailable):
            await engine.release(leases[away.index(True)])
        assert await engine.release_all(leases) == [None if gone else True for gone in away]
        await engine.close()
