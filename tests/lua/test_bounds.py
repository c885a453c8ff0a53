"""Nothing waits longer than it must, and no script works longer than it may."""

import json
from typing import Any

import pytest

from keylane.errors import Unavailable
from keylane_broker.engine.bodies import pack_names
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Backoff, Capacity, Receipt, Stale
from keylane_broker.inspect.topic_checker import check_topic
from tests.support.calls import watch_calls
from tests.support.clock import ManualTime
from tests.support.servers import look_and_leave
from tests.support.story import Story, entries, part, receipts
from tests.support.turns import ack_whole


async def test_a_stuck_key_delays_no_other_even_for_a_consumer_with_one_permit(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish("stuck")
    await story.nack(*receipts(await story.fetch()), delay_ms=600_000)
    await story.publish(*["stuck"] * 300, "other")
    fetched = await engine.fetch(story.lease, "s", [Capacity("c", 1)])
    assert entries(fetched.deliveries) == [302]


async def test_parking_takes_no_room_from_lanes_that_are_ready(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish("stuck", "ready")
    stuck, ready = await story.fetch()
    await story.nack(stuck.receipt, delay_ms=600_000)
    await story.nack(ready.receipt, delay_ms=1_000)
    for _ in range(3):
        await story.publish(*["stuck"] * 1_000)
    await timed.advance(1_000)
    fetched = [await story.take(permits=10) for _ in range(2)]
    assert [2] in fetched


async def test_a_log_full_of_holes_is_read_in_one_go(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("first", mode="shared")
    await story.publish_many(200)
    [delivery] = await story.fetch(permits=200, name="first")
    odd = [delivery.receipt._replace(first=entry, last=entry) for entry in range(1, 200, 2)]
    await story.ack(*odd, name="first")
    for name, mode in (("runs", "shared"), ("lane", "exclusive"), ("keys", "key_shared")):
        await story.subscribe(name, mode, start="earliest")
        fetched = await engine.fetch(story.lease, name, [Capacity("c", 60)])
        assert entries(fetched.deliveries) == list(range(2, 121, 2)), mode
        fetched = await engine.fetch(story.lease, name, [Capacity("c", 60)])
        assert entries(fetched.deliveries) == list(range(122, 201, 2)), mode
        assert await engine.store.command("HGET", story.keys.subs, name) == "200"


async def test_expire_and_leave_go_step_by_step_and_reach_the_end(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="shared")
    for _ in range(3):
        await story.publish_many(400)
        await story.fetch(permits=400, lease_ms=1_000)
    await timed.advance(1_000)
    assert (await engine.expire(story.lease, "s")).released == 3
    assert (
        sum(
            len(d.messages) for d in (await engine.fetch(story.lease, "s", [Capacity("c", 1_000)])).deliveries
        )
        == 1_000
    )
    assert await engine.leave(story.lease, "s", "c") >= 3
    assert await story.exists(story.sub().deadlines, story.sub().consumers) is False


async def test_a_crash_charges_only_the_oldest_however_late_it_is_noticed(
    timed: ManualTime, topic: str
) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="shared", consumers=())
    await timed.engine.join(story.lease, "s", "c", session_ms=10_000)
    await story.publish_many(20)
    await story.fetch(permits=20, lease_ms=30_000)
    await timed.advance(60_000)  # the session ended, and then the deadline passed
    assert (await timed.engine.expire(story.lease, "s")).expired_consumers == ["c"]
    assert await story.retries() == {1: 1}


async def test_clearing_an_old_session_leaves_the_new_one_alone(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="shared", consumers=())
    await engine.join(story.lease, "s", "c", session_ms=10_000)
    await story.publish_many(5)
    await timed.advance(10_000)
    # Two workers' tasks notice the end; one clears it and the consumer comes back before the other does.
    await engine.join(story.lease, "s", "c", session_ms=10_000)
    assert await story.take() == [1, 2, 3, 4, 5]
    answer = await engine.store.run(
        "subscription/leave", story.sub(), story.lease.text, "s", "c", "ended", 500
    )
    assert answer[:3] == ["OK", 1, 0]
    assert len(await engine.list_leases(story.lease, "s", "c")) == 1


async def test_tokens_grow_over_a_failover_that_lost_the_newest(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await story.subscribe(mode="shared")
    await story.publish_many(2)
    before = await timed.engine.store.command("HGET", story.sub().sub, "token")
    [lost] = await story.fetch(permits=1)
    await timed.engine.seek(topic, "s", "earliest")  # the replica knew neither the lease nor the token
    await timed.engine.store.command("HSET", story.sub().sub, "token", before)
    await timed.advance(5)
    [again] = await story.fetch(permits=1)
    assert again.receipt.token > lost.receipt.token
    assert await story.ack(lost.receipt) == ["stale"]


async def test_an_ack_looks_once_at_what_another_subscription_holds(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("s", mode="shared")
    await story.subscribe("one", mode="exclusive")
    await story.publish_many(200)
    held = [delivery for _ in range(200) for delivery in await story.fetch(permits=1, name="one")]
    await story.ack(*receipts(held[::2]), name="one")
    await story.ack(*receipts(await story.fetch(permits=200)))
    assert await story.log() == list(range(2, 201, 2))
    await story.nack(held[1].receipt, name="one")
    await story.ack(*receipts(await story.fetch(permits=200, name="one")), name="one")
    assert await story.log() == []


async def test_a_leave_cut_short_by_its_limit_does_not_end_a_session_opened_meanwhile(
    timed: ManualTime, topic: str
) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish(*(f"key-{number}" for number in range(30)))
    await story.fetch()
    step = [story.sub(), story.lease.text, "s", "c"]
    first = await engine.store.run("subscription/leave", *step, "left", 20)  # type: ignore[arg-type]
    assert first[:3] == ["OK", 0, 20]
    assert not await engine.join(story.lease, "s", "c", session_ms=60_000)  # when the rest is back, too
    assert len(await story.take(permits=30)) == 30
    second = await engine.store.run("subscription/leave", *step, "ended", 20)  # type: ignore[arg-type]
    assert second[:3] == ["OK", 1, 0]
    assert await engine.renew_sessions(story.lease, "s", ["c"]) == []
    assert await story.retries() == {}


async def test_a_leave_left_unfinished_is_due_at_once(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="failover", consumers=("a", "b"))
    await story.publish_many(5)
    assert await story.take("a") == [1, 2, 3, 4, 5]
    step = [story.sub(), story.lease.text, "s", "a", "left", 1]
    assert (await engine.store.run("subscription/leave", *step))[1] == 0  # type: ignore[arg-type]
    fetched = await engine.fetch(story.lease, "s", [Capacity("b", 10)])  # the worker died in between
    assert fetched.deliveries == []
    assert 0 < fetched.next_due_ms <= timed.now_ms
    await engine.expire(story.lease, "s")
    assert await story.take("b") == [1, 2, 3, 4, 5]
    assert await story.retries() == {}  # it is still a leave


async def test_a_crash_cleared_by_two_workers_charges_only_once(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="shared", consumers=("d",))
    await engine.join(story.lease, "s", "c", session_ms=1_000)
    await story.publish_many(3)
    for _ in range(3):
        await story.take(permits=1)
    await timed.advance(1_000)
    step = [story.sub(), story.lease.text, "s", "c", "ended", 1]
    assert (await engine.store.run("subscription/leave", *step))[1] == 0  # type: ignore[arg-type]
    await engine.expire(story.lease, "s")  # the worker died in between
    assert await story.retries() == {1: 1}
    assert await story.take("d") == [1, 2, 3]


async def test_what_a_consumer_holds_costs_what_it_holds_whatever_the_others_have(
    timed: ManualTime, topic: str
) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared", consumers=("c", "d"))
    for start in range(0, 3_000, 1_000):
        await story.publish(*(f"key-{start + number}" for number in range(1_000)))
        await engine.fetch(story.lease, "s", [Capacity("d", 1_000)])
    await story.publish("mine")
    await story.take("c")
    calls = []
    run = engine.store.run

    async def counted(script: str, *arguments: Any) -> list[Any]:
        calls.append(script)
        return await run(script, *arguments)

    engine.store.run = counted  # type: ignore[assignment, method-assign]
    assert entries(await engine.list_leases(story.lease, "s", "c")) == [3_001]
    assert await engine.leave(story.lease, "s", "c", crashed=True) == 1
    assert calls == ["subscription/list_leases", "subscription/leave"]
    engine.store.run = run  # type: ignore[method-assign]


async def test_a_large_ack_beside_subscriptions_with_lanes_of_keys_goes_step_by_step(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("s", mode="shared")
    for number in range(3):
        await story.subscribe(f"keys-{number}", mode="key_shared")
    for _ in range(2):
        await story.publish(*[f"k{number % 400}" for number in range(1_000)])
    held = [delivery for _ in range(2) for delivery in await story.fetch(permits=1_000)]
    kept = {}
    for number in range(3):
        name = f"keys-{number}"
        passed = [one for _ in range(2) for one in await story.fetch(permits=1_000, name=name)]
        kept[name] = passed[number::500]
        for start in range(0, len(passed), 500):
            gone = [one for one in passed[start : start + 500] if one not in kept[name]]
            await story.ack(*receipts(gone), name=name)
    calls = watch_calls(engine, monkeypatch)
    given = [held[0].receipt, part(held[1].receipt, 1_001, 1_900), held[0].receipt]
    bodies = pack_names([part for entry in range(1, 1_901) for part in (entry, f"body-{entry}")])
    result = await engine.ack(story.lease, "s", given, bodies)
    assert result.outcomes(3) == ["settled", "settled", "stale"]
    assert calls.count("subscription/ack") >= 3
    written = await engine.store.entries(story.keys.bodies, [("-", "+")])
    for (_, ranges), (_, fields) in zip(result.records, written[0], strict=True):
        names = [f"body-{entry}" for first, last in ranges for entry in range(first, last + 1)]
        assert json.loads(fields[fields.index("names") + 1])[1::2] == names
    owed = {entry for one in kept.values() for entry in entries(one)} | set(range(1_901, 2_001))
    assert await story.log() == sorted(owed)


async def test_many_ranges_beside_many_subscriptions_are_not_settled_in_one_quick_call(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("s", consumers=("c", "d"))
    others = [f"other-{number}" for number in range(30)]
    for name in others:
        await story.subscribe(name)
    await story.publish_many(400)
    held = [one for _ in range(200) for one in [*await story.fetch("c", 1), *await story.fetch("d", 1)]][::2]
    left = range(101, 161, 2)
    for name, entry in zip(others, left, strict=True):  # each has one message left
        [run] = receipts(await story.fetch(permits=1_000, name=name))
        await story.ack(run._replace(last=entry - 1), run._replace(first=entry + 1), name=name)
    assert not await ack_whole(engine, story.lease, "s", receipts(held))
    assert await story.ack(*receipts(held)) == ["settled"] * len(held)
    assert await story.log() == sorted([*range(2, 401, 2), *left])


async def test_many_lanes_go_back_step_by_step_each_of_them_as_a_whole(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    keys = [f"k{number}" for number in range(450)]
    held = []
    for _ in range(2):
        await story.publish(*keys)
        held += receipts(await story.fetch(permits=1_000))
    wrong = held[7]._replace(token=1)
    await engine.ack(story.lease, "s", [held[3]])
    calls = watch_calls(engine, monkeypatch)
    # Of each lane first the later message, which goes back with the earlier one.
    given = [*held[450:], wrong, *held[:450]]
    result = await engine.nack(story.lease, "s", given, delay_ms=60_000)
    assert calls.count("subscription/nack") >= 3
    assert result.stale == [Stale(450, 8, 8), Stale(454, 4, 4)]
    earliest = [450 + 4 if entry == 4 else entry for entry in range(1, 451)]
    assert await story.retries() == dict.fromkeys(sorted(earliest), 1)
    assert sorted(part[1:] for part in result.returned) == [(at, at) for at in range(1, 901) if at != 4]
    assert await check_topic(engine, topic) == []


async def test_the_many_receipts_of_one_lane_go_back_together(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="exclusive")
    await story.publish_many(300)
    [lane] = receipts(await story.fetch(permits=1_000))
    assert await story.nack(*(part(lane, entry) for entry in range(300, 0, -1))) == ["settled"] * 300
    assert await story.retries() == {1: 1}


async def test_many_messages_of_runs_go_back_step_by_step(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(backoff=Backoff(1.0, jitter=0.5))
    await story.publish_many(1_000)
    [run] = receipts(await story.fetch(permits=1_000))
    await story.ack(part(run, 500))
    calls = watch_calls(engine, monkeypatch)
    result = await engine.nack(story.lease, "s", [run])
    assert calls.count("subscription/nack") >= 5
    assert result.stale == [Stale(0, 500, 500)]
    assert await story.retries() == {entry: 1 for entry in range(1, 1_001) if entry != 500}
    assert sum(last - first + 1 for _, first, last in result.returned) == 999
    assert await check_topic(engine, topic) == []


async def test_many_lanes_are_extended_step_by_step(
    timed: ManualTime, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = timed.engine
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish(*(f"k{number}" for number in range(500)))
    held = receipts(await story.fetch(permits=1_000, lease_ms=1_000))
    await story.ack(held[450])
    calls = watch_calls(engine, monkeypatch)
    result = await engine.extend(story.lease, "s", held, lease_ms=5_000)
    assert calls.count("subscription/extend") >= 3
    assert result.stale == [Stale(450, 451, 451)]
    assert result.deadline_ms == timed.now_ms + 5_000
    await timed.advance(4_999)
    assert (await engine.expire(story.lease, "s")).released == 0
    await timed.advance(1)
    assert (await engine.expire(story.lease, "s")).released == 499


async def test_a_step_that_finds_the_lease_gone_says_that_a_part_was_done(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish(*(f"k{number}" for number in range(300)))
    held = receipts(await story.fetch(permits=1_000))
    run, done = engine.store.run, list[int]()

    async def lose_lease(script: str, *rest: Any) -> list[Any]:
        answer = await run(script, *rest)
        if script == "subscription/nack":
            await engine.release(story.lease)
        return answer

    monkeypatch.setattr(engine.store, "run", lose_lease)
    with pytest.raises(Unavailable, match="a part was settled"):
        await engine.nack(story.lease, "s", held, on_step=lambda part, _: done.append(part.messages))
    assert len(done) == 1
    assert 0 < done[0] < 300


@pytest.mark.slow
async def test_what_waits_behind_a_full_consumer_is_noted_in_stretches(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared", consumers=("full", "free"))
    await story.subscribe("other", mode="shared")
    await story.publish("hot")
    [first] = await story.fetch("full", 1)
    for _ in range(6):
        await story.publish(*["hot"] * 1_000)
    await story.publish("cold", *["hot"] * 10)
    calls = 0
    while not (taken := await story.take("free", 5)):
        calls += 1
    assert taken == [6_002]
    assert calls <= 3  # a thousand at first, then all whose keys are known
    assert await story.take("free", 5) == []
    assert await engine.store.command("ZCARD", story.sub().queue) <= 5

    [run] = await story.fetch(permits=1_000, name="other")  # what waits is owed, and stays
    await story.ack(run.receipt, name="other")
    assert len(await story.log()) == 6_012
    await story.ack(first.receipt)
    expected = [*range(2, 6_002), *range(6_003, 6_013)]
    seen: list[int] = []
    while len(seen) < len(expected):
        part_of_it = await story.fetch("free", 701)
        if len(seen) < 2_000:  # the head stays and the rest goes back, to be served again
            head, *rest = entries(part_of_it)
            [delivery] = [one for one in part_of_it if one.receipt.first == head]
            await story.nack(part(delivery.receipt, head + 1, delivery.receipt.last))
            part_of_it = [delivery, *await story.fetch("free", 700)]
            assert entries(part_of_it[1:]) == rest
            await story.ack(part(delivery.receipt, head), *receipts(part_of_it[1:]))
            seen += [head, *rest]
        else:
            await story.ack(*receipts(part_of_it))
            seen += entries(part_of_it)
    assert seen == expected


async def test_a_message_deleted_from_the_midst_of_what_waits_is_passed(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared", consumers=("full", "free"))
    await story.publish(*["k"] * 10)
    [first] = await story.fetch("full", 1)
    await story.take("free")
    assert await engine.store.command("ZCARD", story.sub().queue) == 1
    await engine.store.command("XDEL", story.keys.log, f"{story.lease.epoch}-5")
    await story.ack(first.receipt)
    engine.forget(topic, 0)
    assert await story.take("free", 6) == [2, 3, 4, 6, 7]
    assert await story.take("free", 6) == [8, 9, 10]


async def test_a_fetch_serves_a_bounded_number_of_lanes_that_wait(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared", consumers=("c", *(f"idle-{number}" for number in range(60))))
    await story.publish(*(f"k{number}" for number in range(700)))
    first = await story.fetch(permits=350)
    second = await story.fetch(permits=350)
    await story.nack(*receipts(first))
    await story.nack(*receipts(second))
    rooms = [Capacity("c", 1_000), *(Capacity(f"idle-{number}", 1) for number in range(60))]
    seen: list[int] = []
    calls = 0
    while len(seen) < 700:
        result = await engine.fetch(story.lease, "s", rooms)
        calls += 1
        taken = entries(result.deliveries)
        assert len(taken) <= 210
        assert result.more or len(seen) + len(taken) == 700
        seen += taken
        rooms = rooms[:1]
    assert calls <= 5, "the shares of those for whom nothing waits go to the others"
    assert set(seen[:200]) <= set(range(1, 351)), "the longest waiting comes first"


async def test_what_waits_for_one_consumer_keeps_nothing_from_the_others(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    names = [f"c{number}" for number in range(20)]
    await story.subscribe(mode="key_shared", consumers=names)
    keys = [f"k{number}" for number in range(499)]
    await story.publish(*keys)
    await story.take("c0", permits=480)
    for name in names[1:]:
        await story.take(name, 1)
    await story.publish(*keys, "new")
    while not await story.take("c1", 1):  # its own is the first that is not behind those of another
        pass
    while not await story.take("c1", 1):  # then all others wait
        pass
    result = await engine.fetch(story.lease, "s", [Capacity(name, 1_000) for name in names])
    assert {delivery.consumer for delivery in result.deliveries} == {*names} - {"c1"}


@pytest.mark.parametrize("turns", [1, 2])
async def test_a_flood_of_lanes_that_have_to_wait_delays_no_lane_that_can_be_served(
    engine: Engine, topic: str, turns: int
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared", consumers=("full", "free"))
    await story.publish("ready", *(f"k{number}" for number in range(999)))
    [ready, *_] = await story.fetch("full", 1_000)
    for _ in range(turns):  # then fresh messages come first, or what waits
        await story.publish("other")
        assert len(await story.take("free", 1)) == 1
    await story.publish(*(f"k{number}" for number in range(999)))
    await story.nack(ready.receipt)
    calls = 0
    while not await story.take("free", 5):
        calls += 1
    assert calls <= 1


async def _others_hold_every_other(story: Story, others: int, messages: int) -> list[Receipt]:
    """Many subscriptions hold the same half of all messages; returns receipts of the other for the last."""
    names = [f"o{number}" for number in range(others)]
    for name in (*names, "s"):
        await story.subscribe(name, mode="shared")
    await story.publish_many(messages)
    for name in names:
        [run] = receipts(await story.fetch(permits=messages, name=name))
        await story.ack(*(part(run, entry) for entry in range(1, messages, 2)), name=name)
    [run] = receipts(await story.fetch(permits=messages))
    return [part(run, entry) for entry in range(1, messages, 2)]


async def test_what_is_settled_is_looked_for_in_the_runs_of_many_others_step_by_step(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = await Story.begin(engine, topic)
    given = await _others_hold_every_other(story, 15, 600)
    assert not await ack_whole(engine, story.lease, "s", given)
    calls = watch_calls(engine, monkeypatch)
    assert set(await story.ack(*given)) == {"settled"}
    assert calls.count("subscription/ack") >= 2
    assert await story.log() == list(range(2, 601, 2))


@pytest.mark.parametrize("how", ["purge", "delete"])
async def test_what_a_subscription_leaves_is_looked_for_in_the_runs_of_many_others_step_by_step(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    story = await Story.begin(engine, topic)
    await _others_hold_every_other(story, 15, 450)
    calls = watch_calls(engine, monkeypatch)
    if how == "purge":
        assert (await engine.purge(topic, "s")).messages == 450
        assert calls.count("message/purge") >= 3
    else:
        await engine.delete_subscription(topic, "s")
        assert calls.count("subscription/drop_unowed") >= 3
    assert await story.log() == list(range(2, 451, 2))


async def test_an_ack_asks_some_of_many_subscriptions_where_one_of_them_is_owed_everything(
    server_url: str, topic: str
) -> None:
    engine = Engine.connect(server_url)
    story = await Story.begin(engine, topic)
    await story.subscribe("s", mode="shared")
    others = [f"o{number}" for number in range(1_000)]
    await engine.store.command("HSET", story.keys.subs, *(part for name in others for part in (name, "0")))
    await story.publish_many(2)
    [run] = receipts(await story.fetch())
    await engine.store.command("CONFIG", "RESETSTAT")
    assert await story.ack(part(run, 1)) == ["settled"]
    assert await ack_whole(engine, story.lease, "s", [part(run, 2)])
    counted = await engine.store.command("INFO", "commandstats")
    assert counted["cmdstat_exists"]["calls"] < 50
    assert "cmdstat_hgetall" not in counted
    await engine.store.command("HDEL", story.keys.subs, *others)
    await engine.drop_unowed(topic, 0)
    await look_and_leave(engine, topic)
