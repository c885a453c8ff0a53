"""The connections of a worker, and how much memory all of them together may keep busy."""

import logging
from collections.abc import Container
from typing import Protocol

from keylane import wire
from keylane.errors import BrokerError, Overloaded, Unavailable
from keylane_broker.config import Settings
from keylane_broker.worker.background import Background

log = logging.getLogger("keylane.broker")


class Connected(Protocol):
    """A connection, as far as its share of memory is concerned."""

    peer: str
    greeted: bool
    topics: set[str]
    unsent: int
    store: str

    @property
    def alive(self) -> bool:
        """Whether anything that is sent can still arrive."""

    @property
    def waiting(self) -> int:
        """Bytes of a frame whose end has not come yet."""

    def uses(self, topic: str) -> bool:
        """Whether the client has to do with a topic."""

    def silent_since(self, instant: float) -> bool:
        """Whether nothing has come since then."""

    def measure(self) -> None:
        """Look at what waits to be sent."""

    def regulate(self) -> None:
        """Listen only while there is room for what the client may ask."""

    def send(self, properties: wire.Properties, sequence: int = 0, body: bytes = b"") -> None:
        """Send a frame."""

    def stop_waiting(self) -> None:
        """Let requests go on that wait until the client reads."""

    def close(self) -> None:
        """Close when what was sent before has gone out."""

    def abort(self) -> None:
        """Close at once."""


class Connections:
    """All connections of a worker."""

    def __init__(self, settings: Settings, background: Background) -> None:
        self.all: set[Connected] = set()
        self.inflight = 0  # bytes of publishes under way
        self.buffered = 0  # bytes of frames that are not complete yet
        self.unsent = 0  # bytes that wait for clients to read, at most
        self.paused: set[Connected] = set()  # not listened to for now
        self._background = background
        self._most = settings.max_connections
        self.max_inflight = int(settings.max_inflight_bytes)  # and the same again for unfinished frames
        self.max_unsent = int(settings.max_unsent_bytes)

    def add(self, connection: Connected) -> BrokerError | None:
        """Know a new connection, or say why it cannot be."""
        if self._background.stopping:
            return Unavailable("the worker is stopping")
        if len(self.all) >= self._most:
            return Overloaded(f"the worker has {len(self.all)} connections, as many as it may have")
        self.all.add(connection)
        return None

    def remove(self, connection: Connected) -> None:
        """Forget one that has ended."""
        self.all.discard(connection)
        self.paused.discard(connection)

    def tell_moved(self, moved: set[str], known: Container[str]) -> None:
        """Tell those who have a topic's map that it has changed; one that is not known any more is gone."""
        for topic in moved:
            for connection in self.all:
                if topic in connection.topics:
                    connection.send(wire.Moved(topic))
                    if topic not in known:
                        connection.topics.discard(topic)

    def check_heartbeats(self, silent: float) -> None:
        """Ask every client for a sign of life, and close those that gave none since that instant."""
        for connection in list(self.all):
            if connection.silent_since(silent):
                log.info("%s has been silent for too long", connection.peer)
                connection.abort()
            elif connection.greeted:
                connection.send(wire.Heartbeat())

    # Memory

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
        largest = max(self.all, key=lambda connection: connection.waiting)
        log.warning("closing %s: %d bytes of an unfinished frame", largest.peer, largest.waiting)
        largest.send(wire.Error("overloaded", "too many unfinished frames; send this one again later"))
        largest.close()

    def close_slow_readers(self) -> None:
        """Close the connections that most waits for, if it is too much for all of them together."""
        for connection in self.all:
            connection.measure()
        while self.unsent > self.max_unsent:
            slowest = max(self.all, key=lambda connection: connection.unsent, default=None)
            if slowest is None or not slowest.unsent:
                return  # it waits for such as were not let in, and end by themselves
            log.warning("closing %s: %d bytes wait for it to read", slowest.peer, slowest.unsent)
            self.unsent -= slowest.unsent
            slowest.unsent = 0
            slowest.abort()
