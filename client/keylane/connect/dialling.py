"""Opening a connection: a host's addresses, the first of them that answers, and the greeting."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial
from itertools import chain, zip_longest
from typing import Any, TypeVar

from keylane import wire
from keylane.connect.connection import Connection, Events
from keylane.errors import ConnectionClosed
from keylane.tasks import SingleFlight, Tasks
from keylane.threads import in_thread

_NEXT = 0.25  # seconds until the next address is tried, besides those before (RFC 8305 says so)
P = TypeVar("P", bound=asyncio.Protocol)


class Resolver:
    """Looks up names: one lookup at a time for each, however many wait, and however often they give up.

    Not in the threads of the event loop: these are the application's, and a name server may take long.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._lookups: SingleFlight[str, list[str] | OSError] = SingleFlight(tasks, "the client was closed")

    async def addresses(self, host: str) -> list[str]:
        """Return the addresses of a host, both families in turn; OSError if there are none."""
        found = await self._lookups.run(host, partial(self._look_up, host))
        if isinstance(found, OSError):
            raise type(found)(*found.args)  # to each its own
        return found

    async def _look_up(self, host: str) -> list[str] | OSError:
        """Look up a host. An unknown one is an answer: what a background task raises is logged as a bug."""
        try:
            found = await in_thread(_getaddrinfo, host)
        except OSError as error:
            return error
        families: dict[int, dict[str, None]] = {}
        for family, _, _, _, address in found:
            families.setdefault(family, {})[str(address[0])] = None
        return [address for address in chain(*zip_longest(*families.values())) if address is not None]


def _getaddrinfo(host: str) -> list[Any]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)


async def open_any(
    make: Callable[[], P], host: str, addresses: list[str], port: int, context: ssl.SSLContext | None
) -> P:
    """Connect to the first address that answers; the next is tried when one fails or is slow."""
    loop = asyncio.get_running_loop()

    async def attempt(address: str) -> P:
        name = host if context is not None else None
        _, protocol = await loop.create_connection(make, address, port, ssl=context, server_hostname=name)
        return protocol

    rest = iter(addresses)
    running: set[asyncio.Task[P]] = set()
    errors: list[BaseException] = []
    opened: list[P] = []
    try:
        while not opened:
            if (address := next(rest, None)) is not None:
                running.add(loop.create_task(attempt(address)))
            elif not running:
                raise errors[-1] if errors else OSError(f"{host!r} has no address")
            ended, running = await asyncio.wait(
                running, timeout=None if address is None else _NEXT, return_when=asyncio.FIRST_COMPLETED
            )
            for task in ended:
                if (error := task.exception()) is None:
                    opened.append(task.result())
                else:
                    errors.append(error)
    finally:
        for task in running:
            task.cancel()
            task.add_done_callback(_drop)
    for protocol in opened[1:]:
        _abort(protocol)
    return opened[0]


def _drop(task: "asyncio.Task[Any]") -> None:
    """One was opened too late."""
    if not task.cancelled() and task.exception() is None:
        _abort(task.result())


def _abort(protocol: Any) -> None:
    protocol.abort()


async def connect(
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None,
    token: str | None,
    events: Events,
    resolver: Resolver,
) -> Connection:
    """Open a connection and greet the worker; OSError if nobody is there."""
    address = wire.address_of(host, port)
    addresses = await resolver.addresses(host)
    connection = await open_any(lambda: Connection(address, events), host, addresses, port, tls)
    try:
        await connection.greet(token)
    except BaseException as error:
        connection.end(ConnectionClosed("the worker did not greet"))
        if isinstance(error, ConnectionClosed) and tls is None:
            hint = (
                "" if "HTTP" in str(error) else " before the worker greeted; for a TLS port use keylanes://"
            )
            raise ConnectionClosed(f"{error}{hint}") from error
        raise
    connection.begin_heartbeats()
    return connection
