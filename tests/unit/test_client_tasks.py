"""Tasks that several wait for: they run to their end, once, however often who waits is cancelled."""

import asyncio
from functools import partial

import anyio
import pytest

from keylane.errors import ConnectionClosed, Unavailable
from keylane.tasks import SingleFlight, Tasks, finished

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


# Once for all who want it


async def test_what_several_want_at_a_time_is_done_once_and_then_anew() -> None:
    calls: list[str] = []

    async def look_up(name: str) -> str:
        calls.append(name)
        await asyncio.sleep(0.001)
        return name.upper()

    lookups: SingleFlight[str, str] = SingleFlight(Tasks(), "closed")
    names = ["a", "b", "a", "a"]
    found = await asyncio.gather(*(lookups.run(name, partial(look_up, name)) for name in names))
    assert (found, calls) == (["A", "B", "A", "A"], ["a", "b"])
    assert await lookups.run("a", partial(look_up, "a")) == "A"
    assert calls == ["a", "b", "a"]


async def test_who_is_cancelled_does_not_end_it_for_the_others() -> None:
    go_on = asyncio.Event()

    async def work() -> int:
        await go_on.wait()
        return 7

    flight: SingleFlight[str, int] = SingleFlight(Tasks(), "closed")
    first, second = (asyncio.ensure_future(flight.run("", work)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    go_on.set()
    assert await second == 7


async def test_who_waits_when_the_owner_ends_it_hears_so_and_each_error_is_raised_anew() -> None:
    tasks = Tasks()
    flight: SingleFlight[str, None] = SingleFlight(tasks, "the client was closed")

    async def wait() -> None:
        await asyncio.Event().wait()

    waiting = asyncio.ensure_future(flight.run("", wait))
    await asyncio.sleep(0)
    await tasks.cancel()
    with pytest.raises(ConnectionClosed, match="the client was closed"):
        await waiting

    async def fail() -> None:
        raise Unavailable("not now")

    found = await asyncio.gather(*(flight.run("", fail) for _ in range(2)), return_exceptions=True)
    assert [type(error) for error in found] == [Unavailable, Unavailable]
    assert found[0] is not found[1]
