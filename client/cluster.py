"""Reaching the cluster: seeds, the connection in use, and a new one when it is lost."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from client import wire
from client.connection import Connection, connect
from client.errors import BrokerError, ConnectionClosed, ConnectionFailed, InvalidArgument
from client.tasks import Tasks
from client.wire import Frame, Properties

_ATTEMPT = 2.0  # seconds to open a connection
_ROUNDS = 3  # through all seeds before the first connection is given up
_PAUSE = 0.3  # seconds between these
T = TypeVar("T")
_log = logging.getLogger("keylane.client")


class Seed(NamedTuple):
    """Where a worker may listen."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"keylane{'s' if self.tls else ''}://{host}:{self.port}"


def parse_seeds(seeds: str | Iterable[str]) -> list[Seed]:
    """Seeds from one URL, a list of them, or one with several hosts."""
    found = []
    for url in [seeds] if isinstance(seeds, str) else seeds:
        scheme, separator, rest = str(url).partition("://")
        if not separator or scheme not in ("keylane", "keylanes"):
            raise InvalidArgument(f"seed {url!r}: use keylane://host:port, or keylanes:// for TLS")
        for place in rest.rstrip("/").split(","):
            try:
                parts = urlsplit(f"//{place}")
                host, port = parts.hostname, parts.port
            except ValueError:
                host, port = None, None
            if not host:
                raise InvalidArgument(f"seed {url!r}: {place!r} is not a host and port")
            found.append(Seed(host, port or wire.PORT, scheme == "keylanes"))
    if not found:
        raise InvalidArgument("no seeds: name at least one worker, such as keylane://127.0.0.1:9999")
    return found


def backoff(attempt: int, initial: float = 0.05, maximum: float = 2.0) -> float:
    """Seconds to wait before the next attempt: exponential, jittered."""
    ceiling: float = min(maximum, initial * 2.0 ** min(attempt, 20))
    return ceiling * random.uniform(0.5, 1.0)


class Cluster:
    """The way to the workers: one connection for now, made again whenever it is lost."""

    def __init__(
        self,
        seeds: str | Iterable[str],
        *,
        token: str | None,
        timeout: float,
        on_time_drift: Callable[[float], None] | None,
    ) -> None:
        self.timeout = timeout
        self.drift = 0.0  # seconds that the cluster's clock is ahead of ours
        self._seeds = parse_seeds(seeds)
        self._token = token
        self._on_time_drift = on_time_drift
        self._reported = 0.0
        self._connection: Connection | None = None
        self._ready: asyncio.Future[Connection] | None = None
        self._error: BrokerError | None = None
        self._closed = False
        self._tasks = Tasks()

    async def open(self) -> None:
        """Connect; ConnectionFailed if no seed answers."""
        if self._closed or self._connection is not None:
            raise InvalidArgument("this client was opened before: make another")
        self._ready = asyncio.get_running_loop().create_future()
        for attempt in range(_ROUNDS):
            try:
                self._use(await self._connect())
                break
            except BrokerError as error:
                if not error.retriable or attempt == _ROUNDS - 1:
                    raise
            await asyncio.sleep(_PAUSE)
        self._tasks.start(self._keep())

    async def close(self) -> None:
        """End the connection; those who wait for one get ConnectionClosed."""
        self._closed = True
        await self._tasks.cancel()
        if self._connection is not None:
            await self._connection.close()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(ConnectionClosed("the client was closed"))
            self._ready.exception()  # retrieved: perhaps nobody waits

    @property
    def current(self) -> Connection | None:
        """The connection, if there is one right now."""
        return self._connection

    @property
    def error(self) -> BrokerError:
        """Why there is no connection."""
        return self._error or ConnectionFailed(f"no connection to {self._where}")

    async def connection(self, within: float | None = None) -> Connection:
        """The connection, waiting for it if need be; ConnectionFailed when that takes too long."""
        if self._closed:
            raise ConnectionClosed("the client was closed")
        if self._ready is None:
            raise ConnectionClosed("the client is not open: use it with `async with`")
        end = None if within is None else asyncio.get_running_loop().time() + within
        while self._connection is None:
            ready = self._ready
            left = None if end is None else max(0.0, end - asyncio.get_running_loop().time())
            await asyncio.wait({ready}, timeout=left)
            if not ready.done():
                raise self.error
            if (ended := ready.exception()) is not None:
                raise ended
        return self._connection

    async def request(self, properties: Properties, body: bytes = b"", *, repeatable: bool = True) -> Frame:
        """Ask; what can be repeated is, after retriable errors, until the time is up."""
        return await self._insist(lambda connection: connection.request(properties, body), repeatable)

    async def info(self) -> wire.InfoReply:
        """Ask a worker about the cluster."""
        return await self._insist(lambda connection: connection.greet(self._token), True)

    async def _insist(self, ask: Callable[[Connection], Awaitable[T]], repeatable: bool) -> T:
        loop = asyncio.get_running_loop()
        end = loop.time() + self.timeout
        attempt = 0
        while True:
            connection = await self.connection(max(0.0, end - loop.time()))
            try:
                async with asyncio.timeout_at(end):
                    return await ask(connection)
            except TimeoutError:
                raise ConnectionFailed(
                    f"the worker at {connection.address} did not answer within {self.timeout:g} s; "
                    "whether it has done what was asked is not known"
                ) from None
            except BrokerError as error:
                wait = backoff(attempt)
                if not (repeatable and error.retriable) or loop.time() + wait > end:
                    raise
            attempt += 1
            await asyncio.sleep(wait)

    @property
    def _where(self) -> str:
        return ", ".join(map(str, self._seeds))

    async def _connect(self) -> Connection:
        why = ""
        for seed in self._seeds:
            try:
                async with asyncio.timeout(_ATTEMPT):
                    return await connect(
                        seed.host, seed.port, tls=seed.tls, token=self._token, on_time=self._told_time
                    )
            except TimeoutError:
                why = f"no answer within {_ATTEMPT:g} s"
            except ConnectionRefusedError:
                why = "connection refused"
            except (OSError, ConnectionClosed) as error:
                why = str(error)
        raise ConnectionFailed(f"no broker at {self._where} ({why}); start one with `keylane serve`")

    async def _keep(self) -> None:
        """Connect again whenever the connection is lost, for as long as the client is open."""
        while True:
            assert self._connection is not None
            await asyncio.wait({self._connection.closed})
            self._error = self._connection.closed.result()
            self._connection = None
            self._ready = asyncio.get_running_loop().create_future()
            _log.warning("%s; connecting again", self._error)
            attempt = 0
            while self._connection is None:
                await asyncio.sleep(backoff(attempt))
                attempt += 1
                try:
                    self._use(await self._connect())
                except BrokerError as error:
                    self._error = error
            _log.warning("connected again, to %s", self._connection.address)

    def _use(self, connection: Connection) -> None:
        assert self._ready is not None
        self._connection = connection
        self._ready.set_result(connection)

    def _told_time(self, drift: float, trip: float) -> None:
        self.drift = drift
        if abs(drift) - trip / 2 <= 1:
            self._reported = 0.0
        elif abs(drift - self._reported) > 1:
            self._reported = drift
            if self._on_time_drift is not None:
                try:
                    self._on_time_drift(drift)
                except Exception:  # it must not cost us the connection
                    _log.exception("on_time_drift failed for %.1f s", drift)
