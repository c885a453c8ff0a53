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
from keylane_broker.engine.turns import AT_ONCE, SETTLED
from keylane_broker.worker.acks import Ack
from keylane_broker.worker.body_deletion import DeletingClient
from keylane_broker.worker.consumer import Consumer
from keylane_broker.worker.context import Context
from keylane_broker.worker.request_turns import Asker, Reply, RequestTurns
from keylane_broker.worker.settling import known_bodies, receipts_in, reply_to, settle

_ALL_SETTLED = wire.SettleReply([])


class SettlingClient(Asker, DeletingClient, Protocol):
    """A connection, as far as what it settles is concerned."""

    @property
    def streams(self) -> Mapping[int, Consumer]:
        """Its consumers."""


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

    def end(self, end: Callable[[], None]) -> None:
        """Nothing more comes; `end` is to follow what has come."""
        if self._gathered:
            self._end = end
        else:
            end()

    def _begin(self, frame: Frame) -> None:
        try:
            if frame.type != Type.ACK or not self._gather(frame):
                self._requests.begin(frame)
        except BrokerError as error:
            self._connection.refuse(error, frame.sequence)

    def _gather(self, frame: Frame) -> bool:
        """Settle what was leased, with others if possible; returns False where more is to be looked at."""
        request = wire.properties_of(frame, wire.Ack)
        consumer = self._connection.streams.get(request.stream)
        if consumer is None or request.partition not in consumer.partitions or known_bodies(request) is None:
            return False
        partition = self._context.partitions.by_place.get((consumer.topic, request.partition))
        dispatcher = partition and partition.dispatchers.get(consumer.subscription)
        if not partition or not dispatcher or self._context.background.stopping:
            return False
        ack = Ack(self, frame.sequence, request, consumer, receipts_in(frame.body))
        most = SETTLED if dispatcher.mode == "key_shared" else AT_ONCE
        fits = ack.receipts.messages <= most and partition.held_lease(consumer.incarnation) is not None
        if fits and dispatcher.acks.add(ack):
            self._gathered += 1
            self._count(1)
        else:
            self._requests.start(ack.sequence, partial(self._settle, ack))
        return True

    # What becomes of them

    def acked(self, ack: Ack, record: str, *, alone: bool) -> None:
        """Answer an ACK; `record` is that of bodies to be deleted, all its own where it is alone."""
        self._connection.send(_ALL_SETTLED, ack.sequence)
        if record:
            names = names_within(ack.bodies, ack.receipts.ranges) if alone else []
            self._context.bodies.recorded(self._connection, ack.place, record, names)
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
