"""Requests under way, which end with the token that they came with: a stream of events may last for days."""

import asyncio
import logging
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keylane.errors import Unauthorized
from keylane_broker.access.control import AccessControl
from keylane_broker.access.identity import Identity
from keylane_broker.http.problems import EVENTS, event_of, problem_of

log = logging.getLogger("keylane.broker")

_LOOK = 1.0  # seconds between two looks at who is to go


class LiveRequests:
    """All requests that are being answered, each a task."""

    def __init__(self, access: AccessControl) -> None:
        self._access = access
        self._all: dict[asyncio.Task[None], Identity] = {}
        self._ended: dict[asyncio.Task[None], Unauthorized] = {}

    def came_from(self, identity: Identity) -> None:
        """Say who has sent the request that the current task answers."""
        task = asyncio.current_task()
        assert task is not None
        self._all[task] = identity

    async def run(self) -> None:
        """End requests of those whose tokens were revoked, or have expired, for ever."""
        while self._access.enabled:
            await asyncio.sleep(_LOOK)
            for task, identity in self._all.items():
                try:
                    self._access.check(identity)
                except Unauthorized as error:
                    if task not in self._ended:
                        self._ended[task] = error
                        task.cancel()

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return an application whose requests are among these once it is known whose they are."""

        async def live(scope: Scope, receive: Receive, send: Send) -> None:
            started, events, last = False, False, b""

            async def noting(message: Message) -> None:
                nonlocal started, events, last
                if message["type"] == "http.response.start":
                    started, events = True, _are_events(message)
                last = message.get("body", b"")
                await send(message)

            task = asyncio.current_task()
            assert task is not None
            try:
                await app(scope, receive, noting)
            except asyncio.CancelledError:
                if (error := self._ended.get(task)) is None:
                    raise
                task.uncancel()
                if not started:
                    await problem_of(error)(scope, receive, send)
                elif events and last.endswith(b"\n\n"):
                    with suppress(Exception):
                        await send(
                            {"type": "http.response.body", "body": event_of(error), "more_body": False}
                        )
                else:  # who reads it sees that it is not whole
                    log.info("the answer to %s %s is cut off: %s", scope["method"], scope["path"], error)
            finally:
                self._all.pop(task, None)
                self._ended.pop(task, None)

        return live


def _are_events(start: Message) -> bool:
    kind: bytes = dict(start["headers"]).get(b"content-type", b"")
    return kind.startswith(EVENTS.encode())
