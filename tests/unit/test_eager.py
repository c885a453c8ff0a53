"""A task that begins at once is a task like any other from there on."""

import asyncio

import pytest

from keylane_broker.worker import eager


async def test_it_runs_to_its_first_wait_where_it_is_started_and_then_goes_on() -> None:
    steps: list[str] = []
    gate = asyncio.get_running_loop().create_future()

    async def work() -> None:
        steps.append("begun")
        steps.append(await gate)
        await asyncio.sleep(0)
        steps.append("done")

    task = eager.start(work())
    assert steps == ["begun"]
    gate.set_result("through")
    await task
    assert steps == ["begun", "through", "done"]


async def test_what_never_waits_is_done_at_once() -> None:
    steps: list[str] = []

    async def work() -> None:
        steps.append("done")

    task = eager.start(work())
    assert steps == ["done"]
    await task


async def test_it_knows_its_own_task_and_its_timeouts_are_its_own() -> None:
    mine = asyncio.current_task()
    seen: list[object] = []

    async def work() -> None:
        seen.append(asyncio.current_task())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.25):
                await asyncio.get_running_loop().create_future()
        seen.append(asyncio.current_task())

    task = eager.start(work())
    assert asyncio.current_task() is mine
    await task
    assert seen == [task, task]


async def test_a_cancellation_reaches_it_and_an_error_comes_out_of_it() -> None:
    ended: list[str] = []

    async def work(error: Exception | None) -> None:
        try:
            await asyncio.sleep(0 if error else 60)
            if error:
                raise error
        finally:
            ended.append("ended")

    task = eager.start(work(None))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ValueError, match="why"):
        await eager.start(work(ValueError("why")))
    assert ended == ["ended", "ended"]
