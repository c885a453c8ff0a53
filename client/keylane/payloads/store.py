"""A payload store: what it promises, and how its URL may be shown.

A body is stored under a name (a KSUID) before its message is published, read when somebody asks for it,
and deleted when nobody is owed the message any more. The lifetime is a safety net: a body whose message
never came to be is gone some time after it has passed. One whose message is there lives on, however long.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from keylane.errors import InvalidArgument
from keylane.redis import SCHEMES

Owed = Callable[[str], Awaitable[set[str]]]


class PayloadStore(ABC):
    """Keeps the bodies of messages by topic and name."""

    @abstractmethod
    async def put(self, topic: str, bodies: Sequence[tuple[str, bytes]]) -> None:
        """Store bodies under their names; all are stored when this returns."""

    @abstractmethod
    async def get(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
        """Read bodies, in the order of `names`; None for each that is missing."""

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

    @abstractmethod
    async def close(self) -> None:
        """Close connections and threads."""


def cannot_sync(store: str, reason: str) -> InvalidArgument:
    """Return why no message with a body can be published with fsync."""
    return InvalidArgument(
        f"durability 'fsync' is not possible with a body in the payload store {store}: {reason}; use another "
        "store, or another durability"
    )


def is_redis(url: str) -> bool:
    """Return whether a URL is that of a store in Redis."""
    return url.partition("://")[0] in SCHEMES


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
