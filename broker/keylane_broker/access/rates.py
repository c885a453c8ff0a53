"""How fast somebody may publish: so many messages a second on average, and as many in one go."""

import time
from collections.abc import Callable

from keylane.errors import Overloaded
from keylane_broker.access.identity import WORKER, Identity

_KEPT = 10_000  # tokens of which something is remembered


class PublishRates:
    """What each token has left; who has nothing has to wait, also if it has taken more than there was."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`rate` is in messages a second; 0 is no limit."""
        self._rate = rate
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}  # who -> messages, and when that was so

    def take(self, who: Identity, count: int) -> None:
        """Count messages. Raises Overloaded, with when there will be room, for who has none left."""
        if not self._rate or who is WORKER:  # who does what others have asked for
            return
        now = self._clock()
        name = who.token or who.name
        left, then = self._left.pop(name, (self._rate, now))
        left = min(self._rate, left + (now - then) * self._rate)
        if left <= 0:
            self._left[name] = left, now
            raise Overloaded(
                f"{who.name!r} publishes more than {self._rate:g} messages a second (publish_rate)",
                retry_after=(1.0 - left) / self._rate,
            )
        self._left[name] = left - count, now  # behind those that have not been here for longer
        if len(self._left) > _KEPT:
            del self._left[next(iter(self._left))]
