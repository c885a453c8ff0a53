"""What many want at once is tried once, and all of them share how it went."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from keylane.errors import Unavailable


class SingleFlight:
    """Attempts by name, of each at most one at a time.

    It owns them, which that of keylane.tasks does not; who waits for one that is ended hears Unavailable.
    """

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[Any]] = {}

    async def join(self, name: str, attempt: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Wait for the attempt that is under way, or start one; who stops waiting does not end it."""
        task = self._running.get(name)
        if task is None:
            task = self._running[name] = asyncio.create_task(attempt())
            task.add_done_callback(lambda task: self._end(name, task))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            here = asyncio.current_task()
            if task.cancelled() and here is not None and not here.cancelling():
                raise Unavailable("closed while connecting to Redis") from None
            raise

    def under_way(self, name: str) -> bool:
        """Return whether such an attempt is under way."""
        return name in self._running

    def cancel(self) -> None:
        """End all attempts; those who wait are told."""
        for task in self._running.values():
            task.cancel()

    def _end(self, name: str, task: "asyncio.Task[Any]") -> None:
        del self._running[name]
        if not task.cancelled():
            task.exception()  # seen, even if nobody waits for it by now
