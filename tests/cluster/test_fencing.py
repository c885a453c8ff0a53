"""Whoever has lost a partition can change nothing of it, whatever it believes."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from keylane import wire
from keylane.errors import Fenced
from keylane.wire import Frame, Type
from keylane_broker.config import Settings
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Capacity, Lease, Outgoing, Receipt, TopicSettings
from keylane_broker.store.keys import PartitionKeys
from keylane_broker.worker.worker import Worker
from tests.support.ownership import move, served, state_of
from tests.support.peer import (
    PATIENCE,
    Elsewhere,
    Item,
    Peer,
    Refused,
    Stream,
    connect,
    messages,
    publish,
    receipts,
)
from tests.support.running import RunningBroker

pytestmark = pytest.mark.slow  # real processes, and leases that run out

RETRIABLE = {"unavailable", "fenced"}
LEASE = 4.0  # seconds: over soon, and longer than a worker waits for its turn on a busy machine


async def refusals(answers: list[asyncio.Future[Frame]], address: str) -> None:
    """Each answer sends the client elsewhere, or lets it try again."""
    for frame in await asyncio.wait_for(asyncio.gather(*answers), PATIENCE):
        if frame.type == Type.REDIRECT:
            assert wire.properties_of(frame, wire.Redirect).address == address
        else:
            assert frame.type == Type.ERROR, "it has done something"
            assert wire.properties_of(frame, wire.Error).code in RETRIABLE


def requests_of_all_kinds(peer: Peer, stream: Stream, items: list[Item]) -> list[asyncio.Future[Frame]]:
    """Everything that would change a partition, as it waits in the socket of a worker that is asleep."""
    topic, number = stream.topic, stream.number
    first, second, third, *_ = items
    return [
        peer.begin(wire.Publish(topic, 0), messages("from the past")),
        peer.begin(wire.Ack(number, 0), receipts(stream.mode, first)),
        peer.begin(wire.Nack(number, 0, delay_ms=0), receipts(stream.mode, second)),
        peer.begin(wire.Extend(number, 0, lease_ms=600_000), receipts(stream.mode, third)),
        peer.begin(wire.Subscribe(number + 1_000, topic, "s", "late", stream.mode, partitions=[0])),
        peer.begin(wire.Publish(topic, 0), messages("from the past, too")),
    ]


@pytest.mark.parametrize(
    ("mode", "sleeper"), [("shared", 0), ("key_shared", 0), ("key_shared", 1), ("exclusive", 1)]
)
async def test_a_worker_that_sleeps_past_its_lease_changes_nothing_when_it_wakes(
    topic: str, mode: str, sleeper: int
) -> None:
    with RunningBroker(workers=2, partition_lease=LEASE, session=60.0) as broker:
        engine = Engine.connect(broker.redis_url)
        old, new = broker.ids[sleeper], broker.ids[1 - sleeper]
        async with connect(broker.urls[sleeper]) as past, connect(broker.urls[1 - sleeper]) as present:
            await present.answer(wire.CreateTopic(topic, 1))
            await present.answer(wire.CreateSubscription(topic, "s", mode))
            await move(present, topic, 0, old)
            await served(engine, topic, 0, old)
            stream = Stream(past, topic, "s", "c")
            await stream.open(0, mode=mode, permits=4)
            await publish(past, topic, 0, "u1", "u2", "u3", "u4", "u5", "u6")
            items = await stream.receive(4)

            broker.pause(sleeper)
            answers = requests_of_all_kinds(past, stream, items)
            await served(engine, topic, 0, new)
            stored = await publish(present, topic, 0, "u7")
            before = await state_of(engine, topic, 0)
            broker.resume(sleeper)

            await refusals(answers, broker.urls[1 - sleeper].removeprefix("keylane://"))
            await past.echo()
            assert not past.has(wire.Data), "it delivered something"
            assert await state_of(engine, topic, 0) == before
            # It tells its consumer where to go, and there all is as it was.
            assert (await past.push(wire.Redirect)).stream == stream.number
            there = Stream(present, topic, "s", "c")
            assert (await there.open(0, mode=mode, permits=4)).held == 4
            assert await there.receive(4) == [item._replace(held=True) for item in items]
            assert (await there.ack(*items)).stale == []
            assert [item.uid for item in await there.receive(3)] == ["u5", "u6", "u7"]
            assert (await publish(present, topic, 0, "u8")).first == stored.first + 1
        await engine.close()


async def test_a_worker_that_sleeps_and_is_not_replaced_goes_on_under_a_new_epoch(topic: str) -> None:
    with RunningBroker(partition_lease=LEASE, session=60.0) as broker:
        engine = Engine.connect(broker.redis_url)
        async with connect(broker.url) as peer:
            await peer.answer(wire.CreateTopic(topic, 1))
            await peer.answer(wire.CreateSubscription(topic, "s"))
            stream = Stream(peer, topic, "s", "c")
            await stream.open(0)
            first = (await publish(peer, topic, 0, "u1")).ledger
            [item] = await stream.receive(1)
            broker.pause()
            await served(engine, topic, 0, "")  # the lease has ended
            answer = peer.begin(wire.Publish(topic, 0), messages("u2"))
            broker.resume()
            frame = await asyncio.wait_for(answer, PATIENCE)
            assert frame.type == Type.OK
            assert wire.properties_of(frame, wire.PublishReply).ledger > first
            assert (await stream.ack(item)).stale == []
            assert [item.uid for item in await stream.receive(1)] == ["u2"]
        await engine.close()


Step = Callable[[Engine, Lease], Awaitable[object]]

WRITES: dict[str, Step] = {
    "publish": lambda engine, lease: engine.publish(lease, [Outgoing("k", "u", wire.pack_about(1))]),
    "join": lambda engine, lease: engine.join(lease, "s", "other"),
    "renew_sessions": lambda engine, lease: engine.renew_sessions(lease, "s", ["c"]),
    "spare": lambda engine, lease: engine.prolong_sessions(lease, "s", 60_000),
    "leave": lambda engine, lease: engine.leave(lease, "s", "c"),
    "crash": lambda engine, lease: engine.leave(lease, "s", "c", crashed=True),
    "fetch": lambda engine, lease: engine.fetch(lease, "s", [Capacity("c", 10)]),
    "held": lambda engine, lease: engine.list_leases(lease, "s", "c"),
    "ack": lambda engine, lease: engine.ack(lease, "s", [Receipt(0, "", 1, 1, 1)]),
    "nack": lambda engine, lease: engine.nack(lease, "s", [Receipt(0, "", 1, 1, 1)], delay_ms=0),
    "extend": lambda engine, lease: engine.extend(lease, "s", [Receipt(0, "", 1, 1, 1)], lease_ms=60_000),
    "expire": lambda engine, lease: engine.expire(lease, "s"),
}


@pytest.mark.parametrize("write", WRITES)
async def test_of_two_engines_with_a_lease_only_the_newer_can_write(
    server_url: str, topic: str, write: str
) -> None:
    one, two = Engine.connect(server_url), Engine.connect(server_url)
    await one.create_topic(topic, TopicSettings(1))
    await one.create_subscription(topic, "s")
    old = await one.acquire(topic, 0, "w1", 60_000)
    assert old is not None
    await one.join(old, "s", "c")
    await one.publish(old, [Outgoing("k", "u0", wire.pack_about(1)), Outgoing("k", "u1", wire.pack_about(1))])
    await one.fetch(old, "s", [Capacity("c", 1)])
    assert await two.acquire(topic, 0, "w2", 60_000) is None, "the lease is held"
    await one.store.command("DEL", PartitionKeys.of(topic, 0).lease)  # it has ended
    new = await two.acquire(topic, 0, "w2", 60_000)
    assert new is not None
    before = await state_of(two, topic, 0)
    with pytest.raises(Fenced):
        await WRITES[write](one, old)
    assert await one.renew([old], 60_000) == [False]
    assert not await one.release(old)
    assert await state_of(two, topic, 0) == before
    await WRITES[write](two, new)
    for engine in (one, two):
        await engine.close()


async def test_of_two_workers_that_both_believe_that_a_partition_is_theirs_only_one_can_write(
    server_url: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(port=0, partition_lease=60.0)  # none ends while somebody looks on
    monkeypatch.setattr(
        "keylane_broker.worker.leased_partition._LATE", -59.0
    )  # who waits for one gives up after a second
    workers = [Worker(settings, server_url, worker_id=f"{topic}-{number}") for number in range(2)]
    tasks = []
    for worker in workers:
        monkeypatch.setattr(worker.membership, "owner", lambda _topic, _partition, name=worker.id: name)
        ready = asyncio.Event()
        tasks.append(asyncio.create_task(worker.serve(ready.set)))
        await asyncio.wait_for(ready.wait(), PATIENCE)
    engine = Engine.connect(server_url)
    await engine.create_topic(topic, TopicSettings(1))
    await engine.create_subscription(topic, "s")
    async with connect(workers[0].address) as one, connect(workers[1].address) as two:
        ledgers: list[int] = []
        lease = PartitionKeys.of(topic, 0).lease
        order = ((one, workers[0], "u1"), (two, workers[1], "u2"), (one, workers[0], "u3"))
        for peer, worker, uid in order:
            # The lease changes hands behind the back of whoever has it.
            await engine.store.command("DEL", lease)
            while await engine.acquire(topic, 0, worker.id, 60_000) is None:  # one of them was quicker
                await engine.store.command("DEL", lease)
            loser = one if peer is two else two
            # It waits for that lease, and gives up without a write.
            with pytest.raises((Refused, Elsewhere)):
                await publish(loser, topic, 0, f"{uid} of the loser", again=True)
            assert len((await state_of(engine, topic, 0)).log) == len(ledgers)
            ledgers.append((await publish(peer, topic, 0, uid, again=True)).ledger)
        assert ledgers == sorted(set(ledgers)), "each lease has a ledger of its own"
        found = await engine.store.command("XRANGE", PartitionKeys.of(topic, 0).log, "-", "+")
        assert [fields[3] for _, fields in found] == ["u1", "u2", "u3"]
        assert [int(id.partition("-")[2]) for id, _ in found] == [1, 2, 3]
    for worker, task in zip(workers, tasks, strict=True):
        worker.stop(hand_over=False)
        await task
    await engine.delete_topic(topic)
    await engine.close()
