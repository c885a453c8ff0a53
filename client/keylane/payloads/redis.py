"""Bodies in Redis: hashes by time, `kl:bodies:<topic>:<first 6 characters of the names>`, name -> body.

Large ones, and those that are streamed, are in parts: see redis_parts.
"""

import asyncio
import contextlib
import itertools
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, TypeVar

from redis.asyncio import RedisCluster
from redis.exceptions import (
    AskError,
    NoPermissionError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)

from keylane.errors import (
    BrokerError,
    DurabilityNotReached,
    Forbidden,
    InvalidArgument,
    MessageTooLarge,
    Unavailable,
)
from keylane.payloads.redis_parts import PREFIX, join_parts, parts_key, read_parts, write_parts
from keylane.payloads.store import Owed, PayloadStore, cannot_sync, gathered, joined_up_to, public, sliced
from keylane.redis.connection import Command, RedisConnection
from keylane.redis.errors import PASSING, named, passes
from keylane.redis.urls import close_client, open_client

_ANY_SERVER = 1024 * 1024  # bytes of a value that every server takes,
_MOST_SERVERS = 512 * 1024 * 1024  # and that most do
_PATIENCE = 5.0  # seconds in which a server may restart or fail over without anybody noticing
_CONNECT = 2.0  # seconds for each step of connecting
_ANSWER = 10.0  # seconds for an answer
_SYNC_MS = 5_000  # for the disk
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.5)  # seconds between attempts; the last one repeats
_SOME = 1_000  # bodies of which some are read
_KEPT = 10_000  # names in one go
_AT_ONCE = 16  # calls under way, each with a connection of its own
_BUCKET = 6  # characters of a name: an eighth of a second
_RUNS = 16  # of names whose bodies are together: with more they are better sorted
_PUT_BYTES = 16 * 1024 * 1024  # in one transaction, which the server keeps in memory until it runs
_LARGE = 16 * 1024 * 1024  # bytes: what is larger is in parts, so that nobody has to read it at once

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
        self._redis = _open(url)
        self._cluster = isinstance(self._redis, RedisCluster)
        self._lifetime_ms = max(1, round(lifetime * 1_000))
        self._patience = patience
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._idle: list[RedisConnection] = []  # connections that nobody uses just now
        self._largest = 0  # bytes of a body that the server takes, once that was asked
        self._closed = False

    async def put(self, topic: str, bodies: Sequence[tuple[str, bytes]]) -> None:
        """Store bodies under their names; all are stored when this returns."""
        small = [pair for pair in bodies if len(pair[1]) <= _LARGE]
        await self._check_sizes(small)
        for some in _slices(small):
            await self._run(self._storing(topic, dict(some)))
        if len(small) < len(bodies):
            for name, body in bodies:
                if len(body) > _LARGE:
                    await self._write(topic, name, sliced(body))

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
        """Read bodies, in the order of `names`; None for each that is missing."""
        runs = [list(run) for _, run in itertools.groupby(names, _head)]
        if len(runs) <= _RUNS:  # as they mostly come, by time
            answers = await self._run([("HMGET", _key(topic, run[0]), *run) for run in runs])
            return await self._with_large(topic, names, list(itertools.chain.from_iterable(answers)))
        buckets = _by_bucket(topic, names)
        answers = await self._run([("HMGET", key, *some) for key, some in buckets.items()])
        found: dict[str, bytes | None] = {}
        for some, values in zip(buckets.values(), answers, strict=True):
            found.update(zip(some, values, strict=True))
        return await self._with_large(topic, names, [found[name] for name in names])

    async def get_some(self, topic: str, names: Sequence[str], room: int) -> list[bytes | bool | None]:
        """Read the first of these bodies, as far as there is room; True in place of one that is large."""
        names = names[:_SOME]
        sizes = await self._run([("HSTRLEN", _key(topic, name), name) for name in names])
        fits = [size <= room // 2 for size in sizes]
        used = list(itertools.accumulate(size if fit else 0 for size, fit in zip(sizes, fits, strict=True)))
        count = max(1, bisect_right(used, room))
        small = [name for name, fit in zip(names[:count], fits, strict=False) if fit]
        found: dict[str, bytes | bool | None] = dict.fromkeys(names[:count], True)
        buckets = _by_bucket(topic, small)
        answers = await self._run([("HMGET", key, *some) for key, some in buckets.items()])
        for some, values in zip(buckets.values(), answers, strict=True):
            found.update(zip(some, values, strict=True))
        missing = [name for name, body in found.items() if body is None]
        answers = await self._run([("EXISTS", parts_key(topic, name)) for name in missing])
        found.update((name, True) for name, there in zip(missing, answers, strict=True) if there)
        return [found[name] for name in names[:count]]

    async def get_up_to(
        self, topic: str, names: Sequence[str], sizes: Sequence[int]
    ) -> list[bytes | bool | None]:
        """Read bodies that are no longer than `sizes` say; True in place of one that is."""
        most = dict[str, int]()  # of one name there may be several sizes
        for name, size in zip(names, sizes, strict=True):
            most[name] = max(size, most.get(name, 0))
        lengths = await self._run([("HSTRLEN", _key(topic, name), name) for name in most])
        there = {name: length for name, length in zip(most, lengths, strict=True) if length}
        found: dict[str, bytes | bool | None] = dict.fromkeys(there, True)
        buckets = _by_bucket(topic, [name for name, length in there.items() if length <= most[name]])
        answers = await self._run([("HMGET", key, *some) for key, some in buckets.items()])
        for some, values in zip(buckets.values(), answers, strict=True):
            found.update(zip(some, values, strict=True))
        for name in most.keys() - there.keys():
            parts = await read_parts(self._run, parts_key(topic, name))
            found[name] = None if parts is None else await joined_up_to(parts, most[name])
        return [_up_to(found[name], size) for name, size in zip(names, sizes, strict=True)]

    async def _with_large(
        self, topic: str, names: Sequence[str], found: list[bytes | None]
    ) -> list[bytes | None]:
        """Look for what was not found among the bodies in parts."""
        if None in found:
            places = [place for place, body in enumerate(found) if body is None]
            large = await join_parts(self._run, topic, [names[place] for place in places])
            for place, body in zip(places, large, strict=True):
                found[place] = body
        return found

    async def has(self, topic: str, names: Sequence[str]) -> list[bool]:
        """Which bodies are there, in the order asked for."""
        places = [(key, name) for key, some in _by_bucket(topic, names).items() for name in some]
        answers = await self._run([("HEXISTS", key, name) for key, name in places])
        found = {name: bool(answer) for (_, name), answer in zip(places, answers, strict=True)}
        others = [name for name, there in found.items() if not there]
        answers = await self._run([("EXISTS", parts_key(topic, name)) for name in others])
        found.update(zip(others, map(bool, answers), strict=True))
        return [found[name] for name in names]

    async def delete(self, topic: str, names: Sequence[str]) -> None:
        """Delete bodies; missing ones are not an error."""
        buckets = _by_bucket(topic, names)
        answers = await self._run([("HDEL", key, *some) for key, some in buckets.items()])
        # What was not there may be in parts.
        others = [
            name
            for some, deleted in zip(buckets.values(), answers, strict=True)
            if deleted < len(some)
            for name in some
        ]
        await self._run([("UNLINK", parts_key(topic, name)) for name in others])

    async def keep(self, topic: str, names: Sequence[str]) -> None:
        """Let bodies live on for another lifetime."""
        keys = [*_by_bucket(topic, names), *(parts_key(topic, name) for name in names)]
        await self._run([("PEXPIRE", key, self._lifetime_ms) for key in keys])

    async def sync(self, topic: str, names: Sequence[str]) -> None:
        """Return when bodies are on the disks of their servers; InvalidArgument if these cannot say."""
        buckets = _by_bucket(topic, names)
        places = [(key, name) for key, some in buckets.items() for name in some]
        there = await self._run([("HEXISTS", key, name) for key, name in places])
        keys = {
            key if found else parts_key(topic, name): None
            for (key, name), found in zip(places, there, strict=True)
        }
        await self._insist(self._sync, list(keys))

    async def tend(self, topic: str, owed: Owed, now: float) -> None:
        """Let all bodies live on that are needed still."""
        names = list(await owed(""))
        for start in range(0, len(names), _KEPT):
            await self.keep(topic, names[start : start + _KEPT])

    async def write(self, topic: str, name: str, parts: AsyncIterator[bytes]) -> int:
        """Store a body that comes in parts; returns its length."""
        gathering = gathered(parts)
        first = await anext(gathering, b"")
        second = await anext(gathering, b"")
        if not second:
            await self.put(topic, [(name, first)])
            return len(first)
        return await self._write(topic, name, _behind((first, second), gathering))

    async def _write(self, topic: str, name: str, parts: AsyncIterator[bytes]) -> int:
        return await write_parts(self._run, parts_key(topic, name), parts, self._lifetime_ms)

    async def read(self, topic: str, name: str) -> AsyncIterator[bytes] | None:
        """Return the parts of a body, None if it is missing."""
        [body] = await self._run([("HGET", _key(topic, name), name)])
        if body is not None:
            return sliced(body)
        return await read_parts(self._run, parts_key(topic, name))

    async def close(self) -> None:
        """Close all connections; whoever waits for the server to come back is told."""
        self._closed = True
        connections, self._idle = self._idle, []
        for connection in connections:
            await connection.close()
        await close_client(self._redis)

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
                if late or self._closed or not passes(error):
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
        connection = await RedisConnection.open(node.connection_class(**node.connection_kwargs), _ANSWER)
        try:
            answers = await connection.call(self._syncing(keys))
            _raise_first(answers)
        except AskError as error:  # MOVED, too
            await self._redis.nodes_manager.initialize()
            raise TryAgainError(str(error)) from error
        finally:
            connection.drop()
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
        connection = await self._connection()
        try:
            answers = await connection.call(commands)
        except asyncio.CancelledError:
            connection.drop()
            raise
        except BaseException:
            self._hang_up(connection)
            raise
        self._idle.append(connection)
        try:
            _raise_first(answers)
        except PASSING:
            self._hang_up()
            raise
        return answers

    def _hang_up(self, *connections: RedisConnection) -> None:
        """Drop connections, and all idle ones: their server has gone, or is no longer the master."""
        for connection in (*connections, *self._idle):
            connection.drop()
        self._idle = []

    async def _connection(self) -> RedisConnection:
        """Return a connection that nobody uses."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.drop()
        return await RedisConnection.open(self._redis.connection_pool.make_connection(), _ANSWER)

    def _named(self, error: Exception) -> BrokerError:
        """Return the trouble of Redis as an error of ours."""
        server = f"the payload store {self._url}"
        if found := named(error, server):
            return found
        if isinstance(error, NoPermissionError):
            return Forbidden(f"{server} does not allow a command: {error}")
        return Unavailable(f"{server} refuses a command: {str(error) or type(error).__name__}")


def _up_to(body: bytes | bool | None, size: int) -> bytes | bool | None:
    """Return True in place of a body that is longer."""
    return True if isinstance(body, bytes) and len(body) > size else body


async def _behind(first: Sequence[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    for part in first:
        yield part
    async for part in rest:
        yield part


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


def _open(url: str) -> Any:
    """Return redis-py's client for a URL."""
    scheme = url.partition("://")[0]
    try:
        return open_client(url, _CONNECT, cluster={"socket_timeout": _ANSWER}, decode_responses=False)
    except ValueError:
        # Its text, and so its chain, can quote a part of the password.
        raise InvalidArgument(
            f"the payload store {public(url)} has no address that can be read: write {scheme}://host:port/…, "
            "and special characters of a password as %40 and the like"
        ) from None
