"""Takes a step whenever it is woken, and at the instant at which the next thing falls due: no polling."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from keylane.errors import BrokerError
from keylane_broker.worker.background import Background
from keylane_broker.worker.clock import NEVER

log = logging.getLogger("keylane.broker")

_PAUSES = (0.05, 1.0)  # seconds between attempts while Redis is away, shortest and longest


class DueTimer:
    """Repeats a step until it says that there is nothing more to do, then sleeps until something is due.

    Instants are those of the event loop's clock.
    """

    def __init__(
        self, background: Background, step: Callable[[], Awaitable[bool]], name: object, due: float = NEVER
    ) -> None:
        self.due = due  # when something falls due
        self.running = False
        self.failing = False  # the last attempt has failed
        self._background = background
        self._loop = asyncio.get_running_loop()  # asked for once: that is a system call
        self._step = step
        self._name = name  # for the log
        self._sooner = NEVER  # what was expected during a call that may not know of it
        self._timer: asyncio.TimerHandle | None = None
        self._set_for = NEVER  # when it goes off

    @property
    def is_due(self) -> bool:
        """Whether something has fallen due."""
        return self.due <= self._loop.time()

    def wake(self) -> None:
        """Take a step now, unless one is under way."""
        if not self.running and not self._background.stopping:
            self.running = True
            self._background.start(self._run)

    def hold(self) -> None:
        """Take no step while something is under way that does the work of one."""
        self.running = True

    def go_on(self, *, more: bool) -> None:
        """It has ended; take a step if there is more to do."""
        self.running = False
        if more or self.is_due:
            self.wake()
        elif self.due != self._set_for:
            self._set()

    def expect(self, due: float) -> None:
        """Something falls due then, perhaps before all else."""
        self._sooner = min(self._sooner, due)
        if due < self.due:
            self.due = due
            if not self.running:
                self._set()

    def expect_in(self, ms: int) -> None:
        """Something falls due in so many milliseconds."""
        self.expect(self._loop.time() + ms / 1_000)

    def begin_call(self) -> None:
        """A script is about to be asked what is due next; it may not know of what is expected from now on."""
        self._sooner = NEVER

    def end_call(self, due: float) -> None:
        """It has named the next instant."""
        self.due = min(due, self._sooner)

    def clear(self) -> None:
        """Nothing falls due any more."""
        self.due = self._sooner = NEVER
        self._set()

    def _set(self) -> None:
        self._set_for = self.due
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.due < NEVER and not self._background.stopping:
            # At least a millisecond: what falls due then is not due before.
            self._timer = self._loop.call_at(max(self.due, self._loop.time() + 0.001), self.wake)

    async def _run(self) -> None:
        pause = _PAUSES[0]
        try:
            while not self._background.stopping:
                try:
                    more = await self._step()
                    self.failing = False
                    if not more:
                        break
                    pause = _PAUSES[0]
                    continue
                except BrokerError as error:
                    log.warning("%s: %s", self._name, error)
                except Exception:
                    log.exception("%s: a bug; trying again", self._name)
                self.failing = True
                await asyncio.sleep(pause)
                pause = min(pause * 2, _PAUSES[1])
        finally:
            self.running = False
            self._set()
