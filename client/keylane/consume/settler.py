"""Settling: acks, nacks and extensions, gathered into frames whoever they come from."""

import asyncio
from collections.abc import Callable
from time import monotonic

from keylane.consume.block import HANDED, SETTLED, SETTLING, STALE, Block, Span
from keylane.consume.leases import Leases
from keylane.consume.receipts import ACK, SettleKind, bodies_in
from keylane.consume.settle_calls import SettleCalls, SettleGroup, SettleWaiter
from keylane.consume.streams import Streams
from keylane.errors import ConnectionClosed, StaleReceipt
from keylane.tasks import Tasks
from keylane.types import Outcome
from keylane.wire import Type

_LINGER = 0.002  # seconds that what nobody waits for may wait for company
_ENOUGH = 500  # messages, not to linger any more


class Settler:
    """Settles the messages of one consumer."""

    def __init__(
        self,
        leases: Leases,
        streams: Streams,
        *,
        on_extended: Callable[[float], None],
        on_stale: Callable[[Block, int], None],
        delete_bodies: Callable[[list[str]], None],
    ) -> None:
        self._leases = leases
        self._calls = SettleCalls(leases, streams, on_extended, on_stale)
        self._on_stale = on_stale  # hears of what was settled in the background, and too late
        self._delete_bodies = delete_bodies
        self._groups: dict[tuple[int, SettleKind, bool], SettleGroup] = {}
        self._sent: dict[SettleGroup, SettleKind] = {}  # those that are not answered
        self._queued = 0
        self._timer: asyncio.Handle | None = None
        self._soon = False
        self._tasks = Tasks()
        self._closed = False

    # With an answer

    async def one(self, kind: SettleKind, block: Block, index: int) -> None:
        """Settle a message and wait for the answer; StaleReceipt if it comes too late."""
        span = block, index, index + 1
        self._leases.active = monotonic()
        waiter = SettleWaiter()
        if not self._join(kind, block, index, waiter):
            self._submit(kind, [span], waiter)
        await self._answered(kind, [span], waiter)
        if block.states[index] == STALE:
            raise StaleReceipt(
                f"message {block.id(index)}: its lease has ended and it is being redelivered"
                f"{self._leases.perhaps(block, index)}"
            )

    async def many(self, kind: SettleKind, spans: list[Span]) -> list[Outcome]:
        """Settle messages together; returns what became of each, in the order given."""
        waiter = SettleWaiter()
        accepted, joined, refused = self._accept(kind, spans, waiter)
        self._leases.active = monotonic()
        self._submit(kind, accepted, waiter)
        await self._answered(kind, accepted + joined, waiter)
        outcomes: list[Outcome] = []
        for block, start, stop in spans:
            if block.states.count(STALE, start, stop):
                outcomes += ["stale" if state == STALE else "settled" for state in block.states[start:stop]]
            else:
                outcomes += ["settled"] * (stop - start)
        for place in refused:
            outcomes[place] = "stale"
        return outcomes

    def _accept(
        self, kind: SettleKind, spans: list[Span], waiter: SettleWaiter
    ) -> tuple[list[Span], list[Span], set[int]]:
        """Return what can be settled, what is being settled as asked, and the places of the others."""
        now = monotonic()
        if len(set(spans)) == len(spans) and all(
            block.states.count(HANDED, start, stop) == stop - start and now < block.soonest
            for block, start, stop in spans
        ):
            return spans, [], set()
        accepted: list[Span] = []
        joined: list[Span] = []
        refused: set[int] = set()
        seen: set[Span] = set()
        single = [(block, index, index + 1) for block, start, stop in spans for index in range(start, stop)]
        for place, span in enumerate(single):
            if span in seen:
                refused.add(place)
                continue
            seen.add(span)
            try:
                joins = self._join(kind, span[0], span[1], waiter)
            except StaleReceipt:
                refused.add(place)
            else:
                (joined if joins else accepted).append(span)
        return accepted, joined, refused

    # Who asks again, and who waits no longer

    def _join(self, kind: SettleKind, block: Block, index: int, waiter: SettleWaiter) -> bool:
        """Wait with those who have asked for the same; StaleReceipt if it cannot be done any more.

        What was answered when nobody waited is told to who asks next.
        """
        state = block.states[index]
        if state >= SETTLED and block.unheard.get(index) == kind.type:
            return True
        under_way, group = self._under_way(block, index) if state == SETTLING else (None, None)
        if group is not None and under_way == kind.type:
            group.wait(waiter)
            return True
        self._leases.check(block, index, under_way)
        return False

    def _under_way(self, block: Block, index: int) -> tuple[int | None, SettleGroup | None]:
        """Return how a message is being settled, and with which others."""
        queued = ((group, kind) for (_, kind, _), group in self._groups.items())
        for group, kind in (*self._sent.items(), *queued):
            if kind.type != Type.EXTEND and any(
                span[0] is block and span[1] <= index < span[2] for span in group.spans
            ):
                return kind.type, group
        return None, None

    async def _answered(self, kind: SettleKind, spans: list[Span], waiter: SettleWaiter) -> None:
        """Wait for the answer; who is cancelled meanwhile may ask for it again."""
        heard = False
        try:
            if waiter.pending:
                await waiter.done
            heard = True
        finally:
            for block, start, stop in spans:
                if (heard and not block.unheard) or kind.type == Type.EXTEND:
                    continue
                for index in range(start, stop):
                    if heard:
                        block.unheard.pop(index, None)
                    else:
                        block.unheard[index] = kind.type

    # In the background

    def settle_later(self, block: Block, index: int, kind: SettleKind) -> bool:
        """Settle soon, in company; on_stale hears if it comes too late. True if much is queued."""
        state = block.states[index]
        if state in (SETTLING, SETTLED):  # the application did it itself
            return False
        now = monotonic()
        if state != HANDED or now >= block.soonest:
            try:
                self._leases.check(block, index)
            except StaleReceipt:
                self._on_stale(block, index)
                return False
        self._leases.active = now
        group = self._groups.get((block.partition, ACK, True))
        if self._closed:
            self._on_stale(block, index)  # it goes back with all that the consumer holds
        elif kind is not ACK or group is None or block.gone is not None:
            self._submit(kind, [(block, index, index + 1)], None)
        else:  # mostly: one more of many, often next to the last
            block.states[index] = SETTLING
            last = group.spans[-1]
            if last[0] is block and last[2] == index:
                group.spans[-1] = (block, last[1], index + 1)
            else:
                group.spans.append((block, index, index + 1))
            self._queued += 1
            if self._queued >= _ENOUGH:
                self._schedule(soon=True)
        return self._queued >= _ENOUGH

    def submit(self, kind: SettleKind, spans: list[Span]) -> asyncio.Future[None]:
        """Settle what the application has not asked for; the future is done when it is answered."""
        waiter = SettleWaiter()
        self._submit(kind, spans, waiter)
        if not waiter.pending:
            waiter.done.set_result(None)
        return waiter.done

    # Sending

    def _submit(self, kind: SettleKind, spans: list[Span], waiter: SettleWaiter | None) -> None:
        if self._closed and spans:
            raise ConnectionClosed("the consumer is closed: its unsettled messages were given back")
        extending = kind.type == Type.EXTEND
        for span in spans:
            block, start, stop = span
            if block.gone is not None:
                self._settle_here(span, extending)
                continue
            if not extending:
                block.states[start:stop] = bytes((SETTLING,)) * (stop - start)
            place = block.partition, kind, waiter is None
            group = self._groups.get(place)
            if group is None:
                group = self._groups[place] = SettleGroup(later=waiter is None)
            group.spans.append(span)
            self._queued += stop - start
            if waiter is not None:
                group.wait(waiter)
        if kind.type == Type.NACK:
            self._leases.rewind(span for span in spans if span[0].gone is None)
        self._schedule(waiter is not None or self._queued >= _ENOUGH)

    def _settle_here(self, span: Span, extending: bool) -> None:
        """At most once: it was settled before it came; only its body is left to be deleted."""
        if extending:
            return
        block, start, stop = span
        names = block.body_names()
        if names:
            gone = set(bodies_in(block, block.gone or []))
            self._delete_bodies([name for name in names[start:stop] if name in gone])
        self._leases.settle_range(block, start, stop)

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
        for (partition, kind, _), group in groups.items():
            self._sent[group] = kind
            self._tasks.start(self._send(partition, kind, group))

    async def _send(self, partition: int, kind: SettleKind, group: SettleGroup) -> None:
        try:
            await self._calls.send(partition, kind, group)
        finally:  # before anybody who waits for it goes on
            del self._sent[group]

    async def finish(self) -> None:
        """Take no more, send all that is queued and wait for the answers."""
        self._closed = True
        self.flush()
        await self._tasks.finish()

    async def close(self) -> None:
        """Give up what is not answered."""
        await self._tasks.cancel()
