"""A replica takes over from a master that lives, and lacks its newest writes: no id is given twice."""

import asyncio
from pathlib import Path

import pytest

from keylane import AsyncClient
from keylane_broker.engine.engine import Engine
from keylane_broker.supervise.embedded_server import ask
from loadtest.topology import three_node_cluster
from tests.support.ownership import epochs, once_reached, places_at, settled
from tests.support.running import RunningBroker
from tests.support.waiting import until

pytestmark = pytest.mark.slow

PARTITIONS = 12


def cut_off(port: int) -> None:
    """Let a replica get nothing more."""
    ask(port, "CONFIG", "SET", "masteruser", "nobody")
    ask(port, "CONFIG", "SET", "masterauth", "wrong")
    ask(port, "CLIENT", "KILL", "TYPE", "master")


@pytest.mark.parametrize("first_alone", [True, False])
async def test_all_partitions_of_the_shard_are_taken_anew(
    server_binary: Path, topic: str, first_alone: bool
) -> None:
    with (
        three_node_cluster(binary=server_binary, replicas=True) as cluster,
        RunningBroker(cluster.broker_url, workers=2) as broker,
    ):
        engine = Engine.connect(cluster.broker_url)
        async with AsyncClient(broker.url, timeout=30) as client:
            await client.create_topic(topic, partitions=PARTITIONS)
            await client.create_subscription(topic, "s", mode="shared")
            ids: list[str] = []

            async def publish(partition: int) -> None:
                published = await client.publish(topic, partition=partition)
                assert published.id
                ids.append(published.id)

            everywhere = range(PARTITIONS)
            await asyncio.gather(*map(publish, everywhere))
            await settled(engine, *broker.ids)
            here = [number for _, number in places_at(cluster.nodes[1].port, topic, PARTITIONS)]
            assert len(here) > 1
            before = await epochs(engine)
            await asyncio.sleep(0.5)
            cut_off(cluster.replicas[1].port)
            for _ in range(5):
                await asyncio.gather(*map(publish, everywhere))
            cluster.fail_over(1)
            await until(lambda: "role:slave" in ask(cluster.nodes[1].port, "INFO", "replication"))
            if first_alone:
                await publish(here[0])
            for _ in range(8):
                await asyncio.gather(*map(publish, everywhere))
            after = await once_reached(lambda: epochs(engine))
            assert len(set(ids)) == len(ids), "no id is given twice"
            assert all(after[topic, number] > before[topic, number] for number in here)
        await engine.close()
