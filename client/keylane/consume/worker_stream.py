"""A consumer's part at one worker: the partitions that are open there, and those that are to be."""

import asyncio
from collections import Counter
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from functools import partial
from time import monotonic
from typing import Protocol

from keylane import wire
from keylane.connect.connection import Connection, Redirected, error_from
from keylane.connect.pool import Peer
from keylane.consume.permits import Permits
from keylane.errors import BrokerError, ConnectionClosed, Fenced, SubscriptionBusy
from keylane.retry import backoff
from keylane.wire import Frame, Properties, Type


class StreamOwner(Protocol):
    """What the stream of one worker asks of, and tells, whoever has all streams of the consumer."""

    paused: bool
    permits: Permits["WorkerStream"]

    def serving(self, partition: int) -> "WorkerStream | None":
        """Return the stream that serves a partition."""

    def may_open(self, stream: "WorkerStream") -> bool:
        """Return whether it may subscribe now."""

    def opening(self, partitions: Collection[int]) -> AbstractContextManager[None]:
        """Be told while a worker is asked for partitions."""

    def request(self, partitions: Collection[int], permits: int) -> wire.Subscribe:
        """Return what to ask of a worker."""

    def opened(self, stream: "WorkerStream", partitions: frozenset[int], reply: wire.SubscribeReply) -> None:
        """A worker serves partitions."""

    def received(self, frame: Frame, data: wire.Data) -> None:
        """Messages have come."""

    def leases_ended(self, frame: Frame, ended: wire.Ended) -> None:
        """A worker says that leases are over."""

    def moved(self, stream: "WorkerStream", partition: int, address: str, permits: int) -> None:
        """A worker serves a partition no more."""

    def closed(self, stream: "WorkerStream", partitions: set[int], void: bool) -> None:
        """A worker has ended its stream, or its connection has ended."""

    async def look_again(self, error: BrokerError) -> None:
        """Something could not be opened: perhaps another worker has it."""

    def drop(self, stream: "WorkerStream") -> None:
        """It has nothing to serve any more."""

    def end(self, error: BrokerError) -> None:
        """The consumer has ended for good."""


