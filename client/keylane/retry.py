"""How long to wait before trying again."""

import random

from keylane.errors import BrokerError, Overloaded


def backoff(attempt: int, initial: float = 0.05, maximum: float = 2.0) -> float:
    """Return the seconds to wait before the next attempt: exponential, jittered."""
    ceiling: float = min(maximum, initial * 2.0 ** min(attempt, 20))
    return ceiling * random.uniform(0.5, 1.0)


def pause(error: BrokerError | None, attempt: int, initial: float = 0.05, maximum: float = 2.0) -> float:
    """Return the seconds to wait after an error: not less than who is overloaded has asked for."""
    asked = error.retry_after if isinstance(error, Overloaded) else 0.0
    return max(backoff(attempt, initial, maximum), asked)
