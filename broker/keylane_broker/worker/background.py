"""What a worker does in the background: steps that begin at once, and steps that come again and again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from keylane.errors import BrokerError
from keylane_broker.logs import FailureLog
from keylane_broker.worker import eager

log = logging.getLogger("keylane.broker")

_AGAIN = 0.2  # seconds until something that failed is tried again


class Background:
    """The tasks of a worker; an error in one is logged, and disturbs no other."""

    def __init__(self) -> None:
        self.stopping = False  # nothing new is to begin
        # A task group's own way to start one takes several times as long.
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, step: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run something for as long as the worker runs; it begins at once."""
        task = eager.start(self._guard(step, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, step: Callable[..., Awaitable[object]], arguments: tuple[object, ...]) -> None:
        try:
            await step(*arguments)
        except BrokerError as error:
            log.warning("%s: %s", getattr(step, "__qualname__", step), error)
        except Exception:
            log.exception("a bug in %s; the worker goes on", getattr(step, "__qualname__", step))

    async def repeat(self, period: float, step: Callable[[], Awaitable[None]]) -> None:
        """Take a step every so many seconds, for ever; sooner after one that failed."""
        wait = period
        failures = FailureLog(log, step.__name__.strip("_"))
        while True:
            await asyncio.sleep(wait)
            wait = period
            try:
                await step()
                failures.recovered()
            except BrokerError as error:
                failures.failed(error)
                wait = min(period, _AGAIN)
            except Exception:
                log.exception("a bug in %s; the worker goes on", step.__name__)

    async def wait(self, patience: float) -> None:
        """Wait until nothing is under way, but no longer than so many seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience)

    async def cancel(self) -> None:
        """Cancel what is under way, and wait for its end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
