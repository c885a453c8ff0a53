"""Partitions that are opened again: which of the messages we have the worker still counts as ours."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from keylane.consume.block import HANDED, SETTLED, SETTLING, STALE, Block
from keylane.consume.leases import Leases


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


class Reopening:
    """Compares what a worker lists when it takes partitions over with what a consumer has of them."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._listings: dict[int, _Listing] = {}  # by partition
        self._foreseen: dict[int, list[Block]] = {}  # what we had there, or got, since we asked to be let in

    def note(self, block: Block) -> None:
        """A block has come: the worker has looked already at what it is about to list, this may be in it."""
        if (foreseen := self._foreseen.get(block.partition)) is not None:
            foreseen.append(block)
        listing = self._listings.get(block.partition)
        if listing is not None and listing.left is not None:
            listing.note(block)

    @contextmanager
    def foreseeing(self, partitions: Collection[int]) -> Iterator[None]:
        """A worker is asked for a new session: what is settled from now on it may have listed before."""
        before = [block for partition in partitions for block in self._foreseen.get(partition, ())]
        blocks = list(dict.fromkeys((*before, *self._leases.blocks)))
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
        for block in self._leases.blocks:  # of what is being settled nobody can tell any more whether it was
            if block.partition in partitions:
                block.ended.update(index for index, state in enumerate(block.states) if state == SETTLING)
        foreseen = [block for partition in partitions for block in self._foreseen.pop(partition, ())]
        both = dict.fromkeys((*foreseen, *self._leases.blocks))
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
            before = dict.fromkeys((*(listing.before if listing else ()), *self._leases.blocks))
            listing = _Listing(list(before), None)
        for index, entry in enumerate(block.entries):
            for old, at in listing.places.get((block.partition, entry), ()):
                if old.token == block.token:
                    self._keep_one(listing, old, at, block, index)
                elif old.token < block.token:
                    self._leases.outdate(old, at)
        self._leases.add(block)
        self.note(block)
        if self._leases.mode != "shared" and len(block):
            self._leases.extend_lanes([(block, 0, len(block))], block.deadline)  # as the broker knows it
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
        elif self._leases.lane(old, at):
            self._leases.restart([(old, at, at + 1)], self._leases.deadline(block, index))
        else:
            self._leases.extend_one(old, at, block.deadline)
        self._leases.settled(block, index)

    def _void_unlisted(self, listing: _Listing) -> None:
        """What the broker does not list went to others while we were away."""
        listing.left = None
        for old in listing.before:
            for index, state in enumerate(old.states):
                if state <= HANDED and (old, index) not in listing.seen:
                    self._leases.stale(old, index)
