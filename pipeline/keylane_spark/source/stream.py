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
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from keylane.errors import BrokerError
from keylane_spark.plain_errors import plainly
from keylane_spark.source.checkpoint_format import common, dump, load
from keylane_spark.source.piece import Piece, share_out
from keylane_spark.source.positions import ranges
from keylane_spark.source.query import Query
from keylane_spark.source.stream_base import StreamBase


class StreamReader(StreamBase):
    """The source of a streaming query over topics."""

    # Made when Spark first asks for something: only one of the copies of this object ever is the query.
    _query: Query | None = None

    @plainly
    def prepareForTriggerAvailableNow(self) -> None:
        """Note where the topics end now: the query ends there."""
        self._target = self._opened().ends()

    @plainly
    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint starts; its subscription is made here."""
        query = self._opened()
        begin = query.begin()
        return dump(begin, query.identities(begin, {}, {}))

    @plainly
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch; what lies before its start is done with."""
        query = self._opened()
        before, of = load(start)
        begin = query.resume(before, of)
        # A partition that is new since the target was noted is left to the next run.
        end = self.end_of_batch(begin, query.latest(), limit, query.read)
        # With nothing to do there is time to wait, and with availableNow there is no later.
        kept = common(before, begin)
        query.commit(begin, query.identities(begin, kept, of), wait=end == begin)
        return dump(end, query.identities(end, kept, of))

    @plainly
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Shares of what there is to read: of a large partition one or several, of small ones many in one."""
        query = self._opened()
        planned, of = load(end)
        begin, finish = query.resume(*load(start)), query.resume(planned, of)
        pieces = [
            Piece(
                range_,
                *query.bounds(range_.topic, range_.partition),
                of[range_.topic].ledgers.get(range_.partition, 0),
            )
            for range_ in ranges(begin, finish)
        ]
        return share_out(pieces, self._options.min_partitions)

    @plainly
    def commit(self, end: dict[str, Any]) -> None:
        """Let the broker forget what lies before."""
        self._opened().commit(*load(end))

    def stop(self) -> None:
        """Let others have the subscription."""
        if self._query is not None:
            self._query.close()
            self._query = None

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
