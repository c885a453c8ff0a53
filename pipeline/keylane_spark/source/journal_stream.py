"""spark.readStream with journal=true: the journals of topics, by the numbers of their records.

Nothing is claimed and nothing drained: a journal has room for so many records, and who reads too slowly
loses the oldest.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from keylane.errors import InvalidArgument, TopicNotFound
from keylane.types import Page, PartitionOffsets
from keylane_spark.plain_errors import plainly, plainly_each
from keylane_spark.remote import Remote
from keylane_spark.source import positions as offsets
from keylane_spark.source import start as seek
from keylane_spark.source.batch_limits import BatchLimiter
from keylane_spark.source.data_loss import report
from keylane_spark.source.journal_rollback import first_rewritten
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.piece import Piece, share_out
from keylane_spark.source.positions import Positions, Range
from keylane_spark.source.schema import check_columns
from keylane_spark.source.topic_watch import TopicWatch

_ASK = 0.2  # seconds between two questions for what is new; Spark asks a hundred times a second
_INCARNATIONS = "#incarnations"  # among names of topics, in which there is no such character
_LEDGERS = "#ledgers"  # by partition: all before the position was written in that one, or before


class JournalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of a streaming query over journals."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = check_columns(options, schema)
        self._follower: Follower | None = (
            None  # made when Spark first asks: only one copy of this is the query
        )
        self._target: Positions | None = None  # where a query with availableNow ends
        self._latest: Positions = {}
        self._lag = 0
        self._limiter = BatchLimiter(options.limits)

    # On the driver

    def getDefaultReadLimit(self) -> ReadLimit:
        """What tells a batch that is limited from one that Spark wants to have all; all limits are ours."""
        limits = self._options.limits
        if limits.max_offsets is None and limits.min_offsets is None:
            return ReadAllAvailable()
        return ReadMaxRows(limits.max_offsets or 2**53)

    @plainly
    def prepareForTriggerAvailableNow(self) -> None:
        """Note where the journals end now: the query ends there."""
        self._target = self._opened().ends()

    @plainly
    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint starts."""
        follower = self._opened()
        begin = follower.begin()
        return dump(begin, follower.incarnations(), follower.ledgers(begin, {}, {}))

    @plainly
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch."""
        follower = self._opened()
        before, incarnations, ledgers = load(start)
        begin = follower.resume(before, incarnations, ledgers)
        self._latest = follower.latest()
        wanted = self._latest if self._target is None else self._target
        end = {
            topic: {
                partition: max(
                    at, min(wanted.get(topic, {}).get(partition, at), self._latest[topic][partition])
                )
                for partition, at in of.items()
            }
            for topic, of in begin.items()
        }
        if not isinstance(limit, ReadAllAvailable):
            end = self._limiter.end(begin, end, _sizeless, wait=self._target is None)
        self._lag = sum(range_.size for range_ in offsets.ranges(end, self._latest))
        kept = offsets.common(before, begin)
        return dump(end, follower.incarnations(), follower.ledgers(end, kept, ledgers))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Where the journals end, and the lag: what will be left to read when the batch is done."""
        return {**dump(self._latest, {}, {}), "#lag": self._lag} if self._latest else None

    @plainly
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Shares of what there is to read: every record from the start on has to be there."""
        follower = self._opened()
        begin, finish = follower.resume(*load(start)), follower.resume(*load(end))
        planned, *_ = load(end)
        finish = {
            topic: {partition: at for partition, at in of.items() if partition in planned.get(topic, {})}
            for topic, of in finish.items()
        }
        incarnations = follower.incarnations()
        pieces = [
            Piece(range_, range_.start, incarnations[range_.topic])
            for range_ in offsets.ranges(begin, finish)
        ]
        return share_out(pieces, self._options.min_partitions)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing is drained."""

    def stop(self) -> None:
        """Let go of the broker."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    # On executors

    @plainly_each
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a share."""
        from keylane_spark.source.read_piece import (
            read_share,  # it takes half a second, which those who plan need not wait
        )

        return read_share(self._options, self._columns, partition)

    def _opened(self) -> "Follower":
        if self._follower is None:
            self._follower = Follower(self._options)
        return self._follower


