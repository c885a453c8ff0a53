"""What a consumer holds: its blocks, when leases end, and which messages a rewind takes along."""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import repeat
from time import monotonic

from keylane.consume.block import BUFFERED, HANDED, SETTLED, SETTLING, STALE, Block, Span
from keylane.consume.lanes import Lanes
from keylane.errors import StaleReceipt
from keylane.threads import native_lock
from keylane.wire import Type


class Leases(Lanes):
    """The leases of one consumer.

    `credit` gives a partition's permits back where nothing is to be settled, at most once; `give_back` nacks.
    """

    def __init__(self, credit: Callable[[int, int], None], give_back: Callable[[list[Span]], object]) -> None:
        super().__init__()
        self.active = monotonic()  # when the application last took or settled something
        self.paused = False  # nothing is to be handed out
        self._lock = native_lock()  # over what is not handed out: other threads may take it
        self.credit = credit
        self._give_back = give_back
        self._in_order: dict[int, dict[int, Block]] = {}  # partition -> entry -> its newest block, in lanes
        # Partitions that no worker serves us -> until when what we have of them cannot be with others.
        self._cut_off: dict[int, float] = {}
        self._overlaid: dict[Block, None] = {}  # those of which something has come again
        # Lanes being nacked -> the nacks that are not answered, each with its entry.
        self._rewinding: dict[tuple[int, str], dict[tuple[Block, int], int]] = {}
        # What has come of these meanwhile: sent before, and void, if what is nacked comes again. But
        # a dead letter does not, and what was behind it comes by itself.
        self._withheld: dict[tuple[int, str], list[Span]] = {}

    def perhaps(self, block: Block, index: int) -> str:
        """Return what else may be true of a lease that has ended."""
        return "; or it was settled before and the answer was lost" if index in block.doubtful else ""

    def check(self, block: Block, index: int, under_way: int | None = None) -> None:
        """Raise StaleReceipt unless the application has the message and its lease goes on."""
        state = block.states[index]
        if state == HANDED:
            now = monotonic()
            if now < block.soonest or now < self.deadline(block, index):
                return
            late = now - self.deadline(block, index)
            self.lapse(block, index)
            why = f"its lease ended {late:.1f} s ago and it will be redelivered"
            why += self.perhaps(block, index)
        elif state == SETTLING:
            how = "acked" if under_way == Type.ACK else "nacked" if under_way == Type.NACK else "settled"
            why = f"it is already being {how}"
        elif state == SETTLED:
            why = "it is already settled"
        else:
            why = "its lease has ended, an earlier message of its lane was nacked, or its consumer was closed"
        raise StaleReceipt(f"message {block.id(index)}: {why}")

    # Handing out

    def hand(self, block: Block, index: int) -> bool:
        """Put a message into the application's hands, in any thread; False if it must not have it."""
        now = monotonic()
        with self._lock:
            if self.paused or block.states[index] != BUFFERED:
                return False
            if now >= block.soonest and (now >= self.deadline(block, index) or self.is_doubtful(block, now)):
                return False
            # Its time first: the loop looks at any moment, and a signal may end this at any.
            block.taken[index] = self.active = now
            block.states[index] = HANDED
        return True

    def withdraw(self, spans: Iterable[Span] | None = None) -> list[Span]:
        """Take back those messages, of the given or of all, that the application does not have."""
        if spans is None:
            spans = [(block, 0, len(block)) for block in self.blocks]
        withdrawn: list[Span] = []
        with self._lock:
            for block, start, stop in spans:
                for index in range(start, stop):
                    if block.states[index] != BUFFERED:
                        continue
                    block.states[index] = SETTLING
                    if withdrawn and withdrawn[-1][0] is block and withdrawn[-1][2] == index:
                        withdrawn[-1] = (block, withdrawn[-1][1], index + 1)
                    else:
                        withdrawn.append((block, index, index + 1))
        return withdrawn

    # While a partition is not served

    def cut_off(self, partitions: Collection[int], until: float) -> None:
        """No worker serves partitions: after that time our session may be over, and others have it all."""
        self._cut_off.update(dict.fromkeys(partitions, until))
        for block in self.blocks:
            if block.partition in partitions:
                block.soonest = min(block.soonest, until)

    def is_doubtful(self, block: Block, now: float) -> bool:
        """Return whether what we have of a block's partition may be with others."""
        return now >= self._cut_off.get(block.partition, now + 1)

    def reach(self, partitions: Collection[int]) -> None:
        """A worker serves partitions again, and lists what is ours: also what was not to be handed out."""
        now = monotonic()
        self.let_go([at for at in partitions if self._cut_off.pop(at, now + 1) <= now])

    def let_go(self, partitions: Collection[int]) -> None:
        """Forget what the application does not have of partitions."""
        blocks = [block for block in self.blocks if block.partition in partitions]
        for block, start, stop in self.withdraw((block, 0, len(block)) for block in blocks):
            for index in range(start, stop):
                self.stale(block, index)

    # Taking in

    def add(self, block: Block) -> None:
        """A block has come; what follows a nack that is under way is withheld."""
        if self.mode != "shared":
            self._forget_older(block)
            if self._extended:
                self.begin_lanes(block)
        if block.open:
            self.blocks[block] = None
            if self.mode != "shared":
                places = self._in_order.setdefault(block.partition, {})
                places.update(dict.fromkeys(block.entries, block))
        if self._rewinding:
            self._withhold(block)

    def _forget_older(self, block: Block) -> None:
        """A lane comes again, perhaps before we knew that its leases ended: the old token settles no more."""
        places = self._in_order.get(block.partition, {})
        if places.keys().isdisjoint(block.entries):
            return
        again = places.keys() & block.entries
        for old in {places[entry] for entry in again}:
            self._overlaid[old] = None
            if old.token < block.token:
                for index, entry in enumerate(old.entries):
                    if entry in again:
                        self.outdate(old, index)

    def outdate(self, old: Block, index: int) -> None:
        """A message has come again under another token: this one settles nothing any more."""
        if old.states[index] <= HANDED:
            self._close(old, index, STALE)

    def _withhold(self, block: Block) -> None:
        firsts: dict[str, int] = {}  # lane -> from which entry on it is being nacked
        for index, entry in enumerate(block.entries):
            lane = self.lane(block, index)
            place = block.partition, lane
            nacks = self._rewinding.get(place) if lane else None
            if nacks is None:
                continue
            if lane not in firsts:
                firsts[lane] = min(nacks.values())
            if entry <= firsts[lane]:
                if block.states[index] == BUFFERED:  # else it is listed because the nack is still on its way
                    del self._rewinding[place]  # this is what the nacks brought back
                    for old, start, stop in self._withheld.pop(place, ()):
                        for at in range(start, stop):
                            self.stale(old, at)
            elif withheld := self.withdraw([(block, index, index + 1)]):
                self._withheld.setdefault(place, []).extend(withheld)

    # Letting go

    def lapse(self, block: Block, index: int) -> None:
        """The deadline of a message has passed. A lane lives or dies as one: it is given back from there on.

        If the broker has ended the lease too, as it should, it answers that and nothing happens.
        """
        if self.lane(block, index):
            self._give_back([(block, index, index + 1)])
        else:
            self.stale(block, index)

    def lose(self, partition: int, leases: list[int]) -> None:
        """The worker says that leases have ended: token, first, last, …"""
        ended = {
            (token, entry)
            for token, first, last in zip(leases[::3], leases[1::3], leases[2::3], strict=True)
            for entry in range(first, last + 1)
        }
        tokens = set(leases[::3])
        for block in [one for one in self.blocks if one.partition == partition and one.token in tokens]:
            for index, entry in enumerate(block.entries):
                if (block.token, entry) in ended:
                    self._end(block, index)

    def void(self, partition: int, token: int) -> None:
        """All leases with a token up to this one have ended."""
        for block in [one for one in self.blocks if one.partition == partition and one.token <= token]:
            for index in range(len(block)):
                self._end(block, index)

    def _end(self, block: Block, index: int) -> None:
        if block.states[index] <= HANDED:
            self._close(block, index, STALE)
        elif block.states[index] == SETTLING:  # it has an answer of its own
            block.ended.add(index)

    def settled(self, block: Block, index: int) -> None:
        """The broker has settled a message."""
        self._close(block, index, SETTLED)

    def stale(self, block: Block, index: int) -> None:
        """The lease of a message has ended without being settled."""
        self._close(block, index, STALE)

    def settle_range(self, block: Block, start: int, stop: int) -> None:
        """The broker has settled messages that lie together."""
        block.states[start:stop] = b"\x03" * (stop - start)
        block.open -= stop - start
        if block.open <= 0:
            block.bodies.clear()
            self._drop(block)
        elif block.bodies:
            for index in range(start, stop):
                block.bodies.pop(index, None)

    def _drop(self, block: Block) -> None:
        """Nothing of it is held any more."""
        if self.blocks.pop(block, block) is block or not (places := self._in_order.get(block.partition)):
            return
        if block not in self._overlaid:
            deque(map(places.pop, block.entries, repeat(None)), maxlen=0)
            return
        del self._overlaid[block]
        for entry in block.entries:
            if places.get(entry) is block:
                del places[entry]

    def _close(self, block: Block, index: int, state: int) -> None:
        with self._lock:
            before, block.states[index] = block.states[index], state
        if before < SETTLED:
            block.open -= 1
            block.bodies.pop(index, None)
            if block.open <= 0:
                self._drop(block)

    def clear(self, partitions: Collection[int] | None = None) -> None:
        """All leases in these partitions have ended, or in all."""
        for block in [one for one in self.blocks if partitions is None or one.partition in partitions]:
            for index, state in enumerate(block.states):
                if state < SETTLED:
                    self._close(block, index, STALE)

    def extend_one(self, block: Block, index: int, deadline: float) -> None:
        """A message without a lane has a deadline of its own."""
        block.deadlines[index] = deadline
        block.soonest = min(block.soonest, deadline)

    def extend_range(self, block: Block, start: int, stop: int, deadline: float) -> None:
        """Messages without a lane have a new deadline."""
        if block.open == stop - start and max(block.states[start:stop]) < SETTLED:
            block.deadline = block.soonest = deadline
            block.deadlines.clear()
        else:
            block.deadlines.update(dict.fromkeys(range(start, stop), deadline))
            block.soonest = min(block.soonest, deadline)

    # Lanes

    def rewind(self, spans: Iterable[Span]) -> None:
        """Messages are about to be nacked: void the later ones of their lanes."""
        nacked: dict[tuple[int, str], int] = {}
        for block, start, stop in spans:
            for index in range(start, stop):
                if lane := self.lane(block, index):
                    place, entry = (block.partition, lane), block.entries[index]
                    nacked[place] = min(nacked.get(place, entry), entry)
                    self._rewinding.setdefault(place, {})[block, index] = entry
        if not nacked:
            return
        partitions = {partition for partition, _ in nacked}
        for block in list(self.blocks):
            if block.partition not in partitions:
                continue
            for index, state in enumerate(block.states):
                if state in (BUFFERED, HANDED):
                    first = nacked.get((block.partition, self.lane(block, index)))
                    if first is not None and block.entries[index] > first:
                        self._close(block, index, STALE)

    def rewound(self, spans: Iterable[Span]) -> list[Span]:
        """The nack was answered: what comes now counts, unless another of its lane is under way.

        Returns what was withheld, to be given back: if it is void, the worker says so and nothing happens.
        """
        withheld: list[Span] = []
        if self._rewinding:
            for block, start, stop in spans:
                for index in range(start, stop):
                    place = block.partition, self.lane(block, index)
                    nacks = self._rewinding.get(place, {})
                    if nacks.pop((block, index), None) is not None and not nacks:
                        del self._rewinding[place]
                        withheld += self._withheld.pop(place, ())
        return [span for span in withheld if span[0].states[span[1]] == SETTLING]
