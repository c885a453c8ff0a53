"""The newest messages that this worker accepted, so that delivering them needs no second look at Redis."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import msgspec

from keylane_broker.engine.values import Lease, PublishResult

_SEGMENT = 500  # messages; smaller batches are put together
READ = 4 * 1024 * 1024  # bytes that a fetch reads, about
FEWEST, MOST = 32, 500  # entries that are read from the log at once, however small they were before
MANY = 64  # messages of which reading the keys takes longer than waiting until they are known
_BLOCKED = 100  # messages passed that had to wait, so that more is looked at at once
_AHEAD = 30_000  # messages that are then looked at
NEWEST = 10_000  # messages that are known by their uids: to look at more at once holds up the others
_LOOK = 2_000  # at a time, while one key comes again and again


class Segment(msgspec.Struct):
    """Consecutive entries: key, uid and about of each, flat, as they are delivered."""

    first: int
    flat: list[str]
    size: int = 0

    @property
    def end(self) -> int:
        """The entry after the last one."""
        return self.first + len(self.flat) // 3


class Tail:
    """What is known of a partition in one epoch: its newest messages, cursors by subscription."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.starts: list[int] = []  # the first entry of each
        self.cursors: dict[str, int] = {}
        self.blocked: set[str] = set()  # subscriptions whose last fetch passed much that has to wait
        self.stride = FEWEST  # entries to be read from the log at once
        self.appending = 0  # calls under way that append many messages
        self._places: dict[str, int] = {}  # uid -> entry, of those before `_placed` that anybody asked about
        self._placed = 0

    def __contains__(self, entry: int) -> bool:
        return bool(self.starts) and self.starts[0] <= entry < self.segments[-1].end

    def read(self, first: int, last: int) -> list[str] | None:
        """Return key, uid and about of each entry, flat, if all of them are known."""
        if not self.starts or first < self.starts[0]:
            return None
        at = bisect_right(self.starts, first) - 1
        segment = self.segments[at]
        start, stop = (first - segment.first) * 3, (last + 1 - segment.first) * 3
        if stop <= len(segment.flat):  # mostly: one that is filtered asks for many ranges
            return segment.flat[start:stop]
        if last >= self.segments[-1].end:
            return None
        found: list[str] = []
        while first <= last:
            segment = self.segments[at]
            end = min(last + 1, segment.end)
            found += segment.flat[(first - segment.first) * 3 : (end - segment.first) * 3]
            first, at = end, at + 1
        return found

    def places(self, uids: Iterable[str]) -> dict[str, int]:
        """Return the entries of those uids that are among the newest here."""
        if not self.starts:
            return {}
        end = self.segments[-1].end
        start = max(self.starts[0], end - NEWEST)
        if self._placed < start or len(self._places) > 2 * NEWEST:
            self._places, self._placed = {}, start
        if self._placed < end:
            newer = self.read(self._placed, end - 1) or []
            self._places.update(zip(newer[1::3], range(self._placed, end), strict=True))
            self._placed = end
        found = {uid: self._places.get(uid, 0) for uid in uids}
        return {uid: entry for uid, entry in found.items() if entry >= start}

    def measured(self, entries: int, size: int) -> None:
        """Learn from how large entries of the log were how many of the next to read at once."""
        fitting = READ // (size // entries + 1)
        self.stride = max(FEWEST, min(fitting, self.stride * 2, MOST))

    def lanes_after(self, subscription: str, most: int) -> tuple[int, list[str | int]] | None:
        """Return the next entry that a subscription has not seen, and the lanes from there on, if known.

        Where much has to wait, further ahead: how often a lane comes again behind itself is then a number.
        """
        cursor = self.cursors.get(subscription)
        if cursor is None or most < 1 or cursor + 1 not in self:
            return None
        if subscription in self.blocked:
            return cursor + 1, self._stretches(cursor + 1)
        flat = self.read(cursor + 1, min(cursor + most, self.segments[-1].end - 1))
        return (cursor + 1, ["=" + key for key in flat[::3]]) if flat else None

    def known_upto(self, subscription: str) -> int | None:
        """Return how far a fetch by keys had better look: not at what is being appended, whose keys it would
        have to read, and which will be known when that is done. None: as far as there is anything.
        """
        cursor = self.cursors.get(subscription)
        if not self.appending or not self.segments or cursor is None:
            return None
        end = self.segments[-1].end
        return end - 1 if self.starts[0] <= cursor + 1 <= end else None

    def _stretches(self, first: int) -> list[str | int]:
        """Return the lanes from an entry on, with numbers, as long as they are few."""
        found: list[str | int] = []
        for start in range(first, min(first + _AHEAD, self.segments[-1].end), _LOOK):
            flat = self.read(start, min(start + _LOOK, self.segments[-1].end) - 1) or []
            for key, same in groupby(flat[::3]):
                found.append("=" + key)
                if again := sum(1 for _ in same) - 1:
                    found.append(again)
            if len(found) > _LOOK // 10:
                break
        return found

    def passed(self, subscription: str, cursor: int, found: list[int]) -> None:
        """Learn how far a fetch has gone, and what it leased: place of the consumer, first, last, ..."""
        leased = sum(found[2::3]) - sum(found[1::3]) + len(found) // 3
        waiting = cursor - self.cursors.get(subscription, cursor) - leased
        if waiting > _BLOCKED:
            self.blocked.add(subscription)
        else:
            self.blocked.discard(subscription)
        self.cursors[subscription] = cursor


