"""Deciding who serves what: reads the cluster from Redis, asks placement, and writes what it says.

One worker at a time is the controller; an operator's order is carried out by whichever worker gets it. Both
write with a compare-and-set, so of two that decide at once one begins again.
"""

import logging
from collections.abc import Callable, Collection, Mapping

from keylane import wire
from keylane.errors import InvalidArgument, Unavailable
from keylane_broker.cluster.load import loads_of
from keylane_broker.cluster.placement import Memory, choose_workers, place, relieve, rest
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Owners, Place, WorkerReport

log = logging.getLogger("keylane.broker")

_ATTEMPTS = 20  # at a change that others get ahead of
_CYCLES = 10  # of the same loads, more than it takes to believe them


class Controller:
    """Places partitions on workers; what it remembers only keeps it from moving too much."""

    def __init__(self, engine: Engine, is_alive: Callable[[WorkerReport], bool]) -> None:
        self._engine = engine
        self._is_alive = is_alive
        self._memory = Memory()

    async def balance(self, *, by_load: bool = False) -> list[wire.Move]:
        """Give every partition an owner that is there, in even counts; `by_load`: then look at loads too."""
        for _ in range(_ATTEMPTS):
            reports, owners, topics, spreads = await self._read()
            workers, loads, current = self.available(reports), script_times(reports), by_place(owners, topics)
            memory = self._memory
            moves = place(topics, current, workers, loads, stay=memory.moved, spreads=spreads)
            if by_load and workers and not moves:
                moves, memory = relieve(current, workers, loads, memory, focused=spreads)
            if await self._write(owners, topics, moves):
                self._memory = memory
                return moves
        raise _busy()

    async def rebalance(self, *, dry_run: bool = False) -> list[wire.Move]:
        """Balance counts and load on an operator's order, who need not wait until an imbalance has lasted."""
        for _ in range(_ATTEMPTS):
            reports, owners, topics, spreads = await self._read()
            workers, loads, current = self.available(reports), script_times(reports), by_place(owners, topics)
            moves = place(topics, current, workers, loads, spreads=spreads)
            memory = Memory()
            for _ in range(_CYCLES if workers else 0):
                if not moves:
                    moves, memory = relieve(current, workers, loads, memory, focused=spreads)
            if dry_run or await self._write(owners, topics, moves):
                return moves
        raise _busy()

    async def move(self, topic: str, partition: int, worker: str, keep: Collection[Place] = ()) -> None:
        """Give a partition to a worker; another, none of `keep`, comes back if counts would not be even."""
        for _ in range(_ATTEMPTS):
            reports, owners, topics, spreads = await self._read()
            if topic not in topics:
                await self._engine.describe_topic(topic)  # or the error that says more
                raise Unavailable(f"topic {topic!r} is being created; try again")
            if not 0 <= partition < topics[topic]:
                raise InvalidArgument(
                    f"topic {topic!r} has no partition {partition}: it has 0 to {topics[topic] - 1}"
                )
            able = self.available(reports)
            if worker not in able:
                raise InvalidArgument(
                    f"worker {worker!r} cannot take partitions; those that can: {', '.join(able) or 'none'}"
                )
            current = by_place(owners, topics)
            source = current.get((topic, partition), "")
            if source == worker:
                return
            some = choose_workers(topics, current, able, spreads).get(topic, able)
            if worker not in some:
                raise InvalidArgument(
                    f"topic {topic!r} has a spread of {spreads[topic]}: its partitions stay on "
                    f"{', '.join(sorted(some))}; change the spread, or move it to one of these"
                )
            moves = [wire.Move(topic, partition, source, worker, "moved by hand")]
            after = {**current, (topic, partition): worker}
            stay = [(topic, partition), *keep]
            moves += place(topics, after, able, script_times(reports), stay=stay, spreads=spreads)
            if await self._write(owners, topics, moves):
                self._memory = rest(self._memory, [(topic, partition)])
                return
        raise _busy()

    def available(self, reports: Collection[WorkerReport]) -> list[str]:
        """Return the workers that can have partitions."""
        return [report.id for report in reports if report.state == "serving" and self._is_alive(report)]

    async def _read(self) -> tuple[list[WorkerReport], Owners, dict[str, int], dict[str, int]]:
        """Return the workers, who owns what, partitions of each topic, and spreads where they are above 1."""
        owners = await self._engine.owners()
        workers, shapes = await self._engine.workers(), await self._engine.shapes()
        counts = {topic: partitions for topic, (partitions, _) in shapes.items()}
        return workers, owners, counts, {topic: spread for topic, (_, spread) in shapes.items() if spread > 1}

    async def _write(self, owners: Owners, topics: Mapping[str, int], moves: Collection[wire.Move]) -> bool:
        """Write what has changed, unless others were quicker; topics that are gone go."""
        changed: dict[str, list[str] | None] = {
            topic: names[: topics[topic]] if topic in topics else None
            for topic, names in owners.topics.items()
            if len(names) > topics.get(topic, 0)
        }
        for move in moves:
            names = changed.get(move.topic)
            if names is None:
                before = owners.topics.get(move.topic, [])[: topics[move.topic]]
                names = changed[move.topic] = before + [""] * (topics[move.topic] - len(before))
            names[move.partition] = move.target
        if not changed:
            return True
        if not await self._engine.assign(owners.version, changed):
            return False
        if moves:
            log.info("%d partitions get another owner: %s", len(moves), _summary(moves))
        await self._engine.announce("owners")
        return True


def _busy() -> Unavailable:
    return Unavailable("the placement of partitions keeps changing; try again")


def by_place(owners: Owners, topics: Mapping[str, int]) -> dict[Place, str]:
    """Return the owner of each partition that has one."""
    return {
        (topic, number): worker
        for topic, names in owners.topics.items()
        if topic in topics
        for number, worker in enumerate(names[: topics[topic]])
        if worker
    }


def script_times(reports: Collection[WorkerReport]) -> dict[Place, float]:
    """Return milliseconds of script time a second, of each partition that is not idle."""
    return {
        place: milliseconds
        for report in reports
        for place, (_, milliseconds) in loads_of(report.load).items()
    }


def _summary(moves: Collection[wire.Move]) -> str:
    some = [f"{move.topic}:{move.partition} to {move.target} ({move.reason})" for move in list(moves)[:5]]
    return ", ".join(some) + (f" and {len(moves) - 5} more" if len(moves) > 5 else "")
