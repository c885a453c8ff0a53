"""spark.read: a topic, or its journal, as it is now."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from keylane import AsyncClient
from keylane.errors import TopicNotFound
from keylane_spark.background_client import BackgroundClient
from keylane_spark.plain_errors import plainly, plainly_each
from keylane_spark.source.data_loss import few
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.piece import Piece, share_out
from keylane_spark.source.positions import Range
from keylane_spark.source.pushdown import Narrowing, Span
from keylane_spark.source.schema import check_columns
from keylane_spark.source.start import Bounds, first_at, limits


class BatchReader(DataSourceReader):
    """Reads the log from where was asked for to its end; with a subscription what that is owed.

    Nothing is drained. Spark makes one on the driver to plan, and its copies read on executors.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = check_columns(options, schema)
        self._narrowing = Narrowing(times=not options.journal)

    @plainly
    def partitions(self) -> Sequence[InputPartition]:
        """Shares of what there is to read: of a large partition one or several, of small ones many in one."""
        with BackgroundClient(self._options.connection) as remote:
            topics = remote.call(topics_of, remote.client, self._options)
            found = [remote.call(self._plan, remote.client, topic) for topic in topics]
        return share_out([piece for pieces in found for piece in pieces], self._options.min_partitions)

    @plainly_each
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a share."""
        from keylane_spark.source.read_piece import (
            read_share,  # it takes half a second, which those who plan need not wait
        )

        return read_share(self._options, self._columns, partition)

    async def _plan(self, client: AsyncClient, topic: str) -> list[Piece]:
        options = self._options
        said = await client.offsets(topic, options.subscription)
        chosen = options.selection.of(topic, len(said))
        all_bounds = [Bounds(said[partition], journal=options.journal) for partition in chosen]
        starts, ends = await limits(client, topic, all_bounds, len(said), options)
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
        self, client: AsyncClient, topic: str, bounds: Bounds, start: int, end: int
    ) -> list[Span]:
        """What the query's filters leave of a range of a partition."""
        if not self._narrowing.has(topic, bounds.partition):
            return []
        left = self._narrowing.offsets(start, end)
        times = self._narrowing.times()
        if times is None or not left:
            return left
        first = await first_at(client, topic, bounds, left[0].start, left[-1].end, times.start)
        stop = await first_at(client, topic, bounds, first, left[-1].end, times.end)
        return self._narrowing.offsets(first, stop)


class FilteredReader(BatchReader):
    """One that Spark tells of the filters of the query."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Read only where the rows are; the filters come back that Spark has to hold rows against."""
        return list(self._narrowing.take(filters))


async def topics_of(client: AsyncClient, options: ReadOptions) -> list[str]:
    """The topics that a batch reads: those that were named, or those that match now."""
    pattern = options.selection.pattern
    if pattern is None:
        return options.selection.topics
    there = await client.topics()
    found = [topic for topic in there if options.selection.covers(topic)]
    if not found:
        raise TopicNotFound(
            f"no topic matches option 'subscribePattern', {pattern!r}, which must match the whole name; "
            f"there {'are ' + few(there) if there else 'is none'}"
        )
    return found
