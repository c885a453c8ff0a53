"""The messages of one DATA frame, as they came."""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from keylane import wire
from keylane.errors import ProtocolError
from keylane.wire.about import INLINE, body_names, body_places, body_size, body_sizes, inline_body
from keylane.wire.ledgers import id_maker

# What became of a message of a block: handed is what the application has in its hands.
BUFFERED, HANDED, SETTLING, SETTLED, STALE = range(5)

_BODY = tuple[list[int], list[str], list[int], list[str | int]]


class Block:
    """The messages of one DATA frame; each is an index, and hardly anything is made per message."""

    __slots__ = (
        "abouts",
        "bodies",
        "deadline",
        "deadlines",
        "doubtful",
        "ended",
        "entries",
        "faults",
        "fetches",
        "gone",
        "handed",
        "held",
        "lane_deadlines",
        "ledgers",
        "names",
        "noted",
        "open",
        "partition",
        "retries",
        "sizes",
        "soonest",
        "states",
        "taken",
        "texts",
        "token",
        "unheard",
    )

    def __init__(self, frame: wire.Frame, data: wire.Data, now: float) -> None:
        ranges: list[int]
        self.texts: list[str]  # key, uid, about, …
        self.retries: dict[int, int]
        ranges, self.texts, retries, lanes = wire.unpack(frame.body, _BODY)
        self.partition = data.partition
        self.held = data.held  # it was before this consumer asked: delivered to one of its name
        self.token = data.token
        self.ledgers = data.ledgers
        self.entries: Sequence[int]  # of each index
        if len(ranges) == 2:
            self.entries = range(ranges[0], ranges[1] + 1)
        else:
            self.entries = [
                entry for at in range(0, len(ranges), 2) for entry in range(ranges[at], ranges[at + 1] + 1)
            ]
        size = len(self.entries)
        if len(self.texts) != size * 3 or len(retries) % 2 or len(lanes) % 2:
            raise ProtocolError("a DATA frame whose lists do not belong together")
        # Index -> why nobody can read what the message says of itself.
        self.faults = wire.about_faults(self.texts[2::3], stored=True)
        for index in self.faults:
            self.texts[index * 3 + 2] = wire.UNREADABLE
        self.retries = dict(zip(retries[::2], retries[1::2], strict=True)) if retries else {}
        self.states = bytearray(size)
        self.open = size  # those neither settled nor stale
        shift = now - frame.timestamp_ms / 1000  # from the cluster's clock to ours, which never jumps
        self.deadline = data.deadline_ms / 1000 + shift
        self.deadlines: dict[int, float] = {}  # of messages without a lane that were extended by themselves
        self.lane_deadlines = {
            str(lane): float(at) / 1000 + shift for lane, at in zip(lanes[::2], lanes[1::2], strict=True)
        }
        self.soonest = min([self.deadline, *self.lane_deadlines.values()])  # before it no lease ends
        self.gone = data.settled  # at most once: ranges of entries that nobody needs any more
        if self.gone is not None:
            self.deadline = self.soonest = float("inf")
        self.handed: list[tuple[int, float]] = []  # index, when it and those after it went to the application
        self.noted = float("-inf")  # the last of these times
        self.taken: dict[int, float] = {}  # index -> when it alone went there
        self.unheard: dict[int, int] = {}  # index -> how it is or was settled, and who asked for it has gone
        self.doubtful: set[int] = set()  # settled perhaps: it was asked for, and there was no answer
        self.ended: set[int] = set()  # being settled, when their leases ended or may have
        self.names: list[str] | None = None
        self.sizes: list[int] = []  # once the names are known
        self.abouts: dict[int, wire.About] = {}
        self.bodies: dict[int, bytes] = {}
        self.fetches: dict[int, asyncio.Task[Any]] = {}  # index -> what brings its body

    def __len__(self) -> int:
        return len(self.states)

    def about(self, index: int) -> wire.About:
        """Return what the producer said about a message."""
        about = self.abouts.get(index)
        if about is None:
            text, uid = self.texts[index * 3 + 2], self.texts[index * 3 + 1]
            about = self.abouts[index] = wire.unpack_about(text, uid)
            about.attributes.pop(wire.REDRIVEN, None)  # its producer has not said that
        return about

    def body_size(self, index: int) -> int:
        """Return the size of a message's body in bytes."""
        return body_size(self.texts[index * 3 + 2])

    def body_names(self) -> list[str]:
        """Return the name of each body in the store, "" where there is none; empty if it has none of them."""
        if self.names is None:
            places = body_places(self.texts[2::3])
            names = body_names(self.texts[1::3], places)
            self.names = names if any(names) else []
            self.sizes = body_sizes(places)
        return self.names

    def body_name(self, index: int) -> str:
        """Return the name of a message's body in the payload store, "" if it has none there."""
        names = self.body_names()
        return names[index] if names else ""

    def body_here(self, index: int) -> bytes | None:
        """Return the body of a message that the store does not have: empty, or inline; None if unreadable."""
        name = self.texts[index * 3 + 2].split(" ", 4)[3].partition(":")[2]
        return inline_body(name) if name[:1] == INLINE else b""

    def id(self, index: int) -> str:
        """`<partition>:<ledger>-<entry>`."""
        return f"{self.partition}:{id_maker(self.ledgers)(self.entries[index])}"

    def handed_at(self, index: int) -> float:
        """Return about when a message went to the application; -inf where nobody has noted it."""
        if (alone := self.taken.get(index)) is not None:
            return alone
        at = bisect_right(self.handed, index, key=lambda item: item[0])
        return self.handed[at - 1][1] if at else float("-inf")


Span = tuple[Block, int, int]  # messages that lie together: block, first index, index behind the last
