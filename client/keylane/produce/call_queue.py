"""The way in for what is published: in the order of the calls, whoever has to wait for what."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

from keylane.errors import BrokerError, ConnectionClosed, TopicReplaced
from keylane.produce.outbox import Added
from keylane.produce.outgoing import Slice
from keylane.produce.queue_limit import QueueLimit
from keylane.tasks import Tasks, shared
from keylane.types import OutgoingMessage

_ENDED = "the client was closed"

# For a number of partitions; those that cannot be sent go into the dict, or it raises for all of them.
Sort = Callable[[int, dict[int, Exception]], list[Slice]]


class PublishCall:
    """Messages of a call on their way into the outboxes; `added` says where they are once they are in."""

    __slots__ = (
        "_add",
        "_slices",
        "_sort",
        "_waiter",
        "added",
        "inside",
        "left",
        "messages",
        "refused",
        "replacement",
    )

    def __init__(
        self,
        sort: Sort,
        add: Callable[["PublishCall", list[Slice]], list[Added]],
        messages: Sequence[OutgoingMessage] = (),
    ) -> None:
        self.inside = False
        self.added: list[Added] = []
        self.refused: dict[int, Exception] = {}  # those that cannot be sent, by their places in the call
        self.messages = messages  # kept for as long as they may have to be placed anew
        self.left = 0  # waiters without an answer, or with one that says so
        self.replacement: TopicReplacement | None = None  # that does so
        self._sort: Sort | None = sort
        self._add = add
        self._slices: list[Slice] = []
        self._waiter: asyncio.Future[None] | None = None  # for that

    def sort(self, count: int) -> list[Slice]:
        """Find out what goes into which partition."""
        assert self._sort is not None
        self.refused = {}
        self._slices = self._sort(count, self.refused)
        return self._slices

    def add(self) -> None:
        """Go in."""
        slices, self._slices = self._slices, []
        self.added = self._add(self, slices)
        self._sort, self._slices = None, []
        self.inside = True

    def enter(self) -> None:
        """Go in, for somebody who waits and hears how it went."""
        try:
            self.add()
        except Exception as error:
            self.fail(error)
        else:
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def fail(self, error: BaseException) -> None:
        """It cannot go in."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    async def wait(self) -> None:
        """Wait until it is in."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._sort, self._slices = None, []  # who has gone keeps no bodies in a line


class TopicReplacement:
    """What is under way to a topic that was replaced, in its order; to be placed anew once it is answered."""

    __slots__ = ("again", "calls", "done", "error")

    def __init__(self, calls: Iterable[PublishCall], error: TopicReplaced) -> None:
        self.calls: list[PublishCall] = []
        self.error = error
        self.again: dict[PublishCall, PublishCall | Exception] = {}  # of each what was refused, placed anew
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for call in calls:
            self.add(call)

    def add(self, call: PublishCall) -> None:
        """Take one more along."""
        self.calls.append(call)
        call.replacement = self


class _Line:
    """Those who wait to publish to a topic: for its number of partitions, or until a long call is through."""

    __slots__ = ("holder", "waiting")

    def __init__(self) -> None:
        self.holder: object = None  # the long call
        # Those who wait, and the long call that each is the first of.
        self.waiting: OrderedDict[PublishCall, object] = OrderedDict()


class CallQueue:
    """Lets the calls to each topic in in their order: none overtakes one that waits for something."""

    def __init__(
        self, limit: QueueLimit, count: Callable[[str], int | None], look_up: Callable[[str], Awaitable[int]]
    ) -> None:
        self._limit = limit
        self._count = count  # of a topic's partitions, as far as is known
        self._look_up = look_up
        self._lookups: dict[str, asyncio.Task[int]] = {}
        self._lines: dict[str, _Line] = {}
        self._waiting: set[PublishCall] = set()  # that wait
        self._tasks = Tasks()

    def clear(self, topic: str) -> bool:
        """Return whether a call may go in without waiting."""
        return topic not in self._lines and self._limit.free

    async def enter(self, topic: str, call: PublishCall, long: object = None) -> None:
        """Go in behind those who came before; all parts of a `long` call before those who come after it.

        Who says that a call is long says when it is through.
        """
        line = self._lines.get(topic)
        if line is not None and (long is None or line.holder is not long):
            line.waiting[call] = long
        elif count := self._count(topic):
            if long is not None and line is None:
                self._lines[topic] = line = _Line()
                line.holder = long
            self._sort(call, count)
        elif line is not None:
            self._sort(call, await self.ask(topic))
        else:
            self._lines[topic] = line = _Line()
            line.waiting[call] = long
            self._ask(topic)
        if not call.inside:
            await self._wait(topic, call)

    def through(self, topic: str, long: object) -> None:
        """All of a long call is in, or given up."""
        line = self._lines.get(topic)
        if long is not None and line is not None and line.holder is long:
            self._move_on(topic, line)

    async def ask(self, topic: str) -> int:
        """Ask how many partitions there are: once, for all who want to know."""
        return await shared(self._ask(topic), _ENDED)

    async def close(self, error: BrokerError) -> None:
        """Let nobody in any more."""
        for call in self._waiting:
            call.fail(error.again())
        await self._tasks.cancel()

    async def _wait(self, topic: str, call: PublishCall) -> None:
        self._waiting.add(call)
        try:
            await call.wait()
        finally:
            self._waiting.discard(call)
            self._limit.leave(call.enter)
            if (line := self._lines.get(topic)) is not None:
                line.waiting.pop(call, None)

    def _sort(self, call: PublishCall, count: int) -> None:
        call.sort(count)
        if self._limit.free:
            call.add()
        else:
            self._limit.wait(call.enter)

    def _move_on(self, topic: str, line: _Line) -> None:
        """Let those in who wait for a topic, up to one who comes in several parts."""
        line.holder = None
        while line.waiting:
            if not (count := self._count(topic)):
                self._ask(topic)
                return
            call, line.holder = line.waiting.popitem(last=False)
            try:
                call.sort(count)
            except Exception as error:
                call.fail(error)
            else:
                self._limit.wait(call.enter)
            if line.holder is not None:
                break
        else:
            del self._lines[topic]
        self._limit.open()

    def _ask(self, topic: str) -> asyncio.Task[int]:
        lookup = self._lookups.get(topic)
        if lookup is None:
            lookup = self._lookups[topic] = self._tasks.start(self._look_up_now(topic))
            lookup.add_done_callback(partial(self._told, topic))
        return lookup

    async def _look_up_now(self, topic: str) -> int:
        return await self._look_up(topic)

    def _told(self, topic: str, lookup: asyncio.Task[int]) -> None:
        del self._lookups[topic]
        line = self._lines.get(topic)
        if line is None or line.holder is not None:
            return
        error = ConnectionClosed(_ENDED) if lookup.cancelled() else lookup.exception()
        if error is None:
            self._move_on(topic, line)
            return
        del self._lines[topic]
        for call in line.waiting:
            call.fail(error.again() if isinstance(error, BrokerError) else error)
