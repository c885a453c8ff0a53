"""What of a lease is sent: of each consumer the first of its messages, as many as there is room for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane_broker.engine.portions import Portions
from keylane_broker.engine.tail import READ, Segment, Tail


def message(entry: int, size: int) -> list[str]:
    """Key, uid and about of so many characters in all."""
    return [f"k{entry % 3}", str(entry), "x" * (size - 2 - len(str(entry)))]


def read(portions: Portions, sizes: dict[int, int], stride: int) -> None:
    """Read all that it asks for."""
    while ranges := portions.next_ranges(stride):
        portions.take(
            [
                [text for entry in range(first, last + 1) for text in message(entry, sizes[entry])]
                for first, last in ranges
            ]
        )


def entries(ranges: list[tuple[int, int]]) -> list[int]:
    return [entry for first, last in ranges for entry in range(first, last + 1)]


def sent(portions: Portions, consumer: int) -> list[int]:
    rows = list(zip(*[iter(portions.found)] * 3, strict=True))
    return entries([(first, last) for index, first, last in rows if index == consumer])


def given_back(portions: Portions) -> list[int]:
    rows = list(zip(*[iter(portions.oversized)] * 4, strict=True))
    return entries([(int(first), int(last)) for _, _, first, last in rows])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shared", "exclusive", "key_shared"])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    sizes=st.lists(st.integers(10, 400), min_size=72, max_size=72),
    rooms=st.lists(st.integers(1, 1_500), min_size=3, max_size=3),
    stride=st.integers(1, 20),
)
def test_each_consumer_gets_a_prefix_up_to_its_room_and_the_rest_goes_back(
    mode: str, lengths: list[int], sizes: list[int], rooms: list[int], stride: int
) -> None:
    leased, size_of, first = list[tuple[int, int, int]](), dict[int, int](), 1
    for place, length in enumerate(lengths):
        leased.append((place % 3, first, first + length - 1))
        first += length
    size_of.update(zip(range(1, first), sizes, strict=False))
    portions = Portions(mode, 7, [part for row in leased for part in row], list(rooms))
    read(portions, size_of, stride)
    for consumer, room in enumerate(rooms):
        its = entries([(start, end) for index, start, end in leased if index == consumer])
        got = sent(portions, consumer)
        assert got == its[: len(got)]
        assert sum(size_of[entry] for entry in got[:-1]) <= room, "only the last one may be too much"
        if len(got) < len(its):
            assert sum(size_of[entry] for entry in got) >= room, "there was room for more"
    everything = sent(portions, 0) + sent(portions, 1) + sent(portions, 2) + given_back(portions)
    assert sorted(everything) == list(range(1, first))
    lanes = {"shared": {""}, "exclusive": {"="}, "key_shared": {"=k0", "=k1", "=k2"}}[mode]
    assert set(portions.oversized[::4]) <= lanes
    assert set(portions.oversized[1::4]) <= {7}


def test_all_consumers_together_get_no_more_than_a_fetch_may_read() -> None:
    count, size = 100, 60_000
    leased = [
        part for consumer in range(10) for part in (consumer, consumer * count + 1, consumer * count + count)
    ]
    portions = Portions("shared", 1, leased, [1024 * 1024] * 10)
    read(portions, dict.fromkeys(range(1, 1_001), size), 64)
    got = sum(len(sent(portions, consumer)) for consumer in range(10))
    assert READ <= got * size <= READ + 10 * size


def test_without_a_room_everything_is_sent() -> None:
    portions = Portions("key_shared", 1, [0, 1, 1_000], [None])
    read(portions, dict.fromkeys(range(1, 1_001), 60_000), 500)
    assert sent(portions, 0) == list(range(1, 1_001))
    assert portions.oversized == []


def test_what_the_log_has_lost_is_not_given_back() -> None:
    portions = Portions("key_shared", 1, [0, 1, 3], [1])
    [_] = portions.next_ranges(10)
    portions.take([["k", "1", "about", "", "", "", "k", "3", "about"]])
    assert portions.oversized == ["=k", 1, 3, 3]


def known(size: int, *, upto: int) -> Tail:
    """What a worker knows of entries 1 to `upto`, ten in each segment."""
    tail = Tail()
    for first in range(1, upto + 1, 10):
        texts = [text for entry in range(first, first + 10) for text in message(entry, size)]
        tail.segments.append(Segment(first, texts))
        tail.starts.append(first)
    return tail


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
def test_many_ranges_that_are_known_are_taken_at_once(mode: str) -> None:
    ranges = [(1, 1), (3, 4), (9, 13), (20, 20), (28, 30), (31, 31)]
    leased = [part for first, last in ranges for part in (2, first, last)]
    portions = Portions(mode, 7, leased, [None, None, 10_000])
    portions.take_known(known(100, upto=40))
    assert portions.next_ranges(100) == []
    assert portions.found == leased
    given, flat = portions.shares[2]
    assert given == [end for bounds in ranges for end in bounds]
    assert flat == [text for entry in entries(ranges) for text in message(entry, 100)]


@pytest.mark.parametrize(
    ("leased", "room", "upto"),
    [([0, 1, 1, 0, 5, 7], 399, 10), ([0, 1, 1, 0, 9, 12], None, 10), ([0, 1, 1, 1, 3, 3], None, 10)],
    ids=["there is no room", "one is not known", "others get some"],
)
def test_else_they_are_taken_one_after_the_other(leased: list[int], room: int | None, upto: int) -> None:
    portions = Portions("shared", 7, leased.copy(), [room, None])
    portions.take_known(known(100, upto=upto))
    assert portions.found == []
    assert portions.shares == {}
    assert portions.next_ranges(100) == list(zip(leased[1::3], leased[2::3], strict=True))
