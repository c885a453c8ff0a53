"""A payload store: what it promises, and how its URL may be shown.

A body is stored under a name (a KSUID) before its message is published, read when somebody asks for it,
and deleted when nobody is owed the message any more. The lifetime is a safety net: a body whose message
never came to be is gone some time after it has passed. One whose message is there lives on, however long.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from keylane.errors import InvalidArgument
from keylane.redis import SCHEMES

PART = 1024 * 1024  # bytes of a body that are in memory at a time, where it is streamed
HTTP = ("keylane+http", "keylane+https")  # of a store that workers serve
_SOME = 8  # bodies that are read at once where nobody knows how large they are

Owed = Callable[[str], Awaitable[set[str]]]


class PayloadStore(ABC):
    """Keeps the bodies of messages by topic and name."""

    @abstractmethod
    async def put(self, topic: str, bodies: Sequence[tuple[str, bytes]]) -> None:
        """Store bodies under their names; all are stored when this returns."""

    @abstractmethod
    async def get(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
        """Read bodies, in the order of `names`; None for each that is missing."""

    async def get_some(self, topic: str, names: Sequence[str], room: int) -> list[bytes | bool | None]:
        """Read the first of these bodies, at least one, as far as there is room for so many bytes.

        In place of one that is large it returns True: it has to be read alone.
        """
        found = await self.get(topic, names[:_SOME])
        return [True if body is not None and len(body) > room // 2 else body for body in found]

    async def get_up_to(
        self, topic: str, names: Sequence[str], sizes: Sequence[int]
    ) -> list[bytes | bool | None]:
        """Read bodies that are no longer than `sizes` say; True in place of one that is."""
        found: list[bytes | bool | None] = []
        for name, size in zip(names, sizes, strict=True):
            parts = await self.read(topic, name)
            found.append(None if parts is None else await joined_up_to(parts, size))
        return found

    async def has(self, topic: str, names: Sequence[str]) -> list[bool]:
        """Return which bodies exist, in the order of `names`, without reading them where the store can."""
        return [body is not None for body in await self.get(topic, names)]

    @abstractmethod
    async def delete(self, topic: str, names: Sequence[str]) -> None:
        """Delete bodies; missing ones are not an error."""

    async def keep(self, topic: str, names: Sequence[str]) -> None:  # noqa: B027 - not every store has to
        """Keep bodies for another lifetime, in a store where they expire."""

    async def sync(self, topic: str, names: Sequence[str]) -> None:
        """Return once stored bodies survive a crash of the machine, as `fsync` requires.

        Raises InvalidArgument if the store cannot tell.
        """
        raise cannot_sync(type(self).__name__, "it cannot tell when a body is on disk")

    async def tend(self, topic: str, owed: Owed, now: float) -> None:  # noqa: B027 - nor this
        """Clean up now and then; `owed` returns the names still needed, all or those before a given one.

        `now` is the cluster's unix time, by which names are made.
        """

    async def write(self, topic: str, name: str, parts: AsyncIterator[bytes]) -> int:
        """Store a body that comes in parts, and return its length; half of one is never seen.

        Stores that can do so hold no more than a part in memory.
        """
        body = b"".join([part async for part in parts])
        await self.put(topic, [(name, body)])
        return len(body)

    async def read(self, topic: str, name: str) -> AsyncIterator[bytes] | None:
        """Return the parts of a body, None if it is missing."""
        [body] = await self.get(topic, [name])
        return None if body is None else sliced(body)

    @abstractmethod
    async def close(self) -> None:
        """Close connections and threads."""


async def sliced(body: bytes) -> AsyncIterator[bytes]:
    """Yield the parts of a body."""
    for start in range(0, len(body), PART):
        yield body[start : start + PART]


async def joined_up_to(parts: AsyncIterator[bytes], size: int) -> bytes | bool:
    """Return a body that comes in parts; True if it has more bytes than that."""
    found, left = list[bytes](), size
    async for part in parts:
        found.append(part)
        left -= len(part)
        if left < 0:
            return True
    return b"".join(found)


async def gathered(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what comes in chunks of any size in parts that are full, but for the last."""
    waiting, size = list[bytes](), 0
    async for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        while size >= PART:
            joined = b"".join(waiting)
            yield joined[:PART]
            waiting, size = [joined[PART:]], size - PART
    if size:
        yield b"".join(waiting)


def cannot_sync(store: str, reason: str) -> InvalidArgument:
    """Return why no message with a body can be published with fsync."""
    return InvalidArgument(
        f"durability 'fsync' is not possible with a body in the payload store {store}: {reason}; use another "
        "store, or another durability"
    )


def is_redis(url: str) -> bool:
    """Return whether a URL is that of a store in Redis."""
    return url.partition("://")[0] in SCHEMES


def is_http(url: str) -> bool:
    """Return whether a URL is that of a store which workers serve by HTTP."""
    return url.partition("://")[0] in HTTP


def has_password(url: str) -> bool:
    """Return whether a URL has credentials in it.

    >>> has_password("redis://:secret@db:6379/0"), has_password("redis://db:6379/0")
    (True, False)
    """
    rest = url.partition("://")[2]
    return "password=" in rest.partition("?")[2] or ("@" in rest and not rest.startswith("/"))


def public(url: str) -> str:
    """Return a URL as it may be shown: without credentials and options.

    >>> public("redis://bob:secret@db:6379/0?password=secret")
    'redis://db:6379/0'
    """
    scheme, mark, rest = url.rpartition("://")
    if not rest.startswith("/"):
        # A password may hold anything, if it should not: nothing before the last @ is shown.
        rest = rest.rpartition("@")[2]
    return scheme + mark + rest.partition("?")[0]
