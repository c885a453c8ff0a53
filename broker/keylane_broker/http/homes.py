"""Where consumers of HTTP are: each at one worker, and the others hand on to it what is asked for there.

If two workers had the same consumer, each would take it from the other: who waits for messages would be sent
away, and what had come for it would wait for the end of its lease.
"""

import asyncio
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from hashlib import blake2b
from itertools import chain
from time import monotonic
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from keylane.errors import Unavailable, error_named
from keylane.payloads.http_connection import HttpConnection
from keylane_broker.engine.values import WorkerReport
from keylane_broker.http.cut_off import LOST, CutOffResponse
from keylane_broker.http.leasing import DEFAULT
from keylane_broker.http.problems import Problem
from keylane_broker.http.values import MOST_WAIT

_HANDED_ON = "keylane-handed-on"  # says that nobody is to hand a request on once more
_KEPT = ("authorization", "last-event-id")  # headers that mean something to the other worker
_TOLD = ("content-type", "retry-after", "cache-control", "www-authenticate")  # and to the caller
_CONNECT = 2.0  # seconds
_ANSWER = MOST_WAIT + 30.0  # seconds without any progress
_IDLE = 30.0  # seconds that a connection is kept: less than the other side keeps it


class Workers(Protocol):
    """Who is there, as the membership of a worker knows it."""

    id: str

    def alive(self) -> list[WorkerReport]:
        """Return the workers that are not known to be dead."""


Watch = Callable[[Request, Any], Any]  # waits for something while a caller is there


class Homes:
    """Finds the worker at which a consumer is, the same one from wherever it is looked for."""

    def __init__(self, workers: Workers, tls: ssl.SSLContext | None, *, patience: float = 60.0) -> None:
        """`tls` is what a worker is a client of the others with; `patience` as in CutOffResponse."""
        self._workers = workers
        self._patience = patience
        self._tls = tls
        self._idle: defaultdict[str, list[tuple[float, HttpConnection]]] = defaultdict(list)

    def order(self, topic: str, subscription: str, consumer: str) -> list[str]:
        """Return where a consumer is, then where it would be without that worker, up to this one: "".

        Only what was at a worker that comes or goes is to be elsewhere then.
        """
        own = self._workers.id
        known = {report.id: report.http for report in self._workers.alive() if report.http} | {own: ""}

        def rank(worker: str) -> tuple[bool, bytes]:
            named = "\0".join((topic, subscription, consumer, worker)).encode()
            return consumer != f"{DEFAULT}-{worker}", blake2b(named, digest_size=8).digest()

        found = [known[worker] for worker in sorted(known, key=rank)]
        return found[: found.index("") + 1]

    async def pass_on(
        self, request: Request, place: tuple[str, str, str], body: Any, watch: Watch
    ) -> Response | None:
        """Have another worker answer, if the consumer is there; None if it is here."""
        asked = await self._ask(request, place, body, watch)
        if asked is None:
            return None
        address, connection, status = asked
        headers = {name: connection.headers[name] for name in _TOLD if name in connection.headers}
        return CutOffResponse(self._content(address, connection), self._patience, status, headers)

    async def ask(
        self, request: Request, place: tuple[str, str, str], body: Any, watch: Watch
    ) -> bytes | None:
        """Return what another worker says, if the consumer is there; None if it is here. Raises its error."""
        asked = await self._ask(request, place, body, watch)
        if asked is None:
            return None
        address, connection, status = asked
        answer = b"".join([part async for part in self._content(address, connection)])
        if status < 400:
            return answer
        try:
            said = msgspec.json.decode(answer, type=Problem)
        except msgspec.MsgspecError:
            raise Unavailable(f"the worker at {address} answers with status {status}") from None
        after = connection.headers.get("retry-after", "")
        raise error_named(said.code, said.detail, retry_after=float(after) if after.isdecimal() else 0.0)

    async def _ask(
        self, request: Request, place: tuple[str, str, str], body: Any, watch: Watch
    ) -> tuple[str, HttpConnection, int] | None:
        if _HANDED_ON in request.headers:
            return None
        target = request.scope["raw_path"].decode()
        if query := request.scope["query_string"].decode():
            target += f"?{query}"
        said = [(name, request.headers[name]) for name in _KEPT if name in request.headers]
        said += [(_HANDED_ON, self._workers.id), ("Content-Type", "application/json")]
        content = b"" if body is None else msgspec.json.encode(body)
        for address in self.order(*place):
            if not address:
                return None
            try:
                connection = await self._connection(address)
            except (OSError, TimeoutError):
                continue  # it has not begun yet, or has just ended: all look for the next one
            try:
                asking = connection.ask(request.method, target, [("Host", address), *said], content)
                return address, connection, await watch(request, asking)
            except LOST as error:
                connection.drop()
                raise Unavailable(f"the worker at {address} was lost: {error or 'timed out'}") from None
            except BaseException:
                connection.drop()
                raise
        return None

    async def _content(self, address: str, connection: HttpConnection) -> AsyncIterator[bytes]:
        try:
            async for part in connection.content():
                yield part
        except BaseException:
            connection.drop()
            raise
        if connection.usable:
            self._idle[address].append((monotonic(), connection))
        else:
            connection.drop()

    async def _connection(self, address: str) -> HttpConnection:
        idle = self._idle[address]
        while idle:
            since, connection = idle.pop()
            if connection.usable and monotonic() - since < _IDLE:
                return connection
            connection.drop()
        host, _, port = address.rpartition(":")
        return await HttpConnection.open(
            host.strip("[]"), int(port), self._tls, within=_CONNECT, patience=_ANSWER
        )

    async def run(self) -> None:
        """Close connections that nobody has needed for a while, for ever."""
        while True:
            await asyncio.sleep(_IDLE)
            for address, some in list(self._idle.items()):
                while some and monotonic() - some[0][0] > _IDLE:
                    some.pop(0)[1].drop()
                if not some:
                    del self._idle[address]  # workers come and go

    def close(self) -> None:
        """Close all connections that nobody uses."""
        for _, connection in chain.from_iterable(self._idle.values()):
            connection.drop()
        self._idle.clear()
