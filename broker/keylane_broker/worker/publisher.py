"""Stores what is published to a partition, in the order of its frames, and sees that it is answered."""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from keylane import wire
from keylane.errors import BrokerError, InvalidArgument
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.tail import MANY
from keylane_broker.engine.turns import AT_ONCE
from keylane_broker.engine.values import STALE, Capacity, Extras, Lease, NumberedFrame, PublishResult
from keylane_broker.store.connection import SharedConnection
from keylane_broker.worker.acks import Ack, names_of
from keylane_broker.worker.body_deletion import OWN
from keylane_broker.worker.clock import instant
from keylane_broker.worker.confirmations import Confirmations, Pending, PublishingClient
from keylane_broker.worker.consumer import FRAME
from keylane_broker.worker.dispatcher import Dispatcher
from keylane_broker.worker.gathering import Gathering
from keylane_broker.worker.hot_keys import HotKeys
from keylane_broker.worker.leased_partition import LeasedPartition

log = logging.getLogger("keylane.broker")

_PRODUCERS = 100  # in one call, which may read 64 stretches of numbers of each


class _Turn(NamedTuple):
    """A call under way that stores messages and, where a dispatcher has joined it, leases them."""

    lease: Lease
    route: SharedConnection
    batch: list[Pending]
    flat: list[str]
    dispatcher: Dispatcher | None
    rooms: list[Capacity]
    acks: list[Ack]  # that it takes along
    at_ms: int
    stored: list[PublishResult]  # once it is known


