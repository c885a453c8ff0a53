"""spark.readStream: a query is a subscription, drained as Spark commits.

Spark calls one of these in a process of its own beside the driver, for as long as the query runs; its copies
read on executors. The order of a batch is: its offsets go to the checkpoint, it is read and written, the
checkpoint says that it is done, latestOffset is asked for the next one. So what latestOffset starts from is
done with, and the last batch is drained too although Spark calls commit only when there is another.
"""

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
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

from keylane.errors import BrokerError
from keylane_spark.plain_errors import plainly, plainly_each
from keylane_spark.source import positions as offsets
from keylane_spark.source.batch_limits import BatchLimiter
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.piece import Piece, share_out
from keylane_spark.source.positions import Positions
from keylane_spark.source.query import Query
from keylane_spark.source.schema import check_columns


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of a streaming query."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = check_columns(options, schema)
        # Made when Spark first asks for something: only one of the copies of this object ever is the query.
        self._query: Query | None = None
        self._target: Positions | None = None  # where a query with availableNow ends
        self._latest: Positions = {}
        self._limiter = BatchLimiter(options.limits)
        self._lag = 0

    # On the driver

    def getDefaultReadLimit(self) -> ReadLimit:
        """What tells a batch that is limited from one that Spark wants to have all; all limits are ours."""
        limits = self._options.limits
        if limits.max_offsets is None and limits.max_bytes is None and limits.min_offsets is None:
            return ReadAllAvailable()
        return ReadMaxRows(limits.max_offsets or 2**53)

    @plainly
    def prepareForTriggerAvailableNow(self) -> None:
        """Note where the topics end now: the query ends there."""
        self._target = self._opened().ends()

    @plainly
    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint starts; its subscription is made here."""
        query = self._opened()
        begin = query.begin()
        return offsets.dump(begin, query.identities(begin, {}, {}))

    @plainly
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch; what lies before its start is done with."""
        query = self._opened()
        before, of = offsets.load(start)
        begin = query.resume(before, of)
        self._latest = query.latest()
        # A partition that is new since the target was noted is left to the next run.
        end = _later(begin, self._latest, self._target)
        if not isinstance(limit, ReadAllAvailable):
            end = self._limiter.end(begin, end, query.read, wait=self._target is None)
        # With nothing to do there is time to wait, and with availableNow there is no later.
        kept = offsets.common(before, begin)
        query.commit(begin, query.identities(begin, kept, of), wait=end == begin)
        self._lag = sum(range_.size for range_ in offsets.ranges(end, self._latest))
        return offsets.dump(end, query.identities(end, kept, of))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Where the topics end, and the lag: what will be left to read when the batch is done."""
        return {**offsets.dump_positions(self._latest), "#lag": self._lag} if self._latest else None

    @plainly
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Shares of what there is to read: of a large partition one or several, of small ones many in one."""
        query = self._opened()
        planned, of = offsets.load(end)
        begin, finish = query.resume(*offsets.load(start)), query.resume(planned, of)
        pieces = [
            Piece(
                range_,
                *query.bounds(range_.topic, range_.partition),
                of[range_.topic].ledgers.get(range_.partition, 0),
            )
            for range_ in offsets.ranges(begin, finish)
        ]
        return share_out(pieces, self._options.min_partitions)

    @plainly
    def commit(self, end: dict[str, Any]) -> None:
        """Let the broker forget what lies before."""
        self._opened().commit(*offsets.load(end))

    def stop(self) -> None:
        """Let others have the subscription."""
        if self._query is not None:
            self._query.close()
            self._query = None

    # On executors

    @plainly_each
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a share."""
        from keylane_spark.source.read_piece import (
            read_share,  # it takes half a second, which those who plan need not wait
        )

        return read_share(self._options, self._columns, partition)

    def _opened(self) -> Query:
        if self._query is None:
            _stop_on_sigterm()
            self._query = Query(self._options)
        self._query.check()
        return self._query


class Refused(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What there is instead of a source whose options cannot be right.

    Spark answers an error in the making of a source with one of its own; of what is asked afterwards not.
    """

    def __init__(self, error: BrokerError) -> None:
        self._error = error

    @plainly
    def getDefaultReadLimit(self) -> ReadLimit:
        """Say what is wrong."""
        raise self._error

    @plainly
    def prepareForTriggerAvailableNow(self) -> None:
        """Say what is wrong."""
        raise self._error

    @plainly
    def initialOffset(self) -> dict[str, Any]:
        """Say what is wrong."""
        raise self._error

    @plainly
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Say what is wrong."""
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Nothing is ever planned."""
        raise self._error


def _stop_on_sigterm() -> None:
    """Have stop() called when the query is stopped: the signal that Spark sends ends a process at once."""

    def end(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(0)  # it goes through the runner of Spark, which calls stop() on its way out

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)


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
