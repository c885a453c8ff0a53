"""Bodies in Redis: hashes by time, `kl:bodies:<topic>:<first 6 characters of the names>`, name -> body."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from keylane.errors import (
    BrokerError,
    DurabilityNotReached,
    Forbidden,
    InvalidArgument,
    MessageTooLarge,
    Overloaded,
    Unavailable,
)
from keylane.payloads.line import Command, Line
from keylane.payloads.store import Owed, PayloadStore, cannot_sync, public

PREFIX = "kl:bodies"

_ANY_SERVER = 1024 * 1024  # bytes of a value that every server takes,
_MOST_SERVERS = 512 * 1024 * 1024  # and that most do
_PATIENCE = 5.0  # seconds in which a server may restart or fail over without anybody noticing
_CONNECT = 2.0  # seconds for each step of connecting
_ANSWER = 10.0  # seconds for an answer
_SYNC_MS = 5_000  # for the disk
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.5)  # seconds between attempts; the last one repeats
_KEPT = 10_000  # names in one go
_AT_ONCE = 16  # calls under way, each with a connection of its own
_BUCKET = 6  # characters of a name: an eighth of a second
_RUNS = 16  # of names whose bodies are together: with more they are better sorted
_PUT_BYTES = 16 * 1024 * 1024  # in one transaction, which the server keeps in memory until it runs

# A server that is away, or takes no commands or no writes for now.
_PASSING = (ConnectionError, TimeoutError, ClusterError, ReadOnlyError, RedisClusterException, TryAgainError)
_REFUSALS = ("BUSY", "MISCONF", "NOREPLICAS")

# Lua takes a few thousand arguments in one call.
_STORE = """
for first = 2, #ARGV, 1000 do
  redis.call('HSET', KEYS[1], unpack(ARGV, first, math.min(first + 999, #ARGV)))
end
return redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""

T = TypeVar("T")
_head = itemgetter(slice(_BUCKET))


class RedisStore(PayloadStore):
    """Bodies on a single server, behind Sentinel, or on a cluster.

    Storing, reading and deleting by name can be repeated: trouble that passes within seconds is sat out.
    """

    def __init__(self, url: str, *, lifetime: float, patience: float = _PATIENCE) -> None:
        self._url = public(url)
        self._redis = _client_for(url)
        self._cluster = isinstance(self._redis, RedisCluster)
        self._lifetime_ms = max(1, round(lifetime * 1_000))
        self._patience = patience
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._lines: list[Line] = []  # those that nobody uses just now
        self._largest = 0  # bytes of a body that the server takes, once that was asked
        self._closed = False

    async def put(self, topic: str, bodies: Sequence[tuple[str, bytes]]) -> None:
        """Store bodies, each with its name; all of them are stored when this returns."""
        await self._check_sizes(bodies)
        for some in _slices(bodies):
            await self._run(self._storing(topic, dict(some)))

    async def _check_sizes(self, bodies: Sequence[tuple[str, bytes]]) -> None:
        """Refuse what is more than the server takes: it would end the connection, and not say why."""
        largest = max((len(body) for _, body in bodies), default=0)
        if largest <= _ANY_SERVER:
            return
        if not self._largest:
            self._largest = _MOST_SERVERS
            if not self._cluster:  # whose nodes may differ
                with contextlib.suppress(BrokerError):  # some let nobody ask
                    _, found = (await self._run([("CONFIG", "GET", "proto-max-bulk-len")]))[0]
                    self._largest = int(found)
        if largest > self._largest:
            raise MessageTooLarge(
                f"a body of {largest} bytes: the payload store {self._url} takes up to {self._largest}"
            )

    async def get(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
        """Read bodies in the order asked for; None for one that is not there."""
        runs = [list(run) for _, run in itertools.groupby(names, _head)]
        if len(runs) <= _RUNS:  # as they mostly come, by time
            answers = await self._run([("HMGET", _key(topic, run[0]), *run) for run in runs])
            return list(itertools.chain.from_iterable(answers))
        buckets = _by_bucket(topic, names)
        answers = await self._run([("HMGET", key, *some) for key, some in buckets.items()])
        found: dict[str, bytes | None] = {}
        for some, values in zip(buckets.values(), answers, strict=True):
            found.update(zip(some, values, strict=True))
        return [found[name] for name in names]

    async def has(self, topic: str, names: Sequence[str]) -> list[bool]:
        """Which bodies are there, in the order asked for."""
        places = [(key, name) for key, some in _by_bucket(topic, names).items() for name in some]
        answers = await self._run([("HEXISTS", key, name) for key, name in places])
        found = {name: bool(answer) for (_, name), answer in zip(places, answers, strict=True)}
        return [found[name] for name in names]

    async def delete(self, topic: str, names: Sequence[str]) -> None:
        """Delete bodies; those that are not there are no error."""
        await self._run([("HDEL", key, *some) for key, some in _by_bucket(topic, names).items()])

    async def keep(self, topic: str, names: Sequence[str]) -> None:
        """Let bodies live on for another lifetime."""
        await self._run([("PEXPIRE", key, self._lifetime_ms) for key in _by_bucket(topic, names)])

    async def sync(self, topic: str, names: Sequence[str]) -> None:
        """Return when bodies are on the disks of their servers; InvalidArgument if these cannot say."""
        await self._insist(self._sync, list(_by_bucket(topic, names)))

    async def tend(self, topic: str, owed: Owed, now: float) -> None:
        """Let all bodies live on that are needed still."""
        names = list(await owed(""))
        for start in range(0, len(names), _KEPT):
            await self.keep(topic, names[start : start + _KEPT])

    async def close(self) -> None:
        """Close all connections; whoever waits for the server to come back is told."""
        self._closed = True
        closers: list[Callable[[], Awaitable[None]]] = [line.close for line in self._lines]
        self._lines = []
        closers.append(self._redis.aclose)
        if self._cluster:
            nodes: Any = self._redis.nodes_manager
            closers += [nodes.aclose, lambda: nodes.aclose("startup_nodes")]
        elif sentinel := getattr(self._redis.connection_pool, "sentinel_manager", None):
            closers += [client.aclose for client in sentinel.sentinels]
        for closer in closers:
            # RuntimeError is that of an event loop that is no more.
            with contextlib.suppress(RedisError, OSError, RuntimeError):
                await closer()

    def _storing(self, topic: str, bodies: dict[str, bytes]) -> list[Command]:
        """What sets fields and their end in one go, so that no crash leaves a body that stays for ever."""
        end, commands = self._lifetime_ms, list[Command]()
        for key, names in _by_bucket(topic, bodies).items():
            fields = [part for name in names for part in (name, bodies[name])]
            if self._cluster:
                # For each command of a transaction on a cluster redis-py starts a thread with an event loop.
                commands.append(("EVAL", _STORE, 1, key, end, *fields))
            else:
                commands += [("HSET", key, *fields), ("PEXPIRE", key, end)]
        return commands if self._cluster or not commands else [("MULTI",), *commands, ("EXEC",)]

    async def _run(self, commands: list[Command]) -> list[Any]:
        """Run commands, again if need be; their answers."""
        if not commands:
            return []
        if not self._cluster:
            answers: list[Any] = await self._insist(self._call, commands)
            return answers
        # The keys are spread over the nodes.
        calls = (self._insist(self._call_cluster, command) for command in commands)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        _raise_first(answers)
        return answers

    async def _insist(self, call: Callable[[T], Awaitable[Any]], what: T) -> Any:
        """Call, and call again while the server is away."""
        end = asyncio.get_running_loop().time() + self._patience
        pauses = itertools.chain(_PAUSES, itertools.repeat(_PAUSES[-1]))
        while True:
            try:
                async with self._room:
                    return await call(what)
            except (RedisError, RedisClusterException, OSError) as error:
                pause = next(pauses)
                late = asyncio.get_running_loop().time() + pause > end
                if late or self._closed or not _passes(error):
                    raise self._named(error) from error
            await asyncio.sleep(pause)

    async def _sync(self, keys: list[str]) -> None:
        """Write behind what was written, and wait until that is on disk, with all that was before it."""
        try:
            if not self._cluster:
                self._check_synced(await self._call(self._syncing(keys)))
                return
            await self._redis.initialize()
            nodes: dict[Any, list[str]] = {}
            for key in keys:
                nodes.setdefault(self._redis.get_node_from_key(key), []).append(key)
            for node, some in nodes.items():
                await self._sync_node(node, some)
        except ResponseError as error:
            if "waitaof" not in str(error).lower():
                raise
            raise cannot_sync(self._url, str(error)) from error

    def _syncing(self, keys: list[str]) -> list[Command]:
        renewals: list[Command] = [("PEXPIRE", key, self._lifetime_ms) for key in keys]
        return [*renewals, ("WAITAOF", 1, 0, _SYNC_MS)]

    async def _sync_node(self, node: Any, keys: list[str]) -> None:
        """The same on one node of a cluster, by a connection that is ours alone: WAITAOF is about that."""
        line = await Line.open(node.connection_class(**node.connection_kwargs), _ANSWER)
        try:
            answers = await line.call(self._syncing(keys))
            _raise_first(answers)
        except AskError as error:  # MOVED, too
            await self._redis.nodes_manager.initialize()
            raise TryAgainError(str(error)) from error
        finally:
            line.drop()
        self._check_synced(answers)

    def _check_synced(self, answers: list[Any]) -> None:
        *renewed, (synced, _) = answers
        if not synced or not all(renewed):
            raise DurabilityNotReached(
                f"the payload store {self._url} has not written bodies to disk in time"
            )

    async def _call_cluster(self, command: Command) -> Any:
        await self._redis.initialize()  # before, redis-py sends commands to just any node
        return await self._redis.execute_command(*command)

    async def _call(self, commands: list[Command]) -> list[Any]:
        line = await self._line()
        try:
            answers = await line.call(commands)
        except asyncio.CancelledError:
            line.drop()
            raise
        except BaseException:
            self._hang_up(line)
            raise
        self._lines.append(line)
        try:
            _raise_first(answers)
        except _PASSING:
            self._hang_up()
            raise
        return answers

    def _hang_up(self, *lines: Line) -> None:
        """Drop lines and all the others: they are to a server that has gone, or is the master no more."""
        for line in (*lines, *self._lines):
            line.drop()
        self._lines = []

    async def _line(self) -> Line:
        """A line that nobody uses."""
        while self._lines:
            line = self._lines.pop()
            if line.usable:
                return line
            line.drop()
        return await Line.open(self._redis.connection_pool.make_connection(), _ANSWER)

    def _named(self, error: Exception) -> BrokerError:
        """The trouble of Redis as an error of ours."""
        reason = str(error) or type(error).__name__
        if isinstance(error, OutOfMemoryError):
            return Overloaded(f"the payload store {self._url} has reached its maxmemory: {reason}")
        if isinstance(error, AuthenticationError):
            return Unavailable(f"the payload store {self._url} refuses the credentials: {reason}")
        if isinstance(error, (*_PASSING, OSError)):
            return Unavailable(f"the payload store {self._url} cannot be reached: {reason}")
        if isinstance(error, NoPermissionError):
            return Forbidden(f"the payload store {self._url} does not allow a command: {reason}")
        return Unavailable(f"the payload store {self._url} refuses a command: {reason}")


def _passes(error: Exception) -> bool:
    """Whether an error is of the kind that goes away by itself."""
    if isinstance(error, AuthenticationError):
        return False
    return isinstance(error, (*_PASSING, OSError)) or str(error).partition(" ")[0] in _REFUSALS


def _raise_first(answers: Sequence[Any]) -> None:
    """Raise the first error among answers, and among those of a transaction."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, list):
            for part in answer:
                if isinstance(part, BaseException):
                    raise part


def _by_bucket(topic: str, names: Iterable[str]) -> dict[str, list[str]]:
    """The names by the key that holds them."""
    heads: dict[str, list[str]] = {}
    for name in names:
        head = name[:_BUCKET]
        if head in heads:
            heads[head].append(name)
        else:
            heads[head] = [name]
    return {_key(topic, head): some for head, some in heads.items()}


def _key(topic: str, name: str) -> str:
    return f"{PREFIX}:{topic}:{name[:_BUCKET]}"


def _slices(bodies: Sequence[tuple[str, bytes]]) -> Iterator[Sequence[tuple[str, bytes]]]:
    """Cut bodies into parts, each of a size that a server takes at once."""
    start = size = 0
    for place, (_, body) in enumerate(bodies):
        if size and size + len(body) > _PUT_BYTES:
            yield bodies[start:place]
            start, size = place, 0
        size += len(body)
    yield bodies[start:]


def _client_for(url: str) -> Any:
    """redis-py's client for a URL; its kinds share no type, and half of them has none."""
    once: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": _CONNECT,
        "socket_timeout": _CONNECT,
    }
    options = {"decode_responses": False, "protocol": 2, **once}
    scheme, _, rest = url.partition("://")
    try:
        if scheme == "redis+cluster":
            # One slot that has moved is no reason to close all connections, others' calls with them.
            options |= {"reinitialize_steps": 0, "socket_timeout": _ANSWER}
            first, *others = rest.split(",")
            nodes = [ClusterNode(*_host_and_port(other.partition("/")[0], 6379)) for other in others]
            return RedisCluster.from_url(f"redis://{first}", startup_nodes=nodes, **options)
        if scheme == "redis+sentinel":
            return _behind_sentinel(url, once, options)
        return Redis.from_url(url, **options)
    except ValueError:
        # Its text, and so its chain, can quote a part of the password.
        raise InvalidArgument(
            f"the payload store {public(url)} has no address that can be read: write {scheme}://host:port/…, "
            "and special characters of a password as %40 and the like"
        ) from None


def _behind_sentinel(url: str, once: dict[str, Any], options: dict[str, Any]) -> Any:
    """The client of the master that the Sentinels of a URL name; the credentials are for the master."""
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    servers = [_host_and_port(text, 26379) for text in hosts.split(",")]
    sentinel: Any = Sentinel
    return sentinel(servers, sentinel_kwargs=once).master_for(
        parts.path.strip("/") or "mymaster",
        username=unquote(user) or None,
        password=unquote(password) or None,
        **options,
    )


def _host_and_port(text: str, default: int) -> tuple[str, int]:
    host, _, port = text.partition(":")
    if not host:
        raise ValueError("an address without a host")
    return host, int(port or default)
