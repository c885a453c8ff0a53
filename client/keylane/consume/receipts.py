"""From messages to receipts, and from the broker's answer back to messages."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import chain, repeat
from typing import NamedTuple

from keylane import wire
from keylane.consume.block import Block, Span
from keylane.consume.lanes import Lanes
from keylane.errors import InvalidArgument, ProtocolError
from keylane.times import Seconds, instant_ms, milliseconds
from keylane.wire import MAX_BATCH, Properties, Type

_REASON = 1_000  # characters of why a message is nacked
_MAX_MESSAGES = 10_000  # that the receipts of one frame may stand for


class SettleKind(NamedTuple):
    """How messages are settled; those of equal kind go into the same frame."""

    type: int  # of the frame
    delay_ms: int | None = None
    until_ms: int | None = None
    charged: bool = True
    reason: str = ""

    def properties(self, stream: int, partition: int, batch: "ReceiptBatch") -> Properties:
        """Return the properties of the frame that says so."""
        if self.type == Type.ACK:
            return wire.Ack(stream, partition, _names(batch))
        if self.type == Type.NACK:
            return wire.Nack(stream, partition, self.delay_ms, self.until_ms, self.charged, self.reason)
        return wire.Extend(stream, partition, self.delay_ms, self.until_ms)


ACK = SettleKind(int(Type.ACK))
NACK = SettleKind(int(Type.NACK))
LAPSED = NACK._replace(reason="its lease ended")  # as the broker says it
GIVE_BACK = SettleKind(int(Type.NACK), charged=False)


def nack_kind(delay: Seconds | None, until: datetime | None, reason: str | None = None) -> SettleKind:
    """Return the kind of a nack as the application asks for it."""
    if delay is not None and until is not None:
        raise InvalidArgument("nack takes either delay or until, not both")
    if not isinstance(reason, str | None):
        raise InvalidArgument(f"reason is {reason!r:.60}: use text")
    why = (reason or "")[:_REASON]
    return SettleKind(int(Type.NACK), milliseconds("delay", delay), instant_ms("until", until), reason=why)


def failure_kind(error: BaseException) -> SettleKind:
    """Return the kind of a nack after an error: its type and text go into the message's history."""
    return NACK._replace(reason=f"{type(error).__name__}: {error}"[:_REASON])


def extend_kind(seconds: Seconds | None, until: datetime | None) -> SettleKind:
    """Return the kind of an extension as the application asks for it."""
    if (seconds is None) == (until is None):
        raise InvalidArgument("extend takes either seconds or until")
    return SettleKind(int(Type.EXTEND), milliseconds("seconds", seconds), instant_ms("until", until))


class ReceiptBatch(NamedTuple):
    """The receipts of one frame: lane, token, first, last, …; the messages of each, and of all."""

    flat: list[str | int]
    places: list[Span]
    spans: list[Span]


def merge(spans: Sequence[Span]) -> list[Span]:
    """Parts in the order of their entries, neighbours joined."""
    merged: list[Span] = []
    for span in sorted(spans, key=_order) if len(spans) > 1 else spans:
        if merged and merged[-1][0] is span[0] and merged[-1][2] == span[1]:
            merged[-1] = (span[0], merged[-1][1], span[2])
        else:
            merged.append(span)
    return merged


def _order(span: Span) -> tuple[int, int]:
    return span[0].token, span[0].entries[span[1]]


def receipt_batches(lanes: Lanes, spans: Iterable[Span]) -> Iterator[ReceiptBatch]:
    """Receipts for messages of one partition, cut to what a frame may carry."""
    batch, messages = ReceiptBatch([], [], []), 0
    for block, begin, end in spans:
        entries, token, count = block.entries, block.token, end - begin
        fits = len(batch.places) + count <= MAX_BATCH and messages + count <= _MAX_MESSAGES
        if fits and (names := lanes.apart(block, begin, end)):  # as mostly: a receipt for each message
            single = entries[begin:end]
            batch.flat.extend(chain.from_iterable(zip(names, repeat(token), single, single, strict=False)))
            batch.places.extend((block, at, at + 1) for at in range(begin, end))
            batch.spans.append((block, begin, end))
            messages += count
            continue
        for lane, start, stop in lanes.runs(block, begin, end):
            if len(batch.places) == MAX_BATCH or messages + stop - start > _MAX_MESSAGES:
                if begin < start:
                    batch.spans.append((block, begin, start))
                    begin = start
                yield batch
                batch, messages = ReceiptBatch([], [], []), 0
            batch.flat.extend((lane, token, entries[start], entries[stop - 1]))
            batch.places.append((block, start, stop))
            messages += stop - start
        batch.spans.append((block, begin, end))
    if batch.places:
        yield batch


def stale_messages(batch: ReceiptBatch, reply: wire.SettleReply) -> Iterator[tuple[Block, int]]:
    """Yield the messages that the broker calls stale."""
    for at in range(0, len(reply.stale), 3):
        place, first, last = reply.stale[at : at + 3]
        if not 0 <= place < len(batch.places):
            raise ProtocolError(f"the worker calls receipt {place} stale, of {len(batch.places)}")
        block, start, stop = batch.places[place]
        for index in range(start, stop):
            if first <= block.entries[index] <= last:
                yield block, index


def _names(batch: "ReceiptBatch") -> list[int | str]:
    """Entry and name of each body of the messages of a frame."""
    names: list[int | str] = []
    for block, start, stop in batch.spans:
        if found := block.body_names():
            for entry, name in zip(block.entries[start:stop], found[start:stop], strict=True):
                if name:
                    names += (entry, name)
    return names


def bodies_in(block: Block, ranges: Sequence[int]) -> list[str]:
    """Return the names of the bodies of a block's messages that are in ranges of entries: first, last, …"""
    names = block.body_names()
    if not names:
        return []
    low, high = block.entries[0], block.entries[-1]
    if isinstance(block.entries, list):
        low, high = min(block.entries), max(block.entries)
    within = set[int]()
    for first, last in zip(ranges[::2], ranges[1::2], strict=True):
        within.update(range(max(first, low), min(last, high) + 1))
    return [name for entry, name in zip(block.entries, names, strict=True) if name and entry in within]
