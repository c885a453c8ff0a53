"""Every partition has one owner, the owners have even shares, and no more moves than must."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from keylane import wire
from keylane_broker.engine.engine import Engine
from tests.support.ownership import epochs, holders, owners, served, settled
from tests.support.peer import PATIENCE, Elsewhere, Peer, Refused, connect, publish
from tests.support.running import RunningBroker
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # real processes, and leases that run out


@asynccontextmanager
async def watched(broker: RunningBroker) -> AsyncIterator[Engine]:
    """An engine on a broker's Redis."""
    engine = Engine.connect(broker.redis_url)
    try:
        yield engine
    finally:
        await engine.close()


async def create(peer: Peer, topic: str, partitions: int) -> None:
    """Make a topic with a subscription, so that what is published is kept."""
    await peer.answer(wire.CreateTopic(topic, partitions))
    await peer.answer(wire.CreateSubscription(topic, "s"))


async def publish_anywhere(peers: dict[str, Peer], topic: str, partition: int, uid: str) -> str:
    """Publish as a client that follows redirects and tries again, for a while; answers who took it."""
    end, again = time.monotonic() + PATIENCE, False
    asked, addresses = next(iter(peers)), {}
    for worker, peer in peers.items():
        info = await peer.ask(wire.Info(), wire.InfoReply)
        addresses.update({known.address: known.id for known in info.workers})
        assert info.worker == worker
    while time.monotonic() < end:
        try:
            await publish(peers[asked], topic, partition, uid, again=again)
            return asked
        except Elsewhere as elsewhere:
            asked = addresses.get(elsewhere.said.address, asked)
        except Refused as refused:
            if refused.code not in ("unavailable", "fenced"):
                raise
        again = True
    raise AssertionError(f"nobody took {uid}")


async def test_every_partition_is_owned_and_the_counts_are_even(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], make_topic_name: Callable[[], str]
) -> None:
    for peer, partitions in zip(peers.values(), (1, 7, 16), strict=True):
        await create(peer, make_topic_name(), partitions)
        await settled(engine, *three.ids)


async def test_a_topic_can_be_used_as_soon_as_it_is_made(
    peers: dict[str, Peer], engine: Engine, make_topic_name: Callable[[], str]
) -> None:
    for peer in peers.values():
        topic = make_topic_name()
        await create(peer, topic, 6)
        for partition in range(6):
            taker = await publish_anywhere({**peers}, topic, partition, f"uid-{partition}")
            assert taker == (await owners(engine))[topic, partition]


async def test_a_topic_made_again_with_another_number_of_partitions_is_owned_anew(
    three: RunningBroker, peers: dict[str, Peer], engine: Engine, topic: str
) -> None:
    for partitions in (8, 3, 12, 1):
        for peer in peers.values():
            await create(peer, topic, partitions)
            for partition in range(partitions):
                await publish_anywhere(peers, topic, partition, f"uid-{partition}")
            await settled(engine, *three.ids)
            assert len([place for place in await owners(engine) if place[0] == topic]) == partitions
            await peer.answer(wire.DeleteTopic(topic))
    await until(lambda: gone(engine, topic))


async def gone(engine: Engine, topic: str) -> bool:
    """Whether nothing is left of a topic."""
    return topic not in (await engine.owners()).topics and not await engine.store.keys_like(f"kl:*{topic}*")


async def test_many_topics_are_spread_too(
    three: RunningBroker, peers: dict[str, Peer], engine: Engine, make_topic_name: Callable[[], str]
) -> None:
    names = [make_topic_name() for _ in range(60)]
    for place, name in enumerate(names):
        await list(peers.values())[place % 3].answer(wire.CreateTopic(name, 1 + place % 3))
    await settled(engine, *three.ids)
    for place, name in enumerate(names):
        await list(peers.values())[place % 3].answer(wire.DeleteTopic(name))
    await until(lambda: all_gone(engine, names))


async def all_gone(engine: Engine, names: list[str]) -> bool:
    """Whether none of these topics has owners any more."""
    return not set(names) & (await engine.owners()).topics.keys()


