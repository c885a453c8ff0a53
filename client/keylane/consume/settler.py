"""Settling: acks, nacks and extensions, gathered into frames whoever they come from."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from time import monotonic

from keylane.consume.block import HANDED, SETTLED, SETTLING, STALE, Block, Span
from keylane.consume.leases import Leases
from keylane.consume.receipts import ACK, GIVE_BACK, SettleKind, bodies_in
from keylane.consume.settle_calls import SettleCalls, SettleGroup, SettleWaiter
from keylane.consume.streams import Streams
from keylane.errors import ConnectionClosed, StaleReceipt
from keylane.types import Outcome
from keylane.wire import Type

_LINGER = 0.002  # seconds that what nobody waits for may wait for company,
_PATIENCE = 0.05  # and while acks of its partition are under way, unless they are answered before
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
        self._calls = SettleCalls(leases, streams, on_extended, on_stale, self._ended, self._give_back)
        self._on_stale = on_stale  # hears of what was settled in the background, and too late
        self._delete_bodies = delete_bodies
        self._groups: dict[tuple[int, SettleKind, bool], SettleGroup] = {}
        self._acks: SettleGroup | None = None  # to which the last message was added in the background
        self._acking: Counter[int] = Counter()  # partition -> groups acked in the background, not answered
        self._since = 0  # messages settled in the background since the event loop had a turn
        self._timer: asyncio.Handle | None = None
        self._at = 0.0  # when it flushes
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
        for group in (*self._calls.under_way, *self._groups.values()):
            if group.kind.type != Type.EXTEND and any(
                span[0] is block and span[1] <= index < span[2] for span in group.spans
            ):
                return group.kind.type, group
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
        """Settle soon, in company; on_stale hears if it comes too late. True if it is time for a turn."""
        now = monotonic()
        if (block.states[index] != HANDED or now >= block.soonest) and not self._still_held(block, index):
            return False
        self._leases.active = now
        group = self._acks
        if self._closed:
            self._on_stale(block, index)  # it goes back with all that the consumer holds
        elif kind is not ACK or group is None or group.partition != block.partition or block.gone is not None:
            self._submit(kind, [(block, index, index + 1)], None)
        else:  # mostly: one more of many, often next to the last
            block.states[index] = SETTLING
            group.size += 1
            last = group.spans[-1]
            if last[0] is block and last[2] == index:
                group.spans[-1] = (block, last[1], index + 1)
            else:
                group.spans.append((block, index, index + 1))
            if group.size >= _ENOUGH:
                self._flush_within(0.0)
        self._since += 1
        if self._since < _ENOUGH:
            return False
        self._since = 0
        return True

    def _still_held(self, block: Block, index: int) -> bool:
        """Return whether a message can be settled; on_stale hears of it if that is too late."""
        if block.states[index] in (SETTLING, SETTLED):  # the application did it itself
            return False
        try:
            self._leases.check(block, index)
        except StaleReceipt:
            self._on_stale(block, index)
            return False
        return True

    def _give_back(self, spans: list[Span]) -> None:
        """Give back what came while a lane was being nacked; a consumer that closes gives back all it has."""
        if not self._closed:
            self.submit(GIVE_BACK, spans)

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
        urgent = waiter is not None
        for span in spans:
            block, start, stop = span
            if block.gone is not None:
                self._settle_here(span, extending)
                continue
            if not extending:
                block.states[start:stop] = bytes((SETTLING,)) * (stop - start)
            group = self._group(block.partition, kind, later=waiter is None)
            group.spans.append(span)
            group.size += stop - start
            urgent |= group.size >= _ENOUGH
            if waiter is not None:
                group.wait(waiter)
        if kind.type == Type.NACK:
            self._leases.rewind(span for span in spans if span[0].gone is None)
        if self._groups:
            self._flush_within(0.0 if urgent else _LINGER)

    def _group(self, partition: int, kind: SettleKind, *, later: bool) -> SettleGroup:
        place = partition, kind, later
        group = self._groups.get(place)
        if group is None:
            group = self._groups[place] = SettleGroup(partition, kind, later)
        if later and kind is ACK:
            self._acks = group
        return group

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

    def _flush_within(self, delay: float) -> None:
        """Have what is queued sent in so many seconds, if not before."""
        loop = asyncio.get_running_loop()
        at = loop.time() + delay if delay else 0.0
        if self._timer is not None:
            if self._at <= at:
                return
            self._timer.cancel()
        self._at = at
        self._timer = loop.call_at(at, self.flush) if delay else loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send what is queued, but for acks that had better wait for those before them to be answered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._acks, self._since = None, 0
        groups, self._groups = self._groups, {}
        patient = self._patient(groups.values()) if self._acking and not self._closed else ()
        for place, group in groups.items():
            if group.partition in patient:
                self._groups[place] = group
                continue
            if group.later and group.kind is ACK:
                self._acking[group.partition] += 1
            self._calls.send(group)
        if self._groups:
            oldest = min(group.since for group in self._groups.values())
            self._flush_within(max(0.0, oldest + _PATIENCE - monotonic()))

    def _patient(self, groups: Iterable[SettleGroup]) -> set[int]:
        """Return partitions of which nothing is sent now: acks that nobody waits for, and little of them.

        A frame costs much the same for one message as for hundreds, and the answer to the last comes soon.
        """
        now = monotonic()
        patient = {partition for partition, count in self._acking.items() if count}
        for group in groups:
            waits = group.later and group.kind is ACK and group.size < _ENOUGH
            if not waits or now >= group.since + _PATIENCE:
                patient.discard(group.partition)
        return patient

    def _ended(self, group: SettleGroup) -> None:
        """A group is done with: what has waited for that goes out."""
        if group.later and group.kind is ACK:
            self._acking[group.partition] -= 1
            if not self._acking[group.partition]:
                del self._acking[group.partition]
                if (waiting := self._groups.get((group.partition, ACK, True))) is not None:
                    self._flush_within(max(0.0, waiting.since + _LINGER - monotonic()))

    async def finish(self) -> None:
        """Take no more, send all that is queued and wait for the answers."""
        self._closed = True
        self.flush()
        await self._calls.finish()

    async def close(self) -> None:
        """Give up what is not answered."""
        await self._calls.close()
