"""Stores what is published to a partition, in the order of its frames, and sees that it is answered."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta

from keylane import wire
from keylane.errors import BrokerError, InvalidArgument
from keylane_broker.engine.checks import check_abouts, check_dues, check_flat
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Lease
from keylane_broker.store.durability import replicas
from keylane_broker.worker.body_deletion import OWN
from keylane_broker.worker.clock import instant
from keylane_broker.worker.confirmations import Confirmations, Pending, PublishingClient
from keylane_broker.worker.leased_partition import LeasedPartition

log = logging.getLogger("keylane.broker")

_TEXTS = Annotated[list[str], Meta(max_length=wire.MAX_BATCH * 3)]  # bounded before memory is set aside


class Publisher:
    """The publishes of one partition that are not answered yet."""

    def __init__(
        self,
        partition: LeasedPartition,
        *,
        notify: Callable[[], None],
        appended: Callable[[int], None],
        expect: Callable[[float], None],
    ) -> None:
        self.busy = False  # something is being stored
        self.confirmations = Confirmations(partition, self._take_queued)
        self._partition = partition
        self._notify = notify  # lets the dispatchers fetch
        self._appended = appended  # hears up to which entry the log goes
        self._expect = expect  # hears when something falls due
        self._pending: deque[Pending] = deque()  # in the order in which they are stored
        self._noted_epoch = 0  # in which it was noted that clients have payload stores of their own

    def publish(self, pending: Pending) -> None:
        """Add to what waits; while one script call is under way, all that comes gathers for the next."""
        self._pending.append(pending)
        if not self.busy:
            self.busy = True
            self._partition.background.start(self._publish_all)
            self._notify()  # behind a publish just sent a fetch need not wait for its answer

    async def _publish_all(self) -> None:
        try:
            await self._publish_some(_gather(self._pending))
            while self._pending:
                asyncio.get_running_loop().call_soon(self._notify)
                await self._publish_some(_gather(self._pending))
        finally:
            self.busy = False

    async def _publish_some(self, batch: list[Pending]) -> None:
        """Store messages, all for now or all for later, and have them confirmed at their level."""
        call = self._partition.call
        level, incarnation = batch[0].durability, batch[0].incarnation
        flat = [text for pending in batch for text in pending.flat] if len(batch) > 1 else batch[0].flat
        try:
            if any(pending.connection.store == OWN for pending in batch):
                await call(self._note_own_stores, incarnation)
            if level != "memory":
                await call(lambda engine, lease: engine.require(lease, level), incarnation)
            step = self._append if batch[0].dues is None else self._delay
            replies = await call(lambda engine, lease: step(engine, lease, batch, flat), incarnation)
        except Exception as error:
            if not isinstance(error, BrokerError):
                log.exception("a bug while publishing to %s", self._partition)
            self.confirmations.refuse(batch, error)
            self._notify()  # it may have been stored all the same
            return
        for pending, reply in zip(batch, replies, strict=True):
            self.confirmations.stored(pending, reply)

    async def _note_own_stores(self, engine: Engine, lease: Lease) -> None:
        """Know that somebody else than a worker must delete bodies, before there is one."""
        if self._noted_epoch != lease.epoch:
            await engine.note_own_store(lease)
            self._noted_epoch = lease.epoch

    async def _append(
        self, engine: Engine, lease: Lease, batch: list[Pending], flat: list[str]
    ) -> list[wire.PublishReply]:
        """Put messages into the log; return what to answer each PUBLISH."""
        self.confirmations.begin(lease)
        result = await engine.publish_flat(lease, flat)
        if result.stored:
            self._expect(instant(result.marks_due_ms, result.published_ms))
        self._appended(result.first + result.stored - 1)
        start, first, replies = 0, result.first, []
        for pending in batch:
            count = len(pending.flat) // 3
            duplicates = _part(result.duplicates, start, count)
            replies.append(
                wire.PublishReply(
                    result.ledger, first, result.published_ms, result.no_subscribers > 0, duplicates
                )
            )
            start += count
            first += count - len(duplicates)
        return replies

    async def _delay(
        self, engine: Engine, lease: Lease, batch: list[Pending], flat: list[str]
    ) -> list[wire.PublishReply]:
        """Keep messages until they are due; return what to answer each PUBLISH."""
        self.confirmations.begin(lease)
        dues = [due_ms for pending in batch for due_ms in pending.dues or ()]
        result = await engine.delay_flat(lease, flat, dues)
        self._expect(instant(result.next_due_ms, result.now_ms))
        start, replies = 0, []
        for pending in batch:
            count = len(pending.flat) // 3
            duplicates = _part(result.duplicates, start, count)
            replies.append(wire.PublishReply(0, 0, result.now_ms, duplicates=duplicates, delayed=True))
            start += count
        return replies

    def _take_queued(self, connections: set[PublishingClient]) -> list[Pending]:
        """Take out of the queue what these connections sent."""
        behind = [pending for pending in self._pending if pending.connection in connections]
        for pending in behind:
            self._pending.remove(pending)
        return behind


def messages_of(request: wire.Publish, body: memoryview) -> list[str]:
    """Return the messages of a PUBLISH, if they can be published."""
    flat: list[str] = wire.unpack(body, _TEXTS)
    check_flat(flat)
    check_abouts(flat)
    replicas(request.durability)
    if not 0 < request.timeout_ms <= 60_000:
        raise InvalidArgument(f"timeout_ms is {request.timeout_ms}: use 1 to 60000")
    if request.due_ms is not None:
        check_dues(flat, request.due_ms)
    return flat


def _gather(queue: deque[Pending]) -> list[Pending]:
    """Return the next that can go together."""
    first = queue.popleft()
    batch, room = [first], wire.MAX_BATCH * 3 - len(first.flat)
    while queue and len(queue[0].flat) <= room and queue[0].terms == first.terms:
        room -= len(queue[0].flat)
        batch.append(queue.popleft())
    return batch


def _part(duplicates: dict[int, str], start: int, count: int) -> dict[int, str]:
    """Return those of `count` messages from one on, by their places among them."""
    if not duplicates:
        return {}
    return {index - start: duplicates[index] for index in range(start, start + count) if index in duplicates}
