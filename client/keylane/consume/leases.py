"""What a consumer holds: its blocks, when leases end, and which messages a rewind takes along."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from time import monotonic

from keylane.consume.block import BUFFERED, HANDED, SETTLED, SETTLING, STALE, Block
from keylane.errors import StaleReceipt
from keylane.threads import native_lock
from keylane.wire import Type

Part = tuple[Block, int, int]  # block, first index, index behind the last
_LANES = 1_000  # that are remembered without a need
_SLACK = 1.0  # seconds that clocks may differ by


class _Listing:
    """What a worker is listing of what was held when it took partitions over."""

    __slots__ = ("before", "left", "places", "seen")

    def __init__(self, before: list[Block], left: int | None) -> None:
        self.before = before
        self.left = left  # messages that are still to be listed
        self.seen: set[tuple[Block, int]] = set()  # those of ours that were
        self.places: dict[tuple[int, int], list[tuple[Block, int]]] = {}  # by partition and entry
        for block in before:
            self.note(block)

    def note(self, block: Block) -> None:
        """We have this: it may be listed."""
        for index, entry in enumerate(block.entries):
            self.places.setdefault((block.partition, entry), []).append((block, index))


class Held:
    """The leases of one consumer.

    `credit` gives a partition's permits back where nothing is to be settled, at most once; `give_back` nacks.
    """

    def __init__(self, credit: Callable[[int, int], None], give_back: Callable[[list[Part]], object]) -> None:
        self.mode = "shared"
        self.lease = 30.0  # seconds
        self.blocks: dict[Block, None] = {}  # those with a message that is neither settled nor stale
        self.active = monotonic()  # when the application last took or settled something
        self.paused = False  # nothing is to be handed out
        self._lock = native_lock()  # over what is not handed out: other threads may take it
        self.credit = credit
        self._give_back = give_back
        self._in_order: dict[int, dict[int, Block]] = {}  # partition -> entry -> its newest block, in lanes
        self._overlaid: dict[Block, None] = {}  # those of which something has come again
        self._listings: dict[int, _Listing] = {}  # by partition
        self._foreseen: dict[int, list[Block]] = {}  # what we had there, or got, since we asked to be let in
        self._lanes: dict[int, dict[str, float]] = {}  # partition -> lane -> deadline, where it has moved
        self._many: dict[int, int] = {}  # partition -> lanes, to look whether they are too many
        self._extended: dict[
            tuple[int, str], float
        ] = {}  # lanes that were given more than a lease -> until when
        # Lanes being nacked -> the nacks that are not answered, each with its entry.
        self._rewinding: dict[tuple[int, str], dict[tuple[Block, int], int]] = {}

    def lane(self, block: Block, index: int) -> str:
        """As in receipts: "" where there is no order, "=" for a whole partition, "=" and the key."""
        if self.mode == "shared":
            return ""
        if self.mode == "key_shared":
            key = block.texts[index * 3]
            return "=" + key if key else ""
        return "="

    def deadline(self, block: Block, index: int) -> float:
        """When the message's lease ends, by time.monotonic."""
        lane = self.lane(block, index)
        if not lane:
            return block.deadlines.get(index, block.deadline)
        own = block.lane_deadlines.get(lane, block.deadline)
        moved = self._lanes.get(block.partition, {}).get(lane, 0.0)
        return max(own, moved, self._extended.get((block.partition, lane), 0.0) if self._extended else 0.0)

    def perhaps(self, block: Block, index: int) -> str:
        """What else may be true of a lease that has ended."""
        return "; or this was done before, and the answer was lost" if index in block.doubtful else ""

    def check(self, block: Block, index: int, under_way: int | None = None) -> None:
        """Raise StaleReceipt unless the application has the message and its lease goes on."""
        state = block.states[index]
        if state == HANDED:
            now = monotonic()
            if now < block.soonest or now < self.deadline(block, index):
                return
            late = now - self.deadline(block, index)
            self.lapse(block, index)
            why = f"its lease ended {late:.1f} s ago, and it will be delivered again"
            why += self.perhaps(block, index)
        elif state == SETTLING:
            how = "acked" if under_way == Type.ACK else "nacked" if under_way == Type.NACK else "settled"
            why = f"it is being {how} already"
        elif state == SETTLED:
            why = "it has been settled already"
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
            if now >= block.soonest and now >= self.deadline(block, index):
                return False
            # Its time first: the loop looks at any moment, and a signal may end this at any.
            block.taken[index] = self.active = now
            block.states[index] = HANDED
        return True

    def withdraw(self, parts: Iterable[Part] | None = None) -> list[Part]:
        """Those messages, or all, that the application does not have in its hands: they are to go back."""
        if parts is None:
            parts = [(block, 0, len(block)) for block in self.blocks]
        withdrawn: list[Part] = []
        with self._lock:
            for block, start, stop in parts:
                for index in range(start, stop):
                    if block.states[index] != BUFFERED:
                        continue
                    block.states[index] = SETTLING
                    if withdrawn and withdrawn[-1][0] is block and withdrawn[-1][2] == index:
                        withdrawn[-1] = (block, withdrawn[-1][1], index + 1)
                    else:
                        withdrawn.append((block, index, index + 1))
        return withdrawn

    # Taking in

    def add(self, block: Block) -> None:
        """A block has come; what follows a nack that is under way is void."""
        if self.mode != "shared":
            self._forget_older(block)
            if self._extended:
                self._begin_lanes(block)
        if block.open:
            self.blocks[block] = None
            if self.mode != "shared":
                places = self._in_order.setdefault(block.partition, {})
                places.update(dict.fromkeys(block.entries, block))
        if self._rewinding:
            self._void_rewound(block)
        # The worker has looked already at what it is about to list: this may be in it.
        if (foreseen := self._foreseen.get(block.partition)) is not None:
            foreseen.append(block)
        listing = self._listings.get(block.partition)
        if listing is not None and listing.left is not None:
            listing.note(block)

    @contextmanager
    def foreseeing(self, partitions: Collection[int]) -> Iterator[None]:
        """A worker is asked for a new session: what is settled from now on it may have listed before."""
        before = [block for partition in partitions for block in self._foreseen.get(partition, ())]
        blocks = list(dict.fromkeys((*before, *self.blocks)))
        blocks = [block for block in blocks if block.partition in partitions]
        self._foreseen.update(dict.fromkeys(partitions, blocks))
        try:
            yield
        finally:
            for partition in partitions:
                if self._foreseen.get(partition) is blocks:
                    del self._foreseen[partition]

    def reopen(self, partitions: Collection[int], listed: int | None) -> None:
        """They have a new session: so many of the messages held will be listed, and the rest is void."""
        for block in self.blocks:  # of what is being settled nobody can tell any more whether it was
            if block.partition in partitions:
                block.ended.update(index for index, state in enumerate(block.states) if state == SETTLING)
        foreseen = [block for partition in partitions for block in self._foreseen.pop(partition, ())]
        both = dict.fromkeys((*foreseen, *self.blocks))
        listing = _Listing([block for block in both if block.partition in partitions], listed)
        self._listings.update(dict.fromkeys(partitions, listing))
        if listed == 0:
            self._void_unlisted(listing)

    def keep(self, block: Block) -> None:
        """A block lists what is held, perhaps delivered before: what we have stays as it is."""
        listing = self._listings.get(block.partition)
        if (
            listing is None or listing.left is None
        ):  # nobody has said that it comes: what we have may be newer
            before = dict.fromkeys((*(listing.before if listing else ()), *self.blocks))
            listing = _Listing(list(before), None)
        for index, entry in enumerate(block.entries):
            for old, at in listing.places.get((block.partition, entry), ()):
                if old.token == block.token:
                    self._keep_one(listing, old, at, block, index)
                elif old.token < block.token:
                    self._outdate(old, at)
        self.add(block)
        if self.mode != "shared" and len(block):
            self.extend_lanes([(block, 0, len(block))], block.deadline)  # as the broker knows it
        if listing.left is not None:
            listing.left -= len(block)
            if listing.left <= 0:
                self._void_unlisted(listing)

    def _keep_one(self, listing: _Listing, old: Block, at: int, block: Block, index: int) -> None:
        """A message is listed that we have: it stays where it is."""
        if old.states[at] == STALE:
            return
        listing.seen.add((old, at))
        if old.states[at] == SETTLED:
            pass  # after the worker had looked
        elif self.lane(old, at):
            self.restart([(old, at, at + 1)], self.deadline(block, index))
        else:
            self.extend_one(old, at, block.deadline)
        self._close(block, index, SETTLED)

    def _void_unlisted(self, listing: _Listing) -> None:
        """What the broker does not list went to others while we were away."""
        listing.left = None
        for old in listing.before:
            for index, state in enumerate(old.states):
                if state <= HANDED and (old, index) not in listing.seen:
                    self._close(old, index, STALE)

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
                        self._outdate(old, index)

    def _outdate(self, old: Block, index: int) -> None:
        if old.states[index] <= HANDED:
            self._close(old, index, STALE)

    def _void_rewound(self, block: Block) -> None:
        firsts: dict[str, int] = {}  # lane -> from which entry on it is being nacked
        for index, entry in enumerate(block.entries):
            lane = self.lane(block, index)
            nacks = self._rewinding.get((block.partition, lane)) if lane else None
            if nacks is None:
                continue
            if lane not in firsts:
                firsts[lane] = min(nacks.values())
            if entry <= firsts[lane]:
                if block.states[index] == BUFFERED:  # else it is listed because the nack is still on its way
                    del self._rewinding[block.partition, lane]  # this is what the nacks brought back
            elif block.states[index] == BUFFERED:
                self._close(block, index, STALE)

    # Letting go

    def lapse(self, block: Block, index: int) -> None:
        """The deadline of a message has passed. A lane lives or dies as one: it is given back from there on.

        If the broker has ended the lease too, as it should, it answers that and nothing happens.
        """
        if self.lane(block, index):
            self._give_back([(block, index, index + 1)])
        else:
            self.end(block, index)

    def end(self, block: Block, index: int) -> None:
        """The lease of a message has ended without being settled."""
        self._close(block, index, STALE)

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
        """The broker does not know the lease any more."""
        self._close(block, index, STALE)

    def settle_range(self, block: Block, start: int, stop: int) -> None:
        """The broker has settled messages that lie together."""
        block.states[start:stop] = b"\x03" * (stop - start)
        block.open -= stop - start
        if block.bodies:
            for index in range(start, stop):
                block.bodies.pop(index, None)
        if block.open <= 0:
            self._drop(block)

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

    def rewind(self, parts: Iterable[Part]) -> None:
        """Messages are about to be nacked: void the later ones of their lanes."""
        nacked: dict[tuple[int, str], int] = {}
        for block, start, stop in parts:
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

    def rewound(self, parts: Iterable[Part]) -> None:
        """The nack was answered: what comes now counts, unless another of its lane is under way."""
        if self._rewinding:
            for block, start, stop in parts:
                for index in range(start, stop):
                    place = block.partition, self.lane(block, index)
                    nacks = self._rewinding.get(place, {})
                    if nacks.pop((block, index), None) is not None and not nacks:
                        del self._rewinding[place]

    def extend_lanes(self, parts: Iterable[Part], deadline: float) -> None:
        """The lanes of some messages were extended: what is settled in them does not shorten that."""
        parts, now = list(parts), monotonic()
        self.restart(parts, deadline)
        for block, start, stop in parts:
            for lane in {self.lane(block, index) for index in range(start, stop)} - {""}:
                self._extended.pop((block.partition, lane), None)
                if deadline > now + self.lease + _SLACK:
                    self._extended[block.partition, lane] = deadline
        if len(self._extended) > _LANES:
            self._extended = {place: until for place, until in self._extended.items() if until > now}

    def _begin_lanes(self, block: Block) -> None:
        """A lane whose deadline counts from its delivery had ended: with it went what it was given."""
        for index in range(len(block)):
            lane = self.lane(block, index)
            if lane not in block.lane_deadlines:
                self._extended.pop((block.partition, lane), None)

    def restart(self, parts: Iterable[Part], deadline: float) -> None:
        """The lanes of some messages have a new deadline."""
        if self.mode == "shared":
            return
        partition = 0
        for block, start, stop in parts:
            partition = block.partition
            lanes = self._lanes.setdefault(partition, {})
            if self.mode != "key_shared":
                lanes["="] = deadline
            else:
                for key in block.texts[start * 3 : stop * 3 : 3]:
                    if key:
                        lanes["=" + key] = deadline
        count = len(self._lanes.get(partition, ()))
        if count > self._many.get(partition, _LANES):
            self._many[partition] = 2 * sum(block.open for block in self.blocks) + _LANES
            if count > self._many[partition]:
                self._forget_lanes(partition)

    def _forget_lanes(self, partition: int) -> None:
        """Lanes come and go with their keys: keep those of which something is held."""
        held = {self.lane(block, index) for block, index in self.each() if block.partition == partition}
        lanes = self._lanes[partition]
        self._lanes[partition] = {lane: lanes[lane] for lane in held if lane in lanes}

    def runs(self, block: Block, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Cut a part into what one receipt can stand for: consecutive entries of one lane."""
        entries = block.entries
        lane = self.lane(block, start)
        if self.mode != "key_shared" and isinstance(entries, range):
            yield lane, start, stop
            return
        keys = block.texts[start * 3 : stop * 3 : 3] if self.mode == "key_shared" else [""] * (stop - start)
        key = keys[0]
        following = entries[start]
        begin = start
        for index, (own, entry) in enumerate(zip(keys, entries[start:stop], strict=True), start):
            if own != key or entry != following:
                yield lane, begin, index
                begin, key = index, own
                if self.mode == "key_shared":
                    lane = "=" + key if key else ""
            following = entry + 1
        yield lane, begin, stop

    def each(self) -> Iterator[tuple[Block, int]]:
        """Every message that is buffered or with the application."""
        for block in list(self.blocks):
            for index, state in enumerate(block.states):
                if state <= HANDED:
                    yield block, index
