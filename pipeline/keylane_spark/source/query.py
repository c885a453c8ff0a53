"""A streaming query as the broker sees it: a subscription of mode cursor, its one reader, its progress."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

from keylane import AsyncClient
from keylane.errors import (
    BrokerError,
    InvalidArgument,
    MessagesLost,
    SubscriptionMoved,
    SubscriptionNotFound,
    TopicNotFound,
)
from keylane.times import Position, moment
from keylane.types import Page, PartitionOffsets
from keylane_spark.errors import DataLoss
from keylane_spark.remote import Remote
from keylane_spark.source import start as seek
from keylane_spark.source.claim import SubscriptionClaim
from keylane_spark.source.data_loss import report
from keylane_spark.source.options import ReadOptions
from keylane_spark.source.positions import LATEST, Identities, Identity, Positions, Range, wanted
from keylane_spark.source.topic_watch import TopicWatch

_CLOSE = 5.0  # seconds to say good-bye
_ASK = 0.2  # seconds between two questions for what is new; Spark asks a hundred times a second
_log = logging.getLogger("keylane.spark")

T = TypeVar("T")


class Query:
    """What a streaming query knows of its topics, and what it tells the broker."""

    def __init__(self, options: ReadOptions) -> None:
        assert options.subscription is not None
        self._options = options
        self._subscription = options.subscription
        self._remote = Remote(options.connection)
        self._remote.__enter__()
        self._topics = TopicWatch(self._remote, options.selection)
        self._hold: SubscriptionClaim | None = None
        self._said: dict[str, list[PartitionOffsets]] = {}
        self._asked = float("-inf")
        self._ledgers: dict[str, dict[int, int]] = {}  # what was asked about
        self._committed: tuple[Positions, Identities] = {}, {}
        self._committing: Future[None] | None = None
        self._warned: set[str] = set()

    def close(self) -> None:
        """Let others have the subscription."""
        try:
            with suppress(BrokerError, DataLoss, TimeoutError):
                self._finish(_CLOSE)
            self._release()
        finally:
            self._remote.__exit__(None, None, None)

    def check(self) -> None:
        """Raise what went wrong in the background."""
        if self._hold is not None:
            self._hold.check()
            if self._hold.gone:
                self._release()  # what there is instead is compared before it is claimed
        if self._committing is not None and self._committing.done():
            self._finish()

    def holds(self) -> bool:
        """Whether it has a claim on the subscription."""
        return self._hold is not None

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
        made = [topic for topic in names if self._there(topic, self._made)]
        self._ask({}, now=True)
        if self._hold is None:
            self._claim()
            self._ask({}, now=True)
        return self._place(list(self._said), made)

    def _place(self, topics: Sequence[str], made: Collection[str]) -> Positions:
        """Move the subscription of topics that are new to the query to where they are to be read from."""
        positions = {
            topic: {one.partition: self._first(topic, one, new=topic in made) for one in said}
            for topic, said in self._chosen().items()
            if topic in topics
        }
        for topic, of in positions.items():
            for partition, at in of.items():
                if at != self._said[topic][partition].position:
                    position = f"{partition}:0-{at}"  # as an id; the ledger does not matter
                    self._remote.call(self._remote.client.seek, topic, self._subscription, position)
        self._ask({}, now=True)
        return positions

    def resume(self, start: Positions, of: Identities) -> Positions:
        """Where to go on from a checkpoint, which is of these topics, subscriptions and ledgers.

        That is where it says, and where the subscription is in partitions that are new. What is not as it was
        is noticed before anything is claimed, each time: a seek wins, and what is gone is a data loss, after
        which a query that may goes on with what is there now.
        """
        names = self._topics.look()
        if self._hold is None:
            self._leave_out(start)
            self._ask(of, [topic for topic in names if topic in start], now=True)
            self._compare(start, of)
            new = [topic for topic in names if topic not in start]
            made = [topic for topic in new if self._there(topic, self._found)]
            self._ask(of, now=True)
            self._claim()
            if self._options.selection.pattern is None:
                self._place(new, made)
            self._ask(of, now=True)
        else:
            self._follow(names)
            self._ask(of)
        return self._compare(start, of)

    def _follow(self, names: Sequence[str]) -> None:
        """Claim the subscription of topics that match by now, and let go of those that are gone."""
        hold = self._hold
        assert hold is not None
        for topic in self._said.keys() - set(names):
            hold.drop(topic)
        for topic in names:
            if topic not in self._said and self._there(topic, self._found) is not None:
                said = self._there(topic, self._call_offsets, self._subscription)
                if said is not None:
                    hold.add(topic, self._identity(said, {}))

    def _found(self, topic: str) -> bool:
        """Make the subscription of a topic that is new to the query, at the earliest of one that matches."""
        if self._options.selection.pattern is None:
            return self._made(topic)
        return self._remote.call(self._make, self._remote.client, topic, "earliest")

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
            topic: self._identity(
                [self._said[topic][partition] for partition in at],
                {p: of[topic].ledgers.get(p, 0) for p in at if at[p] == start.get(topic, {}).get(p)}
                if topic in of and _same(of[topic], self._said[topic][0])
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
        if self._hold is None:
            return  # it is gone, which the next batch finds
        held = self._hold.identities
        positions = {
            topic: at
            for topic, at in positions.items()
            if topic in held
            and topic in self._said
            and (of[topic].topic, of[topic].subscription) == (held[topic].topic, held[topic].subscription)
        }
        these = positions, {topic: of[topic] for topic in positions}
        if these != self._committed:
            self._finish()
            self._committing = self._remote.start(self._commit, self._remote.client, *these)
            self._committed = these
        if wait:
            self._finish()

    def _finish(self, timeout: float | None = None) -> None:
        """Wait for the commit that is under way; one for which the broker was away is made again later."""
        future, self._committing = self._committing, None
        try:
            if future is not None:
                future.result(timeout)
        except SubscriptionMoved as error:
            raise self._moved(str(error).partition(" since ")[0]) from error
        except (TopicNotFound, SubscriptionNotFound, MessagesLost) as error:
            self._report(f"what was read is not drained: {error}")
        except BrokerError as error:
            if not error.retriable:
                raise
            self._committed = {}, {}
            _log.warning("subscription %r is drained later: %s", self._subscription, error)

    def _leave_out(self, start: Positions) -> None:
        for topic in sorted(start):
            if not self._options.selection.covers(topic):
                _log.warning(
                    "topic %r is in the checkpoint and no longer in the options: delete its subscription %r, "
                    "for which messages are kept",
                    topic,
                    self._subscription,
                )

    def _claim(self) -> None:
        """Claim the subscription of what was found there."""
        found = {topic: self._identity(said, {}) for topic, said in self._said.items()}
        hold = SubscriptionClaim(self._remote, found, self._subscription, self._options.session)
        hold.take()
        self._hold = hold

    def _release(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.release(_CLOSE)

    def _made(self, topic: str) -> bool:
        return self._remote.call(self._make, self._remote.client, topic, self._start())

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
                return self._call_offsets(topic, self._subscription, ledgers)
            except SubscriptionNotFound:
                self._report(
                    f"subscription {self._subscription!r} of topic {topic!r} was deleted, or its topic was, "
                    "since this query wrote its checkpoint, and what was published meanwhile is not known"
                )
                self._remote.call(self._make, self._remote.client, topic, "earliest")
        raise SubscriptionNotFound(f"subscription {self._subscription!r} of topic {topic!r} is deleted again")

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
            topic: {one.partition: self._go_on(topic, one, start, known.get(topic)) for one in said}
            for topic, said in self._chosen().items()
        }

    def _check_same(self, topic: str, identity: Identity, said: PartitionOffsets) -> None:
        """The topic and the subscription are those of the checkpoint, or their loss is reported."""
        if _same(identity, said):
            return
        what = f"subscription {self._subscription!r} of topic {topic!r}"
        if identity.topic != said.incarnation:
            what = f"topic {topic!r}"
        self._report(
            f"{what} was deleted and made anew since this query wrote its checkpoint, and what was published "
            "in between is not known"
        )
        held = self._hold.identities.get(topic) if self._hold is not None else None
        if held is not None and not _same(held, said):
            self._release()
            self._claim()

    def _go_on(self, topic: str, said: PartitionOffsets, start: Positions, of: Identity | None) -> int:
        partition, position = said.partition, said.earliest if said.position is None else said.position
        at = start.get(topic, {}).get(partition)
        if at is None or of is None or not _same(of, said):
            return position
        if of.moves(partition) != said.sought:
            raise self._moved(
                f"subscription {self._subscription!r} of topic {topic!r} was moved by a seek: it is at "
                f"offset {position} of partition {partition}"
            )
        where = f"the checkpoint is at offset {at} of topic {topic!r}, partition {partition}"
        if at > said.latest:
            self._report(
                f"{where}, which ends at {said.latest}: the server has lost what it had written last, and "
                f"{at - said.latest} messages of that were read"
            )
            return max(position, min(said.anew or said.latest, said.latest))
        if 0 < said.anew < at:
            self._report(
                f"{where}, and the server has lost what it had written last: messages published since have "
                f"the offsets from {said.anew} on again"
            )
            return max(position, said.anew)
        if at < position:
            self._report(
                f"{where}, and the subscription {self._subscription!r} at {position}: somebody else has "
                f"drained {position - at} messages, offsets {at}-{position - 1}"
            )
        return at

    def _identity(self, said: Sequence[PartitionOffsets], kept: dict[int, int]) -> Identity:
        """What was found, with the ledgers that are kept."""
        return Identity(
            said[0].incarnation,
            said[0].subscription_incarnation,
            {one.partition: one.sought for one in said if one.sought != one.subscription_incarnation},
            {one.partition: kept.get(one.partition, one.ledger) for one in said},
        )

    def _report(self, text: str) -> None:
        """Fail, or warn once."""
        if self._options.fail_on_data_loss or text not in self._warned:
            self._warned.add(text)
            report(
                self._options.fail_on_data_loss,
                text,
                "Start the query with a new checkpointLocation to read what there is now",
            )

    def _moved(self, why: str) -> SubscriptionMoved:
        return SubscriptionMoved(
            f"{why}. Spark's checkpoint cannot follow, and nothing of what the query has read since was "
            "drained: start the query with a new checkpointLocation, and it reads on from there"
        )

    async def _make(self, client: AsyncClient, topic: str, start: Position) -> bool:
        """Whether the subscription had to be made."""
        try:
            info = await client.describe_subscription(topic, self._subscription)
        except SubscriptionNotFound:
            await client.create_subscription(
                topic, self._subscription, mode="cursor", start=start, exist_ok=True
            )
            return True
        if info.mode != "cursor":
            raise InvalidArgument(
                f"subscription {self._subscription!r} of topic {topic!r} is of mode {info.mode}, whose "
                "consumers ack message by message: give the query a subscription of its own"
            )
        return False

    def _start(self) -> Position:
        """Where the subscription starts when it is made; what is asked for by partition is sought then."""
        since, start = self._options.since, self._options.start
        if since is not None:
            return "earliest" if since.everywhere is None else moment(since.everywhere)
        return start if isinstance(start, str) else "earliest"

    def _first(self, topic: str, said: PartitionOffsets, *, new: bool) -> int:
        """Where to start in a partition: what startingOffsets says only ever goes forward."""
        bounds, start, since = seek.Bounds(said), self._options.start, self._options.since
        if since is not None:
            seek.check_partitions(since.option, since, topic, len(self._said[topic]))
            (at,) = self._remote.call(seek.at_times, self._remote.client, topic, [bounds], since)
            return bounds.floor if at is None else at
        if isinstance(start, str):
            return bounds.floor
        seek.check_partitions("startingOffsets", start, topic, len(self._said[topic]))
        at = wanted(start, topic, said.partition, bounds.floor)
        if not new and (at == LATEST or at < bounds.floor):
            return bounds.floor
        return seek.start_in(topic, bounds, start, fail=self._options.fail_on_data_loss)

    async def _commit(self, client: AsyncClient, positions: Positions, of: Identities) -> None:
        hold = self._hold
        assert hold is not None
        for topic, at in positions.items():
            commit = partial(
                client.commit,
                topic,
                self._subscription,
                hold.reader,
                at,
                sought={partition: of[topic].moves(partition) for partition in at},
                ledgers=of[topic].ledgers,
                incarnation=of[topic].topic,
                subscription_incarnation=of[topic].subscription,
            )
            try:
                await commit()
            except InvalidArgument:  # the server has lost the claim
                await hold.claim(client, topic)
                await commit()


def _same(of: Identity, said: PartitionOffsets) -> bool:
    return (of.topic, of.subscription) == (said.incarnation, said.subscription_incarnation)
