"""Downloading bodies: those of messages that came together, before the application asks for them."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from keylane.consume.block import BUFFERED, HANDED, SETTLED, Block, Span
from keylane.consume.receipts import bodies_in
from keylane.errors import BrokerError, MessageTooLarge, PayloadMissing
from keylane.payloads.bodies import Bodies
from keylane.tasks import Tasks, shared

_AHEAD = 1_000  # bodies of a block, and in all that nobody has asked for
_AHEAD_BYTES = 4 * 1024 * 1024  # of messages that the application does not have yet
_TOGETHER = 250  # bodies in one call of the store: nobody has the first before it has the last
_CLOSED = "the consumer was closed during the download"

Part = tuple[Block, list[int]]
Found = dict[Block, dict[int, bytes | Exception | None]]
Fetch = asyncio.Task[Found]


class Downloads:
    """The bodies of one consumer's messages."""

    def __init__(self, topic: str, bodies: Bodies) -> None:
        self._topic = topic
        self._bodies = bodies
        self._tasks = Tasks()
        self._ahead: deque[tuple[Block, int]] = deque()  # blocks fetched before they are handed out, bytes
        self._length = 0  # bytes of all of them
        self._next: list[Part] | None = None  # to be fetched together, as soon as the event loop gets there
        self._room = 0  # bodies that may still be among them
        self._fetching: Fetch  # the task that will
        self.unasked = 0  # bodies fetched ahead since the application last asked for one

    def expect(self, block: Block) -> None:
        """A block has come: fetch its bodies ahead, unless there are many or nobody asks for any."""
        if self.unasked >= _AHEAD or not self._may_read_ahead(block) or not block.body_names():
            return
        while self._ahead and BUFFERED not in self._ahead[0][0].states:
            self._length -= self._ahead.popleft()[1]
        wanted, length = _worth_fetching(block, 0, _AHEAD_BYTES - self._length)
        if wanted:
            self._ahead.append((block, length))
            self._length += length
            self.unasked += len(wanted)
            self._start(block, wanted)

    def begin(self, block: Block, index: int) -> None:
        """Fetch a body that is about to be asked for, together with others of which that is so."""
        if block.body_name(index) and index not in block.bodies and index not in block.fetches:
            self._start(block, [index])

    def _may_read_ahead(self, block: Block) -> bool:
        """Whether bodies may be read that nobody has asked for yet.

        At most once what is read is deleted, but a worker may yet say where a body is to be read.
        """
        return block.gone is None or not self._bodies.pinned

    async def one(self, block: Block, index: int) -> bytes:
        """Return the body of a message."""
        if not block.body_name(index):
            return self._checked(block, index, block.body_here(index))
        fetch = block.fetches.get(index)
        if fetch is None:
            following = list[int]()
            if self._may_read_ahead(block):
                following, _ = _worth_fetching(block, index + 1, _AHEAD_BYTES - block.sizes[index])
            fetch = self._start(block, [index, *following])
        found = await shared(fetch, _CLOSED)
        body = found[block].get(index)
        if isinstance(body, Exception):
            raise body.again() if isinstance(body, BrokerError) else body
        return self._checked(block, index, body)

    async def all(self, spans: Sequence[Span]) -> list[bytes]:
        """Return the bodies of messages in their order."""
        self.unasked = 0
        for fetch in {fetch for block, _, _ in spans for fetch in block.fetches.values()}:
            with suppress(BrokerError):  # then it is asked for again
                await shared(fetch, _CLOSED)
        wanted = [
            (block, index, name)
            for block, start, stop in spans
            for index in range(start, stop)
            if index not in block.bodies and (name := block.body_name(index))
        ]
        found = await self._bodies.get(self._topic, [name for _, _, name in wanted]) if wanted else []
        for (block, index, _), body in zip(wanted, found, strict=True):
            _keep(block, index, self._checked(block, index, body))
        for block in dict.fromkeys(block for block, _, _ in wanted if block.gone is not None):
            self._read(block, {name for own, _, name in wanted if own is block})
        fetched = {(block, index): body for (block, index, _), body in zip(wanted, found, strict=True)}
        return [
            fetched.get((block, index))
            or block.bodies.get(index)
            or self._checked(block, index, block.body_here(index))
            for block, start, stop in spans
            for index in range(start, stop)
        ]

    async def close(self) -> None:
        """End what is under way."""
        await self._tasks.cancel()

    def _start(self, block: Block, indexes: list[int]) -> "Fetch":
        """Fetch bodies, together with others that are wanted in this turn of the event loop."""
        for at in range(0, len(indexes), _TOGETHER):
            some = indexes[at : at + _TOGETHER]
            if self._next is None or self._room < len(some):
                self._next, self._room = [], _TOGETHER
                self._fetching = self._tasks.start(self._fetch(self._next))
            self._next.append((block, some))
            self._room -= len(some)
            block.fetches.update(dict.fromkeys(some, self._fetching))
        return block.fetches[indexes[0]]

    async def _fetch(self, parts: "list[Part]") -> "Found":
        if self._next is parts:
            self._next = None
        found: Found = {block: {} for block, _ in parts}
        try:
            await self._get(parts, found)
        finally:
            for block, indexes in parts:
                for index in indexes:
                    block.fetches.pop(index, None)
        for block, bodies in found.items():
            for index, body in bodies.items():
                if isinstance(body, bytes):
                    _keep(block, index, body)
            if block.gone is not None:
                read = (index for index, body in bodies.items() if isinstance(body, bytes))
                self._read(block, {block.body_name(index) for index in read})
        return found

    async def _get(self, parts: "list[Part]", found: "Found") -> None:
        """Get bodies; where the store refuses all of them it may be because of a few."""
        try:
            bodies = iter(await self._read_all([(block, at) for block, indexes in parts for at in indexes]))
        except Exception as error:
            if isinstance(error, BrokerError) and error.retriable:
                raise
            if len(parts) == 1:
                ((block, indexes),) = parts
                if len(indexes) == 1:
                    found[block][indexes[0]] = error
                    return
                half = len(indexes) // 2
                parts = [(block, indexes[:half]), (block, indexes[half:])]
            for part in parts:
                await self._get([part], found)
        else:
            for block, indexes in parts:
                found[block].update(zip(indexes, bodies, strict=False))

    async def _read_all(self, wanted: list[tuple[Block, int]]) -> Sequence[bytes | Exception | None]:
        """Read bodies; a worker those no longer than their producers say: its memory is for all."""
        names = [block.body_names()[index] for block, index in wanted]
        if not self._bodies.pinned:
            return await self._bodies.get(self._topic, names)
        found = await self._bodies.get_up_to(self._topic, names, [block.sizes[at] for block, at in wanted])
        return [
            MessageTooLarge(f"the body of message {block.id(at)} has more than {block.sizes[at]} bytes")
            if isinstance(body, bool)
            else body
            for (block, at), body in zip(wanted, found, strict=True)
        ]

    def _read(self, block: Block, names: set[str]) -> None:
        """At most once: nobody acks, so what has been read is deleted if nobody else is owed it."""
        self._bodies.delete_later(
            self._topic, [name for name in bodies_in(block, block.gone or []) if name in names]
        )

    def _checked(self, block: Block, index: int, body: bytes | None) -> bytes:
        if body is None:
            raise PayloadMissing(
                f"the body of message {block.id(index)} of {self._topic!r} is not in {self._bodies.where}; "
                "ack the message to drop it, or nack it to retry later"
            )
        return body


def _keep(block: Block, index: int, body: bytes) -> None:
    if block.states[index] < SETTLED:
        block.bodies[index] = body


def _worth_fetching(block: Block, start: int, room: int) -> tuple[list[int], int]:
    """Return the messages from `start` on whose bodies are worth fetching now, and the bytes of these."""
    names, sizes = block.body_names(), block.sizes
    wanted, left = list[int](), room
    for index in range(start, len(block)):
        if (
            not names[index]
            or block.states[index] > HANDED
            or index in block.bodies
            or index in block.fetches
        ):
            continue
        left -= sizes[index]
        if left < 0 or len(wanted) == _AHEAD:
            left += sizes[index]
            break
        wanted.append(index)
    return wanted, room - left
