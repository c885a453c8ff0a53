"""Answers with the bodies of messages: as text where they can be, and counted until they are sent."""

from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from keylane.wire.about import home_of
from keylane_broker.http.cut_off import WholeResponse
from keylane_broker.http.operations import Call
from keylane_broker.http.room import Room


class Answer(WholeResponse):
    """An answer with bodies, which count until it has been sent."""

    def __init__(self, content: bytes, room: Room, size: int) -> None:
        super().__init__(content, room.patience, "application/json")
        self._room = room
        self._size = size
        room.inflight += size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._room.inflight -= self._size


def fitting(call: Call, bodies: Sequence[tuple[str, int]]) -> tuple[set[int], int]:
    """Return which bodies go into an answer, by place, and their bytes; the others are to be got alone.

    Of each we have its name in the payload store, "" for one that is in its message and goes with it, and its
    size.
    """
    places = {place for place, (name, _) in enumerate(bodies) if not name}
    size = sum(bodies[place][1] for place in places)
    left = call.room.left - size
    for place, (name, length) in enumerate(bodies):
        if name and length <= left and call.identity.may("consume", home_of(call.topic, name)[0]):
            places.add(place)
            left -= length
            size += length
    return places, size


def address(topic: str, name: str) -> str:
    """Return where to get a body: that of a dead letter is elsewhere, and has its own readers."""
    home, stored = home_of(topic, name)
    return f"/v1/bodies/{home}/{stored}"


def written(body: bytes) -> tuple[str | None, bytes | None]:
    """Return a body as text, or else as bytes, which JSON has in base64."""
    try:
        return body.decode(), None
    except UnicodeDecodeError:
        return None, body
