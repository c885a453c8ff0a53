"""Never more unsettled than there are permits, whatever a client sends; and none is ever lost."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from keylane import AsyncClient, wire
from keylane.errors import Fenced, Unavailable
from keylane.types import Mode
from keylane_broker.config import Settings
from keylane_broker.engine.engine import Engine
from keylane_broker.worker.worker import Worker
from loadtest.topology import single_server
from tests.support.peer import PATIENCE, Item, Peer, Refused, Stream, checked, connect, publish, receipts
from tests.support.running import RunningBroker
from tests.support.waiting import until

_SOON = 60.0  # seconds; a session ends after 600, and has everything looked at


@pytest.fixture
async def peer(broker: RunningBroker) -> AsyncIterator[Peer]:
    """A connection."""
    async with connect(broker.url) as peer:
        yield peer


@pytest.fixture
async def engine(broker: RunningBroker) -> AsyncIterator[Engine]:
    """To look at what is stored."""
    engine = Engine.connect(broker.redis_url)
    yield engine
    await engine.close()


@pytest.fixture
async def client(broker: RunningBroker, topic: str) -> AsyncIterator[AsyncClient]:
    """A client, and a topic with one partition."""
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=1)
        yield client


async def ended(peer: Peer) -> tuple[wire.Ended, list[int]]:
    """The next ENDED, and what it lists."""
    async with asyncio.timeout(PATIENCE):
        while True:
            for frame in peer.pushed:
                if frame.type == wire.Type.ENDED:
                    peer.pushed.remove(frame)
                    listed = wire.unpack(frame.body, list[int]) if frame.body else []
                    return wire.properties_of(frame, wire.Ended), listed
            await peer.echo()


# What only looks like settling


@pytest.mark.parametrize("kind", [wire.Ack, wire.Nack])
async def test_receipts_that_hold_nothing_return_no_permits(
    peer: Peer, client: AsyncClient, topic: str, kind: type[wire.Ack] | type[wire.Nack]
) -> None:
    await client.create_subscription(topic, "s", mode="key_shared")
    stream = Stream(peer, topic, "s", "c")
    await stream.open(permits=2)
    await publish(peer, topic, 0, *"abcdefgh")
    held = await stream.receive(2)
    token = held[0].token
    for wrong in (
        ["=k", token, 3, 8],  # not delivered
        ["=other", token, 1, 2],  # the wrong lane
        ["", token, 1, 2],
        ["=k", token + 1, 1, 2],
        ["=k", token, 3, 3] * 10,
    ):
        await peer.answer(kind(stream.number, 0), wire.pack(wrong))
        assert await stream.waiting() == []
        assert (await client.describe_subscription(topic, "s")).leased == 2
    assert (await stream.ack(*held, *held, *held)).stale, "the second and third time"
    assert len(await stream.receive(2)) == 2
    assert await stream.waiting() == []
    assert (await client.describe_subscription(topic, "s")).leased == 2


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
async def test_the_receipts_of_another_consumer_are_stale_and_return_no_permits(
    peer: Peer, client: AsyncClient, topic: str, mode: Mode
) -> None:
    await client.create_subscription(topic, "s", mode=mode)
    one, other = Stream(peer, topic, "s", "one"), Stream(peer, topic, "s", "other")
    await one.open(permits=2)
    await publish(peer, topic, 0, "a", "b", key="x")
    held = await one.receive(2)
    await other.open(permits=2)
    await publish(peer, topic, 0, "c", "d", "e", "f", key="y")
    assert len(await other.receive(2)) == 2
    for settle in (other.ack, other.nack, other.extend):
        assert (await settle(*held)).stale == [0, 1, 1, 1, 2, 2]
    assert await other.waiting() == []
    assert (await one.ack(*held)).stale == []


async def test_permits_given_by_flow_count_for_nothing_where_messages_are_settled(
    peer: Peer, client: AsyncClient, topic: str
) -> None:
    await client.create_subscription(topic, "s")
    stream = Stream(peer, topic, "s", "c")
    await stream.open(permits=2)
    await publish(peer, topic, 0, *"abcdefgh")
    await stream.receive(2)
    peer.send(wire.Flow(stream.number, permits=1_000))
    peer.send(wire.Flow(stream.number, permits=1_000, partition=0))
    assert await stream.waiting() == []
    assert (await client.describe_subscription(topic, "s")).leased == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive"])
@pytest.mark.parametrize("seed", range(4))
async def test_a_hostile_client_never_has_more_than_its_permits_and_none_gets_lost(
    peer: Peer, engine: Engine, client: AsyncClient, topic: str, mode: Mode, seed: int
) -> None:
    """Random receipts, right and wrong, old and doubled, of both kinds; then all that is left is acked."""
    chance = random.Random(seed)
    permits = chance.randint(1, 6)
    await client.create_subscription(topic, "s", mode=mode, lease=0.3)
    stream = Stream(peer, topic, "s", "c")
    await stream.open(permits=permits)
    seen: list[Item] = []
    published = 0

    async def leased() -> int:
        return (await client.describe_subscription(topic, "s")).leased

    def some() -> list[Item]:
        wild = Item(0, chance.randint(1, published + 3), chance.choice("xyz"), "", 1, 0, False)
        last = seen[-1].token if seen else 1
        pool = [*seen[-8:], *seen[-3:], wild, wild._replace(token=last), wild._replace(token=last + 1)]
        found = chance.choices(pool, k=chance.randint(1, 5))
        return [
            item._replace(key=chance.choice([item.key, "x"])) if chance.random() < 0.2 else item
            for item in found
        ]

    for _ in range(60):
        what = chance.random()
        if what < 0.3:
            count = chance.randint(1, 4)
            uids = [f"{seed}-{published + number}" for number in range(count)]
            await publish(peer, topic, 0, *uids, key=chance.choice("xyz"))
            published += count
        elif what < 0.6:
            await stream.ack(*some())
        elif what < 0.8:
            await stream.nack(*some())
        elif what < 0.9:
            await stream.extend(*some(), lease_ms=chance.randint(1, 500))
        else:
            peer.send(wire.Flow(stream.number, permits=chance.randint(0, 10)))
        assert await leased() <= permits
        await stream.waiting()
        seen += stream.items
        stream.items.clear()

    async def settled_all() -> bool:
        await stream.waiting()
        todo, stream.items = [*seen[-permits:], *stream.items], []
        seen.clear()
        if todo:
            await stream.ack(*todo)
        assert await leased() <= permits
        return (await client.describe_subscription(topic, "s")).backlog == 0

    await until(settled_all)
    # With nothing out there is as much room as ever.
    await publish(peer, topic, 0, *(f"{seed}-last-{number}" for number in range(permits)))
    assert len(await stream.receive(permits)) == permits


# What the worker tells


async def test_the_answer_to_a_nack_lists_all_that_went_back(
    peer: Peer, client: AsyncClient, topic: str
) -> None:
    await client.create_subscription(topic, "s", mode="key_shared")
    stream = Stream(peer, topic, "s", "c")
    await stream.open()
    await publish(peer, topic, 0, "a1", "a2", key="a")
    first = await stream.receive(2)
    await publish(peer, topic, 0, "b1", key="b")
    await publish(peer, topic, 0, "a3", key="a")
    later = await stream.receive(2)
    reply = await stream.nack(first[1], delay_ms=60_000)
    assert reply.returned == [first[1].token, 2, 2, later[1].token, 4, 4]
    assert later[1].token > first[1].token
    assert reply.stale == []
    assert (await stream.nack(first[1])).returned == [], "it is stale"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shared", "key_shared"])
async def test_leases_whose_deadline_passes_are_told_and_their_permits_come_back(
    peer: Peer, client: AsyncClient, topic: str, mode: Mode
) -> None:
    await client.create_subscription(topic, "s", mode=mode, lease=2.0)
    stream = Stream(peer, topic, "s", "c")
    await stream.open(permits=2)
    await publish(peer, topic, 0, "a", "b", "c")
    held = await stream.receive(2)
    said, listed = await ended(peer)
    assert (said.stream, said.partition, said.permits) == (stream.number, 0, 2)
    assert (listed[0], listed[1], listed[-1]) == (held[0].token, 1, 2)
    again = await stream.receive(2)
    assert again[0].token > held[0].token
    assert await stream.waiting() == []


async def test_a_seek_is_told_and_permits_come_back(peer: Peer, client: AsyncClient, topic: str) -> None:
    await client.create_subscription(topic, "s")
    stream = Stream(peer, topic, "s", "c")
    await stream.open(permits=2)
    await publish(peer, topic, 0, "a", "b", "c")
    held = await stream.receive(2)
    await client.seek(topic, "s", "earliest")
    said, listed = await ended(peer)
    assert (said.stream, said.partition, said.permits, listed) == (stream.number, 0, 2, [])
    assert said.up_to >= held[0].token
    again = await stream.receive(2)
    assert [item.uid for item in again] == ["a", "b"]
    assert again[0].token > said.up_to
    assert await stream.waiting() == []
    await stream.ack(*again)
    assert [item.uid for item in await stream.receive(1)] == ["c"]


async def test_what_is_acked_while_the_consumer_comes_back_takes_no_permit_along(
    broker: RunningBroker, peer: Peer, client: AsyncClient, topic: str
) -> None:
    """The ACK is on its way over the old connection while the new one is told what the name holds."""
    await client.create_subscription(topic, "s")
    async with connect(broker.url) as old:
        before = Stream(old, topic, "s", "c")
        await before.open(permits=20)
        await publish(peer, topic, 0, *(f"{number}" for number in range(20)))
        items = await before.receive(20)
        after = Stream(peer, topic, "s", "c")
        acked = [old.begin(wire.Ack(before.number, 0), receipts("shared", item)) for item in items[:10]]
        opening = asyncio.ensure_future(after.open(permits=20))
        acked += [old.begin(wire.Ack(before.number, 0), receipts("shared", item)) for item in items[10:]]
        await opening
        await asyncio.wait(acked, timeout=PATIENCE)
        await after.waiting()
        rest = [item for item in after.items if item.held]
        after.items.clear()
        if rest:
            await after.ack(*rest)

    async def empty() -> bool:
        return (await client.describe_subscription(topic, "s")).backlog == 0

    await until(empty)
    await publish(peer, topic, 0, *(f"new-{number}" for number in range(30)))
    assert len(await after.receive(20)) == 20, "as many as there are permits"
    assert await after.waiting() == []


# What was done, and never answered


@pytest.fixture
def own_url() -> Iterator[str]:
    """A server whose partitions no other test has."""
    with single_server() as server:
        yield server.url


@pytest.fixture
async def worker(own_url: str) -> AsyncIterator[Worker]:
    """A worker in this process, so that its answers can get lost."""
    worker, ready = Worker(Settings(port=0, session=600.0), own_url), asyncio.Event()
    serving = asyncio.create_task(worker.serve(ready.set))
    await ready.wait()
    yield worker
    worker.stop()
    await serving


def lose_answer(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, script: str, *, skip: int = 0, error: Exception
) -> asyncio.Event:
    """Have one call of a script end in an error; what is unavailable has been carried out."""
    run, lost, calls = worker.engine.store.run, asyncio.Event(), 0

    async def run_and_lose(name: str, *arguments: Any) -> list[Any]:
        nonlocal calls
        calls += name == script
        if name != script or calls <= skip or lost.is_set():
            return await run(name, *arguments)
        lost.set()
        if isinstance(error, Unavailable):
            await run(name, *arguments)
        raise error

    monkeypatch.setattr(worker.engine.store, "run", run_and_lose)
    return lost


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive"])
@pytest.mark.parametrize("script", ["ack", "nack", "expire"])
async def test_permits_come_back_though_the_answer_of_redis_was_lost(
    worker: Worker, topic: str, mode: Mode, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"keylane://{worker.address}"
    async with AsyncClient(url) as client, connect(url) as peer:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s", mode=mode, lease=0.3 if script == "expire" else 60)
        stream = Stream(peer, topic, "s", "c")
        await stream.open(permits=2)
        error = Unavailable("the connection to Redis was lost")
        await publish(peer, topic, 0, *("abcd" if script == "ack" else "ab"))
        held = await stream.receive(2)
        lost = lose_answer(worker, monkeypatch, f"subscription/{script}", error=error)
        if script != "expire":
            with pytest.raises(Refused):
                await (stream.ack if script == "ack" else stream.nack)(*held)
        await lost.wait()
        expected = "cd" if script == "ack" else "ab"
        again = await stream.receive(2)
        assert sorted(item.uid for item in again) == list(expected)
        assert (await stream.ack(*held)).stale == [0, 1, 1, 1, 2, 2]
        if script != "expire":  # else they may come once more
            assert (await stream.ack(*again)).stale == []


def _runs(items: list[Item]) -> list[str | int]:
    """Receipts without lanes, one for each token."""
    runs: dict[int, list[int]] = {}
    for item in items:
        runs.setdefault(item.token, []).append(item.entry)
    return [part for token, its in sorted(runs.items()) for part in ("", token, min(its), max(its))]


@pytest.mark.parametrize("kind", ["ack", "nack"])
async def test_who_comes_back_amid_a_large_settle_never_has_more_than_its_permits(
    worker: Worker, topic: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was settled before it came back was not counted as out, so it frees nothing."""
    url, count, script = f"keylane://{worker.address}", 1_800, f"subscription/{kind}"
    run, calls, go_on = worker.engine.store.run, 0, asyncio.Event()
    amid = asyncio.Event()

    async def stop_amid(name: str, *arguments: Any) -> list[Any]:
        nonlocal calls
        calls += name == script
        if name == script and calls == 2:
            amid.set()
            await go_on.wait()
        return await run(name, *arguments)

    async with AsyncClient(url) as client, connect(url) as peer, connect(url) as other:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s")
        before, after = Stream(peer, topic, "s", "c"), Stream(other, topic, "s", "c")
        await before.open(permits=count)
        for first in range(0, 4 * count, 600):
            await publish(peer, topic, 0, *(f"u{number}" for number in range(first, first + 600)))
        body = wire.pack(_runs(await before.receive(count)))
        monkeypatch.setattr(worker.engine.store, "run", stop_amid)
        settling = peer.begin(
            wire.Ack(before.number, 0) if kind == "ack" else wire.Nack(before.number, 0, 600_000), body
        )
        async with asyncio.timeout(PATIENCE):
            await amid.wait()
        await after.open(permits=count)
        dispatcher = worker.partitions.get(topic, 0).dispatchers["s"]

        async def quiet() -> bool:
            return not dispatcher.busy

        async def full() -> bool:
            return (await client.describe_subscription(topic, "s")).leased >= count

        await until(full)
        go_on.set()
        checked(await settling)
        await until(full)
        await until(quiet)
        assert (await client.describe_subscription(topic, "s")).leased == count
        assert len(await after.waiting()) >= count


