"""Keeps a consumer subscribed: on one connection, then on the next."""

import asyncio
from collections.abc import Callable
from functools import partial
from time import monotonic

from client import wire
from client.cluster import Cluster, backoff
from client.connection import Connection, error_from
from client.errors import BrokerError, ConnectionClosed, SubscriptionBusy
from client.tasks import Tasks
from client.wire import Frame, Type


class Link:
    """The worker's side of a consumer; `on_end` hears the error that ends it for good."""

    def __init__(
        self,
        cluster: Cluster,
        request: wire.Subscribe,
        on_open: Callable[[wire.SubscribeReply], None],
        on_data: Callable[[Frame], None],
        on_end: Callable[[BrokerError], None],
    ) -> None:
        self.stream = request.stream
        self.timeout = cluster.timeout
        self.opened = False
        self.paused = False
        self.error: BrokerError | None = None
        self._cluster = cluster
        self._request = request
        self._on_open = on_open
        self._on_data = on_data
        self._on_end = on_end
        self.current: Connection | None = None  # on which it is subscribed
        self._ready: asyncio.Future[Connection]
        self._broken: asyncio.Future[BrokerError]
        self._early: list[Frame] = []  # what came before we knew that we are subscribed
        self._credit = 0
        self._tasks = Tasks()

    async def open(self) -> None:
        """Subscribe for the first time."""
        self._ready = asyncio.get_running_loop().create_future()
        end = monotonic() + self.timeout
        attempt = 0
        while self.current is None:
            connection = await self._cluster.connection(max(0.0, end - monotonic()))
            try:
                await self._subscribe(connection)
            except BrokerError as error:
                wait = backoff(attempt)
                if _final(error) or monotonic() + wait > end:
                    raise
                attempt += 1
                await asyncio.sleep(wait)
        self.opened = True
        self._tasks.start(self._stay())

    async def leave(self) -> None:
        """Tell the worker that the consumer is closed: what it holds goes back."""
        connection = self.current
        if connection is not None:
            try:
                await connection.request(wire.Unsubscribe(self.stream))
            except BrokerError:
                pass  # then the worker has ended it, or will when the session does
            finally:
                connection.streams.pop(self.stream, None)

    async def close(self) -> None:
        """Do not subscribe again."""
        await self._tasks.cancel()
        if self.current is not None:
            self.current.streams.pop(self.stream, None)
            self.current.closed.remove_done_callback(self._lost)

    async def connection(self, within: float) -> Connection:
        """The connection on which it is subscribed, waiting for it if need be."""
        end = monotonic() + within
        while self.current is None:
            ready = self._ready
            await asyncio.wait({ready}, timeout=max(0.0, end - monotonic()))
            if not ready.done():
                raise self._cluster.error
            if (ended := ready.exception()) is not None:
                raise ended
        return self.current

    def pause(self, paused: bool) -> None:
        """Have the worker stop or go on."""
        self.paused = paused
        if self.current is not None:
            self.current.send(wire.Flow(self.stream, paused=paused))

    def credit(self, count: int) -> None:
        """Messages ended without an ACK or NACK: there is room for others."""
        if count:
            if not self._credit:
                asyncio.get_running_loop().call_soon(self._give_credit)
            self._credit += count

    def _give_credit(self) -> None:
        if self.current is not None:
            self.current.send(wire.Flow(self.stream, permits=self._credit))
        self._credit = 0

    async def _subscribe(self, connection: Connection) -> None:
        self._early.clear()
        connection.streams[self.stream] = partial(self._pushed, connection)
        asked = connection.request(self._request)
        try:
            reply = wire.properties_of(await asyncio.shield(asked), wire.SubscribeReply)
        except BaseException as error:
            connection.streams.pop(self.stream, None)
            if isinstance(error, asyncio.CancelledError):  # the worker lets it in all the same
                asked.add_done_callback(lambda _: connection.request(wire.Unsubscribe(self.stream)))
            raise
        self.current = connection
        self._broken = asyncio.get_running_loop().create_future()
        self._on_open(reply)
        self._ready.set_result(connection)
        connection.closed.add_done_callback(self._lost)
        if self.paused:
            connection.send(wire.Flow(self.stream, paused=True))
        early, self._early = self._early, []
        for frame in early:
            self._pushed(connection, frame)

    def _pushed(self, connection: Connection, frame: Frame) -> None:
        if connection is not self.current:
            self._early.append(frame)
        elif frame.type == Type.DATA:
            self._on_data(frame)
        else:  # the worker has let go of the consumer, and so of all its leases
            error = error_from(wire.properties_of(frame, wire.Error))
            self._on_end(error)
            self._break(connection, error)

    def _lost(self, closed: asyncio.Future[BrokerError]) -> None:
        if self.current is not None and self.current.closed is closed:
            self._break(self.current, closed.result())

    def _break(self, connection: Connection, error: BrokerError) -> None:
        if connection is self.current:
            connection.streams.pop(self.stream, None)
            connection.closed.remove_done_callback(self._lost)
            self.current = None
            self._ready = asyncio.get_running_loop().create_future()
            self._broken.set_result(error)

    async def _stay(self) -> None:
        """Subscribe again whenever the connection or the worker's side of the consumer ends."""
        while True:
            await asyncio.wait({self._broken})
            error: BrokerError | None = self._broken.result()
            attempt = 0
            while error is not None:
                if _final(error):
                    self._end(error)
                    return
                if attempt or not isinstance(error, ConnectionClosed):
                    await asyncio.sleep(backoff(attempt))
                attempt += 1
                try:
                    await self._subscribe(await self._cluster.connection())
                    error = None
                except BrokerError as problem:
                    error = problem

    def _end(self, error: BrokerError) -> None:
        self.error = error
        self._ready.set_exception(error)
        self._ready.exception()  # retrieved: perhaps nobody waits
        self._on_end(error)


def _final(error: BrokerError) -> bool:
    return not error.retriable or isinstance(error, SubscriptionBusy)