class WorkerStream:
    """Keeps the partitions it is to serve subscribed: on one connection to its worker, then on the next."""

    def __init__(self, owner: StreamOwner, peer: Peer, topic: str, number: int) -> None:
        self.peer = peer
        self._topic = topic
        self._number = number  # of the stream, on whichever connection
        self.wanted: set[int] = set()
        self.open: set[int] = set()
        self.current: Connection | None = None  # on which its stream is open
        self.certain_until = 0.0  # until when what was open here last is ours, though it is open no more
        self._owner = owner
        self._limit = 0  # permits
        self._gone = 0  # permits that have gone with partitions from this stream
        self._opening: frozenset[int] = frozenset()
        self._early: list[Frame] = []  # what came before we knew that it is subscribed
        self._asked: dict[int, set[asyncio.Future[Frame]]] = {}  # by partition, not answered yet
        self._last_error: BrokerError | None = None  # what ended its stream
        self._credit: Counter[int] = Counter()  # by partition
        self._woken = asyncio.Event()
        self._quiet = asyncio.Event()  # no SUBSCRIBE is under way
        self._quiet.set()

    # What its owner calls

    def wake(self) -> None:
        """What it is to serve has changed."""
        self._woken.set()

    def ask(self, partition: int, request: Properties, receipts: list[str | int]) -> asyncio.Future[Frame]:
        """Settle messages of a partition that it serves, or extend their leases."""
        assert self.current is not None
        if isinstance(request, wire.Ack):
            answer = self.current.ack(request, receipts)
        else:
            answer = self.current.request(request, wire.pack(receipts))
        waiting = self._asked.setdefault(partition, set())
        waiting.add(answer)
        answer.add_done_callback(waiting.discard)
        return answer

    def release(self, partition: int) -> None:
        """Another worker serves the partition.

        What was asked here and is not answered may have been done: this one says so, unless it says nothing.
        """
        self.open.discard(partition)
        for answer in self._asked.pop(partition, ()):
            if self.current is not None:
                self.current.wait_while_heard(answer, Redirected(self._topic, partition, ""))
        self.wake()

    def pause(self, paused: bool) -> None:
        """Have the worker stop or go on."""
        if self.current is not None:
            self.current.send(wire.Flow(self._number, paused=paused))

    def credit(self, partition: int, count: int) -> None:
        """Messages ended without an ACK or NACK: there is room for others."""
        if not self._credit:
            asyncio.get_running_loop().call_soon(self._give_credit)
        self._credit[partition] += count

    def _give_credit(self) -> None:
        for partition, count in self._credit.items():
            if self.current is not None and self._owner.serving(partition) is self:
                self.current.send(wire.Flow(self._number, permits=count, partition=partition))
        self._credit.clear()

    def grant(self, limit: int) -> None:
        """Let the worker have so many messages out."""
        self._limit = limit
        if self.current is not None:
            self.current.request(self._flow(limit))

    def _flow(self, limit: int) -> wire.Flow:
        return wire.Flow(self._number, limit=limit, gone=self._gone)

    async def lower(self, limit: int) -> None:
        """Let it have no more than so many out, and wait until that is so."""
        self._limit = limit
        await self._quiet.wait()
        if self.current is not None:
            with suppress(BrokerError):  # what comes next over another connection keeps to the limit
                await self.current.request(self._flow(limit))

    async def leave(self) -> None:
        """Tell the worker that the consumer is closed: what it holds goes back."""
        if (connection := self._let_go()) is not None:
            with suppress(BrokerError):  # then the worker has ended it, or will when the session does
                await connection.request(wire.Unsubscribe(self._number, sorted(self.open)))

    def close(self) -> None:
        """Hear nothing more; a worker that it has not left lets go of the consumer."""
        if (connection := self._let_go()) is not None:
            connection.request(wire.Unsubscribe(self._number))

    def _let_go(self) -> Connection | None:
        connection, self.current = self.current, None
        if connection is not None:
            connection.streams.pop(self._number, None)
            connection.closed.remove_done_callback(self._lost)
        return connection

    # Subscribing

    async def run(self) -> None:
        """Subscribe whenever something is missing, until nothing is to be served here any more."""
        attempt = 0
        while self.wanted or self.open:
            self._woken.clear()
            error, self._last_error = self._last_error, None
            missing = frozenset(self.wanted - self.open)
            if error is None and missing and self._owner.may_open(self):
                try:
                    with self._owner.opening(missing):
                        await self._subscribe(missing)
                    attempt = 0
                except BrokerError as problem:
                    error = problem
            elif error is None:
                await self._woken.wait()
            if error is not None:
                if final(error):
                    self._owner.end(error)
                    return
                if attempt or not isinstance(error, ConnectionClosed):
                    await asyncio.sleep(backoff(attempt))
                    await self._owner.look_again(error)
                attempt += 1
        self._owner.drop(self)
        if (connection := self._let_go()) is not None:
            # The worker may have partitions again that are open elsewhere: nothing of them goes back.
            connection.request(wire.Unsubscribe(self._number, []))

    async def _subscribe(self, partitions: frozenset[int]) -> None:
        """Open partitions: with a new stream, or added to the one that is open."""
        connection = await self.peer.connect()
        fresh = connection is not self.current
        if fresh:
            self._early.clear()
            self._gone = 0
            connection.streams[self._number] = partial(self._pushed, connection)
            self._owner.permits.take_along(self, partitions)
        self._opening, limit = partitions, self._limit
        self._quiet.clear()
        asked = connection.request(self._owner.request(partitions, limit))
        asked.add_done_callback(self._forget_listed)
        try:
            reply = wire.properties_of(await asyncio.shield(asked), wire.SubscribeReply)
        except BaseException as error:
            if fresh:
                connection.streams.pop(self._number, None)
                self._owner.permits.lost(self, partitions)
                if isinstance(error, asyncio.CancelledError):  # the worker lets it in all the same
                    asked.add_done_callback(lambda _: connection.request(wire.Unsubscribe(self._number)))
            raise
        finally:
            self._opening = frozenset()
            self._quiet.set()
        if fresh:
            self.current = connection
            connection.closed.add_done_callback(self._lost)
            if self._owner.paused:
                connection.send(wire.Flow(self._number, paused=True))
            if self._limit != limit:
                connection.request(self._flow(self._limit))
        elif self.current is not connection:
            return  # it has ended meanwhile
        self.open |= partitions
        self._owner.opened(self, partitions, reply)
        if (partitions - self.open) & self.wanted:
            self._last_error = Fenced(f"the worker at {self.peer.address} has an old lease")
        early, self._early = self._early, []
        for frame in early:
            self._pushed(connection, frame)

    def _forget_listed(self, answer: asyncio.Future[Frame]) -> None:
        """A worker that has served us before may have sent something before it let us in once more.

        It is among what is listed now, and must not overtake what another worker has leased to us before it.
        """
        if answer.cancelled() or answer.exception() is not None:
            return
        if wire.properties_of(answer.result(), wire.SubscribeReply).held is not None:
            self._early = [frame for frame in self._early if not _is_leased(frame)]

    # What the worker pushes

    def _pushed(self, connection: Connection, frame: Frame) -> None:
        if connection is not self.current:
            self._early.append(frame)
        elif frame.type == Type.DATA:
            data = wire.properties_of(frame, wire.Data)
            if data.partition in self._opening:
                self._early.append(frame)
            elif self._owner.serving(data.partition) is self:
                self._owner.received(frame, data)
            # Else another worker has the partition: it lists what we hold.
        elif frame.type == Type.REDIRECT:
            to = wire.properties_of(frame, wire.Redirect)
            if to.partition in self._opening:
                self._early.append(frame)
            else:
                self._gone += to.permits
                self._reckon()
                self._owner.moved(self, to.partition, to.address, to.permits)
        elif frame.type == Type.ENDED:
            ended = wire.properties_of(frame, wire.Ended)
            if ended.partition in self._opening:
                self._early.append(frame)
            elif self._owner.serving(ended.partition) is self:
                self._owner.leases_ended(frame, ended)
        elif frame.type == Type.FLOW:
            if wire.properties_of(frame, wire.Flow).wanted:
                self._owner.permits.wanted(self)
        else:  # the worker has let go of the consumer, and so of all the leases that it had there
            self._break(error_from(wire.properties_of(frame, wire.Error)), void=True)

    def _lost(self, closed: asyncio.Future[BrokerError]) -> None:
        self._break(closed.result(), void=False)

    def _reckon(self) -> None:
        """Something is open here no more: know for how long it is ours."""
        if self.current is not None:
            self.certain_until = monotonic() + self.current.session_left

    def _break(self, error: BrokerError, *, void: bool) -> None:
        self._reckon()
        self._let_go()
        lost, self.open = self.open, set()
        self._last_error = error
        self._owner.closed(self, lost, void)
        self.wake()


def _is_leased(frame: Frame) -> bool:
    """Return whether a frame brings messages that are not settled yet."""
    return frame.type == Type.DATA and wire.properties_of(frame, wire.Data).settled is None


def final(error: BrokerError) -> bool:
    """Return whether there is no use in subscribing again."""
    return not error.retriable or isinstance(error, SubscriptionBusy)
