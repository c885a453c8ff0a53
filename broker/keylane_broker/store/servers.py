"""The servers behind a Redis URL: which there are, which one holds a key, and commands on each of them."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from random import choice
from typing import Any, NamedTuple

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import (
    AskError,
    ClusterError,
    ConnectionError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
    SlotNotCoveredError,
    TryAgainError,
)

from keylane.errors import BrokerError
from keylane.redis.errors import LOST
from keylane.redis.urls import close_client
from keylane_broker.counters import Counters
from keylane_broker.store.connection import Address, Displaced, SharedConnection, named_errors
from keylane_broker.store.lease_homes import LeaseHomes
from keylane_broker.store.pool import ConnectionPool
from keylane_broker.store.single_flight import SingleFlight

Argument = str | bytes | int

_AT_ONCE = 16  # calls through redis-py, each on a connection of its own: its pool refuses more than it has
_REDIRECTS = 16  # that are followed in a row
_PAUSE = 0.05  # seconds until a slot of which half has moved is asked for again


class Master(NamedTuple):
    """What a server says of itself."""

    info: str
    appendfsync: str | None  # where it allows CONFIG


class Servers:
    """A single server, one behind Sentinel, or the masters of a cluster.

    redis-py knows the servers; commands go to each of them over one shared connection, or, unless they are
    `shared`, the way redis-py sends them. `another` makes a client for another event loop.
    """

    def __init__(
        self,
        redis: "Redis | RedisCluster",
        *,
        patience: float,
        shared: bool = False,
        another: Callable[[], Any] | None = None,
    ) -> None:
        self.redis: Any = redis  # redis-py's clients share no type, and half of them has none
        self.clustered = isinstance(redis, RedisCluster)  # looked at once: it takes a microsecond
        self.shared = shared
        self._patience = patience
        self._another = another
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stay: asyncio.Task[None] | None = None
        self._permits = asyncio.Semaphore(_AT_ONCE)
        # Hears which leases are good no more: a new master may not have got the newest writes.
        self.on_lost: Callable[[Collection[str]], None] = lambda leases: None
        self.counters = Counters()
        self.homes = self._no_homes()
        self.connections = ConnectionPool(patience, self.homes.lose_all_of, self.prepare)
        self.lost: set[str] = set()  # nodes of the cluster to look for again
        self._searching = SingleFlight()
        self._learning = asyncio.Lock()
        # redis-py's own shape of an entry costs more than reading it.
        for command in ("XRANGE", "XREVRANGE"):
            redis.set_response_callback(command, _as_it_is)

    async def prepare(self, connection: SharedConnection) -> None:
        """Tell a server what it is to know before a connection to it is shared."""

    async def close(self) -> None:
        """Close all connections."""
        if self._stay is not None and self._loop is asyncio.get_running_loop():
            self._stay.cancel()
            await asyncio.wait([self._stay])
        self._searching.cancel()
        self.connections.close()
        await close_client(self.redis)

    def cork(self) -> None:
        """Gather what is asked for from now on, until flush."""
        self.connections.cork()

    def flush(self) -> None:
        """Send what was gathered, in one go for each server."""
        self.connections.flush()

    async def masters(self) -> dict[str, Master | BrokerError]:
        """Describe every server that takes writes, by its address; raises only if none answers."""

        async def ask(server: Address) -> tuple[str, Master | BrokerError]:
            name = server.name
            try:
                with named_errors():
                    about = await self.describe_server(server)
            except BrokerError as error:
                return name, error
            if not name and (connection := self.connections.get(server)):
                host, port = (
                    connection.peer[:2] if isinstance(connection.peer, tuple) else (connection.peer, "")
                )
                name = f"{host}:{port}" if port else str(host)
            return name, about

        with named_errors():
            servers = await self.all_servers()
        answers = dict(await asyncio.gather(*map(ask, servers)))
        errors = [answer for answer in answers.values() if isinstance(answer, BrokerError)]
        if len(errors) == len(answers):
            raise errors[0]
        return answers

    async def any_server(self, but: str = "") -> Address:
        """Return a server to listen or speak to; in a cluster all hear all. Not `but` if there is another."""
        servers = await self.all_servers()
        return choice([server for server in servers if server.name not in (but, *self.lost)] or servers)

    async def all_servers(self) -> list[Address]:
        """Return all that take writes: one, or on a cluster the masters."""
        self.begin()
        if not self.clustered:
            return [Address("", self.redis.connection_pool)]
        cluster: Any = self.redis
        if not cluster.nodes_manager.slots_cache:
            await self._searching.join("nodes", self._search)
        elif self.lost:
            # A cluster that has lost some of its slots cannot be searched, and yet is one.
            with contextlib.suppress(*LOST, RedisClusterException):
                await self._searching.join("nodes", self._search)
        return [Address(node.name, node) for node in cluster.get_primaries()]

    async def server_of(self, key: str) -> Address:
        """Return the server that holds a key."""
        self.begin()
        server = self._known_server(key)
        if server is None or (self.clustered and server.name in self.lost):
            await self._searching.join("nodes", self._search)
            server = self._known_server(key)
        if server is None:
            raise SlotNotCoveredError("no server of the cluster has the slot")
        return server

    def _known_server(self, key: str) -> Address | None:
        """Return the server that holds a key, as far as is known."""
        if not self.clustered:
            return Address("", self.redis.connection_pool)
        try:
            node = self.redis.get_node_from_key(key)
        except SlotNotCoveredError:
            return None
        return Address(node.name, node)

    def route(self, key: str) -> SharedConnection | None:
        """Return the connection over which a lease was taken, if it is open and good there right now.

        It is of the event loop that took the lease: whoever holds one stays there.
        """
        home = self.homes.home_of(key) if self.shared else None
        if home is None or not home.is_open:
            return None
        if self.clustered:  # it may be known since that another server has the slot
            server = self._known_server(key)
            if server is None or server.name in self.lost or self.connections.get(server) is not home:
                return None
        return home

    async def execute(
        self,
        key: str,
        *command: Argument,
        leases: Sequence[str] = (),
        takes: str | None = None,
        urgent: bool = False,
    ) -> Any:
        """Run a command on the server that holds a key, wherever its slot has gone.

        With `leases` only on the server where these were taken, else it raises Displaced, and nothing was
        done; what `takes` a lease says OK if it has. What is `urgent` waits for no other answers.
        """
        if not self.shared:
            return await self.by_redis_py(*command)
        for _ in range(_REDIRECTS):
            server = await self.server_of(key)
            try:
                return await self.send(server, *command, leases=leases, takes=takes, urgent=urgent)
            except MovedError as error:
                await self._follow(key, error)
            except AskError as error:  # the keys have gone with all that was written
                with contextlib.suppress(TryAgainError):
                    answer = await self._ask(error, command)
                    self._settle(takes, answer, self.connections.get(server))
                    return answer
                await asyncio.sleep(_PAUSE)
            except TryAgainError:
                await asyncio.sleep(_PAUSE)
        raise ClusterError("the slot is on the move")

    async def _ask(self, error: AskError, command: tuple[Argument, ...]) -> Any:
        """Run a command where keys of a slot have gone which the server that has it is about to give away."""
        cluster: Any = self.redis
        if cluster.get_node(error.host, error.port) is None:
            await self._searching.join("nodes", self._search)
        if (node := cluster.get_node(error.host, error.port)) is None:
            raise error
        server = Address(node.name, node)
        connection = self.connections.get(server) or await self.connections.open(server)
        _, answer = await asyncio.gather(connection.call("ASKING"), connection.call(*command))
        return answer

    async def _follow(self, key: str, error: MovedError) -> None:
        """Let redis-py learn where a key is; if a master has failed, all that it had is there."""
        async with self._learning:
            server = self._known_server(key)
            if server is None or server.name != f"{error.host}:{error.port}":
                await self.by_redis_py("EXISTS", key)
        self.homes.lose_displaced()

    async def by_redis_py(self, *command: Argument) -> Any:
        """Run a command the way redis-py does, when one of its connections is free."""
        self.begin()
        cluster: Any = self.redis
        if self.clustered and not cluster.nodes_manager.slots_cache:
            # Else it asks any node, and closes all when sent on.
            await self._searching.join("nodes", self._search)
        async with self._permits:
            return await self.redis.execute_command(*command)

    async def send(
        self,
        server: Address,
        *command: Argument,
        leases: Sequence[str] = (),
        takes: str | None = None,
        urgent: bool = False,
    ) -> Any:
        """Run a command on a server, over the shared connection; `leases` and the rest as in execute()."""
        connection = self.connections.get(server)
        try:
            if connection is None:
                connection = await self.connections.open(server)
            way = await self.connections.prompt(server) if urgent else connection
            self.homes.check(leases, connection)
            answer = await way.call(*command)
        except Displaced:
            raise
        except LOST as error:
            self.lose(server, connection, error)
            raise
        self._settle(takes, answer, connection)
        return answer

    def _settle(self, takes: str | None, answer: Any, connection: SharedConnection | None) -> None:
        if takes is not None and connection is not None and answer[0] == "OK":
            self.homes.settle(takes, connection)

    async def run_alone(
        self,
        key: str,
        commands: Sequence[tuple[Argument, ...]],
        wait: float = 0.0,
        leases: Sequence[str] = (),
    ) -> list[Any]:
        """Run commands back to back on a connection that has nothing else to do; `leases` as in execute().

        The last answer may be an exception, unless the server may have died, and what it stored with it.
        """
        server = await self.server_of(key)
        connection: SharedConnection | None = None
        try:
            async with self.connections.lend(server) as connection:
                connection.patience = self._patience + wait
                self.homes.check(leases, self.connections.get(server))
                calls = [connection.call(*command) for command in commands]
                answers: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
            for answer in answers[:-1]:
                if isinstance(answer, BaseException):
                    raise answer
            if isinstance(answers[-1], ConnectionError):
                raise answers[-1]
        except MovedError as error:
            await self._follow(key, error)
            raise
        except LOST as error:
            self.lose(server, connection, error)
            raise
        return answers

    async def run_raw(self, *command: str) -> bytes:
        """Run a command on the key that it names first, and return its answer as it came."""
        server = await self.server_of(command[1])
        connection: SharedConnection | None = None
        try:
            async with self.connections.lend(server) as connection:
                connection.patience = self._patience
                return await connection.read_raw(*command)
        except LOST as error:
            self.lose(server, connection, error)
            raise

    def lose(self, server: Address, connection: SharedConnection | None, error: Exception) -> None:
        """Look for a server again before its next use."""
        self.lost.add(server.name)
        if connection is None or not connection.usable or isinstance(error, (ReadOnlyError, MasterDownError)):
            self.connections.drop(server, connection)
        if isinstance(error, (ReadOnlyError, MasterDownError)):
            self.connections.drop(server, self.connections.get(server))  # it was lent another one

    def _connection_lost(self, homes: LeaseHomes, connection: SharedConnection) -> None:
        self.counters.redis_reconnects += 1
        homes.lose_all_of(connection)

    def _no_homes(self) -> LeaseHomes:
        def way_to(key: str) -> SharedConnection | None:
            server = self._known_server(key)
            return None if server is None else self.connections.get(server)

        return LeaseHomes(way_to, lambda leases: self.on_lost(leases))

    async def _search(self) -> None:
        """Ask the cluster who serves which slots."""
        nodes = self.redis.nodes_manager
        await (nodes if nodes.slots_cache else self.redis).initialize()
        self.lost.clear()
        self.homes.lose_displaced()

    async def describe_server(self, server: Address) -> Master:
        """Ask a server about itself."""
        info, policy = await self.send(server, "INFO"), None
        with contextlib.suppress(ResponseError):  # managed servers forbid CONFIG
            policy = (await self.send(server, "CONFIG", "GET", "appendfsync"))[-1]
        return Master(info, policy)

    def begin(self) -> None:
        """Start afresh in another event loop: connections do not outlive the one that they are of."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._permits = asyncio.Semaphore(_AT_ONCE)
        if not self.shared:
            self._loop = loop
            return
        if loop is self._loop and self._stay is not None and not self._stay.done():
            return
        if loop is not self._loop and self._loop is not None and self._another is not None:
            self.connections.close()
            self.redis = self._another()
            for command in ("XRANGE", "XREVRANGE"):
                self.redis.set_response_callback(command, _as_it_is)
        self._loop, self.lost, self.homes, self._learning = loop, set(), self._no_homes(), asyncio.Lock()
        on_lost = partial(self._connection_lost, self.homes)
        self.connections = ConnectionPool(self._patience, on_lost, self.prepare)
        self._searching = SingleFlight()
        self._stay = loop.create_task(_stay(self.redis, self.connections, self._searching))


async def _stay(redis: Any, connections: ConnectionPool, searching: SingleFlight) -> None:
    """Close the connections when the event loop ends, should nobody have done so before."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        searching.cancel()
        connections.close()
        await close_client(redis)
        raise


def _as_it_is(response: Any, **_options: Any) -> Any:
    return response
