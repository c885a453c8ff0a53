"""A streaming query as the broker sees it: a subscription of mode cursor, its one reader, its progress."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TypeVar

from keylane.errors import (
    BrokerError,
    SubscriptionNotFound,
    TopicNotFound,
)
from keylane.types import Page, PartitionOffsets
from keylane_spark.background_client import BackgroundClient
from keylane_spark.errors import DataLoss
from keylane_spark.source.checkpoint_format import Identities, Identity
from keylane_spark.source.claim import SubscriptionClaim
from keylane_spark.source.commits import Commits
from keylane_spark.source.data_loss import report
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.positions import Positions, Range
from keylane_spark.source.resume import identity_of, replaced, resume_position, same
from keylane_spark.source.subscription import QuerySubscription
from keylane_spark.source.topic_watch import TopicWatch

_CLOSE = 5.0  # seconds to say good-bye
_ASK = 0.2  # seconds between two questions for what is new; Spark asks a hundred times a second
_log = logging.getLogger("keylane.spark")

T = TypeVar("T")


class Query:
    """What a streaming query knows of its topics, and what it tells the broker."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._remote = BackgroundClient(options.connection)
        self._remote.__enter__()
        self._subscription = QuerySubscription(self._remote, options)
        self._commits = Commits(self._remote, self._subscription.name, self._report)
        self._topics = TopicWatch(self._remote, options.selection)
        self._claim: SubscriptionClaim | None = None
        self._said: dict[str, list[PartitionOffsets]] = {}
        self._asked = float("-inf")
        self._ledgers: dict[str, dict[int, int]] = {}  # what was asked about
        self._warned: set[str] = set()

    def close(self) -> None:
        """Let others have the subscription."""
        try:
            with suppress(BrokerError, DataLoss, TimeoutError):
                self._commits.finish(_CLOSE)
            self._release()
        finally:
            self._remote.__exit__(None, None, None)

    def check(self) -> None:
        """Raise what went wrong in the background."""
        if self._claim is not None:
            self._claim.check()
            if self._claim.gone:
                self._release()  # what there is instead is compared before it is claimed
        self._commits.check()

    def holds(self) -> bool:
        """Whether it has a claim on the subscription."""
        return self._claim is not None

    def latest(self) -> Positions:
        """Where the topics end, as of a moment ago."""
        return {topic: {one.partition: one.latest for one in said} for topic, said in self._chosen().items()}

    def ends(self) -> Positions:
        """Where the topics end now; there need not be a subscription yet."""
        names = self._topics.look()
        said = {topic: found for topic in names if (found := self._there(topic, self._call_offsets, None))}
        return {
            topic: {one.partition: one.latest for one in self._topics.chosen(topic, found)}
            for topic, found in said.items()
        }

    def begin(self) -> Positions:
        """Make the subscription unless there is one, claim it, and say where it is."""
        names = self._topics.look()
        if not names:
            _log.warning("no topic matches %r yet", self._options.selection.pattern)
        made = [topic for topic in names if self._there(topic, self._subscription.create)]
        self._ask({}, now=True)
        if self._claim is None:
            self._take_claim()
            self._ask({}, now=True)
        return self._place(list(self._said), made)

    def _place(self, topics: Sequence[str], made: Collection[str]) -> Positions:
        """Move the subscription of topics that are new to the query to where they are to be read from."""
        positions = {
            topic: {
                one.partition: self._subscription.first_position(
                    topic, one, len(self._said[topic]), new=topic in made
                )
                for one in said
            }
            for topic, said in self._chosen().items()
            if topic in topics
        }
        for topic, of in positions.items():
            for partition, at in of.items():
                if at != self._said[topic][partition].position:
                    self._subscription.move(topic, partition, at)
        self._ask({}, now=True)
        return positions

    def resume(self, start: Positions, of: Identities) -> Positions:
        """Where to go on from a checkpoint, which is of these topics, subscriptions and ledgers.

        That is where it says, and where the subscription is in partitions that are new. What is not as it was
        is noticed before anything is claimed, each time: a seek wins, and what is gone is a data loss, after
        which a query that may goes on with what is there now.
        """
        names = self._topics.look()
        if self._claim is None:
            self._leave_out(start)
            self._ask(of, [topic for topic in names if topic in start], now=True)
            self._compare(start, of)
            new = [topic for topic in names if topic not in start]
            made = [topic for topic in new if self._there(topic, self._found)]
            self._ask(of, now=True)
            self._take_claim()
            if self._options.selection.pattern is None:
                self._place(new, made)
            self._ask(of, now=True)
        else:
            self._follow(names)
            self._ask(of)
        return self._compare(start, of)

    def _follow(self, names: Sequence[str]) -> None:
        """Claim the subscription of topics that match by now, and let go of those that are gone."""
        claim = self._claim
        assert claim is not None
        for topic in self._said.keys() - set(names):
            claim.drop(topic)
        for topic in names:
            if topic not in self._said and self._there(topic, self._found) is not None:
                said = self._there(topic, self._call_offsets, self._subscription.name)
                if said is not None:
                    claim.add(topic, identity_of(said, {}))

    def _found(self, topic: str) -> bool:
        """Make the subscription of a topic that is new to the query, at the earliest of one that matches."""
        return self._subscription.create(
            topic, None if self._options.selection.pattern is None else "earliest"
        )

    def _there(self, topic: str, ask: Callable[..., T], *args: object) -> T | None:
        """What there is to know of a topic; None of one that matched and was deleted since."""
        try:
            return ask(topic, *args)
        except TopicNotFound:
            if not self._topics.forget(topic):
                raise
            return None

    def _chosen(self) -> dict[str, list[PartitionOffsets]]:
        """What was said of the partitions that are read."""
        return {topic: self._topics.chosen(topic, said) for topic, said in self._said.items()}

    def identities(self, positions: Positions, start: Positions, of: Identities) -> Identities:
        """What these positions are of, if the query has gone there from `start`.

        A partition that has not moved keeps its ledger: so the offset is the same if there is nothing new.
        """
        return {
            topic: identity_of(
                [self._said[topic][partition] for partition in at],
                {p: of[topic].ledgers.get(p, 0) for p in at if at[p] == start.get(topic, {}).get(p)}
                if topic in of and same(of[topic], self._said[topic][0])
                else {},
            )
            for topic, at in positions.items()
        }

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """The position from which on every entry has to be there, and the incarnation of the topic."""
        said = self._said[topic][partition]
        return said.sparse, said.incarnation

    def read(self, range_: Range, limit: int) -> Page:
        """What is said of the messages from the start of a range on."""
        _, incarnation = self.bounds(range_.topic, range_.partition)
        return self._remote.call(
            self._remote.client.read,
            range_.topic,
            range_.partition,
            range_.start,
            range_.end,
            limit=limit,
            incarnation=incarnation,
        )

    def commit(self, positions: Positions, of: Identities, *, wait: bool = False) -> None:
        """Drain what lies before, of what is still read; in the background, but one after the other."""
        if self._claim is None:
            return  # it is gone, which the next batch finds
        held = self._claim.identities
        positions = {
            topic: at
            for topic, at in positions.items()
            if topic in held
            and topic in self._said
            and (of[topic].topic, of[topic].subscription) == (held[topic].topic, held[topic].subscription)
        }
        self._commits.start(self._claim, positions, {topic: of[topic] for topic in positions})
        if wait:
            self._commits.finish()

    def _leave_out(self, start: Positions) -> None:
        for topic in sorted(start):
            if not self._options.selection.covers(topic):
                _log.warning(
                    "topic %r is in the checkpoint and no longer in the options: delete its subscription %r, "
                    "for which messages are kept",
                    topic,
                    self._subscription.name,
                )

    def _take_claim(self) -> None:
        """Claim the subscription of what was found there."""
        found = {topic: identity_of(said, {}) for topic, said in self._said.items()}
        claim = SubscriptionClaim(self._remote, found, self._subscription.name, self._options.session)
        claim.take()
        self._claim = claim

    def _release(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release(_CLOSE)

    def _ask(self, of: Identities, topics: Sequence[str] | None = None, *, now: bool = False) -> None:
        """Ask for offsets, and for what was given since those of a checkpoint, unless that is just done."""
        topics = self._topics.names if topics is None else topics
        ledgers = {topic: of[topic].ledgers if topic in of else {} for topic in topics}
        if now or ledgers != self._ledgers or time.monotonic() >= self._asked + _ASK:
            self._said = {
                topic: said
                for topic in topics
                if (said := self._there(topic, self._offsets, ledgers[topic])) is not None
            }
            self._ledgers, self._asked = ledgers, time.monotonic()

    def _offsets(self, topic: str, ledgers: dict[int, int]) -> list[PartitionOffsets]:
        for _ in range(2):
            try:
                return self._call_offsets(topic, self._subscription.name, ledgers)
            except SubscriptionNotFound:
                self._report(
                    f"subscription {self._subscription.name!r} of topic {topic!r}, or the topic itself, was "
                    "deleted since this query wrote its checkpoint; what was published meanwhile is unknown"
                )
                self._subscription.create(topic, "earliest")
        raise SubscriptionNotFound(
            f"subscription {self._subscription.name!r} of topic {topic!r} is deleted again"
        )

    def _call_offsets(
        self, topic: str, subscription: str | None, ledgers: dict[int, int] | None = None
    ) -> list[PartitionOffsets]:
        return self._remote.call(self._remote.client.offsets, topic, subscription, ledgers=ledgers)

    def _compare(self, start: Positions, of: Identities) -> Positions:
        """Where to go on, unless what was found is not what the checkpoint is of."""
        for topic in sorted(start.keys() - self._said.keys()):
            if self._options.selection.covers(topic):
                self._report(f"topic {topic!r} was deleted, and what was not read of it is gone")
        known = {topic: of[topic] for topic in start.keys() & self._said.keys()}
        for topic, identity in known.items():
            self._check_same(topic, identity, self._said[topic][0])
        return {
            topic: {one.partition: self._resume_position(topic, one, start, known.get(topic)) for one in said}
            for topic, said in self._chosen().items()
        }

    def _check_same(self, topic: str, identity: Identity, said: PartitionOffsets) -> None:
        """The topic and the subscription are those of the checkpoint, or their loss is reported."""
        loss = replaced(topic, self._subscription.name, identity, said)
        if loss is None:
            return
        self._report(loss)
        held = self._claim.identities.get(topic) if self._claim is not None else None
        if held is not None and not same(held, said):
            self._release()
            self._take_claim()

    def _resume_position(
        self, topic: str, said: PartitionOffsets, start: Positions, of: Identity | None
    ) -> int:
        at = start.get(topic, {}).get(said.partition)
        return resume_position(topic, self._subscription.name, said, at, of, self._report)

    def _report(self, text: str) -> None:
        """Fail, or warn once."""
        if self._options.fail_on_data_loss or text not in self._warned:
            self._warned.add(text)
            report(
                self._options.fail_on_data_loss,
                text,
                "Start the query with a new checkpointLocation to read what there is now",
            )
