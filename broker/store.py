"""The way to Redis: runs scripts, reads logs, and turns Redis trouble into named errors."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ConnectionError,
    MovedError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    TimeoutError,
    TryAgainError,
)

from broker.link import Link
from broker.scripts import Scripts
from client.errors import DurabilityNotReached, InvalidArgument, Overloaded, Unavailable

Argument = str | bytes | int
Call = tuple[str, Sequence[str], Sequence[Argument]]  # script, keys, arguments

_PATIENCE = 10.0  # seconds without any answer until a connection counts as dead
_WAITING_PATIENCE = 70.0  # the same where commands wait for a disk or a replica, for 60 s at most

_KINDS = "redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://host:port/master"


class Store:
    """Runs the scripts on a single server, behind Sentinel, or on a cluster.

    redis-py knows the servers; commands go to each of them over one shared connection. Nothing is retried:
    an ack that was carried out and then repeated would be answered "stale", so callers decide what to repeat.
    """

    def __init__(
        self, redis: "Redis | RedisCluster", scripts: Scripts | None = None, *, linked: bool = False
    ) -> None:
        self.redis: Any = redis  # redis-py's clients share no type, and half of them has none
        self.scripts = scripts or Scripts()
        self._linked = linked
        self._links: dict[Any, Link] = {}  # by server
        self._idle: dict[Any, list[Link]] = {}  # connections for commands that wait, not in use now
        self._opening = asyncio.Lock()
        self._fsync: str | None = None
        # For clients that are not linked: redis-py's own shape of an entry costs more than reading it.
        redis.set_response_callback("XRANGE", _as_it_is)

    @classmethod
    def connect(cls, url: str, scripts: Scripts | None = None) -> "Store":
        """Get ready for a Redis; connections are made when they are needed."""
        options: dict[str, Any] = {
            "decode_responses": True,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": 5,
        }
        scheme, mark, rest = url.partition("://")
        if mark and scheme in ("redis", "rediss", "unix"):
            return cls(Redis.from_url(url, **options), scripts, linked=True)
        if mark and scheme == "redis+cluster":
            return cls(RedisCluster.from_url(f"redis://{rest}", **options), scripts, linked=True)
        if mark and scheme == "redis+sentinel":
            parts = urlsplit(url)
            servers = [_host_and_port(item) for item in parts.netloc.split(",")]
            once = {key: options[key] for key in ("retry", "socket_connect_timeout")}
            sentinel: Any = Sentinel(servers, sentinel_kwargs=once)  # type: ignore[no-untyped-call]
            master = sentinel.master_for(parts.path.strip("/") or "mymaster", **options)
            return cls(master, scripts, linked=True)
        raise InvalidArgument(f"cannot connect to {url!r}: use {_KINDS}")

    async def close(self) -> None:
        """Close all connections."""
        for link in (*self._links.values(), *(link for idle in self._idle.values() for link in idle)):
            await link.close()
        self._links.clear()
        self._idle.clear()
        await self.redis.aclose()

    async def run(self, script: str, keys: Sequence[str], *arguments: Argument) -> list[Any]:
        """Run one script, loading it where the server does not know it yet."""
        text, sha = self.scripts[script]
        with _named_errors():
            try:
                answer = await self._execute(keys[0], "EVALSHA", sha, len(keys), *keys, *arguments)
            except NoScriptError:
                answer = await self._execute(keys[0], "EVAL", text, len(keys), *keys, *arguments)
        return list(answer)

    async def run_all(self, calls: Sequence[Call]) -> list[list[Any]]:
        """Run many scripts at once; each server gets its share in one go."""
        return await _together(*(self.run(script, keys, *arguments) for script, keys, arguments in calls))

    async def run_durably(
        self, level: str, timeout_ms: int, script: str, keys: Sequence[str], *arguments: Argument
    ) -> list[Any]:
        """Run a script and wait until its writes are as safe as asked: fsync, replicated, replicated:N."""
        wait = await self._wait_for(level, timeout_ms)
        if wait is None:
            return await self.run(script, keys, *arguments)
        text, sha = self.scripts[script]
        with _named_errors():
            try:
                answer, reached = await self._pair(
                    keys[0], ("EVALSHA", sha, len(keys), *keys, *arguments), wait
                )
            except NoScriptError:
                answer, reached = await self._pair(
                    keys[0], ("EVAL", text, len(keys), *keys, *arguments), wait
                )
        if answer[0] == "OK":
            _check_reached(level, int(wait[1]), timeout_ms, reached)
        return list(answer)

    async def entries(self, log: str, ranges: Sequence[tuple[str, str]]) -> list[list[Any]]:
        """Read ranges of a log: for each a list of `[id, [field, value, …]]`."""
        with _named_errors():
            if len(ranges) == 1:
                return [await self._execute(log, "XRANGE", log, *ranges[0])]
            return await _together(*(self._execute(log, "XRANGE", log, *bounds) for bounds in ranges))

    async def atomically(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Run plain commands on the keys of one partition as one transaction."""
        with _named_errors():
            pipeline = self.redis.pipeline(transaction=True)
            for command in commands:
                pipeline.execute_command(*command)
            return list(await pipeline.execute())

    async def command(self, *command: Argument) -> Any:
        """Run one plain command, the way redis-py does and answers it."""
        with _named_errors():
            return await self.redis.execute_command(*command)

    async def states(self, keys: Sequence[str], field: str = "state") -> list[str | None]:
        """One field of many hashes."""
        with _named_errors():
            return await _together(*(self._execute(key, "HGET", key, field) for key in keys))

    async def keys_like(self, pattern: str) -> set[str]:
        """All keys that match a pattern, found by scanning."""
        with _named_errors():
            return {key async for key in self.redis.scan_iter(match=pattern, count=1_000)}

    async def _execute(self, key: str, *command: Argument) -> Any:
        if not self._linked:
            return await self.redis.execute_command(*command)
        server = await self._server_of(key)
        link = self._links.get(server)
        if link is None or not link.usable:
            async with self._opening:
                link = self._links.get(server)
                if link is None or not link.usable:
                    if link is not None:
                        await link.close()
                    link = self._links[server] = await _open(server, _PATIENCE)
        try:
            return await link.call(*command)
        except (MovedError, AskError, TryAgainError):
            # The slot is on the move: redis-py follows it and learns the new map on the way.
            return await self.redis.execute_command(*command)
        except ReadOnlyError:
            await link.close()  # it was a master once; the next call asks again who is
            raise

    async def _pair(
        self, key: str, first: tuple[Argument, ...], second: tuple[Argument, ...]
    ) -> tuple[Any, Any]:
        """Two commands back to back on a connection that has nothing else to do.

        WAIT is about the writes of its own connection, and holds up what comes behind it. The second
        answer may be an exception.
        """
        if not self._linked:
            return await self.redis.execute_command(*first), await self.redis.execute_command(*second)
        server = await self._server_of(key)
        idle = self._idle.setdefault(server, [])
        link = idle.pop() if idle else None
        if link is None or not link.usable:
            if link is not None:
                await link.close()
            link = await _open(server, _WAITING_PATIENCE)
        try:
            answers: Sequence[Any] = await asyncio.gather(
                link.call(*first), link.call(*second), return_exceptions=True
            )
        finally:
            idle.append(link)
        if isinstance(answers[0], MovedError):
            await self.redis.execute_command("EXISTS", key)  # lets redis-py learn the new map
        elif isinstance(answers[0], ReadOnlyError):
            await link.close()
        if isinstance(answers[0], BaseException):
            raise answers[0]
        return answers[0], answers[1]

    async def _server_of(self, key: str) -> Any:
        """What knows how to connect to the server that holds a key."""
        if not isinstance(self.redis, RedisCluster):
            return self.redis.connection_pool
        await self.redis.initialize()
        server = self.redis.get_node_from_key(key)
        if server is None:
            raise Unavailable(f"no server of the cluster serves {key!r}")
        return server

    async def _wait_for(self, level: str, timeout_ms: int) -> tuple[Argument, ...] | None:
        """The command that waits for a level, None where there is nothing to wait for."""
        kind, colon, count = level.partition(":")
        if level == "memory":
            return None
        if level == "fsync":
            fsync = await self._fsync_support()
            if fsync == "no":
                raise DurabilityNotReached(
                    "this Redis cannot confirm fsync: it needs appendonly yes, and Redis 7.2, Valkey 8 "
                    "or appendfsync always; nothing was stored",
                    stored=False,
                )
            return ("WAITAOF", 1, 0, timeout_ms) if fsync == "wait" else None
        if kind == "replicated" and (not colon or (count.isdecimal() and 0 < int(count) < 100)):
            return ("WAIT", int(count or 1), timeout_ms)
        raise InvalidArgument(f"durability {level!r}: use memory, fsync, replicated or replicated:N")

    async def _fsync_support(self) -> str:
        """How fsync is confirmed here: "always" with every answer, "wait" by WAITAOF, or "no"."""
        if self._fsync is None:
            info = await self.command("INFO", "everything")
            if "redis_version" not in info:  # a cluster answers per server
                info = next(iter(info.values()))
            policy: dict[str, str] = {}
            with contextlib.suppress(RedisError):  # managed servers forbid CONFIG
                policy = await self.redis.config_get("appendfsync")
            version = str(info.get("valkey_version") or info["redis_version"]).split(".")
            if not info["aof_enabled"]:
                self._fsync = "no"
            elif policy.get("appendfsync") == "always":
                self._fsync = "always"
            else:
                self._fsync = "wait" if (int(version[0]), int(version[1])) >= (7, 2) else "no"
        return self._fsync


