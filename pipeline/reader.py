"""spark.read: a topic, or its journal, as it is now."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from client import AsyncClient
from pipeline import seek
from pipeline.columns import check_columns
from pipeline.offsets import Range
from pipeline.options import ReadOptions
from pipeline.piece import Piece, share_out
from pipeline.pushdown import Narrowing, Span
from pipeline.remote import Remote


class BatchReader(DataSourceReader):
    """Reads the log from where was asked for to its end; with a subscription what that is owed.

    Nothing is drained. Spark makes one on the driver to plan, and its copies read on executors.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = check_columns(options, schema)
        self._narrowing = Narrowing(times=not options.journal)

    def partitions(self) -> Sequence[InputPartition]:
        """Shares of what there is to read: of a large partition one or several, of small ones many in one."""
        with Remote(self._options.connection) as remote:
            found = [remote.call(self._plan, remote.client, topic) for topic in self._options.topics]
        return share_out([piece for pieces in found for piece in pieces], self._options.min_partitions)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a share."""
        from pipeline.pieces import read_share  # it takes half a second, which those who plan need not wait

        return read_share(self._options, self._columns, partition)

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
        ends = [seek.end_in(topic, bounds, options.end) for bounds in all_bounds]
        left = await asyncio.gather(
            *(
                self._left(client, topic, bounds, start, end)
                for bounds, start, end in zip(all_bounds, starts, ends, strict=True)
            )
        )
        return [
            Piece(Range(topic, bounds.partition, *span), bounds.dense, bounds.incarnation)
            for bounds, spans in zip(all_bounds, left, strict=True)
            for span in spans
        ]

    async def _left(
        self, client: AsyncClient, topic: str, bounds: seek.Bounds, start: int, end: int
    ) -> list[Span]:
        """What the query's filters leave of a range of a partition."""
        if not self._narrowing.has(topic, bounds.partition):
            return []
        left = self._narrowing.offsets(start, end)
        times = self._narrowing.times()
        if times is None or not left:
            return left
        first = await seek.first_at(client, topic, bounds, left[0].start, left[-1].end, times.start)
        stop = await seek.first_at(client, topic, bounds, first, left[-1].end, times.end)
        return self._narrowing.offsets(first, stop)


class FilteredReader(BatchReader):
    """One that Spark tells of the filters of the query."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Read only where the rows are; the filters come back that Spark has to hold rows against."""
        return list(self._narrowing.take(filters))
