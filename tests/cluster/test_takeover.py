"""A replica that lacks the newest writes takes over while its master lives: no id is given twice."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from keylane import AsyncClient
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.supervise.embedded_server import Server, ask
from loadtest.topology import sentinel_pair, three_node_cluster
from tests.support.ownership import epochs, once_reached, places_at, settled
from tests.support.running import RunningBroker
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow  # real processes, and leases that run out

PARTITIONS = 18


class Flow:
    """Producers of all partitions, and a consumer; each id must stand for one message, to all of them."""

    def __init__(self, client: AsyncClient, topic: str) -> None:
        self.uids: dict[str, str] = {}  # id -> uid of the message that it stands for
        self.confirmed: list[int] = [0] * PARTITIONS
        self.delivered: list[int] = [0] * PARTITIONS
        self._client, self._topic = client, topic

    def _note(self, id: str, uid: str, who: str) -> None:
        assert self.uids.setdefault(id, uid) == uid, f"{id} stands for two messages, says the {who}"

    async def produce(self, partition: int) -> None:
        """Publish to one partition, one after the other."""
        while True:
            published = await self._client.publish(self._topic, partition=partition)
            assert published.id is not None
            self._note(published.id, published.uid, "producer")
            self.confirmed[partition] += 1
            await asyncio.sleep(0.005)  # no more than the machine can do besides

    async def consume(self) -> None:
        """Take everything."""
        async with self._client.subscribe(self._topic, "s") as consumer:
            async for message in consumer:
                self._note(message.id, message.uid, "consumer")
                self.delivered[message.partition] += 1
                async with message:
                    pass

    async def more(self, count: int = 5) -> None:
        """Wait until each partition has taken and handed out so many more."""
        for counts in (self.confirmed, self.delivered):
            wanted = [number + count for number in counts]
            await until(lambda: all(a >= b for a, b in zip(counts, wanted, strict=True)))  # noqa: B023


@asynccontextmanager
async def flowing(broker: RunningBroker, topic: str) -> AsyncIterator[Flow]:
    """A topic of which every partition is written and read throughout; whoever finds a fault ends it."""
    async with AsyncClient(broker.url, timeout=PATIENCE) as client:
        await client.create_topic(topic, partitions=PARTITIONS)
        await client.create_subscription(topic, "s")
        flow = Flow(client, topic)
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(flow.consume())]
            work += [tasks.create_task(flow.produce(partition)) for partition in range(PARTITIONS)]
            await flow.more()
            yield flow
            await flow.more(20)
            for task in work:
                task.cancel()


def cut_off(replica: Server) -> None:
    """Let a replica hear nothing more of its master: it has a password that the master does not take."""
    ask(replica.port, "CONFIG", "SET", "masterauth", "wrong")
    ask(replica.port, "CLIENT", "KILL", "TYPE", "master")


def is_master(server: Server) -> bool:
    """Whether a server says that it is a master."""
    return "role:master" in ask(server.port, "INFO", "replication")


async def test_of_a_cluster_every_partition_that_moved_is_taken_anew(server_binary: Path, topic: str) -> None:
    with (
        three_node_cluster(binary=server_binary, replicas=True) as cluster,
        RunningBroker(cluster.broker_url, workers=2) as broker,
    ):
        engine = Engine.connect(cluster.broker_url)
        async with flowing(broker, topic) as flow:
            await settled(engine, *broker.ids)
            before = await epochs(engine)
            cut_off(cluster.replicas[1])
            await flow.more(20)
            cluster.fail_over(1)
            await until(lambda: is_master(cluster.replicas[1]))
            await until(lambda: not is_master(cluster.nodes[1]))
            await flow.more(20)
            after = await once_reached(lambda: epochs(engine))
            moved = places_at(cluster.replicas[1].port, topic, PARTITIONS)
            assert len(moved) > 2
            assert all(after[place] > before[place] for place in moved)
        await settled(engine, *broker.ids)
        assert await check_topic(engine, topic) == []
        await engine.close()


async def test_behind_sentinel_every_partition_is_taken_anew(server_binary: Path, topic: str) -> None:
    with sentinel_pair(binary=server_binary) as pair, RunningBroker(pair.url, workers=2) as broker:
        engine = Engine.connect(pair.url)
        async with flowing(broker, topic) as flow:
            await settled(engine, *broker.ids)
            before = await epochs(engine)
            cut_off(pair.replica)
            await flow.more(20)
            pair.fail_over()
            await until(lambda: is_master(pair.replica))
            await until(lambda: not is_master(pair.master))
            await flow.more(20)
            after = await once_reached(lambda: epochs(engine))
            assert all(after[place] > before[place] for place in before)
        await settled(engine, *broker.ids)
        assert await check_topic(engine, topic) == []
        await engine.close()
