"""Threads of the operating system, also where gevent makes greenlets of Python's, and waiting in either."""

import asyncio
import sys
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from time import monotonic
from typing import Any, Protocol, TypeVar

import anyio
import anyio.to_thread

_SIGNALS = 0.5  # seconds
T = TypeVar("T")


def gevent_monkey() -> Any:
    """gevent's module of patches, if it has made greenlets of threads."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey if monkey is not None and monkey.is_module_patched("threading") else None


def native_lock() -> Any:
    """Return a lock between threads of the operating system, to be held for a moment only."""
    monkey = gevent_monkey()
    return threading.Lock() if monkey is None else monkey.get_original("_thread", "allocate_lock")()


def start_thread(work: Callable[[], None]) -> Callable[[float], object]:
    """Run it in a thread that keeps no program from ending; what is returned waits for its end so long."""
    if (monkey := gevent_monkey()) is None:
        thread = threading.Thread(target=work, name="keylane", daemon=True)
        thread.start()
        return thread.join
    ended = gate()

    def run() -> None:
        try:
            work()
        finally:
            ended.open()

    monkey.get_original("_thread", "start_new_thread")(run, ())
    return ended.wait


class Gate(Protocol):
    """What one thread waits at until another opens it."""

    def open(self) -> None:
        """Let the one who waits go on; from any thread, once."""

    def wait(self, timeout: float = -1.0) -> bool:
        """Wait until it is open, or so many seconds."""


def gate() -> Gate:
    """Return a gate for the thread, or greenlet, that calls this."""
    return _ThreadGate() if gevent_monkey() is None else _GreenletGate()


class _ThreadGate:
    """A lock and nothing else: signal handlers run while it waits, and may wait at gates of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.open = self._lock.release

    def wait(self, timeout: float = -1.0) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return self._lock.acquire(timeout=timeout)
        # A signal that comes just before the system call does not end that: look for it from time to time.
        end = monotonic() + timeout if timeout >= 0 else float("inf")
        while not self._lock.acquire(timeout=max(0.0, min(_SIGNALS, end - monotonic()))):
            if monotonic() >= end:
                return False
        return True


class _GreenletGate:
    """Other greenlets go on meanwhile."""

    def __init__(self) -> None:
        import gevent.event  # type: ignore[import-untyped]

        self._opened = gevent.event.Event()
        self._watcher = (
            gevent.get_hub().loop.async_()
        )  # the one thing of gevent's that other threads may touch
        self._watcher.start(self._opened.set)
        self.open = self._watcher.send

    def wait(self, timeout: float = -1.0) -> bool:
        try:
            return bool(self._opened.wait(None if timeout < 0 else timeout))
        finally:
            self._watcher.stop()


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a thread of its own, and wait for it; who is cancelled leaves it alone."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell(set_it: Callable[[Any], None], what: Any) -> None:
        if not answer.done():
            set_it(what)

    def run() -> None:
        try:
            news: tuple[Callable[[Any], None], Any] = answer.set_result, function(*arguments)
        except BaseException as error:
            news = answer.set_exception, error
        try:
            loop.call_soon_threadsafe(tell, *news)
        except RuntimeError:
            if not loop.is_closed():
                raise

    start_thread(partial(copy_context().run, run))
    return await answer


async def in_threads(limiter: anyio.CapacityLimiter, function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in one of a few threads, and wait for it."""
    if gevent_monkey() is None:
        return await anyio.to_thread.run_sync(function, *arguments, limiter=limiter)
    async with limiter:
        return await in_thread(function, *arguments)
