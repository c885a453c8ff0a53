"""What waits to be published to one partition: gathered into frames, sent in order, sent again in order."""

import asyncio
from bisect import bisect_left
from collections import deque
from enum import Enum
from functools import partial
from typing import NamedTuple

from keylane import wire
from keylane.connect.connection import Connection, Redirected
from keylane.connect.partition_map import TopicMap
from keylane.errors import (
    BacklogFull,
    BrokerError,
    ConnectionClosed,
    DurabilityNotReached,
    Overloaded,
    ProtocolError,
    TopicNotFound,
    TopicReplaced,
    Unavailable,
)
from keylane.payloads.bodies import Bodies
from keylane.produce.limit import Room
from keylane.produce.outgoing import Slice
from keylane.retry import backoff
from keylane.tasks import Tasks
from keylane.wire import MAX_BATCH, Frame

_IN_FLIGHT = 8  # frames of a partition that wait for an answer
_TEXT = 1_000_000  # characters in a frame, of up to four bytes each: far from what is too much for a worker
_LAST = 96 * 1024  # bytes: the message with which a frame is full, and what goes around all of them
_RIGHT_PLACE = Overloaded | BacklogFull | DurabilityNotReached  # said by the worker that has the partition
_GATHER = 1.0  # seconds in which publishes share a frame: they share its time limit as well


class _State(Enum):
    FILLING = 1
    UPLOADING = 2
    READY = 3
    SENT = 4
    FAILED = 5  # to be sent again
    DONE = 6


