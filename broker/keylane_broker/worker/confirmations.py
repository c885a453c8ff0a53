"""Answers to publishes: when what was stored is as safe as asked, and in the order in which it was sent.

Messages of a partition are stored in the order of their frames, whatever their levels, and memory is all that
this takes. What is to be safer waits here for one confirmation of all that was stored before it. Answers to
a connection keep the order of its frames; other connections do not wait for them.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from keylane import wire
from keylane.errors import BrokerError, DurabilityNotReached, Fenced, TopicNotFound, Unavailable
from keylane_broker.engine.values import Extras, Lease, NumberedFrame
from keylane_broker.worker.leased_partition import LeasedPartition

log = logging.getLogger("keylane.broker")


class PublishingClient(Protocol):
    """A connection, as far as its publishes are concerned."""

    store: str  # the payload store that the client can delete from

    def published(self, pending: "Pending", reply: wire.PublishReply) -> None:
        """Answer a PUBLISH."""

    def publish_failed(self, pending: "Pending", error: Exception) -> None:
        """Answer a PUBLISH."""

    def refuse_next(self, topic: str, partition: int, error: Exception) -> None:
        """A PUBLISH is to be tried again: what comes behind it must not overtake it."""


class Pending(NamedTuple):
    """A PUBLISH that waits for its turn, or for its answer."""

    connection: PublishingClient
    sequence: int
    flat: list[str]
    size: int
    durability: str
    timeout_ms: int
    dues: list[int] | None = None  # when each message is due, if not now
    incarnation: int = 0  # of the topic that is meant, 0 for any
    extras: Extras | None = None  # what some messages have besides
    numbered: NumberedFrame | None = None  # the numbers of the messages, if their producer gives them any
    came: float = 0.0  # when its frame did, by the clock of the counters

    @property
    def terms(self) -> tuple[str, int, bool, int, bool]:
        """What those have in common that are stored together."""
        numbered = self.numbered is not None
        return self.durability, self.timeout_ms, self.dues is None, self.incarnation, numbered


class _Turn:
    """The place of an answer among those to the same connection."""

    __slots__ = ("answer", "pending", "reply")

    def __init__(self, pending: Pending, reply: wire.PublishReply | None = None) -> None:
        self.pending = pending
        self.reply = reply  # what to answer once it is confirmed
        self.answer: wire.PublishReply | Exception | None = None


class Confirmations:
    """The answers of one partition that are still to be given."""

    def __init__(
        self, partition: LeasedPartition, take_queued: Callable[[set[PublishingClient]], list[Pending]]
    ) -> None:
        self._partition = partition
        self._take_queued = take_queued  # takes what connections sent out of the queue
        self._turns: dict[PublishingClient, deque[_Turn]] = {}
        self._waiting: dict[tuple[str, int], list[_Turn]] = {}  # by level and timeout: stored, not confirmed
        self._lease: Lease | None = None  # under which these were stored
        self._lease_lost = False  # and may be gone since

    def may_begin(self, lease: Lease) -> bool:
        """Return whether something may be stored, which then is: it overtakes nothing of a lost lease."""
        if self._waiting and self._lease is not lease:
            return False
        if self._lease is not lease:
            self._lease, self._lease_lost = lease, False
        return True

    def begin(self, lease: Lease) -> None:
        """Something is about to be stored; Unavailable if it could overtake what a lost lease has stored."""
        if not self.may_begin(lease):
            raise Unavailable(
                f"what was published to {self._partition} before is not confirmed yet; try again"
            )

    def lease_lost(self) -> None:
        """What was stored under the lease may be gone."""
        self._lease_lost = True

    def stored(self, pending: Pending, reply: wire.PublishReply) -> None:
        """A PUBLISH is in memory: answer it, or have it confirmed first."""
        if pending.durability == "memory" or (reply.unowed and not reply.duplicates):
            self._answer(pending, reply)
            return
        turn = _Turn(pending, reply)
        self._turns.setdefault(pending.connection, deque()).append(turn)
        level = (pending.durability, pending.timeout_ms)
        waiting = self._waiting.get(level)
        if waiting is None:
            self._waiting[level] = [turn]
            self._partition.background.start(self._confirm_all, level)
        else:
            waiting.append(turn)

    def refuse(self, batch: Sequence[Pending], error: Exception) -> None:
        """Answer publishes that were not stored; what was sent behind them must not overtake them."""
        self._refuse_next(batch, error)
        for pending in batch:
            self._answer(pending, error)
        self._refuse_queued(batch, error)

    async def _confirm_all(self, level: tuple[str, int]) -> None:
        """Wait for a level until all that asked for it are answered."""
        try:
            while turns := self._waiting[level]:
                self._waiting[level] = []
                await self._confirm(turns, *level)
        finally:
            del self._waiting[level]

    async def _confirm(self, turns: list[_Turn], durability: str, timeout_ms: int) -> None:
        partition, lease = self._partition, self._lease
        error: Exception | None = None
        assert lease is not None
        try:
            await partition.call_once(partition.engine.confirm(lease, durability, timeout_ms))
            if self._lease_lost:  # another master has said so, who may not have them
                raise Unavailable(f"the lease of {partition} was lost meanwhile; try again")
        except (Fenced, TopicNotFound) as problem:
            error = Unavailable(f"{problem}; try again")
        except DurabilityNotReached as problem:  # they are in the log, and nothing can overtake them
            text = (
                str(problem) if problem.stored else f"{durability} is out of reach by now; they are in memory"
            )
            error = DurabilityNotReached(text, stored=True)
        except Exception as problem:
            if not isinstance(problem, BrokerError):
                log.exception("a bug while publishing to %s", partition)
            error = problem
        batch = [turn.pending for turn in turns]
        if error is not None:
            self._refuse_next(batch, error)
        else:
            counters = partition.engine.store.counters
            counters.publish_seconds.add(counters.now() - batch[0].came)
        for turn in turns:
            self._give(turn, error or turn.reply)
        if error is not None:
            self._refuse_queued(batch, error)

    # The order of answers

    def _answer(self, pending: Pending, answer: wire.PublishReply | Exception) -> None:
        """Answer a PUBLISH, behind those of its connection that came before it."""
        turns = self._turns.get(pending.connection)
        if turns is None:
            _send(pending, answer)
            return
        turn = _Turn(pending)
        turns.append(turn)
        self._give(turn, answer)

    def _give(self, turn: _Turn, answer: wire.PublishReply | Exception | None) -> None:
        turn.answer = answer
        turns = self._turns[turn.pending.connection]
        while turns and turns[0].answer is not None:
            first = turns.popleft()
            _send(first.pending, first.answer)
        if not turns:
            del self._turns[turn.pending.connection]

    # What is behind a failure

    def _refuse_next(self, batch: Sequence[Pending], error: Exception) -> None:
        """Refuse what comes from these connections until they say that they try again."""
        if _is_to_be_tried_again(error):
            for pending in batch:
                pending.connection.refuse_next(self._partition.topic, self._partition.number, error)

    def _refuse_queued(self, batch: Sequence[Pending], error: Exception) -> None:
        if _is_to_be_tried_again(error):
            for pending in self._take_queued({pending.connection for pending in batch}):
                self._answer(pending, error)


def _is_to_be_tried_again(error: Exception) -> bool:
    """Whether it may be stored later than now; what is in the log is not."""
    stored = isinstance(error, DurabilityNotReached) and error.stored
    return isinstance(error, BrokerError) and error.retriable and not stored


def _send(pending: Pending, answer: "wire.PublishReply | Exception | None") -> None:
    if isinstance(answer, wire.PublishReply):
        pending.connection.published(pending, answer)
    elif answer is not None:
        pending.connection.publish_failed(pending, answer)
