"""The connections of a worker: who may connect, who has been silent for too long, who hears of moves."""

import logging
from collections.abc import Container
from typing import Protocol

from keylane import wire
from keylane.errors import BrokerError, Overloaded, Unauthorized, Unavailable
from keylane_broker.access.control import AccessControl
from keylane_broker.access.identity import Identity
from keylane_broker.config import Settings
from keylane_broker.counters import Counters
from keylane_broker.worker.background import Background
from keylane_broker.worker.connection_memory import ConnectionMemory, MemoryUser

log = logging.getLogger("keylane.broker")


class Connected(MemoryUser, Protocol):
    """A connection, as its worker sees it."""

    greeted: bool
    identity: Identity
    topics: set[str]
    store: str

    @property
    def alive(self) -> bool:
        """Whether anything that is sent can still arrive."""

    def may_use(self, topic: str) -> bool:
        """Whether the client may have to do with a topic."""

    def uses(self, topic: str) -> bool:
        """Whether the client has to do with a topic."""

    def silent_since(self, instant: float) -> bool:
        """Whether nothing has come since then."""

    def close(self) -> None:
        """Close when what was sent before has gone out."""

    def stop_waiting(self) -> None:
        """Let requests go on that wait until the client reads."""


class Connections:
    """All connections of a worker."""

    def __init__(self, settings: Settings, background: Background, counters: Counters) -> None:
        self.all: set[Connected] = set()
        self.memory = ConnectionMemory(settings, self.all, counters)
        self._counters = counters
        self._background = background
        self._most = settings.max_connections

    def add(self, connection: Connected) -> BrokerError | None:
        """Know a new connection, or say why it cannot be."""
        if self._background.stopping:
            return Unavailable("the worker is stopping")
        self._counters.connections += 1
        if len(self.all) >= self._most:
            self._counters.drops["refused"] += 1
            return Overloaded(
                f"the worker has {len(self.all)} connections, the maximum (max_connections)", retry_after=1.0
            )
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

    def check_access(self, access: AccessControl) -> None:
        """Close those whose tokens were revoked, or have expired."""
        for connection in list(self.all):
            if connection.greeted:
                try:
                    access.check(connection.identity)
                except Unauthorized as error:
                    log.info("%s goes: %s", connection.peer, error)
                    self._counters.drops["token"] += 1
                    connection.send(wire.Error(error.code, str(error)))
                    connection.close()

    def check_heartbeats(self, silent: float) -> None:
        """Ask every client for a sign of life, and close those that gave none since that instant."""
        for connection in list(self.all):
            if connection.silent_since(silent):
                log.info("%s has been silent for too long", connection.peer)
                self._counters.drops["silent"] += 1
                connection.abort()
            elif connection.greeted:
                connection.send(wire.Heartbeat())