class Ticket:
    """Some messages of a call, all in one parcel, and who waits for their answer."""

    __slots__ = ("answer", "count", "length", "parcel", "refused", "start")

    def __init__(
        self, parcel: "Parcel", answer: "asyncio.Future[wire.PublishReply | None]", count: int
    ) -> None:
        self.parcel = parcel
        self.answer = answer  # None: each of them was refused
        self.start = parcel.size  # their places in the frame
        self.count = count
        self.length = 0  # bytes that they take
        self.refused: dict[int, Exception] = {}  # those that are not in the frame any more, of all of them

    def fail(self, error: BaseException) -> None:
        """Tell who waits."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # retrieved: somebody who was cancelled does not look


class Added(NamedTuple):
    """What went into an outbox for a call, and who will answer."""

    outbox: "Outbox"
    durability: str
    places: list[int]  # in the call
    tickets: list[Ticket]

    def withdraw(self) -> None:
        """Nobody waits any more: what was never sent is not going to be."""
        for ticket in self.tickets:
            ticket.answer.cancel()
            self.outbox.withdraw(ticket)


class Parcel:
    """The messages of one PUBLISH frame and who waits for them."""

    __slots__ = (
        "answer",
        "bodies",
        "created",
        "dues",
        "durability",
        "flat",
        "gone",
        "leaving",
        "length",
        "queued",
        "resent",
        "size",
        "state",
        "strict",
        "text",
        "tickets",
        "upload",
    )

    def __init__(self, created: float, durability: str, later: bool) -> None:
        self.created = created
        self.durability = durability
        self.dues: list[int] | None = [] if later else None
        self.answer: asyncio.Future[Frame] | None = None  # that is waited for; None if it was never sent
        self.flat: list[str] = []  # key, uid, about, …
        self.bodies: dict[int, tuple[str, bytes]] = {}  # place in the frame -> name, body
        self.tickets: list[Ticket] = []
        self.size = 0  # messages
        self.text = 0  # characters
        self.queued = self.length = 0  # messages and bytes for which it has room
        self.gone: set[int] = set()  # places to be left out of the frame
        self.leaving: list[Ticket] = []  # whose bodies are being stored
        self.upload: asyncio.Task[Exception | None] | None = None
        self.state = _State.FILLING
        self.resent = False
        self.strict = False  # without it nothing goes out that was added behind it, in the same way

    def fail(self, error: BaseException) -> None:
        """Tell everybody who waits."""
        for ticket in self.tickets:
            ticket.fail(error)

    def succeed(self, reply: wire.PublishReply) -> None:
        """Tell everybody who waits."""
        for ticket in self.tickets:
            if not ticket.answer.done():
                ticket.answer.set_result(reply)

    def close_ranks(self) -> None:
        """Leave those out that have gone."""
        gone = sorted(self.gone)
        self.gone = set()
        for place in reversed(gone):
            del self.flat[place * 3 : place * 3 + 3]
            if self.dues is not None:
                del self.dues[place]
        self.bodies = {place - bisect_left(gone, place): body for place, body in self.bodies.items()}
        for ticket in self.tickets:
            before, within = bisect_left(gone, ticket.start), bisect_left(gone, ticket.start + ticket.count)
            ticket.start -= before
            ticket.count -= within - before
        self.size -= len(gone)

    def unused(self, reply: wire.PublishReply) -> list[str]:
        """The names of bodies that no message in the log needs."""
        if not self.bodies or not (reply.duplicates or reply.unowed):
            return []
        return [
            name
            for place, (name, _) in self.bodies.items()
            # Sent twice, a duplicate may be this very message, and the body in use.
            if (not self.resent if place in reply.duplicates else reply.unowed)
        ]


class Outbox:
    """The way of one producer into one partition: order holds within it, whatever the durability.

    It is of one topic, and not of another one of that name: for that there are others.
    """

    def __init__(
        self, where: TopicMap, partition: int, limit: float, bodies: Bodies, room: Room, tasks: Tasks
    ) -> None:
        self.topic = where.topic
        self.partition = partition
        self.incarnation = where.incarnation
        self._map = where
        self._peer = where.owner(partition)
        where.watchers[self._look] = None
        self._limit = limit  # seconds until what is not answered is given up
        self._bodies = bodies
        self._room = room  # of which its parcels have theirs, until they end
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
        self.strict = False  # whether it has ever had anything strict to do
        self._retired: TopicReplaced | None = None  # nothing goes out any more

    def add(self, item: Slice, *, strict: bool = False) -> list[Ticket]:
        """Queue messages and bodies, for which there is room; a ticket for each frame.

        With `dues` they are to be published later, each at its time. What is `strict` has no gaps: once a
        part was given up, nothing behind that is sent, and who publishes all of it again keeps the order.
        """
        flat, bodies, text, dues = item.flat, item.bodies, item.text, item.dues
        size = len(flat) // 3
        if (refusal := self._retired or (self._broken if strict else None)) is not None:
            refused = Ticket(Parcel(0.0, item.durability, False), self._loop.create_future(), size)
            refused.fail(refusal)
            return [refused]
        tickets = []
        start = 0
        while start < size:
            parcel = self._open_parcel(item.durability, bool(dues))
            parcel.strict |= strict
            self.strict |= strict
            count = min(size - start, MAX_BATCH - parcel.size)
            if parcel.text + text > self._most:
                count = _fitting(flat, start, count, self._most - parcel.text)
            ticket = Ticket(parcel, self._loop.create_future(), count)
            parcel.tickets.append(ticket)
            length = 0
            for place in range(start, start + count) if bodies else ():
                if (body := bodies.get(place)) is not None:
                    parcel.bodies[place - start + parcel.size] = body
                    length += len(body[1])
            if count == size:
                parcel.flat += flat
                characters = text
            else:
                some = flat[start * 3 : (start + count) * 3]
                parcel.flat += some
                characters = sum(map(len, some))
            parcel.text += characters
            ticket.length = length + characters
            parcel.length += ticket.length
            parcel.queued += count
            self._room.take(count, ticket.length)
            if parcel.dues is not None:
                parcel.dues += dues[start : start + count]
            parcel.size += count
            start += count
            tickets.append(ticket)
        self._schedule()
        return tickets

    def withdraw(self, ticket: Ticket) -> None:
        """Nobody waits for these messages: they go, unless they were sent, or may have been."""
        parcel = ticket.parcel
        if parcel.state is _State.DONE or parcel.answer is not None or ticket not in parcel.tickets:
            return
        parcel.tickets.remove(ticket)
        if not parcel.tickets:
            self._end(parcel)
            self._schedule()
        elif parcel.upload is not None:
            parcel.leaving.append(
                ticket
            )  # the store has the bodies in hands: they take room until it is done
        else:
            self._let_go(parcel, ticket)

    def _let_go(self, parcel: Parcel, ticket: Ticket) -> None:
        """Nothing is left of these messages but their places."""
        places = range(ticket.start, ticket.start + ticket.count)
        parcel.gone.update(places)
        names = [parcel.bodies.pop(place)[0] for place in places if place in parcel.bodies]
        if parcel.state is not _State.FILLING:
            self._bodies.delete_later(self.topic, names, doubtful=parcel.state is _State.UPLOADING)
        texts = slice(ticket.start * 3, (ticket.start + ticket.count) * 3)
        parcel.text -= sum(map(len, parcel.flat[texts]))
        parcel.flat[texts] = [""] * (3 * ticket.count)
        self._release(parcel, ticket.count, ticket.length)

    def _release(self, parcel: Parcel, messages: int, length: int) -> None:
        parcel.queued -= messages
        parcel.length -= length
        self._room.give(messages, length)

    def retire(self, error: TopicReplaced) -> None:
        """The topic is another one: what was sent is answered still, and all else fails."""
        self._retired = error
        self._map.watchers.pop(self._look, None)
        for parcel in (*self._started, *self._waiting):
            if parcel.state is not _State.SENT:
                self._drop(parcel, error)
            elif parcel.answer is not None and self._sent_to is not None:
                self._sent_to.wait_while_heard(parcel.answer, error)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, and nothing has to be remembered."""
        broken = self._broken is not None and self._retired is None
        return not (self._started or self._waiting or self._recovery or broken)

    def close(self, error: BaseException) -> None:
        """Give up what is not answered."""
        self._map.watchers.pop(self._look, None)
        for timer in (self._pumping, self._expiry):
            if timer is not None:
                timer.cancel()
        for parcel in (*self._started, *self._waiting):
            parcel.resent = True  # it may have arrived: its body stays, if it was sent
            self._drop(parcel, error)

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
                first.upload = self._tasks.start(self._upload(first))
                first.upload.add_done_callback(partial(self._uploaded, first))
            else:
                first.state = _State.READY

    def _send(self, parcel: Parcel, connection: Connection) -> None:
        parcel.state = _State.SENT
        if parcel.gone:
            parcel.close_ranks()
        answer = connection.request(
            wire.Publish(
                self.topic,
                self.partition,
                parcel.durability,
                again=self._again,
                due_ms=parcel.dues,
                incarnation=self.incarnation,
            ),
            wire.pack(parcel.flat),
        )
        self._again = False
        parcel.answer, self._sent_to = answer, connection
        answer.add_done_callback(lambda answer: self._answered(parcel, answer))

    # Bodies

    async def _upload(self, parcel: Parcel) -> Exception | None:
        """Store the bodies of a parcel, or find out that it cannot be."""
        attempt = 0
        while True:
            self._let_leave(parcel)
            try:
                await self._put(parcel)
            except BrokerError as error:
                if not error.retriable:
                    return error
                self._error = error
            except Exception as error:  # a store of the user's own may raise anything
                return error
            else:
                return None
            await asyncio.sleep(backoff(attempt))
            attempt += 1

    async def _put(self, parcel: Parcel) -> None:
        """Store bodies; of those that the store refuses for good each fails by itself."""
        refused: dict[int, Exception] = {}
        parts = [list(parcel.bodies)]
        while parts:
            places = parts.pop()
            try:
                bodies = [parcel.bodies[place] for place in places]
                await self._bodies.put(self.topic, bodies, parcel.durability)
            except Exception as error:
                if parcel.strict or (isinstance(error, BrokerError) and error.retriable):
                    raise
                if len(places) == 1:
                    refused[places[0]] = error
                else:
                    half = len(places) // 2
                    parts += [places[half:], places[:half]]
        if refused:
            self._refuse(parcel, refused)

    def _refuse(self, parcel: Parcel, refused: dict[int, Exception]) -> None:
        """Go on without some messages, of which those who wait are told."""
        self._bodies.delete_later(self.topic, [parcel.bodies.pop(place)[0] for place in refused])
        self._let_leave(parcel)
        parcel.gone.update(refused)
        for ticket in list(parcel.tickets):
            places = range(ticket.start, ticket.start + ticket.count)
            ticket.refused = {place - ticket.start: refused[place] for place in places if place in refused}
            if len(ticket.refused) == ticket.count:
                parcel.tickets.remove(ticket)
                if not ticket.answer.done():
                    ticket.answer.set_result(None)
        parcel.close_ranks()
        if not parcel.tickets:
            self._end(parcel)

    def _uploaded(self, parcel: Parcel, upload: "asyncio.Task[Exception | None]") -> None:
        parcel.upload = None
        if parcel.state is _State.DONE:  # given up meanwhile: the store may go on with what it was sent
            self._clear(parcel, forget=True, doubtful=True)
        elif (error := upload.result()) is not None:
            self._drop(parcel, error)
        else:
            self._let_leave(parcel)
            parcel.state = _State.READY
            # Only the names are needed from here on.
            parcel.bodies = {place: (name, b"") for place, (name, _) in parcel.bodies.items()}
        self._schedule()

    def _let_leave(self, parcel: Parcel) -> None:
        """The store has no bodies in hands: who wanted to leave can."""
        leaving, parcel.leaving = parcel.leaving, []
        for ticket in leaving:
            self._let_go(parcel, ticket)

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
                parcel.succeed(reply)
                self._bodies.delete_later(self.topic, parcel.unused(reply))
                self._end(parcel, forget=False)
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
        if self._retired is not None:
            self._drop(parcel, self._retired)
            return
        if parcel.strict and self._broken is not None:
            parcel.resent = True  # it may have arrived: its body stays
            self._drop(parcel, self._broken)
            return
        parcel.state = _State.FAILED
        self._error = error
        self._blocked = True

    def _drop(self, parcel: Parcel, error: BaseException) -> None:
        """Give a parcel up, and what must not go out without it; nothing if that was done before."""
        if parcel.state is _State.DONE:  # it went along with a strict one
            return
        in_doubt = _may_be_stored(parcel, error)
        if parcel.gone:
            parcel.close_ranks()
        parcel.fail(error)
        self._end(parcel, forget=not in_doubt)
        if parcel.strict and self._broken is None:
            self._broken = error
            for other in [*self._started, *self._waiting]:
                if other.strict and other.state not in (_State.SENT, _State.DONE):
                    other.resent |= other.state is _State.FAILED  # it may have arrived: its body stays
                    self._drop(other, error)

    def _end(self, parcel: Parcel, *, forget: bool = True) -> None:
        """A parcel is done with: its room ends, and its bodies, if nobody is owed them."""
        if parcel.state is _State.DONE:
            return
        parcel.state = _State.DONE
        if parcel in self._started:
            self._started.remove(parcel)
        else:
            self._waiting.remove(parcel)
            forget = False  # nothing was stored yet
        if parcel.upload is not None:
            parcel.upload.cancel()  # the bodies are in the store's hands until that has ended
        else:
            self._clear(parcel, forget=forget)

    def _clear(self, parcel: Parcel, *, forget: bool, doubtful: bool = False) -> None:
        if forget:
            names = [name for name, _ in parcel.bodies.values()]
            self._bodies.delete_later(self.topic, names, doubtful=doubtful)
        self._release(parcel, parcel.queued, parcel.length)

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
                parcel.resent = parcel.answer is not None
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
        now, limit = self._loop.time(), self._limit
        for parcel in (*self._started, *self._waiting):
            if now < parcel.created + limit:
                break
            parcel.resent = True  # it may have arrived: its body stays, if it was sent
            self._drop(parcel, self._error or self._no_answer())
        left = (*self._started, *self._waiting)  # the oldest first
        self._expiry = self._loop.call_at(left[0].created + limit, self._expire) if left else None
        self._schedule()


def _may_be_stored(parcel: Parcel, error: BaseException) -> bool:
    """Whether messages that are given up may be in the log all the same: then their bodies stay."""
    if parcel.answer is None:  # never sent
        return False
    if isinstance(error, TopicNotFound):  # gone with the topic
        return False
    if parcel.resent or (isinstance(error, DurabilityNotReached) and error.stored):
        return True
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
