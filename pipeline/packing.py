"""Which worker should serve which partition, and how many partitions there should be: arithmetic on loads.

A load is any number that adds up: here the messages of a partition. Workers keep as many partitions as they
have: the cluster undoes a placement whose counts are uneven at once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

import msgspec

SWAPS = 1_000  # at most, on the way to a better placement
WORTH = 0.02  # of the mean load that an exchange must take from the busiest worker: a move is not free
GOOD = 1.25  # the busiest worker's load over the mean: a fifth of the mean is what the cluster lets be, too
PERIOD = 768  # every candidate divides it, so that one count of hashes by it is enough for all
CANDIDATES = tuple(count for count in range(1, PERIOD + 1) if PERIOD % count == 0)


class Candidate(msgspec.Struct, frozen=True):
    """How even a number of partitions would be."""

    partitions: int
    imbalance: float  # the busiest partition over the mean
    workers: float  # the busiest worker over the mean


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


def place(loads: Mapping[int, float], owners: Mapping[int, str], workers: Sequence[str]) -> dict[int, str]:
    """The better of two placements with the same counts as now: packed anew, or by a few exchanges.

    Packing anew moves nearly everything, so it must be clearly better.
    """
    packed = pack(loads, Counter(owners.values()))
    swapped = exchange(loads, owners, workers)
    most = [max(worker_loads(loads, made, workers).values(), default=0.0) for made in (packed, swapped)]
    mean = sum(loads.values()) / max(1, len(workers))
    return packed if most[0] + WORTH * mean < most[1] else swapped


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


def exchange(loads: Mapping[int, float], owners: Mapping[int, str], workers: Sequence[str]) -> dict[int, str]:
    """Exchange partitions of the busiest worker for lighter ones of others, as long as that is worth it."""
    made = dict(owners)
    mean = sum(loads.values()) / max(1, len(workers))
    for _ in range(SWAPS):
        totals = worker_loads(loads, made, workers)
        busiest = max(totals, key=lambda worker: (totals[worker], worker))
        mine = [partition for partition, worker in made.items() if worker == busiest]
        best, pair = totals[busiest] - WORTH * mean, None
        for partition in mine:
            for other, worker in made.items():
                shift = loads.get(partition, 0.0) - loads.get(other, 0.0)
                after = max(totals[busiest] - shift, totals[worker] + shift)
                if worker != busiest and shift > 0 and after < best:
                    best, pair = after, (partition, other)
        if pair is None:
            return made
        made[pair[0]], made[pair[1]] = made[pair[1]], made[pair[0]]
    return made


def candidates(by_hash: Mapping[int, int], keyless: int, workers: int) -> list[Candidate]:
    """How even each number of partitions would be; `by_hash` are messages by the hash of their key % PERIOD.

    Messages without a key go anywhere, so they are evenly spread.
    """
    found = []
    for count in CANDIDATES:
        if count < workers:
            continue
        loads = dict.fromkeys(range(count), keyless / count)
        for place_, messages in by_hash.items():
            loads[place_ % count] += messages
        room = {str(worker): count // workers + (worker < count % workers) for worker in range(workers)}
        packed = worker_loads(loads, pack(loads, room), list(room))
        found.append(Candidate(count, imbalance(list(loads.values())), imbalance(list(packed.values()))))
    return found


def recommend(found: Sequence[Candidate]) -> Candidate | None:
    """The fewest partitions with which workers are even enough, or nearly as even as it gets."""
    best = min((candidate.workers for candidate in found), default=1.0)
    return next((one for one in found if one.workers <= max(GOOD, best * 1.05)), None)