class _Added(NamedTuple):
    tail: Tail
    segment: Segment


class TailCache:
    """A tail for each partition that is held, all together bounded; losing any of it costs a read.

    A tail is good for one lease: only its holder can append to the partition. It ends with the next lease,
    and when entries come that do not go on where it ends, since then Redis has lost what they were.
    """

    def __init__(self, limit: int = 16 * 1024 * 1024) -> None:
        self._limit = limit  # bytes, as they came from the producers; Python needs some times more
        self._size = 0
        self._tails: dict[tuple[str, int], tuple[Lease, Tail]] = {}
        self._added: deque[_Added] = deque()

    def newest_epoch(self, topic: str, partition: int) -> int:
        """Return the newest epoch that this worker has held, 0 for none."""
        lease, _ = self._tails.get((topic, partition), (None, None))
        return lease.epoch if lease else 0

    def begin(self, lease: Lease) -> None:
        """Start afresh for a lease just taken."""
        self.forget(lease.topic, lease.partition)
        self._tails[lease.topic, lease.partition] = (lease, Tail())

    def forget(self, topic: str, partition: int) -> None:
        """Forget a partition that no longer exists."""
        _, tail = self._tails.pop((topic, partition), (None, None))
        if tail is not None and tail.segments:
            self._added = deque(item for item in self._added if item.tail is not tail)
            self._size -= sum(segment.size for segment in tail.segments)

    def of(self, lease: Lease) -> Tail:
        """Return the tail of a lease; without one, an empty tail that nobody keeps."""
        held, tail = self._tails.get((lease.topic, lease.partition), (None, None))
        return tail if tail is not None and held == lease else Tail()

    def add(self, lease: Lease, flat: list[str], result: PublishResult, size: int) -> None:
        """Remember a batch as it was just published: key, uid and about of each message, flat."""
        if not result.stored:
            return
        tail = self.of(lease)
        if tail.segments and result.first != tail.segments[-1].end:
            self.begin(lease)
            tail = self.of(lease)
        if result.duplicates or result.unmatched or result.full:
            left = result.duplicates.keys() | result.unmatched | set(result.full)
            flat = [text for at, text in enumerate(flat) if at // 3 not in left]
        else:
            flat = flat.copy()
        published = f"{result.published_ms} "
        flat[2::3] = [published + about for about in flat[2::3]]
        newest = tail.segments[-1] if tail.segments else None
        if newest is not None and len(newest.flat) < _SEGMENT * 3:
            newest.flat += flat
            newest.size += size
        else:
            segment = Segment(result.first, flat, size)
            tail.segments.append(segment)
            tail.starts.append(segment.first)
            self._added.append(_Added(tail, segment))
        self._size += size
        while self._size > self._limit:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        tail, segment = self._added.popleft()
        self._size -= segment.size
        tail.segments.remove(segment)
        tail.starts.remove(segment.first)
