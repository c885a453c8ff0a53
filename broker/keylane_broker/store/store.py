"""The way to Redis: runs scripts, reads logs, and turns Redis trouble into named errors."""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from random import choice, random
from secrets import token_hex
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ConnectionError,
    MasterDownError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)

from keylane.errors import BrokerError, DurabilityNotReached, InvalidArgument, Unavailable
from keylane.wire import lines
from keylane_broker.store.connection import LOST, Link, named_errors
from keylane_broker.store.durability import check_reached, replicas
from keylane_broker.store.pool import Address, Attempts, Links
from keylane_broker.store.scripts import Scripts
from keylane_broker.store.server_info import fsync_confirmation, replicas_online

Argument = str | bytes | int
Call = tuple[str, Sequence[str], Sequence[Argument]]  # script, keys, arguments

_PATIENCE = 10.0  # seconds without any answer until a connection counts as dead
_CONNECT = 5.0  # seconds for each step of connecting
_FOLLOWED = 1.0  # seconds for which it is known how many replicas follow a server
_WITHOUT_LEASE = {"partition/acquire", "partition/delete"}  # that need none, though they name it first
_ECHO = 3.0  # seconds between two proofs that a channel is heard, and for each of them
_AT_ONCE = 16  # calls through redis-py, each on a connection of its own: its pool refuses more than it has
_FIRST_PAUSE, _LAST_PAUSE = 0.05, 1.0  # seconds before a channel is listened to again

log = logging.getLogger("keylane.broker")

_KINDS = (
    "redis://, rediss://, unix://, redis+cluster://host:port,host:port or redis+sentinel://host:port/master"
)


class Master(NamedTuple):
    """What a server says of itself."""

    info: str
    appendfsync: str | None  # where it allows CONFIG


