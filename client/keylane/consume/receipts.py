"""From messages to receipts, and from the broker's answer back to messages."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from keylane import wire
from keylane.consume.block import Block
from keylane.consume.leases import Held, Part
from keylane.errors import ProtocolError
from keylane.wire import MAX_BATCH, Properties, Type

_MAX_MESSAGES = 10_000  # that the receipts of one frame may stand for


class Terms(NamedTuple):
    """What is to be done with messages; those with equal terms go into the same frame."""

    kind: int
    delay_ms: int | None = None
    until_ms: int | None = None
    charged: bool = True

    def properties(self, stream: int, partition: int, sheet: "Sheet") -> Properties:
        """The properties of the frame that says so."""
        if self.kind == Type.ACK:
            return wire.Ack(stream, partition, _names(sheet))
        if self.kind == Type.NACK:
            return wire.Nack(stream, partition, self.delay_ms, self.until_ms, self.charged)
        return wire.Extend(stream, partition, self.delay_ms, self.until_ms)


ACK = Terms(int(Type.ACK))
NACK = Terms(int(Type.NACK))
GIVE_BACK = Terms(int(Type.NACK), charged=False)


class Sheet(NamedTuple):
    """The receipts of one frame: lane, token, first, last, …; the messages of each, and of all."""

    flat: list[str | int]
    places: list[Part]
    parts: list[Part]


def merge(parts: Sequence[Part]) -> list[Part]:
    """Parts in the order of their entries, neighbours joined."""
    merged: list[Part] = []
    for part in sorted(parts, key=_order) if len(parts) > 1 else parts:
        if merged and merged[-1][0] is part[0] and merged[-1][2] == part[1]:
            merged[-1] = (part[0], merged[-1][1], part[2])
        else:
            merged.append(part)
    return merged


def _order(part: Part) -> tuple[int, int]:
    return part[0].token, part[0].entries[part[1]]


def sheets(held: Held, parts: Iterable[Part]) -> Iterator[Sheet]:
    """Receipts for messages of one partition, cut to what a frame may carry."""
    sheet, messages = Sheet([], [], []), 0
    for block, begin, end in parts:
        entries, token = block.entries, block.token
        for lane, start, stop in held.runs(block, begin, end):
            if len(sheet.places) == MAX_BATCH or messages + stop - start > _MAX_MESSAGES:
                if begin < start:
                    sheet.parts.append((block, begin, start))
                    begin = start
                yield sheet
                sheet, messages = Sheet([], [], []), 0
            sheet.flat.extend((lane, token, entries[start], entries[stop - 1]))
            sheet.places.append((block, start, stop))
            messages += stop - start
        sheet.parts.append((block, begin, end))
    if sheet.places:
        yield sheet


def stale_messages(sheet: Sheet, reply: wire.SettleReply) -> Iterator[tuple[Block, int]]:
    """The messages that the broker calls stale."""
    for at in range(0, len(reply.stale), 3):
        place, first, last = reply.stale[at : at + 3]
        if not 0 <= place < len(sheet.places):
            raise ProtocolError(f"the worker calls receipt {place} of {len(sheet.places)} stale")
        block, start, stop = sheet.places[place]
        for index in range(start, stop):
            if first <= block.entries[index] <= last:
                yield block, index


def _names(sheet: "Sheet") -> list[int | str]:
    """Entry and name of each body of the messages of a frame."""
    names: list[int | str] = []
    for block, start, stop in sheet.parts:
        if found := block.body_names():
            for entry, name in zip(block.entries[start:stop], found[start:stop], strict=True):
                if name:
                    names += (entry, name)
    return names


def bodies_in(block: Block, ranges: Sequence[int]) -> list[str]:
    """The names of the bodies of a block's messages that are in ranges of entries: first, last, …"""
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
