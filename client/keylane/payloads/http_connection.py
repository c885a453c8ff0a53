"""One HTTP/1.1 connection: requests one after the other, with bodies that may be longer than memory.

h11 reads and writes the protocol, which every installation has since the broker's HTTP port needs it; what is
here only moves bytes.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress

import h11

_READ = 256 * 1024  # bytes at a time
_HEADERS = 64 * 1024  # bytes of an answer's first lines


class HttpConnection:
    """A connection to a worker; after an error in the middle of a request it is of no more use."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: float) -> None:
        self._reader = reader
        self._writer = writer
        self._patience = patience  # seconds without any progress
        self.headers: dict[str, str] = {}  # of the answer
        self._protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEADERS)

    @classmethod
    async def open(
        cls, host: str, port: int, tls: ssl.SSLContext | None, *, within: float, patience: float
    ) -> "HttpConnection":
        """Connect; OSError if nobody is there in time."""
        async with asyncio.timeout(within):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls, limit=_READ)
        writer.transport.set_write_buffer_limits(high=_READ)
        return cls(reader, writer, patience)

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return (
            self._protocol.our_state is h11.IDLE
            and not self._writer.is_closing()
            and not self._reader.at_eof()
            and self._reader.exception() is None
        )

    async def ask(self, method: str, target: str, headers: list[tuple[str, str]], content: bytes) -> int:
        """Send a request; returns the status of the answer, whose content is to be read then.

        The worker may refuse it before all is sent: then nothing more is.
        """
        send = self._protocol.send
        said = [*headers, ("Content-Length", str(len(content)))]
        answer = asyncio.ensure_future(self._status())
        try:
            await self._write(send(h11.Request(method=method, target=target, headers=said)))
            rest = memoryview(content)
            while rest and not answer.done():
                await self._write(send(h11.Data(data=bytes(rest[:_READ]))))
                rest = rest[_READ:]
            if not rest:
                await self._write(send(h11.EndOfMessage()))
            return await asyncio.wait_for(asyncio.shield(answer), self._patience)
        except ConnectionError:
            # Who refuses a long request may hang up on the rest of it: what it has said counts.
            with suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(answer), 1.0)
            raise
        finally:
            answer.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await answer

    async def _write(self, data: bytes | None) -> None:
        if data:
            self._writer.write(data)
        async with asyncio.timeout(self._patience):
            await self._writer.drain()

    async def _status(self) -> int:
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                self.headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                return event.status_code
            if not isinstance(event, h11.InformationalResponse):
                raise ConnectionResetError("the worker has closed the connection")

    async def _next(self) -> object:
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            self._protocol.receive_data(await self._reader.read(_READ))
        return event

    async def content(self) -> AsyncIterator[bytes]:
        """Yield the content of the answer as it comes; after the last of it another request can be sent."""
        while True:
            async with asyncio.timeout(self._patience):
                event = await self._next()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                if self._protocol.our_state is h11.DONE and self._protocol.their_state is h11.DONE:
                    self._protocol.start_next_cycle()
                return
            else:
                raise ConnectionResetError("the worker has closed the connection in the middle of an answer")

    def drop(self) -> None:
        """Close it without waiting."""
        self._writer.transport.abort()
