"""What consumers ask: to be opened and closed, and to settle what they were sent."""

from keylane import wire
from keylane.errors import InvalidArgument
from keylane_broker.worker import consumer_opening, settling
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.consumer import Consumer
from keylane_broker.worker.context import Context
from keylane_broker.worker.request_turns import DONE, Reply


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
    receipts = settling.receipts_in(body)
    result = await settling.settle(context, connection, consumer, request, receipts)
    if result.dead:
        await context.outboxes.sent(consumer.topic, request.partition)
    return settling.reply_to(result)


def _consumer(connection: Connection, stream: int) -> Consumer:
    consumer = connection.streams.get(stream)
    if consumer is None:
        raise InvalidArgument(f"there is no consumer with stream {stream} on this connection")
    return consumer
