"""The publishes of one connection, on their way to the partitions, and where they must come again.

When one is refused that is to be tried again, what the connection publishes behind it to the same partition
is refused, too, until it says `again`: so nothing overtakes.
"""

import logging
from typing import Protocol

from keylane import wire
from keylane.errors import BrokerError, Fenced, Overloaded, Unavailable
from keylane.wire import Frame
from keylane_broker.access.identity import Identity
from keylane_broker.errors import NotOwner
from keylane_broker.worker.confirmations import Pending, PublishingClient
from keylane_broker.worker.context import Context
from keylane_broker.worker.frame_parts import check_sizes
from keylane_broker.worker.publish_frames import messages_of, numbers_of, publishes_in

log = logging.getLogger("keylane.broker")

_PLACE = 20_000  # bytes that a partition takes which nobody has asked for before
_REFUSED = 10_000  # places whose publishes must come again that are known of one connection


class PublishingConnection(PublishingClient, Protocol):
    """A connection, as far as what it publishes is concerned."""

    identity: Identity
    peer: str
    inflight: int  # bytes of its publishes that are under way

    @property
    def alive(self) -> bool:
        """Whether anything that is sent can still arrive."""

    def send(self, properties: wire.Properties, sequence: int = 0, body: bytes = b"") -> None:
        """Send a frame."""

    def cannot_read(self, error: Exception, sequence: int) -> None:
        """Answer a request that has not begun."""

    def regulate(self) -> None:
        """Listen only while there is room for what the client may ask."""

    def close(self) -> None:
        """Close when what was sent before has gone out."""


class ConnectionPublishes:
    """What one connection publishes."""

    def __init__(self, connection: PublishingConnection, context: Context) -> None:
        self.refused: dict[tuple[str, int], BrokerError] = {}  # where publishes must come again
        self._connection = connection
        self._context = context
        self._memory = context.connections.memory
        self._partitions = context.partitions
        self._counters = context.engine.store.counters

    def begin(self, frame: Frame) -> None:
        """Hand the messages of a PUBLISH to their partition."""
        request = wire.properties_of(frame, wire.Publish)
        self._connection.identity.require("produce", request.topic)
        self._let_publish(request)
        self._store_messages(request, frame.sequence, messages_of(request, frame.body), len(frame.body))
        self._connection.regulate()

    def begin_several(self, frame: Frame) -> int:
        """Take what is as many PUBLISH frames, each of which may fail by itself; returns how many."""
        several = wire.properties_of(frame, wire.Publishes)
        parts = publishes_in(several, frame.sequence)
        sequence, start = frame.sequence, 0
        try:
            self._connection.identity.require("produce", several.topic)
            flat = messages_of(parts[0], frame.body)
            check_sizes(several.sizes, len(flat) // 3)
        except BrokerError as error:
            for place in range(len(parts)):
                self._connection.cannot_read(error, sequence + place)
            return len(parts)
        length = len(frame.body) // len(parts)  # of each, about
        for place, (part, size) in enumerate(zip(parts, several.sizes, strict=True)):
            try:
                self._let_publish(part)
                self._store_messages(part, sequence + place, flat[start * 3 : (start + size) * 3], length)
            except Exception as error:
                self._connection.cannot_read(error, sequence + place)
            start += size
        self._connection.regulate()
        return len(parts)

    def _let_publish(self, request: wire.Publish) -> None:
        """Raise an error where a PUBLISH is refused whatever it brings."""
        place = (request.topic, request.partition)
        if request.again:
            self.refused.pop(place, None)
        elif refusal := self.refused.get(place):
            raise self._refused_still(request, refusal)
        if self._context.background.stopping:
            raise Unavailable("the worker is stopping")

    def _store_messages(self, request: wire.Publish, sequence: int, flat: list[str], size: int) -> None:
        """Hand messages to their partition, which answers."""
        place = (request.topic, request.partition)
        numbered = numbers_of(request, flat)
        partition = self._partitions.by_place.get(place)
        try:
            if partition is None:
                self._partitions.check(*place)
            self._context.rates.take(self._connection.identity, len(flat) // 3)
        except (NotOwner, Overloaded) as error:  # what is behind this one must not overtake it
            self.refuse_next(*place, error)
            raise
        if partition is None:
            partition = self._partitions.get(*place)
            size += _PLACE  # until it is answered: it may be of a topic that is not there
        self._connection.inflight += size
        self._memory.inflight += size
        partition.publish(
            Pending(
                self._connection,
                sequence,
                flat,
                size,
                request.durability,
                request.timeout_ms,
                request.due_ms,
                request.incarnation,
                request.extras,
                numbered,
                self._counters.now(),
            )
        )

    def _refused_still(self, request: wire.Publish, refusal: BrokerError) -> BrokerError:
        """Return why what comes behind a refused publish is refused, too; the partition may have moved on."""
        if not isinstance(refusal, NotOwner):
            return refusal
        self._partitions.check(request.topic, request.partition)  # or its owner of now
        return Fenced(
            f"partition {request.partition} of {request.topic!r} moved away and has come back: send what "
            "was refused once more, in its order, the first frame with `again`"
        )

    def refuse_next(self, topic: str, partition: int, error: Exception) -> None:
        """A PUBLISH is to be tried again: what comes behind it must not overtake it."""
        connection = self._connection
        if isinstance(error, BrokerError):
            error.__cause__ = error.__context__ = None  # whose frames would be kept with it
            self.refused[topic, partition] = error.with_traceback(None)
            if len(self.refused) > _REFUSED and connection.alive:
                log.info("closing %s: publishes to %d partitions must come again", connection.peer, _REFUSED)
                self._counters.drops["refused_publishes"] += 1
                connection.send(
                    wire.Error("overloaded", "too many publishes were refused; send them once more")
                )
                connection.close()
