"""How long to wait before trying again."""

import random


def backoff(attempt: int, initial: float = 0.05, maximum: float = 2.0) -> float:
    """Return the seconds to wait before the next attempt: exponential, jittered."""
    ceiling: float = min(maximum, initial * 2.0 ** min(attempt, 20))
    return ceiling * random.uniform(0.5, 1.0)
