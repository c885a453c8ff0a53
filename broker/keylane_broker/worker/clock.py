"""From a partition's time to the event loop's: when to wake.

A partition has a clock of its own, which may be ahead of that of its Redis, and that may jump. What scripts
answer is good for how long to wait from now on, and for no comparison with another clock.
"""

import asyncio

NEVER = float("inf")


def instant(due_ms: int, now_ms: int) -> float:
    """When `due_ms` is, by the event loop's clock, where the partition's shows `now_ms`; 0 is never."""
    return asyncio.get_running_loop().time() + (due_ms - now_ms) / 1_000 if due_ms else NEVER
