"""Consuming: messages on lease by a long poll or as they come, and receipts to settle them with."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from keylane import BrokerError, InvalidArgument, Message, MessageTooLarge, PayloadMissing
from keylane.consume.receipts import extend_kind, nack_kind
from keylane.payloads.store import PART
from keylane.types import Outcome
from keylane_broker.http import values
from keylane_broker.http.answers import Answer, address, fitting, written
from keylane_broker.http.cut_off import CutOffResponse
from keylane_broker.http.leasing import Act, Receipt, parse
from keylane_broker.http.operations import Call, operation
from keylane_broker.http.problems import EVENTS, event_of

_SUBSCRIPTION = "/v1/topics/{topic}/subscriptions/{subscription}"
_BEAT = 15.0  # seconds after which a silent stream of events says that it is there

T = TypeVar("T")


@operation("POST", _SUBSCRIPTION + "/lease")
async def lease(call: Call, body: values.LeaseRequest) -> values.Leased | Response:
    """Lease messages, waiting for the first of them for up to `wait` seconds."""
    if (answer := await _at_home(call, body.consumer, body)) is not None:
        return answer
    one, found = await _while_there(
        call.request,
        call.leasing.lease(
            call.topic, call.subscription, body.consumer, body.max_messages, body.wait, body.lease
        ),
    )
    with one.handing_out(found):
        return await _answer_with(call, found)


async def _answer_with(call: Call, found: dict[Receipt, Message]) -> Answer:
    """Return messages with their bodies."""
    messages = list(found.values())
    places, size = fitting(call, [_body_of(message) for message in messages])
    with call.room.counted(size):  # before they are read: others ask at the same time
        for place in sorted(places):
            messages[place]._origin.downloads.begin(messages[place]._block, messages[place]._index)
        leased = [
            await _leased(call, receipt, message, place in places)
            for place, (receipt, message) in enumerate(found.items())
        ]
        content = msgspec.json.encode(values.Leased(leased))
    return Answer(content, call.room, size)


async def _at_home(call: Call, consumer: str | None, body: msgspec.Struct | None) -> Response | None:
    """Have the worker answer at which a consumer is; None if that is this one."""
    place = (call.topic, call.subscription, call.leasing.name_of(consumer))
    return await call.homes.pass_on(call.request, place, body, _while_there)


async def _while_there(request: Request, work: Coroutine[object, object, T]) -> T:
    """Wait for somebody: who hangs up meanwhile is to get no messages. Raises ClientDisconnect."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(leave())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _body_of(message: Message) -> tuple[str, int]:
    """Return the name of a body in the payload store, "" for one that is in the message, and its size."""
    block, index = message._block, message._index
    name = block.body_name(index)
    return name, message.size if name else len(block.body_here(index) or b"")


async def _leased(call: Call, receipt: Receipt, message: Message, fits: bool) -> values.LeasedMessage:
    """Return a message with its body, or, if that does not fit, where to get it."""
    text, encoded, missing = None, None, False
    elsewhere = address(call.topic, message._block.body_name(message._index))
    where = None if fits else elsewhere
    try:
        data = await message.data() if fits else b""
        message._block.bodies.pop(message._index, None)  # it may be days until somebody settles it
        text, encoded = written(data) if fits else (None, None)
    except PayloadMissing:
        missing = True
    except MessageTooLarge:  # its producer has not told the truth
        where = elsewhere
    return values.LeasedMessage(
        receipt.text,
        message.topic,
        message.id,
        message.key,
        message.attributes,
        message.retry_count,
        message.token,
        message.uid,
        message.partition,
        message.age,
        message.produced_at,
        message.published_at,
        message.deadline,
        message.producer_group,
        text,
        encoded,
        missing,
        message.size,
        where,
    )


@operation("POST", _SUBSCRIPTION + "/ack")
async def ack(call: Call, body: values.Acks) -> values.Outcomes:
    """Settle messages: they are done with."""
    return await _settle(call, body, lambda consumer, messages: consumer.ack(messages))


