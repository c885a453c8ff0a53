"""What the sources of streaming queries share: how a batch is limited, reported and read."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from keylane_spark.plain_errors import plainly_each
from keylane_spark.source.batch_limits import BatchLimiter, Read
from keylane_spark.source.checkpoint_format import dump_positions
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.positions import Positions, ranges
from keylane_spark.source.schema import check_columns


class StreamBase(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming source, on the driver and, as copies of it, on executors."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = check_columns(options, schema)
        self._target: Positions | None = None  # where a query with availableNow ends
        self._limiter = BatchLimiter(options.limits)
        self._latest: Positions = {}
        self._lag = 0

    def getDefaultReadLimit(self) -> ReadLimit:
        """What tells a batch that is limited from one that Spark wants to have all; all limits are ours."""
        limits = self._options.limits
        if limits.max_offsets is None and limits.max_bytes is None and limits.min_offsets is None:
            return ReadAllAvailable()
        return ReadMaxRows(limits.max_offsets or 2**53)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Where the topics end, and the lag: what will be left to read when the batch is done."""
        return {**dump_positions(self._latest), "#lag": self._lag} if self._latest else None

    @plainly_each
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a share, on an executor."""
        from keylane_spark.source.read_piece import read_share  # half a second, which planning need not wait

        return read_share(self._options, self._columns, partition)

    def end_of_batch(self, begin: Positions, latest: Positions, limit: ReadLimit, read: Read) -> Positions:
        """Where the next batch ends: within the limits, and with availableNow not beyond the target."""
        self._latest = latest
        end = _later(begin, latest, self._target)
        if not isinstance(limit, ReadAllAvailable):
            end = self._limiter.end(begin, end, read, wait=self._target is None)
        self._lag = sum(range_.size for range_ in ranges(end, latest))
        return end


def _later(start: Positions, latest: Positions, target: Positions | None) -> Positions:
    """The latest, or the target if that comes first, but nowhere before the start."""
    wanted = latest if target is None else target
    return {
        topic: {
            partition: max(at, min(wanted.get(topic, {}).get(partition, at), latest[topic][partition]))
            for partition, at in of.items()
        }
        for topic, of in start.items()
    }
