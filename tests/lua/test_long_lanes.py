"""Lanes with more in flight than a record has room for: the contract holds, and no call costs their size."""

from collections import Counter
from typing import Any

import pytest

from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Backoff, Receipt
from keylane_broker.inspect.counts import count_subscription
from keylane_broker.inspect.peek import peek
from keylane_broker.inspect.topic_checker import check_topic
from tests.support.clock import ManualTime
from tests.support.servers import look_and_leave
from tests.support.story import HOUR_MS, Story, entries, part, receipts

IN_FLIGHT = 120  # one by one, of a partition in order
HOT = 1_500  # of one key, another's messages between them


async def _in_order(
    engine: Engine, topic: str, mode: str = "exclusive", **how: Any
) -> tuple[Story, list[Receipt]]:
    """A partition in order, whose messages were all leased one by one."""
    story = await Story.begin(engine, topic)
    await story.subscribe(mode=mode, **how)
    await story.publish_many(IN_FLIGHT)
    return story, [receipt for _ in range(IN_FLIGHT) for receipt in receipts(await story.fetch(permits=1))]


async def _hot_key(engine: Engine, topic: str, **how: Any) -> tuple[Story, list[Receipt]]:
    """A key with many messages in flight, with entries 1, 3, 5, … and a receipt for each."""
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared", **how)
    held: list[Receipt] = []
    for _ in range(0, HOT, 500):
        await story.publish(*["hot", "other"] * 500)
        held += receipts(await story.fetch(permits=1_000))
    return story, [receipt for receipt in held if receipt.lane == "=hot"]


async def _record(story: Story, lane: str = "=") -> str:
    return str(await story.engine.store.command("HGET", story.sub().lanes, lane))


