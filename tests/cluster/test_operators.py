"""What operators see of a cluster, and what they can tell it."""

from collections import Counter
from collections.abc import Iterator

import pytest

from keylane import wire
from keylane_broker.engine.engine import Engine
from tests.support.ownership import epochs, holders, move, owners, served, settled
from tests.support.peer import Peer, Refused
from tests.support.running import RunningBroker
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # real processes, and leases that run out


@pytest.fixture(scope="module")
def three() -> Iterator[RunningBroker]:
    """Three workers whose load is not looked at while the tests run."""
    with RunningBroker(workers=3, rebalance_interval=600.0) as broker:
        yield broker


@pytest.fixture
async def peer(three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str) -> Peer:
    """A connection to any worker; there is a topic of twelve partitions, placed evenly."""
    peer = peers[three.ids[1]]
    for name in await peer.ask_body(wire.Topics(), list[str]):
        await peer.answer(wire.DeleteTopic(name))
    await peer.answer(wire.CreateTopic(topic, 12))
    await settled(engine, *three.ids)
    return peer


async def workers(peer: Peer) -> dict[str, wire.WorkerReport]:
    """The workers as CLUSTER shows them."""
    return {report.id: report for report in (await peer.ask(wire.Cluster(), wire.ClusterReply)).workers}


async def test_the_cluster_is_shown_alike_by_every_worker(
    three: RunningBroker, engine: Engine, peer: Peer, peers: dict[str, Peer], topic: str
) -> None:
    placed, taken = await owners(engine), await epochs(engine)
    for asked in peers.values():
        frame = await asked.answer(wire.Cluster(topic))
        said = wire.properties_of(frame, wire.ClusterReply)
        assert said.controller in three.ids
        assert said.version == (await engine.owners()).version
        assert {worker.id: worker.state for worker in said.workers} == dict.fromkeys(three.ids, "serving")
        assert [worker.partitions for worker in said.workers] == [4, 4, 4]
        addresses = [f"keylane://{worker.address}" for worker in said.workers]
        assert addresses == three.urls
        assert all(0 < worker.started_ms < worker.heartbeat_ms + 1_000 for worker in said.workers)
        reports = wire.unpack(frame.body, list[wire.PartitionReport])
        assert [report.partition for report in reports] == list(range(12))
        assert [report.worker for report in reports] == [placed[topic, number] for number in range(12)]
        assert [report.holder for report in reports] == [report.worker for report in reports]
        assert [report.epoch for report in reports] == [taken[topic, number] for number in range(12)]
    with pytest.raises(Refused, match="topic_not_found"):
        await peer.answer(wire.Cluster("nowhere"))


async def test_a_partition_moved_by_hand_stays_there_and_another_comes_back(
    three: RunningBroker, engine: Engine, peer: Peer, topic: str
) -> None:
    before, version = await owners(engine), (await engine.owners()).version
    target = next(name for name in three.ids if name != before[topic, 0])
    await move(peer, topic, 0, target)
    assert await settled(engine, *three.ids) == Counter(dict.fromkeys(three.ids, 4))
    after = await owners(engine)
    assert after[topic, 0] == target
    moved = {place for place in after if after[place] != before[place]}
    assert len(moved) == 2, "the one, and one in exchange"
    assert {before[place] for place in moved} == {target, before[topic, 0]}
    assert (await engine.owners()).version == version + 1
    await move(peer, topic, 0, target)  # it is there
    assert (await engine.owners()).version == version + 1
    assert await peer.ask_body(wire.Rebalance(), list[wire.Move]) == [], "nobody moves it back"
    assert await owners(engine) == after


async def test_a_move_that_cannot_be_says_why(
    three: RunningBroker, engine: Engine, peer: Peer, topic: str
) -> None:
    version = (await engine.owners()).version
    with pytest.raises(Refused, match=r"invalid_argument.*'nobody'.*worker-0, worker-1, worker-2"):
        await move(peer, topic, 0, "nobody")
    with pytest.raises(Refused, match="topic_not_found"):
        await move(peer, "nowhere", 0, three.ids[0])
    for number in (12, -1):
        with pytest.raises(Refused, match=r"invalid_argument.*partition.*11"):
            await move(peer, topic, number, three.ids[0])
    assert (await engine.owners()).version == version


