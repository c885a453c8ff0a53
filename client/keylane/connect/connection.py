"""One connection to a worker: frames out, answers and pushes in, heartbeats both ways."""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from typing import cast

from keylane import errors, wire
from keylane.connect.gathered_frames import frame_of_acks, frame_of_publishes, terms_of
from keylane.errors import BrokerError, ConnectionClosed, Fenced, ProtocolError, error_named
from keylane.wire import Frame, Properties, Type

_NOTHING = memoryview(b"")
_LOST_AFTER = 3  # heartbeat intervals without a byte from the other side
_TOGETHER = 64 * 1024  # characters of requests that go in one frame,
_LEAST_FRAME = 1024 * 1024  # which is far less than this, with all that goes around them
_SILENCE = 2.0  # seconds without a byte from a worker that owes an answer, until it is suspected


class Redirected(Fenced):
    """Another worker serves the partition now; `address` is "" where that is not known."""

    def __init__(self, topic: str, partition: int, address: str) -> None:
        super().__init__(f"partition {partition} of {topic!r} is served by {address or 'another worker'}")
        self.partition = partition
        self.address = address


Redirected.code = Fenced.code  # to users it is the same


def error_from(said: wire.Error) -> BrokerError:
    """Return the exception for what an ERROR frame says."""
    return error_named(said.code, said.message, stored=said.stored, retry_after=said.retry_ms / 1_000)


def give_up(answer: asyncio.Future[Frame], error: BrokerError) -> None:
    """Wait no longer for an answer; if it comes all the same, nobody hears it."""
    if not answer.done():
        answer.set_exception(error.again())  # others may hear the same
        answer.exception()  # retrieved: not everybody who asked looks


class Events:
    """What a connection tells whoever keeps it."""

    def told_time(self, drift: float, trip: float) -> None:
        """So many seconds is the cluster's clock ahead of ours, give or take half of `trip`."""

    store = ""  # the payload store that it can delete from: "advertised" or its "own"

    def delete_bodies(self, connection: "Connection", topic: str, names: list[str], sequence: int) -> None:
        """A worker wants bodies to be deleted, and to hear when they are."""

    def moved(self, topic: str) -> None:
        """The partition map of a topic has changed."""

    def fell_silent(self, connection: "Connection") -> None:
        """The worker owes an answer, and nothing has come from it for a while."""


