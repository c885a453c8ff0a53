"""Sends acks, nacks and extensions to the worker of a partition, and applies what it answers."""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic

from keylane import wire
from keylane.consume.block import HANDED, SETTLING, STALE, Block, Span
from keylane.consume.leases import Leases
from keylane.consume.receipts import ReceiptBatch, SettleKind, merge, receipt_batches, stale_messages
from keylane.consume.streams import Streams
from keylane.errors import BrokerError, ConnectionClosed, Fenced, Unavailable
from keylane.retry import backoff
from keylane.wire import Frame, Type

_log = logging.getLogger("keylane.client")


class SettleGroup:
    """Messages of one partition settled in the same way, and who waits for them."""

    __slots__ = ("later", "spans", "waiters")

    def __init__(self, later: bool) -> None:
        self.later = later  # nobody waits: on_stale hears of those that are stale
        self.spans: list[Span] = []
        self.waiters: list[SettleWaiter] = []

    def wait(self, waiter: "SettleWaiter") -> None:
        """Tell one more, once."""
        if not self.waiters or self.waiters[-1] is not waiter:
            self.waiters.append(waiter)
            waiter.pending += 1


class SettleWaiter:
    """Somebody waits until some groups are answered."""

    __slots__ = ("done", "pending")

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pending = 0

    def answered(self, error: Exception | None) -> None:
        """One of its groups is done."""
        self.pending -= 1
        if self.done.done():
            return
        if error is not None:
            self.done.set_exception(error.again() if isinstance(error, BrokerError) else error)
            self.done.exception()  # retrieved: somebody who was cancelled does not look
        elif self.pending == 0:
            self.done.set_result(None)


class SettleCalls:
    """Sends the groups of one consumer until they are answered."""

    def __init__(
        self,
        leases: Leases,
        streams: Streams,
        on_extended: Callable[[float], None],
        on_stale: Callable[[Block, int], None],
    ) -> None:
        self._leases = leases
        self._streams = streams
        self._on_extended = on_extended  # hears the new deadline
        self._on_stale = on_stale

    async def send(self, partition: int, kind: SettleKind, group: SettleGroup) -> None:
        """Send a group and tell those who wait what became of it."""
        error: Exception | None = None
        try:
            for batch in receipt_batches(self._leases, merge(group.spans)):
                answer = await self._exchange(partition, kind, batch)
                self._apply(kind, batch, answer)
        except Exception as problem:
            error = problem
            self._undo(kind, group, problem)
        except asyncio.CancelledError:
            error = ConnectionClosed("the consumer was closed before the broker answered")
            self._undo(kind, group, error)
            raise
        finally:
            if kind.type == Type.NACK:
                self._leases.rewound(group.spans)
            for waiter in group.waiters:
                waiter.answered(error)
            for block, start, stop in group.spans if group.later else ():
                for index in range(start, stop):
                    if block.states[index] == STALE:
                        self._on_stale(block, index)

    async def _exchange(self, partition: int, kind: SettleKind, batch: ReceiptBatch) -> Frame:
        """Ask until there is an answer: a lost connection or a moment's trouble is not one."""
        end = monotonic() + self._streams.timeout
        body = wire.pack(batch.flat)
        question = kind.properties(self._streams.number, partition, batch)
        attempt = 0
        while True:
            stream = await self._streams.reach(partition, max(0.0, end - monotonic()))
            connection = stream.current
            try:
                return await stream.ask(partition, question, body)
            except BrokerError as error:
                if kind.type != Type.EXTEND:  # it may have been done all the same
                    for block, start, stop in batch.spans:
                        block.doubtful.update(range(start, stop))
                wait = backoff(attempt)
                # A consumer that is being subscribed anew is not known to the worker for a moment.
                passing = error.retriable or stream.current is not connection
                if not passing or monotonic() + wait > end:
                    raise
                if isinstance(error, Fenced | Unavailable) and self._streams.serving(partition) is stream:
                    self._streams.doubt(partition, error)
            attempt += 1
            await asyncio.sleep(wait)

    def _apply(self, kind: SettleKind, batch: ReceiptBatch, answer: Frame) -> None:
        reply = wire.properties_of(answer, wire.SettleReply)
        leases, now = self._leases, monotonic()
        stale = list(stale_messages(batch, reply))
        if kind.type == Type.EXTEND:
            for block, index in stale:
                if block.states[index] <= HANDED:  # what is being settled, or is, has an answer of its own
                    leases.stale(block, index)
            self._extended(
                _without(batch.places, stale), now + (reply.deadline_ms - answer.timestamp_ms) / 1000
            )
            return
        if kind.type == Type.NACK:
            stale = [place for place in stale if not self._was_done(*place, now)]
        for block, index in stale:
            leases.stale(block, index)
        for block, start, stop in batch.spans:
            if not stale:
                leases.settle_range(block, start, stop)
                continue
            for index in range(start, stop):
                if block.states[index] == SETTLING:
                    leases.settled(block, index)
        leases.restart(_without(batch.spans, stale), now + leases.lease)

    def _was_done(self, block: Block, index: int, now: float) -> bool:
        """Return whether a stale nack was done: its lease goes on, and an answer was lost before.

        Or its session is being ended, in steps, and nobody has told us yet. It has gone back either way.
        Of an ack that says nothing: what is told to be settled must be.
        """
        goes_on = index not in block.ended and now < self._leases.deadline(block, index)
        return goes_on and index in block.doubtful and block.states[index] == SETTLING

    def _extended(self, places: list[Span], deadline: float) -> None:
        for block, start, stop in places:
            if not self._leases.lane(block, start):
                self._leases.extend_range(block, start, stop, deadline)
        self._leases.extend_lanes(places, deadline)
        self._on_extended(deadline)

    def _undo(self, kind: SettleKind, group: SettleGroup, error: Exception) -> None:
        """It was not done: who waits may try again while the leases go on, the rest is let go."""
        if kind.type == Type.EXTEND:
            return
        for block, start, stop in group.spans:
            for index in range(start, stop):
                if block.states[index] != SETTLING:
                    continue
                if kind.charged and not group.later:
                    block.states[index] = HANDED
                else:  # the application has never had it, or is done with it: it is to come again
                    self._leases.stale(block, index)
        if group.later:
            count = sum(stop - start for _, start, stop in group.spans)
            _log.warning("%d messages were not settled and will be redelivered: %s", count, error)


def _without(spans: list[Span], stale: list[tuple[Block, int]]) -> list[Span]:
    """Return the spans without the messages that are stale."""
    if not stale:
        return spans
    gone = set(stale)
    single = [(block, index, index + 1) for block, start, stop in spans for index in range(start, stop)]
    return [span for span in single if (span[0], span[1]) not in gone]
