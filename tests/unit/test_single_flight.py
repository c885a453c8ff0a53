"""What many want at once is tried once."""

import asyncio

import pytest

from keylane.errors import Unavailable
from keylane_broker.store.single_flight import SingleFlight

pytestmark = pytest.mark.anyio


async def test_all_who_want_the_same_share_one_attempt_and_its_outcome() -> None:
    flight, started, go = SingleFlight(), 0, asyncio.Event()

    async def attempt() -> str:
        nonlocal started
        started += 1
        await go.wait()
        return "done"

    waiting = [asyncio.create_task(flight.join("a", attempt)) for _ in range(3)]
    await asyncio.sleep(0)
    assert flight.under_way("a")
    assert not flight.under_way("b")
    waiting[0].cancel()
    go.set()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert (answers[1:], started) == (["done", "done"], 1)
    assert not flight.under_way("a")


async def test_a_failure_is_told_to_all_and_the_next_attempt_starts_afresh() -> None:
    flight, outcomes = SingleFlight(), [OSError("away"), "back"]

    async def attempt() -> object:
        outcome = outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    told = await asyncio.gather(*(flight.join("a", attempt) for _ in range(2)), return_exceptions=True)
    assert [str(error) for error in told] == ["away", "away"]
    assert await flight.join("a", attempt) == "back"


async def test_who_waits_for_an_attempt_that_is_ended_is_not_cancelled() -> None:
    flight = SingleFlight()
    waiting = asyncio.create_task(flight.join("a", asyncio.Event().wait))
    await asyncio.sleep(0)
    flight.cancel()
    with pytest.raises(Unavailable, match="closed while connecting"):
        await waiting
