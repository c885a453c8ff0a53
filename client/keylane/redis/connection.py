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

_READ_BYTES = 1024 * 1024


async def take_socket(connection: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Let a connection of redis-py connect, then take its streams over."""
    try:
        await connection.connect()
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    streams = connection._reader, connection._writer
    connection._reader = connection._writer = None
    return streams


class RedisConnection:
    """A connection for one call at a time; after an error in the middle of a call it is of no more use."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: float) -> None:
        self._reader = reader
        self._writer = writer
        self._patience = patience
        self._replies = hiredis.Reader(replyError=error_of)

    @classmethod
    async def open(cls, connection: Any, patience: float) -> "RedisConnection":
        """Open what redis-py would connect to; `patience` is seconds without any progress."""
        return cls(*await take_socket(connection), patience)

    @property
    def usable(self) -> bool:
        """Return whether the other side has not hung up, as far as is known."""
        return not (self._reader.at_eof() or self._writer.is_closing())

    async def call(self, commands: list[Command]) -> list[Any]:
        """Send commands in one go and return their answers, of which an error is one."""
        self._writer.write(b"".join(map(pack, commands)))
        answers: list[Any] = []
        try:
            async with asyncio.timeout(self._patience):
                await self._writer.drain()
            while len(answers) < len(commands):
                if (reply := self._replies.gets()) is False:
                    await self._feed()
                else:
                    answers.append(reply)
        except TimeoutError as error:
            raise exceptions.TimeoutError(f"no answer within {self._patience:g} s") from error
        return answers

    async def _feed(self) -> None:
        async with asyncio.timeout(self._patience):
            data = await self._reader.read(_READ_BYTES)
        if not data:
            raise exceptions.ConnectionError("the server has closed the connection")
        self._replies.feed(data)

    def drop(self) -> None:
        """Close it without waiting; what has not left yet does not."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close it."""
        with suppress(OSError, RuntimeError):  # that of an event loop that is no more
            self._writer.close()
            await self._writer.wait_closed()
