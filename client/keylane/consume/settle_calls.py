"""Sends acks, nacks and extensions to the worker of a partition, and applies what it answers."""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from keylane import wire
from keylane.connect.connection import Connection
from keylane.consume.block import HANDED, SETTLING, STALE, Block, Span
from keylane.consume.leases import Leases
from keylane.consume.receipts import ReceiptBatch, SettleKind, merge, receipt_batches, stale_messages
from keylane.consume.streams import Streams
from keylane.consume.worker_stream import WorkerStream
from keylane.errors import BrokerError, ConnectionClosed, Fenced, Unavailable
from keylane.retry import backoff
from keylane.tasks import Tasks
from keylane.wire import Frame, Type

_log = logging.getLogger("keylane.client")


class SettleGroup:
    """Messages of one partition settled in the same way, and who waits for them."""

    __slots__ = ("kind", "later", "partition", "since", "size", "spans", "waiters")

    def __init__(self, partition: int, kind: SettleKind, later: bool) -> None:
        self.partition = partition
        self.kind = kind
        self.later = later  # nobody waits: on_stale hears of those that are stale
        self.since = monotonic()
        self.size = 0  # messages
        self.spans: list[Span] = []
        self.waiters: list[SettleWaiter] = []

    def wait(self, waiter: "SettleWaiter") -> None:
        """Tell one more, once."""
        if not self.waiters or self.waiters[-1] is not waiter:
            self.waiters.append(waiter)
            waiter.pending += 1


class SettleWaiter:
    """Somebody waits until some groups are answered."""

    __slots__ = ("done", "pending")

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pending = 0

    def answered(self, error: Exception | None) -> None:
        """One of its groups is done."""
        self.pending -= 1
        if self.done.done():
            return
        if error is not None:
            self.done.set_exception(error.again() if isinstance(error, BrokerError) else error)
            self.done.exception()  # retrieved: somebody who was cancelled does not look
        elif self.pending == 0:
            self.done.set_result(None)


class Asked(NamedTuple):
    """A frame on its way to a worker."""

    stream: WorkerStream
    connection: Connection | None
    answer: asyncio.Future[Frame]


