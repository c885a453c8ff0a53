"""Ranges and ids: what the engine reads from a log covers what it was asked for, and no more than pays."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.wire.ledgers import id_maker
from keylane_broker.engine.entries import covering_ranges

RANGE = st.tuples(st.integers(1, 500), st.integers(0, 30)).map(lambda pair: (pair[0], pair[0] + pair[1]))
STARTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=6)


@given(st.lists(RANGE, max_size=20))
def test_covering_ranges_cover_everything_in_order_and_apart(ranges: list[tuple[int, int]]) -> None:
    merged = covering_ranges(ranges)
    for first, last in ranges:
        assert any(low <= first and last <= high for low, high in merged)
    for (_, end), (start, _) in pairwise(merged):
        assert start > end + 1


@pytest.mark.slow
@given(st.lists(RANGE, min_size=1, max_size=20))
def test_covering_ranges_read_only_small_gaps(ranges: list[tuple[int, int]]) -> None:
    wanted = {entry for first, last in ranges for entry in range(first, last + 1)}
    for first, last in covering_ranges(ranges):
        assert {first, last} <= wanted
        gap = 0
        for entry in range(first, last + 1):
            gap = 0 if entry in wanted else gap + 1
            assert gap < 16


def test_no_ranges_need_no_reading() -> None:
    assert covering_ranges([]) == []


@given(STARTS, st.integers(1, 300))
def test_an_entry_is_in_the_newest_ledger_that_had_begun(steps: list[tuple[int, int]], entry: int) -> None:
    ledger, first, starts = 0, 1, []
    for epochs, entries in steps:
        ledger += epochs
        starts.append((ledger, first))
        first += entries + 1
    id = id_maker(" ".join(f"{ledger}:{start}" for ledger, start in starts))(entry)
    begun = [ledger for ledger, start in starts if start <= entry]
    assert id == f"{begun[-1] if begun else starts[0][0]}-{entry}"


@given(STARTS)
def test_ids_increase_with_entries(steps: list[tuple[int, int]]) -> None:
    ledger, first, parts = 0, 1, []
    for epochs, entries in steps:
        ledger += epochs
        parts.append(f"{ledger}:{first}")
        first += entries + 1
    id_of = id_maker(" ".join(parts))
    ids = [tuple(map(int, id_of(entry).split("-"))) for entry in range(1, first + 5)]
    assert ids == sorted(ids)
