"""Answers that may have to end in the middle: the rest cannot be had, or nobody reads them.

What is sent takes room from others, so a caller that does not read has only so long.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import h11
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from keylane.errors import BrokerError
from keylane.payloads.store import PART

log = logging.getLogger("keylane.broker")

# What a connection to another worker ends with, or one to a caller that does not read.
LOST = (OSError, TimeoutError, EOFError, h11.RemoteProtocolError, h11.LocalProtocolError)


class CutOffResponse(StreamingResponse):
    """One that is sent as it comes; whoever reads it sees if it is not whole."""

    def __init__(
        self,
        content: AsyncIterator[bytes],
        patience: float,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
    ) -> None:
        """`patience` is in seconds: in that time more of it has to be read."""
        super().__init__(content, status, headers, media_type)
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await _or_cut_off(scope, super().__call__(scope, receive, _in_time(send, self._patience)))


class WholeResponse(Response):
    """One that is there as a whole, and is sent in parts."""

    def __init__(self, content: bytes, patience: float, media_type: str) -> None:
        """`patience` is in seconds: in that time more of it has to be read."""
        super().__init__(content, media_type=media_type)
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await _or_cut_off(scope, self._send(_in_time(send, self._patience)))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for at in range(0, len(self.body), PART):
            part = bytes(self.body[at : at + PART])
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _in_time(send: Send, patience: float) -> Callable[[Message], Awaitable[None]]:
    async def send_in_time(message: Message) -> None:
        async with asyncio.timeout(patience):
            await send(message)

    return send_in_time


async def _or_cut_off(scope: Scope, sending: Awaitable[None]) -> None:
    try:
        await sending
    except (BrokerError, *LOST) as error:
        what = f"{scope['method']} {scope['path']}"
        log.info("the answer to %s is cut off: %s", what, str(error) or "nobody reads it")
