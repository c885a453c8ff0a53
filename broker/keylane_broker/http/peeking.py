"""Peeking: what a subscription has not settled, with its bodies for those who may consume them."""

import msgspec
from starlette.responses import Response

from keylane import PeekedMessage
from keylane.wire.about import INLINE, inline_body
from keylane_broker.http import values
from keylane_broker.http.answers import Answer, address, fitting, written
from keylane_broker.http.bodies import bodies_of
from keylane_broker.http.operations import Call, operation


@operation("GET", "/v1/topics/{topic}/subscriptions/{subscription}/peek")
async def peek(call: Call, query: values.PeekQuery) -> list[values.PeekedMessage] | Response:
    """Look at unsettled messages without leasing them.

    With `bodies` each has its body, as a message on lease has it; that needs the right to consume.
    """
    if query.bodies:
        call.identity.require("consume", call.topic)
    found = await call.client._peek(call.topic, call.subscription, query.partition, query.limit)
    if query.bodies:
        return await _with_bodies(call, found)
    return [_told(message) for message, _ in found]


async def _with_bodies(call: Call, found: list[tuple[PeekedMessage, str]]) -> Response:
    """Answer with as many bodies as there is room for, and say where to get the others."""
    bodies: dict[int, bytes | None] = {  # by the place of the message; not those that are to be got alone
        place: inline_body(name) if name else b""
        for place, (_, name) in enumerate(found)
        if name[:1] in ("", INLINE)
    }
    places, size = fitting(
        call,
        [
            ("", len(bodies[place] or b"")) if place in bodies else (name, message.size)
            for place, (message, name) in enumerate(found)
        ],
    )
    stored = sorted(places - bodies.keys())
    with call.room.counted(size):  # before they are read: others ask at the same time
        names, sizes = [found[place][1] for place in stored], [found[place][0].size for place in stored]
        read = await bodies_of(call).get_up_to(call.topic, names, sizes) if stored else []
        bodies |= {
            place: body for place, body in zip(stored, read, strict=True) if not isinstance(body, bool)
        }
        shown = [
            _with_body(message, bodies[place])
            if place in bodies
            else _without_body(call.topic, message, name)
            for place, (message, name) in enumerate(found)
        ]
        content = msgspec.json.encode(shown)
    return Answer(content, call.room, size)


def _told(message: PeekedMessage) -> values.PeekedMessage:
    return msgspec.convert(message, values.PeekedMessage, from_attributes=True)


def _with_body(message: PeekedMessage, body: bytes | None) -> values.PeekedMessage:
    if body is None:
        return msgspec.structs.replace(_told(message), missing=True)
    text, encoded = written(body)
    return msgspec.structs.replace(_told(message), data=text, data_base64=encoded)


def _without_body(topic: str, message: PeekedMessage, name: str) -> values.PeekedMessage:
    """Say where to get it."""
    return msgspec.structs.replace(_told(message), body=address(topic, name))
