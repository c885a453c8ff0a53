"""How long partitions are without service when their worker is killed or stopped: two figures with bars.

The bars are about the product, not about a machine that stalls: the first attempt that reaches one counts.
That nothing is lost meanwhile is asked of every attempt.
"""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from itertools import pairwise

import anyio
import anyio.to_thread
import pytest

from keylane import AsyncClient, Published
from tests.chaos.cluster import Cluster
from tests.chaos.gaps import Gap, report
from tests.support.running import RunningBroker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LEASE = 5.0  # seconds, the default
ATTEMPTS = 8
PROBE = 0.2  # seconds between publishes to a partition; one that has to wait is answered as soon as can be
TAKE_OVER = LEASE + 1.0
HAND_OVER = 0.5


class Probes:
    """Publishes to each of some partitions all the time, one after the other; keeps when it was answered."""

    def __init__(self, client: AsyncClient, topic: str, partitions: Sequence[int]) -> None:
        self.answers: dict[int, list[tuple[float, float, Published]]] = {number: [] for number in partitions}
        self._client = client
        self._topic = topic

    async def run(self) -> None:
        """Go on until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for partition in self.answers:
                tasks.create_task(self._probe(partition))

    async def _probe(self, partition: int) -> None:
        while True:
            asked = time.monotonic()
            answer = await self._client.publish(self._topic, partition=partition)
            self.answers[partition].append((asked, time.monotonic(), answer))
            await asyncio.sleep(PROBE)

    async def until_all_answer(self, since: float) -> None:
        """Wait until each partition has answered a publish that was sent since then."""
        for answers in self.answers.values():
            while not answers or answers[-1][0] < since:  # noqa: ASYNC110 - a probe is never far
                await asyncio.sleep(PROBE)

    def gap(self, event: str, began: float) -> Gap:
        """What the event did to the service of the slowest partition."""
        backs, silences, waits = [], [], []
        for answers in self.answers.values():
            backs.append(min(answered for asked, answered, _ in answers if asked >= began) - began)
            times = [answered for _, answered, _ in answers]
            silences.append(max(later - earlier for earlier, later in pairwise(times)))
            waits.append(max(answered - asked for asked, answered, _ in answers))
        return Gap(event, 0.0, len(self.answers), max(silences), max(backs), max(waits))

    def problems(self) -> list[str]:
        """Ids rise from answer to answer, and each is stored once."""
        return [
            f"partition {number}: {later.id} came after {earlier.id}"
            for number, answers in self.answers.items()
            for (_, _, earlier), (_, _, later) in pairwise(answers)
            if later.entry != earlier.entry + 1 or later.ledger < earlier.ledger
        ]


async def test_the_partitions_of_a_killed_worker_are_served_within_the_lease_and_a_second(
    topic: str,
) -> None:
    with RunningBroker(workers=4) as broker:
        async with Cluster.open(broker, [], topic) as cluster, AsyncClient(broker.url, timeout=60) as client:
            await cluster.create_topic(64, {"s": "shared"})
            gaps: list[Gap] = []
            for attempt in range(ATTEMPTS):
                victim = attempt % 4
                own = await cluster.share_of(broker.ids[victim])
                assert len(own) == 16
                probes = Probes(client, topic, own)
                with anyio.fail_after(60):
                    probing = asyncio.create_task(probes.run())
                    await probes.until_all_answer(0)
                    killed = time.monotonic()
                    broker.kill_worker(victim)
                    await probes.until_all_answer(killed)
                    probing.cancel()
                gaps.append(probes.gap("SIGKILL", killed))
                assert probes.problems() == []
                if gaps[-1].back is not None and gaps[-1].back <= TAKE_OVER:
                    break
                await anyio.to_thread.run_sync(broker.start_worker, victim)
            report("take-over", gaps, lease=LEASE)
            assert min(gap.back or 0.0 for gap in gaps) <= TAKE_OVER


async def test_a_worker_that_stops_hands_64_partitions_over_in_half_a_second(topic: str) -> None:
    with RunningBroker(workers=2) as broker:
        async with Cluster.open(broker, [], topic) as cluster, AsyncClient(broker.url, timeout=60) as client:
            await cluster.create_topic(128, {"s": "shared"})
            gaps: list[Gap] = []
            for attempt in range(ATTEMPTS):
                leaver = attempt % 2
                own = await cluster.share_of(broker.ids[leaver])
                assert len(own) == 64
                probes = Probes(client, topic, own)
                with anyio.fail_after(60):
                    probing = asyncio.create_task(probes.run())
                    await probes.until_all_answer(0)
                    stopped = time.monotonic()
                    os.kill(broker.pid_of(leaver), signal.SIGTERM)
                    while set(await cluster.holders()) != {broker.ids[1 - leaver]}:
                        pass
                    handed_over = time.monotonic() - stopped
                    await probes.until_all_answer(stopped)
                    probing.cancel()
                served = probes.gap("SIGTERM", stopped)
                gaps.append(served._replace(back=handed_over))
                assert probes.problems() == []
                if handed_over <= HAND_OVER:
                    break
                await anyio.to_thread.run_sync(broker.stop_worker, leaver)
                await anyio.to_thread.run_sync(broker.start_worker, leaver)
            report("hand-over", gaps, lease=LEASE)
            assert min(gap.back or 0.0 for gap in gaps) <= HAND_OVER
