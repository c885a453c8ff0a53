"""What has come and waits to be taken by the application."""

from collections import deque
from time import monotonic

from keylane.consume.block import BUFFERED, HANDED, Block, Span
from keylane.consume.message import Message, Origin

_HANDED = bytes((HANDED,))


class Buffer:
    """Blocks in the order they came; messages whose lease has ended meanwhile are dropped."""

    def __init__(self, origin: Origin, period: float) -> None:
        self._origin = origin
        self._leases = origin.leases
        self._period = period  # seconds: how exactly to know when messages were handed out
        self._blocks: deque[Block] = deque()
        self._aside: deque[Block] | None = None  # while nothing is to be handed out
        self._at = 0  # index of the next message in the first block

    def __len__(self) -> int:
        return sum(map(len, self._blocks)) - self._at if self._blocks else 0

    def add(self, block: Block) -> None:
        """Put a block behind the others."""
        (self._blocks if self._aside is None else self._aside).append(block)

    def hold(self) -> None:
        """Hand nothing out for now."""
        if self._aside is None:
            self._aside, self._blocks = self._blocks, deque()

    def release(self) -> None:
        """Go on handing out."""
        if self._aside is not None:
            self._blocks, self._aside = self._aside, None

    def pop(self) -> Message | None:
        """Take the next message."""
        while self._blocks:
            block, index = self._blocks[0], self._at
            states, now = block.states, monotonic()
            if (at := index + 1) == len(states):
                self._blocks.popleft()
                at = 0
            self._at = at
            if states[index] == BUFFERED and (now < block.soonest or self._alive(block, index, now)):
                self._note(block, index, now)
                states[index] = HANDED
                if block.gone is not None:
                    self._credit(block, 1)
                return Message(block, index, self._origin)
        return None

    def take(self, limit: int, *, handed: bool = True) -> list[Span]:
        """Take up to `limit` messages; what is not handed to the application may still go back."""
        spans: list[Span] = []
        now = monotonic()
        while self._blocks and limit > 0:
            block, start = self._blocks[0], self._at
            stop = min(len(block), start + limit)
            if block.states.count(BUFFERED, start, stop) < stop - start or now >= block.soonest:
                # Something in it is not to be handed out: go on message by message.
                if block.states[start] != BUFFERED or not self._alive(block, start, now):
                    self._step(block, start + 1)
                    continue
                stop = start + 1
            if handed:
                self._note(block, start, now)
                block.states[start:stop] = _HANDED * (stop - start)
            self._credit(block, stop - start)
            self._step(block, stop)
            if spans and spans[-1][0] is block and spans[-1][2] == start:
                spans[-1] = (block, spans[-1][1], stop)
            else:
                spans.append((block, start, stop))
            limit -= stop - start
        return spans

    def _step(self, block: Block, to: int) -> None:
        if to >= len(block):
            self._blocks.popleft()
            to = 0
        self._at = to

    def _alive(self, block: Block, index: int, now: float) -> bool:
        if self._leases.is_doubtful(block, now):
            self._leases.let_go([block.partition])  # it comes again if it is ours
        elif now < self._leases.deadline(block, index):
            return True
        else:
            self._leases.lapse(block, index)
        return False

    def _note(self, block: Block, index: int, now: float) -> None:
        self._leases.active = now
        if now - block.noted > self._period:
            block.noted = now
            block.handed.append((index, now))

    def _credit(self, block: Block, count: int) -> None:
        if block.gone is not None:  # settled before it came: there will be no ACK to make room
            self._leases.credit(block.partition, count)
