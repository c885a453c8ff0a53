"""Connections to the workers of a cluster, by address, and the one that answers whatever any worker can."""

import asyncio
import logging
import random
import socket
import ssl
from collections.abc import Iterable
from typing import Protocol

from keylane import wire
from keylane.connect.connection import Connection, Events
from keylane.connect.dialling import Resolver, connect
from keylane.connect.seeds import Seed, parse_address
from keylane.errors import BrokerError, ConnectionClosed, ConnectionFailed
from keylane.retry import backoff
from keylane.tasks import SingleFlight, Tasks

ATTEMPT = 2.0  # seconds to open a connection, or for an answer that any other worker could give
_ROUNDS = 3  # through all seeds before the first connection is given up
_PAUSE = 0.3  # seconds between these
_STEADY = 1.0  # seconds that a connection lasts, for the next one to be made without a longer wait
_UNUSED = 30.0  # seconds after which a connection that nobody uses is closed
_SWEEP = 10.0  # seconds between looks for such
# What OpenSSL says, by its version, of an answer that is no TLS.
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
_log = logging.getLogger("keylane.client")


class Peer:
    """A worker's address, and the connection to it while there is one."""

    def __init__(self, pool: "Pool", address: str) -> None:
        self.address = address
        self.current: Connection | None = None
        self.error: BrokerError | None = None  # why there is none
        self._pool = pool
        self._attempt = 0  # in vain, one after the other
        self._due = 0.0  # not to be tried again before
        self._since = 0.0

    async def connect(self) -> Connection:
        """Return the connection; if there is none, try once to make it, for all who want it."""
        if self.current is not None:
            return self.current
        if self._pool.closed:
            raise ConnectionClosed("the client was closed")
        return await self._pool.connecting.run(self, self._connect)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(max(0.0, self._due - loop.time()))
            if self.current is None:
                self.attach(await self._pool.dial(self.address))
            assert self.current is not None
            return self.current
        except BrokerError as error:
            self.error = error
            self._due = loop.time() + backoff(self._attempt)
            self._attempt += 1
            raise

    def attach(self, connection: Connection) -> None:
        """A connection to it was made; if there is one already, that one stays."""
        if self.current is not None:
            self._pool.tasks.start(connection.close())
            return
        self.current, self.error = connection, None
        self._since = asyncio.get_running_loop().time()
        connection.closed.add_done_callback(self._lost)
        self._pool.attached(self)

    def _lost(self, closed: asyncio.Future[BrokerError]) -> None:
        now = asyncio.get_running_loop().time()
        self.current, self.error = None, closed.result()
        self._attempt = 0 if now - self._since > _STEADY else self._attempt + 1
        self._due = now + backoff(self._attempt)
        self._pool.lost(self, closed.result())


class Owner(Protocol):
    """What a pool tells whoever has it."""

    def attached(self, peer: Peer) -> None:
        """There is a connection to a worker."""

    def settled(self, home: Peer, before: Connection | None) -> None:
        """A worker is asked from now on what any can answer, instead of another."""


