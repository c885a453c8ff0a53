"""The newest messages that this worker accepted, so that delivering them needs no second look at Redis."""

from collections import deque
from collections.abc import Sequence

from broker.results import Lease, Message, Outgoing, PublishResult

Tail = dict[int, Message]  # entry -> message


class TailCache:
    """Messages by lease and entry, the oldest dropped first; losing any of it costs a read.

    An entry never changes while it is in the log, and a receipt for one that has left it is never given:
    so the cache needs no invalidation, only a bound.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._size = 0
        self._tails: dict[Lease, Tail] = {}
        self._batches: deque[tuple[Lease, int, int]] = deque()

    def of(self, lease: Lease) -> Tail:
        """What is known of a partition in this epoch."""
        return self._tails.get(lease, {})

    def add(self, lease: Lease, batch: Sequence[Outgoing], result: PublishResult) -> None:
        """Remember a batch as it was just published."""
        if not result.stored:
            return
        first, last = result.first, result.first + result.stored - 1
        prefix, published = f"{result.ledger}-", f"{result.published_ms} "
        if result.duplicates:
            batch = [item for index, item in enumerate(batch) if index not in result.duplicates]
        tail = self._tails.setdefault(lease, {})
        entry = first
        for key, uid, about in batch:
            tail[entry] = Message(f"{prefix}{entry}", key, uid, published + about)
            entry += 1
        self._batches.append((lease, first, last))
        self._size += result.stored
        while self._size > self._limit:
            self._drop_oldest()

    def forget(self, lease: Lease) -> None:
        """Drop all of a lease that is over."""
        self._tails.pop(lease, None)

    def _drop_oldest(self) -> None:
        lease, first, last = self._batches.popleft()
        self._size -= last - first + 1
        tail = self._tails.get(lease)
        if tail is not None:
            for entry in range(first, last + 1):
                tail.pop(entry, None)
            if not tail:
                del self._tails[lease]
