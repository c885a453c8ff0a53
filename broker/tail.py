"""The newest messages that this worker accepted, so that delivering them needs no second look at Redis."""

from collections import deque
from collections.abc import Sequence

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


class TailCache:
    """A tail for each lease, all together bounded; losing any of it costs a read.

    An entry never changes while it is in the log, and a receipt for one that has left it is never given:
    so nothing here needs to be invalidated.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._size = 0
        self._tails: dict[Lease, Tail] = {}
        self._batches: deque[tuple[Lease, int, int]] = deque()

    def of(self, lease: Lease) -> Tail:
        """The tail of a lease; an empty one that nobody keeps where there is none."""
        return self._tails.get(lease) or Tail()

    def add(self, lease: Lease, batch: Sequence[Outgoing], result: PublishResult) -> None:
        """Remember a batch as it was just published."""
        if not result.stored:
            return
        if result.duplicates:
            batch = [item for index, item in enumerate(batch) if index not in result.duplicates]
        prefix, published = f"{result.ledger}-", f"{result.published_ms} "
        messages = self._tails.setdefault(lease, Tail()).messages
        entry = result.first
        for key, uid, about in batch:
            messages[entry] = Message(f"{prefix}{entry}", key, uid, published + about)
            entry += 1
        self._batches.append((lease, result.first, entry))
        self._size += result.stored
        while self._size > self._limit:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        lease, first, end = self._batches.popleft()
        self._size -= end - first
        messages = self._tails[lease].messages
        for entry in range(first, end):
            del messages[entry]
        if not messages:
            del self._tails[lease]
