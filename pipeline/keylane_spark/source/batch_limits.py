"""How much of what waits a batch of a stream takes: the options …PerTrigger and maxTriggerDelay."""

import time
from array import array
from collections.abc import Callable

from keylane.types import Page
from keylane.wire.about import body_size
from keylane_spark.source.options import BatchLimits
from keylane_spark.source.positions import Positions, Range, admit, ranges

_PAGE = 5_000  # messages
_LOOK = (
    200_000  # messages whose sizes are looked at for a batch, which has no more if there is a limit of bytes
)

Read = Callable[[Range, int], Page]  # a page of so many messages from the start of a range


class BatchLimiter:
    """Where the batches of a query end."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._last = float("-inf")  # when the last batch was admitted
        self._sizes: dict[tuple[str, int], Sizes] = {}

    def end(self, start: Positions, latest: Positions, read: Read, *, wait: bool) -> Positions:
        """Where to end, from here to there: nowhere yet, if that may wait for more."""
        limits = self._limits
        waiting = sum(range_.size for range_ in ranges(start, latest))
        due = time.monotonic() >= self._last + limits.delay
        if not waiting or (
            wait and limits.min_offsets is not None and waiting < limits.min_offsets and not due
        ):
            return start
        self._last = time.monotonic()
        rows = min(waiting, limits.max_offsets or waiting)
        if limits.max_bytes is not None:
            rows = self._fitting(start, latest, min(rows, _LOOK), limits.max_bytes, read)
        return admit(start, latest, rows)

    def _fitting(self, start: Positions, latest: Positions, rows: int, most: int, read: Read) -> int:
        """How many rows have no more bytes than that; one at least, or nothing would ever come."""
        self._sizes = {
            (range_.topic, range_.partition): self._known(range_) for range_ in ranges(start, latest)
        }

        def fits(count: int) -> bool:
            taken = ranges(start, admit(start, latest, count))
            return sum(self._sizes[one.topic, one.partition].of(one, read) for one in taken) <= most

        # Sizes are read as far as they have to be: some, and twice as many while that is not too much.
        low, high = 0, min(rows, _PAGE)
        while fits(high):
            if high == rows:
                return rows
            low, high = high, min(rows, high * 2)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return max(1, low)

    def _known(self, range_: Range) -> "Sizes":
        sizes = self._sizes.get((range_.topic, range_.partition)) or Sizes(range_.start)
        return sizes if sizes.drop(range_.start) else Sizes(range_.start)


class Sizes:
    """The bytes of the bodies of a partition from a position on, as far as they have been asked for."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._sums = array("q", [0])  # of all bodies before start, start + 1, …

    def drop(self, start: int) -> bool:
        """Forget what lies before; whether what lies behind is of use then."""
        if not self._start <= start < self._start + len(self._sums):
            return False
        self._sums = self._sums[start - self._start :]
        self._start = start
        return True

    def of(self, range_: Range, read: Read) -> int:
        """The bytes of a range from the start on."""
        while (next_ := self._start + len(self._sums) - 1) < range_.end:
            page = read(Range(range_.topic, range_.partition, next_, range_.end), _PAGE)
            self._add(page)
        return self._sums[range_.end - self._start] - self._sums[0]

    def _add(self, page: Page) -> None:
        sizes = iter(page.flat[2::3])
        total = self._sums[-1]
        at = self._start + len(self._sums) - 1
        for index in range(0, len(page.ranges), 2):
            first, last = page.ranges[index], page.ranges[index + 1]
            self._sums.extend([total] * (first - at))
            for _ in range(first, last + 1):
                total += body_size(next(sizes))
                self._sums.append(total)
            at = last + 1
        self._sums.extend([total] * (page.next - at))
