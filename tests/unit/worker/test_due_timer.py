"""Steps at due instants, in virtual time."""

import asyncio

from keylane.errors import Unavailable
from keylane_broker.worker.background import Background
from keylane_broker.worker.clock import NEVER
from keylane_broker.worker.due_timer import DueTimer
from tests.support.virtual_time import in_virtual_time


class Steps:
    """Notes when steps are taken; nothing is due after one."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.took = 0.0  # seconds
        self.fail = 0  # so many times
        self.background = Background()
        self.timer = DueTimer(self.background, self.step, "a test")
        self.began = asyncio.get_running_loop().time()

    async def step(self) -> bool:
        self.at.append(round(asyncio.get_running_loop().time() - self.began, 3))
        if self.fail:
            self.fail -= 1
            raise Unavailable("away")
        self.timer.begin_call()
        await asyncio.sleep(self.took)
        self.timer.end_call(NEVER)
        return False

    def expect(self, seconds: float) -> None:
        self.timer.expect(self.began + seconds)


@in_virtual_time
async def test_it_acts_at_the_earliest_instant_that_was_named() -> None:
    steps = Steps()
    for seconds in (50.0, 20.0, 90.0):
        steps.expect(seconds)
    await asyncio.sleep(100)
    assert steps.at == [20.0]


@in_virtual_time
async def test_what_is_expected_during_a_call_is_not_forgotten_when_the_call_does_not_know_of_it() -> None:
    steps = Steps()
    steps.took = 5.0
    steps.timer.wake()
    await asyncio.sleep(1)
    steps.expect(30.0)
    await asyncio.sleep(100)
    assert steps.at == [0.0, 30.0]


@in_virtual_time
async def test_after_failures_it_tries_again_and_says_that_it_fails() -> None:
    steps = Steps()
    steps.fail = 3
    steps.timer.wake()
    await asyncio.sleep(0.06)
    assert steps.timer.failing
    await asyncio.sleep(10)
    assert steps.at == [0.0, 0.05, 0.15, 0.35]
    assert not steps.timer.failing


@in_virtual_time
async def test_nothing_is_done_after_clear_or_while_the_worker_stops() -> None:
    steps = Steps()
    steps.expect(5.0)
    steps.timer.clear()
    await asyncio.sleep(10)
    steps.background.stopping = True
    steps.expect(20.0)
    steps.timer.wake()
    await asyncio.sleep(100)
    assert steps.at == []


@in_virtual_time
async def test_a_wake_up_during_a_step_begins_no_other() -> None:
    steps = Steps()
    steps.took = 5.0
    for _ in range(3):
        steps.timer.wake()
        await asyncio.sleep(1)
    assert steps.at == [0.0]
