"""spark.read: a topic, or its journal, as it is now."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from client import AsyncClient
from pipeline import seek
from pipeline.columns import check_columns
from pipeline.offsets import Range, split
from pipeline.options import ReadOptions
from pipeline.piece import Piece
from pipeline.remote import Remote


class BatchReader(DataSourceReader):
    """Reads the log from where was asked for to its end; with a subscription what that is owed.

    Nothing is drained. Spark makes one on the driver to plan, and its copies read on executors.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = check_columns(options, schema)

    def partitions(self) -> Sequence[InputPartition]:
        """A piece for each partition, or finer."""
        with Remote(self._options.connection) as remote:
            found = [remote.call(self._plan, remote.client, topic) for topic in self._options.topics]
        ranges = [piece.range for pieces in found for piece in pieces]
        whole = {(piece.range.topic, piece.range.partition): piece for pieces in found for piece in pieces}
        return [
            Piece(range_, (of := whole[range_.topic, range_.partition]).dense, of.incarnation)
            for range_ in split(ranges, self._options.min_partitions)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a piece."""
        from pipeline.pieces import read_piece  # it takes half a second, which those who plan need not wait

        return read_piece(self._options, self._columns, partition)

    async def _plan(self, client: AsyncClient, topic: str) -> list[Piece]:
        options = self._options
        said = await client.offsets(topic, options.subscription)
        all_bounds = [seek.Bounds(one, journal=options.journal) for one in said]
        seek.check_partitions("startingOffsets", options.start, topic, len(said))
        seek.check_partitions("endingOffsets", options.end, topic, len(said))
        if options.since is None:
            starts = [
                seek.start_in(topic, bounds, options.start, fail=options.fail_on_data_loss)
                for bounds in all_bounds
            ]
        else:
            starts = await seek.since(client, topic, all_bounds, options.since)
        pieces = []
        for bounds, start in zip(all_bounds, starts, strict=True):
            range_ = Range(topic, bounds.partition, start, seek.end_in(topic, bounds, options.end))
            if range_.size:
                pieces.append(Piece(range_, bounds.dense, bounds.incarnation))
        return pieces
