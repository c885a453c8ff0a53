"""A partition that moves changes nothing for those who consume it."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

import pytest

from keylane import AsyncClient, Message, OutgoingMessage, wire
from keylane.types import Mode
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from tests.support.ownership import move, owners, served, settled
from tests.support.peer import PATIENCE, Item, Peer, Stream, publish
from tests.support.running import RunningBroker
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # real processes, and leases that run out

PERMITS = 8


async def move_on(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str, partition: int
) -> str:
    """Move a partition to the next worker; answers which."""
    now = (await owners(engine))[topic, partition]
    target = three.ids[(three.ids.index(now) + 1) % len(three.ids)]
    await move(peers[now], topic, partition, target)
    await served(engine, topic, partition, target)
    return target


# With frames: nothing between the test and the worker


@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive", "failover"])
async def test_what_is_held_stays_held_by_the_same_consumer(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str, mode: str
) -> None:
    peer = peers[three.ids[0]]
    await peer.answer(wire.CreateTopic(topic, 1))
    await peer.answer(wire.CreateSubscription(topic, "s", mode))
    await settled(engine, *three.ids)
    owner = (await owners(engine))[topic, 0]
    names = ["c1"] if mode == "exclusive" else ["c1", "c2"]
    permits = 12 if mode == "key_shared" else 6  # so that no lane has to wait for room
    streams = {name: Stream(peers[owner], topic, "s", name) for name in names}
    for stream in streams.values():
        await stream.open(0, mode=mode, permits=permits)
    for place in range(4):
        for key in ("a", "b", "c"):
            await publish(peers[owner], topic, 0, f"{key}{place}", key=key)
    held: dict[str, list[Item]] = {name: [] for name in names}
    expected = 6 if mode in ("exclusive", "failover") else 12

    async def all_out() -> bool:
        for name, stream in streams.items():
            held[name] = list(await stream.waiting())
        return sum(map(len, held.values())) == expected

    await until(all_out)
    if mode == "key_shared":
        assert not {item.key for item in held["c1"]} & {item.key for item in held["c2"]}

    for _ in range(4):
        before = peers[owner]
        owner = await move_on(three, engine, peers, topic, 0)
        for stream in streams.values():
            said = await before.push(wire.Redirect, lambda said, stream=stream: said.stream == stream.number)  # type: ignore[misc]
            assert (said.topic, said.partition) == (topic, 0)
        streams = {name: Stream(peers[owner], topic, "s", name) for name in names}
        for name, stream in streams.items():
            assert (await stream.open(0, mode=mode, permits=permits)).held == len(held[name])
        for name, stream in streams.items():
            again = await stream.receive(len(held[name]))
            assert sorted(again) == sorted(item._replace(held=True) for item in held[name])
            for key in ("a", "b", "c"):
                of_key = [item.entry for item in again if item.key == key]
                assert of_key == sorted(of_key), "in order, lane by lane"
            assert await stream.waiting() == [], "nothing of the others, and nothing above the permits"
            assert (await stream.extend(*again)).stale == [] if again else True
            held[name] = again
    got: dict[str, list[Item]] = defaultdict(list)
    for name, stream in streams.items():
        if held[name]:
            assert (await stream.ack(*held[name])).stale == []
            got[name] += held[name]
    while sum(map(len, got.values())) < 12:
        for name, stream in streams.items():
            if items := await stream.waiting():
                assert (await stream.ack(*await stream.receive(len(items)))).stale == []
                got[name] += items
    everything = [item for items in got.values() for item in items]
    assert len({item.uid for item in everything}) == 12, "each once"
    assert {item.retries for item in everything} == {0}
    assert await check_topic(engine, topic) == []
    await peer.answer(wire.DeleteTopic(topic))


async def test_a_consumer_that_comes_late_to_the_new_owner_has_not_lost_what_it_holds(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str
) -> None:
    peer = peers[three.ids[0]]
    await peer.answer(wire.CreateTopic(topic, 1))
    await peer.answer(wire.CreateSubscription(topic, "s", "key_shared"))
    await settled(engine, *three.ids)
    owner = (await owners(engine))[topic, 0]
    first = Stream(peers[owner], topic, "s", "c1")
    await first.open(0, mode="key_shared")
    await publish(peers[owner], topic, 0, "a1", "a2", key="a")
    items = await first.receive(2)
    owner = await move_on(three, engine, peers, topic, 0)
    other = Stream(peers[owner], topic, "s", "c2")
    await other.open(0, mode="key_shared")
    await publish(peers[owner], topic, 0, "a3", key="a")
    await publish(peers[owner], topic, 0, "b1", key="b")
    assert [item.uid for item in await other.receive(1)] == ["b1"], "the lane of a is not free"
    assert await other.waiting() == []
    there = Stream(peers[owner], topic, "s", "c1")
    assert (await there.open(0, mode="key_shared")).held == 2
    got = await there.receive(3)
    assert [item.uid for item in got] == ["a1", "a2", "a3"]
    assert got[:2] == [item._replace(held=True) for item in items]
    await peer.answer(wire.DeleteTopic(topic))


# With the client


class Crowd:
    """Consumers that hold what they get until they are told to settle it, and count."""

    def __init__(self, consumers: int) -> None:
        self.held: list[list[Message]] = [[] for _ in range(consumers)]
        self.seen: list[str] = []  # uids, in the order of their deliveries
        self.most = 0  # that one of them has held at a time

    async def take(self, place: int, consumer: AsyncIterator[Message]) -> None:
        """Take all that comes to one consumer."""
        async for message in consumer:
            self.held[place].append(message)
            self.seen.append(message.uid)
            self.most = max(self.most, len(self.held[place]))

    async def settle(self) -> int:
        """Ack all that is held; answers how many that were."""
        taken = [list(held) for held in self.held]
        for held in self.held:
            held.clear()  # before: room is made while the answer travels
        for messages in taken:
            await asyncio.gather(*(message.ack() for message in messages))
        return sum(map(len, taken))

    @property
    def out(self) -> int:
        """How many are held."""
        return sum(map(len, self.held))


@asynccontextmanager
async def consuming(client: AsyncClient, topic: str, mode: Mode, consumers: int) -> AsyncIterator[Crowd]:
    """So many consumers of a topic, each with few permits."""
    crowd = Crowd(consumers)
    async with AsyncExitStack() as stack:
        tasks = [
            asyncio.create_task(
                crowd.take(
                    place,
                    await stack.enter_async_context(
                        client.subscribe(topic, "s", mode=mode, name=f"c{place}", permits=PERMITS)
                    ),
                )
            )
            for place in range(consumers)
        ]
        try:
            yield crowd
        finally:
            for task in tasks:
                if task.done():
                    task.result()
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(("mode", "consumers"), [("shared", 2), ("key_shared", 2), ("exclusive", 1)])
async def test_an_application_does_not_notice_moves(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str, mode: Mode, consumers: int
) -> None:
    room = PERMITS * consumers
    async with AsyncClient(three.url) as client:
        await client.create_topic(topic, partitions=4)
        await settled(engine, *three.ids)
        async with consuming(client, topic, mode, consumers) as crowd:
            total = 0

            async def publish_some(count: int) -> None:
                nonlocal total
                keys = [f"k{number}" for number in range(count)]
                await client.publish_many(topic, [OutgoingMessage(key=key) for key in keys])
                total += count

            async def full() -> bool:
                assert crowd.most <= PERMITS
                return crowd.out == min(room, total - len(crowd.seen) + crowd.out)

            async def all_seen() -> bool:
                assert crowd.most <= PERMITS
                await crowd.settle()
                return len(crowd.seen) >= total

            await publish_some(room * 3)
            await until(full)
            uids = [{message.uid for message in held} for held in crowd.held]
            for turn in range(8):
                await move_on(three, engine, peers, topic, turn % 4)
            await asyncio.gather(
                *(message.extend(60) for held in crowd.held for message in held)
            )  # goes through every new owner
            assert [{message.uid for message in held} for held in crowd.held] == uids, "nothing else came"
            assert {message.retry_count for held in crowd.held for message in held} == {0}
            await until(all_seen)
            assert len(set(crowd.seen)) == len(crowd.seen) == total, "each once"
            for turn in range(3):  # and the permits are whole
                await publish_some(room * 3)
                await until(full)
                await move_on(three, engine, peers, topic, turn)
                await until(all_seen)
            assert len(set(crowd.seen)) == len(crowd.seen) == total
        assert await check_topic(engine, topic) == []
        await client.delete_topic(topic)


@pytest.mark.parametrize(("mode", "permits"), [("key_shared", 20), ("key_shared", 1), ("failover", 2)])
async def test_moves_under_load_lose_nothing_repeat_nothing_and_keep_the_order(
    three: RunningBroker, engine: Engine, peers: dict[str, Peer], topic: str, mode: Mode, permits: int
) -> None:
    """Also with fewer permits than workers, which then have them in turn."""
    keys, rounds, moves, turn = 12, 60, 4, 0
    seen: dict[str, list[int]] = defaultdict(list)
    sent: dict[str, list[int]] = defaultdict(list)
    async with AsyncClient(three.url) as client, AsyncClient(three.urls[1]) as other:
        await client.create_topic(topic, partitions=3)
        await settled(engine, *three.ids)

        async def consume(via: AsyncClient, name: str) -> None:
            async with via.subscribe(topic, "s", mode=mode, name=name, permits=permits) as consumer:
                async for message in consumer:
                    seen[str(message.key)].append(int(message.attributes["n"]))
                    await message.ack()

        async def produce(key: str) -> None:
            for number in count():
                if number >= rounds and turn >= moves:  # however slow a move is
                    break
                await client.publish(topic, key=key, attributes={"n": str(number)})
                sent[key].append(number)

        async def all_seen() -> bool:
            return sum(map(len, seen.values())) >= sum(map(len, sent.values()))

        await client.create_subscription(topic, "s", mode=mode)
        consumers = [
            asyncio.create_task(consume(client, "c1")),
            asyncio.create_task(consume(other, "c2")),
        ]
        producers = asyncio.gather(*(produce(f"k{number}") for number in range(keys)))
        while not producers.done():
            await move_on(three, engine, peers, topic, turn % 3)
            turn += 1
        await asyncio.wait_for(producers, PATIENCE)
        await until(all_seen)
        assert seen == sent
        for task in consumers:
            assert not task.done(), task
            task.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
        assert await check_topic(engine, topic) == []
        await client.delete_topic(topic)
