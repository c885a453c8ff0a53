"""What one Spark task is to read."""

from collections.abc import Sequence

import msgspec
from pyspark.sql.datasource import InputPartition

from keylane_spark.source.positions import Range, split

_SMALL = 2_000  # messages: reading them takes no longer than starting a task


class Piece(msgspec.Struct, frozen=True):
    """A range of a partition; from position `dense` on every entry has to be there.

    It is of the topic with that `incarnation`, and not of another one of its name, and was given in that
    `ledger` or before; 0: whatever there is.
    """

    range: Range
    dense: int
    incarnation: int
    ledger: int = 0


class Share(InputPartition):
    """The pieces of one task, to be read one after the other."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(None)
        self.pieces = pieces


def share_out(pieces: Sequence[Piece], least: int) -> list[Share]:
    """Cut large pieces so that there are about `least` tasks, and put small ones together; their order stays.

    The same pieces always make the same tasks.
    """
    whole = {(piece.range.topic, piece.range.partition): piece for piece in pieces}
    ranges = split([piece.range for piece in pieces], least)
    room = min(_SMALL, sum(range_.size for range_ in ranges) // least)
    shares: list[Share] = []
    taken, spare = room, len(ranges) - least
    for range_ in ranges:
        of = whole[range_.topic, range_.partition]
        piece = msgspec.structs.replace(of, range=range_)
        taken += range_.size
        if taken <= room and spare > 0:
            spare -= 1
            shares[-1].pieces.append(piece)
        else:
            shares.append(Share([piece]))
            taken = range_.size
    return shares
