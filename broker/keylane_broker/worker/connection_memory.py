"""How much memory all connections of a worker together may keep busy, and what gives way when they do."""

import asyncio
import logging
from collections.abc import Collection
from typing import Protocol

from keylane import wire
from keylane_broker.config import Settings
from keylane_broker.counters import Counters

log = logging.getLogger("keylane.broker")


class MemoryUser(Protocol):
    """A connection, as far as its share of memory is concerned."""

    peer: str
    unsent: int  # bytes that wait for it to read,
    read_at: float  # which it was last seen to do then, by the loop's clock

    @property
    def waiting(self) -> int:
        """Bytes of a frame whose end has not come yet."""

    def measure(self) -> None:
        """Look at what waits to be sent."""

    def regulate(self) -> None:
        """Listen only while there is room for what the client may ask."""

    def send(self, properties: wire.Properties, sequence: int = 0, body: bytes = b"") -> None:
        """Send a frame."""

    def close(self) -> None:
        """Close when what was sent before has gone out."""

    def abort(self) -> None:
        """Close at once."""


class ConnectionMemory:
    """Bytes that the connections of a worker keep busy, which each of them counts here."""

    def __init__(self, settings: Settings, connections: Collection[MemoryUser], counters: Counters) -> None:
        self.inflight = 0  # bytes of publishes under way
        self.buffered = 0  # bytes of frames that are not complete yet
        self.unsent = 0  # bytes that wait for clients to read, at most
        self.paused: set[MemoryUser] = set()  # not listened to until there is room for publishes
        self._connections = connections
        self._counters = counters
        self.max_inflight = int(settings.max_inflight_bytes)  # and the same again for unfinished frames
        self.max_unsent = int(settings.max_unsent_bytes)

    @property
    def over_limit(self) -> bool:
        """Whether more publishes wait for Redis than memory is set aside for."""
        return self.inflight > self.max_inflight

    def listen_again(self) -> None:
        """Listen again to those that were held back, if there is room again."""
        if self.paused and not self.over_limit:
            for connection in list(self.paused):
                connection.regulate()

    def close_largest_frame(self) -> None:
        """Close the connection that keeps most memory busy with a frame that does not end."""
        largest = max(self._connections, key=lambda connection: connection.waiting)
        log.warning("closing %s: %d bytes of an unfinished frame", largest.peer, largest.waiting)
        self._counters.drops["unfinished_frame"] += 1
        largest.send(wire.Error("overloaded", "too many unfinished frames; send this one again later"))
        largest.close()

    def close_slow_readers(self) -> None:
        """Close the connections that most waits for longest, if it is too much for all of them together.

        Who reads may just have been sent more than any of those that do not.
        """
        for connection in self._connections:
            connection.measure()
        now = asyncio.get_running_loop().time()
        while self.unsent > self.max_unsent:
            slowest = max(
                self._connections,
                key=lambda connection: (connection.unsent * (now - connection.read_at), connection.unsent),
                default=None,
            )
            if slowest is None or not slowest.unsent:
                return  # it waits for such as were not let in, and end by themselves
            log.warning("closing %s: %d bytes wait for it to read", slowest.peer, slowest.unsent)
            self._counters.drops["slow_reader"] += 1
            self.unsent -= slowest.unsent
            slowest.unsent = 0
            slowest.abort()
