"""Times of Redis, of partitions and of the event loop.

A partition has a clock of its own, which may be ahead of that of its Redis, and that may jump. What scripts
answer is good for how long to wait from now on, and for no comparison with another clock.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

NEVER = float("inf")
_PROMPT = 0.1  # seconds within which an answer of Redis tells the time


def instant(due_ms: int, now_ms: int) -> float:
    """Return when `due_ms` is by the event loop's clock, if the partition's shows `now_ms`; 0 is never."""
    return asyncio.get_running_loop().time() + (due_ms - now_ms) / 1_000 if due_ms else NEVER


class Clock:
    """The cluster's time, which is that of Redis."""

    def __init__(self, read_ms: Callable[[], Awaitable[int]]) -> None:
        self._read_ms = read_ms
        self._ahead_ms = 0.0  # the clock of Redis minus our monotonic one

    def now_ms(self) -> int:
        """Return the time, in milliseconds since 1970."""
        return int(time.monotonic() * 1_000 + self._ahead_ms)

    async def set(self) -> None:
        """Learn the time of Redis."""
        before = time.monotonic()
        redis_ms = await self._read_ms()
        now = time.monotonic()
        if not self._ahead_ms or now - before < _PROMPT:
            self._ahead_ms = redis_ms - (before + now) * 500
