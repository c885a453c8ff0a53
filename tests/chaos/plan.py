"""What is to happen to a cluster and when: a plan made of a seed, the same for the same seed."""

import random
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("kill", "pause", "stop", "add", "drain", "move", "server")
MOST = 6  # workers; each wants its share of the machine
LEAST = 2  # workers that serve at any time


class Step(NamedTuple):
    """Something to do, so many seconds after the start."""

    at: float
    what: str
    worker: int = -1
    partition: int = -1
    node: int = -1  # of the servers
    outage: float = 0.0  # seconds that the server stays away

    def __str__(self) -> str:
        match self.what:
            case "move":
                return f"move partition {self.partition} to worker {self.worker}"
            case "server":
                return f"kill the server {self.node}, start it after {self.outage:.1f} s"
            case "add":
                return "add a worker"
        return f"{self.what} worker {self.worker}"


class Plan:
    """Makes the steps; knows which workers will be there at each of them."""

    def __init__(self, seed: int, *, workers: int, partitions: int, nodes: int, lease: float) -> None:
        self._chance = random.Random(f"plan {seed}")
        self._serving = set(range(workers))
        self._workers = workers
        self._partitions, self._nodes, self._lease = partitions, nodes, lease
        self._later: list[Step] = []  # what undoes what was done

    def steps(self, seconds: float) -> list[Step]:
        """Everything that is done, in order. Every kind comes once, then any; at last all is undone."""
        chance = self._chance
        found: list[Step] = []
        at, kinds = 1.0, chance.sample(KINDS, len(KINDS))
        while at < seconds:
            found += self._undone(at)
            kinds = kinds or chance.choices(KINDS, k=5)
            possible = next((kind for kind in kinds if self._is_possible(kind)), None)
            if possible is not None:
                kinds.remove(possible)
                found += self._begin(possible, at)
            at += chance.uniform(0.8, 2.4)
        return [*found, *self._undone(float("inf"))]

    def _undone(self, until: float) -> Iterator[Step]:
        for step in sorted(step for step in self._later if step.at <= until):
            self._later.remove(step)
            self._serving.add(step.worker)
            yield step

    def _is_possible(self, kind: str) -> bool:
        if kind == "add":
            return self._workers < MOST
        return kind in ("move", "server") or len(self._serving) > LEAST

    def _begin(self, kind: str, at: float) -> list[Step]:
        chance = self._chance
        match kind:
            case "add":
                self._serving.add(self._workers)
                self._workers += 1
                return [Step(at, "add", self._workers - 1)]
            case "server":
                return [Step(at, "server", node=chance.randrange(self._nodes), outage=chance.uniform(0, 1))]
            case "move":
                partitions = chance.sample(range(self._partitions), 3)
                return [Step(at, "move", chance.choice(sorted(self._serving)), p) for p in partitions]
        worker = chance.choice(sorted(self._serving))
        self._serving.discard(worker)
        undo, wait = {
            "kill": ("start", chance.choice((0.1, self._lease + chance.uniform(0.5, 2)))),
            "pause": ("resume", self._lease + chance.uniform(0.5, 2)),
            "stop": ("start", chance.uniform(0.1, 2)),
            "drain": ("undrain", chance.uniform(1, 3)),
        }[kind]
        self._later.append(Step(at + wait, undo, worker))
        return [Step(at, kind, worker)]
