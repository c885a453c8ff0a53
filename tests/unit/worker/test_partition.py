"""A partition in virtual time: its lease, calls under it, and handing it over."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from fakeredis import FakeServer

from keylane import wire
from keylane.errors import Fenced
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Lease
from keylane_broker.errors import NotOwner
from tests.support.peer import Elsewhere, Refused, Stream, messages, publish
from tests.support.small_worker import SmallWorker, before_storing
from tests.support.virtual_time import in_virtual_time


async def give_to(engine: Engine, name: str) -> None:
    """Place the one partition of topic t on another worker."""
    assert await engine.assign((await engine.owners()).version, {"t": [name]})


@in_virtual_time
async def test_a_lease_that_another_worker_holds_is_taken_as_soon_as_it_ends(server: FakeServer) -> None:
    async with SmallWorker(server, "w0", topic=("t", 1), partition_lease=5.0) as worker:
        partition = worker.partitions.get("t", 0)
        await worker.engine.release(await partition.lease())
        partition.drop_lease()
        assert await worker.engine.acquire("t", 0, "somebody", 3_000)
        began = asyncio.get_running_loop().time()
        lease = await partition.lease()
        assert lease.worker == "w0"
        assert 3.0 <= asyncio.get_running_loop().time() - began < 3.1


@in_virtual_time
async def test_all_who_need_the_lease_share_one_attempt(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        partition = worker.partitions.get("t", 0)
        await partition.lease()
        partition.drop_lease()
        acquire, calls = worker.engine.acquire, list[int]()

        async def counted(*arguments: Any, **named: Any) -> Lease | None:
            calls.append(1)
            return await acquire(*arguments, **named)

        worker.engine.acquire = counted  # type: ignore[method-assign]
        leases = await asyncio.gather(*(partition.lease() for _ in range(10)))
        assert len(calls) == 1
        assert len({lease.epoch for lease in leases}) == 1


@in_virtual_time
async def test_a_fenced_call_is_made_once_more_under_a_new_lease_and_no_more(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        partition = worker.partitions.get("t", 0)
        epochs: list[int] = []

        async def fenced(fail: int) -> str:
            async def step(_: Engine, lease: Lease) -> str:
                epochs.append(lease.epoch)
                if len(epochs) <= fail:
                    raise Fenced("another has it")
                return "done"

            return await partition.call(step)

        assert await fenced(1) == "done"
        assert [later > sooner for sooner, later in pairwise(epochs)] == [True]
        epochs.clear()
        with pytest.raises(Fenced):
            await fenced(9)
        assert len(epochs) == 2


@in_virtual_time
async def test_consumers_are_redirected_and_publishes_refused_when_the_partition_moves(
    server: FakeServer,
) -> None:
    async with SmallWorker(server, "w0", topic=("t", 1)) as old, SmallWorker(server, "w1") as new:
        peer = await old.connect()
        stream = Stream(peer, "t", "s", "c")
        await stream.open(permits=7)
        await publish(peer, "t", 0, "a", "b")
        await stream.receive(2)
        await give_to(old.engine, "w1")
        began = asyncio.get_running_loop().time()
        await old.membership.refresh()
        said = await peer.push(wire.Redirect)
        assert asyncio.get_running_loop().time() - began < 1.0  # and not when somebody looks anyway
        assert (said.partition, said.address, said.stream, said.permits) == (0, "w1:9999", stream.number, 2)
        with pytest.raises(Elsewhere):
            await publish(peer, "t", 0, "c")
        await new.membership.refresh()
        async with asyncio.timeout(1.0):  # for the old owner has let go of it
            lease = await new.partitions.get("t", 0).lease()
        assert lease.worker == "w1"
        assert ("t", 0) not in old.partitions.by_place


@in_virtual_time
async def test_what_comes_behind_a_refused_publish_is_refused_until_the_client_begins_again(
    server: FakeServer,
) -> None:
    async with SmallWorker(server, "w0", topic=("t", 1)) as worker, SmallWorker(server, "w1"):
        peer = await worker.connect()
        await give_to(worker.engine, "w1")
        await worker.membership.refresh()
        await asyncio.sleep(1)
        with pytest.raises(Elsewhere):
            await publish(peer, "t", 0, "a")
        await give_to(worker.engine, "w0")
        await worker.membership.refresh()
        with pytest.raises(Refused, match="fenced"):
            await publish(peer, "t", 0, "b")
        await publish(peer, "t", 0, "a", again=True)
        await publish(peer, "t", 0, "b")


@in_virtual_time
async def test_after_a_lost_lease_the_owner_is_looked_up_before_anything_else_is_done(
    server: FakeServer,
) -> None:
    async with SmallWorker(server, "w0", topic=("t", 1)) as worker, SmallWorker(server, "w1"):
        partition = worker.partitions.get("t", 0)
        lease = await partition.lease()
        await give_to(worker.engine, "w1")  # of which nobody has told us
        assert worker.membership.owner("t", 0) == "w0"
        partition.lose_lease(lease)
        with pytest.raises(NotOwner) as caught:
            await partition.lease()
        assert caught.value.address == "w1:9999"


@in_virtual_time
async def test_handing_over_waits_for_calls_under_way_but_not_for_ever(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        partition, loop = worker.partitions.get("t", 0), asyncio.get_running_loop()
        await partition.lease()

        async def slow(seconds: float) -> None:
            await partition.call(lambda _, __: asyncio.sleep(seconds))

        for seconds, waited in ((0.3, 0.3), (9.0, 1.0)):
            call = asyncio.create_task(slow(seconds))
            await asyncio.sleep(0.01)
            began = loop.time()
            lease = await partition.stop_calls()
            assert lease is not None
            assert loop.time() - began == pytest.approx(waited, abs=0.02)
            await call
            partition.redirect_consumers()  # to nobody: it is still ours
            await worker.engine.release(lease)
            await partition.lease()


@in_virtual_time
async def test_publishes_that_come_during_a_call_go_together_in_the_next(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        peer = await worker.connect()
        await Stream(peer, "t", "s", "c").open()  # without a subscription nothing is stored
        await publish(peer, "t", 0, "first")
        begun, sizes = asyncio.Event(), list[int]()

        async def wait(_: int, size: int) -> None:
            sizes.append(size)
            begun.set()
            await asyncio.sleep(0.1)

        before_storing(worker, wait)
        answers = [peer.begin(wire.Publish("t", 0), messages("m0"))]
        await begun.wait()
        answers += [peer.begin(wire.Publish("t", 0), messages(f"m{number}")) for number in range(1, 9)]
        replies = [wire.properties_of(await answer, wire.PublishReply) for answer in answers]
        assert sizes == [1, 8]
        assert [reply.first for reply in replies] == list(range(replies[0].first, replies[0].first + 9))


@in_virtual_time
async def test_what_many_producers_send_is_stored_in_several_calls(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        peer = await worker.connect()
        await Stream(peer, "t", "s", "c").open()
        await publish(peer, "t", 0, "first")
        begun, sizes = asyncio.Event(), list[int]()

        async def wait(_: int, size: int) -> None:
            sizes.append(size)
            begun.set()
            await asyncio.sleep(0.1)

        before_storing(worker, wait)
        answers = [peer.begin(wire.Publish("t", 0, producer="p", number=1, oldest=1), messages("m"))]
        await begun.wait()
        for number in range(160):
            request = wire.Publish("t", 0, producer=f"p{number}", number=1, oldest=1)
            answers.append(peer.begin(request, messages(f"m{number}")))
        for answer in answers:
            wire.properties_of(await answer, wire.PublishReply)
        assert sizes == [1, 100, 60]
