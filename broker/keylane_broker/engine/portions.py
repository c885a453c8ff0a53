"""How much of what a fetch leased is read and sent: a consumer that reads slowly must not fill our memory."""

from collections import deque
from collections.abc import Iterable

from keylane.wire.lanes import lane_of_mode, lanes_of_keys
from keylane_broker.engine.codec import rows
from keylane_broker.engine.tail import READ

Row = tuple[int, ...]  # place of the consumer, first, last


class Portions:
    """Reads what was leased a part at a time, until the consumers have as many bytes as they may get.

    A consumer gets the first of its messages, so of each lane a prefix: the rest can go back.
    """

    def __init__(self, mode: str, token: int, leased: Iterable[Row], sizes: list[int | None]) -> None:
        self.found: list[int] = []  # what is sent: place of the consumer, first, last, ...
        self.parts: list[list[str]] = []  # key, uid and about of each message, for each of these
        self.oversized: list[str | int] = []  # receipts of what goes back: lane, token, first, last, ...
        self._by_key = mode == "key_shared"
        self._lane = lane_of_mode(mode)
        self._token = token
        self._rest = deque(leased)
        self._batch: list[Row] = []
        self._left = [float("inf") if size is None else size for size in sizes]
        self._total = float("inf") if None in sizes else READ

    def next_ranges(self, most: int) -> list[tuple[int, int]]:
        """Return what to read next, about `most` entries; nothing at the end."""
        self._batch = []
        while self._rest and most > 0:
            index, first, last = self._rest.popleft()
            if not self._by_key and self._room(index) <= 0:
                self.oversized += (self._lane, self._token, first, last)
                continue
            end = min(last, first + most - 1)
            if end < last:
                self._rest.appendleft((index, end + 1, last))
            self._batch.append((index, first, end))
            most -= end - first + 1
        return [(first, last) for _, first, last in self._batch]

    def take(self, parts: list[list[str]]) -> None:
        """Keep as much of what was read as there is room for."""
        for (index, first, last), part in zip(self._batch, parts, strict=True):
            room, size = self._room(index), sum(map(len, part))
            if size <= room:
                self._left[index] -= size
                self._total -= size
                self._keep(index, first, last, part)
                continue
            count = _fitting(part, room)
            if count:
                self._keep(index, first, first + count - 1, part[: count * 3])
            self._total -= room
            self._left[index] = 0
            if first + count <= last:
                self._give_back(first + count, last, part[count * 3 :])

    def _room(self, index: int) -> float:
        return min(self._left[index], max(0, self._total))

    def _keep(self, index: int, first: int, last: int, part: list[str]) -> None:
        if self.found[-3:-2] == [index] and self.found[-1] == first - 1:  # the rest of what was read in parts
            self.found[-1] = last
            self.parts[-1] += part
        else:
            self.found += (index, first, last)
            self.parts.append(part)

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