class Connection(asyncio.Protocol):
    """Made by `dialling.connect`; `closed` is done when it has ended, with the reason as its result."""

    def __init__(self, address: str, events: Events) -> None:
        self.address = address
        self.maps: set[str] = set()  # topics whose map was asked for here: MOVED tells when they change
        self.used = 0.0  # when something was last asked, heartbeats apart
        self.streams: dict[int, Callable[[Frame], None]] = {}  # who gets what comes for a consumer
        self.info: wire.InfoReply
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[BrokerError] = self._loop.create_future()
        self._transport: asyncio.Transport
        self._reader = wire.FrameReader()
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._sequence = 0
        self._largest: int | None = None  # frame that the worker takes
        self._out: list[bytes] = []
        self._several = False  # the worker takes several requests in a frame
        self._publishes: list[tuple[wire.Publish, list[str]]] = []  # behind those that are out, for one frame
        self._acks: list[tuple[wire.Ack, list[str | int]]] = []  # or these
        self._length = self._messages = 0  # characters in them, and messages that they stand for
        self._writable = True
        self._wake: dict[Callable[[], None], None] = {}
        self._heard = 0.0
        self._answering = False  # somebody has an answer, and has not gone on yet
        self._timer: asyncio.TimerHandle | None = None
        self._reason: BrokerError | None = None
        self._events = events
        self._watch: asyncio.TimerHandle | None = None  # while an answer is owed
        self._owed = 0.0  # since when one is
        self._doubtful: dict[asyncio.Future[Frame], BrokerError] = {}  # to be given up when it is silent
        self._probed = 0.0  # when a heartbeat was sent to find out whether the worker is there
        self._suspected = 0.0  # when it was found that it may not be

    # What others call

    @property
    def silent(self) -> bool:
        """Whether the worker owes an answer and has said nothing for a while."""
        return self._suspected > self._heard

    @property
    def session_left(self) -> float:
        """Seconds that the sessions of our consumers last at least, if the worker is no more.

        It has renewed them as long as we heard it, every third of a session, or somewhat later.
        """
        return self.info.session_ms / 2_000 - (self._loop.time() - self._heard)

    @property
    def busy(self) -> bool:
        """Whether a consumer or an answer is to come over it."""
        return bool(self.streams) or any(not answer.done() for answer in self._answers.values())

    @property
    def writable(self) -> bool:
        """Whether the network takes what is written."""
        return self._writable

    def when_writable(self, call: Callable[[], None]) -> None:
        """Call once, as soon as the network takes more or the connection has ended."""
        self._wake[call] = None

    def request(self, properties: Properties, body: bytes = b"") -> asyncio.Future[Frame]:
        """Send a frame that is answered; the future has the OK frame, or raises what the worker said."""
        answer: asyncio.Future[Frame] = self._loop.create_future()
        if self._reason is not None:
            give_up(answer, self._reason)
            return answer
        self._send_gathered()  # their sequences come before
        data = wire.frame(properties, self._sequence + 1, body=body)
        if self._largest is not None and len(data) - 4 > self._largest:
            # The worker would end the connection, and with it all that others have asked.
            give_up(
                answer,
                errors.MessageTooLarge(
                    f"a frame of {len(data) - 4} bytes: the worker takes up to {self._largest} (max_frame)"
                ),
            )
            return answer
        self._expect(answer)
        self._write(data)
        return answer

    def _expect(self, answer: asyncio.Future[Frame]) -> None:
        """A request is about to be sent, with the next sequence."""
        self.used = self._loop.time()
        if self._watch is None:
            self._owed = self.used
            self._watch = self._loop.call_later(_SILENCE / 2, self._look)
        self._sequence += 1
        self._answers[self._sequence] = answer

    def publish(self, request: wire.Publish, flat: list[str], length: int) -> asyncio.Future[Frame]:
        """Publish messages of so many characters, with others of this turn of the event loop in one frame."""
        if not self._takes_several(length) or request.extras or not request.number:
            return self.request(request, wire.pack(flat))
        if self._acks or (self._publishes and terms_of(self._publishes[0][0]) != terms_of(request)):
            self._send_gathered()
        self._gather(length, len(flat) // 3)
        self._publishes.append((request, flat))
        return self._answers[self._sequence]

    def ack(self, request: wire.Ack, flat: list[str | int]) -> asyncio.Future[Frame]:
        """Settle messages, with others of this turn of the event loop in one frame."""
        length, messages = 32 * len(flat), sum(flat[3::4]) - sum(flat[2::4]) + len(flat) // 4  # type: ignore[arg-type]
        if not self._takes_several(length) or messages > wire.MAX_BATCH:
            return self.request(request, wire.pack(flat))
        if self._publishes:
            self._send_gathered()
        self._gather(length, messages)
        self._acks.append((request, flat))
        return self._answers[self._sequence]

    def _takes_several(self, length: int) -> bool:
        return self._several and self._reason is None and length <= _TOGETHER // 4

    def _gather(self, length: int, messages: int) -> None:
        """Make room for a request in the frame that is being filled, and expect its answer."""
        if self._length + length > _TOGETHER or self._messages + messages > wire.MAX_BATCH:
            self._send_gathered()
        self._length += length
        self._messages += messages
        if not (self._out or self._publishes or self._acks):
            self._loop.call_soon(self._flush)
        self._expect(self._loop.create_future())

    def _send_gathered(self) -> None:
        """Put the requests that were gathered behind what is out."""
        publishes, acks = self._publishes, self._acks
        if publishes:
            self._publishes = []
            self._out.append(frame_of_publishes(publishes, self._sequence))
        elif acks:
            self._acks = []
            self._out.append(frame_of_acks(acks, self._sequence))
        self._length = self._messages = 0

    def wait_while_heard(self, answer: asyncio.Future[Frame], error: BrokerError) -> None:
        """Give a request up with an error if the worker says nothing: another can be asked instead."""
        if self.silent:
            give_up(answer, error)
        elif not answer.done():
            self._doubtful[answer] = error
            answer.add_done_callback(lambda answer: self._doubtful.pop(answer, None))

    def send(self, properties: Properties) -> None:
        """Send a frame that is not answered."""
        self._write(wire.frame(properties))

    def answer(self, sequence: int) -> None:
        """Say that what the worker has asked is done."""
        if self._reason is None:
            self._write(wire.frame(Properties(), sequence))

    def abort(self) -> None:
        """End at once: nobody wants it any more."""
        self.end(ConnectionClosed("the client was closed"))

    def end(self, reason: BrokerError) -> None:
        """End at once, for a reason."""
        if self._reason is None:
            self._reason = reason
        self._transport.abort()

    async def close(self) -> None:
        """Send what is queued, and end."""
        if not self.closed.done():
            self._flush()
            self._reason = self._reason or ConnectionClosed("the client was closed")
            self._transport.close()
            await asyncio.wait({self.closed}, timeout=1.0)
            if not self.closed.done():
                self._transport.abort()
                await asyncio.wait({self.closed})

    async def greet(self, token: str | None, topic: str = "") -> wire.InfoReply:
        """Exchange INFO frames: the beginning of every connection, and later a question."""
        sent, began = time.time(), time.monotonic()
        who = f"keylane-python, process {os.getpid()} on {socket.gethostname()}"
        asked = self.request(wire.Info(wire.VERSIONS, token or "", who, topic, self._events.store))
        if topic:
            self.watch(topic, asked)
        answer = await asked
        info = wire.properties_of(answer, wire.InfoReply)
        if not wire.OLDEST_VERSION <= info.version <= wire.VERSION:
            raise errors.IncompatibleVersion(
                f"the worker at {self.address} speaks version {info.version} of the protocol, this client "
                f"{wire.OLDEST_VERSION} to {wire.VERSION}"
            )
        self._told_time(info.time_ms, sent, began)
        self.info = info
        self._largest = info.max_frame
        self._several = info.version >= wire.SEVERAL and info.max_frame >= _LEAST_FRAME
        self._reader.limit = max(wire.MAX_FRAME, info.max_frame)
        return info

    def watch(self, topic: str, asked: asyncio.Future[Frame]) -> None:
        """A topic's map was asked for: unless that is refused, MOVED tells when it changes."""
        self.maps.add(topic)
        asked.add_done_callback(lambda answer: self._watched(topic, answer))

    def _watched(self, topic: str, answer: asyncio.Future[Frame]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            self.maps.discard(topic)

    def begin_heartbeats(self) -> None:
        """Say from time to time that we are there, and notice when the worker is not."""
        interval = self.info.heartbeat_ms / 1000
        silent = self._loop.time() - self._heard
        if silent > interval * _LOST_AFTER:
            self.end(ConnectionClosed(f"no data from the worker at {self.address} for {silent:.1f} s"))
            return
        if self._reason is None:
            self._beat()
            self._timer = self._loop.call_later(interval, self.begin_heartbeats)

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._heard = self._loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all that waits."""
        why = f" ({exc})" if exc else ""
        reason = self._reason or ConnectionClosed(f"the connection to {self.address} was lost{why}")
        self._reason = reason
        for timer in (self._timer, self._watch):
            if timer is not None:
                timer.cancel()
        for answer in self._answers.values():
            give_up(answer, reason)
        self._answers.clear()
        self.streams.clear()
        if not self.closed.done():
            self.closed.set_result(reason)
        self.resume_writing()

    def pause_writing(self) -> None:
        """The network is slower than we are."""
        self._writable = False

    def resume_writing(self) -> None:
        """The network has caught up."""
        self._writable = True
        waiting, self._wake = self._wake, {}
        for call in waiting:
            call()

    def data_received(self, data: bytes) -> None:
        """Deal with every frame that is complete."""
        self._heard = self._loop.time()
        try:
            for frame in self._reader.feed(data):
                self._received(frame)
        except ProtocolError as error:
            self._break_off(error)

    # Below: how

    def _received(self, frame: Frame) -> None:
        if frame.type == Type.DATA:
            stream = wire.properties_of(frame, _Stream).stream
        elif frame.type == Type.HEARTBEAT:
            self.answer(frame.sequence)
            return
        elif frame.type == Type.DELETE_BODIES:
            topic = wire.properties_of(frame, wire.DeleteBodies).topic
            self._events.delete_bodies(self, topic, wire.unpack(frame.body, list[str]), frame.sequence)
            return
        elif frame.sequence:
            self._answered(frame)
            return
        elif frame.type == Type.ANSWERS:
            self._several_answered(frame)
            return
        elif frame.type == Type.ERROR:
            said = wire.properties_of(frame, wire.Error)
            if said.stream is None:
                self.end(error_from(said))
                return
            stream = said.stream
        elif frame.type in (Type.REDIRECT, Type.FLOW, Type.ENDED):
            stream = wire.properties_of(frame, _Stream).stream
        else:
            if frame.type == Type.MOVED:
                self._events.moved(wire.properties_of(frame, wire.Moved).topic)
            return
        take = self.streams.get(stream)
        if take is None:
            return
        if self._answering:
            # In the order of the wire: whoever waits for an answer that came before goes on before.
            self._loop.call_soon(self._push, take, frame)
        else:
            self._push(take, frame)

    def _push(self, take: Callable[[Frame], None], frame: Frame) -> None:
        try:
            take(frame)
        except ProtocolError as error:
            self._break_off(error)

    def _answered(self, frame: Frame) -> None:
        answer = self._answers.pop(frame.sequence, None)
        if answer is None or answer.done():
            return
        if not self._answering:
            self._answering = True
            self._loop.call_soon(self._loop.call_soon, self._all_answered)
        if frame.type == Type.OK:
            answer.set_result(frame)
            return
        if frame.type == Type.ERROR:
            answer.set_exception(error_from(wire.properties_of(frame, wire.Error)))
        elif frame.type == Type.REDIRECT:
            to = wire.properties_of(frame, wire.Redirect)
            answer.set_exception(Redirected(to.topic, to.partition, to.address))
        else:
            answer.set_exception(ProtocolError(f"the worker answered with a frame of type {frame.type}"))
        answer.exception()  # retrieved: not everybody who asked still waits

    def _several_answered(self, frame: Frame) -> None:
        said = wire.properties_of(frame, wire.Answers)
        if len(said.stored) % 4:
            raise ProtocolError(f"{len(said.stored)} numbers in ANSWERS for publishes, of four each")
        for sequence, ledger, first, published_ms in zip(
            *(said.stored[at::4] for at in range(4)), strict=True
        ):
            reply = wire.pack(wire.PublishReply(ledger, first, published_ms))
            self._answered(Frame(int(Type.OK), sequence, frame.timestamp_ms, memoryview(reply), _NOTHING))
        for sequence in said.settled:
            self._answered(Frame(int(Type.OK), sequence, frame.timestamp_ms, _NOTHING, _NOTHING))

    def _all_answered(self) -> None:
        self._answering = False

    def _write(self, data: bytes) -> None:
        self._send_gathered()
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)

    def _flush(self) -> None:
        self._send_gathered()
        if self._out and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def _break_off(self, error: ProtocolError) -> None:
        self.end(ConnectionClosed(f"the worker at {self.address} broke the protocol: {error}"))

    def _look(self) -> None:
        """While answers are owed: is the worker there at all? Ask it before it is suspected."""
        self._watch = None
        if self._reason is not None or not any(not answer.done() for answer in self._answers.values()):
            return
        self._watch = self._loop.call_later(_SILENCE / 2, self._look)
        now = self._loop.time()
        since = max(self._heard, self._owed)
        if now - since >= _SILENCE * 0.9 and self._probed >= since:
            self._suspected = now
            for answer, error in list(self._doubtful.items()):
                give_up(answer, error)
            self._events.fell_silent(self)
        elif now - since >= _SILENCE * 0.4:
            self._probed = now
            self._beat()

    def _beat(self) -> None:
        sent, began, used = time.time(), time.monotonic(), self.used
        self.request(wire.Heartbeat()).add_done_callback(
            lambda answer: self._heartbeat_answered(answer, sent, began)
        )
        self.used = used

    def _heartbeat_answered(self, answer: asyncio.Future[Frame], sent: float, began: float) -> None:
        if not answer.cancelled() and answer.exception() is None:
            self._told_time(answer.result().timestamp_ms, sent, began)

    def _told_time(self, cluster_ms: int, sent: float, began: float) -> None:
        if cluster_ms:
            trip = time.monotonic() - began
            self._events.told_time(cluster_ms / 1000 - (sent + trip / 2), trip)


class _Stream(Properties, frozen=True):
    stream: int
