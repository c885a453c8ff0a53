"""The cluster's clock as a client knows it, and how far ours is from it."""

import logging
import time
from collections.abc import Callable

_log = logging.getLogger("keylane.client")
_DRIFT = 1.0  # seconds that clocks may differ before the application hears of it


class ClusterClock:
    """The time of Redis, by what workers say and our own steady clock."""

    def __init__(self, on_time_drift: Callable[[float], None] | None) -> None:
        self._on_time_drift = on_time_drift
        self._ahead = time.time() - time.monotonic()  # of the cluster's clock: ours may be set meanwhile
        self._reported = 0.0

    @property
    def now(self) -> float:
        """The cluster's time in unix seconds."""
        return time.monotonic() + self._ahead

    @property
    def drift(self) -> float:
        """Seconds that the cluster's clock is ahead of ours."""
        return self.now - time.time()

    def set(self, drift: float, trip: float) -> None:
        """A worker has told how far we are off; the question and its answer took `trip` seconds."""
        self._ahead = time.time() + drift - time.monotonic()
        if abs(drift) - trip / 2 <= _DRIFT:
            self._reported = 0.0
        elif abs(drift - self._reported) > _DRIFT:
            self._reported = drift
            self._report(drift)

    def _report(self, drift: float) -> None:
        if self._on_time_drift is not None:
            try:
                self._on_time_drift(drift)
            except Exception:  # it must not cost us the connection
                _log.exception("on_time_drift failed for %.1f s", drift)
