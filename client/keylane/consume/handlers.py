"""The callback consumer: runs a handler for each message, in order within a lane, else concurrently."""

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import anyio

from keylane.bridge import Bridge
from keylane.consume.block import BUFFERED
from keylane.consume.message import Message
from keylane.consume.receipts import ACK, failure_kind
from keylane.consume.sync_message import SyncMessage
from keylane.errors import BrokerError, InvalidArgument
from keylane.tasks import Tasks
from keylane.threads import in_threads

Handler = Callable[[Message], Awaitable[Any]] | Callable[[SyncMessage], Any]
Lane = tuple[int, str]

# The task of the handler that this is, also in its thread and in what is called from there.
_handling: ContextVar[asyncio.Task[Any] | None] = ContextVar("handling", default=None)
_CANCELLED = 1.0  # seconds in which a handler that was cancelled should have ended
_log = logging.getLogger("keylane.client")


class Handlers:
    """Runs at most `concurrency` handlers at a time.

    A handler that returns has its message acked, one that raises has it nacked. Coroutine functions
    run on the event loop, others each in a thread.
    """

    def __init__(
        self,
        handler: Handler,
        concurrency: int,
        consumer: str,
        take: Callable[[], Awaitable[Message]],
        hand: Callable[[Message], Awaitable[bool]],
    ) -> None:
        if not callable(handler):
            raise InvalidArgument(f"handler is {handler!r:.80}: use a function that takes a message")
        if type(concurrency) is not int or concurrency < 1:
            raise InvalidArgument(f"concurrency is {concurrency!r}: use an integer of at least 1")
        self._consumer = consumer  # what to call it
        self._take = take  # the next message; StopAsyncIteration when the consumer is closed
        self._hand = hand  # to the handler; False if the message has gone back
        self._handler: Callable[[Any], Any] = handler
        call = getattr(handler, "__call__", None)  # noqa: B004 - an object whose __call__ is a coroutine function
        self._is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)
        self._threads = anyio.CapacityLimiter(concurrency)
        self._slots = asyncio.Semaphore(concurrency)
        self._lanes: dict[Lane, deque[Message]] = {}  # lanes at work -> what waits in them
        self._dispatching = Tasks()
        self._running: set[asyncio.Task[None]] = set()
        self._excused: set[asyncio.Task[Any]] = set()  # that wait for us, instead of us for them
        self._changed = asyncio.Event()  # one has ended, or is not waited for any more
        self._hurry = False  # none is
        self._bridge: Bridge
        self._closing = False

    def start(self) -> None:
        """Begin to take messages."""
        self._bridge = Bridge(asyncio.get_running_loop(), "the consumer is closed")
        self._dispatching.start(self._dispatch())

    def excuse(self) -> None:
        """Do not wait for the handler that calls this: it waits until all is closed."""
        if (task := _handling.get()) is not None:
            self._excused.add(task)
            self._changed.set()

    def hurry(self) -> None:
        """Wait for no handler any more."""
        self._hurry = True
        self._changed.set()

    async def close(self, patience: float) -> None:
        """Take no more, and wait so many seconds for those that run; then their messages go back.

        Coroutines are cancelled. Threads cannot be: they are left alone, and the next they ask is refused.
        """
        self._closing = True
        await self._dispatching.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while self._running - self._excused and not self._hurry:
                    self._changed.clear()
                    await self._changed.wait()
        if others := self._running - self._excused:
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=_CANCELLED)
        self._bridge.close()

    async def _dispatch(self) -> None:
        try:
            while True:
                message = await self._take()
                lane = message._origin.leases.lane(message._block, message._index)
                waiting = self._lanes.get((message.partition, lane)) if lane else None
                if waiting is not None:
                    while waiting and not _waits(waiting[-1]):  # it has gone back, and comes again
                        waiting.pop()
                    waiting.append(message)
                    continue
                await self._slots.acquire()
                place = (message.partition, lane)
                if lane:
                    self._lanes[place] = deque()
                task = asyncio.create_task(self._work(place, message))
                self._running.add(task)
                task.add_done_callback(self._ended)
        except StopAsyncIteration:
            return
        except BrokerError as error:
            # Those who wait for it hear why.
            _log.warning("%s has ended: %s", self._consumer, error)

    async def _work(self, place: Lane, message: Message) -> None:
        """Run the handler for a message, then for those that have come into its lane meanwhile."""
        try:
            await self._handle(message)
            waiting = self._lanes.get(place) if place[1] else None
            while waiting and not self._closing:
                await self._handle(waiting.popleft())
        finally:
            self._lanes.pop(place, None)
            self._slots.release()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a handler asked the program to exit", exc_info=error)

    async def _handle(self, message: Message) -> None:
        block, index = message._block, message._index
        if not await self._hand(message):  # it has gone back, perhaps with an earlier one of its lane
            return
        settle_later = message._origin.settler.settle_later
        processing = message._origin.processing
        failure: BaseException | None = None
        if processing is not None:
            processing.begin(message)
        try:
            _handling.set(asyncio.current_task())
            if self._is_async:
                await self._handler(message)
            else:
                result = await in_threads(self._threads, self._handler, SyncMessage(message, self._bridge))
                if inspect.iscoroutine(result):
                    result.close()
                    raise InvalidArgument("the handler returns a coroutine: define it with `async def`")
        except BaseException as error:
            failure = error
            if not self._is_failure(error):
                raise
            _log.exception("the handler failed for message %s of %r", message.id, message.topic)
            settle_later(block, index, failure_kind(error))
        else:
            settle_later(block, index, ACK)
        finally:
            if processing is not None:
                processing.end(message, failure)

    def _is_failure(self, error: BaseException) -> bool:
        """Return whether an error is about the message, rather than about us or the whole program."""
        if isinstance(error, asyncio.CancelledError):
            return not self._closing
        return isinstance(error, Exception) or (isinstance(error, SystemExit) and not self._is_async)


def _waits(message: Message) -> bool:
    return message._block.states[message._index] == BUFFERED
