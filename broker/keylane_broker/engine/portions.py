"""How much of what a fetch leased is read and sent: a consumer that reads slowly must not fill our memory."""

from collections import deque

from keylane.wire.lanes import lane_of_mode, lanes_of_keys
from keylane_broker.engine.codec import rows
from keylane_broker.engine.tail import READ, Tail

Row = tuple[int, ...]  # place of the consumer, first, last


class Portions:
    """Reads what was leased a part at a time, until the consumers have as many bytes as they may get.

    A consumer gets the first of its messages, so of each lane a prefix: the rest can go back.
    """

    def __init__(self, mode: str, token: int, leased: list[int], sizes: list[int | None]) -> None:
        self.found: list[int] = []  # what is sent: place of the consumer, first, last, ...
        # The same by the place of the consumer: first, last, ...; and key, uid and about of each message.
        self.shares: dict[int, tuple[list[int], list[str]]] = {}
        self.oversized: list[str | int] = []  # receipts of what goes back: lane, token, first, last, ...
        self._by_key = mode == "key_shared"
        self._lane = lane_of_mode(mode)
        self._token = token
        self._leased = leased  # as `found`
        self._rest: deque[Row] | None = None  # what is left of it to read, once that has begun
        self._batch: list[Row] = []
        self._left = [float("inf") if size is None else size for size in sizes]
        self._total = float("inf") if None in sizes else READ

    def take_known(self, tail: Tail) -> None:
        """Take all at once that one consumer gets, where the tail has it: with a filter, in many ranges."""
        if len({*self._leased[::3]}) != 1:
            return
        index, ranges = self._leased[0], self._leased.copy()
        del ranges[::3]
        flat = tail.read_all(ranges)
        if flat and self._fits(index, flat):
            self.found, self.shares[index] = self._leased, (ranges, flat)
            self._rest = deque()

    def next_ranges(self, most: int) -> list[tuple[int, int]]:
        """Return what to read next, about `most` entries; nothing at the end."""
        self._batch = []
        if self._rest is None:
            self._rest = deque(rows(self._leased, 3))
        full = [self._room(index) <= 0 and not self._by_key for index in range(len(self._left))]
        while self._rest and most > 0:
            index, first, last = row = self._rest.popleft()
            if full[index]:
                self.oversized += (self._lane, self._token, first, last)
                continue
            if last - first >= most:
                self._rest.appendleft((index, first + most, last))
                row = (index, first, first + most - 1)
            self._batch.append(row)
            most -= last - first + 1
        return [(first, last) for _, first, last in self._batch]

    def take(self, parts: list[list[str]]) -> None:
        """Keep as much of what was read as there is room for."""
        for (index, first, last), part in zip(self._batch, parts, strict=True):
            if self._fits(index, part):
                self._keep(index, first, last, part)
                continue
            room = self._room(index)
            count = _fitting(part, room)
            if count:
                self._keep(index, first, first + count - 1, part[: count * 3])
            self._total -= room
            self._left[index] = 0
            if first + count <= last:
                self._give_back(first + count, last, part[count * 3 :])

    def _fits(self, index: int, part: list[str]) -> bool:
        """Take the room that a part needs, if there is as much."""
        size = sum(map(len, part))
        if size > self._room(index):
            return False
        self._left[index] -= size
        self._total -= size
        return True

    def _room(self, index: int) -> float:
        return min(self._left[index], max(0, self._total))

    def _keep(self, index: int, first: int, last: int, part: list[str]) -> None:
        found, (ranges, flat) = self.found, self.shares.setdefault(index, ([], []))
        if found and found[-1] == first - 1 and found[-3] == index:  # the rest of what was read in parts
            found[-1] = ranges[-1] = last
        else:
            found += (index, first, last)
            ranges += (first, last)
        flat += part

    def _give_back(self, first: int, last: int, part: list[str]) -> None:
        if not self._by_key:
            self.oversized += (self._lane, self._token, first, last)
            return
        for entry, lane, uid in zip(
            range(first, last + 1), lanes_of_keys(part[::3]), part[1::3], strict=True
        ):
            if uid:  # else the log has lost it
                self.oversized += (lane, self._token, entry, entry)


def _fitting(part: list[str], room: float) -> int:
    """Return how many messages it takes to use up the room."""
    for count, message in enumerate(rows(part, 3)):
        if room <= 0:
            return count
        room -= sum(map(len, message))
    return len(part) // 3
