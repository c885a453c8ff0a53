"""The way to the worker that has a partition, which may be another one from one moment to the next."""

from collections.abc import Callable

from keylane.connect.connection import Connection, Redirected
from keylane.connect.partition_map import TopicMap
from keylane.errors import (
    BacklogFull,
    BrokerError,
    ConnectionClosed,
    DurabilityNotReached,
    Overloaded,
    Unavailable,
)

_RIGHT_PLACE = Overloaded | BacklogFull | DurabilityNotReached  # said by the worker that has the partition


class Route:
    """Who has a partition, as the topic's map says; `on_moved` hears when that is another worker."""

    def __init__(self, known: TopicMap, partition: int, on_moved: Callable[[Redirected], None]) -> None:
        self.peer = known.owner(partition)
        self._map = known
        self._partition = partition
        self._on_moved = on_moved
        known.watchers[self._look] = None

    @property
    def connection(self) -> Connection | None:
        """The connection to that worker, if there is one."""
        return self.peer.current if self.peer is not None else None

    @property
    def max_frame(self) -> int:
        """The bytes that workers take in a frame."""
        return self._map.max_frame

    def error(self) -> BrokerError:
        """Return why there is no connection."""
        if self.peer is None:
            return Unavailable(f"no worker serves partition {self._partition} of {self._map.topic!r} yet")
        return self.peer.error or ConnectionClosed(f"no connection to the worker at {self.peer.address}")

    async def find(self, error: BrokerError | None) -> None:
        """Find out who has the partition, after an error."""
        if isinstance(error, Redirected) and error.address and self._map.owners:
            if self.peer is None or self.peer.address != error.address:
                self._map.redirected(self._partition, error.address)
                self._map.renew()
        elif self.peer is None or not isinstance(error, _RIGHT_PLACE):
            await self._map.refresh()

    def close(self) -> None:
        """Hear nothing more of the map."""
        self._map.watchers.pop(self._look, None)

    def _look(self) -> None:
        peer = self._map.owner(self._partition)
        if peer is not self.peer:
            self.peer = peer
            address = peer.address if peer is not None else ""
            self._on_moved(Redirected(self._map.topic, self._partition, address))
