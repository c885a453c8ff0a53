"""What consumers ask: to be opened and closed, and to settle what they were sent."""

from typing import Annotated

from msgspec import Meta

from keylane import wire
from keylane.errors import InvalidArgument
from keylane_broker.engine.receipts import receipts_of
from keylane_broker.worker import consumer_opening, settling
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.consumer import Consumer
from keylane_broker.worker.context import Context
from keylane_broker.worker.request_turns import DONE, Reply

# Bounded before memory is set aside.
_RECEIPTS = Annotated[list[str | int], Meta(max_length=wire.MAX_BATCH * 4)]


async def subscribe(
    context: Context, connection: Connection, request: wire.Subscribe, _: memoryview
) -> Reply:
    return await consumer_opening.subscribe(context, connection, request), b""


async def unsubscribe(
    context: Context, connection: Connection, request: wire.Unsubscribe, _: memoryview
) -> Reply:
    await consumer_opening.unsubscribe(context, _consumer(connection, request.stream), request.partitions)
    return DONE


async def settle(
    context: Context,
    connection: Connection,
    request: wire.Ack | wire.Nack | wire.Extend,
    body: memoryview,
) -> Reply:
    consumer = _consumer(connection, request.stream)
    receipts = receipts_of(wire.unpack(body, _RECEIPTS))
    result = await settling.settle(context, connection, consumer, request, receipts)
    return wire.SettleReply(
        [number for stale in result.stale for number in stale],
        result.deadline_ms,
        [number for part in result.returned for number in part],
    ), b""


def _consumer(connection: Connection, stream: int) -> Consumer:
    consumer = connection.streams.get(stream)
    if consumer is None:
        raise InvalidArgument(f"there is no consumer with stream {stream} on this connection")
    return consumer
