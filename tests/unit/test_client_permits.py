"""Permits over several workers: never more out than there are, and nobody goes without for good."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.consume.permits import Permits, split
from keylane.tasks import Tasks
from tests.support.scripted_worker import PATIENCE


class Giver:
    """A worker with messages that sends as many as it may; `out` are those that are not settled."""

    def __init__(self, name: str, backlog: int, permits: "Permits[Giver]", all_out: "list[Giver]") -> None:
        self.name = name
        self.backlog = backlog
        self.limit = 0
        self.out = 0
        self.said = False  # that it wants a permit
        self._permits = permits
        self._all_out = all_out  # what is with the application, of all workers
        self._fewer = asyncio.Event()

    def grant(self, limit: int) -> None:
        self.limit, self.said = limit, False
        self.send()

    async def lower(self, limit: int) -> None:
        self.limit, self.said = limit, False
        while self.out > self.limit:
            self._fewer.clear()
            await self._fewer.wait()
        asyncio.get_running_loop().call_soon(self.send)

    def send(self) -> None:
        while self.backlog and self.out < self.limit:
            self.backlog -= 1
            self.out += 1
            self._all_out.append(self)
        if self.backlog and not self.limit and not self.said:
            self.said = True
            self._permits.wanted(self)

    def settle(self) -> None:
        self.out -= 1
        self._fewer.set()
        self.send()


@pytest.mark.parametrize(("permits", "workers"), [(1, 4), (3, 4), (4, 4), (5, 4), (1, 1), (2, 9), (100, 4)])
async def test_all_workers_are_served_in_turn_and_never_more_is_out_than_there_are_permits(
    permits: int, workers: int
) -> None:
    tasks = Tasks()
    shared: Permits[Giver] = Permits(permits, tasks)
    out: list[Giver] = []
    givers = [Giver(f"w{number}", 50, shared, out) for number in range(workers)]
    shared.share(dict.fromkeys(givers, 1))
    for giver in givers:
        giver.send()
    served: list[str] = []
    async with asyncio.timeout(PATIENCE):
        while any(giver.backlog or giver.out for giver in givers):
            assert len(out) <= permits
            if out:
                giver = out.pop(0)
                served.append(giver.name)
                giver.settle()
            await asyncio.sleep(0)
    assert len(served) == 50 * workers
    # While all have something, nobody waits for longer than it takes the others to have some turns.
    rounds = served[: workers * 20]
    for giver in givers:
        places = [0, *(place for place, name in enumerate(rounds) if name == giver.name), len(rounds)]
        gaps = [after - before for before, after in pairwise(places)]
        assert max(gaps) <= 4 * workers + permits, (giver.name, rounds)
    await tasks.cancel()


async def test_a_permit_that_idles_goes_to_who_wants_it_though_another_is_stuck() -> None:
    tasks = Tasks()
    permits: Permits[Giver] = Permits(2, tasks)
    out: list[Giver] = []
    stuck, idle, late = (Giver(name, 0, permits, out) for name in ("stuck", "idle", "late"))
    permits.share({stuck: 1, idle: 1, late: 1})
    stuck.backlog = 5
    stuck.send()
    assert (stuck.out, stuck.limit, idle.limit, late.limit) == (1, 1, 1, 0)
    late.backlog = 3
    late.send()
    async with asyncio.timeout(PATIENCE):
        for _ in range(3):
            while late.out == 0:
                assert stuck.out + late.out + idle.out <= 2
                await asyncio.sleep(0)
            out.remove(late)
            late.settle()
    await tasks.cancel()


async def test_when_a_worker_joins_others_are_lowered_before_it_gets_permits() -> None:
    tasks = Tasks()
    permits: Permits[Giver] = Permits(10, tasks)
    out: list[Giver] = []
    first, second = Giver("first", 100, permits, out), Giver("second", 100, permits, out)
    permits.share({first: 4})
    assert (first.out, second.out) == (10, 0)
    permits.share({first: 2, second: 2})
    await asyncio.sleep(0)
    assert (first.limit, second.limit) == (5, 0)
    async with asyncio.timeout(PATIENCE):
        while second.limit < 5:
            assert first.out > 5 or second.limit == 5
            first.settle()
            await asyncio.sleep(0)
            assert first.out + second.out <= 10
    permits.share({second: 4})
    assert second.limit == 10
    await tasks.cancel()


@pytest.mark.slow
@given(
    st.integers(1, 10_000),
    st.dictionaries(st.text(max_size=3), st.integers(0, 1_000), min_size=1, max_size=20),
)
def test_shares_add_up_and_are_as_even_as_they_can_be(total: int, weights: dict[str, int]) -> None:
    shares = split(total, weights, {})  # type: ignore[type-var]
    some = [name for name, weight in weights.items() if weight]
    assert sum(shares.values()) == (total if some else 0) or total < len(some)
    assert all(shares[name] == 0 for name in weights if not weights[name])
    if total >= len(some):
        assert all(shares[name] >= 1 for name in some)
        whole = sum(weights.values())
        for name in some:
            assert abs(shares[name] - 1 - (total - len(some)) * weights[name] / whole) < 1
    else:
        assert sorted(shares[name] for name in some) == [0] * (len(some) - total) + [1] * total


def test_with_too_few_permits_those_who_have_one_keep_it() -> None:
    assert split(1, {"a": 1, "b": 1}, {"b": 1}) == {"a": 0, "b": 1}  # type: ignore[type-var]


async def test_each_worker_may_have_out_what_is_held_of_it_and_as_many_more() -> None:
    """For somebody who takes messages now and then: what is asked for comes, whoever has it."""
    tasks = Tasks()
    permits: Permits[Giver] = Permits(3, tasks)
    out: list[Giver] = []
    givers = [Giver(name, backlog, permits, out) for name, backlog in (("a", 1), ("b", 9), ("c", 0))]
    permits.share(dict.fromkeys(givers, 1))
    held = {giver: giver.out for giver in givers}
    assert sum(held.values()) == 2
    permits.offer(held, 4)
    assert [giver.out for giver in givers] == [1, 5, 0]
    permits.offer({giver: giver.out for giver in givers}, 0)
    for giver in list(out):
        permits.offer({one: one.out - (one is giver) for one in givers}, 0)
        giver.settle()
    assert [giver.out for giver in givers] == [0, 0, 0]  # nobody has asked for more
    assert givers[1].backlog == 4
    await tasks.cancel()
