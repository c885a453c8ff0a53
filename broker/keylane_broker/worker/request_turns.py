"""The requests of one connection: all at once, but those that may read and answer a lot take turns."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from keylane import wire
from keylane.errors import BrokerError, Unavailable
from keylane.wire import Frame, Type
from keylane_broker.worker.background import Background

log = logging.getLogger("keylane.broker")

_TURNS = 2  # heavy requests at a time: while Redis reads for one, the other is answered
_HEAVY = {  # those that may read and answer a lot
    Type.PEEK,
    Type.PURGE,
    Type.TOPICS,
    Type.DESCRIBE_TOPIC,
    Type.DESCRIBE_SUBSCRIPTION,
    Type.CLUSTER,
    Type.READ,
    Type.OFFSETS,
    Type.OWED,
    Type.WITHDRAW,
    Type.PARKED,
}

Reply = tuple[wire.Properties, bytes]
DONE: Reply = (wire.Properties(), b"")


class Asker(Protocol):
    """A connection, as far as its requests are concerned."""

    peer: str

    @property
    def alive(self) -> bool:
        """Whether anything that is sent can still arrive."""

    def send(self, properties: wire.Properties, sequence: int = 0, body: bytes = b"") -> None:
        """Send a frame."""

    def refuse(self, error: Exception, sequence: int) -> None:
        """Answer a request with an error."""

    def regulate(self) -> None:
        """Listen only while there is room for what the client may ask."""


class RequestTurns:
    """The requests of one connection that are under way, or wait for their turn."""

    def __init__(
        self, connection: Asker, handle: Callable[[Frame], Awaitable[Reply]], background: Background
    ) -> None:
        self.under_way = 0  # also those that wait
        self.drained = asyncio.Event()  # the client reads what it is sent
        self.drained.set()
        self._connection = connection
        self._handle = handle
        self._background = background
        self._heavy: deque[Frame] = deque()  # that wait for their turn
        self._turns = 0  # of these that are under way

    def begin(self, frame: Frame) -> None:
        """Start on a request; of those that may read and answer a lot, few at a time."""
        if frame.type not in _HEAVY:
            self.start(frame.sequence, partial(self._handle, frame))
            return
        self.under_way += 1
        self._connection.regulate()
        self._heavy.append(frame)
        if self._turns < _TURNS:
            self._turns += 1
            self._background.start(self._answer_in_turn)

    def start(self, sequence: int, handle: Callable[[], Awaitable[Reply]]) -> None:
        """Start on what answers a request."""
        self.under_way += 1
        self._connection.regulate()
        self._background.start(self._answer, sequence, handle)

    async def _answer_in_turn(self) -> None:
        try:
            while self._heavy and self._connection.alive and not self._background.stopping:
                frame = self._heavy.popleft()
                await self.drained.wait()
                await self._answer(frame.sequence, partial(self._handle, frame))
        finally:
            self._turns -= 1

    async def _answer(self, sequence: int, handle: Callable[[], Awaitable[Reply]]) -> None:
        connection = self._connection
        try:
            if self._background.stopping:
                raise Unavailable("the worker is stopping")
            reply, body = await handle()
            connection.send(reply, sequence, body)
        except Exception as error:
            if not isinstance(error, BrokerError):
                log.exception("a bug, while answering a request of %s", connection.peer)
            connection.refuse(error, sequence)
        finally:
            self.under_way -= 1
            connection.regulate()