async def test_a_worker_that_joins_gets_its_share_and_nothing_else_moves(topic: str) -> None:
    with RunningBroker(workers=2) as broker:
        async with watched(broker) as engine, connect(broker.urls[0]) as peer:
            await create(peer, topic, 24)
            assert await settled(engine, *broker.ids) == Counter(dict.fromkeys(broker.ids, 12))
            for workers in (3, 4):
                before, taken = await owners(engine), await epochs(engine)
                broker.add_worker()
                counts = await settled(engine, *broker.ids)
                after, retaken = await owners(engine), await epochs(engine)
                moved = {place for place in after if after[place] != before[place]}
                assert counts[broker.ids[-1]] == 24 // workers == len(moved)
                assert {after[place] for place in moved} == {broker.ids[-1]}
                assert {place for place in taken if retaken[place] != taken[place]} == moved
                assert all(retaken[place] > taken[place] for place in moved)


async def test_a_worker_that_stops_hands_over_what_it_has_and_nothing_else_moves(topic: str) -> None:
    with RunningBroker(workers=4) as broker:
        async with watched(broker) as engine, connect(broker.urls[0]) as peer:
            await create(peer, topic, 24)
            await settled(engine, *broker.ids)
            before, taken = await owners(engine), await epochs(engine)
            assert broker.stop_worker(3) == 0
            at_the_end = await holders(engine)
            assert broker.ids[3] not in at_the_end.values(), "it gave its leases up"
            await settled(engine, *broker.ids[:3])
            after, retaken = await owners(engine), await epochs(engine)
            for place, owner in before.items():
                if owner == broker.ids[3]:
                    assert retaken[place] > taken[place]
                else:
                    assert (after[place], retaken[place]) == (owner, taken[place])
            assert [report.id for report in await engine.workers()] == broker.ids[:3]
            broker.start_worker(3)
            await settled(engine, *broker.ids)


async def test_the_partitions_of_a_killed_worker_are_taken_over(topic: str) -> None:
    with RunningBroker(workers=3, partition_lease=4.0) as broker:
        async with watched(broker) as engine, connect(broker.urls[0]) as peer:
            await create(peer, topic, 12)
            await settled(engine, *broker.ids)
            before = await owners(engine)
            broker.kill_worker(2)
            await settled(engine, *broker.ids[:2])
            assert {place for place, owner in (await owners(engine)).items() if owner != before[place]} == {
                place for place, owner in before.items() if owner == broker.ids[2]
            }


async def test_the_controller_can_die_too(topic: str) -> None:
    with RunningBroker(workers=3, partition_lease=4.0) as broker:
        async with watched(broker) as engine, connect(broker.urls[0]) as peer:
            await create(peer, topic, 9)
            await settled(engine, *broker.ids)
            leader = (await peer.ask(wire.Cluster(), wire.ClusterReply)).controller
            broker.kill_worker(broker.ids.index(leader))
            left = [name for name in broker.ids if name != leader]
            await settled(engine, *left)
            async with connect(broker.urls[broker.ids.index(left[0])]) as other:
                found = await other.ask(wire.Cluster(), wire.ClusterReply)
                assert found.controller in left
                assert {worker.id: worker.state for worker in found.workers}[leader] == "lost"
                await other.answer(wire.CreateTopic(f"{topic}-2", 4))
            await settled(engine, *left)


async def test_a_worker_that_dies_twice_in_a_row_keeps_its_name_and_its_share(topic: str) -> None:
    with RunningBroker(workers=2, partition_lease=4.0) as broker:
        async with watched(broker) as engine, connect(broker.urls[0]) as peer:
            await create(peer, topic, 6)
            await settled(engine, *broker.ids)
            for _ in range(2):
                broker.kill_worker(1)
                broker.start_worker(1)
                await settled(engine, *broker.ids)
            for partition in range(6):
                async with connect(broker.urls[1]) as second:
                    peers = {broker.ids[0]: peer, broker.ids[1]: second}
                    await publish_anywhere(peers, topic, partition, f"uid-{partition}")


@pytest.mark.slow
async def test_all_stop_at_once_and_come_back(topic: str) -> None:
    with RunningBroker(workers=3) as broker:
        async with watched(broker) as engine:
            async with connect(broker.urls[0]) as peer:
                await create(peer, topic, 9)
            await settled(engine, *broker.ids)
            for worker in (0, 1, 2):
                broker.stop_worker(worker)
            assert set((await holders(engine)).values()) == {""}
            for worker in (2, 1, 0):
                broker.start_worker(worker)
            await settled(engine, *broker.ids)
            await served(engine, topic, 0, (await owners(engine))[topic, 0])
