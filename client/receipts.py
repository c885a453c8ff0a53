"""From messages to receipts, and from the broker's answer back to messages."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from client import wire
from client.errors import ProtocolError
from client.held import Held, Part
from client.message import Block
from client.wire import MAX_BATCH, Properties

_MAX_MESSAGES = 10_000  # that the receipts of one frame may stand for


class Terms(NamedTuple):
    """What is to be done with messages; those with equal terms go into the same frame."""

    kind: wire.Type
    delay_ms: int | None = None
    until_ms: int | None = None
    charged: bool = True

    def properties(self, stream: int, partition: int) -> Properties:
        """The properties of the frame that says so."""
        if self.kind == wire.Type.ACK:
            return wire.Ack(stream, partition)
        if self.kind == wire.Type.NACK:
            return wire.Nack(stream, partition, self.delay_ms, self.until_ms, self.charged)
        return wire.Extend(stream, partition, self.delay_ms, self.until_ms)


ACK = Terms(wire.Type.ACK)
NACK = Terms(wire.Type.NACK)
GIVE_BACK = Terms(wire.Type.NACK, charged=False)


class Sheet(NamedTuple):
    """The receipts of one frame: lane, token, first, last, …; and the messages of each."""

    flat: list[str | int]
    places: list[Part]


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
    flat: list[str | int] = []
    places: list[Part] = []
    messages = 0
    for block, begin, end in parts:
        entries, token = block.entries, block.token
        for lane, start, stop in held.runs(block, begin, end):
            if len(places) == MAX_BATCH or messages + stop - start > _MAX_MESSAGES:
                yield Sheet(flat, places)
                flat, places, messages = [], [], 0
            flat += (lane, token, entries[start], entries[stop - 1])
            places.append((block, start, stop))
            messages += stop - start
    if places:
        yield Sheet(flat, places)


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


def forgotten_bodies(sheet: Sheet, reply: wire.SettleReply) -> list[str]:
    """The names of the bodies whose messages no subscription owes any more."""
    names = []
    ranges = list(zip(reply.forgotten[::2], reply.forgotten[1::2], strict=True))
    for block, start, stop in sheet.places if ranges else ():
        low, high = block.entries[start], block.entries[stop - 1]
        for first, last in ranges:
            if first > high or last < low:
                continue
            for index in range(start, stop):
                if first <= block.entries[index] <= last and (name := block.body_of(index)[0]):
                    names.append(name)
    return names
