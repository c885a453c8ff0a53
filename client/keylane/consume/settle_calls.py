"""Carries settlements to the broker and applies what it answers."""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from keylane import wire
from keylane.consume.block import HANDED, SETTLING, STALE, Block
from keylane.consume.leases import Part
from keylane.consume.receipts import Sheet, Terms, merge, sheets, stale_messages
from keylane.errors import BrokerError, ConnectionClosed, Fenced, Unavailable
from keylane.retry import backoff
from keylane.wire import Frame, Type

if TYPE_CHECKING:
    from keylane.consume.consumer import Consumer

_log = logging.getLogger("keylane.client")


class Group:
    """Messages of one partition with the same terms, and who waits for them."""

    __slots__ = ("later", "parts", "tickets")

    def __init__(self, later: bool) -> None:
        self.later = later  # nobody waits: on_stale hears of those that are stale
        self.parts: list[Part] = []
        self.tickets: list[Ticket] = []

    def wait(self, ticket: "Ticket") -> None:
        """Tell one more, once."""
        if not self.tickets or self.tickets[-1] is not ticket:
            self.tickets.append(ticket)
            ticket.pending += 1


class Ticket:
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


class Courier:
    """Sends the groups of one consumer until they are answered."""

    def __init__(self, consumer: "Consumer", tell_stale: Callable[[Block, int], None]) -> None:
        self._consumer = consumer
        self._held = consumer.held
        self._links = consumer.links
        self._tell_stale = tell_stale

    async def carry(self, partition: int, terms: Terms, group: Group) -> None:
        """Send a group and tell those who wait what became of it."""
        error: Exception | None = None
        try:
            for sheet in sheets(self._held, merge(group.parts)):
                answer = await self._exchange(partition, terms, sheet)
                self._apply(terms, sheet, answer)
        except Exception as problem:
            error = problem
            self._undo(terms, group, problem)
        except asyncio.CancelledError:
            error = ConnectionClosed("the consumer was closed before the broker answered")
            self._undo(terms, group, error)
            raise
        finally:
            if terms.kind == Type.NACK:
                self._held.rewound(group.parts)
            for ticket in group.tickets:
                ticket.answered(error)
            for block, start, stop in group.parts if group.later else ():
                for index in range(start, stop):
                    if block.states[index] == STALE:
                        self._tell_stale(block, index)

    async def _exchange(self, partition: int, terms: Terms, sheet: Sheet) -> Frame:
        """Ask until there is an answer: a lost connection or a moment's trouble is not one."""
        end = monotonic() + self._links.timeout
        body = wire.pack(sheet.flat)
        question = terms.properties(self._links.stream, partition, sheet)
        attempt = 0
        while True:
            link = await self._links.reach(partition, max(0.0, end - monotonic()))
            connection = link.current
            try:
                return await link.ask(partition, question, body)
            except BrokerError as error:
                if terms.kind != Type.EXTEND:  # it may have been done all the same
                    for block, start, stop in sheet.parts:
                        block.doubtful.update(range(start, stop))
                wait = backoff(attempt)
                # A consumer that is being subscribed anew is not known to the worker for a moment.
                passing = error.retriable or link.current is not connection
                if not passing or monotonic() + wait > end:
                    raise
                if isinstance(error, Fenced | Unavailable) and self._links.serving(partition) is link:
                    self._links.doubt(partition, error)
            attempt += 1
            await asyncio.sleep(wait)

    def _apply(self, terms: Terms, sheet: Sheet, answer: Frame) -> None:
        reply = wire.properties_of(answer, wire.SettleReply)
        held, now = self._held, monotonic()
        stale = list(stale_messages(sheet, reply))
        if terms.kind == Type.EXTEND:
            for block, index in stale:
                if block.states[index] <= HANDED:  # what is being settled, or is, has an answer of its own
                    held.end(block, index)
            self._extended(
                _without(sheet.places, stale), now + (reply.deadline_ms - answer.timestamp_ms) / 1000
            )
            return
        if terms.kind == Type.NACK:
            stale = [place for place in stale if not self._was_done(*place, now)]
        for block, index in stale:
            held.stale(block, index)
        for block, start, stop in sheet.parts:
            if not stale:
                held.settle_range(block, start, stop)
                continue
            for index in range(start, stop):
                if block.states[index] == SETTLING:
                    held.settled(block, index)
        held.restart(_without(sheet.parts, stale), now + held.lease)

    def _was_done(self, block: Block, index: int, now: float) -> bool:
        """What is stale though its lease goes on was nacked by an attempt whose answer was lost.

        Or its session is being ended, in steps, and nobody has told us yet. It has gone back either way.
        Of an ack that says nothing: what is told to be settled must be.
        """
        goes_on = index not in block.ended and now < self._held.deadline(block, index)
        return goes_on and index in block.doubtful and block.states[index] == SETTLING

    def _extended(self, places: list[Part], deadline: float) -> None:
        for block, start, stop in places:
            if not self._held.lane(block, start):
                self._held.extend_range(block, start, stop, deadline)
        self._held.extend_lanes(places, deadline)
        self._consumer.keeper.wake_at(deadline)

    def _undo(self, terms: Terms, group: Group, error: Exception) -> None:
        """It was not done: who waits may try again while the leases go on, the rest is let go."""
        if terms.kind == Type.EXTEND:
            return
        for block, start, stop in group.parts:
            for index in range(start, stop):
                if block.states[index] != SETTLING:
                    continue
                if terms.charged and not group.later:
                    block.states[index] = HANDED
                else:  # the application has never had it, or is done with it: it is to come again
                    self._held.end(block, index)
        if group.later:
            count = sum(stop - start for _, start, stop in group.parts)
            _log.warning("%d messages were not settled and will come again: %s", count, error)


def _without(parts: list[Part], stale: list[tuple[Block, int]]) -> list[Part]:
    """The parts without the messages that are stale."""
    if not stale:
        return parts
    gone = set(stale)
    single = [(block, index, index + 1) for block, start, stop in parts for index in range(start, stop)]
    return [part for part in single if (part[0], part[1]) not in gone]
