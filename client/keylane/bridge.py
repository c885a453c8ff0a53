"""From threads to an event loop: the thread waits, the loop works."""

import asyncio
import logging
import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

from keylane.errors import ConnectionClosed, InvalidArgument
from keylane.tasks import Tasks
from keylane.threads import gate, start_thread

T = TypeVar("T")
_log = logging.getLogger("keylane.client")


class Call(Generic[T]):
    """Something that runs on the loop for one thread, which waits for it."""

    def __init__(self) -> None:
        self.task: asyncio.Future[T] | None = None
        self.abandoned = False  # nobody waits any more
        self._gate = gate()
        self._ended = False
        self._result: T
        self._error: BaseException | None = None

    def wait(self, timeout: float = -1.0) -> T:
        """Wait for the result, or raise TimeoutError."""
        if not self._gate.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result

    def end(self, result: Any, error: BaseException | None = None) -> None:
        """Let the thread go on; of several ends the first counts."""
        if not self._ended:
            self._ended, self._result, self._error = True, result, error
            self._gate.open()


class Bridge:
    """Runs things on an event loop for other threads, until it is closed; then they get ConnectionClosed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, closed: str) -> None:
        self._loop = loop
        self._closed = closed  # what to say then
        self._open = True
        self._process = os.getpid()
        self._calls: set[Call[Any]] = set()
        self._gathered: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._waking = False  # the loop is about to look at what was gathered
        self._tasks = Tasks()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that has the loop."""
        return self._process != os.getpid()

    def call(self, work: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        """Run it on the loop and wait; Ctrl-C ends both."""
        return self.call_within(-1.0, work, *args, **options)

    def call_within(self, timeout: float, work: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        """Run it on the loop and wait at most so many seconds."""
        call: Call[T] = Call()
        # Known before it is posted: if the loop ends before it begins, close() still finds it.
        self._calls.add(call)
        try:
            self._post(self._begin, call, partial(work, *args, **options))
            return call.wait(timeout)
        except BaseException:
            if not self.forked:
                call.abandoned = True
                self.post(self._abandon, call)
            raise
        finally:
            self._calls.discard(call)

    def start(self, work: Callable[..., Awaitable[T]], *args: Any) -> Future[T]:
        """Run it on the loop and do not wait; the future is for any thread."""
        future: Future[T] = Future()

        async def run() -> None:
            try:
                future.set_result(await work(*args))
            except asyncio.CancelledError:
                future.set_exception(ConnectionClosed(self._closed))
                raise
            except BaseException as error:
                future.set_exception(error)

        async def begin() -> None:
            self._tasks.start(run())

        self.call(begin)
        return future

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Run a function on the loop and do not wait."""
        try:
            self._post(function, *args)
        except ConnectionClosed:
            if self.forked:
                raise
            function(*args)  # the loop has ended, and all that was held has gone back

    def gather(self, function: Callable[..., Any], *args: Any) -> None:
        """Do what `post` does, for what there is much of: the loop is woken once for many."""
        if self.forked:
            self._post(function, *args)
        self._gathered.append((function, args))
        if not self._waking:
            # Should a signal end this between the two lines, the next call looks as well.
            self._waking = True
            self.post(self._run_gathered)

    def close(self) -> None:
        """Run nothing more; on the loop, or after its end."""
        self._open = False
        for call in list(self._calls):
            call.end(None, ConnectionClosed(self._closed))

    # Below: how

    def _post(self, function: Callable[..., Any], *args: Any) -> None:
        if self.forked:
            raise ConnectionClosed(
                f"the client was opened by process {self._process}, of which this is a fork: create another"
            )
        if asyncio._get_running_loop() is self._loop:
            raise InvalidArgument("callbacks run on the event loop's thread and must not block")
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            raise ConnectionClosed(self._closed) from None

    def _run_gathered(self) -> None:
        self._waking = False  # first: what is added from here on is looked at again
        while True:
            try:
                function, args = self._gathered.popleft()
            except IndexError:
                return
            try:
                function(*args)
            except Exception:
                _log.exception("what a thread asked for has failed")

    def _begin(self, call: Call[Any], work: Callable[[], Awaitable[Any]]) -> None:
        self._run_gathered()
        if not self._open:
            call.end(None, ConnectionClosed(self._closed))
        elif not call.abandoned:
            call.task = asyncio.ensure_future(work())
            call.task.add_done_callback(partial(self._ended, call))

    def _ended(self, call: Call[Any], task: asyncio.Future[Any]) -> None:
        if task.cancelled():
            call.end(None, ConnectionClosed(self._closed))
        elif (error := task.exception()) is not None:
            call.end(None, error)
        else:
            call.end(task.result())

    def _abandon(self, call: Call[Any]) -> None:
        if call.task is not None:
            call.task.cancel()


class LoopThread:
    """A thread with an event loop of its own, for as long as it is wanted; no program waits for its end."""

    def __init__(self, closed: str) -> None:
        self._closed = closed
        self._stop: asyncio.Event
        started: Call[Bridge] = Call()
        self._join = start_thread(partial(self._run, started))
        self.bridge = started.wait()

    def stop(self, patience: float) -> None:
        """End it, and wait so many seconds for that; whoever waits for something gets ConnectionClosed."""
        self.bridge.post(self._stop.set)
        self._join(patience)

    def _run(self, started: Call[Bridge]) -> None:
        bridge: Bridge | None = None

        async def serve() -> None:
            nonlocal bridge
            self._stop = asyncio.Event()
            bridge = Bridge(asyncio.get_running_loop(), self._closed)
            started.end(bridge)
            await self._stop.wait()
            bridge.close()

        try:
            with asyncio.Runner(loop_factory=_new_loop) as runner:
                runner.run(serve())
        except BaseException as error:
            started.end(None, error)
            raise
        finally:
            if bridge is not None:  # some may have come while it ended
                bridge.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()
