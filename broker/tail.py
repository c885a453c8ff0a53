"""The newest messages that this worker accepted, so that delivering them needs no second look at Redis."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from broker.results import Lease, Message, Outgoing, PublishResult


class Tail:
    """What is known of a partition in one epoch: messages by entry, cursors by subscription."""

    def __init__(self) -> None:
        self.messages: dict[int, Message] = {}
        self.cursors: dict[str, int] = {}

    def keys_after(self, subscription: str, most: int) -> tuple[int, list[str]] | None:
        """The next entry that a subscription has not seen, and the keys from there on, if known."""
        cursor = self.cursors.get(subscription)
        if cursor is None or cursor + 1 not in self.messages:
            return None
        keys = []
        for entry in range(cursor + 1, cursor + 1 + most):
            message = self.messages.get(entry)
            if message is None:
                break
            keys.append(message.key)
        return cursor + 1, keys


class Batch(NamedTuple):
    """Consecutive entries of a tail."""

    tail: Tail
    first: int
    end: int
    size: int


class TailCache:
    """A tail for each partition that is held, all together bounded; losing any of it costs a read.

    A tail is good for one lease: only its holder can append to the partition. It ends with the next lease,
    and when entries come again that are in it already, since then Redis has lost what they were.
    """

    def __init__(self, limit: int = 64 * 1024 * 1024) -> None:
        self._limit = limit  # bytes, as they came from the producers
        self._size = 0
        self._tails: dict[tuple[str, int], tuple[Lease, Tail]] = {}
        self._batches: deque[Batch] = deque()

    def newest_epoch(self, topic: str, partition: int) -> int:
        """The newest epoch that this worker has held, 0 for none."""
        lease, _ = self._tails.get((topic, partition), (None, None))
        return lease.epoch if lease else 0

    def begin(self, lease: Lease) -> None:
        """Start anew for a lease just taken."""
        self._tails[lease.topic, lease.partition] = (lease, Tail())

    def of(self, lease: Lease) -> Tail:
        """The tail of a lease; an empty one that nobody keeps where there is none."""
        held, tail = self._tails.get((lease.topic, lease.partition), (None, None))
        return tail if tail is not None and held == lease else Tail()

    def add(self, lease: Lease, batch: Sequence[Outgoing], result: PublishResult, size: int) -> None:
        """Remember a batch as it was just published."""
        tail = self.of(lease)
        if result.first in tail.messages:
            self.begin(lease)
            tail = self.of(lease)
        if result.duplicates:
            batch = [item for index, item in enumerate(batch) if index not in result.duplicates]
        prefix, published = f"{result.ledger}-", f"{result.published_ms} "
        entry = result.first
        for key, uid, about in batch[: result.stored]:
            tail.messages[entry] = Message(f"{prefix}{entry}", key, uid, published + about)
            entry += 1
        self._batches.append(Batch(tail, result.first, entry, size))
        self._size += size
        while self._size > self._limit:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        tail, first, end, size = self._batches.popleft()
        self._size -= size
        for entry in range(first, end):
            tail.messages.pop(entry, None)
