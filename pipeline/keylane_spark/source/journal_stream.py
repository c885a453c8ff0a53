"""spark.readStream with journal=true: the journals of topics, by the numbers of their records.

Nothing is claimed and nothing drained: a journal has room for so many records, and who reads too slowly
loses the oldest.
"""

from collections.abc import Sequence
from typing import Any

from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from keylane.errors import InvalidArgument
from keylane.types import Page
from keylane_spark.plain_errors import plainly
from keylane_spark.source.checkpoint_format import common, dump_journal, load_journal
from keylane_spark.source.journal_query import JournalQuery
from keylane_spark.source.piece import Piece, share_out
from keylane_spark.source.positions import Range, ranges
from keylane_spark.source.stream_base import StreamBase


class JournalStreamReader(StreamBase):
    """The source of a streaming query over journals."""

    _query: JournalQuery | None = None  # made when Spark first asks: only one copy of this is the query

    @plainly
    def prepareForTriggerAvailableNow(self) -> None:
        """Note where the journals end now: the query ends there."""
        self._target = self._opened().ends()

    @plainly
    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint starts."""
        query = self._opened()
        begin = query.begin()
        return dump_journal(begin, query.incarnations(), query.ledgers(begin, {}, {}))

    @plainly
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch."""
        query = self._opened()
        before, incarnations, ledgers = load_journal(start)
        begin = query.resume(before, incarnations, ledgers)
        end = self.end_of_batch(begin, query.latest(), limit, _sizeless)
        return dump_journal(end, query.incarnations(), query.ledgers(end, common(before, begin), ledgers))

    @plainly
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Shares of what there is to read: every record from the start on has to be there."""
        query = self._opened()
        begin, finish = query.resume(*load_journal(start)), query.resume(*load_journal(end))
        planned, *_ = load_journal(end)
        finish = {
            topic: {partition: at for partition, at in of.items() if partition in planned.get(topic, {})}
            for topic, of in finish.items()
        }
        incarnations = query.incarnations()
        pieces = [Piece(range_, range_.start, incarnations[range_.topic]) for range_ in ranges(begin, finish)]
        return share_out(pieces, self._options.min_partitions)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing is drained."""

    def stop(self) -> None:
        """Let go of the broker."""
        if self._query is not None:
            self._query.close()
            self._query = None

    def _opened(self) -> JournalQuery:
        if self._query is None:
            self._query = JournalQuery(self._options)
        return self._query


def _sizeless(range_: Range, limit: int) -> Page:
    raise InvalidArgument("records of a journal have no bodies")
