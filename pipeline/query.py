"""A streaming query as the broker sees it: a subscription of mode cursor, its one reader, its progress."""

import logging
import time
from concurrent.futures import Future
from contextlib import suppress

from client import AsyncClient
from client.errors import (
    BrokerError,
    InvalidArgument,
    SubscriptionMoved,
    SubscriptionNotFound,
)
from client.times import Position, moment
from client.types import Page, PartitionOffsets
from pipeline import seek
from pipeline.hold import Hold
from pipeline.loss import report
from pipeline.offsets import LATEST, Positions, Range, wanted
from pipeline.options import ReadOptions
from pipeline.remote import Remote

_CLOSE = 5.0  # seconds to say good-bye
_ASK = 0.2  # seconds between two questions for what is new; Spark asks a hundred times a second
_log = logging.getLogger("keylane.spark")


class Query:
    """What a streaming query knows of its topics, and what it tells the broker."""

    def __init__(self, options: ReadOptions) -> None:
        assert options.subscription is not None
        self._options = options
        self._subscription = options.subscription
        self._remote = Remote(options.connection)
        self._remote.__enter__()
        self._hold: Hold | None = None
        self._said: dict[str, list[PartitionOffsets]] = {}
        self._asked = float("-inf")
        self.sought: Positions = {}  # of each partition when reading began: a seek changes it
        self._committed: Positions = {}
        self._committing: Future[None] | None = None
        self._warned: set[tuple[str, int]] = set()

    def close(self) -> None:
        """Let others have the subscription."""
        try:
            with suppress(BrokerError, TimeoutError):
                self._finish(_CLOSE)
            hold, self._hold = self._hold, None
            if hold is not None:
                hold.release(_CLOSE)
        finally:
            self._remote.__exit__(None, None, None)

    def check(self) -> None:
        """Raise what went wrong in the background."""
        if self._hold is not None:
            self._hold.check()
        if self._committing is not None and self._committing.done():
            self._finish()

    def latest(self) -> Positions:
        """Where the topics end, as of a moment ago."""
        self._ask()
        return {topic: {one.partition: one.latest for one in said} for topic, said in self._said.items()}

    def ends(self) -> Positions:
        """Where the topics end now; there need not be a subscription yet."""
        said = {topic: self._call_offsets(topic, None) for topic in self._options.topics}
        return {topic: {one.partition: one.latest for one in found} for topic, found in said.items()}

    def begin(self) -> Positions:
        """Make the subscription unless there is one, claim it, and say where it is."""
        made = [topic for topic in self._options.topics if self._made(topic)]
        self._claim({})
        self._ask(now=True)
        positions = {
            topic: {one.partition: self._first(topic, one, new=topic in made) for one in said}
            for topic, said in self._said.items()
        }
        for topic, said in self._said.items():
            for one in said:
                if (at := positions[topic][one.partition]) != one.position:
                    position = f"{one.partition}:0-{at}"  # as an id; the ledger does not matter
                    self._remote.call(self._remote.client.seek, topic, self._subscription, position)
        self._ask(now=True)
        self.sought = self._moves()
        return positions

    def resume(self, start: Positions, sought: Positions) -> Positions:
        """Claim the subscription unless that is done, and see whether what follows `start` is still there.

        The same positions, with those of partitions that are new. A seek since then wins: the query ends.
        """
        self._claim(start)
        self._ask()
        self.sought = self._moves()
        for topic, of in start.items():
            for partition in of.keys() & self.sought.get(topic, {}).keys():
                self._check_moves(topic, partition, sought.get(topic, {}).get(partition, 0))
        return {
            topic: {one.partition: self._resume(topic, one, start) for one in said}
            for topic, said in self._said.items()
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

    def commit(self, positions: Positions, *, wait: bool = False) -> None:
        """Drain what lies before; in the background, but one after the other."""
        if positions != self._committed:
            self._finish()
            self._committing = self._remote.start(self._commit, self._remote.client, positions)
            self._committed = positions
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
        except BrokerError as error:
            if not error.retriable:
                raise
            self._committed = {}
            _log.warning("subscription %r is drained later: %s", self._subscription, error)

    def _claim(self, start: Positions) -> None:
        """Claim the subscription, which must be the one that `start` is of, unless that is done."""
        if self._hold is not None:
            return
        for topic in start.keys() - self._options.topics:
            _log.warning(
                "topic %r is in the checkpoint and no longer in option 'subscribe': delete its subscription "
                "%r, for which messages are kept",
                topic,
                self._subscription,
            )
        for topic in self._options.topics:
            if start and topic not in start:
                self._made(topic)  # it is new in option subscribe
        hold = Hold(self._remote, self._options.topics, self._subscription, self._options.session)
        try:
            unread = hold.take()
        except SubscriptionNotFound as error:
            raise self._gone(str(error)) from error
        if remade := [topic for topic in unread if topic in start]:
            hold.release(_CLOSE)
            raise self._gone(
                f"nobody has read subscription {self._subscription!r} of topic {remade[0]!r} yet"
            )
        self._hold = hold

    def _made(self, topic: str) -> bool:
        return self._remote.call(self._make, self._remote.client, topic)

    def _ask(self, *, now: bool = False) -> None:
        if now or time.monotonic() >= self._asked + _ASK:
            try:
                self._said = {
                    topic: self._call_offsets(topic, self._subscription) for topic in self._options.topics
                }
            except SubscriptionNotFound as error:
                raise self._gone(str(error)) from error
            self._asked = time.monotonic()

    def _call_offsets(self, topic: str, subscription: str | None) -> list[PartitionOffsets]:
        return self._remote.call(self._remote.client.offsets, topic, subscription)

    def _moves(self) -> Positions:
        return {topic: {one.partition: one.sought for one in said} for topic, said in self._said.items()}

    def _check_moves(self, topic: str, partition: int, before: int) -> None:
        """A partition has not been moved since, nor made anew."""
        if self.sought[topic][partition] != before:
            raise self._moved(
                f"subscription {self._subscription!r} of topic {topic!r} was moved by a seek, or made anew: "
                f"it is at offset {self._said[topic][partition].position} of partition {partition}"
            )

    def _moved(self, why: str) -> SubscriptionMoved:
        return SubscriptionMoved(
            f"{why}. Spark's checkpoint cannot follow, and nothing of what the query has read since was "
            "drained: start the query with a new checkpointLocation, and it reads on from there"
        )

    def _gone(self, why: str) -> SubscriptionNotFound:
        return SubscriptionNotFound(
            f"{why}: it, or its topic, was deleted since this query wrote its checkpoint, and what was "
            "published meanwhile is not known. Start the query with a new checkpointLocation"
        )

    async def _make(self, client: AsyncClient, topic: str) -> bool:
        """Whether the subscription had to be made."""
        try:
            info = await client.describe_subscription(topic, self._subscription)
        except SubscriptionNotFound:
            await client.create_subscription(
                topic, self._subscription, mode="cursor", start=self._start(), exist_ok=True
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

    def _resume(self, topic: str, said: PartitionOffsets, start: Positions) -> int:
        position = said.earliest if said.position is None else said.position
        at = start.get(topic, {}).get(said.partition, position)
        if at > said.latest:
            raise InvalidArgument(
                f"the checkpoint is at offset {at} of topic {topic!r}, partition {said.partition}, which "
                f"ends at {said.latest}: the topic was made anew since. Start with a new checkpointLocation"
            )
        if at < position and (topic, said.partition) not in self._warned:
            self._warned.add((topic, said.partition))
            report(
                self._options.fail_on_data_loss,
                f"the checkpoint is at offset {at} of topic {topic!r}, partition {said.partition}, and the "
                f"subscription {self._subscription!r} at {position}: somebody else has drained "
                f"{position - at} messages, offsets {at}-{position - 1}",
            )
        return at

    async def _commit(self, client: AsyncClient, positions: Positions) -> None:
        assert self._hold is not None
        for topic, of in positions.items():
            sought = self.sought.get(topic, {})
            await client.commit(topic, self._subscription, self._hold.reader, of, sought=sought)
