"""Redis URLs: redis-py's client for a single server, for one behind Sentinel, and for a cluster."""

import contextlib
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

_KINDS = (
    "redis://, rediss://, unix://, redis+cluster://host:port,host:port or redis+sentinel://host:port/master"
)


def open_client(url: str, timeout: float, *, cluster: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return redis-py's client for a URL; it connects when it is used, and retries nothing.

    Its kinds share no type, and half of them has none. `timeout` is in seconds for each step of connecting;
    `cluster` are options for a cluster alone. Raises ValueError for a URL that cannot be right; its text may
    quote a part of the password.
    """
    once = {"retry": Retry(NoBackoff(), 0), "socket_connect_timeout": timeout, "socket_timeout": timeout}
    options = {"protocol": 2, **once, **options}
    scheme, mark, rest = url.partition("://")
    if mark and scheme in ("redis", "rediss", "unix"):
        return Redis.from_url(url, **options)
    if mark and scheme == "redis+cluster":
        first, *others = rest.split(",")
        nodes = [ClusterNode(*_host_and_port(other.partition("/")[0], 6379)) for other in others]
        # One slot that has moved is no reason to close all connections, others' calls with them.
        options = {**options, "reinitialize_steps": 0, **(cluster or {})}
        return RedisCluster.from_url(f"redis://{first}", startup_nodes=nodes, **options)
    if mark and scheme == "redis+sentinel":
        return _behind_sentinel(url, once, options)
    raise ValueError(f"cannot connect to {url!r}: use {_KINDS}")


async def close_client(redis: Any) -> None:
    """Close redis-py's client, and those parts of it that it leaves open."""
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


def check_url(url: str) -> None:
    """Raise ValueError for a URL that cannot be right; whether anybody is there is another matter.

    Its text has no password, nor a part of one.
    """
    try:
        _check(url)
    except ValueError:
        _, at, place = url.rpartition("@")
        if not at:
            raise
        scheme, mark, _ = url.partition("://")
        _check(f"{scheme}://{place}" if mark else place)
        raise ValueError(
            "its user and password cannot be read: write special characters in them as %40 and the like"
        ) from None


def _check(url: str) -> None:
    try:
        client = open_client(url, 1.0)
        if not isinstance(client, RedisCluster):
            client.connection_pool.make_connection()
    except TypeError as error:
        raise ValueError(str(error)) from None
    scheme, _, rest = url.partition("://")
    database = rest.partition("?")[0].rpartition("@")[2].partition("/")[2]
    if scheme in ("redis", "rediss") and database and not database.isdecimal():
        raise ValueError(f"the database is {database!r}; it should be a number")


def _behind_sentinel(url: str, once: dict[str, Any], options: dict[str, Any]) -> Any:
    """Return the client of the master that the Sentinels of a URL name; the credentials are the master's."""
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
    host, colon, port = text.partition(":")
    if not host or (colon and not port.isdecimal()):
        raise ValueError(f"{text!r} is not a host and a port")
    return host, int(port or default)
