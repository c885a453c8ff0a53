"""The connections to all servers, each opened once for all who want it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from keylane_broker.store.connection import Address, Displaced, SharedConnection
from keylane_broker.store.single_flight import SingleFlight

_LENT = 64  # connections per server for commands that wait; whoever wants one more waits for it
_IDLE = 8  # connections per server that are kept for commands that wait


class ConnectionPool:
    """The connections to all servers: a shared one to each, one for what is urgent, more for what waits."""

    def __init__(
        self,
        patience: float,
        on_lost: Callable[[SharedConnection], None],
        prepare: Callable[[SharedConnection], Coroutine[Any, Any, None]],
    ) -> None:
        self._patience = patience
        self._on_lost = on_lost  # hears of a shared connection that has ended
        self._prepare = prepare  # what is done with one before it is shared
        self._shared: dict[str, SharedConnection] = {}
        self._prompt: dict[str, SharedConnection] = {}
        self._idle: dict[str, list[SharedConnection]] = {}
        self._lent: set[SharedConnection] = set()
        self._room: dict[str, asyncio.Semaphore] = {}
        self._opening = SingleFlight()
        self._closed = False

    def get(self, server: Address) -> SharedConnection | None:
        """Return the shared connection to a server, if it is open."""
        connection = self._shared.get(server.name)
        return connection if connection is not None and connection.usable else None

    def cork(self) -> None:
        """Let the shared connections gather commands until flush."""
        for connection in self._shared.values():
            connection.corked = True

    def flush(self) -> None:
        """Send what the shared connections have gathered."""
        for connection in self._shared.values():
            connection.flush()

    async def open(self, server: Address) -> SharedConnection:
        """Open the shared connection to a server."""

        async def attempt() -> SharedConnection:
            connection = await self._connect(server)
            try:
                await self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._shared[server.name] = connection
            connection.on_lost = lambda: self._end(server.name, connection)
            return connection

        connection: SharedConnection = await self._opening.join(server.name, attempt)
        return connection

    async def prompt(self, server: Address) -> SharedConnection:
        """Return a connection for calls that must not wait behind others, and whose answers are small."""

        async def attempt() -> SharedConnection:
            connection = self._prompt[server.name] = await self._connect_as_shared(server)
            return connection

        connection = self._prompt.get(server.name)
        if connection is None or not connection.usable or self.get(server) is None:
            connection = await self._opening.join(f"{server.name} prompt", attempt)
        return connection

    def urgent_beside(self, shared: SharedConnection) -> SharedConnection:
        """Return the prompt connection to where a shared one leads, that one itself if there is none."""
        [name] = [name for name, connection in self._shared.items() if connection is shared] or [""]
        return self._prompt.get(name, shared)

    def _end(self, name: str, connection: SharedConnection) -> None:
        """A shared connection has ended, and those beside it: the next may lead to another server."""
        if not self._closed:
            self._close_beside(name)
            self._on_lost(connection)

    def _close_beside(self, name: str) -> None:
        for unused in self._idle.pop(name, []):
            unused.close()
        if name in self._prompt:
            self._prompt.pop(name).close("it led where the shared one led")

    @contextlib.asynccontextmanager
    async def lend(self, server: Address) -> AsyncIterator[SharedConnection]:
        """Lend a connection to one caller; it is closed if the caller is interrupted."""
        room = self._room.setdefault(server.name, asyncio.Semaphore(_LENT))
        async with room:
            idle = self._idle.setdefault(server.name, [])
            while idle and not idle[-1].usable:
                idle.pop().close()
            connection = idle.pop() if idle else await self._connect_as_shared(server)
            self._lent.add(connection)
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            finally:
                self._lent.discard(connection)
            idle = self._idle.setdefault(server.name, [])
            wanted = len(idle) < _IDLE or room.locked()
            if connection.usable and wanted and not self._closed:
                idle.append(connection)
            else:
                connection.close()

    def drop(self, server: Address, connection: SharedConnection | None) -> None:
        """Close a connection that led nowhere, and the idle ones: they lead there too."""
        self._close_beside(server.name)
        if connection is not None:
            connection.close()
            if self._shared.get(server.name) is connection:
                del self._shared[server.name]

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        self._opening.cancel()
        for connection in (
            *self._shared.values(),
            *self._prompt.values(),
            *self._lent,
            *(connection for idle in self._idle.values() for connection in idle),
        ):
            connection.close()
        self._shared.clear()
        self._prompt.clear()
        self._idle.clear()

    async def _connect_as_shared(self, server: Address) -> SharedConnection:
        """Connect again to where the shared one leads: a new master needs leases that are taken anew."""
        shared = self.get(server) or await self.open(server)
        connection = await self._connect(server)
        same = connection.peer == shared.peer and connection.life == shared.life
        if self.get(server) is not shared or not same:
            connection.close()
            shared.close("another server has taken its place")
            raise Displaced("another server has taken its place")
        return connection

    async def _connect(self, server: Address) -> SharedConnection:
        connection = await SharedConnection.open(server, self._patience)
        connection.life = await connection.learn_life()
        if self._closed:
            connection.close()
        return connection
