"""A partition that this worker serves: its lease, its publishes and its dispatchers."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from keylane import wire
from keylane.errors import BrokerError, Fenced, InvalidArgument, TopicNotFound, TopicReplaced, Unavailable
from keylane_broker.engine.answers import check_incarnation
from keylane_broker.engine.codec import rows
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Delivery, Lease
from keylane_broker.store.pool import Attempts
from keylane_broker.worker.clock import instant
from keylane_broker.worker.confirmations import Confirmations, Pending
from keylane_broker.worker.delays import Delays
from keylane_broker.worker.dispatcher import Dispatcher
from keylane_broker.worker.disposal import OWN

if TYPE_CHECKING:
    from keylane_broker.worker.connection import Connection
    from keylane_broker.worker.worker import Worker

log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY = 0.05  # seconds between attempts at a lease that another worker still holds
_PLACED = 0.5  # seconds to wait for an owner before asking for one again
_LATE = 1.0  # seconds after the end of a lost worker's lease
_FINISHED = 1.0  # seconds that calls have to end before the lease is given up
_TURNS = 3  # of the event loop, from the end of a call to its answer


class Partition:
    """One partition of a topic; whatever of it can be lost is in here."""

    def __init__(self, worker: "Worker", topic: str, number: int) -> None:
        self.worker = worker
        self.topic = topic
        self.number = number
        self.held: Lease | None = None
        self.epoch = 0  # of the last lease
        self.incarnation = 0  # of the topic that it was of then
        self.kept_until = 0.0  # when the lease ends unless it is renewed, by the monotonic clock
        self.leaving = False  # its lease is about to be released
        self.dispatchers: dict[str, Dispatcher] = {}
        self.delays = Delays(self)
        self._taking = Attempts()
        self._sparing = Attempts()
        self._doubts = False  # the lease was lost, so perhaps the partition too
        self._calls = 0  # under way
        self._quiet: asyncio.Future[None] | None = None  # somebody waits until none is
        self._owned = 0  # epoch in which it was noted that clients have payload stores of their own
        self._spared: dict[str, int] = {}  # subscription -> epoch in which its sessions were prolonged
        self._pending: deque[Pending] = deque()  # in the order in which they are stored
        self._publishing = False  # they are being stored
        self.confirmations = Confirmations(self)

    def __str__(self) -> str:
        return f"partition {self.number} of {self.topic!r}"

    # The lease

    @property
    def taking(self) -> bool:
        """Whether its lease is being taken."""
        return self._taking.under_way("lease")

    async def lease(self) -> Lease:
        """The lease, taken if need be; NotOwner if the partition is another worker's."""
        while self.held is None:  # it may be lost again before we hear that it was taken
            await self._taking.join("lease", self._take)
        return self.held

    async def _take(self) -> Lease:
        """Take the lease when the partition is ours and nobody holds it any more."""
        worker, member = self.worker, self.worker.member
        loop = asyncio.get_running_loop()
        end = loop.time() + worker.lease_ms / 1_000 + _LATE
        if self._doubts:
            await member.refresh()
            self._doubts = False
        while not worker.stopping:
            owner = member.owner(self.topic, self.number)
            if owner == worker.id:
                lease = await self._acquire()
                if lease is not None:
                    if member.owner(self.topic, self.number) != worker.id:
                        await worker.engine.release(lease)  # it has just gone elsewhere
                        raise member.not_owner(self.topic, self.number)
                    self._become(lease)
                    return lease
                patience = _RETRY
            elif owner is not None:
                raise member.not_owner(self.topic, self.number)
            else:
                await self._check_existence()
                await member.topics_changed()
                patience = _PLACED
                if member.owner(self.topic, self.number) is not None:
                    continue
            if loop.time() > end:
                raise Unavailable(f"{self} has no owner yet; try again")
            await member.news(patience)
        raise Unavailable("the worker is stopping")

    def _become(self, lease: Lease) -> None:
        """Hold a lease; consumers of a topic that had the name before have nothing more to come."""
        if self.incarnation not in (0, lease.incarnation):
            for dispatcher in list(self.dispatchers.values()):
                dispatcher.end_all(self._replaced())
            self.dispatchers.clear()
        self.held, self.epoch, self.incarnation = lease, lease.epoch, lease.incarnation

    def _replaced(self) -> TopicReplaced:
        return TopicReplaced(f"topic {self.topic!r} was deleted, and another one of that name made since")

    async def lease_of(self, incarnation: int) -> Lease:
        """The lease, if the topic is the one that is meant, else TopicReplaced; 0 is any."""
        try:
            lease = await self.lease()
        except InvalidArgument:  # there is no such partition, in the topic that is there
            about = await self.worker.engine.describe_topic(self.topic)
            check_incarnation(self.topic, incarnation, about.incarnation)
            raise
        if incarnation > lease.incarnation:  # it may be of a topic that is gone, though we have not heard
            about = await self.worker.engine.describe_topic(self.topic)
            if about.incarnation != lease.incarnation:
                self.lose(lease)
                lease = await self.lease()
        check_incarnation(self.topic, incarnation, lease.incarnation)
        return lease

    async def _acquire(self) -> Lease | None:
        worker = self.worker
        began = time.monotonic()
        try:
            # Should the clock of a new master be behind that of the old one, ours is that of the old one.
            lease = await worker.engine.acquire(
                self.topic, self.number, worker.id, worker.lease_ms, known_epoch=worker.now_ms()
            )
        except TopicNotFound as error:
            self.close(error)
            await self._check_existence()
            raise
        self.kept_until = began + worker.lease_ms / 1_000
        if lease is not None:
            self.delays.expect(instant(lease.due_ms, lease.now_ms))
            self.delays.expect(instant(lease.marks_due_ms, lease.now_ms))
            worker.disposal.wake(self.topic, self.number)  # what the owner before has not done
            asyncio.get_running_loop().call_soon(self._watch, lease)  # when it is ours
            if lease.sweep:
                worker.start(worker.engine.reclaim, self.topic, self.number)
        return lease

    async def _check_existence(self) -> None:
        """Raise what says most about a partition that is not there."""
        try:
            about = await self.worker.engine.describe_topic(self.topic)
        except TopicNotFound as error:
            self.close(error)
            raise
        if self.number >= about.partitions:
            beyond = InvalidArgument(
                f"topic {self.topic!r} has no partition {self.number}: it has 0 to {about.partitions - 1}"
            )
            self.close(self._replaced() if self.incarnation else beyond)
            raise beyond

    @property
    def busy(self) -> bool:
        """Whether calls are under way."""
        return self._calls > 0

    @property
    def lapsed(self) -> bool:
        """Whether the lease may have ended since it was last renewed: this process may have stood still."""
        return time.monotonic() > self.kept_until

    def close(self, error: BrokerError) -> None:
        """Serve it no more, since it is gone."""
        for dispatcher in list(self.dispatchers.values()):
            dispatcher.end_all(error)
        self._forget()

    def _forget(self) -> None:
        self.delays.forget()
        if self.worker.partitions.get((self.topic, self.number)) is self:
            del self.worker.partitions[self.topic, self.number]
        self.worker.engine.forget(self.topic, self.number)

    def lose(self, lease: Lease) -> None:
        """Know that a lease is no more; the next call takes another, if the partition is still ours."""
        if self.held is lease:
            log.warning("lost the lease of %s, epoch %d", self, lease.epoch)
            self.doubt()
            self._doubts = True

    def doubt(self) -> None:
        """Let go of the lease: what was stored under it may be gone."""
        self.held = None
        self.confirmations.doubt()

    async def part(self) -> Lease | None:
        """Take no more calls, since another worker is to serve it; answers the lease, to be released.

        Waits until the calls under way are through, but not for ever: those that come too late are fenced.
        """
        lease, self.held = self.held, None
        self.leaving = True
        self.delays.forget()
        if self._calls:
            self._quiet = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._quiet}, timeout=_FINISHED)
            self._quiet = None
            for _ in range(_TURNS):  # so that what they were answered goes out first
                await asyncio.sleep(0)
        return lease

    def leave(self) -> None:
        """Tell the consumers where to go on; what they hold stays theirs."""
        self.leaving = False
        if self.worker.member.owner(self.topic, self.number) in (None, self.worker.id):
            self._feed()  # it has come back
            return
        for dispatcher in list(self.dispatchers.values()):
            dispatcher.part()
        if not (self.busy or self._publishing or self.held or self.taking):  # else at the next look
            self._forget()

    async def call(self, step: Callable[[Engine, Lease], Awaitable[T]], incarnation: int = 0) -> T:
        """Take a step under the lease; after FENCED, which changed nothing, once more under a new one.

        With an `incarnation` only in that topic, and not in another one of its name.
        """
        for _ in range(2):
            lease = await self.lease_of(incarnation)
            self._calls += 1
            try:
                return await step(self.worker.engine, lease)
            except Fenced:
                self.lose(lease)
            except TopicNotFound:  # there may be another of that name: taking its lease tells
                self.lose(lease)
            finally:
                self._end_call()
        raise Fenced(f"another worker serves {self}")

    async def call_once(self, step: Awaitable[T]) -> T:
        """Take a step of which the handing over of the partition is to wait for the end."""
        self._calls += 1
        try:
            return await step
        finally:
            self._end_call()

    def _end_call(self) -> None:
        self._calls -= 1
        if self._quiet is not None and not self._calls and not self._quiet.done():
            self._quiet.set_result(None)

    async def spare(self, subscription: str) -> None:
        """Let consumers of the owner before come back before their sessions count as ended."""

        async def lift(engine: Engine, lease: Lease) -> None:
            if self._spared.get(subscription) != lease.epoch:
                await engine.spare(lease, subscription, self.worker.session_ms)
                self._spared[subscription] = lease.epoch

        if self.held is None or self._spared.get(subscription) != self.held.epoch:
            await self._sparing.join(subscription, lambda: self.call(lift))

    def _watch(self, lease: Lease) -> None:
        """See to the ends of sessions, also of those whose consumers come back to nobody."""
        for name, mode, delivery in rows(lease.in_use, 3):
            dispatcher = self.dispatcher(name, mode, delivery)
            dispatcher.due(0.0)
            dispatcher.wake()

    async def held_by(self, subscription: str, consumer: str, incarnation: int) -> list[Delivery]:
        """What a consumer holds, with deadlines by the worker's clock."""
        return await self.call(
            lambda engine, lease: engine.held(lease, subscription, consumer, at_ms=self.worker.now_ms()),
            incarnation,
        )

    # Publishing

    def publish(self, pending: Pending) -> None:
        """Add to what waits; while one script call is under way, all that comes gathers for the next."""
        self._pending.append(pending)
        if not self._publishing:
            self._publishing = True
            self.worker.start(self._publish_all)
            self._feed()

    async def _publish_all(self) -> None:
        try:
            await self._publish_some(_gather(self._pending))
            while self._pending:
                asyncio.get_running_loop().call_soon(self._feed)
                await self._publish_some(_gather(self._pending))
        finally:
            self._publishing = False

    def _feed(self) -> None:
        """Let the dispatchers fetch; behind a publish just sent they need not wait for its answer."""
        for dispatcher in list(self.dispatchers.values()):
            dispatcher.feed()

    async def _publish_some(self, batch: list[Pending]) -> None:
        """Store messages, all for now or all for later, and have them confirmed at their level."""
        level, incarnation = batch[0].durability, batch[0].incarnation
        flat = [text for pending in batch for text in pending.flat] if len(batch) > 1 else batch[0].flat
        try:
            if any(pending.connection.store == OWN for pending in batch):
                await self.call(self._note_own, incarnation)
            if level != "memory":
                await self.call(lambda engine, lease: engine.require(lease, level), incarnation)
            step = self._append if batch[0].dues is None else self._delay
            replies = await self.call(lambda engine, lease: step(engine, lease, batch, flat), incarnation)
        except Exception as error:
            if not isinstance(error, BrokerError):
                log.exception("a bug while publishing to %s", self)
            self.confirmations.refuse(batch, error)
            self._feed()  # it may have been stored all the same
            return
        for pending, reply in zip(batch, replies, strict=True):
            self.confirmations.stored(pending, reply)

    async def _note_own(self, engine: Engine, lease: Lease) -> None:
        """Know that somebody else than a worker must delete bodies, before there is one."""
        if self._owned != lease.epoch:
            await engine.own(lease)
            self._owned = lease.epoch

    async def _append(
        self, engine: Engine, lease: Lease, batch: list[Pending], flat: list[str]
    ) -> list[wire.PublishReply]:
        """Put messages into the log; answers each its part of the result."""
        self.confirmations.begin(lease)
        result = await engine.publish_flat(lease, flat)
        if result.stored:
            self.delays.expect(instant(result.marks_due_ms, result.published_ms))
        self.appended(result.first + result.stored - 1)
        start, first, replies = 0, result.first, []
        for pending in batch:
            count = len(pending.flat) // 3
            duplicates = _part(result.duplicates, start, count)
            replies.append(
                wire.PublishReply(result.ledger, first, result.published_ms, result.unowed > 0, duplicates)
            )
            start += count
            first += count - len(duplicates)
        return replies

    async def _delay(
        self, engine: Engine, lease: Lease, batch: list[Pending], flat: list[str]
    ) -> list[wire.PublishReply]:
        """Keep messages until they are due."""
        self.confirmations.begin(lease)
        dues = [due_ms for pending in batch for due_ms in pending.dues or ()]
        result = await engine.delay_flat(lease, flat, dues)
        self.delays.expect(instant(result.next_due_ms, result.now_ms))
        start, replies = 0, []
        for pending in batch:
            count = len(pending.flat) // 3
            duplicates = _part(result.duplicates, start, count)
            replies.append(wire.PublishReply(0, 0, result.now_ms, duplicates=duplicates, delayed=True))
            start += count
        return replies

    def appended(self, entry: int) -> None:
        """The log goes up to this entry now."""
        for dispatcher in self.dispatchers.values():
            dispatcher.expect(entry)

    def take_behind(self, connections: set["Connection"]) -> list[Pending]:
        """Take out of the queue what these connections sent."""
        behind = [pending for pending in self._pending if pending.connection in connections]
        for pending in behind:
            self._pending.remove(pending)
        return behind

    # Consuming

    def dispatcher(self, subscription: str, mode: str, delivery: str) -> Dispatcher:
        """The dispatcher of a subscription, made for its first consumer, or for sessions to be ended."""
        dispatcher = self.dispatchers.get(subscription)
        if dispatcher is None:
            dispatcher = self.dispatchers[subscription] = Dispatcher(self, subscription, mode, delivery)
        return dispatcher


def _gather(queue: deque[Pending]) -> list[Pending]:
    """The next that can go together."""
    first = queue.popleft()
    batch, room = [first], wire.MAX_BATCH * 3 - len(first.flat)
    while queue and len(queue[0].flat) <= room and queue[0].terms == first.terms:
        room -= len(queue[0].flat)
        batch.append(queue.popleft())
    return batch


def _part(duplicates: dict[int, str], start: int, count: int) -> dict[int, str]:
    """Those of `count` messages from one on, by their places among them."""
    if not duplicates:
        return {}
    return {index - start: duplicates[index] for index in range(start, start + count) if index in duplicates}
