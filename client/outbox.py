"""What waits to be published to one partition: gathered into frames, sent in order, sent again in order."""

import asyncio
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from client import wire
from client.bodies import Bodies
from client.connection import Connection, Redirected
from client.errors import (
    BacklogFull,
    BrokerError,
    ConnectionClosed,
    DurabilityNotReached,
    Overloaded,
    ProtocolError,
    TopicNotFound,
    Unavailable,
)
from client.map import TopicMap
from client.outgoing import Slice
from client.seeds import backoff
from client.tasks import Tasks
from client.wire import MAX_BATCH, Frame

_IN_FLIGHT = 8  # frames of a partition that wait for an answer
_TEXT = 1_000_000  # characters in a frame, of up to four bytes each: far from what is too much for a worker
_LAST = 96 * 1024  # bytes: the message with which a frame is full, and what goes around all of them
_RIGHT_PLACE = Overloaded | BacklogFull | DurabilityNotReached  # said by the worker that has the partition
_GATHER = 1.0  # seconds in which publishes share a frame: they share its time limit as well


class Answer(NamedTuple):
    """What became of `size` messages of a frame, from its message `start` on."""

    parcel: "Parcel"
    reply: wire.PublishReply
    start: int
    size: int


class _State(Enum):
    FILLING = 1
    UPLOADING = 2
    READY = 3
    SENT = 4
    FAILED = 5  # to be sent again
    DONE = 6


class Parcel:
    """The messages of one PUBLISH frame and who waits for them."""

    __slots__ = (
        "answer",
        "bodies",
        "calls",
        "created",
        "dues",
        "durability",
        "flat",
        "resent",
        "size",
        "state",
        "strict",
        "text",
    )

    def __init__(self, created: float, durability: str, later: bool) -> None:
        self.created = created
        self.durability = durability
        self.dues: list[int] | None = [] if later else None
        self.answer: asyncio.Future[Frame] | None = None  # that is waited for
        self.flat: list[str] = []  # key, uid, about, …
        self.bodies: dict[int, tuple[str, bytes]] = {}  # place in the frame -> name, body
        self.calls: list[tuple[asyncio.Future[Answer], int, int]] = []
        self.size = 0  # messages
        self.text = 0  # characters
        self.state = _State.FILLING
        self.resent = False
        self.strict = False  # without it nothing goes out that was added behind it, in the same way

    def fail(self, error: BaseException) -> None:
        """Tell everybody who waits."""
        self.state = _State.DONE
        for future, _, _ in self.calls:
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: somebody who was cancelled does not look

    def leave_out(self, refused: Mapping[int, BaseException]) -> list[str]:
        """Go on without some of those who wait, by their places in `calls`; the names of their bodies."""
        before, calls, names = (self.flat, self.bodies, self.dues), self.calls, list[str]()
        self.flat, self.bodies, self.calls, self.size = [], {}, [], 0
        self.dues = None if self.dues is None else []
        for at, (future, start, count) in enumerate(calls):
            bodies = {place: before[1][place] for place in range(start, start + count) if place in before[1]}
            if (error := refused.get(at)) is not None:
                names += [name for name, _ in bodies.values()]
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # retrieved: somebody who was cancelled does not look
                continue
            self.calls.append((future, self.size, count))
            self.flat += before[0][start * 3 : (start + count) * 3]
            self.bodies.update({place - start + self.size: body for place, body in bodies.items()})
            if self.dues is not None and before[2] is not None:
                self.dues += before[2][start : start + count]
            self.size += count
        return names

    def succeed(self, reply: wire.PublishReply) -> None:
        """Tell everybody who waits."""
        self.state = _State.DONE
        for future, start, count in self.calls:
            if not future.done():
                future.set_result(Answer(self, reply, start, count))


