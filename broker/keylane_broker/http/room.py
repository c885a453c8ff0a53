"""How much of a worker's memory requests may take: those read as a whole, and bodies that stream."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakValueDictionary

from starlette.requests import Request

from keylane.errors import MessageTooLarge, Overloaded, Unavailable
from keylane.payloads.store import PART
from keylane_broker.access.identity import EVERYBODY, Identity

_RETRY = 1.0  # seconds after which there may be room again
_AT_LEAST = 4  # bodies that stream at a time,
_PROGRESS = 65_536  # bytes that have to come in the time that is left for more: less only holds memory
_SHARE = 2  # of which one token may have a part: what it lets last for hours stops nobody else


class Room:
    """What is left of it."""

    def __init__(self, *, max_content: int, max_inflight: int, patience: float = 60.0) -> None:
        """`patience` is in seconds: in that time more of a content has to come."""
        self.inflight = 0  # bytes of contents that are read as a whole, and of answers that are not sent yet
        self.patience = patience
        # Each has a part that is stored or sent, and another one that comes meanwhile.
        self._most_transfers = max(_AT_LEAST, max_inflight // (2 * PART))
        self._transfers = asyncio.Semaphore(self._most_transfers)
        self._shares = WeakValueDictionary[
            str, asyncio.Semaphore
        ]()  # by whose they are, while there are some
        self.max_content = max_content
        self._max_inflight = max_inflight

    @asynccontextmanager
    async def transfer(self, who: Identity) -> AsyncIterator[None]:
        """Have a body stream. Who lets many of them last leaves most of the room to others."""
        name = who.token or who.name
        most = self._most_transfers if who is EVERYBODY else self._most_transfers // _SHARE
        if (share := self._shares.get(name)) is None:
            share = self._shares[name] = asyncio.Semaphore(most)
        async with share, self._transfers:
            yield

    def check(self, length: int) -> None:
        """Raise MessageTooLarge for a content that is too long to be read as a whole."""
        if length > self.max_content:
            raise MessageTooLarge(
                f"a request of {length} bytes or more: use up to {self.max_content} (max_frame)"
            )

    @property
    def left(self) -> int:
        """Bytes that an answer may have now."""
        return max(0, min(self.max_content, self._max_inflight - self.inflight))

    def expect(self, length: int) -> None:
        """Raise Overloaded if there is no room for so many bytes now; what counts is what comes of them."""
        if self.inflight and self.inflight + length > self._max_inflight:
            raise Overloaded(
                "the worker is reading the maximum number of request bytes (max_inflight_bytes)",
                retry_after=_RETRY,
            )

    def take(self, length: int) -> None:
        """Count bytes. Raises Overloaded if there is no room for them."""
        self.expect(length)
        self.inflight += length

    @contextmanager
    def counted(self, length: int) -> Iterator[None]:
        """Count bytes of an answer for a while."""
        self.inflight += length
        try:
            yield
        finally:
            self.inflight -= length


class Content:
    """What a request has, as a whole; it counts until the request has been answered."""

    def __init__(self, room: Room, request: Request) -> None:
        self._room = room
        self._request = request
        self._counted = 0
        self._progress = _PROGRESS

    async def read(self) -> bytes:
        """Return it."""
        said = self._request.headers.get("content-length", "")
        if said.isdigit():
            self._room.check(int(said))
            self._room.expect(int(said))
        chunks, size = list[bytes](), 0
        async for chunk in self.stream():
            chunks.append(chunk)
            size += len(chunk)
            self._room.check(size)
            self._count(len(chunk))
        return b"".join(chunks)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield it as it comes. Raises Unavailable if not enough does for a while."""
        chunks, patience = self._request.stream(), self._room.patience
        clock = asyncio.get_running_loop().time
        come, left = 0, patience  # bytes, and seconds of waiting for them that are left
        while True:
            began = clock()
            try:
                async with asyncio.timeout(left):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                what = f"less than {self._progress} bytes" if come else "nothing"
                raise Unavailable(f"{what} of the body came within {patience:g} s") from None
            if chunk is None:
                return
            come, left = come + len(chunk), left - (clock() - began)
            yield chunk
            if come >= self._progress:
                come, left = 0, patience

    async def stream_held(self) -> AsyncIterator[bytes]:
        """Yield what comes; it counts until hold() says what is left. With nothing left a byte will do."""
        self.hold(0)
        async for chunk in self.stream():
            self._count(len(chunk))
            yield chunk

    def hold(self, length: int) -> None:
        """Of what has been streamed so many bytes still wait for others."""
        self._room.inflight += length - self._counted
        self._counted = length
        self._progress = _PROGRESS if length else 1

    async def stream_counted(self, most: int) -> AsyncIterator[bytes]:
        """Yield it as it comes; the first bytes, which somebody gathers, count."""
        async for chunk in self.stream():
            if (more := min(len(chunk), most - self._counted)) > 0:
                self._count(more)
            yield chunk

    def _count(self, length: int) -> None:
        self._room.take(length)
        self._counted += length

    def release(self) -> None:
        """The request has been answered."""
        self._room.inflight -= self._counted
        self._counted = 0
