"""Placing partitions: what the controller reads, decides and writes, and who gets ahead of whom."""

from typing import Any, cast

import pytest

from keylane.errors import InvalidArgument, Unavailable
from keylane_broker.cluster.controller import Controller
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Owners, WorkerReport


class Cluster:
    """As much of an engine as a controller uses: owners behind a compare-and-set."""

    def __init__(self, topics: dict[str, int], workers: dict[str, str]) -> None:
        self.topics = topics
        self.spreads: dict[str, int] = {}
        self.states = workers
        self.version = 0
        self.placed: dict[str, list[str]] = {}
        self.loads: dict[str, dict[str, tuple[float, float]]] = {}
        self.ahead: list[dict[str, list[str]]] = []  # what others write just before we do
        self.announced: list[str] = []

    async def owners(self, known: Owners | None = None) -> Owners:
        return Owners(self.version, {topic: list(names) for topic, names in self.placed.items()})

    async def workers(self) -> list[WorkerReport]:
        return [
            WorkerReport(name, f"{name}:9999", "1", state, 0, 0.0, 0.0, self.loads.get(name, {}))
            for name, state in self.states.items()
        ]

    async def shapes(self) -> dict[str, tuple[int, int]]:
        return {topic: (count, self.spreads.get(topic, 1)) for topic, count in self.topics.items()}

    async def assign(self, version: int, changes: dict[str, list[str] | None]) -> bool:
        if self.ahead:
            self._write(cast(Any, self.ahead.pop(0)))
        if version != self.version:
            return False
        self._write(changes)
        return True

    def _write(self, changes: dict[str, list[str] | None]) -> None:
        self.version += 1
        for topic, names in changes.items():
            if names is None:
                self.placed.pop(topic, None)
            else:
                self.placed[topic] = names

    async def announce(self, event: str) -> None:
        self.announced.append(event)

    def controller(self, dead: tuple[str, ...] = ()) -> Controller:
        """One that takes these workers for dead."""
        return Controller(cast(Engine, self), lambda report: report.id not in dead)


async def test_what_exists_is_placed_on_those_who_serve_and_live_in_even_counts() -> None:
    cluster = Cluster({"t": 5}, {"a": "serving", "b": "serving", "c": "draining", "d": "serving"})
    moves = await cluster.controller(dead=("d",)).balance()
    assert len(moves) == 5
    assert sorted(cluster.placed["t"].count(name) for name in "ab") == [2, 3]
    assert set(cluster.placed["t"]) == {"a", "b"}
    assert cluster.announced == ["owners"]


async def test_what_is_placed_well_stays_and_nothing_is_written() -> None:
    cluster = Cluster({"t": 4}, {"a": "serving", "b": "serving"})
    await cluster.controller().balance()
    version = cluster.version
    assert await cluster.controller().balance() == []
    assert cluster.version == version


async def test_whoever_is_late_reads_again_and_overwrites_nothing() -> None:
    cluster = Cluster({"t": 2, "u": 1}, {"a": "serving", "b": "serving"})
    cluster.ahead = [{"u": ["b"]}]
    await cluster.controller().balance()
    assert cluster.placed["u"] == ["b"]
    assert sorted(cluster.placed["t"] + cluster.placed["u"]).count("a") in (1, 2)
    assert len(cluster.placed["t"]) == 2


async def test_who_is_late_all_the_time_gives_up() -> None:
    cluster = Cluster({"t": 1}, {"a": "serving"})
    cluster.ahead = [{"other": ["a"]}] * 100
    with pytest.raises(Unavailable, match="keeps changing"):
        await cluster.controller().balance()
    assert len(cluster.ahead) == 80


async def test_owners_of_topics_that_are_gone_are_forgotten() -> None:
    cluster = Cluster({"t": 1}, {"a": "serving"})
    cluster.placed = {"t": ["a", "a"], "gone": ["a"]}
    await cluster.controller().balance()
    assert cluster.placed == {"t": ["a"]}


async def test_a_partition_moved_by_hand_goes_where_it_should_and_another_comes_back() -> None:
    cluster = Cluster({"t": 4}, {"a": "serving", "b": "serving"})
    cluster.placed = {"t": ["a", "a", "b", "b"]}
    await cluster.controller().move("t", 0, "b")
    assert cluster.placed["t"][0] == "b"
    assert sorted(cluster.placed["t"]) == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("partition", "worker", "said"), [(9, "b", "no partition 9"), (0, "c", "cannot take"), (0, "x", "cannot")]
)
async def test_orders_that_cannot_be_followed_are_refused(partition: int, worker: str, said: str) -> None:
    cluster = Cluster({"t": 2}, {"a": "serving", "b": "serving", "c": "draining"})
    cluster.placed = {"t": ["a", "b"]}
    with pytest.raises(InvalidArgument, match=said):
        await cluster.controller().move("t", partition, worker)
    assert cluster.version == 0


async def test_a_dry_run_says_what_it_would_do_and_does_nothing() -> None:
    cluster = Cluster({"t": 4}, {"a": "serving", "b": "serving"})
    cluster.placed = {"t": ["a", "a", "a", "a"]}
    moves = await cluster.controller().rebalance(dry_run=True)
    assert [move.target for move in moves] == ["b", "b"]
    assert cluster.placed == {"t": ["a", "a", "a", "a"]}
