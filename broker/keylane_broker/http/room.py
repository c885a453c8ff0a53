"""How much of a worker's memory requests may take: those read as a whole, and bodies that stream."""

import asyncio

from starlette.requests import Request

from keylane.errors import MessageTooLarge, Overloaded
from keylane.payloads.store import PART

_RETRY = 1.0  # seconds after which there may be room again
_AT_LEAST = 4  # bodies that stream at a time


class Room:
    """What is left of it."""

    def __init__(self, *, max_content: int, max_inflight: int) -> None:
        self.inflight = 0  # bytes of contents that are read as a whole
        # Each has a part that is stored or sent, and another one that comes meanwhile.
        self.transfers = asyncio.Semaphore(max(_AT_LEAST, max_inflight // (2 * PART)))
        self.max_content = max_content
        self._max_inflight = max_inflight

    def check(self, length: int) -> None:
        """Raise MessageTooLarge for a content that is too long to be read as a whole."""
        if length > self.max_content:
            raise MessageTooLarge(
                f"a request of {length} bytes or more: use up to {self.max_content} (max_frame)"
            )

    def take(self, length: int) -> None:
        """Count bytes. Raises Overloaded if there is no room for them."""
        if self.inflight and self.inflight + length > self._max_inflight:
            raise Overloaded(
                "the worker reads as many bytes of requests as it may (max_inflight_bytes)",
                retry_after=_RETRY,
            )
        self.inflight += length


class Content:
    """What a request has, as a whole; it counts until the request has been answered."""

    def __init__(self, room: Room, request: Request) -> None:
        self._room = room
        self._request = request
        self._counted = 0

    async def read(self) -> bytes:
        """Return it."""
        said = self._request.headers.get("content-length", "")
        if said.isdigit():
            self._room.check(int(said))
            self._count(int(said))
        chunks, size = list[bytes](), 0
        async for chunk in self._request.stream():
            chunks.append(chunk)
            size += len(chunk)
            self._room.check(size)
            if size > self._counted:
                self._count(size - self._counted)
        return b"".join(chunks)

    def _count(self, length: int) -> None:
        self._room.take(length)
        self._counted += length

    def release(self) -> None:
        """The request has been answered."""
        self._room.inflight -= self._counted
        self._counted = 0
