"""Workers on Redis Cluster and behind Sentinel: they serve, and go on when what they stand on changes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis

from keylane import AsyncClient
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.supervise.embedded_server import Server, ask
from loadtest.topology import sentinel_pair, three_node_cluster
from tests.support.ownership import epochs, once_reached, owners, places_at, settled, slot_of
from tests.support.running import RunningBroker
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # real processes, and leases that run out

PARTITIONS = 12
FAST = {"cluster-node-timeout": "3000"}


class Traffic:
    """Producers that write down every id, and a consumer that writes down what it got."""

    def __init__(self) -> None:
        self.published: dict[str, str] = {}  # uid -> id
        self.got: dict[str, list[int]] = {}  # key -> numbers, in the order of first deliveries
        self.delivered: set[str] = set()  # uids
        self.at_risk: set[str] = set()  # uids that a master may have had alone when it died
        self._enough = asyncio.Event()

    async def produce(self, client: AsyncClient, topic: str, key: str) -> None:
        """Publish numbers under one key, until it is enough."""
        number = 0
        while not self._enough.is_set():
            published = await client.publish(topic, key=key, attributes={"n": str(number)})
            assert published.id is not None
            self.published[f"{key}-{number}"] = published.id
            number += 1
            await asyncio.sleep(0.005)  # no more than the machine can do besides

    async def consume(self, client: AsyncClient, topic: str) -> None:
        """Take everything."""
        async with client.subscribe(topic, "s", mode="key_shared") as consumer:
            async for message in consumer:
                number, uid = int(message.attributes["n"]), f"{message.key}-{message.attributes['n']}"
                if uid not in self.delivered:
                    self.delivered.add(uid)
                    self.got.setdefault(str(message.key), []).append(number)
                async with message:
                    pass

    async def more(self, count: int = 50) -> None:
        """Wait until so many more have been published and delivered."""
        published, delivered = len(self.published) + count, len(self.delivered) + count

        async def through() -> bool:
            return len(self.published) >= published and len(self.delivered) >= delivered

        await until(through)

    def end(self) -> None:
        """Let the producers end."""
        self._enough.set()


@asynccontextmanager
async def traffic(broker: RunningBroker, topic: str) -> AsyncIterator[Traffic]:
    """A topic under load; in the end nothing may be missing, no id given twice, no key out of order."""
    flow = Traffic()
    async with AsyncClient(broker.url, timeout=60) as client:
        await client.create_topic(topic, partitions=PARTITIONS)
        await client.create_subscription(topic, "s", mode="key_shared")
        consumer = asyncio.create_task(flow.consume(client, topic))
        producers = [
            asyncio.create_task(flow.produce(client, topic, f"k{number}")) for number in range(PARTITIONS * 2)
        ]
        try:
            await flow.more()
            yield flow
            await flow.more()
            flow.end()
            await asyncio.wait_for(asyncio.gather(*producers), 60)

            async def all_delivered() -> bool:
                assert not consumer.done(), consumer
                return flow.delivered >= flow.published.keys() - flow.at_risk

            await until(all_delivered)
        finally:
            for task in (consumer, *producers):
                task.cancel()
            await asyncio.gather(consumer, *producers, return_exceptions=True)
    ids = list(flow.published.values())
    assert len(set(ids)) == len(ids), "no id is given twice"
    for key, numbers in flow.got.items():
        assert numbers == sorted(numbers), f"{key} is out of order"


async def test_workers_serve_on_a_cluster(cluster_url: str, topic: str) -> None:
    url = cluster_url.replace("redis://", "redis+cluster://")
    with RunningBroker(url, workers=3, name=f"on-cluster-{topic}") as broker:
        engine = Engine.connect(url)
        async with traffic(broker, topic):
            await settled(engine, *broker.ids)
            broker.kill_worker(2)
            await settled(engine, *broker.ids[:2])
        assert await check_topic(engine, topic) == []
        await engine.delete_topic(topic)
        await engine.close()


async def migrate(source: Server, target: Server, others: list[Server], slot: str) -> int:
    """Move a slot while it is in use, as redis-cli --cluster reshard does; answers how many keys moved."""
    names = {server.port: ask(server.port, "CLUSTER", "MYID") for server in (source, target)}
    ask(target.port, "CLUSTER", "SETSLOT", slot, "IMPORTING", names[source.port])
    ask(source.port, "CLUSTER", "SETSLOT", slot, "MIGRATING", names[target.port])
    moved = 0
    with Redis(port=source.port, decode_responses=True) as redis:
        while keys := redis.execute_command("CLUSTER GETKEYSINSLOT", slot, 1):
            redis.migrate("127.0.0.1", target.port, keys, 0, 5_000)
            moved += len(keys)
            await asyncio.sleep(0.02)  # with the slot half there and half here, workers ask for it
    for server in (target, source, *others):
        ask(server.port, "CLUSTER", "SETSLOT", slot, "NODE", names[target.port])
    return moved


@pytest.mark.slow
async def test_a_slot_that_migrates_under_load_is_followed(server_binary: Path, topic: str) -> None:
    with (
        three_node_cluster(binary=server_binary) as cluster,
        RunningBroker(cluster.broker_url, workers=2) as broker,
    ):
        engine = Engine.connect(cluster.broker_url)
        async with traffic(broker, topic) as flow:
            for partition in (0, 1):
                slot = slot_of(cluster.nodes[0].port, topic, partition)
                for node in cluster.nodes:
                    with_keys = ask(node.port, "CLUSTER", "COUNTKEYSINSLOT", slot)
                    if int(with_keys):
                        source = node
                target, other = (node for node in cluster.nodes if node is not source)
                assert await migrate(source, target, [other], slot) > 0
                assert int(ask(source.port, "CLUSTER", "COUNTKEYSINSLOT", slot)) == 0
                await flow.more(200)
                assert int(ask(target.port, "CLUSTER", "COUNTKEYSINSLOT", slot)) > 0
        await settled(engine, *broker.ids)
        assert await check_topic(engine, topic) == []
        await engine.close()


@pytest.mark.slow
async def test_the_failover_of_a_cluster_master_is_survived(server_binary: Path, topic: str) -> None:
    with (
        three_node_cluster(binary=server_binary, replicas=True, config=FAST) as cluster,
        RunningBroker(cluster.broker_url, workers=2) as broker,
    ):
        engine = Engine.connect(cluster.broker_url)
        async with traffic(broker, topic) as flow:
            await settled(engine, *broker.ids)
            before = await epochs(engine)
            here = places_at(cluster.nodes[1].port, topic, PARTITIONS)
            assert here
            cluster.nodes[1].kill()
            cluster.fail_over(1)
            await until(lambda: "role:master" in ask(cluster.replicas[1].port, "INFO", "replication"))
            flow.at_risk.update(flow.published)
            await flow.more(200)

            async def taken_anew() -> bool:
                after = await once_reached(lambda: epochs(engine))
                return all(after[place] > before[place] for place in here)

            await until(taken_anew)
        await settled(engine, *broker.ids)
        await engine.close()


@pytest.mark.slow
async def test_a_failover_of_sentinels_is_survived(server_binary: Path, topic: str) -> None:
    with (
        sentinel_pair(binary=server_binary) as pair,
        RunningBroker(pair.url, workers=2) as broker,
    ):
        engine = Engine.connect(pair.url)
        async with traffic(broker, topic) as flow:
            await settled(engine, *broker.ids)
            before = await epochs(engine)
            pair.master.kill()
            pair.fail_over()

            async def promoted() -> bool:
                return pair.master_port() == pair.replica.port

            await until(promoted)
            flow.at_risk.update(flow.published)
            await flow.more(200)
            after = await once_reached(lambda: epochs(engine))
            assert all(after[place] > before[place] for place in before), (
                "all are taken anew before they serve"
            )
        assert set((await once_reached(lambda: owners(engine))).values()) == set(broker.ids)
        await engine.close()
