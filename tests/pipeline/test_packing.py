"""Packing partitions on workers, and choosing their number: arithmetic that needs no Spark."""

import random
from collections import Counter

import pytest

from client.wire import partition_of
from pipeline.packing import (
    CANDIDATES,
    PERIOD,
    candidates,
    exchange,
    imbalance,
    pack,
    place,
    recommend,
    worker_loads,
)

WORKERS = ["w0", "w1", "w2"]


def random_case(seed: int) -> tuple[dict[int, float], dict[int, str]]:
    """Loads with a few hot ones, and owners with even counts."""
    luck = random.Random(seed)
    count = luck.randint(3, 24)
    loads = {number: luck.paretovariate(1.2) * 100 for number in range(count)}
    seats = [WORKERS[number % 3] for number in range(count)]
    luck.shuffle(seats)
    return loads, dict(enumerate(seats))


@pytest.mark.parametrize("make", [place, exchange])
def test_a_placement_keeps_the_counts_and_is_never_worse(make: object) -> None:
    """The cluster would undo uneven counts at once."""
    assert callable(make)
    better = 0
    for seed in range(300):
        loads, owners = random_case(seed)
        made = make(loads, owners, WORKERS)
        assert made.keys() == owners.keys()
        assert Counter(made.values()) == Counter(owners.values())
        before, after = (imbalance(list(worker_loads(loads, at, WORKERS).values())) for at in (owners, made))
        assert after <= before + 1e-9
        better += after < before - 0.01
    assert better > 200


def test_the_biggest_go_first_to_whoever_has_least() -> None:
    """With room for as many as each has."""
    assert pack({0: 1, 1: 9, 2: 5, 3: 5}, {"a": 2, "b": 2}) == {0: "a", 1: "a", 2: "b", 3: "b"}
    assert Counter(pack(dict.fromkeys(range(5), 1.0), {"a": 4, "b": 1}).values()) == {"a": 4, "b": 1}


def test_what_is_even_is_left_alone() -> None:
    """A move interrupts a partition for a moment, so it must be worth it."""
    owners = {number: WORKERS[number % 3] for number in range(6)}
    assert place(dict.fromkeys(range(6), 100.0), owners, WORKERS) == owners
    assert place({0: 101, 1: 100, 2: 99, 3: 100, 4: 100, 5: 100}, owners, WORKERS) == owners
    assert place({}, owners, WORKERS) == owners


def test_two_hot_partitions_of_one_worker_are_parted() -> None:
    """By one exchange, and not by packing all anew."""
    owners = {number: WORKERS[number % 3] for number in range(6)}
    made = place({0: 900, 1: 10, 2: 10, 3: 800, 4: 20, 5: 20}, owners, WORKERS)
    assert made[0] != made[3]
    assert sum(made[number] != owners[number] for number in made) == 2


def test_hashes_by_the_period_tell_the_partition_for_every_candidate() -> None:
    """Since each divides it."""
    for key in ("a", "customer-7", "Zürich", "鍵"):
        for count in CANDIDATES:
            assert partition_of(key, PERIOD) % count == partition_of(key, count)


def test_more_partitions_are_recommended_only_where_they_help() -> None:
    """Even keys need few; a hot key is not spread by any number."""
    even = dict.fromkeys(range(PERIOD), 10)
    found = candidates(even, 0, 3)
    assert found[0].partitions == 3
    best = recommend(found)
    assert best is not None
    assert (best.partitions, best.workers) == (3, 1.0)

    crowded = {0: 100, 3: 100, 6: 100}  # all in one of three partitions, and in three of four
    found = candidates(crowded, 0, 3)
    best = recommend(found)
    assert best is not None
    assert (found[0].workers, best.partitions, best.workers) == (3.0, 4, 1.0)

    hot = Counter(even)
    hot[7] += sum(even.values())  # one key with half of everything
    found = candidates(hot, 0, 3)
    assert min(one.workers for one in found) >= 1.5
    best = recommend(found)
    assert best is not None
    assert best.partitions <= 24


def test_messages_without_a_key_make_everything_more_even() -> None:
    """They go anywhere."""
    keyed = candidates({7: 100}, 0, 2)[0]
    mixed = candidates({7: 100}, 900, 2)[0]
    assert (keyed.imbalance, mixed.imbalance) == (2.0, 1.1)
