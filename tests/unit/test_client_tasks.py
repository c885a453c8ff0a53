"""What must run to its end does, however often who waits for it is cancelled."""

import asyncio

import anyio

from keylane.tasks import finished

TURNS = 50  # of the event loop: a scope of anyio that is cancelled cancels at each


async def test_who_is_cancelled_hurries_the_end_and_waits_for_it() -> None:
    async def work() -> None:
        await hurried.wait()
        for _ in range(TURNS):
            await asyncio.sleep(0)

    hurried = asyncio.Event()
    task = asyncio.create_task(work())
    with anyio.CancelScope() as scope:
        scope.cancel()
        await finished(task, hurried.set)
    assert scope.cancelled_caught
    assert task.done()
