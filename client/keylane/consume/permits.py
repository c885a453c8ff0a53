"""A consumer's permits, split over the workers that serve it: never more out than there are in all."""

from collections.abc import Collection, Mapping
from typing import Generic, Protocol, TypeVar

from keylane.tasks import Tasks


class Holder(Protocol):
    """A worker's side of the consumer, as far as permits go."""

    def grant(self, limit: int) -> None:
        """Let it have so many out."""

    async def lower(self, limit: int) -> None:
        """Let it have no more than so many out, and wait until that is so, or it has ended."""


H = TypeVar("H", bound=Holder)


class _Transit:
    """Permits that stand for what is held of partitions that nobody serves right now."""

    def __init__(self, partitions: Collection[int], permits: int) -> None:
        self.partitions = set(partitions)
        self.permits = permits


class _Lowering:
    """A holder is being lowered."""

    def __init__(self, limit: int, turn: bool) -> None:
        self.limit = limit  # to which
        self.turn = turn  # whether that is for the sake of one in the queue


class Permits(Generic[H]):
    """Splits permits by the number of partitions; first some are lowered, then others are raised.

    Messages that are held when their partition moves take their permits along: to whoever opens it next.

    With fewer permits than workers some have none. Who says that it has messages queues up, and whatever
    permit is free next goes to the first in the queue: so all are served in turn.
    """

    def __init__(self, total: int, tasks: Tasks) -> None:
        self._total = total
        self._tasks = tasks
        self._aims: dict[H, int] = {}
        self._limits: dict[H, int] = {}  # what each may have out, as far as it has not said otherwise
        self._transits: list[_Transit] = []
        self._lowering: dict[H, _Lowering] = {}
        self._queue: dict[H, None] = {}
        self._scarce = False  # there are fewer permits than holders

    def share(self, weights: Mapping[H, int]) -> None:
        """These are the holders now, with so many partitions each."""
        for gone in [holder for holder in self._limits if holder not in weights]:
            del self._limits[gone]
            self._lowering.pop(gone, None)
            self._queue.pop(gone, None)
        for holder in weights:
            self._limits.setdefault(holder, 0)
        self._aims = split(self._total, weights, self._limits)
        self._scarce = self._total < sum(1 for weight in weights.values() if weight)
        self._balance()

    def offer(self, held: Mapping[H, int], more: int) -> None:
        """Let each holder have what is held of it out, and as many more: nobody knows who has some.

        So more may come than one wants; of fewer than before, what is out stays out.
        """
        self._aims = {holder: held.get(holder, 0) + more for holder in self._limits}
        self._total = sum(self._aims.values())
        self._scarce = False
        for holder, aim in self._aims.items():
            if by := aim - self._limits[holder]:
                self._change(holder, by)

    def departed(self, holder: H, partitions: Collection[int], permits: int) -> None:
        """Partitions have left a holder, and with them the permits of what is held of them."""
        permits = min(permits, self._limits.get(holder, 0))
        if permits:
            self._transits.append(_Transit(partitions, permits))
            self._change(holder, -permits)

    def repeat(self, holder: H) -> None:
        """What a holder knows of its limit may be less than it is."""
        self._change(holder, 0)

    def _change(self, holder: H, by: int) -> None:
        """Another limit, also for one that is being lowered; said in any case, as it may cross another."""
        if holder not in self._limits:
            return
        limit = self._limits[holder] = self._limits[holder] + by
        if lowering := self._lowering.get(holder):
            limit = lowering.limit = max(0, min(lowering.limit, limit) if by < 0 else lowering.limit + by)
        holder.grant(limit)

    def lost(self, holder: H, partitions: Collection[int]) -> None:
        """A holder has lost its connection: how much is out there is known when all is open elsewhere."""
        if holder in self._limits:
            self._lowering.pop(holder, None)
            self._transits.append(_Transit(partitions, self._limits[holder]))
            self._limits[holder] = 0
            holder.grant(0)

    def take_along(self, holder: H, partitions: Collection[int]) -> None:
        """A holder is about to open, with a new limit, partitions that were lost together."""
        for transit in self._transits:
            if holder in self._limits and transit.partitions <= set(partitions):
                self._grant(holder, self._limits[holder] + transit.permits)
                transit.permits = 0

    def opened(self, holder: H, partitions: Collection[int], held: int) -> None:
        """A holder has opened partitions, and counts so many messages that are held already."""
        brought = 0
        for transit in self._transits:
            if not transit.partitions.isdisjoint(partitions):
                transit.partitions.difference_update(partitions)
                taken = min(held - brought, transit.permits)
                transit.permits -= taken
                brought += taken
        self._transits = [transit for transit in self._transits if transit.partitions]
        if brought:
            self._change(holder, brought)
        self._balance()

    def wanted(self, holder: H) -> None:
        """It has no permits, and messages that wait for some; it says so once."""
        if self._limits.get(holder) == 0 or holder in self._lowering:
            self._queue[holder] = None
            self._balance()

    def _balance(self) -> None:
        free = self._total - sum(self._limits.values()) - sum(transit.permits for transit in self._transits)
        if self._scarce:
            for first in [holder for holder in self._queue if holder not in self._lowering][: max(free, 0)]:
                del self._queue[first]
                if self._limits[first] == 0:
                    self._aims[first] = max(self._aims[first], 1)
                    self._grant(first, 1)
                    free -= 1
        for holder, aim in self._aims.items():
            missing = min(free, aim - self._limits[holder])
            if missing > 0 and holder not in self._lowering:
                self._grant(holder, self._limits[holder] + missing)
                self._queue.pop(holder, None)
                free -= missing
        for holder, limit in self._limits.items():
            if holder not in self._lowering:
                if limit > self._aims[holder]:
                    self._lower(holder, self._aims[holder], turn=False)
                elif limit and self._queue and self._scarce:
                    self._lower(holder, limit - 1, turn=True)

    def _grant(self, holder: H, limit: int) -> None:
        self._limits[holder] = limit
        holder.grant(limit)

    def _lower(self, holder: H, limit: int, turn: bool) -> None:
        lowering = self._lowering[holder] = _Lowering(limit, turn)
        self._tasks.start(self._lowered(holder, lowering))

    async def _lowered(self, holder: H, lowering: _Lowering) -> None:
        await holder.lower(lowering.limit)
        if self._lowering.get(holder) is lowering:
            del self._lowering[holder]
            self._limits[holder] = lowering.limit
            if lowering.turn and self._scarce:  # unless who wanted it has got another meanwhile
                self._aims[holder] = lowering.limit if self._queue else lowering.limit + 1
            self._balance()


def split(total: int, weights: Mapping[H, int], limits: Mapping[H, int]) -> dict[H, int]:
    """Shares by weight, by largest remainder: at least one for each that has a weight, if there are enough.

    If not, those keep their permit that have one.

        >>> split(10, {"a": 3, "b": 1, "c": 0}, {})
        {'a': 7, 'b': 3, 'c': 0}
    """
    shares = dict.fromkeys(weights, 0)
    some = [holder for holder, weight in weights.items() if weight]
    if total <= len(some):
        some.sort(key=lambda holder: not limits.get(holder))
        shares.update(dict.fromkeys(some[:total], 1))
        return shares
    whole, rest = sum(weights.values()), total - len(some)
    for holder in some:
        shares[holder] = 1 + rest * weights[holder] // whole
    left = total - sum(shares.values())
    for holder in sorted(some, key=lambda holder: -(rest * weights[holder] % whole))[:left]:
        shares[holder] += 1
    return shares
