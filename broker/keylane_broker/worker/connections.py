"""The connections of a worker: who may connect, who has been silent for too long, who hears of moves."""

import logging
from collections.abc import Container
from typing import Protocol

from keylane import wire
from keylane.errors import BrokerError, Overloaded, Unavailable
from keylane_broker.config import Settings
from keylane_broker.worker.background import Background
from keylane_broker.worker.connection_memory import ConnectionMemory, MemoryUser

log = logging.getLogger("keylane.broker")


class Connected(MemoryUser, Protocol):
    """A connection, as its worker sees it."""

    greeted: bool
    topics: set[str]
    store: str

    @property
    def alive(self) -> bool:
        """Whether anything that is sent can still arrive."""

    def uses(self, topic: str) -> bool:
        """Whether the client has to do with a topic."""

    def silent_since(self, instant: float) -> bool:
        """Whether nothing has come since then."""

    def stop_waiting(self) -> None:
        """Let requests go on that wait until the client reads."""


class Connections:
    """All connections of a worker."""

    def __init__(self, settings: Settings, background: Background) -> None:
        self.all: set[Connected] = set()
        self.memory = ConnectionMemory(settings, self.all)
        self._background = background
        self._most = settings.max_connections

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
        self.memory.paused.discard(connection)

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
