"""Workers of a cluster in virtual time: who serves what when they come, go, and die."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NoReturn

import pytest
from fakeredis import FakeServer

from keylane.errors import InvalidArgument, Unavailable
from keylane_broker.engine.values import Owners, TopicSettings
from keylane_broker.store.keys import partition_keys
from tests.support.ownership import epochs, holders
from tests.support.peer import Elsewhere, publish
from tests.support.small_worker import SmallWorker
from tests.support.virtual_time import in_virtual_time

LEASE = 5.0  # seconds


@asynccontextmanager
async def workers(server: FakeServer, count: int, partitions: int = 6) -> AsyncIterator[list[SmallWorker]]:
    """A cluster that lives, with one topic."""
    async with AsyncExitStack() as stack:
        made: list[SmallWorker] = []
        for number in range(count):
            topic = None if number else ("t", partitions)
            worker = SmallWorker(server, f"w{number}", topic=topic, partition_lease=LEASE)
            made.append(await stack.enter_async_context(worker))
            worker.live()
        await asyncio.sleep(3 * LEASE)
        yield made


def served(all: list[SmallWorker]) -> Counter[str]:
    """How many partitions each worker has the lease of, by what it believes itself."""
    return Counter({worker.name: len(worker.partitions.leased()) for worker in all})


@pytest.mark.slow
@in_virtual_time
async def test_leases_are_renewed_for_as_long_as_a_worker_lives(server: FakeServer) -> None:
    async with workers(server, 1) as [only]:
        before = await epochs(only.engine)
        await asyncio.sleep(20 * LEASE)
        assert await epochs(only.engine) == before
        assert set((await holders(only.engine)).values()) == {"w0"}


@pytest.mark.slow
@in_virtual_time
async def test_partitions_are_spread_evenly_over_those_who_come(server: FakeServer) -> None:
    async with workers(server, 3) as all:
        assert served(all) == {"w0": 2, "w1": 2, "w2": 2}


@pytest.mark.slow
@in_virtual_time
async def test_there_is_one_controller_at_every_moment_and_another_when_it_dies(server: FakeServer) -> None:
    async with workers(server, 3) as all:
        for _ in range(100):
            await asyncio.sleep(0.37)
            assert len({worker.membership.controller_id for worker in all}) == 1
        [controller] = [worker for worker in all if worker.membership.controller_id == worker.name]
        await controller.kill()
        others = [worker for worker in all if worker is not controller]
        for _ in range(100):
            await asyncio.sleep(0.1)
            leading = [one.name for one in others if one.membership.controller_id == one.name]
            assert len(leading) <= 1
        assert len(leading) == 1


@pytest.mark.slow
@in_virtual_time
async def test_the_partitions_of_a_dead_worker_are_served_by_others_when_its_leases_have_ended(
    server: FakeServer,
) -> None:
    async with workers(server, 3) as [first, *others]:
        before = await epochs(first.engine)
        lost = first.partitions.leased()
        await first.kill()
        died = asyncio.get_running_loop().time()
        while served(others).total() < 6:
            assert asyncio.get_running_loop().time() - died < 2 * LEASE
            await asyncio.sleep(0.05)
        assert asyncio.get_running_loop().time() - died > LEASE / 3
        after = await epochs(others[0].engine)
        assert {place for place in before if after[place] > before[place]} == set(lost)  # none else moved


@pytest.mark.slow
@in_virtual_time
async def test_a_worker_that_leaves_hands_everything_over_at_once(server: FakeServer) -> None:
    async with workers(server, 3) as [first, *others]:
        began = asyncio.get_running_loop().time()
        await first.membership.leave(LEASE)
        assert asyncio.get_running_loop().time() - began < 1.0
        await asyncio.sleep(0.5)
        assert served([first, *others]) == {"w0": 0, "w1": 3, "w2": 3}


@in_virtual_time
async def test_a_worker_whose_heart_stands_still_for_longer_than_its_leases_writes_nothing_any_more(
    server: FakeServer,
) -> None:
    async with workers(server, 2, partitions=1) as all:
        [owner] = [worker for worker in all if worker.partitions.leased()]
        [other] = [worker for worker in all if worker is not owner]
        peer = await owner.connect()
        for task in owner._alive:
            task.cancel()
        await asyncio.sleep(3 * LEASE)
        assert other.partitions.leased() == [("t", 0)]
        assert owner.partitions.leased() == [("t", 0)]  # so it believes
        with pytest.raises(Elsewhere):
            await publish(peer, "t", 0, "too late")


async def silence(all: list[SmallWorker], duration: float) -> None:
    """Let Redis be away from workers."""
    run = {worker.name: worker.engine.store.run for worker in all}

    async def refuse(*_: object, **__: object) -> object:
        await asyncio.sleep(1)
        raise Unavailable("Redis cannot be reached")

    for worker in all:
        worker.engine.store.run = refuse  # type: ignore[method-assign, assignment]
    await asyncio.sleep(duration)
    for worker in all:
        worker.engine.store.run = run[worker.name]  # type: ignore[method-assign]


@pytest.mark.slow
@in_virtual_time
async def test_a_silent_cluster_is_given_time_to_be_heard_before_anybody_is_declared_dead(
    server: FakeServer,
) -> None:
    async with workers(server, 3) as all:
        before, owners = await holders(all[0].engine), (await all[0].engine.owners()).topics
        await silence(all, 3 * LEASE)
        for _ in range(100):
            await asyncio.sleep(LEASE / 20)
            assert (await all[0].engine.owners()).topics == owners
        assert await holders(all[0].engine) == before


@pytest.mark.slow
@in_virtual_time
@pytest.mark.parametrize("duration", [0.7 * LEASE, 3 * LEASE])
async def test_who_was_found_dead_stays_so_though_the_others_could_not_be_heard_either(
    server: FakeServer, duration: float
) -> None:
    async with workers(server, 3) as [first, *others]:
        await first.kill()
        await asyncio.sleep(3 * LEASE)
        assert served(others).total() == 6
        owners = (await others[0].engine.owners()).topics
        await silence(others, duration)
        for _ in range(100):
            await asyncio.sleep(LEASE / 20)
            assert (await others[0].engine.owners()).topics == owners


@pytest.mark.slow
@in_virtual_time
async def test_the_last_worker_that_serves_cannot_be_drained(server: FakeServer) -> None:
    async with workers(server, 2) as [first, second]:
        await first.membership.drain("w0", True)
        await asyncio.sleep(2)
        assert served([first, second]) == {"w0": 0, "w1": 6}
        with pytest.raises(InvalidArgument, match="nobody could take"):
            await first.membership.drain("w1", True)
        await first.membership.drain("w0", False)
        await asyncio.sleep(2 * LEASE)
        assert served([first, second]) == {"w0": 3, "w1": 3}


class Unwalked(dict[str, list[str]]):
    """Owners that may be looked up, and not walked over."""

    def _walk(self) -> NoReturn:
        raise AssertionError("all topics were walked over")

    __iter__ = keys = values = items = _walk


@in_virtual_time
async def test_a_look_at_which_nothing_has_changed_costs_the_same_for_any_number_of_topics(
    server: FakeServer,
) -> None:
    async with workers(server, 1) as [only]:
        membership = only.membership
        membership.owners = Unwalked(membership.owners)
        membership._known = Owners(membership.version, membership.owners)
        await membership.refresh()
        assert [membership.report(report).partitions for report in membership.workers.values()] == [6]


@pytest.mark.slow
@in_virtual_time
async def test_of_a_deleted_topic_no_lease_is_said_to_be_lost(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with workers(server, 2) as all:
        await all[0].engine.delete_topic("t")
        for worker in all:
            await worker.partitions.renew_leases()
        await all[0].membership.topics_changed("t")
        await asyncio.sleep(3 * LEASE)
        assert "lost the lease" not in caplog.text
        await all[0].engine.create_topic("t", TopicSettings(6))
        await all[0].membership.topics_changed()
        await asyncio.sleep(3 * LEASE)
        for place in await holders(all[0].engine):
            await all[0].engine.store.command("DEL", partition_keys(*place).lease)
        await asyncio.sleep(3 * LEASE)
        assert "lost the lease" in caplog.text
        assert set((await holders(all[0].engine)).values()) == {"w0", "w1"}
