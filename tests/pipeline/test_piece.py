"""What is put together for one task."""

from hypothesis import given
from hypothesis import strategies as st

from keylane_spark.source.piece import Piece, Share, share_out
from keylane_spark.source.positions import Range


def pieces_of(sizes: list[int]) -> list[Piece]:
    return [Piece(Range("orders", at, 10, 10 + size), 10 + at, 7) for at, size in enumerate(sizes)]


def sizes_of(shares: list[Share]) -> list[list[int]]:
    return [[piece.range.size for piece in share.pieces] for share in shares]


def test_small_partitions_are_read_by_one_task() -> None:
    (share,) = share_out(pieces_of([10] * 64), 1)
    assert share.pieces == pieces_of([10] * 64)


def test_small_partitions_make_as_many_tasks_as_asked_for() -> None:
    assert sizes_of(share_out(pieces_of([10] * 64), 8)) == [[10] * 8] * 8
    assert sizes_of(share_out(pieces_of([10] * 4), 8)) == [[5]] * 8


def test_large_partitions_are_read_by_a_task_each() -> None:
    assert sizes_of(share_out(pieces_of([100_000, 50, 50, 100_000]), 1)) == [[100_000], [50, 50], [100_000]]


@given(st.lists(st.integers(1, 9_000), max_size=20), st.integers(1, 40))
def test_shares_are_all_pieces_in_order_with_what_belongs_to_them(sizes: list[int], least: int) -> None:
    shares = share_out(pieces_of(sizes), least)
    found: list[Piece] = []
    for piece in (piece for share in shares for piece in share.pieces):
        if found and found[-1].range.partition == piece.range.partition:
            assert found[-1].range.end == piece.range.start
            whole = Range("orders", piece.range.partition, found[-1].range.start, piece.range.end)
            found[-1] = Piece(whole, piece.dense, piece.incarnation)
        else:
            found.append(piece)
    assert found == pieces_of(sizes)
    assert len(shares) >= min(least, len(sizes))
    for share in shares:
        assert len(share.pieces) == 1 or sum(piece.range.size for piece in share.pieces) <= 2_000
