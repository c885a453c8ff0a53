"""Payload stores: where bodies are, since none passes through the broker.

A body is stored under a name (a KSUID) before its message is published, read when somebody asks for it,
and deleted when nobody is owed the message any more. The lifetime is a safety net: a body whose message
never came to be is gone some time after it has passed. One whose message is there lives on, however long.
"""

import ssl
from importlib import import_module

from keylane.errors import InvalidArgument
from keylane.payloads.store import PayloadStore, has_password, is_http, is_redis, public

__all__ = ["PayloadStore", "has_password", "import_store", "is_http", "is_redis", "open_store", "public"]


def open_store(
    url: str, *, lifetime: float, token: str | None = None, tls: ssl.SSLContext | None = None
) -> PayloadStore:
    """Open the store at a URL; it connects when first used.

    `lifetime` is in seconds. Redis stores are redis://, rediss://, unix://, redis+cluster:// and
    redis+sentinel://host:port/master; keylane+http:// and keylane+https:// are that of the workers, who are
    shown `token`; everything else is for fsspec: file:///…, s3://…, memory://….
    """
    if lifetime <= 0:
        raise InvalidArgument(f"the lifetime of bodies is {lifetime} s: use more than 0")
    if "://" not in url:
        raise InvalidArgument(
            f"{public(url)!r} is not the URL of a payload store: use redis://host:port/0, file:///folder or "
            "s3://bucket/folder"
        )
    # Imported here: each brings a library along that users of the other have no need to load.
    if is_redis(url):
        from keylane.payloads.redis import RedisStore

        return RedisStore(url, lifetime=lifetime)
    if is_http(url):
        from keylane.payloads.http import HttpStore

        return HttpStore(url, token=token, tls=tls)
    from keylane.payloads.files import open_files

    return open_files(url, lifetime=lifetime)


def import_store(url: str) -> None:
    """Import what a store at a URL needs: for longer than an event loop should stand still."""
    kind = "redis" if is_redis(url) else "http" if is_http(url) else "files"
    import_module(f"keylane.payloads.{kind}")