def _calls(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each script is called from now on."""
    calls = Counter[str]()
    run = engine.store.run

    async def counted(script: str, *rest: Any) -> list[Any]:
        calls[script.removeprefix("subscription/")] += 1
        return await run(script, *rest)

    monkeypatch.setattr(engine.store, "run", counted)
    return calls


@pytest.mark.parametrize("mode", ["exclusive", "failover"])
async def test_a_record_stays_short_however_much_is_in_flight(engine: Engine, topic: str, mode: str) -> None:
    story, held = await _in_order(engine, topic, mode)
    assert len(await _record(story)) < 800
    assert await story.ack(*held[::2]) == ["settled"] * (IN_FLIGHT // 2)
    assert await story.log() == list(range(2, IN_FLIGHT + 1, 2))
    assert await story.ack(*held) == ["stale", "settled"] * (IN_FLIGHT // 2)
    sub = story.sub()
    assert not await story.exists(sub.lanes, sub.beyond, sub.leases("c"), sub.queue)
    assert await story.log() == []


@pytest.mark.slow
async def test_a_record_of_a_hot_key_stays_short(engine: Engine, topic: str) -> None:
    story, held = await _hot_key(engine, topic)
    assert len(held) == HOT
    assert len(await _record(story, "=hot")) < 800
    assert await check_topic(engine, topic) == []
    await story.ack(*held[:1_000])
    await story.ack(*held[1_000:])
    assert not await engine.store.command("HEXISTS", story.sub().lanes, "=hot")
    assert await engine.store.command("HEXISTS", story.sub().lanes, "=other")


async def test_a_record_stays_short_when_every_other_message_of_a_batch_is_settled(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="exclusive")
    await story.publish_many(300)
    [batch] = receipts(await story.fetch(permits=300))
    await story.ack(*(part(batch, entry) for entry in range(1, 301, 2)))
    assert len(await _record(story)) < 800
    await story.ack(part(batch, 300), part(batch, 2))
    even = list(range(4, 299, 2))
    assert await story.log() == even
    await story.nack(part(batch, 4))
    assert await story.take(permits=300) == even
    assert await story.retries() == {4: 1}


async def test_what_follows_goes_behind_what_is_beyond_the_record(engine: Engine, topic: str) -> None:
    story, held = await _in_order(engine, topic)
    listed = (await _record(story)).count(" ")  # before the first one it says how many are beyond
    await story.ack(*held[:listed])
    await story.publish_many(2)
    [newest] = await story.fetch()
    assert entries([newest]) == [IN_FLIGHT + 1, IN_FLIGHT + 2]
    await story.nack(held[listed])
    assert await story.take(permits=1_000) == list(range(listed + 1, IN_FLIGHT + 3))
    assert await story.retries() == {listed + 1: 1}


async def test_what_follows_of_a_hot_key_goes_behind_what_is_beyond_its_record(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish(*["hot", "other"] * 100)
    given = [one for one in receipts(await story.fetch(permits=1_000)) if one.lane == "=hot"]
    record = await _record(story, "=hot")
    assert "|+" in record
    listed = record.count(" ") - 1
    await story.ack(*given[:listed])  # of what is listed one is left
    assert len(await _record(story, "=hot")) < 100
    await story.publish("hot")
    [newest] = await story.fetch()
    await story.nack(given[listed])
    assert await story.take(permits=1_000) == [*(one.first for one in given[listed:]), entries([newest])[0]]


async def test_a_range_beyond_the_record_is_settled_in_parts(engine: Engine, topic: str) -> None:
    story, held = await _in_order(engine, topic)
    await story.publish_many(9)
    [range_] = receipts(await story.fetch())
    assert (range_.first, range_.last) == (IN_FLIGHT + 1, IN_FLIGHT + 9)
    first = range_.first
    assert await story.ack(part(range_, first + 4), part(range_, first + 2, first + 3)) == ["settled"] * 2
    assert await story.ack(part(range_, first + 3), part(range_, first + 4)) == ["stale"] * 2
    other = part(range_, first)._replace(token=range_.token - 1)
    assert await story.ack(other) == ["stale"]
    stale = (await engine.ack(story.lease, "s", [range_])).stale
    assert [(row.first, row.last) for row in stale] == [(first + 2, first + 4)]
    assert await story.ack(*held) == ["settled"] * IN_FLIGHT
    assert await story.log() == []


async def test_a_receipt_that_reaches_from_the_record_beyond_it_holds_both(
    engine: Engine, topic: str
) -> None:
    story, held = await _hot_key(engine, topic)
    both = held[0]._replace(last=held[499].first)  # one call has leased them all
    between = [(entry, entry) for entry in range(2, both.last, 2)]
    extended = await engine.extend(story.lease, "s", [both], lease_ms=HOUR_MS)
    assert [(row.first, row.last) for row in extended.stale] == between
    assert {one.deadline_ms for one in await engine.list_leases(story.lease, "s", "c")} >= {
        extended.deadline_ms
    }
    acked = await engine.ack(story.lease, "s", [both])
    assert [(row.first, row.last) for row in acked.stale] == between
    assert await story.ack(*held[499:501]) == ["stale", "settled"]


async def test_nack_amid_a_long_lane_takes_back_what_is_behind_it(engine: Engine, topic: str) -> None:
    story, held = await _in_order(engine, topic)
    await story.ack(held[0], held[70])
    result = await engine.nack(story.lease, "s", [held[90], held[80], held[100]], delay_ms=0)
    assert not result.stale
    assert sorted(entry for _, entry, _ in result.returned) == list(range(81, IN_FLIGHT + 1))
    assert await story.retries() == {81: 1}
    assert await story.ack(held[80]) == ["stale"]
    assert await story.take() == list(range(81, IN_FLIGHT + 1))
    assert [len(one.messages) for one in await engine.list_leases(story.lease, "s", "c")].count(1) == 78


@pytest.mark.slow
async def test_a_long_lane_goes_back_in_parts_the_newest_first(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story, held = await _hot_key(engine, topic, backoff=Backoff(initial=3_600, factor=1, maximum=3_600))
    calls = _calls(engine, monkeypatch)
    run, states = engine.store.run, []

    async def watched(script: str, *rest: Any) -> list[Any]:
        answer = await run(script, *rest)
        if script.endswith("nack"):  # the check runs a script, too
            states.append((await check_topic(engine, topic), await story.retries()))
        return answer

    monkeypatch.setattr(engine.store, "run", watched)
    result = await engine.nack(story.lease, "s", held[700:750])
    monkeypatch.setattr(engine.store, "run", run)
    assert calls["nack"] == len(states) >= 2
    assert states == [([], {})] * (len(states) - 1) + [([], {held[700].first: 1})]
    back = [first for _, first, _ in result.returned]
    assert sorted(back) == [receipt.first for receipt in held[700:]]
    assert back[0] > back[-1]
    assert not result.stale
    assert await story.take() == []  # the key is held for the backoff
    assert await story.ack(held[699], held[700]) == ["settled", "stale"]


async def test_a_timeout_of_a_long_lane_goes_back_in_parts_and_charges_its_head(
    timed: ManualTime, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = timed.engine
    story, held = await _in_order(engine, topic)
    monkeypatch.setattr("keylane_broker.engine.delivery._BACK", 20)
    calls = _calls(engine, monkeypatch)
    await story.ack(*held[:50])
    await timed.advance(30_000)
    result = await engine.expire(story.lease, "s")
    assert calls["expire"] >= 3
    assert sorted(first for _, _, first, _ in result.ended) == list(range(51, IN_FLIGHT + 1))
    assert await story.retries() == {51: 1}
    assert await story.take(permits=IN_FLIGHT) == list(range(51, IN_FLIGHT + 1))


@pytest.mark.parametrize("how", ["left", "crashed"])
async def test_a_leave_from_a_long_lane_that_was_cut_short_is_finished_by_the_next(
    timed: ManualTime, topic: str, how: str
) -> None:
    engine = timed.engine
    story, held = await _in_order(engine, topic, "failover", consumers=("c", "d"))
    await story.ack(*held[:60])
    step = [story.sub(), story.lease.text, "s", "c", how, 20]
    assert (await engine.store.run("subscription/leave", *step))[1] == 0  # type: ignore[arg-type]
    assert await story.take("d") == []  # the worker died in between
    assert await check_topic(engine, topic) == []
    assert await story.retries() == {}
    await engine.expire(story.lease, "s")
    assert await story.retries() == ({61: 1} if how == "crashed" else {})
    assert await story.take("d") == list(range(61, IN_FLIGHT + 1))


async def test_who_comes_back_is_told_all_of_a_long_lane_in_parts(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story, held = await _in_order(engine, topic)
    monkeypatch.setattr("keylane_broker.engine.consumers.STEP", 30)
    calls = _calls(engine, monkeypatch)
    told = receipts(await engine.list_leases(story.lease, "s", "c"))
    assert told == held
    assert calls["list_leases"] >= 3


async def test_others_forget_only_what_a_long_lane_has_settled(engine: Engine, topic: str) -> None:
    story, held = await _in_order(engine, topic)
    await story.subscribe("keys", mode="key_shared", start="earliest")
    await story.subscribe("other", start="earliest")
    await story.ack(*held[10::10])
    for name in ("keys", "other"):
        await story.ack(*receipts(await story.fetch(permits=1_000, name=name)), name=name)
    owed = [receipt.first for receipt in held if receipt not in held[10::10]]
    assert await story.log() == owed
    await story.ack(*(receipt for receipt in held if receipt.first in owed))
    assert await story.log() == []


async def test_a_hot_key_keeps_its_messages_from_being_forgotten(engine: Engine, topic: str) -> None:
    story, held = await _hot_key(engine, topic)
    await story.subscribe("other", start="earliest")
    while run := await story.fetch(permits=1_000, name="other"):
        await story.ack(*receipts(run), name="other")
    assert len(await story.log()) == 2 * HOT
    await story.ack(*held[:1_000])
    await story.ack(*held[1_000:])
    assert await story.log() == list(range(2, 2 * HOT + 1, 2))


async def test_a_message_deleted_from_beyond_a_record_is_settled(engine: Engine, topic: str) -> None:
    story, held = await _in_order(engine, topic)
    await engine.store.command("XDEL", story.keys.log, story.id(3), story.id(90), story.id(IN_FLIGHT))
    engine.forget(topic, 0)
    await engine.list_leases(story.lease, "s", "c")
    assert await story.ack(held[2], held[89], held[119]) == ["stale"] * 3
    assert await story.ack(*held[:2], *held[3:89], *held[90:119]) == ["settled"] * 117
    assert await story.log() == []


async def test_a_message_deleted_elsewhere_leaves_a_lane_as_it_is_counted(engine: Engine, topic: str) -> None:
    """A record that is as long as it may be is made shorter by whoever takes it apart, and must say so."""
    story = await Story.begin(engine, topic)
    await story.subscribe(mode="key_shared")
    await story.publish(*["hot", "other"] * 45)
    held = receipts(await story.fetch(permits=90))
    gone = next(receipt for receipt in held if receipt.lane == "=other")
    await engine.store.command("XDEL", story.keys.log, story.id(gone.first))
    engine.forget(topic, 0)
    await engine.list_leases(story.lease, "s", "c")
    assert await check_topic(engine, topic) == []
    assert await story.ack(*[one for one in held if one is not gone]) == ["settled"] * 89
    assert await check_topic(engine, topic) == []


async def test_seek_ends_what_is_beyond_a_record(engine: Engine, topic: str) -> None:
    story, held = await _in_order(engine, topic)
    await engine.seek(topic, "s", "earliest")
    assert not await story.exists(story.sub().lanes, story.sub().beyond)
    assert await story.ack(held[0], held[-1]) == ["stale"] * 2
    assert await story.take(permits=3) == [1, 2, 3]


async def test_an_operator_sees_what_is_beyond_a_record(server_url: str, topic: str) -> None:
    engine = Engine.connect(server_url)
    story, held = await _in_order(engine, topic)
    await story.publish_many(2)
    await story.ack(held[0], held[100])
    counts = await count_subscription(engine.store, topic, "s", 1, 0)
    assert (counts.leased, counts.waiting, counts.fresh) == (IN_FLIGHT - 2, 0, 2)
    found = await peek(engine.store, topic, "s", [0], 1_000)
    states = {int(one.message.id.partition("-")[2]): (one.state, one.consumer) for one in found}
    leased = {receipt.first: ("leased", "c") for receipt in held if receipt not in (held[0], held[100])}
    assert states == leased | {IN_FLIGHT + 1: ("fresh", ""), IN_FLIGHT + 2: ("fresh", "")}
    await look_and_leave(engine, topic)