class Pool:
    """The workers that a client has to do with; `home` is the one that is asked what any could answer."""

    def __init__(
        self,
        seeds: list[Seed],
        token: str | None,
        tls: ssl.SSLContext | None,
        events: Events,
        owner: Owner,
    ) -> None:
        self.home: Peer | None = None
        self.error: BrokerError | None = None
        self.tasks = Tasks()
        self.connecting: SingleFlight[Peer, Connection] = SingleFlight(self.tasks, "the client was closed")
        self._resolver = Resolver(self.tasks)
        self._seeds = seeds
        self._token = token
        self._tls = tls
        self._events = events
        self._owner = owner
        self._peers: dict[str, Peer] = {}
        self._led_to: dict[str, Peer] = {}  # address of a seed -> the worker that answered there
        self._known: list[str] = []  # addresses of all workers, as the last one to answer has told
        self._found = asyncio.Event()
        self._seeking: asyncio.Task[None] | None = None
        self.closed = False

    @property
    def where(self) -> str:
        """The seeds."""
        return ", ".join(map(str, self._seeds))

    async def open(self) -> None:
        """Connect to any worker; ConnectionFailed if no seed answers."""
        for attempt in range(_ROUNDS):
            try:
                await self._enter()
                break
            except BrokerError as error:
                if not error.retriable or attempt == _ROUNDS - 1:
                    raise
            await asyncio.sleep(_PAUSE)
        self.tasks.start(self._sweep())

    async def close(self) -> None:
        """End all connections; those who wait for one get ConnectionClosed."""
        self.closed = True
        await self.tasks.cancel()
        connections = [peer.current for peer in self._peers.values() if peer.current is not None]
        await asyncio.gather(*(connection.close() for connection in connections))
        self._found.set()

    def peer(self, address: str) -> Peer:
        """Return the worker at an address."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(self, address)
        return peer

    async def connection(self, within: float | None) -> Connection:
        """That to any worker, waiting for it if need be; an error when that takes too long."""
        end = None if within is None else asyncio.get_running_loop().time() + within
        while True:
            if self.closed:
                raise ConnectionClosed("the client was closed")
            if self.home is not None and self.home.current is not None:
                return self.home.current
            try:
                async with asyncio.timeout_at(end):
                    await self._found.wait()
            except TimeoutError:
                error = self.error and self.error.again()
                raise error or ConnectionFailed(f"no connection to {self.where}") from None

    def answering(self) -> list[Peer]:
        """Return the workers to which there is a connection, those that answer; home first."""
        found = [
            peer for peer in self._peers.values() if peer.current is not None and not peer.current.silent
        ]
        return sorted(found, key=lambda peer: peer is not self.home)

    def strangers(self) -> list[Peer]:
        """Return the workers that are known to be there, without a connection, in random order."""
        addresses = {
            *self._known,
            *(seed.address for seed in self._seeds if seed.address not in self._led_to),
        }
        found = [peer for peer in map(self.peer, addresses) if peer.current is None]
        random.shuffle(found)
        return found

    def learn(self, info: wire.InfoReply) -> None:
        """Remember where workers are."""
        if info.workers:
            self._known = [worker.address for worker in info.workers]

    def forget(self, topic: str) -> None:
        """Nobody wants to hear of a topic's moves any more."""
        for peer in self._peers.values():
            if peer.current is not None:
                peer.current.maps.discard(topic)

    async def dial(self, address: str) -> Connection:
        """Make a connection; ConnectionFailed if nobody is there."""
        seed = parse_address(address, self._seeds[0].tls)
        if seed is None:
            raise ConnectionFailed(f"{address!r} is not the address of a worker")
        try:
            async with asyncio.timeout(ATTEMPT):
                connection = await connect(
                    *seed[:2],
                    tls=self._context() if seed.tls else None,
                    token=self._token,
                    events=self._events,
                    resolver=self._resolver,
                )
        except (OSError, ConnectionClosed) as error:
            raise ConnectionFailed(f"no worker at {address} ({_why(error)})") from error
        self.learn(connection.info)
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    # What peers tell

    def attached(self, peer: Peer) -> None:
        """There is a connection to a worker."""
        home = self.home
        if home is None or home.current is None or home.current.silent:
            self._use(peer)
        self._owner.attached(peer)

    def lost(self, peer: Peer, error: BrokerError) -> None:
        """A connection has ended."""
        if peer is self.home and not self.closed:
            others = self.answering()
            if others:
                _log.info("%s; going on with %s", error, others[0].address)
                self._use(others[0])
                return
            _log.warning("%s; connecting again", error)
            self.home, self.error = None, error
            self._found.clear()
            self._seek()

    def suspect(self, connection: Connection) -> None:
        """A worker does not answer: have others answer what any can."""
        if self.home is not None and self.home.current is connection and not self.closed:
            others = self.answering()
            if others:
                self._use(others[0])
            else:
                self._seek()

    # Below: how

    def _use(self, peer: Peer) -> None:
        before = self.home.current if self.home is not None else None
        self.home = peer
        self._found.set()
        self._owner.settled(peer, before)

    def _seek(self) -> None:
        if self._seeking is None:
            self._seeking = self.tasks.start(self._seek_home())

    async def _seek_home(self) -> None:
        """Look for a worker that answers, until there is one or the old one is heard again."""
        try:
            attempt = 0
            while self._homeless():
                await asyncio.sleep(backoff(attempt))
                attempt += 1
                try:
                    await self._enter()
                except BrokerError as error:
                    self.error = error
            if self.home is not None:
                _log.warning("connected again, to %s", self.home.address)
        finally:
            self._seeking = None

    def _homeless(self) -> bool:
        return self.home is None or self.home.current is None or self.home.current.silent

    async def _enter(self) -> None:
        """Connect to any worker: the seeds in random order, then those learnt from others."""
        seeds = random.sample(self._seeds, len(self._seeds))
        error: BrokerError | None = None
        for address in dict.fromkeys((*(seed.address for seed in seeds), *self._known)):
            if not self._homeless():
                return
            peer = self._peers.get(address) or self._led_to.get(address)
            if peer is not None and peer.current is not None:
                continue  # it does not answer, or it would be home
            try:
                if peer is not None:
                    await peer.connect()
                else:
                    await self._follow(address)
                return
            except BrokerError as problem:
                error = _worse(error, problem)
                if peer is not None and peer.address != address:  # the seed may lead elsewhere by now
                    self._led_to.pop(address, None)
        if isinstance(error, ConnectionFailed):
            cause = error.__cause__ or error
            advice = "start one with `keylane serve`"
            if isinstance(cause, socket.gaierror):
                advice = "check the name of the host"
            elif isinstance(cause, ssl.SSLCertVerificationError):
                advice = "set SSL_CERT_FILE to the certificate of its authority, or pass tls="
            error = ConnectionFailed(f"no broker at {self.where} ({_why(cause)}); {advice}")
        raise error or ConnectionFailed(f"no other worker answers at {self.where}")

    async def _follow(self, address: str) -> None:
        """Connect to a seed. Who answers may well be known by another address: that is its name then."""
        connection = await self.dial(address)
        info = connection.info
        own = next((worker.address for worker in info.workers if worker.id == info.worker), address)
        peer = self._led_to[address] = self.peer(own)
        peer.attach(connection)

    async def _sweep(self) -> None:
        """Close connections that nobody has used for a while."""
        while True:
            await asyncio.sleep(_SWEEP)
            for peer in unused(self._peers.values(), self.home, asyncio.get_running_loop().time()):
                assert peer.current is not None
                await peer.current.close()


def unused(peers: Iterable[Peer], home: Peer | None, now: float) -> list[Peer]:
    """Return those whose connection has been idle for long enough; never home."""
    return [
        peer
        for peer in peers
        if peer is not home
        and peer.current is not None
        and not peer.current.busy
        and now - peer.current.used > _UNUSED
    ]


def _worse(one: BrokerError | None, other: BrokerError) -> BrokerError:
    """Of two reasons, the one that says more: that a worker said no, rather than that none was there."""
    if one is None or not one.retriable:
        return one or other
    return one if isinstance(other, ConnectionFailed) and not isinstance(one, ConnectionFailed) else other


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {ATTEMPT:g} s"
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        return f"it does not speak TLS, so use keylane://; {error}"
    return "connection refused" if isinstance(error, ConnectionRefusedError) else str(error)
