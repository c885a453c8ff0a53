"""Placement: even, with the fewest moves, and calm however much the loads jitter."""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane import wire
from keylane_broker.cluster import placement
from keylane_broker.cluster.placement import Memory, place, relieve, rest
from keylane_broker.engine.values import Place

Owners = dict[Place, str]
Loads = dict[Place, float]


class Cluster(NamedTuple):
    topics: dict[str, int]
    owners: Owners
    workers: list[str]
    loads: Loads
    stay: list[Place]


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Any state a controller can find: dead owners, deleted topics, orphans, a crowded worker."""
    topics = draw(st.dictionaries(st.sampled_from(["a", "b", "c", "orders"]), st.integers(1, 12), max_size=4))
    workers = draw(st.lists(st.sampled_from([f"w{n}" for n in range(7)]), min_size=1, unique=True))
    known = [(topic, number) for topic, count in topics.items() for number in range(count)]
    anyone = st.sampled_from([*workers, workers[0], "dead", ""])
    owners = {one: owner for one in known if (owner := draw(anyone)) or draw(st.booleans())}
    owners |= {("gone", number): draw(anyone) for number in range(draw(st.integers(0, 3)))}
    owners |= {(topic, count + 1): draw(anyone) for topic, count in topics.items()}
    loads = {one: draw(st.sampled_from([0.0, 1.0, 2.5, 40.0])) for one in known if draw(st.booleans())}
    stay = [one for one in known if draw(st.integers(0, 3)) == 0]
    return Cluster(topics, owners, workers, loads, stay)


def partitions(topics: Mapping[str, int]) -> list[Place]:
    return [(topic, number) for topic, count in topics.items() for number in range(count)]


def after(owners: Mapping[Place, str], moves: Iterable[wire.Move]) -> Owners:
    """Apply moves; each partition moves once, from where it is, to somewhere else."""
    result, seen = dict(owners), set()
    for move in moves:
        where = (move.topic, move.partition)
        assert where not in seen
        assert result.get(where, "") == move.source != move.target
        assert move.reason
        seen.add(where)
        result[where] = move.target
    return result


def counts(owners: Mapping[Place, str], workers: Collection[str]) -> dict[str, int]:
    counter = Counter(owners.values())
    return {worker: counter[worker] for worker in workers}


def assert_even(topics: Mapping[str, int], owners: Mapping[Place, str], workers: Collection[str]) -> None:
    assert all(owners[one] in set(workers) for one in partitions(topics))
    held = counts({one: owners[one] for one in partitions(topics)}, workers).values()
    assert max(held) - min(held) <= 1


def fewest(topics: Mapping[str, int], owners: Mapping[Place, str], workers: Collection[str]) -> int:
    """Worked out another way: whoever has most keeps one more than others; the rest of the sum must move."""
    known = partitions(topics)
    held = counts({one: owners.get(one, "") for one in known}, workers)
    fair, spare = divmod(len(known), len(workers))
    most = sorted(held.values(), reverse=True)
    kept = sum(min(count, fair + (rank < spare)) for rank, count in enumerate(most))
    return len(known) - kept


@pytest.mark.slow
@given(cluster=clusters())
@settings(max_examples=200)
def test_every_partition_is_owned_and_counts_are_even_with_the_fewest_moves(cluster: Cluster) -> None:
    topics, owners, workers, loads, stay = cluster
    moves = place(topics, owners, workers, loads, stay=stay)
    placed = after(owners, moves)
    assert_even(topics, placed, workers)
    assert len(moves) == fewest(topics, owners, workers)
    assert place(topics, placed, workers, loads, stay=stay) == []
    assert place(topics, placed, workers) == []


@pytest.mark.slow
@given(cluster=clusters())
def test_only_orphans_and_the_excess_of_overfull_workers_move(cluster: Cluster) -> None:
    topics, owners, workers, loads, stay = cluster
    held = counts({one: owners.get(one, "") for one in partitions(topics)}, workers)
    fair = sum(topics.values()) // len(workers)
    moves = place(topics, owners, workers, loads, stay=stay)
    given_up = Counter(move.source for move in moves)
    for worker in workers:
        assert given_up[worker] in {max(0, held[worker] - fair), max(0, held[worker] - fair - 1)}


@pytest.mark.slow
@given(cluster=clusters(), seed=st.integers(0, 99))
def test_the_order_of_what_it_is_told_does_not_matter(cluster: Cluster, seed: int) -> None:
    mixed = random.Random(seed)

    def stir(facts: dict[Place, float]) -> dict[Place, float]:
        return dict(mixed.sample(list(facts.items()), len(facts)))

    topics, owners, workers, loads, stay = cluster
    loads = {one: load * 0.1 for one, load in loads.items()}  # sums of these depend on their order
    other_owners = dict(mixed.sample(list(owners.items()), len(owners)))
    other_topics = dict(mixed.sample(list(topics.items()), len(topics)))
    other_workers = mixed.sample(workers, len(workers))
    assert place(topics, owners, workers, loads, stay=stay) == place(
        other_topics, other_owners, frozenset(other_workers), stir(loads), stay=set(stay)
    )
    loads = {one: load * 100 for one, load in loads.items()}
    ours, theirs = Memory(), Memory()
    for _ in range(4):
        moves, ours = relieve(owners, workers, loads, ours)
        same, theirs = relieve(other_owners, other_workers, stir(loads), theirs)
        assert (moves, ours) == (same, theirs)


@pytest.mark.slow
@given(cluster=clusters())
def test_partitions_that_should_stay_move_only_when_nothing_else_is_left(cluster: Cluster) -> None:
    topics, owners, workers, loads, stay = cluster
    held = {one: owners.get(one, "") for one in partitions(topics)}
    staying = counts({one: owner for one, owner in held.items() if one in stay}, workers)
    fair, spare = divmod(len(held), len(workers))
    too_many = sum(max(0, count - fair) for count in staying.values())
    must = too_many - min(spare, sum(count > fair for count in staying.values()))
    moves = place(topics, owners, workers, loads, stay=stay)
    assert sum((move.topic, move.partition) in stay and move.source in workers for move in moves) == must


@pytest.mark.slow
@given(cluster=clusters())
def test_an_overfull_worker_gives_up_what_is_least_loaded(cluster: Cluster) -> None:
    topics, owners, workers, loads, _ = cluster
    moves = place(topics, owners, workers, loads)
    moved = {(move.topic, move.partition) for move in moves}
    for worker in workers:
        has = [one for one in partitions(topics) if owners.get(one) == worker]
        given = [loads.get(one, 0.0) for one in has if one in moved]
        kept = [loads.get(one, 0.0) for one in has if one not in moved]
        assert max(given, default=0.0) <= min(kept, default=1e9)


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    workers=st.integers(1, 12),
)
def test_fresh_topics_are_each_spread_evenly(sizes: list[int], workers: int) -> None:
    topics = {f"t{index}": size for index, size in enumerate(sizes)}
    names = [f"w{number}" for number in range(workers)]
    owners = after({}, place(topics, {}, names))
    for topic in topics:
        held = counts({one: owner for one, owner in owners.items() if one[0] == topic}, names).values()
        assert max(held) - min(held) <= 1
    topics["new"], before = 24, owners
    moves = place(topics, before, names)
    assert len(moves) == 24
    new = counts({(move.topic, move.partition): move.target for move in moves}, names).values()
    assert max(new) - min(new) <= 2  # counts go first, within one


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=8),
)
def test_a_join_fills_one_worker_and_a_leave_empties_one(
    sizes: list[int], events: list[tuple[bool, int]]
) -> None:
    topics = {f"t{index}": size for index, size in enumerate(sizes)}
    workers = {"w0", "w1"}
    owners = after({}, place(topics, {}, workers))
    for joins, number in events:
        name = f"w{number}"
        if joins == (name in workers) or (not joins and len(workers) == 1):
            continue
        workers ^= {name}
        moves = place(topics, owners, workers)
        if joins:
            assert {move.target for move in moves} <= {name}
            assert len(moves) == sum(sizes) // len(workers)
        else:
            assert [move.source for move in moves] == [name] * Counter(owners.values())[name]
        owners = after(owners, moves)
        assert_even(topics, owners, workers)


def test_without_workers_nothing_moves() -> None:
    assert place({"a": 3}, {("a", 0): "w1"}, []) == []
    assert relieve({("a", 0): "w1"}, [], {("a", 0): 500.0}, Memory())[0] == []


def test_among_equals_the_topic_goes_of_which_there_is_most() -> None:
    owners = {("a", 0): "w1", ("b", 0): "w1", ("b", 1): "w1", ("b", 2): "w1", ("c", 0): "w1", ("c", 1): "w1"}
    moves = place({"a": 1, "b": 3, "c": 2}, owners, ["w1", "w2"])
    assert [(move.topic, move.partition) for move in moves] == [("b", 0), ("b", 1), ("c", 0)]


def test_what_moves_goes_where_its_topic_has_fewest() -> None:
    owners = {("a", 0): "w1", ("a", 1): "w1", ("b", 0): "w2", ("b", 1): "w2"}
    owners |= {("a", 2): "dead", ("b", 2): "dead"}
    moves = place({"a": 3, "b": 3}, owners, ["w1", "w2"])
    assert [(move.topic, move.target) for move in moves] == [("a", "w2"), ("b", "w1")]


def test_a_busy_orphan_goes_to_the_less_loaded_of_two_like_workers() -> None:
    owners = {("a", 0): "w1", ("a", 1): "w2", ("b", 0): "dead", ("b", 1): "dead"}
    loads = {("a", 0): 90.0, ("a", 1): 10.0, ("b", 0): 5.0, ("b", 1): 50.0}
    moves = place({"a": 2, "b": 2}, owners, ["w1", "w2"], loads)
    assert {move.partition: move.target for move in moves} == {1: "w2", 0: "w1"}


def test_reasons_are_for_people() -> None:
    topics = {"a": 6}
    owners = {("a", 0): "w1", ("a", 1): "w1", ("a", 2): "w1", ("a", 3): "w1", ("a", 4): "gone"}
    reasons = {move.partition: move.reason for move in place(topics, owners, ["w1", "w2"])}
    assert reasons == {0: "w2 had none", 4: "gone is gone or draining", 5: "it had no owner"}
    owners = {("a", number): "w1" for number in range(5)} | {("a", 5): "w2"}
    assert [move.reason for move in place(topics, owners, ["w1", "w2"])] == ["even counts"] * 2


# Load moves.


class Simulation:
    """A cluster whose partitions have true loads, and whose controller sees them jitter."""

    def __init__(
        self, seed: int, workers: int, partitions: int, *, noise: float, memory: float = 0.0
    ) -> None:
        self.random = random.Random(seed)
        self.workers = [f"w{number:02}" for number in range(workers)]
        self.topics = {f"t{number}": partitions // 4 for number in range(4)}
        self.owners = after({}, place(self.topics, {}, self.workers))
        self.true: Loads = dict.fromkeys(sorted(self.owners), 0.0)
        self.memory = memory
        self.noises = [self.random.lognormvariate(-(noise**2) / 2, noise) for _ in range(5_000)]
        self.jitter = dict.fromkeys(self.true, 1.0)
        self.state = Memory()
        self.moved: Counter[Place] = Counter()
        self.moves: list[list[wire.Move]] = []  # of each cycle

    def zipf(self) -> None:
        ranks = self.random.sample(range(len(self.true)), len(self.true))
        self.true = {one: 1000 / (rank + 1) for one, rank in zip(self.true, ranks, strict=True)}

    def skew(self) -> None:
        self.true = {one: 20 * self.random.lognormvariate(0, 1) for one in self.true}

    def run(self, cycles: int) -> int:
        """Let cycles pass; answers how many load moves there were (an exchange is one)."""
        for _ in range(cycles):
            news = self.random.choices(self.noises, k=len(self.jitter))
            for (one, jitter), new in zip(self.jitter.items(), news, strict=True):
                self.jitter[one] = self.memory * jitter + (1 - self.memory) * new
            seen = {one: load * self.jitter[one] for one, load in self.true.items()}
            moves, self.state = relieve(self.owners, self.workers, seen, self.state)
            self.moves.append(moves)
            if moves:
                assert len(moves) <= 2
                self.owners = after(self.owners, moves)
                self.moved.update((move.topic, move.partition) for move in moves)
                assert_even(self.topics, self.owners, self.workers)
        return sum(bool(moves) for moves in self.moves[-cycles:])

    def busy(self) -> dict[str, float]:
        busy = dict.fromkeys(self.workers, 0.0)
        for one, owner in self.owners.items():
            busy[owner] += self.true[one]
        return busy

    def excess(self) -> float:
        """How much busier the busiest worker is than the best placement with even counts could have it."""
        loads = sorted(self.true.values())
        company = len(loads) // len(self.workers) - 1  # the hottest partition's, at best the idlest there are
        best = max(sum(loads) / len(self.workers), loads[-1] + sum(loads[:company]))
        return max(self.busy().values()) / best - 1


NOISES = pytest.mark.parametrize(
    ("noise", "memory"), [(0.2, 0.0), (0.5, 0.0), (0.5, 0.8)], ids=["calm", "wild", "wild, with memory"]
)
SHAPES = [(2, 8), (4, 16)]


@pytest.mark.slow
@NOISES
@pytest.mark.parametrize("skewed", [Simulation.zipf, Simulation.skew], ids=["zipf", "lognormal"])
def test_ten_thousand_cycles_of_jitter_do_not_thrash(
    skewed: Callable[[Simulation], None], noise: float, memory: float
) -> None:
    """Jitter with memory looks like a change for a while, and may be followed now and then."""
    for seed, (workers, size) in enumerate(SHAPES):
        cluster = Simulation(seed, workers, size, noise=noise, memory=memory)
        skewed(cluster)
        early, late = cluster.run(500), cluster.run(10_000 if size == 16 else 1_500)
        assert early <= size
        assert late <= (12 if memory else 5)
        assert max(cluster.moved.values(), default=0) <= (5 if memory else 3)


@NOISES
def test_equal_loads_that_jitter_move_nothing(noise: float, memory: float) -> None:
    for seed in range(3):
        cluster = Simulation(seed, 4, 16, noise=noise, memory=memory)
        cluster.true = dict.fromkeys(cluster.true, 20.0)
        assert cluster.run(1_000) == 0


@pytest.mark.slow
def test_skewed_loads_come_close_to_the_best() -> None:
    for seed in range(3):
        for skewed in (Simulation.zipf, Simulation.skew):
            cluster = Simulation(seed, 4, 64, noise=0.2)
            skewed(cluster)
            cluster.run(500)
            assert cluster.excess() < 0.15


def test_a_topic_that_becomes_hot_is_followed_and_then_all_is_quiet() -> None:
    for seed in range(2):
        cluster = Simulation(seed, 4, 64, noise=0.2)
        cluster.true = dict.fromkeys(cluster.true, 10.0)
        cluster.run(100)
        hot = [one for one, owner in cluster.owners.items() if owner == "w01"][:8]
        cluster.true |= dict.fromkeys(hot, 60.0)
        before = cluster.excess()
        moves = cluster.run(300)
        assert before > 0.5
        assert cluster.excess() < 0.2
        assert 0 < moves <= 12
        assert cluster.run(500) <= 1


def test_many_small_partitions_move_one_by_one() -> None:
    cluster = Simulation(1, 4, 240, noise=0.1)
    cluster.true = {one: 10.0 if cluster.owners[one] == "w00" else 2.0 for one in cluster.true}
    cluster.run(400)
    busy = cluster.busy()
    assert max(busy.values()) - min(busy.values()) < 0.25 * sum(busy.values()) / 4


@pytest.mark.slow
def test_a_single_hot_partition_stays_and_is_freed_of_company() -> None:
    for noise in (0.0, 0.1, 0.3):
        cluster = Simulation(3, 3, 24, noise=noise)
        hot = ("t0", 0)
        cluster.true = dict.fromkeys(cluster.true, 8.0) | {hot: 700.0}
        owner = cluster.owners[hot]
        assert cluster.run(800) == 0  # the others are all alike: nothing to gain
        friends = [one for one, worker in cluster.owners.items() if worker == owner and one != hot]
        cluster.true |= dict.fromkeys(friends[:2], 90.0)
        assert cluster.run(800) in {2, 3}
        assert cluster.moved[hot] == 0
        assert not any(cluster.owners[one] == owner for one in friends[:2])


def test_two_hot_partitions_part() -> None:
    owners = {("a", 0): "w1", ("a", 1): "w1", ("a", 2): "w2", ("a", 3): "w2"}
    loads = {("a", 0): 300.0, ("a", 1): 250.0, ("a", 2): 10.0, ("a", 3): 5.0}
    moves, _ = cycles(owners, ["w1", "w2"], loads, 3)
    assert [(move.partition, move.source, move.target) for move in moves] == [
        (0, "w1", "w2"),
        (3, "w2", "w1"),
    ]
    assert moves[0].reason == "w1 has 550 ms/s of load, w2 15"


def cycles(
    owners: Owners, workers: list[str], loads: Loads, count: int, memory: Memory | None = None
) -> tuple[list[wire.Move], Memory]:
    """Some cycles that see the same loads; only the last of them may move anything."""
    memory = memory or Memory()
    for left in range(count, 0, -1):
        moves, memory = relieve(owners, workers, loads, memory)
        assert left == 1 or not moves
    return moves, memory


UNEVEN: Loads = {("a", 0): 60.0, ("a", 1): 50.0, ("a", 2): 5.0}
OWNERS: Owners = {("a", 0): "w1", ("a", 1): "w1", ("a", 2): "w2"}


def test_one_moves_alone_when_counts_allow_it() -> None:
    moves, memory = cycles(OWNERS, ["w1", "w2"], UNEVEN, placement.PATIENCE)
    assert [(move.partition, move.target) for move in moves] == [(0, "w2")]
    assert memory.moved == {("a", 0): placement.REST}


def test_a_gap_must_last() -> None:
    _, memory = cycles(OWNERS, ["w1", "w2"], UNEVEN, placement.PATIENCE - 1)
    level: Loads = UNEVEN | {("a", 2): 500.0}  # weighs much so early: now w2 is the busier
    moves, memory = relieve(OWNERS, ["w1", "w2"], level, memory)
    assert not moves
    assert memory.uneven == {"w2": 1}
    assert not cycles(OWNERS, ["w1", "w2"], UNEVEN, 10, memory)[0]


def test_a_gap_below_the_floor_or_a_fifth_of_the_mean_is_left_alone() -> None:
    small = {one: load * 0.19 for one, load in UNEVEN.items()}  # all of a gap, but 20 ms/s at most
    assert not cycles(OWNERS, ["w1", "w2"], small, 20)[0]
    owners = {("a", number): f"w{number % 2}" for number in range(8)}
    loads = {one: 100.0 + 19 * (one[1] % 2) for one in owners}  # 76 ms/s, 17 % of the mean
    assert not cycles(owners, ["w0", "w1"], loads, 200)[0]
    loads = {one: 100.0 + 30 * (one[1] % 2) for one in owners}  # 26 %
    moves, memory = relieve(owners, ["w0", "w1"], loads, Memory())
    for _ in range(100):
        moves, memory = (moves, memory) if moves else relieve(owners, ["w0", "w1"], loads, memory)
    assert len(moves) == 2


def test_after_a_move_it_waits_and_the_partition_rests() -> None:
    _, memory = cycles(OWNERS, ["w1", "w2"], UNEVEN, placement.PATIENCE)
    owners = OWNERS | {("a", 0): "w2"}
    turned: Loads = {("a", 0): 9_000.0, ("a", 1): 1.0, ("a", 2): 4_000.0}
    moves, memory = cycles(owners, ["w1", "w2"], turned, placement.WAIT, memory)
    assert not moves
    assert memory.loads["a", 0].mean == 60.0  # what is seen meanwhile is not believed
    assert not cycles(owners, ["w1", "w2"], turned, placement.PATIENCE - 1, memory)[0]
    still = 0
    for _ in range(placement.REST + 200):
        moves, memory = relieve(owners, ["w1", "w2"], turned, memory)
        if any(move.partition == 0 for move in moves):
            break
        still += 1
        owners = after(owners, moves)
    assert still >= placement.REST - placement.WAIT - 1


def test_a_partition_moved_by_hand_rests_too() -> None:
    memory = rest(Memory(), [("a", 0)])
    assert memory.wait == placement.WAIT
    moves, _ = cycles(OWNERS, ["w1", "w2"], UNEVEN, placement.WAIT + placement.PATIENCE, memory)
    assert [move.partition for move in moves] == [1]


def test_a_worker_that_cannot_be_helped_does_not_stand_in_the_way_of_others() -> None:
    owners = {("a", 0): "w1", ("a", 1): "w1", ("b", 0): "w2", ("b", 1): "w2", ("c", 0): "w3", ("c", 1): "w3"}
    loads = {("a", 0): 900.0, ("b", 0): 200.0, ("b", 1): 180.0}
    moves, _ = cycles(owners, ["w1", "w2", "w3"], loads, placement.PATIENCE)
    assert [(move.topic, move.source, move.target) for move in moves] == [
        ("b", "w2", "w3"),
        ("c", "w3", "w2"),
    ]


def test_what_is_gone_is_forgotten() -> None:
    _, memory = relieve(OWNERS, ["w1", "w2"], UNEVEN | {("gone", 1): 5.0}, Memory())
    assert set(memory.loads) == set(UNEVEN)
    _, memory = relieve({("a", 0): "w1"}, ["w1", "w2"], UNEVEN, memory)
    assert set(memory.loads) == {("a", 0)}
    for _ in range(600):
        _, memory = relieve({("a", 0): "w1"}, ["w1"], {}, memory)
    assert memory.loads == {}


@pytest.mark.slow
def test_a_hundred_workers_and_ten_thousand_partitions_through_joins_leaves_and_drift() -> None:
    chance = random.Random(4)
    topics = {f"t{number}": 40 for number in range(250)}
    workers = {f"w{number:03}" for number in range(100)}
    owners = after({}, place(topics, {}, workers))
    true = {one: chance.lognormvariate(0, 1.5) for one in owners}
    memory, load_moves = Memory(), 0
    for event in range(9):
        if event % 3 == 0:
            workers -= set(chance.sample(sorted(workers), chance.choice([1, 1, 5, 30])))
        elif event % 3 == 1:
            workers |= {f"w{chance.randrange(100, 200)}" for _ in range(chance.choice([1, 2, 25]))}
        else:
            name = f"t{event % 7}"
            topics[name] += 8
            true |= {one: true.get(one, 1.0) * chance.lognormvariate(0, 0.5) for one in partitions(topics)}
        minimum = fewest(topics, owners, workers)
        moves = place(topics, owners, workers, true, stay=memory.moved)
        assert len(moves) == minimum
        owners = after(owners, moves)
        assert_even(topics, owners, workers)
        for _ in range(10):
            noise = chance.choices(range(70, 131), k=len(true))
            seen = {
                one: load * percent / 100 for (one, load), percent in zip(true.items(), noise, strict=True)
            }
            moves, memory = relieve(owners, workers, seen, memory)
            load_moves += bool(moves)
            owners = after(owners, moves) if moves else owners
        assert_even(topics, owners, workers)
        assert place(topics, owners, workers, true) == []
    assert 0 < load_moves <= 90 / (placement.WAIT + placement.PATIENCE) + 1
