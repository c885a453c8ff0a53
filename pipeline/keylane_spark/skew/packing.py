"""Which worker should serve which partition, and how many partitions there should be: arithmetic on loads.

A load is any number that adds up: here the messages of a partition. Workers keep as many partitions as they
have: the cluster undoes a placement whose counts are uneven at once.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush, nlargest
from math import inf, lcm

import msgspec

SWAPS = 1_000  # at most, on the way to a better placement
TRIED = 64  # partitions of the busiest worker, the heaviest first
WORTH = 0.005  # of the mean load that an exchange must take from the busiest worker, beyond what it costs
CHARGE = 0.2  # what moving everything would cost, as a part of the mean load of a worker
GAIN = 0.05  # of the busiest worker's load: a placement that takes less from it is not worth moving for
ANEW = 1.25  # times as even as the best number of partitions: for less, nobody makes a topic anew
GOOD = 1.25  # the busiest worker's load over the mean: a fifth of the mean is what the cluster lets be, too
# Numbers of partitions that a person would choose.
CANDIDATES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 100, 128, 200, 256)
PERIOD = lcm(*CANDIDATES)  # every candidate divides it, so that one count of hashes by it is enough for all


class Candidate(msgspec.Struct, frozen=True):
    """How even a number of partitions would be."""

    partitions: int
    imbalance: float  # the busiest partition over the mean
    workers: float  # the busiest worker over the mean


class Placement(msgspec.Struct, frozen=True):
    """Who is to serve which partition, and what that brings and costs."""

    owners: dict[int, str]
    moves: int  # partitions that change their worker
    before: float  # the busiest worker over the mean
    after: float
    moved: float  # load that changes its worker, as a part of all

    @property
    def gain(self) -> float:
        """What it takes from the busiest worker, as a part of its load."""
        return 1 - self.after / self.before

    @property
    def cost(self) -> float:
        """The busiest worker over the mean, and what moving costs: by load, and by partitions that pause."""
        return self.after + CHARGE * (self.moved + self.moves / max(1, len(self.owners))) / 2

    @property
    def worth(self) -> bool:
        """Whether it is worth moving for."""
        return self.gain >= GAIN


def imbalance(loads: Sequence[float]) -> float:
    """The greatest load over the mean, 1 if all are the same or there is none."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def worker_loads(
    loads: Mapping[int, float], owners: Mapping[int, str], workers: Sequence[str]
) -> dict[str, float]:
    """The load of each worker."""
    totals = dict.fromkeys(sorted(workers), 0.0)
    for partition, worker in owners.items():
        totals[worker] += loads.get(partition, 0.0)
    return totals


def place(loads: Mapping[int, float], owners: Mapping[int, str], workers: Sequence[str]) -> Placement:
    """The best of three with the same counts as now: packed anew, a few exchanges, or as it is.

    What is moved is charged for, so a placement that moves much must be clearly better.
    """
    packed = match(best_of(loads, Counter(owners.values())), loads, owners)
    found = [
        _judged(made, loads, owners, workers)
        for made in (dict(owners), exchange(loads, owners, workers), packed)
    ]
    return min(found, key=lambda one: one.cost)


def _judged(
    made: dict[int, str], loads: Mapping[int, float], owners: Mapping[int, str], workers: Sequence[str]
) -> Placement:
    before, after = (imbalance(list(worker_loads(loads, at, workers).values())) for at in (owners, made))
    moves = sum(worker != owners[partition] for partition, worker in made.items())
    moved = moved_load(loads, owners, made) / (sum(loads.values()) or 1)
    return Placement(made, moves, before, after, moved)


def moved_load(loads: Mapping[int, float], owners: Mapping[int, str], made: Mapping[int, str]) -> float:
    """The load that changes its worker."""
    return sum(loads.get(partition, 0.0) for partition, worker in made.items() if worker != owners[partition])


def match(made: Mapping[int, str], loads: Mapping[int, float], owners: Mapping[int, str]) -> dict[int, str]:
    """The same placement with workers renamed so that the least load moves.

    Which worker has which bin is all the same to the balance. Only those with as many partitions take each
    other's names, since counts are to stay.
    """
    # Where the load is the same, the fewest partitions.
    extra = (sum(loads.values()) or 1.0) / max(1, len(made)) / 1e9
    shared: dict[tuple[str, str], float] = defaultdict(float)
    for partition, bin_ in made.items():
        shared[bin_, owners[partition]] += loads.get(partition, 0.0) + extra
    alike: dict[int, list[str]] = defaultdict(list)
    for worker, count in sorted(Counter(made.values()).items()):
        alike[count].append(worker)
    names: dict[str, str] = {}
    for group in alike.values():
        chosen = assign([[-shared[bin_, worker] for worker in group] for bin_ in group])
        names |= {bin_: group[place] for bin_, place in zip(group, chosen, strict=True)}
    return {partition: names[bin_] for partition, bin_ in made.items()}


