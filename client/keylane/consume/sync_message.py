"""A message for code that does not await."""

from collections.abc import Awaitable, Callable
from datetime import datetime
from types import TracebackType
from typing import Any

from keylane.bridge import Bridge
from keylane.consume.message import Batch, Message, kind_after
from keylane.times import Seconds


class SyncMessage:
    """A delivered message; `with message:` acks on exit, and nacks if the block raises."""

    __slots__ = ("_bridge", "_message")

    def __init__(self, message: Message, bridge: Bridge) -> None:
        self._message = message
        self._bridge = bridge

    def __repr__(self) -> str:
        return repr(self._message)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SyncMessage) and self._message == other._message

    def __hash__(self) -> int:
        return hash(self._message)

    @property
    def topic(self) -> str:
        """The topic it was published to."""
        return self._message.topic

    @property
    def partition(self) -> int:
        """The partition it is in."""
        return self._message.partition

    @property
    def id(self) -> str:
        """`<partition>:<ledger>-<entry>`, the same as Published.id."""
        return self._message.id

    @property
    def key(self) -> str | None:
        """The key it was published with."""
        return self._message.key

    @property
    def uid(self) -> str:
        """The producer's name for it."""
        return self._message.uid

    @property
    def attributes(self) -> dict[str, str]:
        """The attributes it was published with."""
        return self._message.attributes

    @property
    def producer_group(self) -> str | None:
        """The group of the client that published it."""
        return self._message.producer_group

    @property
    def size(self) -> int:
        """The size of its body in bytes."""
        return self._message.size

    @property
    def produced_at(self) -> datetime:
        """When it was produced, by the producer's clock."""
        return self._message.produced_at

    @property
    def published_at(self) -> datetime:
        """When it was stored, by the cluster's clock."""
        return self._message.published_at

    @property
    def age(self) -> float:
        """Seconds since it was stored."""
        return self._message.age

    @property
    def retry_count(self) -> int:
        """How many earlier deliveries failed; 0 at the first delivery."""
        return self._message.retry_count

    @property
    def token(self) -> int:
        """A number that grows with every delivery in the partition and subscription: a fencing token."""
        return self._message.token

    @property
    def deadline(self) -> datetime:
        """When its lease ends, by the cluster's clock."""
        return self._message.deadline

    def data(self) -> bytes:
        """Return its body, downloaded if need be. Raises PayloadMissing if it is gone."""
        message = self._message
        body = message._block.bodies.get(message._index)
        message._origin.downloads.unasked = 0
        return self._wait(message.data) if body is None else body

    def ack(self) -> None:
        """Ack the message. Raises StaleReceipt if its lease has ended."""
        self._wait(self._message.ack)

    def nack(
        self, delay: Seconds | None = None, *, until: datetime | None = None, reason: str | None = None
    ) -> None:
        """Nack the message: it is redelivered, by default after the subscription's backoff."""
        self._wait(lambda: self._message.nack(delay, until=until, reason=reason))

    def extend(self, seconds: Seconds | None = None, *, until: datetime | None = None) -> None:
        """Extend its lease to so many seconds from now, or until a time."""
        self._wait(lambda: self._message.extend(seconds, until=until))

    def __enter__(self) -> "SyncMessage":
        self._message._origin.blocks.begin(self._message)
        if (processing := self._message._origin.processing) is not None:
            processing.begin(self._message)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and self._bridge.forked:
            return  # a child on its way out: the message is its parent's
        message = self._message
        if (processing := message._origin.processing) is not None:
            processing.end(message, error)
        message._origin.blocks.leave(message)
        self._bridge.gather(message._settle_after_block, kind_after(error))

    def _wait(self, work: Callable[[], Awaitable[Any]]) -> Any:
        return self._bridge.call(work)


class SyncBatch(list[SyncMessage]):
    """Messages taken together; `consumer.ack(batch)` acks them together."""

    def data(self) -> list[bytes]:
        """Return all bodies, downloaded together. Raises PayloadMissing if one is gone."""
        if not self:
            return []
        inner = [message._message for message in self]
        spans = [(one._block, one._index, one._index + 1) for one in inner]
        return self[0]._bridge.call(Batch(spans, inner[0]._origin).data)
