"""The connection to Redis: runs scripts, reads logs, and turns Redis trouble into named errors."""

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    TimeoutError,
)

from broker.scripts import Scripts
from client.errors import DurabilityNotReached, InvalidArgument, Overloaded, Unavailable

Argument = str | bytes | int
Call = tuple[str, Sequence[str], Sequence[Argument]]  # script, keys, arguments


class Store:
    """Runs the scripts on a single server, behind Sentinel, or on a cluster."""

    def __init__(self, redis: "Redis | RedisCluster", scripts: Scripts | None = None) -> None:
        self.redis = redis
        self.scripts = scripts or Scripts()
        self._can_fsync: bool | None = None
        # redis-py turns each entry into a tuple and a dict, which costs more than reading it.
        redis.set_response_callback("XRANGE", _as_it_is)

    @classmethod
    def connect(cls, url: str) -> "Store":
        """Open `redis://…`, `rediss://…`, `unix://…`, `redis+cluster://…` or `redis+sentinel://host:port/master`.

        redis-py never retries here: an ack that was carried out and then retried would be answered
        "stale". The callers know what may be repeated.
        """
        options: dict[str, Any] = {
            "decode_responses": True,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
        }
        scheme, _, rest = url.partition("://")
        if scheme in ("redis", "rediss", "unix"):
            return cls(Redis.from_url(url, **options))
        if scheme == "redis+cluster":
            return cls(RedisCluster.from_url(f"redis://{rest}", **options))
        if scheme == "redis+sentinel":
            parts = urlsplit(url)
            sentinels = [_host_and_port(item) for item in parts.netloc.split(",")]
            master = parts.path.strip("/") or "mymaster"
            return cls(Sentinel(sentinels).master_for(master, **options))
        raise InvalidArgument(
            f"cannot connect to {url!r}: use redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://"
        )

    async def close(self) -> None:
        """Close all connections."""
        await self.redis.aclose()

    async def run(self, script: str, keys: Sequence[str], *arguments: Argument) -> list[Any]:
        """Run one script, loading it where the server does not know it yet."""
        text, sha = self.scripts[script]
        with _named_errors():
            try:
                return await self.redis.execute_command(
                    "EVALSHA", sha, len(keys), *keys, *arguments
                )
            except NoScriptError:
                return await self.redis.execute_command("EVAL", text, len(keys), *keys, *arguments)

    async def run_all(self, calls: Sequence[Call]) -> list[list[Any]]:
        """Run many scripts in one round trip per server, in no particular order between partitions."""
        with _named_errors():
            for name in {call[0] for call in calls}:
                await self._load(name)
            pipeline = self.redis.pipeline(transaction=False)
            for name, keys, arguments in calls:
                sha = self.scripts[name].sha
                pipeline.execute_command("EVALSHA", sha, len(keys), *keys, *arguments)
            return await pipeline.execute()

    async def run_durably(
        self, level: str, timeout_ms: int, script: str, keys: Sequence[str], *arguments: Argument
    ) -> tuple[list[Any], str]:
        """Run a script and wait on the same connection until its writes are as safe as asked.

        Answers the script's answer and the level reached; `timeout_ms` bounds the wait.
        """
        kind, _, count = level.partition(":")
        if kind == "memory":
            return await self.run(script, keys, *arguments), level
        if kind == "fsync":
            if not await self._fsync_is_possible():
                raise DurabilityNotReached(
                    "this Redis cannot confirm fsync: it needs appendonly yes, and Redis 7.2, "
                    "Valkey 8 or appendfsync always; nothing was stored",
                    stored=False,
                )
            wait: tuple[Argument, ...] = ("WAITAOF", 1, 0, timeout_ms)
            needed = 1
        elif kind == "replicated":
            needed = int(count or 1)
            wait = ("WAIT", needed, timeout_ms)
        else:
            raise InvalidArgument(f"durability {level!r}: use memory, fsync, replicated or replicated:N")
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
        confirmed = reached[0] if isinstance(reached, list) else reached
        if answer[0] == "OK" and confirmed < needed:
            raise DurabilityNotReached(
                f"{level} was not reached within {timeout_ms} ms: {confirmed} of {needed} confirmed; "
                "the messages are stored in memory",
                stored=True,
            )
        return answer, level

    async def entries(self, log: str, ranges: Sequence[tuple[str, str]]) -> list[list[Any]]:
        """Read ranges of a log: for each a list of `[id, [field, value, …]]`."""
        with _named_errors():
            if len(ranges) == 1:
                return [await self.redis.execute_command("XRANGE", log, *ranges[0])]
            pipeline = self.redis.pipeline(transaction=False)
            for first, last in ranges:
                pipeline.execute_command("XRANGE", log, first, last)
            return await pipeline.execute()

    async def atomically(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Run plain commands on the keys of one partition as one transaction."""
        with _named_errors():
            pipeline = self.redis.pipeline(transaction=True)
            for command in commands:
                pipeline.execute_command(*command)
            return await pipeline.execute()

    async def command(self, *command: Argument) -> Any:
        """Run one plain command."""
        with _named_errors():
            return await self.redis.execute_command(*command)

    async def _load(self, name: str) -> None:
        text, sha = self.scripts[name]
        if isinstance(self.redis, RedisCluster):
            await self.redis.execute_command("SCRIPT LOAD", text, target_nodes="primaries")
        elif (await self.redis.execute_command("SCRIPT EXISTS", sha)) != [True]:
            await self.redis.execute_command("SCRIPT LOAD", text)

    async def _pair(
        self, key: str, first: tuple[Argument, ...], second: tuple[Argument, ...]
    ) -> tuple[Any, Any]:
        """Run two commands back to back on one connection to the server that holds the key."""
        async with self._connection_to(key) as connection:
            await connection.send_packed_command(connection.pack_commands([first, second]))
            answers = []
            for _ in range(2):
                try:
                    answers.append(await connection.read_response())
                except Exception as error:
                    answers.append(error)
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return answers[0], answers[1]

    @contextlib.asynccontextmanager
    async def _connection_to(self, key: str) -> AsyncIterator[Any]:
        if isinstance(self.redis, RedisCluster):
            await self.redis.initialize()
            node = self.redis.get_node_from_key(key)
            if node is None:
                raise Unavailable(f"no cluster node serves the slot of {key!r}")
            connection = node.acquire_connection()
            try:
                await connection.connect()
                yield connection
            except BaseException:
                await connection.disconnect()
                raise
            finally:
                node.release(connection)
        else:
            pool = self.redis.connection_pool
            connection = await pool.get_connection()
            try:
                yield connection
            except BaseException:
                await connection.disconnect()
                raise
            finally:
                await pool.release(connection)

    async def _fsync_is_possible(self) -> bool:
        if self._can_fsync is None:
            info = await self.command("INFO", "everything")
            if isinstance(info, dict) and "aof_enabled" not in info:  # a cluster answers per node
                info = next(iter(info.values()))
            version = info.get("valkey_version") or info["redis_version"]
            modern = tuple(int(part) for part in version.split(".")[:2]) >= (7, 2)
            self._can_fsync = bool(info["aof_enabled"]) and modern
        return self._can_fsync


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
    except (ConnectionError, TimeoutError, BusyLoadingError, ClusterDownError, ReadOnlyError) as error:
        raise Unavailable(f"Redis cannot be reached: {error}") from error
