"""Dispatching in virtual time: who gets what, and when anybody looks."""

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any

from fakeredis import FakeServer

from keylane import wire
from keylane.errors import Unavailable
from keylane_broker.engine.values import Capacity, Lease
from tests.support.peer import Peer, Stream, messages, publish
from tests.support.small_worker import SmallWorker
from tests.support.virtual_time import in_virtual_time


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
