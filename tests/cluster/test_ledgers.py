"""Each take-over opens a ledger; the old ones drain, key by key, while the new one fills."""

import pytest

from keylane import wire
from keylane_broker.engine.engine import Engine
from tests.support.ownership import move, owners, served, settled
from tests.support.peer import Peer, Stream, publish
from tests.support.running import RunningBroker

pytestmark = pytest.mark.slow  # real processes, and leases that run out


async def ledgers(peer: Peer, topic: str, partition: int) -> list[tuple[int, int]]:
    """Each ledger of a partition, and how many entries remain of it."""
    reports = await peer.ask_body(wire.Cluster(topic), list[wire.PartitionReport])
    return [(ledger.ledger, ledger.remaining) for ledger in reports[partition].ledgers]


async def move_on(three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str) -> Peer:
    """Have another worker take partition 0; answers the connection to it."""
    now = (await owners(engine))[topic, 0]
    target = three.ids[(three.ids.index(now) + 1) % 3]
    await move(peers[now], topic, 0, target)
    await served(engine, topic, 0, target)
    return peers[target]


async def prepare(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str, mode: str
) -> Peer:
    """A topic of one partition with a subscription; answers the connection to its owner."""
    first = next(iter(peers.values()))
    await first.answer(wire.CreateTopic(topic, 1))
    await first.answer(wire.CreateSubscription(topic, "s", mode, start="earliest"))
    await settled(engine, *three.ids)
    return peers[(await owners(engine))[topic, 0]]


async def test_each_take_over_opens_a_ledger_and_what_remains_of_each_is_listed(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str
) -> None:
    owner = await prepare(three, engine, peers, topic, "shared")
    answers = [await publish(owner, topic, 0, "u1", "u2")]
    for count in (1, 3):
        owner = await move_on(three, engine, peers, topic)
        answers.append(await publish(owner, topic, 0, *(f"u{count}-{place}" for place in range(count))))
    numbers = [answer.ledger for answer in answers]
    assert numbers == sorted(set(numbers))
    assert [answer.first for answer in answers] == [1, 3, 4], "entries go on counting"
    for peer in peers.values():
        assert await ledgers(peer, topic, 0) == list(zip(numbers, (2, 1, 3), strict=True))
        reports = await peer.ask_body(wire.Cluster(topic), list[wire.PartitionReport])
        assert [(report.holder, report.worker, report.epoch) for report in reports] == [
            ((await owners(engine))[topic, 0],) * 2 + (numbers[-1],)
        ]
        assert 0 < reports[0].lease_ms <= 5_000
    await owner.answer(wire.DeleteTopic(topic))


async def test_old_ledgers_drain_while_the_new_one_fills(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str
) -> None:
    owner = await prepare(three, engine, peers, topic, "shared")
    one = (await publish(owner, topic, 0, "u1", "u2", "u3", "u4")).ledger
    owner = await move_on(three, engine, peers, topic)
    two = (await publish(owner, topic, 0, "u5", "u6")).ledger  # it accepts at once
    stream = Stream(owner, topic, "s", "c")
    await stream.open(0)
    items = await stream.receive(6)
    await stream.ack(items[0], items[1])
    assert await ledgers(owner, topic, 0) == [(one, 2), (two, 2)]
    await stream.ack(items[4])
    await stream.ack(items[2])
    assert await ledgers(owner, topic, 0) == [(one, 1), (two, 1)]
    await stream.ack(items[3])
    assert [entry for entry in await ledgers(owner, topic, 0) if entry[1]] == [(two, 1)]
    await stream.ack(items[5])
    owner = await move_on(three, engine, peers, topic)
    assert [left for _, left in await ledgers(owner, topic, 0)] == [0], "empty ones are forgotten"
    assert (await publish(owner, topic, 0, "u7")).first == 7
    await owner.answer(wire.DeleteTopic(topic))


async def test_lanes_stay_in_order_across_ledgers_key_by_key_and_not_the_partition_as_a_whole(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str
) -> None:
    owner = await prepare(three, engine, peers, topic, "key_shared")
    first = Stream(owner, topic, "s", "c1")
    await first.open(0, mode="key_shared")
    await publish(owner, topic, 0, "a1", "a2", key="a")
    held = await first.receive(2)
    owner = await move_on(three, engine, peers, topic)
    await publish(owner, topic, 0, "a3", key="a")
    await publish(owner, topic, 0, "b1", key="b")
    owner = await move_on(three, engine, peers, topic)
    await publish(owner, topic, 0, "a4", key="a")
    await publish(owner, topic, 0, "b2", key="b")
    # c1 has not come back: its lane waits, the other does not wait for the old ledger to drain.
    second = Stream(owner, topic, "s", "c2")
    await second.open(0, mode="key_shared")
    got = await second.receive(2)
    assert [item.uid for item in got] == ["b1", "b2"]
    assert (await second.ack(*got)).stale == []
    assert await second.waiting() == []
    assert [left for _, left in await ledgers(owner, topic, 0)] == [2, 1, 1]
    # A nack in the oldest ledger rewinds the lane through all of them.
    there = Stream(owner, topic, "s", "c1")
    await there.open(0, mode="key_shared")
    assert [item.uid for item in await there.receive(4)] == ["a1", "a2", "a3", "a4"]
    assert (await there.nack(held[0])).stale == []

    lane: list[tuple[str, int]] = []
    while len(lane) < 4:
        for stream in (there, second):
            if items := await stream.waiting():
                await stream.ack(*await stream.receive(len(items)))
                lane += [(item.uid, item.retries) for item in items]
    assert lane == [("a1", 1), ("a2", 0), ("a3", 0), ("a4", 0)]
    assert sum(remaining for _, remaining in await ledgers(owner, topic, 0)) == 0
    await owner.answer(wire.DeleteTopic(topic))
