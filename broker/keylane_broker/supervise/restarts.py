"""Starts a child process again whenever it ends."""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from keylane_broker.errors import ServerError

__all__ = ["Restarter"]

log = logging.getLogger("keylane.broker")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
CALM_SECONDS = 30.0  # after so long, an end has nothing to do with the one before

T = TypeVar("T")
# The last two are what Python raises when there can be no thread or no memory.
_PASSING = (ServerError, OSError, RuntimeError, MemoryError)


class Restarter:
    """Starts a child again whenever it ends, with longer pauses while that does not help."""

    def __init__(
        self, name: str, wait: Callable[[], Awaitable[int]], start: Callable[[], Awaitable[None]]
    ) -> None:
        self._name = name
        self._wait = wait
        self._start = start
        self._running = True  # as far as is known
        self._back: anyio.Event | None = None  # somebody has ended the child, and waits for the next

    async def run(self) -> None:
        """Do so for ever; the child has been started."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            began = anyio.current_time()
            status = await self._insist("cannot be watched", self._wait)
            self._running = False
            if anyio.current_time() - began > CALM_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            if self._back is None:
                log.warning("%s ended with status %s; starting it again", self._name, status)
                await anyio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            await self._insist("does not start", self._start)
            self._running = True
            if self._back is None:
                log.info("%s is back", self._name)
            else:
                self._back.set()
                self._back = None

    async def _insist(self, trouble: str, step: Callable[[], Awaitable[T]]) -> T:
        """Try until it works: a system that has no files, processes or memory left may have some again."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return await step()
            except _PASSING as error:
                log.error("%s %s, next try in %.1f s: %s", self._name, trouble, pause, error)
            await anyio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def replace(self, stop: Callable[[], Awaitable[None]]) -> None:
        """End the child with `stop` and return when the next one runs."""
        self._back = back = anyio.Event()
        if self._running:  # else a new one is on its way
            await stop()
        await back.wait()