async def _open(server: Any, patience: float) -> Link:
    return await Link.open(server.connection_class(**server.connection_kwargs), patience=patience)


async def _together(*calls: Any) -> list[Any]:
    """Await all of them; the first error is raised when all are done, so none is left alone."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


def _check_reached(level: str, needed: int, timeout_ms: int, reached: Any) -> None:
    if isinstance(reached, BaseException):
        raise DurabilityNotReached(
            f"{level} was not confirmed ({reached}); the messages are stored in memory", stored=True
        ) from reached
    confirmed = reached[0] if isinstance(reached, list) else reached
    if confirmed < needed:
        raise DurabilityNotReached(
            f"{level} was not reached within {timeout_ms} ms: {confirmed} of {needed} confirmed; "
            "the messages are stored in memory",
            stored=True,
        )


def _as_it_is(response: Any, **_options: Any) -> Any:
    return response


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return (host, int(port)) if host else (text, 26379)


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except OutOfMemoryError as error:
        raise Overloaded(f"Redis has reached its maxmemory: {error}") from error
    except (
        ConnectionError,
        TimeoutError,
        AskError,
        BusyLoadingError,
        RedisClusterException,
        ReadOnlyError,
        TryAgainError,
    ) as error:
        raise Unavailable(f"Redis cannot be reached: {error}") from error
