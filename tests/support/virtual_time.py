"""Time that passes only while everybody waits, and then at once: hours of timers in milliseconds."""

import asyncio
import functools
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
T = TypeVar("T")

_EPOCH = 1_700_000_000.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        select: Callable[[float], Any] = selector.select

        def skip(timeout: float | None) -> Any:
            assert timeout is not None, "everybody waits, and no timer will wake anybody"
            self.now += timeout
            return select(0)

        selector.select = skip

    def time(self) -> float:
        """What the clock shows."""
        return self.now

    def since_1970(self) -> float:
        """The same, as time.time() says it."""
        return _EPOCH + self.now


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time, which is also that of the time module, and so of a fake Redis."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, pytest.MonkeyPatch.context() as patches:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        patches.setattr(time, "monotonic", loop.time)
        patches.setattr(time, "time", loop.since_1970)
        for name, module in list(sys.modules.items()):
            if name.startswith("keylane") and "monotonic" in vars(module):
                patches.setattr(module, "monotonic", loop.time)
        return runner.run(work)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Decorate a test that runs in virtual time."""

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        run_in_virtual_time(test(*arguments, **named))

    return run


@pytest.fixture
def virtual() -> Callable[[Coroutine[Any, Any, T]], T]:
    """Run coroutines in virtual time."""
    return run_in_virtual_time
