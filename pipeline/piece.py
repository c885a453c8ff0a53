"""What one Spark task is to read."""

from pyspark.sql.datasource import InputPartition

from pipeline.offsets import Range


class Piece(InputPartition):
    """A range for one task; from position `dense` on every entry has to be there."""

    def __init__(self, range_: Range, dense: int) -> None:
        super().__init__(range_)
        self.range = range_
        self.dense = dense
