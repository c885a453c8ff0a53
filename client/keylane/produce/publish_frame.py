"""The messages of one PUBLISH frame, and who waits for the answer."""

import asyncio
from bisect import bisect_left
from enum import Enum
from typing import Protocol

from keylane import wire
from keylane.errors import BrokerError, DurabilityNotReached, ProtocolError, TopicNotFound
from keylane.produce.outgoing import Slice
from keylane.wire import MAX_BATCH, Frame


class Cancellable(Protocol):
    """Something under way that nobody may want any more."""

    def cancel(self) -> object:
        """Nobody wants it any more."""


class State(Enum):
    """How far a frame is."""

    FILLING = 1
    UPLOADING = 2
    READY = 3
    SENT = 4
    FAILED = 5  # to be sent again
    DONE = 6


class PublishWaiter:
    """Some messages of a call, all in one frame, and who waits for their answer."""

    __slots__ = ("answer", "count", "frame", "length", "refused", "start")

    def __init__(
        self, frame: "PublishFrame", answer: "asyncio.Future[wire.PublishReply | None]", count: int
    ) -> None:
        self.frame = frame
        self.answer = answer  # None: each of them was refused
        self.start = frame.size  # their places in the frame
        self.count = count
        self.length = 0  # bytes that they take
        self.refused: dict[int, Exception] = {}  # those that are not in the frame any more, of all of them

    def fail(self, error: BaseException) -> None:
        """Tell who waits."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # retrieved: somebody who was cancelled does not look


class PublishFrame:
    """The messages of one PUBLISH frame and who waits for them."""

    __slots__ = (
        "answer",
        "bodies",
        "created",
        "dues",
        "durability",
        "extras",
        "flat",
        "gone",
        "leaving",
        "length",
        "named",
        "number",
        "queued",
        "resent",
        "size",
        "state",
        "strict",
        "text",
        "upload",
        "waiters",
    )

    def __init__(self, created: float, durability: str, later: bool, named: bool = False) -> None:
        self.created = created
        self.durability = durability
        self.named = named  # somebody chose the uids, by which its messages are to be known
        self.number = 0  # of the first of them, once it was sent; what is for later has none
        self.dues: list[int] | None = [] if later else None
        self.answer: asyncio.Future[Frame] | None = None  # that is waited for; None if it was never sent
        self.flat: list[str] = []  # key, uid, about, …
        self.bodies: dict[int, tuple[str, bytes]] = {}  # place in the frame -> name, body
        self.extras: dict[int, tuple[int, int]] = {}  # place in the frame -> as in Slice
        self.waiters: list[PublishWaiter] = []
        self.size = 0  # messages
        self.text = 0  # characters
        self.queued = self.length = 0  # messages and bytes for which it has room
        self.gone: set[int] = set()  # places to be left out of the frame
        self.leaving: list[PublishWaiter] = []  # whose bodies are being stored
        self.upload: Cancellable | None = None  # while its bodies are being stored
        self.state = State.FILLING
        self.resent = False
        self.strict = False  # without it nothing goes out that was added behind it, in the same way

    def add(
        self, item: Slice, start: int, limit: int, answer: "asyncio.Future[wire.PublishReply | None]"
    ) -> PublishWaiter:
        """Take messages from `start` on, until there are `limit` characters or no more may be in a frame."""
        flat, text = item.flat, item.text
        size = len(flat) // 3
        count = min(size - start, MAX_BATCH - self.size)
        if self.text + text > limit:
            count = _fitting(flat, start, count, limit - self.text)
        waiter = PublishWaiter(self, answer, count)
        self.waiters.append(waiter)
        length = 0
        for place in range(start, start + count) if item.bodies else ():
            if (body := item.bodies.get(place)) is not None:
                self.bodies[place - start + self.size] = body
                length += len(body[1])
        for place, its in item.extras.items() if item.extras else ():
            if start <= place < start + count:
                self.extras[place - start + self.size] = its
        if count < size:
            flat = flat[start * 3 : (start + count) * 3]
            text = sum(map(len, flat))
        self.flat += flat
        self.text += text
        waiter.length = length + text
        self.length += waiter.length
        self.queued += count
        if self.dues is not None:
            self.dues += item.dues[start : start + count]
        self.size += count
        return waiter

    def remove(self, waiter: PublishWaiter) -> list[str]:
        """Leave nothing of messages but their places; returns the names of their bodies."""
        places = range(waiter.start, waiter.start + waiter.count)
        self.gone.update(places)
        texts = slice(waiter.start * 3, (waiter.start + waiter.count) * 3)
        self.text -= sum(map(len, self.flat[texts]))
        self.flat[texts] = [""] * (3 * waiter.count)
        return [self.bodies.pop(place)[0] for place in places if place in self.bodies]

    def refuse(self, refused: dict[int, Exception]) -> None:
        """Go on without some messages, of which those who wait are told."""
        self.gone.update(refused)
        for waiter in list(self.waiters):
            places = range(waiter.start, waiter.start + waiter.count)
            waiter.refused = {place - waiter.start: refused[place] for place in places if place in refused}
            if len(waiter.refused) == waiter.count:
                self.waiters.remove(waiter)
                if not waiter.answer.done():
                    waiter.answer.set_result(None)
        self.close_ranks()

    def fail(self, error: BaseException) -> None:
        """Tell everybody who waits."""
        for waiter in self.waiters:
            waiter.fail(error)

    def succeed(self, reply: wire.PublishReply) -> None:
        """Tell everybody who waits."""
        for waiter in self.waiters:
            if not waiter.answer.done():
                waiter.answer.set_result(reply)

    def close_ranks(self) -> None:
        """Leave those out that have gone."""
        gone = sorted(self.gone)
        self.gone = set()
        for place in reversed(gone):
            del self.flat[place * 3 : place * 3 + 3]
            if self.dues is not None:
                del self.dues[place]
        self.bodies = {place - bisect_left(gone, place): body for place, body in self.bodies.items()}
        self.extras = {
            place - bisect_left(gone, place): its for place, its in self.extras.items() if place not in gone
        }
        for waiter in self.waiters:
            before, within = bisect_left(gone, waiter.start), bisect_left(gone, waiter.start + waiter.count)
            waiter.start -= before
            waiter.count -= within - before
        self.size -= len(gone)

    def unused(self, reply: wire.PublishReply) -> list[str]:
        """Return the names of bodies that no message in the log needs."""
        if not self.bodies or not (reply.duplicates or reply.unowed or reply.unmatched or reply.full):
            return []
        unmatched = {*reply.unmatched, *reply.full}
        return [
            name
            for place, (name, _) in self.bodies.items()
            # Sent twice, a duplicate may be this very message, and the body in use.
            if (not self.resent if place in reply.duplicates else reply.unowed or place in unmatched)
        ]

    def may_be_stored(self, error: BaseException) -> bool:
        """Return whether messages that are given up may still be in the log: then their bodies stay."""
        if self.answer is None:  # never sent
            return False
        if isinstance(error, TopicNotFound):  # gone with the topic
            return False
        if self.resent or (isinstance(error, DurabilityNotReached) and error.stored):
            return True
        # Nobody has said what became of it, or somebody has failed who may have stored it before.
        return self.state is State.FAILED or type(error) in (BrokerError, ProtocolError)


def _fitting(flat: list[str], start: int, count: int, room: int) -> int:
    """Return how many messages use up so many characters, at most `count`."""
    for taken in range(1, count):
        at = (start + taken - 1) * 3
        room -= sum(map(len, flat[at : at + 3]))
        if room <= 0:
            return taken
    return count