class Outbox:
    """The way of one producer into one partition: order holds within it, whatever the durability."""

    def __init__(self, where: TopicMap, partition: int, limit: float, bodies: Bodies, tasks: Tasks) -> None:
        self.topic = where.topic
        self.partition = partition
        self._map = where
        self._peer = where.owner(partition)
        where.watchers[self._look] = None
        self._limit = limit  # seconds until what is not answered is given up
        self._bodies = bodies
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Parcel] = deque()  # the last may still be filled
        self._started: list[Parcel] = []  # uploading, sent or failed, in the order of publishing
        self._pumping: asyncio.Handle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._sent_to: Connection | None = None  # where the last frame went
        self._blocked = False  # a frame failed: nothing goes out until those behind it are answered
        self._recovery: asyncio.Task[None] | None = None
        self._again = False  # the next frame says that it follows a failure
        self._attempt = 0
        self._error: BrokerError | None = None  # what went wrong last
        self._broken: BaseException | None = None  # a strict parcel was given up: none goes out any more

    def add(self, item: Slice, *, strict: bool = False) -> list[asyncio.Future[Answer]]:
        """Queue messages and bodies; a future for each frame.

        With `dues` they are to be published later, each at its time. What is `strict` has no gaps: once a
        part was given up, nothing behind that is sent, and who publishes all of it again keeps the order.
        """
        flat, bodies, text, dues = item.flat, item.bodies, item.text, item.dues
        if strict and self._broken is not None:
            refused: asyncio.Future[Answer] = self._loop.create_future()
            refused.set_exception(self._broken)
            return [refused]
        answers = []
        size = len(flat) // 3
        start = 0
        while start < size:
            parcel = self._open_parcel(item.durability, bool(dues))
            parcel.strict |= strict
            count = min(size - start, MAX_BATCH - parcel.size)
            if parcel.text + text > self._most:
                count = _fitting(flat, start, count, self._most - parcel.text)
            answer: asyncio.Future[Answer] = self._loop.create_future()
            parcel.calls.append((answer, parcel.size, count))
            for place in range(start, start + count) if bodies else ():
                if (body := bodies.get(place)) is not None:
                    parcel.bodies[place - start + parcel.size] = body
            if count == size:
                parcel.flat += flat
                parcel.text += text
            else:
                some = flat[start * 3 : (start + count) * 3]
                parcel.flat += some
                parcel.text += sum(map(len, some))
            if parcel.dues is not None:
                parcel.dues += dues[start : start + count]
            parcel.size += count
            start += count
            answers.append(answer)
        self._schedule()
        return answers

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, and nothing has to be remembered."""
        return not (self._started or self._waiting or self._recovery or self._broken)

    def close(self, error: BaseException) -> None:
        """Give up what is not answered."""
        self._map.watchers.pop(self._look, None)
        for timer in (self._pumping, self._expiry):
            if timer is not None:
                timer.cancel()
        for parcel in (*self._started, *self._waiting):
            parcel.fail(error)

    @property
    def _most(self) -> int:
        """Characters in a frame: the workers may take less than is ours to send."""
        return max(1, min(_TEXT, (self._map.max_frame - _LAST) // 4))

    def _open_parcel(self, durability: str, later: bool) -> Parcel:
        now = self._loop.time()
        if self._waiting:
            last = self._waiting[-1]
            fits = last.size < MAX_BATCH and last.text < self._most and now - last.created < _GATHER
            if fits and last.durability == durability and (last.dues is not None) == later:
                return last
        parcel = Parcel(now, durability, later)
        self._waiting.append(parcel)
        if self._expiry is None:
            self._expiry = self._loop.call_at(now + self._limit, self._expire)
        return parcel

    # Sending

    def _schedule(self) -> None:
        if self._pumping is None:
            self._pumping = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Start what may start, and send what is ready: always in order."""
        self._pumping = None
        self._start_parcels()
        for parcel in self._started:
            if self._blocked:
                break
            if parcel.state is _State.READY:
                connection = self._peer.current if self._peer is not None else None
                if connection is None:
                    self._fail(parcel, self._no_connection())
                elif not connection.writable:
                    connection.when_writable(self._schedule)
                    break
                else:
                    self._send(parcel, connection)
            elif parcel.state is not _State.SENT:
                break
        self._recover_when_quiet()

    def _start_parcels(self) -> None:
        """Start a parcel if none is under way, or it is full, or another waits behind it."""
        while self._waiting and len(self._started) < _IN_FLIGHT:
            first = self._waiting[0]
            if self._started and first.size < MAX_BATCH and len(self._waiting) == 1:
                return
            self._started.append(self._waiting.popleft())
            if first.bodies:
                first.state = _State.UPLOADING
                self._tasks.start(self._upload(first))
            else:
                first.state = _State.READY

    def _send(self, parcel: Parcel, connection: Connection) -> None:
        parcel.state = _State.SENT
        answer = connection.request(
            wire.Publish(
                self.topic, self.partition, parcel.durability, again=self._again, due_ms=parcel.dues
            ),
            wire.pack(parcel.flat),
        )
        self._again = False
        parcel.answer, self._sent_to = answer, connection
        answer.add_done_callback(lambda answer: self._answered(parcel, answer))

    async def _upload(self, parcel: Parcel) -> None:
        attempt = 0
        while parcel.state is _State.UPLOADING:
            try:
                await self._bodies.put(self.topic, list(parcel.bodies.values()), parcel.durability)
                if parcel.state is _State.UPLOADING:
                    parcel.state = _State.READY
                    # Only the names are needed from here on.
                    parcel.bodies = {place: (name, b"") for place, (name, _) in parcel.bodies.items()}
            except BrokerError as error:
                if not error.retriable:
                    if await self._sift(parcel):
                        continue
                    self._drop(parcel, error)
                    break
                self._error = error
                await asyncio.sleep(backoff(attempt))
                attempt += 1
            except Exception as error:  # a store of the user's own may raise anything
                self._drop(parcel, error)
                break
        self._schedule()

    async def _sift(self, parcel: Parcel) -> bool:
        """The store refuses a body for good: fail those who published it, and go on with the others."""
        if len(parcel.calls) < 2 or parcel.strict:
            return False
        refused: dict[int, BrokerError] = {}
        for at, (_, start, count) in enumerate(parcel.calls):
            some = [parcel.bodies[place] for place in range(start, start + count) if place in parcel.bodies]
            try:
                await self._bodies.put(self.topic, some, parcel.durability)
            except BrokerError as error:
                if not error.retriable:
                    refused[at] = error
        if parcel.state is _State.UPLOADING and 0 < len(refused) < len(parcel.calls):
            self._bodies.forget(self.topic, parcel.leave_out(refused))
            return True
        return False

    # Answers

    def _answered(self, parcel: Parcel, answer: asyncio.Future[Frame]) -> None:
        if parcel.state is _State.DONE:  # given up
            self._recover_when_quiet()
            return
        error = answer.exception()
        if error is None:
            try:
                reply = wire.properties_of(answer.result(), wire.PublishReply)
            except BrokerError as problem:
                error = problem
            else:
                self._attempt, self._error = 0, None
                self._started.remove(parcel)
                parcel.succeed(reply)
                self._schedule()
                return
        self._refused(parcel, error)
        self._schedule()

    def _refused(self, parcel: Parcel, error: BaseException) -> None:
        if not isinstance(error, BrokerError) or not error.retriable:
            self._drop(parcel, error)
        elif isinstance(error, DurabilityNotReached) and error.stored:
            self._drop(parcel, error)  # it is in its place, and what was sent behind it is behind it
        elif isinstance(error, DurabilityNotReached) and not self._blocked:
            # The level is out of reach. The worker refuses what was sent behind it.
            self._drop(parcel, error)
            self._blocked = True
        else:
            self._fail(parcel, error)

    def _fail(self, parcel: Parcel, error: BrokerError) -> None:
        if parcel.strict and self._broken is not None:
            parcel.resent = True  # it may have arrived: its body stays
            self._drop(parcel, self._broken)
            return
        parcel.state = _State.FAILED
        self._error = error
        self._blocked = True

    def _drop(self, parcel: Parcel, error: BaseException) -> None:
        in_doubt = _may_be_stored(parcel, error)
        if parcel in self._started:
            self._started.remove(parcel)
        parcel.fail(error)
        if parcel.strict and self._broken is None:
            self._broken = error
            for other in [*self._started, *self._waiting]:
                if other.strict and other.state not in (_State.SENT, _State.DONE):
                    if other in self._waiting:
                        self._waiting.remove(other)
                    other.resent |= other.state is _State.FAILED  # it may have arrived: its body stays
                    self._drop(other, error)
        if not in_doubt:
            self._bodies.forget(self.topic, [name for name, _ in parcel.bodies.values()])

    def _recover_when_quiet(self) -> None:
        sent = any(parcel.state is _State.SENT for parcel in self._started)
        if self._blocked and self._recovery is None and not sent:
            self._recovery = self._tasks.start(self._recover())

    async def _recover(self, known: bool = False) -> None:
        """Wait a little, and for a connection; then all that failed goes out again, in order.

        If the map has just told who has the partition it is `known`.
        """
        try:
            while self._started:
                if not known and self._peer is not None and self._peer.current is not None:
                    await asyncio.sleep(backoff(self._attempt, 0.02, 1.0))
                self._attempt += 1
                if await self._reach(known):
                    break
                known = False
        finally:
            if self._recovery is asyncio.current_task():
                self._recovery = None
        self._blocked = False
        self._again = True
        for parcel in self._started:
            if parcel.state is _State.FAILED:
                parcel.state = _State.READY
                parcel.resent = True
        self._schedule()

    async def _reach(self, known: bool) -> bool:
        """Find out who has the partition, and connect there; whether that has worked."""
        error, peer = self._error, self._peer
        try:
            if known:
                pass
            elif isinstance(error, Redirected) and error.address and self._map.owners:
                if peer is None or peer.address != error.address:
                    self._map.redirected(self.partition, error.address)
                    self._map.renew()
            elif peer is None or not isinstance(error, _RIGHT_PLACE):
                await self._map.refresh()
            if self._peer is None:
                return False
            await self._peer.connect()
        except BrokerError as problem:
            self._error = problem
            if not problem.retriable:
                for parcel in (*self._started, *self._waiting):
                    self._drop(parcel, problem)
                self._waiting.clear()
            return False
        return True

    def _look(self) -> None:
        """The map has changed: nothing new goes to the old owner, and what it does not answer to the new one.

        It answers what it has stored, and redirects the rest; unless it says nothing at all.
        """
        before, peer = self._peer, self._map.owner(self.partition)
        if peer is before:
            return
        self._peer = peer
        moved = Redirected(self.topic, self.partition, peer.address if peer is not None else "")
        for parcel in self._started:
            if parcel.state is _State.SENT and parcel.answer is not None and self._sent_to is not None:
                self._blocked = True
                self._sent_to.wait_while_heard(parcel.answer, moved)
        if self._recovery is not None and peer is not None:  # whatever it waits for, this is news
            self._recovery.cancel()
            self._recovery = self._tasks.start(self._recover(known=True))

    def _no_connection(self) -> BrokerError:
        peer = self._peer
        if peer is None:
            return Unavailable(f"no worker serves partition {self.partition} of {self.topic!r} yet")
        return peer.error or ConnectionClosed(f"no connection to the worker at {peer.address}")

    def _no_answer(self) -> BrokerError:
        return Unavailable(
            f"partition {self.partition} of {self.topic!r} has not answered in {self._limit:g} s; "
            "whether it was stored is not known"
        )

    def _expire(self) -> None:
        """Give up what has waited for too long, with the last thing that went wrong."""
        self._expiry = None
        now, limit = self._loop.time(), self._limit
        for parcel in (*self._started, *self._waiting):
            if now < parcel.created + limit:
                self._expiry = self._loop.call_at(parcel.created + limit, self._expire)
                break
            if parcel in self._waiting:
                self._waiting.remove(parcel)
            parcel.resent = True  # it may have arrived: its body stays
            self._drop(parcel, self._error or self._no_answer())
        self._schedule()


def _may_be_stored(parcel: Parcel, error: BaseException) -> bool:
    """Whether messages that are given up may be in the log all the same: then their bodies stay."""
    if parcel.resent or (isinstance(error, DurabilityNotReached) and error.stored):
        return True
    if parcel.answer is None or isinstance(error, TopicNotFound):  # never sent; or gone with the topic
        return False
    # Nobody has said what became of it, or somebody has failed who may have stored it before.
    return parcel.state is _State.FAILED or type(error) in (BrokerError, ProtocolError)


def _fitting(flat: list[str], start: int, count: int, room: int) -> int:
    """How many of the messages it takes to use up the room, at most `count`."""
    for taken in range(1, count):
        at = (start + taken - 1) * 3
        room -= sum(map(len, flat[at : at + 3]))
        if room <= 0:
            return taken
    return count
