"""Which worker serves which partition: pure functions, so that every rule can be tried without a cluster.

`place` makes the counts even with as few moves as that takes; `relieve` is one cycle of evening out the
load, which never makes the counts uneven. The same facts in any order give the same answer: whoever is the
controller decides alike. Ties go by name and number, and sums do not depend on the order of a dict.
"""

from bisect import bisect, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import groupby
from math import fsum, sqrt
from typing import NamedTuple

import msgspec

from keylane import wire
from keylane_broker.engine.values import Place

# Of a load cycle. Loads are milliseconds of script time per second.
GAP = 0.2  # of the mean worker load: nobody feels less, and a move interrupts a partition for a moment
FLOOR = 20.0  # ms/s: a gap of 2 % of one core is nothing, whatever share of an idle cluster's load it is
PATIENCE = 3  # cycles in a row that a worker must be that much busier: a burst passes by itself
WORTH = 0.01  # of the gap, that a move must shift: less than that only stirs
HOT = 0.8  # of the gap, that a move may shift: with more, the hot spot moves and hardly cools
DOUBT = 1.0  # standard deviations of one cycle's load that a move must stand out by: jitter moves nothing
WAIT = 5  # cycles after a move: loads are averages that lag, and still tell of the placement before it
REST = 300  # cycles that a moved partition stays where it is: no two workers toss it to and fro
WEIGHT = 1 / 32  # of a cycle in the averages that decide: long enough to tell a change from jitter
IDLE = 0.01  # ms/s: an average below this is forgotten


class LoadAverage(NamedTuple):
    """Moving averages of a partition's load and of how much it jitters."""

    mean: float = 0.0
    variance: float = 0.0


NONE = LoadAverage()


class Memory(msgspec.Struct, frozen=True):
    """What one load cycle leaves to the next; a new controller starts with an empty one."""

    loads: dict[Place, LoadAverage] = {}  # of partitions that are not idle
    cycles: int = 0  # that these are made of
    uneven: dict[str, int] = {}  # worker -> for how many cycles it has been too busy
    wait: int = 0  # cycles to let pass
    moved: dict[Place, int] = {}  # -> cycles for which it stays where it is


def place(
    topics: Mapping[str, int],
    owners: Mapping[Place, str],
    workers: Collection[str],
    loads: Mapping[Place, float] = {},
    *,
    stay: Collection[Place] = (),
    spreads: Mapping[str, int] = {},
) -> list[wire.Move]:
    """Say what must move so that every partition is owned and counts are even within one.

    `topics` are partition counts by name. Owners that are not among `workers`, and partitions that do not
    exist, count for nothing. What moves is what has no owner and what a worker has too many of, no more: the
    least loaded first, those in `stay` last. Topics with a spread above 1 are placed first, each evenly on
    the workers chosen for it; the others then make the counts as even as that allows.
    """
    if not workers:
        return []
    moves, base = list[wire.Move](), Counter[str]()
    chosen = choose_workers(topics, owners, workers, spreads)
    for topic, its in chosen.items():
        alone = _place({topic: topics[topic]}, owners, its, loads, stay, Counter(), frozenset(workers))
        after = {number: owners.get((topic, number), "") for number in range(topics[topic])}
        after |= {move.partition: move.target for move in alone}
        moves += alone
        base.update(after.values())
    others = {topic: count for topic, count in topics.items() if topic not in chosen}
    return moves + _place(others, owners, workers, loads, stay, base, frozenset(workers))


