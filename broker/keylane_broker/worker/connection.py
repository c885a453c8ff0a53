"""A client's connection: frames in, frames out, and what keeps either side from drowning the other."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import chain
from typing import cast

from keylane import wire
from keylane.errors import (
    BrokerError,
    DurabilityNotReached,
    InvalidArgument,
    Overloaded,
    ProtocolError,
)
from keylane.wire import Frame, FrameReader, Type
from keylane_broker.access.identity import Identity
from keylane_broker.engine.checks import check_int
from keylane_broker.errors import NotOwner
from keylane_broker.limits import MAX_PERMITS
from keylane_broker.worker.confirmations import Pending
from keylane_broker.worker.connection_acks import ConnectionAcks
from keylane_broker.worker.connection_publishes import ConnectionPublishes
from keylane_broker.worker.consumer import Consumer
from keylane_broker.worker.context import Context
from keylane_broker.worker.request_turns import Reply, RequestTurns

log = logging.getLogger("keylane.broker")

NOBODY = Identity("nobody", ())
_ALL_SETTLED = wire.SettleReply([])

_AT_ONCE = 256  # frames of one client before others have their turn
_BUFFERED = 1024 * 1024  # bytes that may wait to be sent before deliveries stop
_FETCHES = 16  # under way for one client, each of which may bring each consumer a megabyte
_INFLIGHT = 8 * 1024 * 1024  # bytes of publishes that one connection may have under way
_GREETING = 65_536  # bytes of a frame of somebody who is not known yet: memory is for those who are
_SAID = 2_000  # characters of an error
_REQUESTS = 200  # requests that one connection may have under way

Handle = Callable[["Connection", Frame], Awaitable[Reply]]


class Connection(asyncio.Protocol):
    """One client; any number of producers and consumers share it."""

    def __init__(self, context: Context, handle: Handle) -> None:
        self.streams: dict[int, Consumer] = {}
        self.opening: set[int] = set()  # streams whose SUBSCRIBE is under way
        self.topics: set[str] = set()  # whose maps it has, and so hears of moves
        self.store = ""  # the payload store that it can delete from: see body_deletion
        self.several = False  # the client understands ANSWERS
        self.writable = True
        self.inflight = 0  # bytes of its publishes that are under way
        self.unsent = 0  # bytes that waited to be sent when that was last looked at
        self.read_at = 0.0  # when its client was last seen to have read any more
        self.greeted = False  # INFO has been exchanged
        self.identity = NOBODY  # until it has
        self.heard = 0.0  # when the last frame came, by the loop's clock
        self.peer = ""  # its address, and who it says it is: for the log
        self._context = context
        self._all = context.connections
        self._memory = context.connections.memory
        self._store = context.engine.store
        self._counters = context.engine.store.counters
        self._now_ms = context.clock.now_ms
        self._reader = FrameReader(_GREETING)
        self._buffered = 0  # bytes that wait in it, as far as they are counted
        self._frames: Iterator[Frame] | None = None  # that have come, and wait for their turn
        self._taken = 0  # frames, since others had theirs
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._greeting: asyncio.TimerHandle
        self._unsent: list[bytes] = []
        self._written = self._read = 0  # bytes, ever; as far as it was seen
        self._stored: list[int] = []  # behind these, as ANSWERS has it
        self._settled: list[int] = []
        self._requests = RequestTurns(self, partial(handle, self), context.background)
        self._acks = ConnectionAcks(self, context, self._requests)
        self.publishes = ConnectionPublishes(self, context)
        self._fetches = 0  # under way for its consumers
        self._full = False  # as many as there may be have been
        self._reading = True  # there is room for what the client may ask

    @property
    def alive(self) -> bool:
        """Whether anything that is sent can still arrive."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def takes_more(self) -> bool:
        """Whether messages may be fetched for it."""
        return self.writable and not self._full

    def begin_fetch(self) -> None:
        """Count a fetch that is under way for its consumers."""
        self._fetches += 1
        self._full |= self._fetches >= _FETCHES

    def end_fetch(self) -> None:
        """It has ended; allow_fetches() then says so."""
        self._fetches -= 1

    def allow_fetches(self) -> None:
        """Fetches have ended: those that wait for their turn may go on."""
        if self._full and self._fetches <= _FETCHES // 2:
            self._full = False
            consumers = list(self.streams.values())
            for consumer in consumers:  # all of them have room before the first is asked,
                consumer.crowd.has_grown(consumer)
            for stream in list(self.streams)[:1]:  # and another one is first each time
                self.streams[stream] = self.streams.pop(stream)
            for consumer in consumers:
                consumer.give(0)

    @property
    def waiting(self) -> int:
        """Bytes of a frame whose end has not come yet."""
        return self._reader.waiting

    def may_use(self, topic: str) -> bool:
        """Whether the client may have to do with a topic."""
        return self.identity.may("use", topic)

    def uses(self, topic: str) -> bool:
        """Whether the client has to do with a topic."""
        return topic in self.topics or any(consumer.topic == topic for consumer in self.streams.values())

    def silent_since(self, instant: float) -> bool:
        """Whether nothing has come since then, though the worker listened or the client did not read."""
        return self.heard < instant and (self._reading or not self.writable)

    def stop_waiting(self) -> None:
        """Let requests go on that wait until the client reads."""
        self._requests.drained.set()

    def let_in(self, identity: Identity) -> None:
        """INFO has said who it is."""
        self.identity = identity
        self.greeted = True
        if self.alive:
            self._reader.limit = self._context.settings.max_frame

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, if there is room for one more."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no such class
        self._transport.set_write_buffer_limits(high=_BUFFERED)
        self.peer = ":".join(map(str, (transport.get_extra_info("peername") or ("?",))[:2]))
        self.heard = self._loop.time()
        self._greeting = self._loop.call_later(self._context.settings.heartbeat * 3, self._expect_greeting)
        if refusal := self._all.add(self):
            self.send(wire.Error(refusal.code, str(refusal), retry_ms=_retry_ms(refusal)))
            self.close()

    def _expect_greeting(self) -> None:
        """Who has not said INFO by now only holds a place, whatever else may come byte by byte."""
        if not self.greeted and self.alive:
            log.info("%s has not greeted", self.peer)
            self._counters.drops["not_greeted"] += 1
            self.abort()

    def data_received(self, data: bytes) -> None:
        """Handle each frame that is complete now; of many, the rest in later turns of the event loop."""
        self.heard = self._loop.time()
        frames = self._reader.feed(data)
        if self._frames is None:
            self._frames = frames
            self._take_frames(frames)
        else:  # it was on its way when the transport was told to wait
            self._frames = chain(self._frames, frames)

    def _take_frames(self, frames: Iterator[Frame]) -> None:
        """Handle those that wait, until others are to have their turn or there is no room for more."""
        self._store.cork()
        try:
            for frame in frames:
                if not self.alive:
                    return
                self._receive(frame)
                self._taken += 1
                if self._taken >= _AT_ONCE or not self._reading:
                    self._give_way()
                    return
            self._frames = None
        except ProtocolError as error:
            log.info("%s breaks the protocol: %s", self.peer, error)
            self._counters.drops["protocol_error"] += 1
            self.send(wire.Error(error.code, str(error)))
            self.close()
        finally:
            self._store.flush()
            self._count_buffered()
        if self._memory.buffered > self._memory.max_inflight:
            self._memory.close_largest_frame()

    def _give_way(self) -> None:
        """Let others have their turn; where there is no room for more, until there is."""
        if self._reading and self.alive:
            assert self._transport is not None
            self._transport.pause_reading()
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Handle what waits, then listen."""
        self._taken = 0
        if self._frames is not None and self._reading:
            self._take_frames(self._frames)
        if self._frames is None and self._reading and self.alive:
            assert self._transport is not None
            self._transport.resume_reading()

    def _count_buffered(self) -> None:
        before, self._buffered = self._buffered, self._reader.waiting
        self._memory.buffered += self._buffered - before

    def pause_writing(self) -> None:
        """The client reads too slowly: neither deliver to it nor listen to it until it has caught up."""
        self.writable = False
        self._requests.drained.clear()
        self.regulate()

    def resume_writing(self) -> None:
        """It has caught up."""
        self.writable = True
        self._requests.drained.set()
        self.regulate()
        for consumer in self.streams.values():
            consumer.give(0)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client; its consumers' sessions run out unless they come back."""
        self._transport = None
        self._greeting.cancel()
        self._requests.drained.set()
        self._drop_input()
        self._memory.unsent -= self.unsent
        self.unsent = 0
        self.writable = False
        self._all.remove(self)
        self._acks.end(self._forget)

    def _forget(self) -> None:
        """Let go of its consumers, and of bodies that it was to delete."""
        self._context.sessions.renew_beside(self.streams.values())
        for consumer in list(self.streams.values()):
            consumer.forget()
        self._context.bodies.gone(self)

    # Sending

    def send(self, properties: wire.Properties, sequence: int = 0, body: bytes = b"") -> None:
        """Send a frame, with the others of this turn of the event loop; nothing if it has ended."""
        if self._transport is not None:
            self._schedule()
            if properties.TYPE != Type.DATA:  # which may go before answers, as it often does
                self._send_answers()
            self._unsent.append(wire.frame(properties, sequence, self._now_ms(), body))

    def settled(self, sequence: int) -> None:
        """Answer an ACK of which nothing was stale."""
        if not self.several:
            self.send(_ALL_SETTLED, sequence)
        elif self._transport is not None:
            self._schedule()
            self._settled.append(sequence)

    def _schedule(self) -> None:
        if not (self._unsent or self._stored or self._settled):
            self._loop.call_soon(self.flush)

    def _send_answers(self) -> None:
        """Put the answers that were gathered behind what was sent."""
        if self._stored or self._settled:
            answers = wire.Answers(self._stored, self._settled)
            self._stored, self._settled = [], []
            self._unsent.append(wire.frame(answers, 0, self._now_ms()))

    def flush(self) -> None:
        """Write what was sent, now."""
        self._send_answers()
        if self._unsent and self._transport is not None:
            self._transport.write(data := b"".join(self._unsent))
            self._written += len(data)
            self.measure()
            if self._memory.unsent > self._memory.max_unsent:
                self._memory.close_slow_readers()
        self._unsent.clear()

    def measure(self) -> None:
        """Look at what waits to be sent."""
        if self._transport is not None:
            before, self.unsent = self.unsent, self._transport.get_write_buffer_size()
            self._memory.unsent += self.unsent - before
            if (read := self._written - self.unsent) > self._read:
                self._read, self.read_at = read, self._loop.time()

    def refuse(self, error: Exception, sequence: int) -> None:
        """Answer a request with an error."""
        self._counters.refused(error.code if isinstance(error, BrokerError) else BrokerError.code)
        if isinstance(error, NotOwner):
            self.send(wire.Redirect(error.topic, error.partition, error.address), sequence)
        elif isinstance(error, BrokerError):
            stored = isinstance(error, DurabilityNotReached) and error.stored
            told = self.identity.told(error)[:_SAID]  # what it quotes may be as long as a frame
            self.send(wire.Error(error.code, told, stored, retry_ms=_retry_ms(error)), sequence)
        else:
            self.send(wire.Error("broker_error", "the broker failed; its log says how"), sequence)

    def cannot_read(self, error: Exception, sequence: int) -> None:
        """Answer a request that has not begun; others may have theirs on this connection."""
        if not isinstance(error, BrokerError):
            log.error("a bug, while reading a request of %s", self.peer, exc_info=error)
        self.refuse(error.with_traceback(None), sequence)  # it may be one that is kept

    def close(self) -> None:
        """Close when what was sent before has gone out; nothing more is read."""
        self.flush()
        self._drop_input()
        if self._transport is not None:
            self._transport.close()

    def _drop_input(self) -> None:
        self._reader, self._frames = FrameReader(0), None
        self._count_buffered()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    # Requests

    def _receive(self, frame: Frame) -> None:
        if not self.greeted and frame.type != Type.INFO:
            raise ProtocolError("the first frame of a connection must be INFO")
        if frame.type == Type.OK:  # the answer to a heartbeat, or bodies have been deleted
            self._context.bodies.answered(self, frame.sequence)
            return
        try:
            if frame.type == Type.PUBLISH:
                self.publishes.begin(frame)
            elif frame.type == Type.PUBLISHES:
                self._taken += self.publishes.begin_several(frame)
            elif frame.type == Type.ACKS:
                self._taken += self._acks.begin_several(frame)
            elif frame.type == Type.FLOW:
                self._flow(wire.properties_of(frame, wire.Flow), frame.sequence)
            elif frame.type == Type.HEARTBEAT:
                self.send(wire.Properties(), frame.sequence)
            else:
                self._acks.begin(frame)
        except Exception as error:
            self.cannot_read(error, frame.sequence)

    def _flow(self, request: wire.Flow, sequence: int) -> None:
        consumer = self.streams.get(request.stream)
        if consumer is None:  # it has just ended; the client will have been told
            if request.limit is not None:
                raise InvalidArgument(f"there is no consumer with stream {request.stream} on this connection")
            return
        if request.paused is not None:
            consumer.pause(request.paused)
        if request.limit is not None:
            check_int("limit", request.limit, 0, MAX_PERMITS)
            consumer.limit(request.limit, sequence, request.gone)
        if request.permits > 0 and consumer.at_most_once:
            consumer.take_back(request.permits, request.partition)
        else:
            consumer.give(0)

    # Publishing

    def refuse_next(self, topic: str, partition: int, error: Exception) -> None:
        """A PUBLISH is to be tried again: what comes behind it must not overtake it."""
        self.publishes.refuse_next(topic, partition, error)

    def published(self, pending: Pending, reply: wire.PublishReply) -> None:
        """Answer a PUBLISH."""
        self._done(pending)
        special = reply.duplicates or reply.unmatched or reply.full or reply.unowed or reply.delayed
        if special or not self.several:
            self.send(reply, pending.sequence)
        elif self._transport is not None:
            self._schedule()
            self._stored += (pending.sequence, reply.ledger, reply.first, reply.published_ms)

    def publish_failed(self, pending: Pending, error: Exception) -> None:
        """Answer a PUBLISH."""
        self._done(pending)
        self.refuse(error, pending.sequence)

    def _done(self, pending: Pending) -> None:
        self.inflight -= pending.size
        self._memory.inflight -= pending.size
        self.regulate()
        self._memory.listen_again()

    def regulate(self) -> None:
        """Listen only while there is room for what the client may ask."""
        held_back = self.alive and self.inflight > 0 and self._memory.over_limit
        if held_back:
            self._memory.paused.add(self)
        else:
            self._memory.paused.discard(self)
        wanted = (
            self.writable
            and self.inflight < _INFLIGHT
            and self._requests.under_way < _REQUESTS
            and not held_back
        )
        if wanted != self._reading and self.alive:
            assert self._transport is not None
            self._reading = wanted
            if wanted:
                self.heard = self._loop.time()
                self._loop.call_soon(self._go_on)
            else:
                self._transport.pause_reading()


def _retry_ms(error: BrokerError) -> int:
    """Return after how long a retry may succeed, 0 where nobody knows."""
    return round(error.retry_after * 1_000) if isinstance(error, Overloaded) else 0
