"""What threads ask of the event loop without waiting: in order, cheaply, and never lost."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from keylane.bridge import Bridge, LoopThread
from keylane.errors import ConnectionClosed


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("the end")
    yield thread
    thread.stop(60.0)


async def nothing() -> None:
    """Runs on the loop behind all that was asked before."""


def test_what_is_gathered_runs_in_order_before_the_next_call(thread: LoopThread) -> None:
    done: list[int] = []
    for number in range(5_000):
        thread.bridge.gather(done.append, number)
        if number % 1_000 == 0:
            thread.bridge.call(nothing)
            assert len(done) == number + 1
    thread.bridge.call(nothing)
    assert done == list(range(5_000))


def test_one_that_fails_is_logged_and_harms_no_other(
    thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("why")

    done: list[int] = []
    thread.bridge.gather(fail)
    thread.bridge.gather(done.append, 1)
    thread.bridge.call(nothing)
    assert done == [1]
    assert "what a thread asked for has failed" in caplog.text


def test_what_a_signal_interrupts_is_not_lost(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Bridge, function: Callable[..., Any], *args: Any) -> None:
        raise KeyboardInterrupt

    done: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(Bridge, "post", interrupted)
        with pytest.raises(KeyboardInterrupt):
            thread.bridge.gather(done.append, 1)
    thread.bridge.gather(done.append, 2)
    thread.bridge.call(nothing)
    assert done == [1, 2]
    thread.bridge.gather(done.append, 3)
    thread.bridge.call(nothing)
    assert done == [1, 2, 3]


def test_after_the_end_of_the_loop_it_runs_where_it_is_asked_for() -> None:
    thread = LoopThread("the end")
    thread.stop(60.0)
    done: list[int] = []
    thread.bridge.gather(done.append, 1)
    assert done == [1]
    with pytest.raises(ConnectionClosed):
        thread.bridge.call(nothing)
