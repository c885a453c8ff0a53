"""The consumers of one subscription on one worker, by how much room they have."""

from collections.abc import Container
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

_SLACK = 64  # outdated places that are not worth clearing away


class Member(Protocol):
    """A consumer, as far as a crowd looks at it."""

    place: tuple[int, int] | None  # in the crowd

    @property
    def name(self) -> str:
        """What there is only one of."""

    @property
    def headroom(self) -> int:
        """How many more messages it could hold."""

    @property
    def has_room(self) -> bool:
        """Whether it can be given any now."""


M = TypeVar("M", bound=Member)


class Crowd(Generic[M]):
    """Finds the roomiest of many without looking at all of them; those with the same room take turns.

    A consumer has one place in the heap, or none while it has no room. Where its room has shrunk, that is
    put right when it is met; where it has grown, it takes another place, and the one before counts no more.
    """

    def __init__(self) -> None:
        self.members: dict[str, M] = {}  # by name
        self._heap: list[tuple[int, int, M]] = []  # headroom, negative; turn
        self._turns = 0

    def add(self, consumer: M) -> None:
        """Add one more, or another one of a name."""
        self.members[consumer.name] = consumer
        self.place(consumer)

    def remove(self, consumer: M) -> None:
        """Take one out."""
        if self.members.get(consumer.name) is consumer:
            del self.members[consumer.name]
        consumer.place = None

    def place(self, consumer: M) -> None:
        """Put a consumer behind those that have as much room."""
        self._turns += 1
        consumer.place = (-consumer.headroom, self._turns)
        heappush(self._heap, (*consumer.place, consumer))
        if len(self._heap) > 2 * len(self.members) + _SLACK:
            self._heap = [(*member.place, member) for member in self.members.values() if member.place]
            heapify(self._heap)

    def has_grown(self, consumer: M) -> None:
        """A consumer has more room than before, perhaps."""
        place = consumer.place
        if self.members.get(consumer.name) is consumer and (place is None or consumer.headroom > -place[0]):
            self.place(consumer)

    def roomiest(self, most: int, among: Container[str]) -> list[M]:
        """Return those with the most room, of some names; all stay where they are."""
        found: list[M] = []
        met: list[tuple[int, int, M]] = []
        while self._heap and len(found) < most:
            entry = heappop(self._heap)
            consumer = entry[2]
            if consumer.place != entry[:2]:
                continue
            if consumer.has_room and -entry[0] != consumer.headroom:
                self.place(consumer)
                continue
            if not consumer.has_room:
                consumer.place = None
                continue
            met.append(entry)
            if consumer.name in among:
                found.append(consumer)
        for entry in met:
            heappush(self._heap, entry)
        return found

    @property
    def size(self) -> int:
        """How many have room, at most."""
        return min(len(self._heap), len(self.members))
