"""Packing partitions on workers, and choosing their number: arithmetic that needs no Spark."""

import random
from collections import Counter
from itertools import permutations

import pytest

from keylane.wire import partition_of
from keylane_spark.skew.packing import (
    CANDIDATES,
    GAIN,
    PERIOD,
    assign,
    candidates,
    exchange,
    imbalance,
    match,
    moved_load,
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


def test_a_placement_keeps_the_counts_and_is_never_worse() -> None:
    """The cluster would undo uneven counts at once."""
    better = 0
    for seed in range(300):
        loads, owners = random_case(seed)
        found = place(loads, owners, WORKERS)
        for made in (found.owners, exchange(loads, owners, WORKERS)):
            assert made.keys() == owners.keys()
            assert Counter(made.values()) == Counter(owners.values())
        assert found.before == imbalance(list(worker_loads(loads, owners, WORKERS).values()))
        assert found.after == imbalance(list(worker_loads(loads, found.owners, WORKERS).values()))
        assert found.after <= found.before
        better += found.worth
    assert better > 200


def test_packed_bins_go_to_the_workers_that_have_most_of_them_already() -> None:
    """Never more load moves than without that, the least that there can be, and the balance is the same."""
    less = 0
    for seed in range(300):
        loads, owners = random_case(seed)
        packed = pack(loads, Counter(owners.values()))
        made = match(packed, loads, owners)
        assert Counter(made.values()) == Counter(owners.values())
        assert sorted(worker_loads(loads, made, WORKERS).values()) == sorted(
            worker_loads(loads, packed, WORKERS).values()
        )
        moved = moved_load(loads, owners, made)
        least = min(
            moved_load(loads, owners, renamed)
            for names in permutations(WORKERS)
            for new in [dict(zip(WORKERS, names, strict=True))]
            for renamed in [{partition: new[worker] for partition, worker in packed.items()}]
            if Counter(renamed.values()) == Counter(owners.values())
        )
        assert moved <= least * (1 + 1e-6)
        less += moved < moved_load(loads, owners, packed) * 0.99
    assert less > 150


def test_workers_with_more_partitions_keep_more() -> None:
    """Two bins that are of different size do not change places, whatever they share."""
    owners = {0: "a", 1: "a", 2: "b"}
    assert match({0: "b", 1: "a", 2: "a"}, {0: 1, 1: 1, 2: 9}, owners) == {0: "b", 1: "a", 2: "a"}
    assert match({0: "b", 1: "b", 2: "a"}, {}, {0: "a", 1: "c", 2: "b"}) == {0: "b", 1: "b", 2: "a"}


def test_the_cheapest_assignment_is_found() -> None:
    """As by trying all."""
    assert assign([]) == []
    luck = random.Random(7)
    for _ in range(200):
        size = luck.randint(1, 5)
        costs = [[luck.randint(-9, 9) for _ in range(size)] for _ in range(size)]
        chosen = assign(costs)
        assert sorted(chosen) == list(range(size))
        least = min(
            sum(costs[row][column] for row, column in enumerate(order)) for order in permutations(range(size))
        )
        assert sum(costs[row][column] for row, column in enumerate(chosen)) == least


def test_the_biggest_go_first_to_whoever_has_least() -> None:
    """With room for as many as each has."""
    assert pack({0: 1, 1: 9, 2: 5, 3: 5}, {"a": 2, "b": 2}) == {0: "a", 1: "a", 2: "b", 3: "b"}
    assert Counter(pack(dict.fromkeys(range(5), 1.0), {"a": 4, "b": 1}).values()) == {"a": 4, "b": 1}


def test_what_is_even_is_left_alone() -> None:
    """A move interrupts a partition for a moment, so it must be worth it."""
    owners = {number: WORKERS[number % 3] for number in range(6)}
    for loads in (dict.fromkeys(range(6), 100.0), {0: 101, 1: 100, 2: 99, 3: 100, 4: 100, 5: 100}, {}):
        found = place(loads, owners, WORKERS)
        assert (found.owners, found.moved, found.gain, found.worth) == (owners, 0, 0, False)


def test_two_hot_partitions_of_one_worker_are_parted() -> None:
    """By one exchange, and not by packing all anew."""
    owners = {number: WORKERS[number % 3] for number in range(6)}
    made = place({0: 900, 1: 10, 2: 10, 3: 800, 4: 20, 5: 20}, owners, WORKERS).owners
    assert made[0] != made[3]
    assert sum(made[number] != owners[number] for number in made) == 2


def test_a_better_placement_that_moves_much_must_be_clearly_better() -> None:
    """What is moved is charged for: a fifth of the mean if it were everything."""
    owners = {0: "a", 1: "a", 2: "b", 3: "b"}
    # Both pairs would have to change places to win two in a hundred.
    found = place({0: 51, 1: 51, 2: 49, 3: 49}, owners, ["a", "b"])
    assert (found.owners, found.before, found.worth) == (owners, 1.02, False)
    # Here a small exchange wins as much as packing anew, nearly.
    loads = {0: 60, 1: 42, 2: 40, 3: 30}
    found = place(loads, owners, ["a", "b"])
    assert found.moved <= moved_load(loads, owners, pack(loads, Counter(owners.values()))) / 172


def test_a_gain_below_a_twentieth_is_not_worth_moving() -> None:
    """It is found, and said, and left."""
    owners = {number: "a" if number < 20 else "b" for number in range(40)}
    found = place({**dict.fromkeys(range(40), 1), 0: 100, 1: 6, 20: 98}, owners, ["a", "b"])
    assert 0 < found.gain < GAIN
    assert not found.worth
    assert found.owners != owners


def test_hashes_by_the_period_tell_the_partition_for_every_candidate() -> None:
    """Since each divides it."""
    for key in ("a", "customer-7", "Zürich", "鍵"):
        for count in CANDIDATES:
            assert partition_of(key, PERIOD) % count == partition_of(key, count)


def measured(by_hash: dict[int, int], count: int) -> dict[int, float]:
    """What each of so many partitions has."""
    loads = dict.fromkeys(range(count), 0.0)
    for place_, messages in by_hash.items():
        loads[place_ % count] += messages
    return loads


def test_more_partitions_are_recommended_only_where_they_help() -> None:
    """Even keys need few; a hot key is not spread by any number."""
    even = dict.fromkeys(range(PERIOD), 10)
    found = candidates(even, 0, 3, measured(even, 3))
    assert (found[0].partitions, found[0].workers) == (3, 1.0)
    assert recommend(found, 3) is None

    crowded = {0: 100, 3: 100, 6: 100}  # all in one of three partitions, and in three of four
    found = candidates(crowded, 0, 3, measured(crowded, 3))
    best = recommend(found, 3)
    assert best is not None
    assert (found[0].workers, best.partitions, best.workers) == (3.0, 4, 1.0)

    hot = dict(even)
    hot[7] += sum(even.values())  # one key with half of everything
    found = candidates(hot, 0, 3, measured(hot, 3))
    assert min(one.workers for one in found) >= 1.5
    best = recommend(found, 3)
    assert best is None or best.partitions <= 24


def test_the_count_that_there_is_stays_unless_another_is_clearly_better() -> None:
    """Nobody makes a topic anew to have 12 partitions instead of 37, or fewer."""
    even = dict.fromkeys(range(37 * 64), 1)
    assert recommend(candidates(even, 0, 2, measured(even, 37)), 37) is None
    few = candidates(even, 0, 3, measured(even, 2))  # a worker has none
    best = recommend(few, 2)
    assert best is not None
    assert best.partitions == 3


@pytest.mark.slow
def test_recommended_counts_are_ones_that_a_person_would_choose() -> None:
    """Powers of two, a dozen and its doubles, tens: never 37, and never less than there are."""
    luck = random.Random(3)
    advised = 0
    for _ in range(40):
        workers, now = luck.randint(1, 7), luck.randint(1, 60)
        by_hash = {luck.randrange(PERIOD): int(luck.paretovariate(0.9) * 10) for _ in range(60)}
        best = recommend(candidates(by_hash, 0, workers, measured(by_hash, now)), now)
        if best is not None:
            advised += 1
            count = best.partitions
            assert count > now
            assert count % 10 == 0 or (count // (3 if count % 3 == 0 else 1)).bit_count() == 1
    assert advised > 5


def test_messages_without_a_key_make_everything_more_even() -> None:
    """They go anywhere."""
    keyed = candidates({7: 100}, 0, 2, {0: 1, 1: 1, 2: 1})[0]
    mixed = candidates({7: 100}, 900, 2, {0: 1, 1: 1, 2: 1})[0]
    assert (keyed.imbalance, mixed.imbalance) == (2.0, 1.1)
