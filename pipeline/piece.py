"""What one Spark task is to read."""

from pyspark.sql.datasource import InputPartition

from pipeline.offsets import Range


class Piece(InputPartition):
    """A range for one task; from position `dense` on every entry has to be there.

    It is of the topic with that `incarnation`, and not of another one of its name.
    """

    def __init__(self, range_: Range, dense: int, incarnation: int) -> None:
        super().__init__(range_)
        self.range = range_
        self.dense = dense
        self.incarnation = incarnation
