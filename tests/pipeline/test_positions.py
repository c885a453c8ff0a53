"""Positions: what is asked for, what a batch takes, and how ranges are cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.errors import InvalidArgument
from keylane_spark.source import checkpoint_format as checkpoint
from keylane_spark.source import positions as pos
from keylane_spark.source.checkpoint_format import Identity
from keylane_spark.source.positions import Range


def test_what_spark_keeps_is_what_comes_back() -> None:
    positions = {"orders": {0: 17, 10: 1, 2: 3}, "audits": {0: 5}}
    identities = {
        "orders": Identity(7, 8, {2: 9}, {0: 1, 2: 1, 10: 4}),
        "audits": Identity(5, 6, ledgers={0: 1}),
    }
    shown = {"audits": {"0": 5}, "orders": {"0": 17, "2": 3, "10": 1}}
    assert checkpoint.dump_positions(positions) == shown
    dumped = checkpoint.dump(positions, identities)
    assert {topic: dumped[topic] for topic in positions} == shown
    assert checkpoint.load(json.loads(json.dumps(dumped))) == (positions, identities)
    assert [identities["orders"].moves(partition) for partition in (0, 2)] == [8, 9]


def test_a_checkpoint_of_something_else_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="is not an offset of keylane"):
        checkpoint.load({"index": 3})
    with pytest.raises(InvalidArgument, match="is not an offset of keylane"):
        checkpoint.load({"orders": {"0": 5}, "#identity": {"orders": {"topic": 7}}})
    with pytest.raises(InvalidArgument, match=r"which topic 'orders' .* an older Keylane.*new checkpoint"):
        checkpoint.load({"orders": {"0": 5}, "orders#sought": {"0": 1}})


def test_only_what_lies_between_is_read() -> None:
    start = {"orders": {0: 5, 1: 7}}
    end = {"orders": {0: 9, 1: 7, 2: 4}}
    assert pos.ranges(start, end) == [Range("orders", 0, 5, 9)]


def test_larger_ranges_are_cut_into_more_pieces() -> None:
    pieces = pos.split([Range("a", 0, 1, 31), Range("a", 1, 1, 11)], 4)
    assert pieces == [
        Range("a", 0, 1, 11),
        Range("a", 0, 11, 21),
        Range("a", 0, 21, 31),
        Range("a", 1, 1, 11),
    ]


def test_as_many_ranges_as_asked_for_are_left_alone() -> None:
    whole = [Range("a", 0, 1, 31), Range("a", 1, 1, 11)]
    assert pos.split(whole, 2) == whole


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(1, 50))
def test_pieces_are_the_whole_again_and_none_is_empty(sizes: list[int], least: int) -> None:
    whole = [Range("a", at, 10, 10 + size) for at, size in enumerate(sizes)]
    pieces = pos.split(whole, least)
    assert all(piece.size > 0 for piece in pieces)
    for range_ in whole:
        own = [piece for piece in pieces if piece.partition == range_.partition]
        assert [own[0].start, *(piece.end for piece in own)] == [
            *(piece.start for piece in own),
            range_.end,
        ]


def test_a_batch_takes_of_each_partition_in_proportion_to_what_waits() -> None:
    start = {"orders": {0: 1, 1: 1, 2: 9}}
    end = {"orders": {0: 301, 1: 101, 2: 9}}
    assert pos.admit(start, end, 100) == {"orders": {0: 76, 1: 26, 2: 9}}


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=12), st.integers(1, 3_000))
def test_a_batch_is_as_large_as_allowed_and_every_backlog_ends(waiting: list[int], rows: int) -> None:
    start = {"a": dict.fromkeys(range(len(waiting)), 1)}
    end = {"a": {at: 1 + size for at, size in enumerate(waiting)}}
    admitted = pos.admit(start, end, rows)
    taken = [admitted["a"][at] - 1 for at in range(len(waiting))]
    assert sum(taken) == min(rows, sum(waiting))
    assert all(0 <= some <= size for some, size in zip(taken, waiting, strict=True))


def test_a_small_backlog_beside_a_large_one_is_not_forgotten() -> None:
    at, end = {"a": {0: 1, 1: 1}}, {"a": {0: 100_001, 1: 2}}
    for _ in range(10_001):
        if at["a"][1] == 2:
            break
        at = pos.admit(at, end, 10)
    assert at["a"][1] == 2
