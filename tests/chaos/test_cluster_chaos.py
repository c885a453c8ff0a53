"""Everything happens to a cluster of workers under load, at random: the applications need no help.

KEYLANE_CHAOS_SEED repeats a run's plan, KEYLANE_CHAOS_SECONDS makes runs longer, KEYLANE_CHAOS_REPORT names
a file for the figures.
"""

import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import anyio
import pytest

from keylane_broker.supervise.embedded_server import Server
from loadtest.topology import three_node_cluster
from tests.chaos import application as seen
from tests.chaos.application import Seen
from tests.chaos.cluster import Cluster
from tests.chaos.crowd import MODES, Crowd
from tests.chaos.gaps import measure, report
from tests.chaos.plan import Plan, Step
from tests.support.running import RunningBroker

SECONDS = float(os.environ.get("KEYLANE_CHAOS_SECONDS", "16"))  # of chaos, besides start and end
PATIENCE = 400.0  # seconds for all the rest, on a machine that has much else to do

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + PATIENCE + 60)]

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
                await crowd.until_each_partition_answers()
                await crowd.stop("p")
                await cluster.until_nothing_is_owed(MODES)
                await crowd.stop("c")
            if limit.cancelled_caught:
                problems.append(f"it did not come to an end: {await cluster.backlog(MODES)} are owed")
                problems += await cluster.trouble() + (await cluster.owed())[:20]
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


@pytest.mark.usefixtures("turns")
async def test_a_cluster_loses_nothing_repeats_nothing_settled_and_keeps_order(
    server: Server, topic: str
) -> None:
    seed = chosen_seed()
    plan = Plan(seed, workers=WORKERS, partitions=PARTITIONS, nodes=1, lease=LEASE)
    with RunningBroker(server, workers=WORKERS, partition_lease=LEASE) as broker:
        problems = await run("one server", broker, [server], topic, seed, plan.steps(SECONDS))
        assert not problems, "\n".join(problems)


@pytest.mark.usefixtures("turns")
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


# The record must be able to find something


def story(*events: Seen) -> list[str]:
    """What the record says to what a producer and two consumers saw, one event a second."""
    crowd = Crowd("", "", 1, 0)
    producing = (seen.Publishing, seen.Published)
    crowd.events = [("p0" if isinstance(event, producing) else "c0", event) for event in events]
    return crowd.replay([]).verdict()


def published(at: float, number: int, entry: int) -> list[Seen]:
    """A message is published, and answered as an entry of partition 0."""
    sent = seen.Publishing(at, number, "k", 0)
    return [sent, seen.Published(at + 0.1, number, 0, 1, entry, f"uid {number}", False)]


def delivered(at: float, number: int, entry: int, consumer: str, names: Iterable[str]) -> list[Seen]:
    """It comes to a consumer in each of some subscriptions."""
    about = {"name": f"p0 {number}"}
    what = (consumer, f"0:1-{entry}", "k", f"uid {number}", entry, 0, about)
    return [seen.Delivered(at, name, *what) for name in names]


def acked(at: float, number: int, names: Iterable[str]) -> list[Seen]:
    """It is acked there."""
    found: list[Seen] = []
    for name in names:
        found.append(seen.Acking(at, name, [f"p0 {number}"]))
        found.append(seen.Acked(at + 0.1, name, [f"p0 {number}"], ["settled"]))
    return found


ONE, TWO = published(1, 0, 1), published(2, 1, 2)


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([*ONE, *delivered(3, 0, 1, "a", MODES), *acked(4, 0, MODES)], None),
        ([*ONE, *delivered(3, 0, 1, "a", ["keyed"]), *acked(4, 0, ["keyed"])], "failover: .* never came"),
        ([*ONE, *delivered(3, 0, 1, "a", MODES)], "shared: .* was never settled"),
        (
            [
                *ONE,
                *delivered(3, 0, 1, "a", MODES),
                *acked(4, 0, MODES),
                *delivered(5, 0, 1, "b", ["shared"]),
            ],
            "shared: .* came again after its ack",
        ),
        ([*ONE, *published(2, 1, 1)], "0:1-1 is .* and also"),
        ([*ONE, *published(2, 1, 3)], "1 entries of nobody"),
        ([*ONE, *TWO, *delivered(3, 1, 2, "a", ["failover"])], "2 of key 'k' in failover before 1 was"),
        (
            [*ONE, *TWO, *delivered(3, 0, 1, "a", ["keyed"]), *delivered(4, 1, 2, "b", ["keyed"])],
            "b got 2 of key 'k' in keyed before 1 was settled",
        ),
    ],
)
def test_the_record_finds(events: list[Seen], complaint: str | None) -> None:
    problems = story(*events)
    assert bool(problems) == (complaint is not None)
    assert complaint is None or re.search(complaint, "\n".join(problems))


def test_a_seed_repeats_a_plan() -> None:
    def steps(seed: int) -> list[Step]:
        return Plan(seed, workers=4, partitions=64, nodes=1, lease=2).steps(60)

    assert steps(1) == steps(1) != steps(2)
    kinds = {step.what for step in steps(1)}
    assert kinds == {"kill", "start", "pause", "resume", "stop", "add", "drain", "undrain", "move", "server"}
