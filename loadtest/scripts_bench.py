"""CPU of the server for calls of the ordinary case: `python -m loadtest.scripts_bench [lua ...]`.

Each folder of scripts that is named takes its turn, round by round, so that a slow moment of the machine hits
all: `git worktree` and the path of another tree's `lua` show what a change brings. Microseconds, medians.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from redis import Redis

from keylane_broker.engine.codec import flat_receipts
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.receipts import receipts_of
from keylane_broker.engine.turns import WholeAck
from keylane_broker.engine.values import Capacity, Lease, NumberedFrame, SubscriptionSettings, TopicSettings
from keylane_broker.store.scripts import FOLDER, Scripts, read_sources
from keylane_broker.store.store import Call
from keylane_broker.supervise.embedded_server import Server
from loadtest.engine_bench import HOUR_MS, messages
from loadtest.matched import cpu_of

PARTITIONS = 64
ROUNDS = 9
TIMES = 24  # that each partition is called in a round
Costs = dict[str, list[float]]


class Bench:
    """Calls as a worker makes them, all partitions in one write."""

    def __init__(self, server: Server, mode: str, scripts: Scripts) -> None:
        self.server, self.mode, self.scripts = server, mode, scripts
        self.redis: Any = Redis.from_url(server.url, decode_responses=True)
        self.costs: Costs = {}
        self.engine = Engine.connect(server.url)
        self.leases: list[Lease] = []
        self.number = 1  # of the next message, in each partition
        self.room = [Capacity("consumer-1", 1_000)]
        self.pid = int(self.redis.info("server")["process_id"])
        if scripts.library is not None:
            self.redis.function_load(scripts.library.text, replace=True)

    async def open(self, topic: str, partitions: int) -> None:
        """Make what is called."""
        await self.engine.create_topic(topic, TopicSettings(partitions=partitions))
        await self.engine.create_subscription(topic, "s", SubscriptionSettings(mode=self.mode))
        for number in range(partitions):
            lease = await self.engine.acquire(topic, number, "bench", HOUR_MS)
            assert lease is not None
            await self.engine.join(lease, "s", "consumer-1", HOUR_MS)
            self.leases.append(lease)
            await self.engine.publish(lease, messages(1))
            [found] = (await self.engine.fetch(lease, "s", self.room)).deliveries
            await self.engine.ack(lease, "s", [found.receipt])

    def run(self, step: str, calls: Sequence[Call]) -> list[list[Any]]:
        """Make calls, and note what one of them costs."""
        pipeline = self.redis.pipeline(transaction=False)
        for script, keys, arguments in calls:
            pipeline.fcall(self.scripts[script].function, len(keys), *keys, *arguments)
        before = cpu_of(self.pid)
        answers: list[list[Any]] = pipeline.execute()
        self.costs.setdefault(step, []).append((cpu_of(self.pid) - before) / len(calls) * 1e6)
        assert all(answer[0] == "OK" for answer in answers), answers[0]
        return answers

    def turns(self, step: str, count: int, acks: list[list[WholeAck]] | None = None) -> list[list[WholeAck]]:
        """Publish and lease so many in each partition."""
        frames = [NumberedFrame("producer", self.number, self.number, count)]
        self.number += count
        flats = [[text for one in messages(count) for text in one] for _ in self.leases]
        calls = [
            self.engine.turn_call(lease, "s", flat, self.room, acks=acks[at] if acks else (), frames=frames)
            for at, (lease, flat) in enumerate(zip(self.leases, flats, strict=True))
        ]
        answers = self.run(step, calls)
        found = []
        for lease, flat, answer in zip(self.leases, flats, answers, strict=True):
            fetched = self.engine.take_turn(lease, flat, self.room, answer).fetched
            receipts = receipts_of(flat_receipts(fetched, fetched.shares[0]))
            found.append([WholeAck("consumer-1", receipts)])
        return found

    def acks(self, step: str, acks: list[list[WholeAck]]) -> None:
        """Settle them."""
        each = zip(self.leases, acks, strict=True)
        self.run(step, [self.engine.ack_whole_call(lease, "s", its) for lease, its in each])

    def round(self) -> None:
        """Every step some times over; the costs of a step are their mean."""
        for _ in range(TIMES):
            self.acks("ack_whole, 1", self.turns("turn, 1", 1))
        acks = self.turns("turn, 1", 1)
        for _ in range(TIMES):
            acks = self.turns("ack and turn, 1", 1, acks)
        self.acks("ack_whole, 1", acks)
        for _ in range(TIMES // 8):
            self.acks("ack_whole, 50", self.turns("turn, 50", 50))


def main(folders: list[str]) -> None:
    """Print the table as Markdown."""
    roots = [Path(name) for name in folders] or [FOLDER]
    with Server() as server:
        uvloop.run(_measure(server, roots))


async def _measure(server: Server, roots: list[Path]) -> None:
    print("| step | " + " | ".join(str(root) for root in roots) + " |")
    print("|---|" + "---:|" * len(roots))
    for mode in ("shared", "key_shared"):
        benches = []
        for at, root in enumerate(roots):
            bench = Bench(server, mode, Scripts(read_sources(root)))
            await bench.open(f"{mode}-{at}", PARTITIONS)
            benches.append(bench)
        medians: list[dict[str, list[float]]] = [{} for _ in benches]
        for _ in range(ROUNDS):
            for bench, found in zip(benches, medians, strict=True):
                bench.costs = {}
                bench.round()
                for step, costs in bench.costs.items():
                    found.setdefault(step, []).append(statistics.fmean(costs))
        for step in medians[0]:
            cells = [f"{statistics.median(found[step]):.1f}" for found in medians]
            print(f"| {mode}: {step} | " + " | ".join(cells) + " |", flush=True)
        for bench in benches:
            await bench.engine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
