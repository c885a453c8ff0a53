"""Spread: a topic's partitions on one of so many workers, evenly, with few moves, whatever the loads."""

from collections import Counter
from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane_broker.cluster.placement import PATIENCE, Memory, choose_workers, place, relieve
from keylane_broker.engine.values import Place

Owners = dict[Place, str]

shapes = st.dictionaries(
    st.sampled_from("abcdef"), st.tuples(st.integers(1, 12), st.sampled_from((1, 1, 2, 3, 8))), max_size=5
)
numbers = st.integers(1, 9)


def names(count: int) -> list[str]:
    return [f"w{number}" for number in range(count)]


def placed(shapes: Mapping[str, tuple[int, int]], workers: list[str], owners: Mapping[Place, str]) -> Owners:
    """Who owns what after a placement; another one finds nothing to do."""
    topics = {topic: count for topic, (count, _) in shapes.items()}
    spreads = {topic: spread for topic, (_, spread) in shapes.items() if spread > 1}
    result = {one: owner for one, owner in owners.items() if one[0] in topics}
    for move in place(topics, owners, workers, spreads=spreads):
        assert result.get((move.topic, move.partition), "") == move.source != move.target
        result[move.topic, move.partition] = move.target
    assert place(topics, result, workers, spreads=spreads) == [], "it is calm"
    return result


def on(owners: Mapping[Place, str], topic: str) -> Counter[str]:
    """How many partitions of a topic each worker has."""
    return Counter(owner for (name, _), owner in owners.items() if name == topic)


def is_right(shapes: Mapping[str, tuple[int, int]], workers: list[str], owners: Owners) -> None:
    """Every partition is owned, focused topics are on few workers, evenly, the others fill up."""
    assert owners.keys() == {(topic, n) for topic, (count, _) in shapes.items() for n in range(count)}
    assert set(owners.values()) <= set(workers)
    totals, focused = Counter(owners.values()), Counter[str]()
    for topic, (count, spread) in shapes.items():
        if spread > 1:
            size, here = -(-len(workers) // spread), on(owners, topic)
            focused += here
            assert len(here) == min(size, count)
            assert max(here.values()) - min(here.values() if len(here) == size else [0]) <= 1
    others = {one: owner for one, owner in owners.items() if shapes[one[0]][1] == 1}
    least = min(totals[worker] for worker in workers)
    for worker in set(others.values()):
        assert totals[worker] <= least + 1, f"{worker} has an ordinary partition too many"


@pytest.mark.slow
@given(shapes, numbers)
def test_each_topic_is_on_its_share_of_the_workers_and_the_others_make_the_counts_even(
    shapes: dict[str, tuple[int, int]], count: int
) -> None:
    is_right(shapes, names(count), placed(shapes, names(count), {}))


@pytest.mark.slow
@given(shapes, numbers, numbers)
def test_workers_come_and_go_and_it_stays_so(
    shapes: dict[str, tuple[int, int]], before: int, after: int
) -> None:
    owners = placed(shapes, names(before), {})
    is_right(shapes, names(after), placed(shapes, names(after), owners))


@given(st.integers(2, 12), st.integers(2, 8), st.integers(2, 12))
def test_of_a_focused_topic_only_what_a_dead_worker_had_moves(count: int, spread: int, workers: int) -> None:
    shape = {"a": (count, spread)}
    owners = placed(shape, names(workers), {})
    size = -(-workers // spread)
    gone = owners["a", 0]
    left = [name for name in names(workers) if name != gone]
    moved = [one for one, owner in placed(shape, left, owners).items() if owner != owners[one]]
    if -(-len(left) // spread) == size:
        assert {owners[one] for one in moved} == {gone}


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 8), numbers)
def test_a_change_of_the_spread_is_followed(count: int, one: int, other: int, workers: int) -> None:
    owners = placed({"a": (count, one), "b": (5, 1)}, names(workers), {})
    changed = {"a": (count, other), "b": (5, 1)}
    is_right(changed, names(workers), placed(changed, names(workers), owners))


def test_topics_that_are_focused_do_not_all_choose_the_same_workers() -> None:
    shapes = dict.fromkeys("abcdefgh", (2, 8))
    owners = placed(shapes, names(8), {})
    assert set(Counter(owners.values()).values()) == {2}


def test_without_a_spread_the_placement_is_as_ever() -> None:
    topics, owners = {"a": 7, "b": 4}, {("a", n): "w0" for n in range(7)}
    assert place(topics, owners, names(3), spreads={"a": 1}) == place(topics, owners, names(3))


@pytest.mark.parametrize("hot", [0, 1])
def test_load_moves_stay_inside_the_chosen_workers(hot: int) -> None:
    shapes = {"a": (6, 2), "b": (8, 1)}
    workers = names(4)
    owners = placed(shapes, workers, {})
    inside = set(on(owners, "a"))
    assert inside == set(choose_workers({"a": 6, "b": 8}, owners, workers, {"a": 2})["a"])
    busiest = sorted(inside)[hot]
    loads = {one: 100.0 if owner == busiest else 1.0 for one, owner in owners.items() if one[0] == "a"}
    memory, moved = Memory(), []
    for _, _ in product(range(PATIENCE), range(4)):
        moves, memory = relieve(owners, workers, loads, memory, focused={"a"})
        for move in moves:
            assert owners[move.topic, move.partition] == move.source
            owners[move.topic, move.partition] = move.target
        moved += moves
    assert {move.topic for move in moved} == {"a"}, "one partition for another of the topic"
    assert set(on(owners, "a")) == inside
    is_right(shapes, workers, owners)
