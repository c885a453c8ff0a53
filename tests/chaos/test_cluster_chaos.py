"""Everything happens to a cluster of workers under load, at random: the applications need no help.

KEYLANE_CHAOS_SEED repeats a run's plan, KEYLANE_CHAOS_SECONDS makes runs longer, KEYLANE_CHAOS_REPORT names
a file for the figures.
"""

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio
import pytest

from broker.server import Server
from broker.topology import three_node_cluster
from tests.chaos.cluster import Cluster
from tests.chaos.crowd import MODES, Crowd
from tests.chaos.gaps import measure, report
from tests.chaos.plan import Plan, Step
from tests.running import RunningBroker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

SECONDS = float(os.environ.get("KEYLANE_CHAOS_SECONDS", "16"))  # of chaos, besides start and end
PATIENCE = 45.0  # seconds for everything else

WORKERS = 4
PARTITIONS = 64
PRODUCERS = 3
CONSUMERS = 3  # of each subscription but the exclusive one
RATE = 200.0  # messages a second
LEASE = 2.0  # seconds that a worker's partitions stay its own; shorter than the default, to see more


def chosen_seed() -> int:
    """A seed that is printed, to repeat what has gone wrong; or the one to repeat."""
    seed = int(os.environ.get("KEYLANE_CHAOS_SEED") or random.SystemRandom().randrange(10**6))
    print(f"KEYLANE_CHAOS_SEED={seed}")
    return seed


async def run(
    name: str, broker: RunningBroker, servers: Sequence[Server], topic: str, seed: int, steps: list[Step]
) -> list[str]:
    """Run a load through a plan; everything that was not as promised."""
    for step in steps:
        print(f"{step.at:6.2f}  {step}")
    problems = []
    async with Cluster.open(broker, servers, topic) as cluster:
        await cluster.create_topic(PARTITIONS, MODES)
        async with Crowd(broker.url, topic, PARTITIONS, seed) as crowd:
            with anyio.move_on_after(SECONDS + PATIENCE) as limit:
                await crowd.start_consumers(CONSUMERS)
                await crowd.start_producers(PRODUCERS, RATE)
                await cluster.carry_out(steps)
                await cluster.settle_down()
                await crowd.until_each_partition_answers()
                await crowd.stop("p")
                await cluster.until_nothing_is_owed(MODES)
                await crowd.stop("c")
            if limit.cancelled_caught:
                owed = await cluster.backlog(MODES)
                problems.append(f"it did not come to an end: {owed} are owed; {await cluster.trouble()}")
        problems += await cluster.check()
    record = crowd.replay(cluster.instants)
    gaps = measure(cluster.disturbances, crowd.publishes(), cluster.started)
    report(name, gaps, seed=seed, lease=broker.settings.partition_lease, answered=crowd.answered)
    for subscription, told in record.told.items():
        print(f"{subscription}: {told.redelivered} came again, {len(told.stale)} acks were stale")
    return record.verdict() + problems


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that has on disk what it has answered: so its death loses nothing."""
    with Server(data_dir=tmp_path / "data", appendfsync="always") as server:
        yield server


async def test_a_cluster_loses_nothing_repeats_nothing_settled_and_keeps_order(
    server: Server, topic: str
) -> None:
    seed = chosen_seed()
    plan = Plan(seed, workers=WORKERS, partitions=PARTITIONS, nodes=1, lease=LEASE)
    with RunningBroker(server, workers=WORKERS, partition_lease=LEASE) as broker:
        problems = await run("one server", broker, [server], topic, seed, plan.steps(SECONDS))
        assert not problems, "\n".join(problems)


async def test_a_cluster_on_three_servers_does_so_too(topic: str) -> None:
    seed = chosen_seed()
    plan = Plan(seed, workers=WORKERS, partitions=PARTITIONS, nodes=3, lease=LEASE)
    with three_node_cluster(appendonly=True, config={"appendfsync": "always"}) as nodes:
        url = nodes.url.replace("redis://", "redis+cluster://")
        with RunningBroker(url, workers=WORKERS, partition_lease=LEASE) as broker:
            problems = await run("three servers", broker, nodes.nodes, topic, seed, plan.steps(SECONDS))
            assert not problems, "\n".join(problems)


async def test_workers_that_are_killed_and_paused_past_the_default_lease(server: Server, topic: str) -> None:
    steps = [
        Step(1, "pause", 1),
        Step(1.5, "kill", 2),
        Step(8, "resume", 1),
        Step(8.5, "start", 2),
        Step(9, "stop", 0),
        Step(9.5, "start", 0),
    ]
    with RunningBroker(server, workers=WORKERS) as broker:
        problems = await run("default lease", broker, [server], topic, 1, steps)
        assert not problems, "\n".join(problems)


def test_a_seed_repeats_a_plan() -> None:
    def steps(seed: int) -> list[Step]:
        return Plan(seed, workers=4, partitions=64, nodes=1, lease=2).steps(60)

    assert steps(1) == steps(1) != steps(2)
    kinds = {step.what for step in steps(1)}
    assert kinds == {"kill", "start", "pause", "resume", "stop", "add", "drain", "undrain", "move", "server"}