class Publisher:
    """The publishes of one partition that are not answered yet."""

    def __init__(
        self,
        partition: LeasedPartition,
        dispatchers: Mapping[str, Dispatcher],
        gathering: Gathering,
        *,
        appended: Callable[[int], None],
        expect: Callable[[float], None],
        expires: Callable[[float], None],
    ) -> None:
        self.busy = False  # something is being stored, or about to be
        self.hot_keys = HotKeys()
        self.confirmations = Confirmations(partition, self._take_queued)
        self._partition = partition
        self._dispatchers = dispatchers
        self._gathering = gathering
        self._appended = appended  # hears up to which entry the log goes
        self._expect = expect  # hears when something falls due
        self._expires = expires  # hears when a message does
        self._counters = partition.engine.store.counters
        self._counts = self._counters.topic(partition.topic)
        self._pending: deque[Pending] = deque()  # in the order in which they are stored
        self._waited = False  # for a dispatcher that was busy
        self._noted_epoch = 0  # in which it was noted that clients have payload stores of their own

    def publish(self, pending: Pending) -> None:
        """Add to what waits; while one script call is under way, all that comes gathers for the next."""
        self._pending.append(pending)
        if not self.busy:
            self.busy = True
            self._partition.begin_call()  # and ends when all are stored or refused
            self._gathering.begin_publish(self._begin)

    def _begin(self) -> None:
        """Store the next that can go together, in a turn if that is possible."""
        if not self._pending:  # it was refused meanwhile
            self._waited = False
            self._end()
            return
        if not self._waited and any(dispatcher.busy for dispatcher in self._dispatchers.values()):
            # The answer to its fetch may just have come: in the next turn of the loop it may join.
            self._waited = True
            self._gathering.begin_publish(self._begin)
            return
        self._waited = False
        batch = _gather(self._pending)
        flat = [text for pending in batch for text in pending.flat] if len(batch) > 1 else batch[0].flat
        self.hot_keys.add(flat)
        if not self._begin_turn(batch, flat):
            self._partition.background.start(self._publish_slowly, batch, flat)
            self._offer_behind(len(flat) // 3)

    def _end(self) -> None:
        if self._pending:
            self._gathering.begin_publish(self._begin)
        else:
            self.busy = False
            self._partition.end_call()

    def _offer(self) -> None:
        """Let the dispatchers fetch."""
        for dispatcher in list(self._dispatchers.values()):
            dispatcher.offer()

    def _offer_behind(self, count: int, *, but: Dispatcher | None = None) -> None:
        """Let them fetch behind a call just sent, whose answer they need not wait for.

        Who leases many messages by their keys had better: then these are known here, not to be read again.
        """
        for dispatcher in list(self._dispatchers.values()):
            if dispatcher is not but and (count <= MANY or dispatcher.mode != "key_shared"):
                dispatcher.offer(count)

    # The ordinary case: one call, and no task that waits for its answer

    def _begin_turn(self, batch: list[Pending], flat: list[str]) -> bool:
        """Send a call that stores messages; returns False where this is to be done slowly."""
        first, partition, engine = batch[0], self._partition, self._partition.engine
        lease, route = partition.held_lease(first.incarnation), engine.store.route(partition.key)
        if lease is None or route is None or partition.background.stopping:
            return False
        if first.durability != "memory" or first.dues is not None or len(flat) > AT_ONCE * 3:
            return False
        size, own = 0, False
        if _is_named(batch) and engine.stored_before(lease, flat):
            return False
        for pending in batch:
            if pending.extras:
                return False
            size += pending.size
            own |= pending.connection.store == OWN
        if (
            size > FRAME
            or (own and self._noted_epoch != lease.epoch)
            or not self.confirmations.may_begin(lease)
        ):
            return False
        joined, rooms = self._join(len(flat) // 3)
        acks = joined.acks.take() if joined else []
        turn = _Turn(lease, route, batch, flat, joined, rooms, acks, partition.clock.now_ms(), [])
        if joined:
            call = engine.turn_call(
                lease,
                joined.subscription,
                flat,
                rooms,
                others=joined.others,
                acks=[ack.whole for ack in acks],
                names=names_of(acks),
                frames=_frames_of(batch),
            )
        else:
            call = engine.publish_call(lease, flat, frames=_frames_of(batch))
        engine.store.post(route, call, partial(self._answered, turn))
        if joined and len(flat) <= MANY * 3:
            self._lease_behind(turn)
        else:
            self._offer_behind(len(flat) // 3, but=joined)
        return True

    def _lease_behind(self, turn: _Turn) -> None:
        """Have the other dispatchers lease what a turn stores, in calls right behind it; else they fetch."""
        engine, count = self._partition.engine, len(turn.flat) // 3
        for dispatcher in list(self._dispatchers.values()):
            if dispatcher is turn.dispatcher:
                continue
            first, rooms = dispatcher.next_entry, dispatcher.join_turn(count)
            if not rooms:
                dispatcher.offer(count)
                continue
            self._partition.begin_call()
            call = engine.lease_call(
                turn.lease, dispatcher.subscription, first, turn.flat, rooms, dispatcher.others
            )
            engine.store.post(turn.route, call, partial(self._leased_behind, turn, dispatcher, rooms))

    def _leased_behind(self, turn: _Turn, dispatcher: Dispatcher, rooms: list[Capacity], answer: Any) -> None:
        """Take in what has come of such a call: the answer to the turn has come before."""
        try:
            if answer is None or (not isinstance(answer, Exception) and answer[0] != "OK"):
                dispatcher.turn_refused(rooms, by_acks=False)
            elif isinstance(answer, Exception) or not turn.stored:
                dispatcher.turn_lost(rooms)
            else:
                fetched = self._partition.engine.take_leased(
                    turn.lease, turn.flat, turn.stored[0], rooms, answer, turn.at_ms
                )
                left = dispatcher.deliver_turn(rooms, fetched, at_once=turn.route.idle)
                dispatcher.turn_taken(rooms, fetched, left)
                if fetched.shares:
                    self._counters.delivery_seconds.add(self._counters.now() - turn.batch[0].came)
        finally:
            self._partition.end_call()

    def _join(self, count: int) -> tuple[Dispatcher | None, list[Capacity]]:
        """Return a dispatcher whose fetch is done in the same call, and its room."""
        for dispatcher in self._dispatchers.values():
            if rooms := dispatcher.join_turn(count):
                return dispatcher, rooms
        return None, []

    def _answered(self, turn: _Turn, answer: Any) -> None:
        """Take in what has come of a turn."""
        if answer is None or (not isinstance(answer, Exception) and answer[0] != "OK"):
            self._partition.background.start(self._publish_slowly, turn.batch, turn.flat)
            self._give_up(turn)
            self._offer()
            return
        try:
            if isinstance(answer, Exception):
                self._turn_lost(turn, answer)
            else:
                self._turn_taken(turn, answer)
        finally:
            self._end()

    def _turn_taken(self, turn: _Turn, answer: list[Any]) -> None:
        engine = self._partition.engine
        if turn.dispatcher is None:
            result = engine.take_published(turn.lease, turn.flat, answer)
        else:
            taken = engine.take_turn(turn.lease, turn.flat, turn.rooms, answer, turn.at_ms)
            result = taken.published
            turn.stored.append(result)
            # First, since somebody waits for it: at once, unless there are others to be written with it.
            left = turn.dispatcher.deliver_turn(turn.rooms, taken.fetched, at_once=turn.route.idle)
            engine.learn_turn(turn.lease, turn.flat, taken)
            turn.dispatcher.turn_taken(turn.rooms, taken.fetched, left)
        self._confirm(turn.batch, self._replies(turn.batch, result))
        self._time(turn.batch)
        if turn.dispatcher is not None:
            if taken.fetched.shares:
                self._counters.delivery_seconds.add(self._counters.now() - turn.batch[0].came)
            if turn.acks:
                turn.dispatcher.acks.done(turn.acks, taken.record, part=taken.part)

    def _time(self, batch: list[Pending]) -> None:
        """Count how long the first of a batch took from frame to answer."""
        self._counters.publish_seconds.add(self._counters.now() - batch[0].came)

    def _turn_lost(self, turn: _Turn, error: Exception) -> None:
        """It is not known what was done."""
        if turn.dispatcher is not None:
            turn.dispatcher.turn_lost(turn.rooms)
            if turn.acks:
                turn.dispatcher.acks.failed(turn.acks, error)
        self._refuse(turn.batch, error)

    def _give_up(self, turn: _Turn) -> None:
        """Nothing was done."""
        if turn.dispatcher is not None:
            turn.dispatcher.turn_refused(turn.rooms, by_acks=bool(turn.acks))
            if turn.acks:
                turn.dispatcher.acks.not_done(turn.acks)

    # All other cases

    async def _publish_slowly(self, batch: list[Pending], flat: list[str]) -> None:
        try:
            await self._publish_some(batch, flat)
        finally:
            self._end()

    def _refuse(self, batch: list[Pending], error: Exception) -> None:
        if not isinstance(error, BrokerError):
            log.error("a bug while publishing to %s", self._partition, exc_info=error)
        self.confirmations.refuse(batch, error)
        self._offer()  # it may have been stored all the same

    async def _publish_some(self, batch: list[Pending], flat: list[str]) -> None:
        """Store messages, all for now or all for later, and have them confirmed at their level."""
        call = self._partition.call
        level, incarnation = batch[0].durability, batch[0].incarnation
        try:
            if any(pending.connection.store == OWN for pending in batch):
                await call(self._note_own_stores, incarnation)
            if level != "memory":
                await call(lambda engine, lease: engine.require(lease, level), incarnation)
            if _is_named(batch):
                await call(lambda engine, lease: self._know_again(engine, lease, flat), incarnation)
            step = self._append if batch[0].dues is None else self._delay
            replies = await call(lambda engine, lease: step(engine, lease, batch, flat), incarnation)
        except Exception as error:
            self._refuse(batch, error)
            return
        self._confirm(batch, replies)
        if level == "memory":  # else it is answered later
            self._time(batch)

    def _confirm(self, batch: list[Pending], replies: list[wire.PublishReply]) -> None:
        """Have publishes answered that were stored."""
        for pending, reply in zip(batch, replies, strict=True):
            if STALE in reply.duplicates.values():
                self.confirmations.refuse([pending], _stale(pending))
            else:
                self.confirmations.stored(pending, reply)

    async def _note_own_stores(self, engine: Engine, lease: Lease) -> None:
        """Know that somebody else than a worker must delete bodies, before there is one."""
        if self._noted_epoch != lease.epoch:
            await engine.note_own_store(lease)
            self._noted_epoch = lease.epoch

    async def _know_again(self, engine: Engine, lease: Lease, flat: list[str]) -> None:
        """Let messages be duplicates of those that were stored by number, if they have their uids."""
        if found := engine.stored_before(lease, flat):
            now_ms, marks_due_ms = await engine.mark(lease, found)
            self._expect(instant(marks_due_ms, now_ms))

    async def _append(
        self, engine: Engine, lease: Lease, batch: list[Pending], flat: list[str]
    ) -> list[wire.PublishReply]:
        """Put messages into the log; return what to answer each PUBLISH."""
        self.confirmations.begin(lease)
        return self._replies(
            batch, await engine.publish_flat(lease, flat, _extras_of(batch), _frames_of(batch))
        )

    def _replies(self, batch: list[Pending], result: PublishResult) -> list[wire.PublishReply]:
        """Let others know what was stored; return what to answer each PUBLISH."""
        if result.expires_due_ms:
            self._expires(instant(result.expires_due_ms, result.published_ms))
        if result.stored or result.full:  # of which there may be a record
            self._expect(instant(result.marks_due_ms, result.published_ms))
        if result.behind:
            self._partition.compare()
        self._appended(result.first + result.stored - 1)
        unowed = result.no_subscribers > 0 and not result.unmatched
        self._count(result)
        start, first, replies = 0, result.first, []
        for pending in batch:
            count = len(pending.flat) // 3
            duplicates = _part(result.duplicates, start, count)
            unmatched = _places(result.unmatched, start, count)
            replies.append(
                wire.PublishReply(
                    result.ledger,
                    first,
                    result.published_ms,
                    unowed,
                    duplicates,
                    unmatched=unmatched,
                    full=(full := _places(result.full, start, count)),
                )
            )
            start += count
            first += count - len(duplicates) - len(unmatched) - len(full)
        return replies

    def _count(self, result: PublishResult) -> None:
        self._counters.publish_batch.add(result.size)
        self._counts.published += result.stored
        if result.duplicates:
            self._counts.duplicates += len(result.duplicates)
        if result.no_subscribers:
            self._counts.no_subscribers += result.no_subscribers
            if not self._counts.told_unowed and not result.unmatched:
                self._counts.told_unowed = True
                topic = self._partition.topic
                log.info("topic %r has no subscription: what is published to it is not kept", topic)
                self._partition.background.start(self._partition.engine.announce, f"unowed {topic}")

    async def _delay(
        self, engine: Engine, lease: Lease, batch: list[Pending], flat: list[str]
    ) -> list[wire.PublishReply]:
        """Keep messages until they are due; return what to answer each PUBLISH."""
        self.confirmations.begin(lease)
        dues = [due_ms for pending in batch for due_ms in pending.dues or ()]
        result = await engine.delay_flat(lease, flat, dues, _extras_of(batch))
        self._expect(instant(result.next_due_ms, result.now_ms))
        self._counters.publish_batch.add(len(dues))
        self._counts.published += len(dues) - len(result.duplicates) - len(result.full)
        self._counts.duplicates += len(result.duplicates)
        start, replies = 0, []
        for pending in batch:
            count = len(pending.flat) // 3
            duplicates = _part(result.duplicates, start, count)
            replies.append(
                wire.PublishReply(
                    0,
                    0,
                    result.now_ms,
                    duplicates=duplicates,
                    delayed=True,
                    full=_places(result.full, start, count),
                )
            )
            start += count
        return replies

    def _take_queued(self, connections: set[PublishingClient]) -> list[Pending]:
        """Take out of the queue what these connections sent."""
        behind = [pending for pending in self._pending if pending.connection in connections]
        for pending in behind:
            self._pending.remove(pending)
        return behind


def _stale(pending: Pending) -> InvalidArgument:
    """Return why messages are not stored whose numbers have passed."""
    assert pending.numbered is not None
    producer, number, _, size, _ = pending.numbered
    return InvalidArgument(
        f"producer {producer!r} has said that it waits for no answer to some of the numbers {number} to "
        f"{number + size - 1}, so these are not stored: number new messages on from there"
    )


def _frames_of(batch: list[Pending]) -> list[NumberedFrame]:
    """Return the numbers of messages; either all of a batch have some, or none."""
    return [pending.numbered for pending in batch if pending.numbered is not None]


def _is_named(batch: list[Pending]) -> bool:
    """Return whether somebody chose uids of numbered messages."""
    return any(pending.numbered is not None and pending.numbered.named for pending in batch)


def _gather(queue: deque[Pending]) -> list[Pending]:
    """Return the next that can go together."""
    first = queue.popleft()
    batch, room = [first], wire.MAX_BATCH * 3 - len(first.flat)
    producers = {first.numbered.producer} if first.numbered else set()
    while queue and len(queue[0].flat) <= room and queue[0].terms == first.terms:
        if numbered := queue[0].numbered:
            producers.add(numbered.producer)
            if len(producers) > _PRODUCERS:
                break
        room -= len(queue[0].flat)
        batch.append(queue.popleft())
    return batch


def _extras_of(batch: list[Pending]) -> Extras | None:
    """Return what messages of several frames have besides, by their places among all of them."""
    if not any(pending.extras for pending in batch):
        return None
    extras, start = {}, 0
    for pending in batch:
        extras.update({start + place: its for place, its in (pending.extras or {}).items()})
        start += len(pending.flat) // 3
    return extras


def _places(places: list[int], start: int, count: int) -> list[int]:
    """Return those of `count` messages from one on, by their places among them."""
    return [place - start for place in places if start <= place < start + count]


def _part(duplicates: dict[int, str], start: int, count: int) -> dict[int, str]:
    """Return those of `count` messages from one on, by their places among them."""
    if not duplicates:
        return {}
    return {index - start: duplicates[index] for index in range(start, start + count) if index in duplicates}
