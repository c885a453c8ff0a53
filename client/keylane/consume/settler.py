"""Settling: acks, nacks and extensions, gathered into frames whoever they come from."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING

from keylane.consume.block import HANDED, SETTLED, SETTLING, STALE, Block
from keylane.consume.leases import Part
from keylane.consume.message import Batch, Message
from keylane.consume.receipts import ACK, Terms, bodies_in
from keylane.consume.settle_calls import Courier, Group, Ticket
from keylane.errors import ConnectionClosed, InvalidArgument, StaleReceipt
from keylane.tasks import Tasks
from keylane.times import Seconds, instant_ms, milliseconds
from keylane.types import Outcome
from keylane.wire import Type

if TYPE_CHECKING:
    from keylane.consume.consumer import Consumer

_LINGER = 0.002  # seconds that what nobody waits for may wait for company
_ENOUGH = 500  # messages, not to linger any more
_log = logging.getLogger("keylane.client")


class Settler:
    """Settles the messages of one consumer."""

    def __init__(self, consumer: "Consumer", on_stale: Callable[[Message], None] | None) -> None:
        self._consumer = consumer
        self._held = consumer.held
        self._courier = Courier(consumer, self._tell_stale)
        self._on_stale = on_stale
        self._groups: dict[tuple[int, Terms, bool], Group] = {}
        self._carried: dict[Group, Terms] = {}  # those that are not answered
        self._queued = 0
        self._timer: asyncio.Handle | None = None
        self._soon = False
        self._tasks = Tasks()
        self._closed = False

    # One message

    async def ack_one(self, block: Block, index: int) -> None:
        """Ack and wait for the answer; StaleReceipt if it comes too late."""
        await self._one(ACK, block, index)

    async def nack_one(self, block: Block, index: int, delay: Seconds | None, until: datetime | None) -> None:
        """Nack and wait for the answer; StaleReceipt if it comes too late."""
        await self._one(nack_terms(delay, until), block, index)

    async def extend_one(
        self, block: Block, index: int, seconds: Seconds | None, until: datetime | None
    ) -> None:
        """Extend and wait for the answer; StaleReceipt if it comes too late."""
        await self._one(extend_terms(seconds, until), block, index)

    async def _one(self, terms: Terms, block: Block, index: int) -> None:
        part = block, index, index + 1
        self._held.active = monotonic()
        ticket = Ticket()
        if not self._join(terms, block, index, ticket):
            self._submit(terms, [part], ticket)
        await self._answered(terms, [part], ticket)
        if block.states[index] == STALE:
            raise StaleReceipt(
                f"message {block.id(index)}: its lease has ended, and it is delivered again"
                f"{self._held.perhaps(block, index)}"
            )

    # Who asks again, and who waits no longer

    def _join(self, terms: Terms, block: Block, index: int, ticket: Ticket) -> bool:
        """Wait with those who have asked for the same; StaleReceipt if it cannot be done any more.

        What was answered when nobody waited is told to who asks next.
        """
        state = block.states[index]
        if state >= SETTLED and block.unheard.get(index) == terms.kind:
            return True
        kind, group = self._under_way(block, index) if state == SETTLING else (None, None)
        if group is not None and kind == terms.kind:
            group.wait(ticket)
            return True
        self._held.check(block, index, kind)
        return False

    def _under_way(self, block: Block, index: int) -> tuple[int | None, Group | None]:
        """How a message is being settled, and with which others."""
        queued = ((group, terms) for (_, terms, _), group in self._groups.items())
        for group, terms in (*self._carried.items(), *queued):
            if terms.kind != Type.EXTEND and any(
                part[0] is block and part[1] <= index < part[2] for part in group.parts
            ):
                return terms.kind, group
        return None, None

    async def _answered(self, terms: Terms, parts: list[Part], ticket: Ticket) -> None:
        """Wait for the answer; who is cancelled meanwhile may ask for it again."""
        heard = False
        try:
            if ticket.pending:
                await ticket.done
            heard = True
        finally:
            for block, start, stop in parts:
                if (heard and not block.unheard) or terms.kind == Type.EXTEND:
                    continue
                for index in range(start, stop):
                    if heard:
                        block.unheard.pop(index, None)
                    else:
                        block.unheard[index] = terms.kind

    # Many messages

    async def many(self, terms: Terms, messages: Iterable[Message]) -> list[Outcome]:
        """Settle messages together; what became of each, in the order given."""
        messages = messages if isinstance(messages, Batch) else list(messages)
        ticket = Ticket()
        parts, joined, refused = self._accept(terms, messages, ticket)
        self._held.active = monotonic()
        self._submit(terms, parts, ticket)
        await self._answered(terms, parts + joined, ticket)
        outcomes: list[Outcome] = []
        if isinstance(messages, Batch) and not refused:
            for block, start, stop in messages.parts:
                if not block.states.count(STALE, start, stop):
                    outcomes += ["settled"] * (stop - start)
                else:
                    outcomes += [
                        "stale" if state == STALE else "settled" for state in block.states[start:stop]
                    ]
            return outcomes
        for place, message in enumerate(messages):
            stale = place in refused or message._block.states[message._index] == STALE
            outcomes.append("stale" if stale else "settled")
        return outcomes

    def _accept(
        self, terms: Terms, messages: Sequence[Message], ticket: Ticket
    ) -> tuple[list[Part], list[Part], set[int]]:
        """Those that can be settled, those that are being settled as asked, and the places of the others."""
        if isinstance(messages, Batch):
            now = monotonic()
            if all(
                block.consumer is self._consumer
                and block.states.count(HANDED, start, stop) == stop - start
                and now < block.soonest
                for block, start, stop in messages.parts
            ):
                return list(messages.parts), [], set()
        parts: list[Part] = []
        joined: list[Part] = []
        refused: set[int] = set()
        seen: set[Message] = set()
        for place, message in enumerate(messages):
            block, index = message._block, message._index
            if block.consumer is not self._consumer:
                raise InvalidArgument(f"message {message.id} was delivered to another consumer")
            if message in seen:
                refused.add(place)
                continue
            seen.add(message)
            try:
                joins = self._join(terms, block, index, ticket)
            except StaleReceipt:
                refused.add(place)
            else:
                (joined if joins else parts).append((block, index, index + 1))
        return parts, joined, refused

    # In the background

    def settle_later(self, block: Block, index: int, terms: Terms) -> bool:
        """Settle soon, in company; on_stale hears if it comes too late. True if much is queued."""
        state = block.states[index]
        if state in (SETTLING, SETTLED):  # the application did it itself
            return False
        now = monotonic()
        if state != HANDED or now >= block.soonest:
            try:
                self._held.check(block, index)
            except StaleReceipt:
                self._tell_stale(block, index)
                return False
        self._held.active = now
        group = self._groups.get((block.partition, ACK, True))
        if self._closed:
            self._tell_stale(block, index)  # it goes back with all that the consumer holds
        elif terms is not ACK or group is None or block.gone is not None:
            self._submit(terms, [(block, index, index + 1)], None)
        else:  # mostly: one more of many, often next to the last
            block.states[index] = SETTLING
            last = group.parts[-1]
            if last[0] is block and last[2] == index:
                group.parts[-1] = (block, last[1], index + 1)
            else:
                group.parts.append((block, index, index + 1))
            self._queued += 1
            if self._queued >= _ENOUGH:
                self._schedule(soon=True)
        return self._queued >= _ENOUGH

    def submit(self, terms: Terms, parts: list[Part]) -> asyncio.Future[None]:
        """Settle what the application has not asked for; the future is done when it is answered."""
        ticket = Ticket()
        self._submit(terms, parts, ticket)
        if not ticket.pending:
            ticket.done.set_result(None)
        return ticket.done

    # Sending

    def _submit(self, terms: Terms, parts: list[Part], ticket: Ticket | None) -> None:
        if self._closed and parts:
            raise ConnectionClosed("the consumer is closed: what it had not settled has gone back")
        extending = terms.kind == Type.EXTEND
        for part in parts:
            block, start, stop = part
            if block.gone is not None:
                self._settle_here(part, extending)
                continue
            if not extending:
                block.states[start:stop] = bytes((SETTLING,)) * (stop - start)
            place = block.partition, terms, ticket is None
            group = self._groups.get(place)
            if group is None:
                group = self._groups[place] = Group(later=ticket is None)
            group.parts.append(part)
            self._queued += stop - start
            if ticket is not None:
                group.wait(ticket)
        if terms.kind == Type.NACK:
            self._held.rewind(part for part in parts if part[0].gone is None)
        self._schedule(ticket is not None or self._queued >= _ENOUGH)

    def _settle_here(self, part: Part, extending: bool) -> None:
        """At most once: it was settled before it came; only its body is left to be deleted."""
        if extending:
            return
        block, start, stop = part
        names = block.body_names()
        if names:
            gone = set(bodies_in(block, block.gone or []))
            self._consumer.forget([name for name in names[start:stop] if name in gone])
        self._held.settle_range(block, start, stop)

    def _schedule(self, soon: bool) -> None:
        if not self._groups or (self._timer is not None and (self._soon or not soon)):
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._soon = soon
        self._timer = loop.call_soon(self.flush) if soon else loop.call_later(_LINGER, self.flush)

    def flush(self) -> None:
        """Send all that is queued."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        groups, self._groups, self._queued = self._groups, {}, 0
        for (partition, terms, _), group in groups.items():
            self._carried[group] = terms
            self._tasks.start(self._carry(partition, terms, group))

    async def _carry(self, partition: int, terms: Terms, group: Group) -> None:
        try:
            await self._courier.carry(partition, terms, group)
        finally:  # before anybody who waits for it goes on
            del self._carried[group]

    async def finish(self) -> None:
        """Take no more, send all that is queued and wait for the answers."""
        self._closed = True
        self.flush()
        await self._tasks.finish()

    async def close(self) -> None:
        """Give up what is not answered."""
        await self._tasks.cancel()

    def _tell_stale(self, block: Block, index: int) -> None:
        if self._on_stale is not None:
            try:
                self._on_stale(Message(block, index))
            except Exception:
                _log.exception("on_stale failed for message %s", block.id(index))


def nack_terms(delay: Seconds | None, until: datetime | None) -> Terms:
    """Terms of a nack as the application asks for it."""
    if delay is not None and until is not None:
        raise InvalidArgument("nack takes delay or until, not both")
    return Terms(int(Type.NACK), milliseconds("delay", delay), instant_ms("until", until))


def extend_terms(seconds: Seconds | None, until: datetime | None) -> Terms:
    """Terms of an extension as the application asks for it."""
    if (seconds is None) == (until is None):
        raise InvalidArgument("extend takes seconds or until")
    return Terms(int(Type.EXTEND), milliseconds("seconds", seconds), instant_ms("until", until))
