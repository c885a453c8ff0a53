"""The cluster as a client sees it: whom to ask, and who serves the partitions of the topics in use."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from keylane import wire
from keylane.checks import check_request, check_topic
from keylane.connect.cluster_clock import ClusterClock
from keylane.connect.connection import Connection, Events, give_up
from keylane.connect.partition_map import TopicMap
from keylane.connect.pool import ATTEMPT, Peer, Pool
from keylane.connect.seeds import parse_seeds
from keylane.errors import (
    BrokerError,
    ConnectionClosed,
    ConnectionFailed,
    InvalidArgument,
    SubscriptionBusy,
)
from keylane.payloads.bodies import Bodies
from keylane.retry import pause
from keylane.wire import Frame, Properties

T = TypeVar("T")


async def _reach(peer: Peer) -> None:
    """Connect to a worker, if it is there again."""
    with suppress(BrokerError):
        await peer.connect()


class Cluster(Events):
    """The way to the workers: requests that any can answer, and maps of topics."""

    def __init__(
        self,
        seeds: str | Iterable[str],
        *,
        token: str | None,
        tls: ssl.SSLContext | None,
        timeout: float,
        on_time_drift: Callable[[float], None] | None,
        bodies: Bodies,
    ) -> None:
        self.timeout = timeout
        self._clock = ClusterClock(on_time_drift)
        self.maps: dict[str, TopicMap] = {}
        self._token = token
        self._bodies = bodies
        self.store = bodies.kind
        self._pool = Pool(parse_seeds(seeds), token, tls, self, self)
        self._asked: dict[asyncio.Future[Frame], Connection] = {}  # what another worker can answer as well
        self._loop: asyncio.AbstractEventLoop | None = None  # since it is open
        self._closed = False

    async def open(self) -> None:
        """Connect; ConnectionFailed if no seed answers."""
        if self._closed or self.current is not None:
            raise InvalidArgument("this client was opened before: create another")
        await self._pool.open()
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """End the connections; those who wait for one get ConnectionClosed."""
        self._closed = True
        await self._pool.close()

    @property
    def current(self) -> Connection | None:
        """The connection to the worker that is asked what any can answer, if there is one right now."""
        return self._pool.home.current if self._pool.home is not None else None

    async def connection(self, within: float | None = None) -> Connection:
        """Return that connection, waiting for it if need be. Raises ConnectionFailed if it takes too long."""
        self.check_open()
        return await self._pool.connection(within)

    def check_open(self) -> None:
        """Raise ConnectionClosed if it was closed, InvalidArgument if it is not open here."""
        if self._closed:
            raise ConnectionClosed("the client was closed")
        if self._loop is None:
            raise InvalidArgument("the client is not open: use it with `async with`")
        if asyncio.get_running_loop() is not self._loop:
            raise InvalidArgument(
                "this AsyncClient belongs to another event loop: open one in each asyncio.run, or use Client"
            )

    @property
    def now(self) -> float:
        """The cluster's time in unix seconds, which is that of Redis."""
        return self._clock.now

    @property
    def drift(self) -> float:
        """Seconds that the cluster's clock is ahead of ours."""
        return self._clock.drift

    # Requests that any worker can answer

    async def request(self, properties: Properties, body: bytes = b"", *, repeatable: bool = True) -> Frame:
        """Ask; what can be repeated is, after retriable errors, until the time is up."""
        check_request(properties)

        async def ask(connection: Connection) -> Frame:
            answer = connection.request(properties, body)
            if repeatable:
                self._asked[answer] = connection
            try:
                return await answer
            finally:
                self._asked.pop(answer, None)

        return await self._insist(ask, repeatable)

    async def request_near(self, topic: str, partition: int, properties: Properties) -> Frame:
        """Ask the worker that serves a partition what any could answer: so that all do their share."""
        peer = (await self.map(topic)).owner(partition)
        if peer is not None and peer is not self._pool.home:
            if peer.current is None and peer.error is not None:
                self._pool.tasks.start(_reach(peer))  # in the background: another is at hand
                return await self.request(properties)
            try:
                connection = await peer.connect()
                answer = connection.request(properties)
                gone = ConnectionClosed(f"the worker at {peer.address} does not answer")
                connection.wait_while_heard(answer, gone)
                async with asyncio.timeout(self.timeout):
                    return await answer
            except TimeoutError:
                pass
            except BrokerError as error:
                if not error.retriable:
                    raise
        return await self.request(properties)

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
                    "it is unknown whether the request was carried out"
                ) from None
            except SubscriptionBusy:
                raise  # the one who has it may well keep it: the application decides
            except BrokerError as error:
                wait = pause(error, attempt)
                if not (repeatable and error.retriable) or loop.time() + wait > end:
                    raise
            attempt += 1
            await asyncio.sleep(wait)

    # Maps

    async def map(self, topic: str) -> TopicMap:
        """Return the partition map of a topic, asking for it if it is not known."""
        self.check_open()
        known = self.maps.get(topic)
        if known is None:
            check_topic(topic)
            await self._pool.connection(self.timeout)
            known = TopicMap(topic, self._pool, self._ask_map, self._watch, self.forget)
        while True:
            known = self.maps.setdefault(topic, known)
            if not known.known:
                await self.learn(known)  # meanwhile it may be forgotten
            if self.maps.setdefault(topic, known) is known:  # of two there would be one that nobody renews
                return known

    def forget(self, known: TopicMap) -> None:
        """Keep no map of a topic that is not there, unless somebody waits for it to be there again."""
        if not known.known and not known.watchers and self.maps.get(known.topic) is known:
            del self.maps[known.topic]
            self._pool.forget(known.topic)

    async def learn(self, known: TopicMap) -> None:
        """Ask who serves a topic, again while workers come and go; after a failure refresh itself waits."""
        clock = asyncio.get_running_loop().time
        end = clock() + self.timeout
        while True:
            try:
                return await known.refresh()
            except BrokerError as error:
                if not error.retriable or self._closed or clock() > end:
                    raise

    async def _ask_map(self, topic: str) -> tuple[Peer, wire.InfoReply]:
        """Ask any worker that answers: those that do, then those that have not been asked for long."""
        error: BrokerError | None = None
        await self.connection(self.timeout)
        answering = self._pool.answering()
        for peer in (*answering, *self._pool.strangers()):
            try:
                connection = await peer.connect()
                async with asyncio.timeout(ATTEMPT):
                    info = await connection.greet(self._token, topic)
                self._pool.learn(info)
                return peer, info
            except TimeoutError:
                error = ConnectionFailed(f"the worker at {peer.address} does not answer")
            except BrokerError as problem:
                if not problem.retriable:
                    raise
                error = problem
        raise error or ConnectionFailed(f"no worker answers at {self._pool.where}")

    # What the pool and the connections tell

    def attached(self, peer: Peer) -> None:
        """There is a connection: it is to tell, too, when the maps change in which it is."""
        if peer.current is not None:
            self._bodies.greeted(peer.current.info)
        for known in self.maps.values():
            if not known.names(peer):
                continue
            if known.watchers:
                self._watch(peer, known.topic)
            else:  # nobody would notice that its topic was deleted meanwhile
                known.renew()

    def _watch(self, peer: Peer, topic: str) -> None:
        connection = peer.current
        if connection is not None and topic not in connection.maps:
            asked = wire.Info(wire.VERSIONS, self._token or "", topic=topic)
            connection.watch(topic, connection.request(asked))

    def settled(self, home: Peer, before: Connection | None) -> None:
        """Another worker is asked from now on: also for what the one before has not answered."""
        for answer, asked in list(self._asked.items()):
            if asked is before:
                give_up(answer, ConnectionClosed(f"the worker at {asked.address} does not answer"))
        for known in self.maps.values():
            if known.watchers and home.current is not None and known.topic not in home.current.maps:
                known.renew()

    def delete_bodies(self, connection: Connection, topic: str, names: list[str], sequence: int) -> None:
        """A worker wants bodies to be deleted, and to hear when they are."""
        self._bodies.delete(topic, names, lambda: connection.answer(sequence))

    def moved(self, topic: str) -> None:
        """A map has changed."""
        if known := self.maps.get(topic):
            known.renew()
        else:
            self._pool.forget(topic)

    def fell_silent(self, connection: Connection) -> None:
        """A worker does not answer: perhaps others have what it had."""
        self._pool.suspect(connection)
        for known in self.maps.values():
            if any(peer is not None and peer.current is connection for peer in known.owners):
                known.renew()

    def told_time(self, drift: float, trip: float) -> None:
        """A worker has told the time."""
        self._clock.set(drift, trip)
