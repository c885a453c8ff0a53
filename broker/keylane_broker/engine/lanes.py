"""Lanes: their names, and what the keys of a subscription say of each."""

from collections.abc import Iterator

from keylane_broker.engine.values import Message


def split_by_lane(
    mode: str, first: int, last: int, messages: dict[int, Message]
) -> Iterator[tuple[str, int, int, list[Message]]]:
    """Cut delivered entries into what one receipt can stand for: lane, first, last, messages."""
    if mode != "key_shared":
        found = [messages[entry] for entry in range(first, last + 1) if entry in messages]
        yield "" if mode == "shared" else "=", first, last, found
        return
    lane, start, part = None, first, list[Message]()
    for entry in range(first, last + 1):
        message = messages.get(entry)
        if message is None:
            continue
        own = "=" + message.key if message.key else ""
        if lane is not None and own != lane:
            yield lane, start, entry - 1, part
            start, part = entry, []
        lane = own
        part.append(message)
    if lane is not None:
        yield lane, start, last, part


def parse_queued(member: str) -> tuple[str, range]:
    """A lane, and the entries that a member of its queue stands for."""
    lane, (_, first, last) = parse_beyond(member)
    return lane, range(first, last + 1)


def parse_beyond(member: str) -> tuple[str, tuple[int, int, int]]:
    """A lane, and token, first and last of what is leased beyond its record; the token is 0 in a queue."""
    lane, _, stretch = member.rpartition("\0")
    entries, _, token = stretch.partition(":")
    first, _, last = entries.partition("-")
    return lane, (int(token or 0), int(first), int(last or first))
