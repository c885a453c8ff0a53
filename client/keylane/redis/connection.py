"""Connections to Redis with little between a call and the socket.

redis-py opens them (TLS, credentials, Sentinel), and is not asked again: its share of a call is several times
what packing, sending and parsing take.
"""

import asyncio
from contextlib import suppress
from typing import Any

import hiredis
from redis import exceptions

from keylane.redis.errors import error_of

Command = tuple[str | bytes | int, ...]

pack: Any = hiredis.pack_command  # its stub takes only tuples of one


async def take_socket(connection: Any) -> asyncio.StreamWriter:
    """Let a connection of redis-py connect, then take its stream over.

    The caller gives the transport another protocol before it awaits anything.
    """
    try:
        await connection.connect()
    except BaseException as error:
        await connection.disconnect(nowait=True)
        if isinstance(error, RuntimeError):  # uvloop's, where the other side hangs up while we say hello
            raise exceptions.ConnectionError(f"the connection was lost: {error}") from error
        raise
    reader, writer = connection._reader, connection._writer
    connection._reader = connection._writer = None
    if reader.at_eof() or reader.exception() is not None:  # another protocol would never hear of it
        writer.transport.abort()
        raise _hung_up()
    return writer  # type: ignore[no-any-return]


class RedisConnection(asyncio.Protocol):
    """A connection for one call at a time; after an error in the middle of a call it is of no more use."""

    def __init__(self, writer: asyncio.StreamWriter, patience: float) -> None:
        self._writer = writer  # kept since it closes the transport when it goes
        self._transport = writer.transport
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._replies = hiredis.Reader(replyError=error_of)
        self._answers: list[Any] = []
        self._missing = 0  # answers to the call that is under way
        self._call: asyncio.Future[list[Any]] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._moved = 0.0  # when something was last sent or came
        self._unsent = 0  # bytes, at the last look
        self._ended: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def open(cls, connection: Any, patience: float) -> "RedisConnection":
        """Open what redis-py would connect to; `patience` is seconds without any progress."""
        writer = await take_socket(connection)
        opened = cls(writer, patience)
        writer.transport.set_protocol(opened)
        return opened

    @property
    def usable(self) -> bool:
        """Return whether the other side has not hung up, as far as is known."""
        return not (self._ended.done() or self._transport.is_closing())

    async def call(self, commands: list[Command]) -> list[Any]:
        """Send commands in one go and return their answers, of which an error is one."""
        if not self.usable:
            raise _hung_up()
        packed = b"".join(map(pack, commands))
        self._answers, self._missing = [], len(commands)
        self._call = self._loop.create_future()
        self._transport.write(packed)
        self._moved, self._unsent = self._loop.time(), self._transport.get_write_buffer_size()
        if self._watch is None:
            self._watch = self._loop.call_later(self._patience, self._look)
        try:
            return await self._call
        finally:
            self._call = None

    def data_received(self, data: bytes) -> None:
        """Take answers in."""
        self._moved = self._loop.time()
        try:
            self._replies.feed(data)
            while self._missing and (reply := self._replies.gets()) is not False:
                self._answers.append(reply)
                self._missing -= 1
        except Exception as error:  # what answers is not Redis
            self._fail(error)
            return
        if not self._missing and self._call is not None and not self._call.done():
            self._call.set_result(self._answers)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come."""
        if self._watch is not None:
            self._watch.cancel()
        if not self._ended.done():
            self._ended.set_result(None)
        self._fail(exceptions.ConnectionError(f"the connection was lost: {exc}") if exc else _hung_up())

    def _look(self) -> None:
        """Give up on a server that takes nothing and answers nothing."""
        self._watch = None
        if self._call is None:
            return
        now, unsent = self._loop.time(), self._transport.get_write_buffer_size()
        if unsent < self._unsent:
            self._moved, self._unsent = now, unsent
        left = self._moved + self._patience - now
        if left > 0:
            self._watch = self._loop.call_later(left, self._look)
        else:
            self._fail(exceptions.TimeoutError(f"no answer within {self._patience:g} s"))

    def _fail(self, error: Exception) -> None:
        if self._call is not None and not self._call.done():
            self._call.set_exception(error)

    def drop(self) -> None:
        """Close it without waiting; what has not left yet does not."""
        self._transport.abort()

    async def close(self) -> None:
        """Close it."""
        with suppress(OSError, RuntimeError):  # that of an event loop that is no more
            self._transport.close()
            await self._ended


def _hung_up() -> exceptions.ConnectionError:
    return exceptions.ConnectionError("the server has closed the connection")