async def test_permits_come_back_though_the_lease_went_amid_a_large_ack(
    worker: Worker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, count = f"keylane://{worker.address}", 1_800
    async with AsyncClient(url) as client, connect(url) as peer:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s")
        stream = Stream(peer, topic, "s", "c")
        await stream.open(permits=count)
        for first in range(0, 2 * count, 600):
            await publish(peer, topic, 0, *(f"u{number}" for number in range(first, first + 600)))
        body = wire.pack(_runs(await stream.receive(count)))
        lost = lose_answer(worker, monkeypatch, "subscription/ack", skip=1, error=Fenced("another has it"))
        with pytest.raises(Refused, match="unavailable"):
            await peer.answer(wire.Ack(stream.number, 0), body)
        assert lost.is_set(), "it goes step by step"
        await peer.answer(wire.Ack(stream.number, 0), body)
        assert len(await stream.receive(count)) == count


async def test_a_partition_whose_redis_is_away_keeps_no_permits_from_the_others(
    worker: Worker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told first that there is room, can do nothing with it, and the others are told all the same."""
    url, run = f"keylane://{worker.address}", worker.engine.store.run
    async with AsyncClient(url) as client, connect(url) as peer:
        await client.create_topic(topic, partitions=2)
        await client.create_subscription(topic, "s")
        stream = Stream(peer, topic, "s", "c")
        await stream.open(permits=1)
        await publish(peer, topic, 1, *"abcdef")
        [held] = await stream.receive(1)
        await publish(peer, topic, 0, "x")
        away = asyncio.Event()

        async def run_where_it_is_there(script: str, keys: list[str], *arguments: Any) -> list[Any]:
            if script.startswith("subscription/") and f"{topic}:0}}" in keys[0]:
                away.set()
                raise Unavailable("this node is away")
            return await run(script, keys, *arguments)

        monkeypatch.setattr(worker.engine.store, "run", run_where_it_is_there)
        dispatcher = worker.partitions.get(topic, 0).dispatchers["s"]
        dispatcher.expect(0.0)
        dispatcher.wake()
        await away.wait()
        async with asyncio.timeout(_SOON):
            for _ in range(5):
                await stream.ack(held)
                [held] = await stream.receive(1)
