"""What waits to be published to one partition: gathered into frames, sent in order, sent again in order."""

import asyncio
import secrets
from collections import deque
from typing import NamedTuple

from keylane import wire
from keylane.connect.connection import Connection, Redirected
from keylane.connect.partition_map import TopicMap
from keylane.errors import (
    BrokerError,
    DurabilityNotReached,
    Forbidden,
    TopicReplaced,
    Unavailable,
)
from keylane.payloads.bodies import Bodies
from keylane.produce.answers import backlog_full
from keylane.produce.outgoing import Slice
from keylane.produce.publish_frame import PublishFrame, PublishWaiter, State
from keylane.produce.queue_limit import QueueLimit
from keylane.produce.route import Route
from keylane.produce.uploads import Upload, Uploads, store_bodies
from keylane.retry import pause
from keylane.tasks import Tasks
from keylane.wire import MAX_BATCH, Frame

_IN_FLIGHT = 8  # frames of a partition that wait for an answer
_TEXT = 1_000_000  # characters in a frame, of up to four bytes each: far from what is too much for a worker
_LAST = 96 * 1024  # bytes: the message with which a frame is full, and what goes around all of them
_GATHER = 1.0  # seconds in which publishes share a frame: they share its time limit as well


class Outbox:
    """The way of one producer into one partition: order holds within it, whatever the durability.

    It is of one topic, and not of another one of that name: for that there are others.
    """

    def __init__(
        self,
        where: TopicMap,
        partition: int,
        timeout: float,
        bodies: Bodies,
        uploads: Uploads,
        limit: QueueLimit,
        tasks: Tasks,
    ) -> None:
        self.topic = where.topic
        self.partition = partition
        self.incarnation = where.incarnation
        self._route = Route(where, partition, self._moved)
        self._timeout = timeout  # seconds until what is not answered is given up
        self._bodies = bodies
        self._uploads = uploads
        self._limit = limit  # of which its frames have theirs, until they end
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[PublishFrame] = deque()  # the last may still be filled
        self._started: list[PublishFrame] = []  # uploading, sent or failed, in the order of publishing
        self._pumping: asyncio.Handle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._name = secrets.token_urlsafe(12)  # of the producer that the broker sees: no other has it
        self._next_number = 1
        self._sent_to: Connection | None = None  # where the last frame went
        self._blocked = False  # a frame failed: nothing goes out until those behind it are answered
        self._recovery: asyncio.Task[None] | None = None
        self._again = False  # the next frame says that it follows a failure
        self._attempt = 0
        self._error: BrokerError | None = None  # what went wrong last
        self._broken: BaseException | None = None  # a strict frame was given up: none goes out any more
        self.strict = False  # whether it has ever had anything strict to do
        self._retired: TopicReplaced | None = None  # nothing goes out any more

    def add(self, item: Slice, *, strict: bool = False) -> list[PublishWaiter]:
        """Queue messages and bodies, for which there is room; a waiter for each frame.

        With `dues` they are to be published later, each at its time. What is `strict` has no gaps: once a
        part was given up, nothing behind that is sent, and who publishes all of it again keeps the order.
        """
        size = len(item.flat) // 3
        if (refusal := self._retired or (self._broken if strict else None)) is not None:
            refused = PublishWaiter(
                PublishFrame(0.0, item.durability, False), self._loop.create_future(), size
            )
            refused.fail(refusal)
            return [refused]
        waiters = []
        start = 0
        while start < size:
            frame = self._open_frame(item.durability, bool(item.dues), item.named)
            frame.strict |= strict
            self.strict |= strict
            waiter = frame.add(item, start, self._most, self._loop.create_future())
            self._limit.take(waiter.count, waiter.length)
            start += waiter.count
            waiters.append(waiter)
        self._schedule()
        return waiters

    def withdraw(self, waiter: PublishWaiter) -> None:
        """Nobody waits for these messages: they go, unless they were sent, or may have been."""
        frame = waiter.frame
        if frame.state is State.DONE or frame.answer is not None or waiter not in frame.waiters:
            return
        frame.waiters.remove(waiter)
        if not frame.waiters:
            self._end(frame)
            self._schedule()
        elif frame.upload is not None:
            frame.leaving.append(waiter)  # the store has the bodies in hands: they take room until it is done
        else:
            self._let_go(frame, waiter)

    def _let_go(self, frame: PublishFrame, waiter: PublishWaiter) -> None:
        """Nothing is left of these messages but their places."""
        names = frame.remove(waiter)
        if frame.state is not State.FILLING:
            self._bodies.delete_later(self.topic, names, doubtful=frame.state is State.UPLOADING)
        self._release(frame, waiter.count, waiter.length)

    def _release(self, frame: PublishFrame, messages: int, length: int) -> None:
        frame.queued -= messages
        frame.length -= length
        self._limit.give(messages, length)

    def retire(self, error: TopicReplaced) -> None:
        """The topic is another one: what was sent is answered still, and all else fails."""
        self._retired = error
        self._route.close()
        for frame in (*self._started, *self._waiting):
            if frame.state is not State.SENT:
                self._drop(frame, error)
            elif frame.answer is not None and self._sent_to is not None:
                self._sent_to.wait_while_heard(frame.answer, error)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, and nothing has to be remembered."""
        broken = self._broken is not None and self._retired is None
        return not (self._started or self._waiting or self._recovery or broken)

    def close(self, error: BaseException) -> None:
        """Give up what is not answered."""
        self._route.close()
        for timer in (self._pumping, self._expiry):
            if timer is not None:
                timer.cancel()
        for frame in (*self._started, *self._waiting):
            frame.resent = True  # it may have arrived: its body stays, if it was sent
            self._drop(frame, error)

    @property
    def _most(self) -> int:
        """Characters in a frame: the workers may take less than is ours to send."""
        return max(1, min(_TEXT, (self._route.max_frame - _LAST) // 4))

    def _open_frame(self, durability: str, later: bool, named: bool) -> PublishFrame:
        now = self._loop.time()
        if self._waiting:
            last = self._waiting[-1]
            fits = last.size < MAX_BATCH and last.text < self._most and now - last.created < _GATHER
            same = last.durability == durability and last.named == named
            if fits and same and (last.dues is not None) == later:
                return last
        frame = PublishFrame(now, durability, later, named)
        self._waiting.append(frame)
        if self._expiry is None:
            self._expiry = self._loop.call_at(now + self._timeout, self._expire)
        return frame

    # Sending

    def _schedule(self) -> None:
        if self._pumping is None:
            self._pumping = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Start what may start, and send what is ready: always in order."""
        self._pumping = None
        self._start_frames()
        for frame in self._started:
            if self._blocked:
                break
            if frame.state is State.READY:
                connection = self._route.connection
                if connection is None:
                    self._fail(frame, self._route.error())
                elif not connection.writable:
                    connection.when_writable(self._schedule)
                    break
                else:
                    self._send(frame, connection)
            elif frame.state is not State.SENT:
                break
        self._recover_when_quiet()

    def _start_frames(self) -> None:
        """Start a frame if none is under way, or it is full, or another waits behind it."""
        while self._waiting and len(self._started) < _IN_FLIGHT:
            first = self._waiting[0]
            if self._started and first.size < MAX_BATCH and len(self._waiting) == 1:
                return
            self._started.append(self._waiting.popleft())
            if first.bodies:
                first.state = State.UPLOADING
                first.upload = Upload(self.topic, first, self._upload, self._uploaded)
                self._uploads.start(first.upload)
            else:
                first.state = State.READY

    def _send(self, frame: PublishFrame, connection: Connection) -> None:
        frame.state = State.SENT
        if frame.gone:
            frame.close_ranks()
        if frame.dues is None and not frame.number:  # and keeps it: from now on nothing is left out any more
            frame.number = self._next_number
            self._next_number += frame.size
        answer = connection.publish(
            wire.Publish(
                self.topic,
                self.partition,
                frame.durability,
                again=self._again,
                due_ms=frame.dues,
                incarnation=self.incarnation,
                extras=frame.extras or None,
                producer=self._name if frame.number else "",
                number=frame.number,
                oldest=self._oldest_number(frame),
                named=frame.named and frame.number > 0,
            ),
            frame.flat,
            frame.text,
        )
        self._again = False
        frame.answer, self._sent_to = answer, connection
        answer.add_done_callback(lambda answer: self._answered(frame, answer))

    def _oldest_number(self, frame: PublishFrame) -> int:
        """Return the number of the oldest message whose answer is waited for; of those before it none is."""
        return next((one.number for one in self._started if one.number), 0) if frame.number else 0

    # Bodies

    async def _upload(self, frame: PublishFrame) -> Exception | None:
        """Store the bodies of a frame, or find out that it cannot be."""
        attempt = 0
        while True:
            self._let_leave(frame)
            try:
                refused = await store_bodies(self._bodies, self.topic, frame)
            except BrokerError as error:
                if not error.retriable:
                    return error
                self._error = error
            except Exception as error:  # a store of the user's own may raise anything
                return error
            else:
                if refused:
                    self._refuse(frame, refused)
                return None
            await asyncio.sleep(pause(self._error, attempt))
            attempt += 1

    def _refuse(self, frame: PublishFrame, refused: dict[int, Exception]) -> None:
        """Go on without some messages, of which those who wait are told."""
        names = {place: frame.bodies.pop(place)[0] for place in refused}
        self._bodies.delete_later(
            self.topic, [name for place, name in names.items() if not isinstance(refused[place], Forbidden)]
        )
        self._let_leave(frame)
        frame.refuse(refused)
        if not frame.waiters:
            self._end(frame)

    def _uploaded(self, frame: PublishFrame, error: Exception | None) -> None:
        frame.upload = None
        if frame.state is State.DONE:  # given up meanwhile: the store may go on with what it was sent
            self._clear(frame, forget=True, doubtful=True)
        elif error is not None:
            if isinstance(error, Forbidden):  # nothing was stored, and who may not do that may not delete
                frame.bodies = {}
            self._drop(frame, error)
        else:
            self._let_leave(frame)
            frame.state = State.READY
            # Only the names are needed from here on.
            frame.bodies = {place: (name, b"") for place, (name, _) in frame.bodies.items()}
        if self._pumping is None:
            self._pump()

    def _let_leave(self, frame: PublishFrame) -> None:
        """The store has no bodies in hands: who wanted to leave can."""
        leaving, frame.leaving = frame.leaving, []
        for waiter in leaving:
            self._let_go(frame, waiter)

    # Answers

    def _answered(self, frame: PublishFrame, answer: asyncio.Future[Frame]) -> None:
        if frame.state is State.DONE:  # given up
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
                frame.succeed(reply)
                if frame.strict and reply.full:
                    self._break(backlog_full())
                self._bodies.delete_later(self.topic, frame.unused(reply))
                self._end(frame, forget=False)
                if self._started or self._waiting:
                    self._schedule()
                return
        self._refused(frame, error)
        self._schedule()

    def _refused(self, frame: PublishFrame, error: BaseException) -> None:
        if not isinstance(error, BrokerError) or not error.retriable:
            self._drop(frame, error)
        elif isinstance(error, DurabilityNotReached) and error.stored:
            self._drop(frame, error)  # it is in its place, and what was sent behind it is behind it
        elif isinstance(error, DurabilityNotReached) and not self._blocked:
            # The level is out of reach. The worker refuses what was sent behind it.
            self._drop(frame, error)
            self._blocked = True
        else:
            self._fail(frame, error)

    def _fail(self, frame: PublishFrame, error: BrokerError) -> None:
        if self._retired is not None:
            self._drop(frame, self._retired)
            return
        if frame.strict and self._broken is not None:
            frame.resent = True  # it may have arrived: its body stays
            self._drop(frame, self._broken)
            return
        frame.state = State.FAILED
        self._error = error
        self._blocked = True

    def _drop(self, frame: PublishFrame, error: BaseException) -> None:
        """Give a frame up, and what must not go out without it; nothing if that was done before."""
        if frame.state is State.DONE:  # it went along with a strict one
            return
        in_doubt = frame.may_be_stored(error)
        if frame.gone:
            frame.close_ranks()
        frame.fail(error)
        self._end(frame, forget=not in_doubt)
        if frame.strict:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        """A part of what is strict was given up: nothing behind it is sent; nothing if that was so before."""
        if self._broken is None:
            self._broken = error
            for other in [*self._started, *self._waiting]:
                if other.strict and other.state not in (State.SENT, State.DONE):
                    other.resent |= other.state is State.FAILED  # it may have arrived: its body stays
                    self._drop(other, error)

    def _end(self, frame: PublishFrame, *, forget: bool = True) -> None:
        """A frame is done with: its room ends, and its bodies, if nobody is owed them."""
        if frame.state is State.DONE:
            return
        frame.state = State.DONE
        frame.waiters = []  # each knows its frame, too: without this they would be left to the collector
        if frame in self._started:
            self._started.remove(frame)
        else:
            self._waiting.remove(frame)
            forget = False  # nothing was stored yet
        if frame.upload is not None:
            frame.upload.cancel()  # the bodies are in the store's hands until that has ended
        else:
            self._clear(frame, forget=forget)

    def _clear(self, frame: PublishFrame, *, forget: bool, doubtful: bool = False) -> None:
        if forget:
            names = [name for name, _ in frame.bodies.values()]
            self._bodies.delete_later(self.topic, names, doubtful=doubtful)
        self._release(frame, frame.queued, frame.length)

    def _recover_when_quiet(self) -> None:
        if not self._blocked or self._recovery is not None:
            return
        if not any(frame.state is State.SENT for frame in self._started):
            self._recovery = self._tasks.start(self._recover())

    async def _recover(self, known: bool = False) -> None:
        """Wait a little, and for a connection; then all that failed goes out again, in order.

        If the map has just told who has the partition it is `known`.
        """
        try:
            while self._started:
                if not known and self._route.connection is not None:
                    await asyncio.sleep(pause(self._error, self._attempt, 0.02, 1.0))
                self._attempt += 1
                if await self._reach(known):
                    break
                known = False
        finally:
            if self._recovery is asyncio.current_task():
                self._recovery = None
        self._blocked = False
        self._again = True
        for frame in self._started:
            if frame.state is State.FAILED:
                frame.state = State.READY
                frame.resent = frame.answer is not None
        self._schedule()

    async def _reach(self, known: bool) -> bool:
        """Find out who has the partition, and connect there; whether that has worked."""
        try:
            if not known:
                await self._route.find(self._error)
            if self._route.peer is None:
                return False
            await self._route.peer.connect()
        except BrokerError as problem:
            self._error = problem
            if not problem.retriable:
                for frame in (*self._started, *self._waiting):
                    self._drop(frame, problem)
            return False
        return True

    def _moved(self, to: Redirected) -> None:
        """Another worker has the partition: what the one before does not answer goes to the new one.

        It answers what it has stored, and redirects the rest; unless it says nothing at all.
        """
        for frame in self._started:
            if frame.state is State.SENT and frame.answer is not None and self._sent_to is not None:
                self._blocked = True
                self._sent_to.wait_while_heard(frame.answer, to)
        if self._recovery is not None and self._route.peer is not None:  # whatever it waits for, this is news
            self._recovery.cancel()
            self._recovery = self._tasks.start(self._recover(known=True))

    def _no_answer(self) -> BrokerError:
        return Unavailable(
            f"partition {self.partition} of {self.topic!r} has not answered in {self._timeout:g} s; "
            "it is unknown whether the messages were stored"
        )

    def _expire(self) -> None:
        """Give up what has waited for too long, with the last thing that went wrong."""
        now, limit = self._loop.time(), self._timeout
        for frame in (*self._started, *self._waiting):
            if now < frame.created + limit:
                break
            frame.resent = True  # it may have arrived: its body stays, if it was sent
            self._drop(frame, self._error or self._no_answer())
        left = (*self._started, *self._waiting)  # the oldest first
        self._expiry = self._loop.call_at(left[0].created + limit, self._expire) if left else None
        self._schedule()


class Added(NamedTuple):
    """What went into an outbox for a call, and who will answer."""

    outbox: "Outbox"
    durability: str
    places: list[int]  # in the call
    waiters: list[PublishWaiter]

    def withdraw(self) -> None:
        """Nobody waits any more: what was never sent is not going to be."""
        for waiter in self.waiters:
            waiter.answer.cancel()
            self.outbox.withdraw(waiter)
