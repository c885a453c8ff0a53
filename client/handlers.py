"""The callback consumer: runs a handler for each message, in order within a lane, else concurrently."""

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import anyio
import anyio.from_thread
import anyio.to_thread

from client.block import HANDED
from client.errors import BrokerError, InvalidArgument
from client.message import Message
from client.sync_message import Bridge, SyncMessage
from client.tasks import Tasks

if TYPE_CHECKING:
    from client.consumer import Consumer

Handler = Callable[[Message], Awaitable[Any]] | Callable[[SyncMessage], Any]
Lane = tuple[int, str]

# Whose handler this is, in its thread and in what is called from there.
_handling: ContextVar[asyncio.Task[Any] | None] = ContextVar("handling", default=None)
_log = logging.getLogger("keylane.client")


class Handlers:
    """Runs at most `concurrency` handlers at a time.

    A handler that returns has its message acked, one that raises has it nacked. Coroutine functions
    run on the event loop, others each in a thread.
    """

    def __init__(self, consumer: "Consumer", handler: Handler, concurrency: int) -> None:
        if not callable(handler):
            raise InvalidArgument(f"handler is {handler!r:.80}: use a function that takes a message")
        if type(concurrency) is not int or concurrency < 1:
            raise InvalidArgument(f"concurrency is {concurrency!r}: use a whole number from 1")
        self._consumer = consumer
        self._handler: Callable[[Any], Any] = handler
        call = getattr(handler, "__call__", None)  # noqa: B004 - an object whose __call__ is a coroutine function
        self._is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)
        self._threads = anyio.CapacityLimiter(concurrency)
        self._slots = asyncio.Semaphore(concurrency)
        self._lanes: dict[Lane, deque[Message]] = {}  # lanes at work -> what waits in them
        self._dispatching = Tasks()
        self._running = Tasks()
        self._closing = False

    def start(self) -> None:
        """Begin to take messages."""
        self._dispatching.start(self._dispatch())

    async def close(self) -> None:
        """Take no more. Coroutines are cancelled and their messages go back; threads run to their end."""
        self._closing = True
        await self._dispatching.cancel()
        if self._is_async:
            await self._running.cancel()
        else:
            await self._running.finish(but=_handling.get())  # which waits for us, if it closes its consumer

    async def _dispatch(self) -> None:
        try:
            async for message in self._consumer:
                lane = self._consumer.held.lane(message._block, message._index)
                waiting = self._lanes.get((message.partition, lane)) if lane else None
                if waiting is not None:
                    waiting.append(message)
                    continue
                await self._slots.acquire()
                place = (message.partition, lane)
                if lane:
                    self._lanes[place] = deque()
                self._running.start(self._work(place, message))
        except BrokerError as error:  # the consumer has ended; those who wait for it hear why
            _log.warning("consumer %s of %r has ended: %s", self._consumer.name, self._consumer.topic, error)

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

    async def _handle(self, message: Message) -> None:
        block, index = message._block, message._index
        if block.states[index] != HANDED:  # an earlier one of its lane was nacked
            return
        try:
            if self._is_async:
                await self._handler(message)
            else:
                _handling.set(asyncio.current_task())
                bridge = Bridge(anyio.from_thread.run, asyncio.get_running_loop().call_soon_threadsafe)
                result = await anyio.to_thread.run_sync(
                    self._handler, SyncMessage(message, bridge), limiter=self._threads
                )
                if inspect.iscoroutine(result):
                    result.close()
                    raise InvalidArgument("the handler returns a coroutine: make it an `async def` function")
        except BaseException as error:
            if not self._is_failure(error):
                raise
            _log.exception("the handler failed for message %s of %r", message.id, message.topic)
            self._consumer.settler.settle_later(block, index, well=False)
        else:
            self._consumer.settler.settle_later(block, index, well=True)

    def _is_failure(self, error: BaseException) -> bool:
        """Whether it is about the message, and not about us or the whole program."""
        if isinstance(error, asyncio.CancelledError):
            return not self._closing
        return isinstance(error, Exception) or (isinstance(error, SystemExit) and not self._is_async)
