"""Bodies, for clients that have no business in the payload store: workers store and read them, in parts."""

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from keylane.errors import InvalidArgument, InvalidName, PayloadMissing
from keylane.payloads.bodies import Bodies
from keylane_broker.http import values
from keylane_broker.http.cut_off import CutOffResponse
from keylane_broker.http.operations import Call, operation
from keylane_broker.store.keys import check_name

ANYTHING = "application/octet-stream"
_TOPIC = "/v1/bodies/{topic}"
_BODY = _TOPIC + "/{name}"
_ENOUGH = 2 * 1024 * 1024  # bytes of bodies in one answer

_name = re.compile(values.BODY_NAME).fullmatch
_pairs = msgspec.msgpack.Decoder(list[tuple[values.BodyName, bytes]]).decode


@operation("PUT", _BODY, takes=(ANYTHING,))
async def put_body(call: Call) -> values.StoredBody:
    """Store a body of any length under a name, a KSUID, before its message is published."""
    name = _checked(call)
    async with call.room.transfer(call.identity):
        size = await bodies_of(call).write(call.topic, name, call.content.stream())
    return values.StoredBody(name, size)


@operation("GET", _BODY, gives=ANYTHING)
async def get_body(call: Call) -> Response:
    """Return a body as it is."""
    name = _checked(call)
    parts = await bodies_of(call).read(call.topic, name)
    if parts is None:
        raise PayloadMissing(f"there is no body {name} of topic {call.topic!r}")
    return _BodyResponse(parts, call)


class _BodyResponse(CutOffResponse):
    """A body that is read as it is sent."""

    def __init__(self, parts: AsyncIterator[bytes], call: Call) -> None:
        super().__init__(parts, call.room.patience, media_type=ANYTHING)
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._call.room.transfer(self._call.identity):
            await super().__call__(scope, receive, send)


@operation("DELETE", _BODY)
async def delete_body(call: Call) -> None:
    """Delete a body whose message was not published; the others are deleted with their messages."""
    await bodies_of(call).drop(call.topic, [_checked(call)])


@operation("POST", _TOPIC, status=204, takes=(ANYTHING,))
async def store_bodies(call: Call) -> Response:
    """Store many bodies: a MessagePack array of names and bodies."""
    _checked_topic(call)
    try:
        pairs = _pairs(await call.content.read())
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"this is no MessagePack array of names and bodies: {error}") from None
    await bodies_of(call).put(call.topic, pairs)
    return Response(status_code=204)


@operation("POST", _TOPIC + "/read", gives=ANYTHING)
async def read_bodies(call: Call, body: values.BodyNames) -> Response:
    """Return the first of these bodies, at least one, as a MessagePack array.

    In place of a body it has nil if that is missing, and true if it is so large that it has to be asked for
    alone.
    """
    _checked_topic(call)
    async with call.room.transfer(call.identity):
        found = await bodies_of(call).get_some(call.topic, body.names, _ENOUGH)
    return Response(msgspec.msgpack.encode(found), media_type=ANYTHING)


@operation("POST", _TOPIC + "/has")
async def has_bodies(call: Call, body: values.BodyNames) -> values.BodiesFound:
    """Say which bodies there are."""
    _checked_topic(call)
    return values.BodiesFound(await bodies_of(call).has(call.topic, body.names))


@operation("POST", _TOPIC + "/delete")
async def delete_bodies(call: Call, body: values.BodyNames) -> None:
    """Delete bodies whose messages were not published."""
    _checked_topic(call)
    await bodies_of(call).drop(call.topic, body.names)


@operation("POST", _TOPIC + "/sync")
async def sync_bodies(call: Call, body: values.BodyNames) -> None:
    """Wait until bodies are on the disk of the payload store."""
    _checked_topic(call)
    if not all(await bodies_of(call).has(call.topic, body.names)):
        raise PayloadMissing(f"some of these bodies of topic {call.topic!r} are not there")
    await bodies_of(call).sync(call.topic, body.names)


def bodies_of(call: Call) -> Bodies:
    """Return the bodies of the worker's client, which are in the store itself."""
    return call.client._bodies


def _checked_topic(call: Call) -> None:
    check_name("topic", call.topic)


def _checked(call: Call) -> str:
    """Return the name in the path, if both it and the topic are such as can be."""
    _checked_topic(call)
    name: Any = call.request.path_params["name"]
    if not _name(name):
        raise InvalidName(f"{name!r:.60} is no name of a body: use a KSUID, 27 letters and digits")
    return str(name)
