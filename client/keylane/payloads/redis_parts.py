"""Large bodies in Redis: a hash of parts each, `kl:bodies:<topic>:{<name>}`, number -> part.

Parts come under a key of their own, which expires, and which is renamed when all are there: half an upload is
never seen, and nothing stays of it. Both keys have one hash tag, so they are on one node of a cluster.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from secrets import token_hex
from typing import Any

from keylane.errors import BrokerError, Unavailable
from keylane.redis.connection import Command

PREFIX = "kl:bodies"

_UNFINISHED_MS = 600_000  # in which the next part has to come

# Each in one go, so that no crash leaves a key that stays for ever.
_ADD = """
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return redis.call('PEXPIRE', KEYS[1], ARGV[3])
"""
_FINISH = """
if redis.call('EXISTS', KEYS[1]) == 0 then return redis.call('HLEN', KEYS[2]) end
redis.call('RENAME', KEYS[1], KEYS[2])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return redis.call('HLEN', KEYS[2])
"""

Run = Callable[[list[Command]], Awaitable[list[Any]]]


def parts_key(topic: str, name: str) -> str:
    """Return the key of a body that is stored in parts."""
    return f"{PREFIX}:{topic}:{{{name}}}"


async def write_parts(run: Run, key: str, parts: AsyncIterator[bytes], lifetime_ms: int) -> int:
    """Store a body in parts; returns its length."""
    unfinished = f"{key}:{token_hex(8)}"
    size = count = 0
    try:
        async for part in parts:
            await run([("EVAL", _ADD, 1, unfinished, count, part, _UNFINISHED_MS)])
            size += len(part)
            count += 1
        # Again after a lost answer it finds the body in its place.
        if await run([("EVAL", _FINISH, 2, unfinished, key, lifetime_ms)]) != [count]:
            raise Unavailable("a body came too slowly, and its beginning is gone: store it again")
    except BaseException:
        with contextlib.suppress(BrokerError, asyncio.CancelledError):  # then it expires
            await run([("UNLINK", unfinished)])
        raise
    return size


async def read_parts(run: Run, key: str) -> AsyncIterator[bytes] | None:
    """Return the parts of a body, None if there are none."""
    [count] = await run([("HLEN", key)])
    return _parts(run, key, count) if count else None


async def _parts(run: Run, key: str, count: int) -> AsyncIterator[bytes]:
    for number in range(count):
        [part] = await run([("HGET", key, number)])
        if part is None:
            raise Unavailable("a body was deleted while it was read")
        yield part


async def join_parts(run: Run, topic: str, names: Sequence[str]) -> list[bytes | None]:
    """Return bodies that are stored in parts, None for each that is not."""
    counts = await run([("HLEN", parts_key(topic, name)) for name in names])
    found: list[bytes | None] = []
    for name, count in zip(names, counts, strict=True):
        parts = [part async for part in _parts(run, parts_key(topic, name), count)]
        found.append(b"".join(parts) if parts else None)
    return found
