"""Time that passes only while everybody waits, and then at once: hours of timers in milliseconds."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


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


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Callable[[Coroutine[Any, Any, T]], T]:
    """Run a coroutine in virtual time, which is also `monotonic` of every module of ours that is loaded."""
    loops: list[VirtualLoop] = []

    def make() -> VirtualLoop:
        loops.append(VirtualLoop())
        return loops[-1]

    def run(work: Coroutine[Any, Any, T]) -> T:
        with asyncio.Runner(loop_factory=make) as runner:
            runner.get_loop()
            for name, module in list(sys.modules.items()):
                if name.startswith("keylane") and "monotonic" in vars(module):
                    monkeypatch.setattr(module, "monotonic", loops[-1].time)
            return runner.run(work)

    return run
