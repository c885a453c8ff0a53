"""Load is measured, can be seen, and moves partitions, though not for long."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from keylane import wire
from keylane_broker.engine.engine import Engine
from tests.support.ownership import epochs, owners, settled
from tests.support.peer import Elsewhere, Peer, Refused, connect
from tests.support.running import RunningBroker
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # real processes, and leases that run out


@asynccontextmanager
async def pouring(
    engine: Engine, peers: dict[str, Peer], topic: str, *partitions: int
) -> AsyncIterator[None]:
    """Publish without end, wherever the partitions are: a few new messages, and many that are there already.

    Those cost time in Redis, and no memory.
    """
    known = [text for place in range(900) for text in ("k", f"again-{place}", wire.pack_about(1))]

    async def pour(partition: int) -> None:
        again, number = False, 0
        while True:
            owner = (await owners(engine)).get((topic, partition), "")
            number += 1
            try:
                request = wire.Publish(topic, partition, again=again)
                body = wire.pack([*known, "k", f"{partition}-{number}", wire.pack_about(1)])
                await peers[owner].answer(request, body)
                again = False
            except (Elsewhere, Refused, KeyError):
                again = True
            await asyncio.sleep(0.01)  # busy enough to be told from idle, and leaves the machine to others

    tasks = [asyncio.create_task(pour(partition)) for partition in partitions]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(end) for end in ended} == {asyncio.CancelledError}, ended


@asynccontextmanager
async def cluster_of_two(
    topic: str, partitions: int
) -> AsyncIterator[tuple[RunningBroker, Engine, dict[str, Peer]]]:
    """Two workers that look at loads often, and a topic with a subscription."""
    with RunningBroker(workers=2, rebalance_interval=0.2) as broker:
        engine = Engine.connect(broker.redis_url)
        async with connect(broker.urls[0]) as one, connect(broker.urls[1]) as two:
            await one.answer(wire.CreateTopic(topic, partitions))
            await one.answer(wire.CreateSubscription(topic, "s"))
            await settled(engine, *broker.ids)
            yield broker, engine, {broker.ids[0]: one, broker.ids[1]: two}
        await engine.close()


async def test_load_is_measured_and_can_be_seen(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str
) -> None:
    peer = peers[three.ids[0]]
    await peer.answer(wire.CreateTopic(topic, 3))
    await peer.answer(wire.CreateSubscription(topic, "s"))
    await settled(engine, *three.ids)
    owner = (await owners(engine))[topic, 1]
    async with pouring(engine, peers, topic, 1):

        async def shown() -> bool:
            frame = await peer.answer(wire.Cluster(topic))
            said = {w.id: w for w in wire.properties_of(frame, wire.ClusterReply).workers}
            reports = wire.unpack(frame.body, list[wire.PartitionReport])
            assert reports[0].messages == reports[2].messages == 0.0
            return bool(
                said[owner].messages > 10
                and said[owner].script_ms > 0.1
                and reports[1].messages > 10
                and reports[1].script_ms > 0.1
            )

        await until(shown)
        stored = await engine.store.fields(f"kl:worker:{owner}")
        load = json.loads(stored["load"])
        assert load[f"{topic}:1"][0] > 10
        assert float(stored["messages"]) > 10
        assert float(stored["script_ms"]) > 0.1
        assert await engine.store.command("PTTL", f"kl:worker:{owner}") > 0
    await peer.answer(wire.DeleteTopic(topic))


@pytest.mark.slow
async def test_of_two_hot_partitions_on_one_worker_one_moves_and_then_all_stay(topic: str) -> None:
    async with cluster_of_two(topic, 4) as (broker, engine, peers):
        placed = await owners(engine)
        hot = [number for number in range(4) if placed[topic, number] == broker.ids[0]]
        async with pouring(engine, peers, topic, *hot):

            async def apart() -> bool:
                now = await owners(engine)
                return now[topic, hot[0]] != now[topic, hot[1]]

            await until(apart)
            await settled(engine, *broker.ids)
            before, version = await epochs(engine), (await engine.owners()).version
            await asyncio.sleep(4)  # twenty looks at the load, in which nothing has a reason to move
            assert (await engine.owners()).version <= version + 1, "they were tossed to and fro"
            after = await epochs(engine)
            assert sum(after[place] != before[place] for place in before) <= 2
        await settled(engine, *broker.ids)


@pytest.mark.slow
async def test_one_hot_partition_alone_is_not_tossed_to_and_fro(topic: str) -> None:
    async with cluster_of_two(topic, 2) as (broker, engine, peers):
        version = (await engine.owners()).version
        async with pouring(engine, peers, topic, 0):

            async def measured() -> bool:
                reports = await engine.workers()
                return max(report.script_ms for report in reports) > 20

            await until(measured)
            await asyncio.sleep(5)  # twenty-five looks
        assert (await engine.owners()).version <= version + 1
        await settled(engine, *broker.ids)


@pytest.mark.slow
async def test_an_operator_need_not_wait_for_the_next_looks(topic: str) -> None:
    with RunningBroker(workers=2, rebalance_interval=600.0) as broker:
        engine = Engine.connect(broker.redis_url)
        async with connect(broker.urls[0]) as one, connect(broker.urls[1]) as two:
            await one.answer(wire.CreateTopic(topic, 4))
            await one.answer(wire.CreateSubscription(topic, "s"))
            await settled(engine, *broker.ids)
            placed = await owners(engine)
            hot = [number for number in range(4) if placed[topic, number] == broker.ids[1]]
            peers = {broker.ids[0]: one, broker.ids[1]: two}
            async with pouring(engine, peers, topic, *hot):

                async def advised() -> list[wire.Move]:
                    found = await one.ask_body(wire.Rebalance(dry_run=True), list[wire.Move])
                    return list(found)

                planned = await until(advised)
                assert await owners(engine) == placed, "a dry run moves nothing"
                assert {step.source for step in planned} <= set(broker.ids)
                assert any(step.partition in hot for step in planned)

                async def apart() -> bool:
                    await two.answer(wire.Rebalance())
                    now = await owners(engine)
                    return now[topic, hot[0]] != now[topic, hot[1]]

                await until(apart)
            await settled(engine, *broker.ids)
        await engine.close()
