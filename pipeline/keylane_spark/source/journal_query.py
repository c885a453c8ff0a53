"""A streaming query over journals as the broker sees it: where they begin and end, and what was lost."""

import time
from collections.abc import Mapping

from keylane.errors import InvalidArgument, TopicNotFound
from keylane.types import PartitionOffsets
from keylane_spark.background_client import BackgroundClient
from keylane_spark.source.data_loss import report
from keylane_spark.source.journal_rollback import first_rewritten
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.positions import Positions
from keylane_spark.source.start import Bounds, check_partitions, start_in
from keylane_spark.source.topic_watch import TopicWatch

_ASK = 0.2  # seconds between two questions for what is new; Spark asks a hundred times a second


class JournalQuery:
    """What a query knows of its journals."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._remote = BackgroundClient(options.connection)
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
            check_partitions("startingOffsets", options.start, topic, self._count(topic))
        return {
            topic: {
                one.partition: start_in(
                    topic, Bounds(one, journal=True), options.start, fail=options.fail_on_data_loss
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
                f"topic {topic!r} was deleted and recreated, and what was not read of its journal is gone"
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
                "the journal keeps a limited number of records, and the query fell behind"
            )
        elif again := self._first_rewritten(topic, said, at, ledger):
            self._report(
                f"record {at - 1} {where} was read, and the server has lost what it had written last: the "
                f"numbers from {again} on were reused"
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
