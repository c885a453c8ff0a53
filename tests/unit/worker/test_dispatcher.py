"""Dispatching in virtual time: who gets what, and when anybody looks."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from fakeredis import FakeServer

from keylane import wire
from keylane.errors import Unavailable
from keylane_broker.engine.values import Capacity, Lease
from tests.support.peer import Peer, Stream, messages, publish
from tests.support.small_worker import SmallWorker
from tests.support.virtual_time import in_virtual_time

HOUR_MS = 3_600_000


async def stream(
    worker: SmallWorker, name: str, *, mode: str = "shared", permits: int = 1_000, lease_ms: int | None = None
) -> Stream:
    """A consumer of the one partition of a topic, on a connection of its own."""
    opened = Stream(await worker.connect(), "t", "s", name)
    opened.mode = mode
    await opened.peer.ask(
        wire.Subscribe(opened.number, "t", "s", name, mode, permits=permits, lease_ms=lease_ms),
        wire.SubscribeReply,
    )
    return opened


async def publish_each(peer: Peer, *uids: str) -> None:
    """Publish messages of a key each."""
    for uid in uids:
        await publish(peer, "t", 0, uid, key=uid)


def spy(worker: SmallWorker) -> list[str]:
    """Note the names of the scripts that are run from now on."""
    names, run = list[str](), worker.engine.store.run

    async def noted(script: str, *arguments: Any, **named: Any) -> Any:
        names.append(script)
        return await run(script, *arguments, **named)

    worker.engine.store.run = noted  # type: ignore[method-assign]
    return names


@in_virtual_time
async def test_nobody_is_sent_more_than_its_permits_and_the_rest_goes_to_others(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        small, large = await stream(worker, "small", permits=2), await stream(worker, "large", permits=5)
        await publish_each(large.peer, *(f"m{number}" for number in range(20)))
        await asyncio.sleep(1)
        assert [len(await one.waiting()) for one in (small, large)] == [2, 5]
        await small.ack(*await small.receive(1))
        await asyncio.sleep(1)
        assert [len(await one.waiting()) for one in (small, large)] == [2, 5]


@in_virtual_time
async def test_consumers_with_the_same_room_get_the_same_share(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        streams = [await stream(worker, name, permits=100) for name in ("a", "b", "c", "d")]
        await publish_each(streams[0].peer, *(f"m{number}" for number in range(40)))
        await asyncio.sleep(1)
        counts = [len(await one.waiting()) for one in streams]
        assert counts == [10, 10, 10, 10]


@pytest.mark.slow
@in_virtual_time
async def test_consumers_of_one_permit_on_many_partitions_are_all_served(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 3)) as worker:
        streams = [await stream(worker, f"c{number}", permits=1) for number in range(20)]
        peer, served = streams[0].peer, set[str]()
        await asyncio.sleep(1)
        for number in range(15):
            answers = [
                peer.begin(wire.Publish("t", partition), messages(f"{number}-{partition}"))
                for partition in range(3)
            ]
            await asyncio.gather(*answers)
            await asyncio.sleep(1)
            for one in streams:
                for item in await one.waiting():
                    served.add(one.name)
                    await one.ack(item)
                one.items.clear()
        assert len(served) == 20


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shared", "key_shared"])
@in_virtual_time
async def test_partitions_that_are_published_to_at_once_leave_each_other_room(
    server: FakeServer, mode: str
) -> None:
    partitions = 8
    async with SmallWorker(server, topic=("t", partitions)) as worker:
        one = await stream(worker, "c", mode=mode, permits=100)

        async def publish_to_all(text: str) -> None:
            bodies = [messages(f"{text}-{partition}", key=f"k{partition}") for partition in range(partitions)]
            await asyncio.gather(
                *(one.peer.begin(wire.Publish("t", number), body) for number, body in enumerate(bodies))
            )
            await asyncio.sleep(1)
            assert len(await one.waiting()) == partitions

        await publish_to_all("first")
        await asyncio.gather(*(one.ack(item) for item in one.items))
        one.items.clear()
        await asyncio.sleep(1)
        fetch, permits = worker.engine.fetch_flat, list[int]()

        async def noted(
            lease: Lease, subscription: str, rooms: list[Capacity], *rest: Any, **more: Any
        ) -> Any:
            permits.extend(room.permits for room in rooms)
            return await fetch(lease, subscription, rooms, *rest, **more)

        worker.engine.fetch_flat = noted  # type: ignore[method-assign, assignment]
        await publish_to_all("second")
        assert all(count <= 2 for count in permits), (
            permits
        )  # one is there, and another would show that it is more


@pytest.mark.slow
@in_virtual_time
async def test_who_waited_for_room_in_many_partitions_is_served_from_all_of_them(server: FakeServer) -> None:
    partitions, each = 6, 3
    async with SmallWorker(server, topic=("t", partitions)) as worker:
        one = await stream(worker, "c", permits=2)
        await asyncio.sleep(1)
        for number in range(each):
            for partition in range(partitions):
                await publish(one.peer, "t", partition, f"{partition}-{number}")
        got = set[str]()
        for _ in range(partitions * each // 2):
            await asyncio.sleep(1)
            items = list(await one.waiting())
            assert len(items) == 2  # as many as it may have, all the time
            got |= {item.uid for item in items}
            one.items.clear()
            for item in items:
                await one.ack(item)
        assert len(got) == partitions * each


@pytest.mark.slow
@in_virtual_time
async def test_many_partitions_whose_fetches_fail_at_once_are_served_when_they_do_not(
    server: FakeServer,
) -> None:
    """Each that fails lets the next one know: the stack must not grow with them."""
    partitions = 150
    async with SmallWorker(server, topic=("t", partitions)) as worker:
        one = await stream(worker, "c", permits=10)
        await asyncio.sleep(1)
        for partition in range(partitions):
            await publish(one.peer, "t", partition, f"{partition}-a", f"{partition}-b")
        await asyncio.sleep(1)
        items = list(await one.waiting())
        fetch = worker.engine.fetch_flat

        async def fail(*arguments: Any, **more: Any) -> Any:
            raise Unavailable("away")

        worker.engine.fetch_flat = fail  # type: ignore[method-assign]
        await one.ack(items[0])
        await asyncio.sleep(0.01)
        worker.engine.fetch_flat = fetch  # type: ignore[method-assign]
        got = set[str]()
        while items:
            got |= {item.uid for item in items}
            for item in items:
                await one.ack(item)
            one.items.clear()
            await asyncio.sleep(2)
            items = list(await one.waiting())
        assert len(got) == 2 * partitions


@in_virtual_time
async def test_a_client_without_permits_hears_after_a_pause_of_what_came_in_it(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        one = await stream(worker, "c", permits=1)
        await asyncio.sleep(1)
        await one.peer.answer(wire.Flow(one.number, limit=0))
        one.peer.send(wire.Flow(one.number, paused=True))
        await publish(one.peer, "t", 0, "a")
        await asyncio.sleep(1)
        await one.peer.echo()
        assert not one.peer.has(wire.Flow)
        one.peer.send(wire.Flow(one.number, paused=False))
        await asyncio.sleep(1)
        assert (await one.peer.push(wire.Flow)).wanted


@in_virtual_time
async def test_what_is_not_settled_comes_again_at_the_end_of_its_lease_and_not_before(
    server: FakeServer,
) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        first = await stream(worker, "first", permits=1, lease_ms=30_000)
        second = await stream(worker, "second", permits=0, lease_ms=30_000)
        await publish(first.peer, "t", 0, "a")
        await first.receive(1)
        began = asyncio.get_running_loop().time()
        first.peer.send(wire.Flow(first.number, paused=True))
        second.peer.send(wire.Flow(second.number, limit=1))
        await second.receive(1)
        # After the backoff that a subscription has unless it says otherwise: a second, less up to a fifth.
        assert 30.8 <= asyncio.get_running_loop().time() - began < 31.05


@in_virtual_time
async def test_what_was_given_back_for_later_comes_when_it_was_asked_for(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        only = await stream(worker, "only")
        await publish(only.peer, "t", 0, "a")
        [item] = await only.receive(1)
        began = asyncio.get_running_loop().time()
        await only.nack(item, delay_ms=5_000)
        [again] = await only.receive(1)
        assert again.retries == 1
        assert 5.0 <= asyncio.get_running_loop().time() - began < 5.05


@in_virtual_time
async def test_nothing_is_asked_of_redis_while_nothing_happens(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        only = await stream(worker, "only", lease_ms=7_200_000)
        await publish(only.peer, "t", 0, "a")
        await only.receive(1)
        await asyncio.sleep(1)
        names = spy(worker)
        await asyncio.sleep(3_600)
        assert [name for name in names if name.startswith("subscription/")] == []


@in_virtual_time
async def test_while_redis_is_away_the_pauses_grow_and_then_all_is_delivered(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        only = await stream(worker, "only")
        await asyncio.sleep(1)
        fetch, attempts, loop = worker.engine.fetch_flat, list[float](), asyncio.get_running_loop()

        async def away(*arguments: Any, **named: Any) -> Any:
            attempts.append(loop.time())
            if len(attempts) <= 7:
                raise Unavailable("Redis is away")
            return await fetch(*arguments, **named)

        worker.engine.fetch_flat = away  # type: ignore[method-assign]
        await publish(only.peer, "t", 0, "a")
        await only.receive(1)
        pauses = [later - sooner for sooner, later in pairwise(attempts)]
        assert [round(pause, 2) for pause in pauses] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


@in_virtual_time
async def test_a_lane_goes_on_at_once_when_its_head_is_settled(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        streams = [await stream(worker, name, mode="key_shared", permits=1) for name in ("a", "b")]
        await publish(streams[0].peer, "t", 0, "first", "second", key="k")
        await asyncio.sleep(1)
        [holder] = [one for one in streams if await one.waiting()]
        [other] = [one for one in streams if one is not holder]
        [head] = await holder.receive(1)
        assert head.uid == "first"
        assert await other.waiting() == []  # its key is at work elsewhere
        await holder.ack(head)
        await asyncio.sleep(0.01)
        assert [item.uid for one in streams for item in await one.waiting()] == ["second"]


@in_virtual_time
async def test_a_fetch_names_those_with_the_most_room_first_and_of_many_not_all(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        streams = [await stream(worker, f"c{size:02}", permits=size) for size in range(1, 21)]
        await asyncio.sleep(1)
        fetch, named = worker.engine.fetch_flat, list[list[str]]()

        async def noted(
            lease: Lease, subscription: str, rooms: list[Capacity], *others: Any, **more: Any
        ) -> Any:
            named.append([room.consumer for room in rooms])
            return await fetch(lease, subscription, rooms, *others, **more)

        worker.engine.fetch_flat = noted  # type: ignore[method-assign, assignment]
        await publish(streams[0].peer, "t", 0, "a")
        await asyncio.sleep(1)
        assert named[0] == [f"c{size:02}" for size in range(20, 12, -1)]


@pytest.mark.slow
@in_virtual_time
async def test_as_many_consumers_are_named_as_there_are_messages(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        streams = [await stream(worker, f"c{number:02}") for number in range(40)]
        await publish_each(streams[0].peer, "first")
        await asyncio.sleep(1)
        called, post = list[str](), worker.engine.store.post

        def noted(connection: Any, call: Any, on_answer: Any) -> None:
            called.append(call[0])
            post(connection, call, on_answer)

        worker.engine.store.post = noted  # type: ignore[method-assign]
        ran = spy(worker)
        await publish(streams[0].peer, "t", 0, *(f"m{number}" for number in range(30)))
        await asyncio.sleep(1)
        assert sorted([len(await one.waiting()) for one in streams]) == [0] * 9 + [1] * 31
        assert [name for name in called + ran if "publish" not in name] in (
            ["subscription/turn"],
            ["subscription/fetch"],
        )


@pytest.mark.slow
@in_virtual_time
async def test_of_many_with_the_same_room_each_has_its_turn(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        streams = [await stream(worker, f"c{number}") for number in range(20)]
        got: Counter[str] = Counter()
        for number in range(40):
            await publish(streams[0].peer, "t", 0, f"m{number}")
            await asyncio.sleep(0.1)
            [taker] = [one for one in streams if await one.waiting()]
            await taker.ack(*await taker.receive(1))
            got[taker.name] += 1
        assert set(got.values()) == {2}


@in_virtual_time
async def test_who_told_of_room_and_lost_it_before_a_fetch_is_served_when_it_has_room_again(
    server: FakeServer,
) -> None:
    async with SmallWorker(server, topic=("t", 2)) as worker:
        stuck = await stream(worker, "stuck", permits=1, lease_ms=HOUR_MS)
        live = await stream(worker, "live", permits=1, lease_ms=HOUR_MS)
        peer = await worker.connect()
        await asyncio.sleep(1)
        for partition in (1, 0):  # both consumers are full with messages of 1 when there come some to 0
            await publish(peer, "t", partition, *(f"{partition}-{number}" for number in range(8)))
            await asyncio.sleep(1)
        fetch, gate, under_way = worker.engine.fetch_flat, asyncio.Event(), asyncio.Event()

        async def slow(lease: Lease, *rest: Any, **more: Any) -> Any:
            if lease.partition == 0 and not gate.is_set():
                under_way.set()
                await gate.wait()
            return await fetch(lease, *rest, **more)

        worker.engine.fetch_flat = slow  # type: ignore[method-assign]
        got = set[str]()

        async def settle(one: Stream) -> None:
            items = list(await one.waiting())
            one.items.clear()
            for item in items:
                await one.ack(item)
                got.add(item.uid)
            await asyncio.sleep(0.01)

        while not under_way.is_set():  # until partition 0 fetches for the one that is to be stuck
            await settle(stuck)
        await publish(peer, "t", 0, "0-late")
        for _ in range(2):  # the other one makes room and tells partition 0, and partition 1 takes it
            await settle(live)
        gate.set()
        for _ in range(60):
            await asyncio.sleep(1)
            await settle(live)
        held = {item.uid for item in await stuck.waiting()}
        everything = {f"{partition}-{number}" for partition in (0, 1) for number in range(8)} | {"0-late"}
        assert len(held) == 1
        assert got == everything - held


@in_virtual_time
async def test_what_a_seek_has_ended_is_found_out_for_many_consumers_at_once(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        peer = await worker.connect()
        streams = [Stream(peer, "t", "s", f"c{number}") for number in range(40)]
        for stream in streams:
            await stream.open(permits=1)
        for number in range(40):
            await publish(peer, "t", 0, f"m{number}")
        for stream in streams:
            await stream.receive(1)
        run = worker.engine.store.run

        async def slowly(script: str, keys: Sequence[str], *arguments: Any) -> list[Any]:
            if script == "subscription/list_leases":
                await asyncio.sleep(0.1)
            return await run(script, keys, *arguments)

        worker.engine.store.run = slowly  # type: ignore[method-assign]
        began = asyncio.get_running_loop().time()
        await peer.answer(wire.Seek("t", "s", "latest"))
        ended = [await peer.push(wire.Ended) for _ in streams]
        assert {one.stream for one in ended} == {stream.number for stream in streams}
        assert asyncio.get_running_loop().time() - began < 1.0
