"""Ten thousand partitions on four workers: all are owned, and it costs next to nothing to keep them."""

import time

import pytest

from keylane import wire
from keylane_broker.engine.engine import Engine
from keylane_broker.supervise.embedded_server import Server, ask
from tests.support.ownership import owners, settled
from tests.support.peer import Peer, connect, publish
from tests.support.running import RunningBroker
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # real processes, and leases that run out

PARTITIONS = 10_000
WORKERS = 4
LEASE = 12.0  # seconds: more than a busy machine stands still. A period of renewal is a third


def scripts_run(server: Server) -> int:
    """How many script calls a server has had."""
    stats = ask(server.port, "INFO", "commandstats")
    lines = dict(line.split(":", 1) for line in stats.splitlines() if line.startswith("cmdstat_eval"))
    return sum(int(line.split(",")[0].removeprefix("calls=")) for line in lines.values())


async def heartbeats(engine: Engine) -> dict[str, int]:
    """When each worker was last heard of."""
    return {report.id: report.heartbeat_ms for report in await engine.workers()}


async def beaten(engine: Engine, times: int) -> None:
    """Wait until every worker has been heard of so many more times."""
    last, left = await heartbeats(engine), dict.fromkeys(await heartbeats(engine), times)

    async def enough() -> bool:
        nonlocal last
        now = await heartbeats(engine)
        for worker, at in now.items():
            left[worker] -= at > last[worker]
        last = now
        return max(left.values()) <= 0

    await until(enough)


async def takes_publishes(engine: Engine, peers: dict[str, Peer], topic: str) -> None:
    """Publish to some partitions of each worker."""
    placed = await owners(engine)
    for worker, peer in peers.items():
        own = [number for (_, number), name in placed.items() if name == worker]
        for number in own[:: len(own) // 3]:
            assert (await publish(peer, topic, number, f"u-{worker}-{number}", again=True)).unowed


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_ten_thousand_partitions_are_owned_renewed_in_bulk_and_taken_over(topic: str) -> None:
    with RunningBroker(workers=WORKERS, partition_lease=LEASE) as broker:
        assert isinstance(broker.server, Server)
        engine = Engine.connect(broker.redis_url)
        async with connect(broker.urls[0]) as one, connect(broker.urls[1]) as two:
            began = time.monotonic()
            await one.answer(wire.CreateTopic(topic, PARTITIONS))
            counts = await settled(engine, *broker.ids)
            assert sorted(counts.values()) == [PARTITIONS // WORKERS] * WORKERS
            print(f"made and owned after {time.monotonic() - began:.1f} s")

            began = time.monotonic()
            before, version = scripts_run(broker.server), (await engine.owners()).version
            await beaten(engine, 2)
            spent = scripts_run(broker.server) - before
            periods = (time.monotonic() - began) / (LEASE / 3) + 1  # of each worker, at most
            print(f"{spent} script calls in {periods:.1f} periods of four workers")
            assert spent < WORKERS * periods * 100, "a tenth of a call for each partition at most"
            assert (await engine.owners()).version == version, "nothing moved"
            assert await settled(engine, *broker.ids) == counts, "no lease was lost"

            peers = {broker.ids[0]: one, broker.ids[1]: two}
            await takes_publishes(engine, peers, topic)
            placed = await owners(engine)
            began = time.monotonic()
            broker.kill_worker(3)
            await settled(engine, *broker.ids[:3])
            print(f"taken over after {time.monotonic() - began:.1f} s")
            after = await owners(engine)
            assert all(after[place] == name for place, name in placed.items() if name != broker.ids[3])
            began = time.monotonic()
            assert broker.stop_worker(2) == 0
            await settled(engine, *broker.ids[:2])
            print(f"handed over after {time.monotonic() - began:.1f} s")
            await takes_publishes(engine, peers, topic)
        await engine.close()
