"""How safe a write is: memory, fsync, replicated, replicated:N; what waits for it and what was reached."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from redis.exceptions import ReadOnlyError, ResponseError

from keylane.errors import DurabilityNotReached, InvalidArgument
from keylane_broker.store.server_info import fsync_confirmation, replicas_online
from keylane_broker.store.servers import Argument, Servers

_REPLICATED = re.compile(r"replicated(?::0*([1-9][0-9]?))?")
_FOLLOWED = 1.0  # seconds for which it is known how many replicas follow a server


def replicas(level: str) -> int | None:
    """Return how many replicas a level needs, None where it is about something else."""
    if level in ("memory", "fsync"):
        return None
    if found := _REPLICATED.fullmatch(level):
        return int(found[1] or 1)
    raise InvalidArgument(f"durability {level!r:.60}: use memory, fsync, replicated or replicated:N")


def check_reached(level: str, needed: int, timeout_ms: int, reached: Any) -> None:
    """Raise DurabilityNotReached if messages are less safe than asked."""
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


async def require(servers: Servers, level: str, key: str) -> None:
    """Raise DurabilityNotReached where a level is out of reach of the server that holds a key."""
    if needed := replicas(level):
        if (found := await _replicas_of(servers, key, needed)) < needed:
            raise DurabilityNotReached(
                f"{level} needs {needed} of Redis' replicas to be connected, and {found} are; "
                "nothing was stored",
                stored=False,
            )
    elif level == "fsync":
        await _fsync_of(servers, key)


async def wait_command(
    servers: Servers, level: str, timeout_ms: int, key: str
) -> tuple[Argument, ...] | None:
    """Return the command that waits for a level, None where there is nothing to wait for."""
    if needed := replicas(level):
        return ("WAIT", needed, timeout_ms)
    if await _fsync_of(servers, key) == "always":
        return None
    return ("WAITAOF", 1, 0, timeout_ms)


async def run_and_wait(
    servers: Servers,
    key: str,
    command: tuple[Argument, ...],
    wait: tuple[Argument, ...],
    leases: Sequence[str] = (),
) -> tuple[Any, Any]:
    """Run a command and one that waits for what it wrote; the second answer may be an exception.

    WAIT is about the writes of its own connection, and holds up what comes behind it.
    """
    if not servers.shared:
        return await servers.by_redis_py(*command), await servers.by_redis_py(*wait)
    answer, waited = await servers.run_alone(key, [command, wait], int(wait[-1]) / 1_000, leases)
    if isinstance(waited, ResponseError) and (
        shared := servers.connections.get(await servers.server_of(key))
    ):
        shared.fsync = None  # its settings have changed
    return answer, waited


async def _replicas_of(servers: Servers, key: str, needed: int) -> int:
    """Return how many replicas follow the server that holds a key; known for a moment if they are enough."""
    if not servers.shared:
        return 0
    server = await servers.server_of(key)
    connection = servers.connections.get(server)
    now = asyncio.get_running_loop().time()
    if connection is not None and connection.replicas[0] >= needed and now < connection.replicas[1]:
        return connection.replicas[0]
    info = await servers.send(server, "INFO", "replication")
    if "role:slave" in info:  # it was the master; the replicas of another one count
        demoted = ReadOnlyError("the server has become a replica")
        servers.lose(server, servers.connections.get(server), demoted)
        raise demoted
    found = replicas_online(info)
    if (connection := servers.connections.get(server)) is not None:
        connection.replicas = (found, now + _FOLLOWED)
    return found


async def _fsync_of(servers: Servers, key: str) -> str:
    """Return how the server that holds a key confirms fsync; known while the connection to it lasts."""
    if not servers.shared:
        raise DurabilityNotReached("this Redis cannot confirm fsync; nothing was stored", stored=False)
    server = await servers.server_of(key)
    connection = servers.connections.get(server)
    if connection is not None and connection.fsync is not None:
        return connection.fsync
    answer = fsync_confirmation(*await servers.describe_server(server))
    if answer is None:
        raise DurabilityNotReached(
            "this Redis cannot confirm fsync: it needs appendonly yes, and Redis 7.2, Valkey "
            "or appendfsync always; nothing was stored",
            stored=False,
        )
    if (connection := servers.connections.get(server)) is not None:
        connection.fsync = answer
    return answer
