"""Uids of rows: the same for the same rows, in whatever order and batches they come, and for no others."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane_spark.sink.uids import Counts, Uids, joined

ROWS = st.lists(st.tuples(st.sampled_from(["", "a", "ab", None]), st.sampled_from([b"", b"b", b"1:b", None])))


def uids_of(
    rows: list[tuple[str | None, bytes | None]], *cuts: int, seed: str = "query"
) -> Counter[tuple[object, str]]:
    """The uids of rows that come in batches which end at `cuts`."""
    uids = Uids(seed, 1, 0)
    found: Counter[tuple[object, str]] = Counter()
    for start, end in zip((0, *cuts), (*cuts, len(rows)), strict=True):
        some = rows[start:end]
        keys = pa.array([key for key, _ in some], pa.string())
        found.update(
            zip(some, uids.take([keys, pa.array([value for _, value in some], pa.binary())]), strict=True)
        )
    return found


@pytest.mark.slow
@given(rows=ROWS, data=st.data())
def test_a_task_makes_the_same_uids_of_the_same_rows_in_any_order(
    rows: list[tuple[str | None, bytes | None]], data: st.DataObject
) -> None:
    expected = uids_of(rows)
    assert len({uid for _, uid in expected}) == len(rows), "each row has one of its own"
    again = data.draw(st.permutations(rows))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    assert uids_of(again, *cuts) == expected


def test_another_batch_or_task_makes_other_uids() -> None:
    rows: list[tuple[str | None, bytes | None]] = [("a", b"b")] * 3
    made = [
        Uids(*seed).take([pa.array(["a"] * 3)])
        for seed in (("q", 1, 2), ("q", 1, 3), ("q", 12, 0), ("q1", 2, 0))
    ]
    assert len({uid for uids in made for uid in uids}) == 12
    assert not uids_of(rows).keys() & uids_of(rows, seed="other").keys()


def test_rows_that_differ_only_in_where_a_column_ends_are_not_the_same() -> None:
    rows = joined([pa.array(["a:1", "a", None, ""]), pa.array(["b", "1:b", "", None])])
    assert len(set(rows.to_pylist())) == 4


@given(st.lists(st.lists(st.integers(0, 9), max_size=12)))
def test_counts_are_those_of_a_plain_counter(batches: list[list[int]]) -> None:
    counts, plain = Counts(), Counter[int]()
    for batch in batches:
        expected = {}
        for place, number in enumerate(batch):
            if plain[number]:
                expected[place] = plain[number]
            plain[number] += 1
        assert dict(counts.add(np.array(batch, np.uint64))) == expected
