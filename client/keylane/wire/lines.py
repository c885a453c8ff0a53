"""Lines of a stream as Redis sends them: the answer to XRANGE, which a worker hands on unread."""

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import hiredis

from keylane.errors import ProtocolError

_END = b"\r\n"
_fields = itemgetter(1)


def count(answer: bytes) -> int:
    """Return how many lines there are in an answer."""
    head, _, _ = answer[:32].partition(_END)
    if not (head.startswith(b"*") and head[1:].isdigit()):
        raise ProtocolError(f"no lines of a stream: {answer[:32]!r}")
    return int(head[1:])


def parse(answer: bytes) -> list[Any]:
    """Return the lines, `[id, [field, value, …]]` each."""
    reader = hiredis.Reader(encoding="utf-8")
    reader.feed(answer)
    found = reader.gets()
    if not isinstance(found, list) or reader.has_data():
        raise ProtocolError(f"no lines of a stream: {answer[:32]!r}")
    return found


def read(answers: Iterable[bytes]) -> tuple[list[int], list[str]]:
    """Ranges of the entries that are there (first, last, …), and the values of all their fields, flat."""
    ranges: list[int] = []
    flat: list[str] = []
    for found in map(parse, answers):
        if found:
            values = itemgetter(*range(1, len(found[0][1]), 2))
            flat += chain.from_iterable(map(values, map(_fields, found)))
            _add_ranges(ranges, found)
    return ranges, flat


def entry_of(line: list[Any]) -> int:
    """Return the entry that a line of a stream has in its id."""
    id: str = line[0]
    return int(id[id.index("-") + 1 :])


def _add_ranges(ranges: list[int], found: list[Any]) -> None:
    """Add the entries that were found to flat ranges; without holes nothing is done for each of them."""
    first, last = entry_of(found[0]), entry_of(found[-1])
    if last - first == len(found) - 1:
        _add_range(ranges, first, last)
        return
    for entry in map(entry_of, found):
        _add_range(ranges, entry, entry)


def _add_range(ranges: list[int], first: int, last: int) -> None:
    if ranges and ranges[-1] == first - 1:
        ranges[-1] = last
    else:
        ranges += (first, last)


def pack(value: Any) -> bytes:
    """Return an answer as a server would send it."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return b"*%d\r\n%b" % (len(value), b"".join(map(pack, value)))
    text = value.encode() if isinstance(value, str) else value
    return b"$%d\r\n%b\r\n" % (len(text), text)