def assign(costs: Sequence[Sequence[float]]) -> list[int]:
    """For each row another column, so that the sum of the costs is the least: the Hungarian method.

    >>> assign([[1, 2], [1, 9]])
    [1, 0]
    """
    size = len(costs)
    rows, columns = [0.0] * (size + 1), [0.0] * (size + 1)  # what has been taken off each
    taken = [size] * (size + 1)  # by column its row; the last column is a place to start from
    for row in range(size):
        taken[size] = row
        column, way = size, [size] * (size + 1)
        least, seen = [inf] * (size + 1), [False] * (size + 1)
        while taken[column] != size:
            seen[column] = True
            here, following, step = taken[column], size, inf
            for other in range(size):
                if seen[other]:
                    continue
                cost = costs[here][other] - rows[here] - columns[other]
                if cost < least[other]:
                    least[other], way[other] = cost, column
                if least[other] < step:
                    following, step = other, least[other]
            for other in range(size + 1):
                if seen[other]:
                    rows[taken[other]] += step
                    columns[other] -= step
                else:
                    least[other] -= step
            column = following
        while column != size:  # along the way back, each row goes over to the next column
            taken[column] = taken[way[column]]
            column = way[column]
    chosen = {row: column for column, row in enumerate(taken[:size])}
    return [chosen[row] for row in range(size)]


def pack(loads: Mapping[int, float], room: Mapping[str, int]) -> dict[int, str]:
    """The biggest first, each to the least loaded worker that has room."""
    heap = [(0.0, worker, count) for worker, count in sorted(room.items()) if count]
    heapify(heap)
    made = {}
    for partition in sorted(loads, key=lambda partition: (-loads[partition], partition)):
        load, worker, left = heappop(heap)
        made[partition] = worker
        if left > 1:
            heappush(heap, (load + loads[partition], worker, left - 1))
    return dict(sorted(made.items()))


def best_of(loads: Mapping[int, float], room: Mapping[str, int]) -> dict[int, str]:
    """A placement from nothing: packed, and then what a few exchanges make of it."""
    return exchange(loads, pack(loads, room), list(room))


def exchange(loads: Mapping[int, float], owners: Mapping[int, str], workers: Sequence[str]) -> dict[int, str]:
    """Exchange partitions of the busiest worker for lighter ones of others, as long as that is worth it."""
    made = dict(owners)
    mean = sum(loads.values()) / max(1, len(workers))
    price = CHARGE / 2 / max(1, len(workers))  # for a load that moves
    pause = CHARGE / 2 * mean * 2 / max(1, len(owners))  # for two partitions that do
    for _ in range(SWAPS):
        totals = worker_loads(loads, made, workers)
        busiest = max(totals, key=lambda worker: (totals[worker], worker))
        mine = nlargest(
            TRIED, (at for at, worker in made.items() if worker == busiest), key=lambda at: loads.get(at, 0.0)
        )
        best, pair = totals[busiest] - WORTH * mean, None
        for partition in mine:
            for other, worker in made.items():
                heavy, light = loads.get(partition, 0.0), loads.get(other, 0.0)
                after = max(totals[busiest] - heavy + light, totals[worker] + heavy - light)
                cost = after + price * (heavy + light) + pause
                if worker != busiest and heavy > light and cost < best:
                    best, pair = cost, (partition, other)
        if pair is None:
            return made
        made[pair[0]], made[pair[1]] = made[pair[1]], made[pair[0]]
    return made


def candidates(
    by_hash: Mapping[int, int], keyless: int, workers: int, now: Mapping[int, float]
) -> list[Candidate]:
    """How even each number of partitions would be, in order, and how even those that there are `now`.

    `by_hash` are messages by the hash of their key % PERIOD. Messages without a key go anywhere, so they are
    evenly spread.
    """
    found = {len(now): _candidate(now, workers)}
    for count in CANDIDATES:
        if count < workers or count in found:
            continue
        loads = dict.fromkeys(range(count), keyless / count)
        for place_, messages in by_hash.items():
            loads[place_ % count] += messages
        found[count] = _candidate(loads, workers)
    return [candidate for _, candidate in sorted(found.items())]


def _candidate(loads: Mapping[int, float], workers: int) -> Candidate:
    """With partitions as well placed as can be."""
    count = len(loads)
    room = {str(worker): count // workers + (worker < count % workers) for worker in range(workers)}
    packed = worker_loads(loads, best_of(loads, room), list(room))
    return Candidate(count, imbalance(list(loads.values())), imbalance(list(packed.values())))


def recommend(found: Sequence[Candidate], count: int) -> Candidate | None:
    """The fewest partitions from `count` on with which workers are even enough, or as even as it gets.

    None if those that there are do nearly as well.
    """
    more = [one for one in found if one.partitions >= count]
    best = min(one.workers for one in more)
    if more[0].workers <= max(GOOD, best * ANEW):
        return None
    return next(one for one in more if one.workers <= max(GOOD, best * 1.05))
