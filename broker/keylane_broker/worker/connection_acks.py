"""The acks of one connection that are settled with others, and what the client has asked behind them.

Whatever came behind an ack, be it a NACK, an UNSUBSCRIBE or the end of the connection, begins when that is
settled, or is on its way to Redis by itself. Publishes wait for nobody.
"""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from keylane import wire
from keylane.errors import BrokerError
from keylane.wire import Frame, Type
from keylane_broker.engine.bodies import names_within
from keylane_broker.engine.receipts import Receipts
from keylane_broker.engine.turns import SETTLED
from keylane_broker.worker.acks import Ack
from keylane_broker.worker.body_deletion import DeletingClient
from keylane_broker.worker.consumer import Consumer
from keylane_broker.worker.context import Context
from keylane_broker.worker.frame_parts import check_parts, check_sizes
from keylane_broker.worker.request_turns import Asker, Reply, RequestTurns
from keylane_broker.worker.settling import known_bodies, receipts_in, reply_to, settle


class SettlingClient(Asker, DeletingClient, Protocol):
    """A connection, as far as what it settles is concerned."""

    @property
    def streams(self) -> Mapping[int, Consumer]:
        """Its consumers."""

    def settled(self, sequence: int) -> None:
        """Answer an ACK of which nothing was stale."""

    def cannot_read(self, error: Exception, sequence: int) -> None:
        """Answer a request that has not begun."""


class ConnectionAcks:
    """The acks of one connection, and the requests that wait for them."""

    def __init__(self, connection: SettlingClient, context: Context, requests: RequestTurns) -> None:
        self._connection = connection
        self._context = context
        self._requests = requests
        self._gathered = 0  # acks that are to be settled, or are being settled, with others
        self._behind: deque[Frame] = deque()  # that have come behind them, in their order
        self._end: Callable[[], None] | None = None  # and behind all

    def begin(self, frame: Frame) -> None:
        """Begin a request, when nothing is in front of it that it must not overtake."""
        if self._behind or (self._gathered and frame.type != Type.ACK):
            self._behind.append(frame)
            self._count(1)
        else:
            self._begin(frame)

    def begin_several(self, frame: Frame) -> int:
        """Begin as many acks as a frame stands for; returns how many."""
        several = wire.properties_of(frame, wire.Acks)
        columns = (several.streams, several.partitions, several.sizes, several.bodies)
        check_parts(frame.sequence, "streams, partitions, sizes and bodies", *columns)
        try:
            receipts = receipts_in(frame.body).flat
            check_sizes(several.sizes, len(receipts) // 4)
        except BrokerError as error:
            for place in range(len(several.sizes)):
                self._connection.cannot_read(error, frame.sequence + place)
            return len(several.sizes)
        start = 0
        for place, (stream, partition, size, bodies) in enumerate(zip(*columns, strict=True)):
            request, its = wire.Ack(stream, partition, bodies), receipts[start * 4 : (start + size) * 4]
            sequence = frame.sequence + place
            start += size
            if self._behind:  # it waits, too
                self.begin(_frame_of(request, sequence, its))
                continue
            try:
                if not self._gather(sequence, request, partial(Receipts, its)):
                    self._requests.begin(_frame_of(request, sequence, its))
            except Exception as error:
                self._connection.cannot_read(error, sequence)
        return len(several.sizes)

    def end(self, end: Callable[[], None]) -> None:
        """Nothing more comes; `end` is to follow what has come."""
        if self._gathered:
            self._end = end
        else:
            end()

    def _begin(self, frame: Frame) -> None:
        try:
            if frame.type == Type.ACK:
                request = wire.properties_of(frame, wire.Ack)
                if self._gather(frame.sequence, request, partial(receipts_in, frame.body)):
                    return
            self._requests.begin(frame)
        except BrokerError as error:
            self._connection.refuse(error, frame.sequence)

    def _gather(self, sequence: int, request: wire.Ack, receipts: Callable[[], Receipts]) -> bool:
        """Settle what was leased, with others if possible; returns False where more is to be looked at."""
        consumer = self._connection.streams.get(request.stream)
        if consumer is None or request.partition not in consumer.partitions or known_bodies(request) is None:
            return False
        partition = self._context.partitions.by_place.get((consumer.topic, request.partition))
        dispatcher = partition and partition.dispatchers.get(consumer.subscription)
        if not partition or not dispatcher or self._context.background.stopping:
            return False
        ack = Ack(self, sequence, request, consumer, receipts())
        fits = ack.receipts.messages <= SETTLED and partition.held_lease(consumer.incarnation) is not None
        if fits and dispatcher.acks.add(ack):
            self._gathered += 1
            self._count(1)
        else:
            self._requests.start(ack.sequence, partial(self._settle, ack))
        return True

    # What becomes of them

    def acked(self, ack: Ack, record: str, *, alone: bool) -> None:
        """Answer an ACK; `record` is that of bodies to be deleted, all its own where it is alone."""
        if record:  # whoever closes when that is answered has heard what to delete
            names = names_within(ack.bodies, ack.receipts.ranges) if alone else []
            self._context.bodies.recorded(self._connection, ack.place, record, names)
        self._connection.settled(ack.sequence)
        self._done()

    def ack_failed(self, ack: Ack, error: Exception) -> None:
        """Answer an ACK."""
        self._connection.refuse(error, ack.sequence)
        self._done()

    def ack_by_itself(self, ack: Ack) -> None:
        """Settle it by the script that knows every case, whatever has become of its consumer."""
        self._requests.start(ack.sequence, partial(self._settle, ack))
        self._done()

    async def _settle(self, ack: Ack) -> Reply:
        return reply_to(
            await settle(self._context, self._connection, ack.consumer, ack.request, ack.receipts)
        )

    def _done(self) -> None:
        """An ack needs nobody to wait for it any more: begin what stands behind it, up to the next."""
        self._gathered -= 1
        self._count(-1)
        while self._behind and (not self._gathered or self._behind[0].type == Type.ACK):
            self._count(-1)
            self._begin(self._behind.popleft())
        if self._end and not self._gathered:
            end, self._end = self._end, None
            end()

    def _count(self, requests: int) -> None:
        self._requests.under_way += requests
        self._connection.regulate()


def _frame_of(request: wire.Ack, sequence: int, receipts: list[str | int]) -> Frame:
    """Return the ACK that is a part of another frame."""
    return Frame(int(Type.ACK), sequence, 0, memoryview(wire.pack(request)), memoryview(wire.pack(receipts)))
