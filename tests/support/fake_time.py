"""An event loop whose time does not pass, but jumps to the next instant at which anything happens.

@on_fake_time
async def test_a_minute_is_over_in_a_moment() -> None:
    await asyncio.sleep(60)
"""

import asyncio
import functools
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec
from unittest import mock

P = ParamSpec("P")
_EPOCH = 1_700_000_000.0


class _Selector(selectors.SelectSelector):
    """Waits for nothing: what it would have waited has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits, and nothing is going to happen"
            self.now += max(timeout, 0.0)
        return ready


class FakeTimeLoop(asyncio.SelectorEventLoop):
    """Its clock is also what time.monotonic(), time.time() and a fake Redis say, while it runs a test."""

    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        """Return the time that has passed by jumping."""
        return self.selector.now


def on_fake_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on a loop of its own, on which seconds cost nothing."""

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=FakeTimeLoop) as runner:
            loop = runner.get_loop()

            def since_1970() -> float:
                return _EPOCH + loop.time()

            with (
                mock.patch.object(time, "monotonic", loop.time),
                mock.patch.object(time, "time", since_1970),  # which is that of fakeredis
            ):
                runner.run(test(*arguments, **named))

    return run
