"""One connection to one server that many calls share: each is written at once and answered in turn.

redis-py opens the connection (TLS, credentials, Sentinel); after that its share of a call, some 200 us
of Python, is more than Redis needs for a hundred messages. So the socket is handed over to this protocol:
commands are packed and replies parsed by hiredis, and nothing stands between.
"""

import asyncio
from collections import deque
from typing import Any

import hiredis
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    MovedError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

_pack: Any = hiredis.pack_command  # its stub takes only tuples of one

_ERRORS: dict[str, type[Exception]] = {
    "ASK": AskError,
    "CLUSTERDOWN": ClusterDownError,
    "LOADING": BusyLoadingError,
    "MISCONF": ReadOnlyError,  # it cannot save and takes no writes
    "NOREPLICAS": ReadOnlyError,
    "MASTERDOWN": MasterDownError,
    "MOVED": MovedError,
    "NOSCRIPT": NoScriptError,
    "OOM": OutOfMemoryError,
    "READONLY": ReadOnlyError,
    "TRYAGAIN": TryAgainError,
}


def _error(text: str) -> Exception:
    word, _, rest = text.partition(" ")
    kind = _ERRORS.get(word)
    return kind(rest) if kind else ResponseError(text)


class Link(asyncio.Protocol):
    """A shared connection; calls are answered in the order in which they were made."""

    def __init__(self, connection: Any, patience: float) -> None:
        self._connection = connection
        self._patience = patience
        self._answered = 0
        self._watch: asyncio.TimerHandle | None = None
        self._reader = hiredis.Reader(replyError=_error, encoding="utf-8")
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, connection: Any, *, patience: float) -> "Link":
        """Let redis-py connect, then take its socket over.

        A server that owes answers and sends none for `patience` seconds counts as gone.
        """
        await connection.connect()
        link = cls(connection, patience)
        transport = connection._writer.transport
        transport.set_protocol(link)
        link._transport = transport
        return link

    @property
    def usable(self) -> bool:
        """Whether calls can be made."""
        return self._transport is not None and not self._transport.is_closing()

    def call(self, *command: str | bytes | int) -> "asyncio.Future[Any]":
        """Send a command; the future holds its answer."""
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._transport is None:
            future.set_exception(ConnectionError("the connection is closed"))
            return future
        self._waiting.append(future)
        self._transport.write(_pack(command))
        if self._watch is None:
            self._watch = self._loop.call_later(self._patience, self._look, self._answered)
        return future

    async def close(self) -> None:
        """Close the connection; calls under way fail."""
        self.connection_lost(None)
        await self._connection.disconnect(nowait=True)

    def data_received(self, data: bytes) -> None:
        """Hand each complete reply to the call that it answers."""
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            future = self._waiting.popleft()
            self._answered += 1
            if future.done():  # its caller has given up
                continue
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail every call that was not answered."""
        self._transport = None
        if self._watch is not None:
            self._watch.cancel()
        error = ConnectionError(f"the connection to Redis was lost: {exc or 'closed'}")
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)

    def _look(self, answered: int) -> None:
        """Give up on a server that has answered nothing since the last look."""
        self._watch = None
        if not self._waiting:
            return
        if self._answered > answered:
            self._watch = self._loop.call_later(self._patience, self._look, self._answered)
        elif self._transport is not None:
            self._transport.abort()