def choose_workers(
    topics: Mapping[str, int],
    owners: Mapping[Place, str],
    workers: Collection[str],
    spreads: Mapping[str, int],
) -> dict[str, list[str]]:
    """Return on which workers each topic with a spread above 1 is: one of so many, rounded up.

    Those that have most of it already, so that few partitions move; of equals those that the topics before it
    need least. The largest topics choose first.
    """
    focused = [topic for topic in topics if spreads.get(topic, 1) > 1]
    chosen, needed = dict[str, list[str]](), Counter[str]()
    for topic in sorted(focused, key=lambda topic: (-topics[topic], topic)):
        has = Counter(owners.get((topic, number), "") for number in range(topics[topic]))
        size = -(-len(workers) // spreads[topic])
        ranked = sorted((-has[worker], needed[worker], worker) for worker in workers)
        chosen[topic] = [worker for *_, worker in ranked[:size]]
        for worker in chosen[topic]:
            needed[worker] += -(-topics[topic] // size)
    return chosen


def _level(count: int, base: Counter[str], workers: Collection[str]) -> tuple[int, int]:
    """Return how many partitions workers have that do not have more already, and how many have one more."""
    total = count
    for rank, height in enumerate(sorted(base[worker] for worker in workers)):
        if rank and total <= rank * (height - 1):  # this one, and all after it, have more than their share
            return divmod(total, rank)
        total += height
    return divmod(total, len(workers))


def _place(
    topics: Mapping[str, int],
    owners: Mapping[Place, str],
    workers: Collection[str],
    loads: Mapping[Place, float],
    stay: Collection[Place],
    base: Counter[str],
    alive: frozenset[str],
) -> list[wire.Move]:
    """Place topics on workers that have `base` partitions of others; `alive` are all that there are."""
    held: dict[str, list[Place]] = {worker: [] for worker in sorted(workers)}
    homeless: list[Place] = []
    for topic in sorted(topics):
        for number in range(topics[topic]):
            held.get(owners.get((topic, number), ""), homeless).append((topic, number))
    newcomers = {worker for worker, places in held.items() if not places}
    fair, spare = _level(sum(topics.values()), base, held)  # `spare` workers have one more than `fair`
    spare -= sum(base[worker] == fair + 1 for worker in held)

    staying = frozenset(stay)
    overfull = [worker for worker, places in held.items() if places and base[worker] + len(places) > fair]
    overfull.sort(key=lambda worker: _claim(worker, held[worker], fair - base[worker], loads, staying))
    for worker in overfull:
        keep = max(0, fair - base[worker])
        if base[worker] <= fair and spare > 0:
            keep, spare = keep + 1, spare - 1
        ranked = _dearest_last(held[worker], loads, staying)
        homeless += ranked[: len(ranked) - keep]
        held[worker] = ranked[len(ranked) - keep :]

    moves = []
    for (topic, number), target in _house(homeless, held, fair, max(0, spare), loads, base):
        source = owners.get((topic, number), "")
        if not source:
            reason = "it had no owner"
        elif source not in alive:
            reason = f"{source} is gone or draining"
        elif source not in held:
            reason = f"the spread of {topic!r} leaves {source} out"
        elif target in newcomers:
            reason = f"{target} had none"
        else:
            reason = "even counts"
        moves.append(wire.Move(topic, number, source, target, reason))
    return moves


def _claim(
    worker: str, places: list[Place], fair: int, loads: Mapping[Place, float], staying: frozenset[Place]
) -> tuple[bool, float, str]:
    """Rank over-full workers by who keeps one more than others: who needs it for `stay`, then who is idle."""
    needs = sum(place in staying for place in places) > fair
    return not needs, fsum(loads.get(place, 0.0) for place in places), worker


def _dearest_last(
    places: list[Place], loads: Mapping[Place, float], staying: frozenset[Place]
) -> list[Place]:
    """Sort a worker's partitions in the order in which it gives them up.

    Among equals the topic goes first of which it has most at that moment, so what matters is how many of its
    topic are left when a partition's turn comes.
    """
    left = Counter(topic for topic, _ in places)
    order = []
    for place in sorted(places, key=lambda place: (place in staying, loads.get(place, 0.0), place)):
        order.append((place in staying, loads.get(place, 0.0), -left[place[0]], place))
        left[place[0]] -= 1
    return [place for *_, place in sorted(order)]


def _house(
    homeless: list[Place],
    held: Mapping[str, list[Place]],
    fair: int,
    spare: int,
    loads: Mapping[Place, float],
    base: Counter[str],
) -> Iterator[tuple[Place, str]]:
    """Find a worker for each partition: where its topic has fewest, then with fewest, then the least loaded.

    Workers have room up to `fair`, and `spare` of them for one more. For a topic with p partitions to house
    that h workers have already, only the first p + h workers with room can matter: p of them have none of
    it. So the cost is about that of looking at each partition once, however many workers there are.
    """
    spread: dict[str, Counter[str]] = {topic: Counter() for topic, _ in homeless}
    roomy: list[tuple[int, float, str]] = []
    for worker, places in held.items():
        for topic, _ in places:
            if topic in spread:
                spread[topic][worker] += 1
        count = base[worker] + len(places)
        if count <= fair:
            roomy.append((count, fsum(loads.get(place, 0.0) for place in places), worker))
    roomy.sort()

    homeless.sort(key=lambda place: (place[0], -loads.get(place, 0.0), place[1]))
    for topic, group in groupby(homeless, key=lambda place: place[0]):
        places, has = list(group), spread[topic]
        near = roomy[: len(places) + len(has)]
        del roomy[: len(near)]
        heap = [(has[worker], count, load, worker) for count, load, worker in near]
        heapify(heap)
        for place in places:
            while heap[0][1] == fair and not spare:
                heappop(heap)
            here, count, load, worker = heap[0]
            yield place, worker
            if count == fair:
                spare -= 1
                heappop(heap)
            else:
                heapreplace(heap, (here + 1, count + 1, load + loads.get(place, 0.0), worker))
        for _, count, load, worker in heap:
            insort(roomy, (count, load, worker))


def relieve(
    owners: Mapping[Place, str],
    workers: Collection[str],
    loads: Mapping[Place, float],
    memory: Memory,
    *,
    focused: Collection[str] = (),
) -> tuple[list[wire.Move], Memory]:
    """Run one load cycle: nothing, one move, or two that exchange partitions so that counts stay even.

    Partitions of `focused` topics, whose spread is above 1, are only exchanged for others of their topic, so
    that they stay on the workers chosen for it.

    The busiest partition whose move narrows the gap goes from the most loaded worker to the least loaded. One
    so hot that it would take the hot spot along stays, or is exchanged for one that is nearly as busy; from a
    worker that has nothing to give nothing is taken, and the next most loaded is looked at.
    """
    moved = {place: left - 1 for place, left in memory.moved.items() if left > 1}
    if memory.wait:
        return [], msgspec.structs.replace(memory, wait=memory.wait - 1, moved=moved)
    known, cycles = _learn(owners, loads, memory)
    held: dict[str, list[Place]] = {worker: [] for worker in sorted(workers)}
    for place, owner in owners.items():
        if owner in held:
            held[owner].append(place)
    if not held:
        return [], Memory(loads=known, cycles=cycles, moved=moved)

    busy = {worker: _total(places, known) for worker, places in held.items()}
    target = min(busy, key=lambda worker: (busy[worker].mean, worker))
    limit = max(FLOOR, GAP * fsum(load.mean for load in busy.values()) / len(busy))
    uneven = {w: memory.uneven.get(w, 0) + 1 for w in busy if busy[w].mean - busy[target].mean > limit}
    for source in sorted(uneven, key=lambda worker: (-busy[worker].mean, worker)):
        if uneven[source] < PATIENCE:
            continue
        pair, other = _Pair(held[source], held[target], known, moved, focused).choose(), target
        if not pair and focused:
            pair, other = _exchange(source, held, busy, known, moved, focused, limit)
        if pair:
            why = f"{source} has {busy[source].mean:.0f} ms/s of load, {other} {busy[other].mean:.0f}"
            moves = [wire.Move(*pair[0], source, other, why)]
            moves += [wire.Move(*back, other, source, "in exchange: even counts") for back in pair[1:]]
            return moves, rest(Memory(loads=known, cycles=cycles, moved=moved), pair)
    return [], Memory(loads=known, cycles=cycles, uneven=uneven, moved=moved)


def _exchange(
    source: str,
    held: Mapping[str, list[Place]],
    busy: Mapping[str, LoadAverage],
    known: Mapping[Place, LoadAverage],
    moved: Mapping[Place, int],
    focused: Collection[str],
    limit: float,
) -> tuple[list[Place], str]:
    """Find two partitions of a focused topic to exchange, with the least loaded worker that has the topic."""
    for topic in sorted({topic for topic, _ in held[source] if topic in focused}):
        having = [worker for worker, places in held.items() if any(place[0] == topic for place in places)]
        other = min(having, key=lambda worker: (busy[worker].mean, worker))
        if busy[source].mean - busy[other].mean > limit:
            pair = _Pair(held[source], held[other], known, moved, focused).exchange(topic)
            if pair:
                return pair, other
    return [], source


def rest(memory: Memory, places: Iterable[Place]) -> Memory:
    """Note that partitions have moved, by load or by hand: they stay for a while, and their loads settle."""
    moved = memory.moved | dict.fromkeys(places, REST)
    return msgspec.structs.replace(memory, uneven={}, wait=WAIT, moved=moved)


def _learn(
    owners: Mapping[Place, str], loads: Mapping[Place, float], memory: Memory
) -> tuple[dict[Place, LoadAverage], int]:
    """Carry the averages on by one cycle and count it.

    What is seen first is taken as it is and doubted wholly; the next few cycles weigh more than later ones.
    """
    if not memory.loads:
        first = {place: LoadAverage(load, load * load) for place, load in loads.items() if load >= IDLE}
        return {place: load for place, load in first.items() if place in owners}, 1
    weight = max(WEIGHT, 1 / (memory.cycles + 1))
    known = {}
    for place in owners:
        (mean, variance), load = memory.loads.get(place, NONE), loads.get(place, 0.0)
        if mean or load:
            change = load - mean
            mean += weight * change
            if mean >= IDLE:
                known[place] = LoadAverage(mean, (1 - weight) * (variance + weight * change * change))
    return known, memory.cycles + 1


def _total(places: Iterable[Place], known: Mapping[Place, LoadAverage]) -> LoadAverage:
    loads = [known[place] for place in places if place in known]
    return LoadAverage(fsum(load.mean for load in loads), fsum(load.variance for load in loads))


class _Pair:
    """A most loaded worker that gives and a least loaded one that takes, and what may go between them."""

    def __init__(
        self,
        giver: list[Place],
        taker: list[Place],
        known: Mapping[Place, LoadAverage],
        resting: Collection[Place],
        focused: Collection[str],
    ) -> None:
        self.known = known
        self.level = len(giver) <= len(taker)  # so if one goes, one must come back
        full, empty = _total(giver, known), _total(taker, known)
        self.gap, self.variance = full.mean - empty.mean, full.variance + empty.variance
        free = [(known.get(place, NONE).mean, place) for place in giver if place not in resting]
        given = [place for _, place in sorted(free, key=lambda item: (-item[0], item[1]))]
        taken = sorted((known.get(place, NONE).mean, place) for place in taker if place not in resting)
        self.given = [place for place in given if place[0] not in focused]
        self.taken = [item for item in taken if item[1][0] not in focused]
        self._all = given, taken

    def choose(self) -> list[Place]:
        """Choose what goes to the taker and what comes back, if anything; or nothing at all."""
        if self.level and not self.taken:
            return []
        back = [self.taken[0][1]] if self.level else []
        for place in self.given:
            if self._helps(place, back):
                return [place, *back]
        return self._best_exchange(self.given, self.taken)

    def exchange(self, topic: str) -> list[Place]:
        """Choose two partitions of a topic, one for the other; or nothing."""
        given, taken = self._all
        of_topic = [item for item in taken if item[1][0] == topic]
        return self._best_exchange([place for place in given if place[0] == topic], of_topic)

    def _best_exchange(self, given: list[Place], taken: list[tuple[float, Place]]) -> list[Place]:
        pairs = [pair for place in given for pair in self._matches(place, taken)]
        if pairs:
            _, place, partner = min(pairs)
            if self._helps(place, [partner]):
                return [place, partner]
        return []

    def _helps(self, place: Place, back: list[Place]) -> bool:
        """Whether what moves is worth it and not all of the gap, and both are more than jitter."""
        goes, comes = self.known.get(place, NONE), _total(back, self.known)
        shift, variance = goes.mean - comes.mean, goes.variance + comes.variance
        left = max(0.0, self.variance - variance)
        return shift >= max(WORTH * self.gap, DOUBT * sqrt(variance)) and self.gap - shift >= max(
            (1 - HOT) * self.gap, DOUBT * sqrt(left)
        )

    def _matches(
        self, place: Place, taken: list[tuple[float, Place]]
    ) -> Iterator[tuple[float, Place, Place]]:
        """Find partitions of the taker that, exchanged for this one, come closest to closing the gap."""
        mean, half = self.known.get(place, NONE).mean, self.gap / 2
        at = bisect(taken, (mean - half, place))
        for load, partner in taken[max(0, at - 1) : at + 1]:
            yield abs(mean - load - half), place, partner
