"""Lanes: what one receipt can stand for, and their records, which docs/keyspace.md shows."""

from collections.abc import Iterator
from typing import NamedTuple

from keylane.wire.lanes import lane_of_mode, lanes_of_keys
from keylane_broker.engine.values import Message


class Lane(NamedTuple):
    """A lane's record, taken apart as lua/lib/lane_text.lua does, and what is leased beyond it."""

    name: str
    consumer: str
    waiting: int
    due: int
    counted: int  # messages that the record says are beyond it
    listed: list[tuple[int, int, int]]  # token, first, last
    beyond: list[tuple[int, int, int]]

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """All that is leased, or, of a run, waits."""
        return self.listed + self.beyond

    @property
    def is_run(self) -> bool:
        """Whether it is a run of entries without order."""
        return self.name.startswith("#")

    @property
    def entries(self) -> list[int]:
        """The entries in its ranges, in their order."""
        return [entry for _, first, last in self.ranges for entry in range(first, last + 1)]


def parse_lane(name: str, record: str, beyond: list[tuple[int, int, int]] | None = None) -> Lane:
    """Take a lane's record apart; `beyond` is what is leased beyond it."""
    consumer, _, waiting, due, leased = record.split("|", 4)
    counted, listed = 0, []
    for item in leased.split():
        if item.startswith("+"):
            counted = int(item)
            continue
        token, _, span = item.partition(":")
        first, _, last = span.partition("-")
        listed.append((int(token), int(first), int(last or first)))
    return Lane(name, consumer, int(waiting), int(due), counted, listed, beyond or [])


def parse_queued(member: str) -> tuple[str, range]:
    """Return a lane, and the entries that a member of its queue stands for."""
    lane, (_, first, last) = parse_beyond(member)
    return lane, range(first, last + 1)


def parse_beyond(member: str) -> tuple[str, tuple[int, int, int]]:
    """Return a lane, and token, first and last of what is leased beyond its record; token 0 in a queue."""
    lane, _, stretch = member.rpartition("\0")
    entries, _, token = stretch.partition(":")
    first, _, last = entries.partition("-")
    return lane, (int(token or 0), int(first), int(last or first))


def split_by_lane(
    mode: str, first: int, last: int, messages: dict[int, Message]
) -> Iterator[tuple[str, int, int, list[Message]]]:
    """Cut delivered entries into what one receipt can stand for: lane, first, last, messages."""
    found = [(entry, messages[entry]) for entry in range(first, last + 1) if entry in messages]
    if mode != "key_shared":
        yield lane_of_mode(mode), first, last, [message for _, message in found]
        return
    lane, start, part = None, first, list[Message]()
    lanes = lanes_of_keys(message.key for _, message in found)
    for (entry, message), own in zip(found, lanes, strict=True):
        if lane is not None and own != lane:
            yield lane, start, entry - 1, part
            start, part = entry, []
        lane = own
        part.append(message)
    if lane is not None:
        yield lane, start, last, part
