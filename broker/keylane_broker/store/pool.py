"""The connections to all servers, each opened once for all who want it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple

from keylane.errors import Unavailable
from keylane_broker.store.connection import Displaced, Link

_LENT = 64  # connections per server for commands that wait; whoever wants one more waits for it
_IDLE = 8  # connections per server that are kept for commands that wait


class Attempts:
    """What many want at once is tried once, and all of them share how it went."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[Any]] = {}

    async def join(self, name: str, attempt: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Wait for the attempt that is under way, or start one; who gives up waiting does not end it."""
        task = self._running.get(name)
        if task is None:
            task = self._running[name] = asyncio.create_task(attempt())
            task.add_done_callback(lambda task: self._end(name, task))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            here = asyncio.current_task()
            if task.cancelled() and here is not None and not here.cancelling():
                raise Unavailable("closed while connecting to Redis") from None
            raise

    def under_way(self, name: str) -> bool:
        """Whether such an attempt is under way."""
        return name in self._running

    def cancel(self) -> None:
        """End all attempts; those who wait are told."""
        for task in self._running.values():
            task.cancel()

    def _end(self, name: str, task: "asyncio.Task[Any]") -> None:
        del self._running[name]
        if not task.cancelled():
            task.exception()  # seen, even where nobody waits for it any more


class Address(NamedTuple):
    """A server, by its name and by what knows how to connect to it: a pool or node of redis-py."""

    name: str
    source: Any


class Links:
    """The connections to all servers: a shared one to each, and more for commands that wait."""

    def __init__(self, patience: float, on_lost: Callable[[str], None]) -> None:
        self._patience = patience
        self._on_lost = on_lost  # hears the name of a server whose shared connection has ended
        self._shared: dict[str, Link] = {}
        self._idle: dict[str, list[Link]] = {}
        self._lent: set[Link] = set()
        self._room: dict[str, asyncio.Semaphore] = {}
        self._opening = Attempts()
        self._closed = False

    def get(self, server: Address) -> Link | None:
        """The shared connection to a server, if it is there."""
        link = self._shared.get(server.name)
        return link if link is not None and link.usable else None

    def cork(self) -> None:
        """Let the shared connections gather commands until flush."""
        for link in self._shared.values():
            link.corked = True

    def flush(self) -> None:
        """Send what the shared connections have gathered."""
        for link in self._shared.values():
            link.flush()

    async def open(self, server: Address) -> Link:
        """Open the shared connection to a server."""

        async def attempt() -> Link:
            link = self._shared[server.name] = await self._connect(server)
            link.on_lost = lambda: None if self._closed else self._on_lost(server.name)
            return link

        link: Link = await self._opening.join(server.name, attempt)
        return link

    @contextlib.asynccontextmanager
    async def lend(self, server: Address) -> AsyncIterator[Link]:
        """A connection to a server for one caller; it is closed when that one is interrupted."""
        room = self._room.setdefault(server.name, asyncio.Semaphore(_LENT))
        async with room:
            idle = self._idle.setdefault(server.name, [])
            while idle and not idle[-1].usable:
                idle.pop().close()
            link = idle.pop() if idle else await self._connect_as_shared(server)
            self._lent.add(link)
            try:
                yield link
            except BaseException:
                link.close()
                raise
            finally:
                self._lent.discard(link)
            idle = self._idle.setdefault(server.name, [])
            wanted = len(idle) < _IDLE or room.locked()
            if link.usable and wanted and not self._closed:
                idle.append(link)
            else:
                link.close()

    def drop(self, server: Address, link: Link | None) -> None:
        """Close a connection that led nowhere, and those that wait to be lent: they lead there too."""
        for unused in self._idle.pop(server.name, []):
            unused.close()
        if link is not None:
            link.close()
            if self._shared.get(server.name) is link:
                del self._shared[server.name]

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        self._opening.cancel()
        for link in (
            *self._shared.values(),
            *self._lent,
            *(link for idle in self._idle.values() for link in idle),
        ):
            link.close()
        self._shared.clear()
        self._idle.clear()

    async def _connect_as_shared(self, server: Address) -> Link:
        """Another connection to where the shared one leads: a new master needs leases that are taken anew."""
        shared = self.get(server) or await self.open(server)
        link = await self._connect(server)
        if self.get(server) is not shared or link.peer != shared.peer:
            link.close()
            shared.close("another server has taken its place")
            raise Displaced("another server has taken its place")
        return link

    async def _connect(self, server: Address) -> Link:
        link = await Link.open(
            server.source.connection_class(**server.source.connection_kwargs), self._patience
        )
        if self._closed:
            link.close()
        return link
