"""Messages as they are consumed, one by one and in batches."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import NamedTuple, overload

from keylane.consume.block import Block, Span
from keylane.consume.downloads import Downloads
from keylane.consume.leases import Leases
from keylane.consume.open_blocks import HasBlock, OpenBlocks
from keylane.consume.receipts import ACK, GIVE_BACK, SettleKind, extend_kind, failure_kind, nack_kind
from keylane.consume.settler import Settler
from keylane.errors import InvalidArgument
from keylane.times import Seconds, moment
from keylane.tracing import Processing


class Origin(NamedTuple):
    """What messages ask of the consumer that they were delivered to."""

    topic: str
    drift: Callable[[], float]  # seconds that the cluster's clock is ahead of ours
    leases: Leases
    settler: Settler
    downloads: Downloads
    blocks: OpenBlocks
    processing: Processing | None = None  # traces what the application does


class Message(HasBlock):
    """A delivered message, to be acked or nacked before its lease ends.

    async with message:                 # ack on exit, nack when the block raises
        await charge(await message.data())

    If the block is cancelled, or left because the program ends, the message goes back uncharged.
    """

    __slots__ = ("_block", "_index", "_origin")

    def __init__(self, block: Block, index: int, origin: Origin) -> None:
        self._block = block
        self._index = index
        self._origin = origin

    def __repr__(self) -> str:
        return f"<Message {self.id} of {self.topic!r}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return self._block is other._block and self._index == other._index

    def __hash__(self) -> int:
        return hash((id(self._block), self._index))

    @property
    def topic(self) -> str:
        """The topic it was published to."""
        return self._origin.topic

    @property
    def partition(self) -> int:
        """The partition it is in."""
        return self._block.partition

    @property
    def id(self) -> str:
        """`<partition>:<ledger>-<entry>`, the same as Published.id."""
        return self._block.id(self._index)

    @property
    def key(self) -> str | None:
        """The key it was published with."""
        return self._block.texts[self._index * 3] or None

    @property
    def uid(self) -> str:
        """The producer's name for it."""
        return self._block.texts[self._index * 3 + 1]

    @property
    def attributes(self) -> dict[str, str]:
        """The attributes it was published with."""
        return self._block.about(self._index).attributes

    @property
    def producer_group(self) -> str | None:
        """The group of the client that published it."""
        return self._block.about(self._index).producer_group or None

    @property
    def size(self) -> int:
        """The size of its body in bytes."""
        return self._block.body_size(self._index)

    @property
    def produced_at(self) -> datetime:
        """When it was produced, by the producer's clock."""
        return moment(self._block.about(self._index).produced_ms)

    @property
    def published_at(self) -> datetime:
        """When it was stored, by the cluster's clock."""
        return moment(self._block.about(self._index).published_ms)

    @property
    def age(self) -> float:
        """Seconds since it was stored."""
        now = time.time() + self._origin.drift()
        return max(0.0, now - self._block.about(self._index).published_ms / 1000)

    @property
    def retry_count(self) -> int:
        """How many earlier deliveries failed; 0 at the first delivery."""
        return self._block.retries.get(self._block.entries[self._index], 0)

    @property
    def token(self) -> int:
        """A number that grows with every delivery in the partition and subscription: a fencing token."""
        return self._block.token

    @property
    def deadline(self) -> datetime:
        """When its lease ends, by the cluster's clock."""
        left = self._origin.leases.deadline(self._block, self._index) - time.monotonic()
        if left == float("inf"):  # at most once: settled already
            return datetime.max.replace(tzinfo=UTC)
        return moment((time.time() + self._origin.drift() + left) * 1000)

    async def data(self) -> bytes:
        """Return its body, downloaded if need be. Raises PayloadMissing if it is gone."""
        block = self._block
        downloads = self._origin.downloads
        downloads.unasked = 0
        body = block.bodies.get(self._index)
        return await downloads.one(block, self._index) if body is None else body

    async def ack(self) -> None:
        """Ack the message. Raises StaleReceipt if its lease has ended."""
        await self._origin.settler.one(ACK, self._block, self._index)

    async def nack(
        self, delay: Seconds | None = None, *, until: datetime | None = None, reason: str | None = None
    ) -> None:
        """Nack the message: it is redelivered, by default after the subscription's backoff.

        If that was its last retry, the reason goes into its history: see dead_letters().
        """
        await self._origin.settler.one(nack_kind(delay, until, reason), self._block, self._index)

    async def extend(self, seconds: Seconds | None = None, *, until: datetime | None = None) -> None:
        """Extend its lease to so many seconds from now, or until a time."""
        await self._origin.settler.one(extend_kind(seconds, until), self._block, self._index)

    async def __aenter__(self) -> "Message":
        self._origin.blocks.begin(self)
        if self._origin.processing is not None:
            self._origin.processing.begin(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._origin.processing is not None:
            self._origin.processing.end(self, error)
        if self._settle_after_block(ACK if error is None else kind_after(error)):
            await asyncio.sleep(0)  # much is to be sent: a loop that never waits must let that happen

    def _settle_after_block(self, kind: SettleKind) -> bool:
        """Settle it after its block, in the background; returns whether the loop should have a turn."""
        full = self._origin.settler.settle_later(self._block, self._index, kind)
        self._origin.blocks.end(self)
        return full


def kind_after(error: BaseException | None) -> SettleKind:
    """Return how to settle a message when its block ends; what is no Exception is not about the message."""
    if error is None:
        return ACK
    return failure_kind(error) if isinstance(error, Exception) else GIVE_BACK


class Batch(Sequence[Message]):
    """Messages taken together; `consumer.ack(batch)` acks them together."""

    __slots__ = ("_origin", "_size", "spans")

    def __init__(self, spans: list[Span], origin: Origin) -> None:
        self.spans = spans
        self._origin = origin
        self._size = sum(stop - start for _, start, stop in spans)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Message]:
        origin = self._origin
        for block, start, stop in self.spans:
            for index in range(start, stop):
                yield Message(block, index, origin)

    @overload
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> list[Message]: ...
    def __getitem__(self, at: int | slice) -> Message | list[Message]:
        if isinstance(at, slice):
            return list(self)[at]
        if at < 0:
            at += self._size
        for block, start, stop in self.spans:
            if 0 <= at < stop - start:
                return Message(block, start + at, self._origin)
            at -= stop - start
        raise IndexError("batch index out of range")

    def __repr__(self) -> str:
        return f"<Batch of {self._size} messages>"

    async def data(self) -> list[bytes]:
        """Return all bodies, downloaded together. Raises PayloadMissing if one is gone."""
        return await self._origin.downloads.all(self.spans) if self.spans else []


def spans_of(messages: Iterable[Message], origin: Origin) -> list[Span]:
    """Return where messages are, in their order; InvalidArgument if one is another consumer's, or none."""
    if isinstance(messages, Batch) and messages._origin is origin:
        return messages.spans
    if not isinstance(messages, Iterable):
        raise InvalidArgument(
            f"messages is {messages!r:.60}: use a list of messages, or settle one by itself"
        )
    spans: list[Span] = []
    for message in messages:
        if not isinstance(message, Message):
            raise InvalidArgument(
                f"{message!r:.60} is no message: use those that the consumer has handed out"
            )
        if message._origin is not origin:
            raise InvalidArgument(f"message {message.id} was delivered to another consumer")
        spans.append((message._block, message._index, message._index + 1))
    return spans
