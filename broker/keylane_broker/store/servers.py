"""The servers behind a Redis URL: which there are, which one holds a key, and commands on each of them."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from random import choice
from typing import Any, NamedTuple

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import (
    AskError,
    ConnectionError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
    TryAgainError,
)

from keylane.errors import BrokerError
from keylane.redis.errors import LOST
from keylane.redis.urls import close_client
from keylane_broker.store.connection import SharedConnection, named_errors
from keylane_broker.store.pool import Address, ConnectionPool
from keylane_broker.store.single_flight import SingleFlight

Argument = str | bytes | int

_AT_ONCE = 16  # calls through redis-py, each on a connection of its own: its pool refuses more than it has


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
        self.shared = shared
        self._patience = patience
        self._another = another
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stay: asyncio.Task[None] | None = None
        self._permits = asyncio.Semaphore(_AT_ONCE)
        # Hears which keys may have lost their newest writes: a new master may not have got them.
        self.on_lost: Callable[[Callable[[str], bool]], None] | None = None
        self.connections = ConnectionPool(patience, self._lost_server)
        self.lost: set[str] = set()  # nodes of the cluster to look for again
        self._searching = SingleFlight()
        # redis-py's own shape of an entry costs more than reading it.
        redis.set_response_callback("XRANGE", _as_it_is)

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

    @property
    def clustered(self) -> bool:
        """Whether it is a Redis Cluster."""
        return isinstance(self.redis, RedisCluster)

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
        if not isinstance(self.redis, RedisCluster):
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
        if not isinstance(self.redis, RedisCluster):
            return Address("", self.redis.connection_pool)
        cluster: Any = self.redis
        if not cluster.nodes_manager.slots_cache or cluster.get_node_from_key(key).name in self.lost:
            await self._searching.join("nodes", self._search)
        node = cluster.get_node_from_key(key)
        return Address(node.name, node)

    async def execute(self, key: str, *command: Argument, leased: bool = False) -> Any:
        """Run a command on the server that holds a key; `leased`: only if that is still the same one."""
        if not self.shared:
            return await self.by_redis_py(*command)
        server = await self.server_of(key)
        try:
            return await self.send(server, *command)
        except (MovedError, AskError, TryAgainError) as error:
            if isinstance(error, MovedError) and self.on_lost is not None:
                tag = key.partition("}")[0]
                self.on_lost(lambda other: other.partition("}")[0] == tag)
                if leased:  # if the master has failed, the lease must be taken anew
                    await self.by_redis_py("EXISTS", key)  # lets redis-py learn the new map
                    raise
            # The slot is on the move: redis-py follows it and learns the new map on the way.
            return await self.by_redis_py(*command)

    async def by_redis_py(self, *command: Argument) -> Any:
        """Run a command the way redis-py does, when one of its connections is free."""
        self.begin()
        cluster: Any = self.redis
        if isinstance(cluster, RedisCluster) and not cluster.nodes_manager.slots_cache:
            # Else it asks any node, and closes all when sent on.
            await self._searching.join("nodes", self._search)
        async with self._permits:
            return await self.redis.execute_command(*command)

    async def send(self, server: Address, *command: Argument) -> Any:
        """Run a command on a server, over the shared connection."""
        connection = self.connections.get(server)
        try:
            if connection is None:
                connection = await self.connections.open(server)
            return await connection.call(*command)
        except LOST as error:
            self.lose(server, connection, error)
            raise

    async def run_alone(
        self, key: str, commands: Sequence[tuple[Argument, ...]], wait: float = 0.0
    ) -> list[Any]:
        """Run commands back to back on a connection that has nothing else to do.

        The last answer may be an exception, unless the server may have died, and what it stored with it.
        """
        server = await self.server_of(key)
        connection: SharedConnection | None = None
        try:
            async with self.connections.lend(server) as connection:
                connection.patience = self._patience + wait
                calls = [connection.call(*command) for command in commands]
                answers: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
            for answer in answers[:-1]:
                if isinstance(answer, BaseException):
                    raise answer
            if isinstance(answers[-1], ConnectionError):
                raise answers[-1]
        except MovedError:
            if self.on_lost is not None:
                self.on_lost(lambda other: other.partition("}")[0] == key.partition("}")[0])
            await self.by_redis_py("EXISTS", key)  # lets redis-py learn the new map
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

    def _lost_server(self, name: str) -> None:
        if self.on_lost is not None:
            cluster: Any = self.redis
            if isinstance(cluster, RedisCluster):
                self.on_lost(lambda key: getattr(cluster.get_node_from_key(key), "name", name) == name)
            else:
                self.on_lost(lambda key: True)

    async def _search(self) -> None:
        """Ask the cluster who serves which slots."""
        nodes = self.redis.nodes_manager
        await (nodes if nodes.slots_cache else self.redis).initialize()
        self.lost.clear()

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
            self.redis.set_response_callback("XRANGE", _as_it_is)
        self._loop, self.lost = loop, set()
        self.connections, self._searching = ConnectionPool(self._patience, self._lost_server), SingleFlight()
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