async def test_a_worker_is_drained_and_takes_part_again(
    three: RunningBroker, engine: Engine, peer: Peer, peers: dict[str, Peer], topic: str
) -> None:
    for drained in three.ids:  # also the controller, and the one that is asked
        left = [name for name in three.ids if name != drained]
        before = await owners(engine)
        await peer.answer(wire.Drain(drained))
        assert await settled(engine, *left) == Counter(dict.fromkeys(left, 6))
        after = await owners(engine)
        assert all(after[place] == name for place, name in before.items() if name != drained), "no more moves"
        assert (await workers(peer))[drained].state == "draining"
        assert (await workers(peer))[drained].partitions == 0
        with pytest.raises(Refused, match=f"invalid_argument.*{drained}"):
            await move(peer, topic, 0, drained)
        await peers[drained].answer(wire.CreateTopic(f"{topic}-{drained}", 2))
        await settled(engine, *left)
        await peers[drained].answer(wire.DeleteTopic(f"{topic}-{drained}"))
        await peer.answer(wire.Drain(drained, draining=False))
        assert await settled(engine, *three.ids) == Counter(dict.fromkeys(three.ids, 4))
        assert (await workers(peer))[drained].state == "serving"


async def test_draining_lasts_over_heartbeats(
    three: RunningBroker, engine: Engine, peer: Peer, topic: str
) -> None:
    drained = three.ids[2]
    await peer.answer(wire.Drain(drained))
    await settled(engine, *three.ids[:2])
    heard = (await workers(peer))[drained].heartbeat_ms

    async def beaten_twice() -> bool:
        nonlocal heard
        report = (await workers(peer))[drained]
        assert (report.state, report.partitions) == ("draining", 0)
        return report.heartbeat_ms > heard + 3_000

    await until(beaten_twice)
    await peer.answer(wire.Drain(drained, draining=False))
    await settled(engine, *three.ids)


async def test_the_last_worker_cannot_be_drained(
    three: RunningBroker, engine: Engine, peer: Peer, topic: str
) -> None:
    await peer.answer(wire.Drain(three.ids[0]))
    await peer.answer(wire.Drain(three.ids[1]))
    await settled(engine, three.ids[2])
    with pytest.raises(Refused, match=f"invalid_argument.*{three.ids[2]}"):
        await peer.answer(wire.Drain(three.ids[2]))
    assert (await workers(peer))[three.ids[2]].state == "serving"
    await peer.answer(wire.Drain(three.ids[0], draining=False))
    await peer.answer(wire.Drain(three.ids[1], draining=False))
    await settled(engine, *three.ids)


async def test_draining_a_worker_that_is_not_there_names_those_that_are(peer: Peer) -> None:
    for draining in (True, False):
        with pytest.raises(Refused, match=r"invalid_argument.*'worker-9'.*worker-0, worker-1, worker-2"):
            await peer.answer(wire.Drain("worker-9", draining))


async def test_rebalancing_tells_what_it_would_do_and_does_what_it_told(
    three: RunningBroker, engine: Engine, peer: Peer, topic: str
) -> None:
    assert await peer.ask_body(wire.Rebalance(dry_run=True), list[wire.Move]) == []
    # As if somebody had written all on one worker: counts are not even.
    version = (await engine.owners()).version
    assert await engine.assign(version, {topic: [three.ids[0]] * 12})
    planned = await peer.ask_body(wire.Rebalance(dry_run=True), list[wire.Move])
    if planned:  # the controller may have looked, too
        assert len(planned) == 8
        assert {(step.topic, step.source) for step in planned} == {(topic, three.ids[0])}
        assert Counter(step.target for step in planned) == {three.ids[1]: 4, three.ids[2]: 4}
        assert all(step.reason for step in planned)
        done = await peer.ask_body(wire.Rebalance(), list[wire.Move])
        assert done in (planned, [])
    assert await settled(engine, *three.ids) == Counter(dict.fromkeys(three.ids, 4))


async def test_many_orders_at_once_are_all_carried_out(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], peer: Peer, topic: str
) -> None:
    before = await epochs(engine)
    target = {number: three.ids[number % 3] for number in range(6)}
    answers = [
        list(peers.values())[number % 3].begin(wire.MovePartition(topic, number, name))
        for number, name in target.items()
    ]
    for answer in answers:
        assert (await answer).type == wire.Type.OK
    assert await settled(engine, *three.ids) == Counter(dict.fromkeys(three.ids, 4))
    assert all(epoch <= before[place] + 6 for place, epoch in (await epochs(engine)).items())
    held = await holders(engine)
    await served(engine, topic, 5, held[topic, 5])