class Store:
    """Runs the scripts on a single server, behind Sentinel, or on a cluster.

    redis-py knows the servers; commands go to each of them over one shared connection. Nothing is retried:
    an ack that was carried out and then repeated would be answered "stale", so callers decide what to repeat.
    """

    def __init__(
        self,
        redis: "Redis | RedisCluster",
        scripts: Scripts | None = None,
        *,
        linked: bool = False,
        patience: float = _PATIENCE,
    ) -> None:
        self.redis: Any = redis  # redis-py's clients share no type, and half of them has none
        self.scripts = scripts or Scripts()
        self._linked = linked
        self._patience = patience
        self._client: Callable[[], Any] | None = None  # makes another one
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stay: asyncio.Task[None] | None = None
        self._room = asyncio.Semaphore(_AT_ONCE)
        # Hears which keys may have lost their newest writes: a new master may not have got them.
        self.on_lost: Callable[[Callable[[str], bool]], None] | None = None
        self._links = Links(patience, self._lost_server)
        self._lost: set[str] = set()  # nodes of the cluster to look for again
        self._searching = Attempts()
        self._spent: dict[str, int] = defaultdict(int)
        # redis-py's own shape of an entry costs more than reading it.
        redis.set_response_callback("XRANGE", _as_it_is)

    @classmethod
    def connect(cls, url: str, scripts: Scripts | None = None, *, patience: float = _PATIENCE) -> "Store":
        """Get ready for a Redis; connections are made when they are needed."""
        once: dict[str, Any] = {
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": min(_CONNECT, patience),
            "socket_timeout": min(_CONNECT, patience),
        }
        client = _client_for(url, once)
        store = cls(client(), scripts, linked=True, patience=patience)
        store._client = client
        return store

    async def close(self) -> None:
        """Close all connections."""
        if self._stay is not None and self._loop is asyncio.get_running_loop():
            self._stay.cancel()
            await asyncio.wait([self._stay])
        self._searching.cancel()
        self._links.close()
        await _close(self.redis)

    def cork(self) -> None:
        """Gather what is asked for from now on, until flush."""
        self._links.cork()

    def flush(self) -> None:
        """Send what was gathered, in one go for each server."""
        self._links.flush()

    async def run(self, script: str, keys: Sequence[str], *arguments: Argument) -> list[Any]:
        """Run one script, loading it where the server does not know it yet."""
        text, sha, measured = self.scripts[script]
        # Under a lease: its key comes first, and then what the caller holds of it, an operator nothing.
        leased = keys[0].endswith(":lease") and bool(arguments[0]) and script not in _WITHOUT_LEASE
        with named_errors():
            try:
                answer = await self._execute(
                    keys[0], "EVALSHA", sha, len(keys), *keys, *arguments, leased=leased
                )
            except NoScriptError:
                answer = await self._execute(
                    keys[0], "EVAL", text, len(keys), *keys, *arguments, leased=leased
                )
        if measured:
            self._spent[keys[0]] += answer.pop()
        return answer  # type: ignore[no-any-return]

    async def run_all(self, calls: Sequence[Call]) -> list[list[Any]]:
        """Run many scripts at once; each server gets its share in one go."""
        return await _together(*(self.run(script, keys, *arguments) for script, keys, arguments in calls))

    async def try_all(self, calls: Sequence[Call], patience: float) -> list[list[Any] | BrokerError]:
        """The same where each may fail by itself, or take too long; raises only if all do."""

        async def attempt(call: Call) -> list[Any] | BrokerError:
            try:
                async with asyncio.timeout(patience):
                    return await self.run(call[0], call[1], *call[2])
            except BrokerError as error:
                return error
            except TimeoutError:
                return Unavailable(f"Redis has not answered in {patience:g} s")

        answers = await asyncio.gather(*(attempt(call) for call in calls))
        errors = [answer for answer in answers if isinstance(answer, BrokerError)]
        if errors and len(errors) == len(answers):
            raise errors[0]
        return answers

    def groups(self, keys: Sequence[str], limit: int) -> list[list[int]]:
        """The places of keys that one script may take together: all, or on a cluster those of one slot."""
        by_slot: dict[int, list[int]] = defaultdict(list)
        clustered = isinstance(self.redis, RedisCluster)
        for index, key in enumerate(keys):
            by_slot[key_slot(key.encode()) if clustered else 0].append(index)
        return [places[at : at + limit] for places in by_slot.values() for at in range(0, len(places), limit)]

    async def run_durably(
        self, level: str, timeout_ms: int, script: str, keys: Sequence[str], *arguments: Argument
    ) -> list[Any]:
        """Run a script and wait until its writes are as safe as asked: fsync, replicated, replicated:N."""
        if level == "memory":
            return await self.run(script, keys, *arguments)
        text, sha, measured = self.scripts[script]
        with named_errors():
            wait = await self._wait_for(level, timeout_ms, keys[0])
            if wait is None:
                return await self.run(script, keys, *arguments)
            try:
                answer, reached = await self._pair(
                    keys[0], ("EVALSHA", sha, len(keys), *keys, *arguments), wait
                )
            except NoScriptError:
                answer, reached = await self._pair(
                    keys[0], ("EVAL", text, len(keys), *keys, *arguments), wait
                )
        if measured:
            self._spent[keys[0]] += answer.pop()
        if answer[0] == "OK":
            check_reached(level, int(wait[1]), timeout_ms, reached)
        return list(answer)

    async def require(self, level: str, key: str) -> None:
        """Raise DurabilityNotReached where a level is out of reach of the server that holds a key."""
        with named_errors():
            if needed := replicas(level):
                if (found := await self._replicas(key, needed)) < needed:
                    raise DurabilityNotReached(
                        f"{level} needs {needed} of Redis' replicas to be connected, and {found} are; "
                        "nothing was stored",
                        stored=False,
                    )
            elif level == "fsync":
                await self._fsync(key)

    async def _replicas(self, key: str, needed: int) -> int:
        """How many replicas follow the server that holds a key; known for a moment if they are enough."""
        if not self._linked:
            return 0
        server = await self._server_of(key)
        link = self._links.get(server)
        now = asyncio.get_running_loop().time()
        if link is not None and link.replicas[0] >= needed and now < link.replicas[1]:
            return link.replicas[0]
        info = await self._send(server, "INFO", "replication")
        if "role:slave" in info:  # it was the master; the replicas of another one count
            demoted = ReadOnlyError("the server has become a replica")
            self._lose(server, self._links.get(server), demoted)
            raise demoted
        found = replicas_online(info)
        if (link := self._links.get(server)) is not None:
            link.replicas = (found, now + _FOLLOWED)
        return found

    def take_spent(self) -> dict[str, int]:
        """The microseconds that scripts took in Redis, by their first key, since the last call."""
        spent, self._spent = self._spent, defaultdict(int)
        return spent

    async def entries(self, log: str, ranges: Sequence[tuple[str, str]]) -> list[list[Any]]:
        """Read ranges of a log: for each a list of `[id, [field, value, …]]`."""
        with named_errors():
            if len(ranges) == 1:
                return [await self._execute(log, "XRANGE", log, *ranges[0])]
            return await _together(*(self._execute(log, "XRANGE", log, *bounds) for bounds in ranges))

    async def read_all(self, commands: Sequence[tuple[str, ...]]) -> list[Any]:
        """Run plain commands, each on the key that it names first, and answer them as the server does."""
        with named_errors():
            return await _together(*(self._execute(command[1], *command) for command in commands))

    async def unread(self, *command: str) -> bytes:
        """Run a plain command on the key that it names first; its answer as it came, for others to read."""
        with named_errors():
            if self._linked:
                with contextlib.suppress(MovedError, AskError, TryAgainError):
                    return await self._unread(*command)
            return lines.pack(await self._execute(command[1], *command))

    async def _unread(self, *command: str) -> bytes:
        server = await self._server_of(command[1])
        link: Link | None = None
        try:
            async with self._links.lend(server) as link:
                link.patience = self._patience
                return await link.unread(*command)
        except LOST as error:
            self._lose(server, link, error)
            raise

    async def fields(self, key: str) -> dict[str, str]:
        """All fields of a hash."""
        [found] = await self.all_fields([key])
        return found

    async def all_fields(self, keys: Sequence[str]) -> list[dict[str, str]]:
        """All fields of each of some hashes."""
        return [as_fields(found) for found in await self.read_all([("HGETALL", key) for key in keys])]

    async def atomically(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Run plain commands on the keys of one partition as one transaction; answered as in read_all."""
        with named_errors():
            if self._linked:
                key, wrapped = str(commands[0][1]), [("MULTI",), *commands, ("EXEC",)]
                try:
                    *_, answers = await self._alone(key, wrapped)
                except MovedError:  # nothing was done, and now it is known where to
                    *_, answers = await self._alone(key, wrapped)
                if isinstance(answers, Exception):
                    raise answers
            else:
                self._begin()
                pipeline = self.redis.pipeline(transaction=True)
                for command in commands:
                    pipeline.execute_command(*command)
                async with self._room:
                    answers = await pipeline.execute()
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return list(answers)

    async def command(self, *command: Argument) -> Any:
        """Run one plain command, the way redis-py does and answers it."""
        with named_errors():
            return await self._by_redis_py(*command)

    @property
    def clustered(self) -> bool:
        """Whether it is a Redis Cluster."""
        return isinstance(self.redis, RedisCluster)

    async def masters(self) -> dict[str, Master | BrokerError]:
        """Every server that takes writes, by its address; raises only if none answers."""

        async def ask(server: Address) -> tuple[str, Master | BrokerError]:
            name = server.name
            try:
                with named_errors():
                    about = await self._about(server)
            except BrokerError as error:
                return name, error
            if not name and (link := self._links.get(server)):
                host, port = link.peer[:2] if isinstance(link.peer, tuple) else (link.peer, "")
                name = f"{host}:{port}" if port else str(host)
            return name, about

        with named_errors():
            servers = await self._all_servers()
        answers = dict(await asyncio.gather(*map(ask, servers)))
        errors = [answer for answer in answers.values() if isinstance(answer, BrokerError)]
        if len(errors) == len(answers):
            raise errors[0]
        return answers

    async def states(self, keys: Sequence[str], field: str = "state") -> list[str | None]:
        """One field of many hashes."""
        with named_errors():
            return await _together(*(self._execute(key, "HGET", key, field) for key in keys))

    async def keys_like(self, pattern: str) -> set[str]:
        """All keys that match a pattern, found by scanning."""
        with named_errors():
            self._begin()
            async with self._room:
                return {key async for key in self.redis.scan_iter(match=pattern, count=1_000)}

    async def say(self, channel: str, text: str) -> None:
        """Publish on a channel."""
        with named_errors():
            await self._say(channel, text)

    async def listen(self, channel: str, on_message: Callable[[str], None]) -> None:
        """Pass on what is published on a channel, until cancelled; "" after each time it was not heard.

        A connection can go deaf without ending: its server hangs, or is no part of the whole any more. So
        the store says something on a channel of its own now and then, and expects to hear it.
        """
        echo = f"{channel}:{token_hex(8)}"
        pause, refused = _FIRST_PAUSE, ""

        def hear(text: str) -> None:
            nonlocal pause, refused
            pause, refused = _FIRST_PAUSE, ""
            if text != echo:
                on_message(text)

        while True:
            try:
                await self._listen(channel, echo, hear)
            except (*LOST, OSError, RedisClusterException, Unavailable):
                pass  # those who want more than to listen say so
            except RedisError as error:
                if str(error) != refused:
                    log.warning("Redis does not let the broker listen to %s: %s", channel, error)
                refused = str(error)
            await asyncio.sleep(pause * (0.5 + random() / 2))
            pause = min(2 * pause, _LAST_PAUSE)

    async def _listen(self, channel: str, echo: str, hear: Callable[[str], None]) -> None:
        """Listen over one connection, for as long as the echo comes back."""
        server = await self._any_server()
        # Anybody can say anything there.
        options = {**server.source.connection_kwargs, "encoding_errors": "replace"}
        connection = server.source.connection_class(**options)
        try:
            await connection.connect()
            await connection.send_command("SUBSCRIBE", echo, channel)
            clock = asyncio.get_running_loop().time
            called, at = False, clock() + _ECHO
            while True:
                match await connection.read_response(timeout=max(at - clock(), 0.001)):
                    case ["subscribe", name, _] if name == channel:
                        hear("")
                    case ["message", name, text] if name == channel:
                        hear(text)
                    case ["message", _, _]:
                        hear(echo)
                        called, at = False, clock() + _ECHO
                if clock() >= at:
                    if called:
                        raise ConnectionError("this server does not hear what is said to the others")
                    await self._say(echo, "", server.name)
                    called, at = True, clock() + _ECHO
        except LOST:
            self._lost.add(server.name)
            raise
        finally:
            await connection.disconnect(nowait=True)

    async def _say(self, channel: str, text: str, but: str = "") -> None:
        if self._linked:
            await self._send(await self._any_server(but), "PUBLISH", channel, text)
        else:
            await self._by_redis_py("PUBLISH", channel, text)

    async def _any_server(self, but: str = "") -> Address:
        """A server to listen or speak to: on a cluster any hears all. Another than `but`, if there is one."""
        servers = await self._all_servers()
        return choice([server for server in servers if server.name not in (but, *self._lost)] or servers)

    async def _all_servers(self) -> list[Address]:
        """All that take writes: one, or on a cluster the masters."""
        self._begin()
        if not isinstance(self.redis, RedisCluster):
            return [Address("", self.redis.connection_pool)]
        cluster: Any = self.redis
        if not cluster.nodes_manager.slots_cache:
            await self._searching.join("nodes", self._search)
        elif self._lost:
            # A cluster that has lost some of its slots cannot be searched, and yet is one.
            with contextlib.suppress(*LOST, RedisClusterException):
                await self._searching.join("nodes", self._search)
        return [Address(node.name, node) for node in cluster.get_primaries()]

    def _begin(self) -> None:
        """Start afresh in another event loop: connections do not outlive the one that they are of."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._room = asyncio.Semaphore(_AT_ONCE)
        if not self._linked:
            self._loop = loop
            return
        if loop is self._loop and self._stay is not None and not self._stay.done():
            return
        if loop is not self._loop and self._loop is not None and self._client is not None:
            self._links.close()
            self.redis = self._client()
            self.redis.set_response_callback("XRANGE", _as_it_is)
        self._loop, self._lost = loop, set()
        self._links, self._searching = Links(self._patience, self._lost_server), Attempts()
        self._stay = loop.create_task(_stay(self.redis, self._links, self._searching))

    async def _execute(self, key: str, *command: Argument, leased: bool = False) -> Any:
        if not self._linked:
            return await self._by_redis_py(*command)
        server = await self._server_of(key)
        try:
            return await self._send(server, *command)
        except (MovedError, AskError, TryAgainError) as error:
            if isinstance(error, MovedError) and self.on_lost is not None:
                tag = key.partition("}")[0]
                self.on_lost(lambda other: other.partition("}")[0] == tag)
                if leased:  # if the master has failed, the lease must be taken anew
                    await self._by_redis_py("EXISTS", key)  # lets redis-py learn the new map
                    raise
            # The slot is on the move: redis-py follows it and learns the new map on the way.
            return await self._by_redis_py(*command)

    async def _by_redis_py(self, *command: Argument) -> Any:
        """Run a command the way redis-py does, when one of its connections is free."""
        self._begin()
        cluster: Any = self.redis
        if isinstance(cluster, RedisCluster) and not cluster.nodes_manager.slots_cache:
            await self._searching.join(
                "nodes", self._search
            )  # else it asks any node, and closes all when sent on
        async with self._room:
            return await self.redis.execute_command(*command)

    def _lost_server(self, name: str) -> None:
        if self.on_lost is not None:
            cluster: Any = self.redis
            if isinstance(cluster, RedisCluster):
                self.on_lost(lambda key: getattr(cluster.get_node_from_key(key), "name", name) == name)
            else:
                self.on_lost(lambda key: True)

    async def _send(self, server: Address, *command: Argument) -> Any:
        """Run a command on a server, over the shared connection."""
        link = self._links.get(server)
        try:
            if link is None:
                link = await self._links.open(server)
            return await link.call(*command)
        except LOST as error:
            self._lose(server, link, error)
            raise

    async def _pair(
        self, key: str, first: tuple[Argument, ...], second: tuple[Argument, ...]
    ) -> tuple[Any, Any]:
        """A command and one that waits for what it wrote; the second answer may be an exception.

        WAIT is about the writes of its own connection, and holds up what comes behind it.
        """
        if not self._linked:
            return await self._by_redis_py(*first), await self._by_redis_py(*second)
        answer, waited = await self._alone(key, [first, second], int(second[-1]) / 1_000)
        if isinstance(waited, ResponseError) and (shared := self._links.get(await self._server_of(key))):
            shared.fsync = None  # its settings have changed
        return answer, waited

    async def _alone(
        self, key: str, commands: Sequence[tuple[Argument, ...]], wait: float = 0.0
    ) -> list[Any]:
        """Commands back to back on a connection that has nothing else to do.

        The last answer may be an exception, unless the server may have died, and what it stored with it.
        """
        server = await self._server_of(key)
        link: Link | None = None
        try:
            async with self._links.lend(server) as link:
                link.patience = self._patience + wait
                calls = [link.call(*command) for command in commands]
                answers: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
            for answer in answers[:-1]:
                if isinstance(answer, BaseException):
                    raise answer
            if isinstance(answers[-1], ConnectionError):
                raise answers[-1]
        except MovedError:
            if self.on_lost is not None:
                self.on_lost(lambda other: other.partition("}")[0] == key.partition("}")[0])
            await self._by_redis_py("EXISTS", key)  # lets redis-py learn the new map
            raise
        except LOST as error:
            self._lose(server, link, error)
            raise
        return answers

    def _lose(self, server: Address, link: Link | None, error: Exception) -> None:
        """Look for a server again before its next use."""
        self._lost.add(server.name)
        if link is None or not link.usable or isinstance(error, (ReadOnlyError, MasterDownError)):
            self._links.drop(server, link)
        if isinstance(error, (ReadOnlyError, MasterDownError)):
            self._links.drop(server, self._links.get(server))  # it was lent another one

    async def _server_of(self, key: str) -> Address:
        """The server that holds a key."""
        self._begin()
        if not isinstance(self.redis, RedisCluster):
            return Address("", self.redis.connection_pool)
        cluster: Any = self.redis
        if not cluster.nodes_manager.slots_cache or cluster.get_node_from_key(key).name in self._lost:
            await self._searching.join("nodes", self._search)
        node = cluster.get_node_from_key(key)
        return Address(node.name, node)

    async def _search(self) -> None:
        """Ask the cluster who serves which slots."""
        nodes = self.redis.nodes_manager
        await (nodes if nodes.slots_cache else self.redis).initialize()
        self._lost.clear()

    async def _wait_for(self, level: str, timeout_ms: int, key: str) -> tuple[Argument, ...] | None:
        """The command that waits for a level, None where there is nothing to wait for."""
        if needed := replicas(level):
            return ("WAIT", needed, timeout_ms)
        if await self._fsync(key) == "always":
            return None
        return ("WAITAOF", 1, 0, timeout_ms)

    async def _about(self, server: Address) -> Master:
        info, policy = await self._send(server, "INFO"), None
        with contextlib.suppress(ResponseError):  # managed servers forbid CONFIG
            policy = (await self._send(server, "CONFIG", "GET", "appendfsync"))[-1]
        return Master(info, policy)

    async def _fsync(self, key: str) -> str:
        """How the server that holds a key confirms fsync; known for as long as the connection to it lasts."""
        if not self._linked:
            raise DurabilityNotReached("this Redis cannot confirm fsync; nothing was stored", stored=False)
        server = await self._server_of(key)
        link = self._links.get(server)
        if link is not None and link.fsync is not None:
            return link.fsync
        answer = fsync_confirmation(*await self._about(server))
        if answer is None:
            raise DurabilityNotReached(
                "this Redis cannot confirm fsync: it needs appendonly yes, and Redis 7.2, Valkey "
                "or appendfsync always; nothing was stored",
                stored=False,
            )
        if (link := self._links.get(server)) is not None:
            link.fsync = answer
        return answer


def _client_for(url: str, once: dict[str, Any]) -> Callable[[], Any]:
    """What makes redis-py's client for a URL."""
    options = {"decode_responses": True, "protocol": 2, **once}
    scheme, mark, rest = url.partition("://")
    if mark and scheme in ("redis", "rediss", "unix"):
        return lambda: Redis.from_url(url, **options)
    if mark and scheme == "redis+cluster":
        first, *others = rest.split(",")
        nodes = [_host_and_port(item.partition("/")[0], 6379) for item in others]
        return lambda: RedisCluster.from_url(
            f"redis://{first}", startup_nodes=[ClusterNode(*node) for node in nodes], **options
        )
    if mark and scheme == "redis+sentinel":
        parts = urlsplit(url)
        credentials, _, hosts = parts.netloc.rpartition("@")
        user, _, password = credentials.partition(":")
        options |= {"username": unquote(user) or None, "password": unquote(password) or None}
        servers = [_host_and_port(item, 26379) for item in hosts.split(",")]
        sentinel: Any = Sentinel
        master = parts.path.strip("/") or "mymaster"
        return lambda: sentinel(servers, sentinel_kwargs=once).master_for(master, **options)
    raise InvalidArgument(f"cannot connect to {url!r}: use {_KINDS}")


def check_url(url: str) -> None:
    """Raise InvalidArgument for a URL that cannot be meant; whether anybody is there is another matter."""
    try:
        client = _client_for(url, {})()
        if not isinstance(client, RedisCluster):
            client.connection_pool.make_connection()
    except (TypeError, ValueError) as error:
        raise InvalidArgument(str(error)) from None
    scheme, _, rest = url.partition("://")
    database = rest.partition("?")[0].rpartition("@")[2].partition("/")[2]
    if scheme in ("redis", "rediss") and database and not database.isdecimal():
        raise InvalidArgument(f"the database is {database!r}; it should be a number")


async def _stay(redis: Any, links: Links, searching: Attempts) -> None:
    """Close the connections when the event loop ends, should nobody have done so before."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        searching.cancel()
        links.close()
        await _close(redis)
        raise


async def _close(redis: Any) -> None:
    """Close redis-py's client, and the parts of it that it leaves open."""
    closers = [redis.aclose]
    if isinstance(redis, RedisCluster):
        nodes: Any = redis.nodes_manager
        closers += [nodes.aclose, lambda: nodes.aclose("startup_nodes")]
    elif sentinel := getattr(redis.connection_pool, "sentinel_manager", None):
        closers += [client.aclose for client in sentinel.sentinels]
    for closer in closers:
        # RuntimeError is that of an event loop that is no more.
        with contextlib.suppress(RedisError, OSError, RuntimeError):
            await closer()


async def _together(*calls: Any) -> list[Any]:
    """Await all of them; the first error is raised when all are done, so none is left alone."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


def as_fields(answer: Any) -> dict[str, str]:
    """What HGETALL answers, as the server or as redis-py puts it."""
    return answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))


def _as_it_is(response: Any, **_options: Any) -> Any:
    return response


def _host_and_port(text: str, default: int) -> tuple[str, int]:
    host, colon, port = text.partition(":")
    if not host or (colon and not port.isdecimal()):
        raise InvalidArgument(f"{text!r} is not a host and a port")
    return host, int(port or default)