class SettleCalls:
    """Sends the groups of one consumer until they are answered; `on_end` hears of each that is done with."""

    def __init__(
        self,
        leases: Leases,
        streams: Streams,
        on_extended: Callable[[float], None],
        on_stale: Callable[[Block, int], None],
        on_end: Callable[[SettleGroup], None],
        give_back: Callable[[list[Span]], object],
    ) -> None:
        self.under_way: dict[SettleGroup, None] = {}  # those that are not answered
        self._leases = leases
        self._streams = streams
        self._on_extended = on_extended  # hears the new deadline
        self._on_stale = on_stale
        self._on_end = on_end
        self._give_back = give_back
        self._tasks = Tasks()
        self._quiet = asyncio.Event()  # set when nothing is under way, for who waits for that

    def send(self, group: SettleGroup) -> None:
        """Send a group; it takes a task only where there is something to wait for before its answer."""
        self.under_way[group] = None
        batches = list(receipt_batches(self._leases, merge(group.spans)))
        end = monotonic() + self._streams.timeout
        stream = self._streams.serving(group.partition)
        if stream is None or len(batches) > 1:
            self._tasks.start(self._insist(group, batches, end))
            return
        asked = self._ask(group, batches[0], stream)
        asked.answer.add_done_callback(lambda _: self._answered(group, batches, end, asked))

    async def finish(self) -> None:
        """Wait until everything is answered."""
        while self.under_way:
            self._quiet.clear()
            await self._quiet.wait()

    async def close(self) -> None:
        """Give up what is not answered."""
        await self._tasks.cancel()
        for group in list(self.under_way):
            self._give_up(group, _closed())

    def _ask(self, group: SettleGroup, batch: ReceiptBatch, stream: WorkerStream) -> Asked:
        question = group.kind.properties(self._streams.number, group.partition, batch)
        connection = stream.current
        return Asked(stream, connection, stream.ask(group.partition, question, batch.flat))

    def _answered(self, group: SettleGroup, batches: list[ReceiptBatch], end: float, asked: Asked) -> None:
        """The first answer has come, mostly the last one; or none will, and it is asked for again."""
        if group not in self.under_way:  # given up
            return
        if asked.answer.exception() is not None:
            self._tasks.start(self._insist(group, batches, end, asked))
            return
        try:
            self._apply(group.kind, batches[0], asked.answer.result())
        except Exception as problem:
            self._give_up(group, problem)
        else:
            self._end(group, None)

    async def _insist(
        self, group: SettleGroup, batches: list[ReceiptBatch], end: float, asked: Asked | None = None
    ) -> None:
        """Send a group until it is answered."""
        try:
            for batch in batches:
                answer = await self._exchange(group, batch, end, asked)
                self._apply(group.kind, batch, answer)
                asked, end = None, monotonic() + self._streams.timeout
        except Exception as problem:
            self._give_up(group, problem)
        except asyncio.CancelledError:
            self._give_up(group, _closed())
            raise
        else:
            self._end(group, None)

    def _give_up(self, group: SettleGroup, error: Exception) -> None:
        self._undo(group, error)
        self._end(group, error)

    def _end(self, group: SettleGroup, error: Exception | None) -> None:
        """Tell those who wait what became of a group."""
        del self.under_way[group]
        if group.kind.type == Type.NACK and (withheld := self._leases.rewound(group.spans)):
            self._give_back(withheld)
        for waiter in group.waiters:
            waiter.answered(error)
        for block, start, stop in group.spans if group.later else ():
            if block.states.find(STALE, start, stop) < 0:  # as mostly
                continue
            for index in range(start, stop):
                if block.states[index] == STALE:
                    self._on_stale(block, index)
        if not self.under_way:
            self._quiet.set()
        self._on_end(group)

    async def _exchange(
        self, group: SettleGroup, batch: ReceiptBatch, end: float, asked: Asked | None
    ) -> Frame:
        """Ask until there is an answer: a lost connection or a moment's trouble is not one."""
        partition, attempt = group.partition, 0
        while True:
            if asked is None:
                stream = await self._streams.reach(partition, max(0.0, end - monotonic()))
                asked = self._ask(group, batch, stream)
            try:
                return await asked.answer
            except BrokerError as error:
                if group.kind.type != Type.EXTEND:  # it may have been done all the same
                    for block, start, stop in batch.spans:
                        block.doubtful.update(range(start, stop))
                wait = backoff(attempt)
                # A consumer that is being subscribed anew is not known to the worker for a moment.
                passing = error.retriable or asked.stream.current is not asked.connection
                if not passing or monotonic() + wait > end:
                    raise
                serves = self._streams.serving(partition) is asked.stream
                if isinstance(error, Fenced | Unavailable) and serves:
                    self._streams.doubt(partition, error)
            asked = None
            attempt += 1
            await asyncio.sleep(wait)

    def _apply(self, kind: SettleKind, batch: ReceiptBatch, answer: Frame) -> None:
        reply = wire.properties_of(answer, wire.SettleReply)
        leases, now = self._leases, monotonic()
        stale = list(stale_messages(batch, reply))
        if kind.type == Type.EXTEND:
            for block, index in stale:
                if block.states[index] <= HANDED:  # what is being settled, or is, has an answer of its own
                    leases.stale(block, index)
            self._extended(
                _without(batch.places, stale), now + (reply.deadline_ms - answer.timestamp_ms) / 1000
            )
            return
        if kind.type == Type.NACK:
            stale = [place for place in stale if not self._was_done(*place, now)]
        for block, index in stale:
            leases.stale(block, index)
        for block, start, stop in batch.spans:
            if not stale:
                leases.settle_range(block, start, stop)
                continue
            for index in range(start, stop):
                if block.states[index] == SETTLING:
                    leases.settled(block, index)
        leases.restart(_without(batch.spans, stale), now + leases.lease)

    def _was_done(self, block: Block, index: int, now: float) -> bool:
        """Return whether a stale nack was done: its lease goes on, and an answer was lost before.

        Or its session is being ended, in steps, and nobody has told us yet. It has gone back either way.
        Of an ack that says nothing: what is told to be settled must be.
        """
        goes_on = index not in block.ended and now < self._leases.deadline(block, index)
        return goes_on and index in block.doubtful and block.states[index] == SETTLING

    def _extended(self, places: list[Span], deadline: float) -> None:
        for block, start, stop in places:
            if not self._leases.lane(block, start):
                self._leases.extend_range(block, start, stop, deadline)
        self._leases.extend_lanes(places, deadline)
        self._on_extended(deadline)

    def _undo(self, group: SettleGroup, error: Exception) -> None:
        """It was not done: who waits may try again while the leases go on, the rest is let go."""
        if group.kind.type == Type.EXTEND:
            return
        for block, start, stop in group.spans:
            for index in range(start, stop):
                if block.states[index] != SETTLING:
                    continue
                if group.kind.charged and not group.later:
                    block.states[index] = HANDED
                else:  # the application has never had it, or is done with it: it is to come again
                    self._leases.stale(block, index)
        if group.later:
            _log.warning("%d messages were not settled and will be redelivered: %s", group.size, error)


def _closed() -> ConnectionClosed:
    return ConnectionClosed("the consumer was closed before the broker answered")


def _without(spans: list[Span], stale: list[tuple[Block, int]]) -> list[Span]:
    """Return the spans without the messages that are stale."""
    if not stale:
        return spans
    gone = set(stale)
    single = [(block, index, index + 1) for block, start, stop in spans for index in range(start, stop)]
    return [span for span in single if (span[0], span[1]) not in gone]
