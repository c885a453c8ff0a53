"""When leases are extended, go back or are let go; in virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from keylane.consume.block import HANDED, STALE, Block, Span
from keylane.consume.lease_extender import LeaseExtender
from keylane.consume.leases import Leases
from keylane.errors import Unavailable
from tests.support.blocks import LEASE, block
from tests.support.virtual_time import virtual as virtual

Run = Callable[[Coroutine[Any, Any, None]], None]


class Story:
    """A consumer's leases and their extender; what is asked for is noted, with its time, and answered."""

    def __init__(self, patience: float, *, mode: str = "shared") -> None:
        self.loop = asyncio.get_running_loop()
        self.began = self.loop.time()
        self.asked: list[tuple[float, list[int]]] = []
        self.gone: list[tuple[float, list[int]]] = []
        self.error: Exception | None = None
        self.leases = Leases(lambda partition, count: None, self._give_back)
        self.leases.mode = mode
        self.leases.lease = LEASE
        self.leases.active = self.began
        self.extender = LeaseExtender(self.leases, patience, self._extend, self._give_back)

    @property
    def now(self) -> float:
        return round(self.loop.time() - self.began, 2)

    def deliver(self, held: Block, *, handed: bool) -> Block:
        """Hold messages, in the application's hands or not."""
        self.leases.add(held)
        for index in range(len(held)) if handed else ():
            self.leases.hand(held, index)
        self.extender.wake_at(held.soonest)
        return held

    def block(self, messages: list[tuple[int, str]] | int, **more: Any) -> Block:
        return block(messages, now=self.loop.time(), **more)

    def _extend(self, spans: list[Span]) -> asyncio.Future[None]:
        self.asked.append((self.now, _entries(spans)))
        answer: asyncio.Future[None] = self.loop.create_future()
        if self.error is not None:
            answer.set_exception(self.error)
        else:
            deadline = self.loop.time() + LEASE
            for held, start, stop in spans:
                self.leases.extend_range(held, start, stop, deadline)
            self.leases.extend_lanes(spans, deadline)
            self.extender.wake_at(deadline)
            answer.set_result(None)
        return answer

    def _give_back(self, spans: list[Span]) -> None:
        self.gone.append((self.now, _entries(spans)))
        for held, start, stop in spans:
            for index in range(start, stop):
                self.leases.stale(held, index)


def _entries(spans: list[Span]) -> list[int]:
    return [held.entries[index] for held, start, stop in spans for index in range(start, stop)]


def test_leases_are_extended_halfway_for_as_long_as_patience_lasts(virtual: Run) -> None:
    async def story() -> None:
        told = Story(patience=50.0)
        held = told.deliver(told.block(2), handed=True)
        await asyncio.sleep(200.0)
        assert told.asked == [(15.0, [1, 2]), (30.0, [1, 2]), (45.0, [1, 2])]
        assert list(held.states) == [STALE, STALE], "at 75 s"

    virtual(story())


def test_what_nobody_takes_goes_back_a_little_before_the_broker_would_take_it(virtual: Run) -> None:
    async def story() -> None:
        told = Story(patience=20.0)
        told.deliver(told.block(1), handed=False)
        await asyncio.sleep(200.0)
        assert told.asked == [(15.0, [1])]
        assert told.gone == [(42.0, [1])], "a tenth of a lease before 45 s"

    virtual(story())


def test_without_patience_nothing_is_extended(virtual: Run) -> None:
    async def story() -> None:
        told = Story(patience=0.0)
        held = told.deliver(told.block(1), handed=True)
        told.deliver(told.block([(2, "")], token=2), handed=False)
        await asyncio.sleep(28.0)
        assert told.gone == [(27.0, [2])]
        assert list(held.states) == [HANDED]
        await asyncio.sleep(3.0)
        assert list(held.states) == [STALE]
        assert told.asked == []

    virtual(story())


def test_a_lane_is_extended_once_however_many_of_its_messages_are_held(virtual: Run) -> None:
    async def story() -> None:
        told = Story(patience=100.0, mode="key_shared")
        told.deliver(told.block([(1, "a"), (2, "b"), (3, "a"), (4, "b")]), handed=True)
        await asyncio.sleep(16.0)
        assert told.asked == [(15.0, [1, 2])]

    virtual(story())


def test_an_extension_that_has_failed_is_tried_again_until_the_lease_ends(virtual: Run) -> None:
    async def story() -> None:
        told = Story(patience=100.0)
        told.error = Unavailable("not now")
        told.deliver(told.block(1), handed=True)
        await asyncio.sleep(22.0)
        assert [at for at, _ in told.asked] == [15.0, 18.0, 21.0]
        told.error = None
        await asyncio.sleep(30.0)
        assert [at for at, _ in told.asked[3:]] == [24.0, 39.0]

    virtual(story())


@pytest.mark.parametrize("patience", [0.0, 100.0])
def test_when_it_is_closed_nothing_more_happens(virtual: Run, patience: float) -> None:
    async def story() -> None:
        told = Story(patience)
        told.deliver(told.block(1), handed=False)
        told.extender.close()
        told.extender.wake_at(told.loop.time() + 1.0)
        await asyncio.sleep(100.0)
        assert (told.asked, told.gone) == ([], [])

    virtual(story())