class Follower:
    """What a query knows of its journals."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._remote = Remote(options.connection)
        self._remote.__enter__()
        self._topics = TopicWatch(self._remote, options.selection)
        self._said: dict[str, list[PartitionOffsets]] = {}
        self._asked = float("-inf")
        self._warned: set[str] = set()
        self._looked: dict[tuple[str, int], tuple[int, int, int]] = {}  # where nothing was given again

    def close(self) -> None:
        """Let go of the broker."""
        self._remote.__exit__(None, None, None)

    def ends(self) -> Positions:
        """Where the journals end, as of a moment ago."""
        self._ask()
        return self.latest()

    def latest(self) -> Positions:
        """Where the journals ended when that was last asked."""
        return {
            topic: {one.partition: one.journal_latest for one in said} for topic, said in self._said.items()
        }

    def incarnations(self) -> dict[str, int]:
        """Which topics of these names it is that were found."""
        return {topic: said[0].incarnation for topic, said in self._said.items()}

    def ledgers(self, positions: Positions, kept: Positions, of: Positions) -> Positions:
        """In which ledgers these positions were written; one that is kept has the one it had."""
        return {
            topic: {
                one.partition: (
                    kept.get(topic, {}).get(one.partition) == positions[topic][one.partition]
                    and of.get(topic, {}).get(one.partition)
                )
                or one.ledger
                for one in said
                if one.partition in positions[topic]
            }
            for topic, said in self._said.items()
            if topic in positions
        }

    def begin(self) -> Positions:
        """Where the options say."""
        self._ask(now=True)
        options = self._options
        for topic in options.topics:
            self._check(topic)
            seek.check_partitions("startingOffsets", options.start, topic, self._count(topic))
        return {
            topic: {
                one.partition: seek.start_in(
                    topic, seek.Bounds(one, journal=True), options.start, fail=options.fail_on_data_loss
                )
                for one in said
            }
            for topic, said in self._said.items()
        }

    def resume(self, before: Positions, incarnations: Mapping[str, int], ledgers: Positions) -> Positions:
        """The same positions, with those of what is new, and without what is gone, which is a loss."""
        self._ask()
        for topic in before.keys() - self._said.keys():
            if self._options.selection.covers(topic):
                self._report(f"topic {topic!r} was deleted, and what was not read of its journal is gone")
        return {
            topic: {
                one.partition: self._go_on(
                    topic,
                    one,
                    before.get(topic, {}),
                    incarnations.get(topic),
                    ledgers.get(topic, {}).get(one.partition, 0),
                )
                for one in said
            }
            for topic, said in self._said.items()
        }

    def _go_on(
        self,
        topic: str,
        said: PartitionOffsets,
        before: Mapping[int, int],
        incarnation: int | None,
        ledger: int,
    ) -> int:
        at = before.get(said.partition)
        if at is None:
            return said.journal_earliest
        if incarnation != said.incarnation:
            self._report(
                f"topic {topic!r} was deleted and made anew, and what was not read of its journal is gone"
            )
            return said.journal_earliest
        where = f"of the journal of topic {topic!r}, partition {said.partition}"
        if at > said.journal_latest:
            self._report(
                f"record {at - 1} {where} was read, and the server has lost all from {said.journal_latest} on"
            )
        elif at < said.journal_earliest:
            self._report(
                f"{said.journal_earliest - at} records {where} are gone, {at}-{said.journal_earliest - 1}: "
                "it keeps so many, and the query was slower than what happens"
            )
        elif again := self._first_rewritten(topic, said, at, ledger):
            self._report(
                f"record {at - 1} {where} was read, and the server has lost what it had written last: others "
                f"have the numbers from {again} on again"
            )
            return again
        return min(max(at, said.journal_earliest), said.journal_latest)

    def _first_rewritten(self, topic: str, said: PartitionOffsets, at: int, ledger: int) -> int:
        """The first record before `at` that is another one by now, 0 for none; looked for in a new ledger."""
        place, looked = (topic, said.partition), (at, ledger, said.ledger)
        if not 0 < ledger < said.ledger or self._looked.get(place) == looked:
            return 0
        again = first_rewritten(self._remote, topic, said, at, ledger)
        if not again:
            self._looked[place] = looked
        return again

    def _ask(self, *, now: bool = False) -> None:
        if now or time.monotonic() >= self._asked + _ASK:
            self._said = {}
            for topic in self._topics.look():
                try:
                    said = self._remote.call(self._remote.client.offsets, topic)
                except TopicNotFound:
                    if not self._topics.forget(topic):
                        raise
                else:
                    self._said[topic] = self._topics.chosen(topic, said)
            self._asked = time.monotonic()

    def _check(self, topic: str) -> None:
        """Refuse a topic that has never had a journal."""
        never = all(one.journal_latest == 1 for one in self._said[topic])
        if never and not self._remote.call(self._remote.client.describe_topic, topic).journal:
            raise InvalidArgument(
                f"topic {topic!r} has no journal: switch it on with "
                f"`keylane topic change {topic} --journal on`"
            )

    def _count(self, topic: str) -> int:
        return self._remote.call(self._remote.client.describe_topic, topic).partitions

    def _report(self, text: str) -> None:
        """Fail, or warn once."""
        if self._options.fail_on_data_loss or text not in self._warned:
            self._warned.add(text)
            report(self._options.fail_on_data_loss, text)


def dump(positions: Positions, incarnations: Mapping[str, int], ledgers: Positions) -> dict[str, Any]:
    """As Spark keeps it in the checkpoint: JSON has no numbers for keys."""
    shown = offsets.dump_positions(positions)
    if incarnations:
        shown[_INCARNATIONS] = dict(sorted(incarnations.items()))
    if ledgers:
        shown[_LEDGERS] = offsets.dump_positions(ledgers)
    return shown


def load(offset: Mapping[str, Any]) -> tuple[Positions, dict[str, int], Positions]:
    """What dump was given; no ledgers in what an older Keylane has written."""
    named = {topic: of for topic, of in offset.items() if topic not in (_INCARNATIONS, _LEDGERS)}
    try:
        return (
            msgspec.convert(named, type=Positions, strict=False),
            msgspec.convert(offset.get(_INCARNATIONS, {}), type=dict[str, int]),
            msgspec.convert(offset.get(_LEDGERS, {}), type=Positions, strict=False),
        )
    except msgspec.ValidationError as error:
        raise InvalidArgument(
            f"the checkpoint has {offset!r}, which is no offset of a journal ({error}): is it of another "
            "query?"
        ) from None


def _sizeless(range_: Range, limit: int) -> Page:
    raise InvalidArgument("records of a journal have no bodies")
