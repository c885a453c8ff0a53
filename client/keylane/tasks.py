"""Background tasks that have an owner, and those that several wait for."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

import anyio

from keylane.errors import BrokerError, ConnectionClosed

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
_log = logging.getLogger("keylane.client")


class Tasks:
    """The background tasks of one owner, who ends them."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run it; what it raises is for those who await the task, or logged where nobody would see it."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._finished)
        return task

    async def finish(self) -> None:
        """Wait until all have ended by themselves."""
        while self._running:
            await asyncio.wait(self._running)

    async def cancel(self) -> None:
        """End all and wait until they have ended; but for the caller, if it is one of them."""
        while others := self._running - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.wait(others)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        level = logging.DEBUG if isinstance(error, BrokerError) else logging.ERROR
        _log.log(level, "a background task failed", exc_info=error)


async def shared(task: asyncio.Task[T], ended: str) -> T:
    """Wait for a task together with others: who is cancelled does not end it.

    If its owner does, that is ConnectionClosed: to be cancelled is not what happened to who waits.
    """
    try:
        return await asyncio.shield(task)
    except BrokerError as problem:
        error = problem.again()  # each has one of its own, and with it the way to nobody else
    except asyncio.CancelledError:
        waiter = asyncio.current_task()
        if task.cancelled() and waiter is not None and not waiter.cancelling():
            raise ConnectionClosed(ended) from None
        raise
    raise error


class SingleFlight(Generic[K, T]):
    """Does a thing once for all who want it at a time; `ended` is what they hear if it is cancelled."""

    def __init__(self, tasks: Tasks, ended: str) -> None:
        self._tasks = tasks
        self._ended = ended
        self._running: dict[K, asyncio.Task[T]] = {}

    async def run(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Wait for the work that is under way, or do it."""
        return await shared(self.start(key, work), self._ended)

    def start(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """Return the work that is under way, or begin it."""
        running = self._running.get(key)
        if running is None or running.done():  # cancelled before its first step
            running = self._running[key] = self._tasks.start(self._run(key, work))
        return running

    async def _run(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await work()
        finally:  # before anybody who waits for it goes on
            del self._running[key]


async def finished(task: asyncio.Task[None], hurry: Callable[[], None]) -> None:
    """Wait for a task that must run to its end: who is cancelled hurries it, and waits all the same."""
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        hurry()
        with anyio.CancelScope(shield=True):  # those of anyio cancel at each step
            await asyncio.wait({task})
        raise
