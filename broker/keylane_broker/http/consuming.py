"""Consuming: messages on lease by a long poll or as they come, and receipts to settle them with."""

from collections.abc import AsyncIterator

import msgspec
from starlette.responses import StreamingResponse

from keylane import Message, PayloadMissing
from keylane.wire.about import home_of
from keylane_broker.http import values
from keylane_broker.http.leasing import Receipt, parse
from keylane_broker.http.operations import Call, operation

_SUBSCRIPTION = "/v1/topics/{topic}/subscriptions/{subscription}"
_BEAT = 15.0  # seconds after which a silent stream of events says that it is there
EVENTS = "text/event-stream"


@operation("POST", _SUBSCRIPTION + "/lease")
async def lease(call: Call, body: values.LeaseRequest) -> values.Leased:
    """Lease messages, waiting for the first of them for up to `wait` seconds."""
    found = await call.leasing.lease(
        call.topic, call.subscription, body.consumer, body.max_messages, body.wait, body.lease
    )
    leased, room = [], call.room.max_content
    for receipt, message in found.items():
        leased.append(await _leased(call, receipt, message, room))
        room -= leased[-1].size if leased[-1].body is None else 0
    return values.Leased(leased)


async def _leased(call: Call, receipt: Receipt, message: Message, room: int) -> values.LeasedMessage:
    """Return a message with its body, or, if there is no room for that, where to get it."""
    text, encoded, missing, where = None, None, False, None
    name, size = message._block.body_name(message._index), 0
    if name:
        size = message._block.sizes[message._index]
        if size > room:
            where = "/v1/bodies/{}/{}".format(*home_of(call.topic, name))
    try:
        data = b"" if where else await message.data()
        try:
            text = None if where else data.decode()
        except UnicodeDecodeError:
            encoded = data
    except PayloadMissing:
        missing = True
    return values.LeasedMessage(
        receipt.text,
        message.id,
        message.key,
        message.attributes,
        message.retry_count,
        message.token,
        message.uid,
        message.partition,
        message.produced_at,
        message.published_at,
        message.deadline,
        message.producer_group,
        text,
        encoded,
        missing,
        size,
        where,
    )


@operation("POST", _SUBSCRIPTION + "/ack")
async def ack(call: Call, body: values.Acks) -> values.Outcomes:
    """Settle messages: they are done with."""
    return values.Outcomes(
        await call.leasing.settle(
            call.topic,
            call.subscription,
            body.receipts,
            lambda consumer, messages: consumer.ack(messages),
        )
    )


@operation("POST", _SUBSCRIPTION + "/nack")
async def nack(call: Call, body: values.Nacks) -> values.Outcomes:
    """Give messages back, to be delivered again."""
    return values.Outcomes(
        await call.leasing.settle(
            call.topic,
            call.subscription,
            body.receipts,
            lambda consumer, messages: consumer.nack(messages, body.delay),
        )
    )


@operation("POST", _SUBSCRIPTION + "/extend")
async def extend(call: Call, body: values.Extensions) -> values.Outcomes:
    """Extend leases, to so many seconds from now."""
    return values.Outcomes(
        await call.leasing.settle(
            call.topic,
            call.subscription,
            body.receipts,
            lambda consumer, messages: consumer.extend(messages, body.seconds),
            ends=False,
        )
    )


@operation("GET", _SUBSCRIPTION + "/events", gives=EVENTS)
async def events(call: Call, query: values.EventsQuery) -> StreamingResponse:
    """Get messages as they come, as server-sent events, at most `permits` of them unsettled.

    With Last-Event-ID what was sent after that event, and is still on lease, is sent again first.
    """
    last = call.request.headers.get("last-event-id")
    after = parse(last) if last else None
    one = await call.leasing.open(
        call.topic, call.subscription, call.leasing.name_of(query.consumer), query.permits
    )

    async def stream() -> AsyncIterator[bytes]:
        yield b": connected\n\n"
        for receipt, message in one.taken_after(after) if after else ():
            yield await _event(call, receipt, message)
        while True:
            found = await one.next_events(query.permits, _BEAT)
            if not found:
                yield b": alive\n\n"
            for receipt, message in found.items():
                yield await _event(call, receipt, message)

    return StreamingResponse(stream(), media_type=EVENTS, headers={"Cache-Control": "no-store"})


async def _event(call: Call, receipt: Receipt, message: Message) -> bytes:
    data = msgspec.json.encode(await _leased(call, receipt, message, call.room.max_content))
    return b"id: " + receipt.text.encode() + b"\nevent: message\ndata: " + data + b"\n\n"