@operation("POST", _SUBSCRIPTION + "/nack")
async def nack(call: Call, body: values.Nacks) -> values.Outcomes:
    """Give messages back, to be delivered again."""
    nack_kind(body.delay, body.until, body.reason)  # says what is wrong, also where no receipt is good
    return await _settle(
        call,
        body,
        lambda consumer, messages: consumer.nack(messages, body.delay, until=body.until, reason=body.reason),
    )


@operation("POST", _SUBSCRIPTION + "/extend")
async def extend(call: Call, body: values.Extensions) -> values.Outcomes:
    """Extend leases, to so many seconds from now or until an instant."""
    extend_kind(body.seconds, body.until)
    return await _settle(
        call,
        body,
        lambda consumer, messages: consumer.extend(messages, body.seconds, until=body.until),
        ends=False,
    )


async def _settle(
    call: Call, body: values.Acks | values.Nacks | values.Extensions, act: Act, *, ends: bool = True
) -> values.Outcomes:
    """Settle what receipts stand for, each where its consumer is."""
    receipts = _readable(body.receipts)
    results: list[Outcome] = ["stale"] * len(body.receipts)
    for name in dict.fromkeys(receipt.consumer for receipt in receipts.values()):
        places = [place for place, receipt in receipts.items() if receipt.consumer == name]
        said = msgspec.structs.replace(body, receipts=[body.receipts[place] for place in places])
        where = (call.topic, call.subscription, name)
        answer = await call.homes.ask(call.request, where, said, _while_there)
        if answer is not None:
            found = msgspec.json.decode(answer, type=values.Outcomes).results
        else:
            found = await call.leasing.settle(*where, [receipts[place] for place in places], act, ends=ends)
        for place, outcome in zip(places, found, strict=True):
            results[place] = outcome
    return values.Outcomes(results)


def _readable(texts: list[str]) -> dict[int, Receipt]:
    """Return the receipts by their place; one that is none does not hold back others. Raises if all are."""
    found: dict[int, Receipt] = {}
    wrong: InvalidArgument | None = None
    for place, text in enumerate(texts):
        try:
            found[place] = parse(text)
        except InvalidArgument as error:
            wrong = error
    if wrong and not found:
        raise wrong
    return found


@operation("GET", _SUBSCRIPTION + "/events", gives=EVENTS)
async def events(call: Call, query: values.EventsQuery) -> Response:
    """Get messages as they come, as server-sent events, at most `permits` of them unsettled.

    With Last-Event-ID what was sent after that event, and is still on lease, is sent again first. A stream
    that cannot go on ends with an event `error`, whose data is that of a problem.
    """
    last = call.request.headers.get("last-event-id")
    after = parse(last) if last else None
    if (answer := await _at_home(call, query.consumer, None)) is not None:
        return answer
    one = await call.leasing.open(
        call.topic, call.subscription, call.leasing.name_of(query.consumer), query.permits
    )

    async def stream() -> AsyncIterator[bytes]:
        try:
            async for event in messages():
                yield event
        except BrokerError as error:  # the subscription is gone, or the worker stops
            yield event_of(error)

    async def messages() -> AsyncIterator[bytes]:
        yield b": connected\n\n"
        for receipt, message in one.taken_after(after) if after else ():
            async for event in _event(call, receipt, message):
                yield event
        while True:
            found = await one.next_events(query.permits, _BEAT, after)
            if not found:
                yield b": alive\n\n"
            unseen = dict(found)
            try:
                for receipt, message in found.items():
                    async for event in _event(call, receipt, message):
                        yield event
                    del unseen[receipt]
            except BrokerError:
                one.return_unseen(unseen)
                raise

    return CutOffResponse(
        stream(), call.room.patience, headers={"Cache-Control": "no-store"}, media_type=EVENTS
    )


async def _event(call: Call, receipt: Receipt, message: Message) -> AsyncIterator[bytes]:
    """Yield a message as an event; its body counts until it has been sent."""
    places, size = fitting(call, [_body_of(message)])
    with call.room.counted(size):
        leased = await _leased(call, receipt, message, bool(places))
        data = msgspec.json.encode(leased)
        event = b"id: " + receipt.text.encode() + b"\nevent: message\ndata: " + data + b"\n\n"
        for at in range(0, len(event), PART):  # the next one is asked for when this one is on its way
            yield event[at : at + PART]
