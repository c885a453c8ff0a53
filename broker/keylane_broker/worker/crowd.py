"""The consumers of one subscription on one worker, by how much room they have."""

from collections.abc import Container
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keylane_broker.worker.consumer import Consumer

_SLACK = 64  # outdated places that are not worth clearing away


class Crowd:
    """Finds the roomiest of many without looking at all of them; those with the same room take turns.

    A consumer has one place in the heap, or none while it has no room. Where its room has shrunk, that is
    put right when it is met; where it has grown, it takes another place, and the one before counts no more.
    """

    def __init__(self) -> None:
        self.members: set[Consumer] = set()
        self._heap: list[tuple[int, int, Consumer]] = []  # spare capacity, negative; turn
        self._turns = 0

    def add(self, consumer: "Consumer") -> None:
        """One more."""
        self.members.add(consumer)
        self.place(consumer)

    def remove(self, consumer: "Consumer") -> None:
        """One less."""
        self.members.discard(consumer)
        consumer.place = None

    def place(self, consumer: "Consumer") -> None:
        """Put a consumer behind those that have as much room."""
        self._turns += 1
        consumer.place = (-consumer.spare, self._turns)
        heappush(self._heap, (*consumer.place, consumer))
        if len(self._heap) > 2 * len(self.members) + _SLACK:
            self._heap = [(*member.place, member) for member in self.members if member.place]
            heapify(self._heap)

    def has_grown(self, consumer: "Consumer") -> None:
        """A consumer has more room than before, perhaps."""
        place = consumer.place
        if consumer in self.members and (place is None or consumer.spare > -place[0]):
            self.place(consumer)

    def roomiest(self, most: int, among: Container[str]) -> list["Consumer"]:
        """Those with the most room, of some names; all stay where they are."""
        found: list[Consumer] = []
        met: list[tuple[int, int, Consumer]] = []
        while self._heap and len(found) < most:
            entry = heappop(self._heap)
            consumer = entry[2]
            if consumer.place != entry[:2]:
                continue
            if consumer.has_room and -entry[0] != consumer.spare:
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
