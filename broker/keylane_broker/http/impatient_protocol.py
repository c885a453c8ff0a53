"""HTTP connections that are closed if they do not get on: a byte now and then only holds a place.

Nor does one keep the worker from all others: what has a line every few bytes, as chunks of one byte have,
takes h11 a second for each megabyte, and is read a little at a time.
"""

import asyncio
import sys

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from keylane.errors import InvalidArgument, Overloaded
from keylane_broker.http.problems import problem, problem_of

MAX_HEADERS = 65_536  # bytes of a request's first lines
_LONG = 431  # how h11 says that there are more
_RETRY = 1.0  # seconds after which there may be a place again
_AT_ONCE = 16_384  # bytes of many lines that are read before others have their turn
_LINE = 256  # bytes of a line, on average: with longer ones everything is read at once


class _Flow(FlowControl):
    """That of a connection of which something is not read yet: no more is to come until it is."""

    held = False

    def resume_reading(self) -> None:
        """Have more come, now or when what there is has been read."""
        if self.held:
            self.read_paused = False
        else:
            super().resume_reading()

    def hold(self) -> None:
        """Have no more come for now."""
        self.held = True
        self._transport.pause_reading()

    def release(self) -> None:
        """Have more come, unless the request has enough of it."""
        self.held = False
        if not self.read_paused:
            self._transport.resume_reading()


class ImpatientProtocol(H11Protocol):
    """A connection whose next request has to come in time, once it has begun to."""

    patience: float  # seconds for its first lines, and for what is left of one that has been answered
    most: int  # connections of a worker
    _closing: asyncio.TimerHandle | None = None
    _unread = b""  # for later turns of the event loop
    flow: _Flow

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        if len(self.connections) > self.most:
            self.app = _refuse
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Read what has come, now or in turns; what comes meanwhile waits."""
        if self._unread:
            self._unread += data
        elif len(data) > _AT_ONCE and data.count(b"\n") * _LINE > len(data):
            self._unread = data
            self._read_some()
        else:
            self._read(data)

    def _read_some(self) -> None:
        some, self._unread = self._unread[:_AT_ONCE], self._unread[_AT_ONCE:]
        if self.transport.is_closing():
            self._unread = b""
            return
        self._read(some)
        if self._unread:
            self.flow.hold()
            self.loop.call_soon(self._read_some)
        else:
            self.flow.release()

    def _read(self, data: bytes) -> None:
        """Expect the rest of a request that has begun."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect()
        else:
            self._stop_expecting()

    def on_response_complete(self) -> None:
        """Expect the rest of a request that has been answered before it came."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._expect()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request as a problem, unless an answer is on its way, and hang up."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = problem(400, InvalidArgument.code, _no_request(sys.exception()))
            head = h11.Response(
                status_code=answer.status_code,
                headers=[*answer.raw_headers, (b"connection", b"close")],
                reason=STATUS_PHRASES[answer.status_code],
            )
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing any more."""
        self._stop_expecting()
        super().connection_lost(exc)

    def _expect(self) -> None:
        if self._closing is None and not self.transport.is_closing():
            self._closing = self.loop.call_later(self.patience, self.transport.close)

    def _stop_expecting(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


def _no_request(error: BaseException | None) -> str:
    if isinstance(error, h11.ProtocolError) and error.error_status_hint == _LONG:
        return f"the first lines of the request have more than {MAX_HEADERS} bytes"
    return "this is no HTTP request that can be read here; frames go to another port (--port)"


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer on behalf of a worker that has as many connections as it may, and give up the place."""
    error = Overloaded(
        "the worker has the maximum number of HTTP connections (max_connections)", retry_after=_RETRY
    )
    answer = problem_of(error)
    answer.headers["Connection"] = "close"
    await answer(scope, receive, send)


def protocol_of(*, patience: float, most: int) -> type[H11Protocol]:
    """Return the protocol of connections that have so many seconds, and of which there are so many."""
    return type("Protocol", (ImpatientProtocol,), {"patience": patience, "most": most})
