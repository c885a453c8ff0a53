"""Acks in virtual time, settled one by one and in turns: none is lost, and nothing overtakes one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fakeredis import FakeServer

from keylane import wire
from keylane.wire import Frame, Properties, Type
from keylane_broker.engine.values import TopicSettings
from tests.support.peer import Elsewhere, Item, Peer, Refused, Stream, checked, messages, publish, receipts
from tests.support.small_worker import SmallWorker
from tests.support.virtual_time import in_virtual_time

HELD = ("subscription/ack", "subscription/ack_whole", "subscription/turn", "partition/publish")


class Withheld:
    """Answers of Redis that are held back, though the calls have been made."""

    def __init__(self, worker: SmallWorker) -> None:
        self.begun = asyncio.Event()  # the first has been made
        self.released = asyncio.Event()
        self._run = worker.engine.store.run
        worker.engine.store.run = self._withhold  # type: ignore[method-assign]

    async def _withhold(self, script: str, keys: Sequence[str], *arguments: Any) -> list[Any]:
        answer = await self._run(script, keys, *arguments)
        if script in HELD:
            self.begun.set()
            await self.released.wait()
        return answer


class Scene:
    """A consumer that holds messages a and b, leased as one, so that to ack one of them is not ordinary."""

    def __init__(self, worker: SmallWorker, stream: Stream, items: list[Item]) -> None:
        self.worker = worker
        self.stream = stream
        self.peer = stream.peer
        self.items = items
        self.others: list[Peer] = []  # connections that have come after the first

    def begin(self, request: Properties, *items: Item) -> "asyncio.Future[Frame]":
        """Ask for something."""
        return self.peer.begin(request, receipts(self.stream.mode, *items) if items else b"")

    def ack(self, *items: Item) -> "asyncio.Future[Frame]":
        """Settle, as a client does that knows the bodies."""
        return self.begin(wire.Ack(self.stream.number, 0, []), *items)

    async def comes_back(self, worker: SmallWorker | None = None) -> list[str]:
        """What the consumer is said to hold when it connects again, perhaps to another worker."""
        self.others.append(await (worker or self.worker).connect())
        again = Stream(self.others[-1], "t", "s", "c")
        reply = await again.open()
        return [item.uid for item in await again.receive(reply.held or 0)]


@asynccontextmanager
async def scene(server: FakeServer, mode: str = "shared") -> AsyncIterator[Scene]:
    """With a worker that has nothing else to do."""
    async with SmallWorker(server, topic=("t", 1)) as worker:
        stream = Stream(await worker.connect(), "t", "s", "c")
        await stream.open(mode=mode)
        await publish(stream.peer, "t", 0, "first")
        await stream.nack(*await stream.receive(1))  # the server knows all scripts from now on
        await stream.extend(*(again := await stream.receive(1)))
        await stream.ack(*again)
        await publish(stream.peer, "t", 0, "a", "b")
        items = await stream.receive(2)
        await asyncio.sleep(1)
        yield Scene(worker, stream, items)


def settled(frame: Frame) -> bool:
    """Whether an answer says that all was settled."""
    return wire.properties_of(checked(frame), wire.SettleReply).stale == []


@pytest.fixture(params=[False, True], ids=["gathered", "under way"])
def under_way(request: pytest.FixtureRequest) -> bool:
    """Whether something comes behind an ack at once, or when that has been sent to Redis."""
    return bool(request.param)


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
@pytest.mark.parametrize("extends", [False, True], ids=["nack", "extend"])
@in_virtual_time
async def test_what_is_asked_behind_an_ack_finds_it_done(
    server: FakeServer, under_way: bool, extends: bool, mode: str
) -> None:
    async with scene(server, mode) as here:
        withheld = Withheld(here.worker)
        first, second = here.items
        acked = here.ack(first)
        if under_way:
            await withheld.begun.wait()
        number = here.stream.number
        behind = here.begin(wire.Extend(number, 0, 60_000) if extends else wire.Nack(number, 0), first)
        last = here.ack(second)
        await asyncio.sleep(1)
        withheld.released.set()
        assert settled(await acked)
        assert not settled(await behind)
        assert settled(await last)
        await asyncio.sleep(3_600)
        assert await here.stream.waiting() == []


@in_virtual_time
async def test_an_ack_does_not_overtake_what_waits_behind_another(
    server: FakeServer, under_way: bool
) -> None:
    async with scene(server) as here:
        withheld = Withheld(here.worker)
        first, second = here.items
        acked = here.ack(first)
        if under_way:
            await withheld.begun.wait()
        nacked = here.begin(wire.Nack(here.stream.number, 0), second)
        late = here.ack(second)
        await asyncio.sleep(1)
        withheld.released.set()
        assert settled(await acked)
        assert settled(await nacked)
        assert not settled(await late)
        assert [item.uid for item in await here.stream.receive(1)] == ["b"]


@in_virtual_time
async def test_who_leaves_leaves_behind_its_acks(server: FakeServer, under_way: bool) -> None:
    async with scene(server) as here:
        withheld = Withheld(here.worker)
        acked = here.ack(here.items[0])
        if under_way:
            await withheld.begun.wait()
        left = here.begin(wire.Unsubscribe(here.stream.number))
        await asyncio.sleep(1)
        withheld.released.set()
        assert settled(await acked)
        checked(await left)
        other = Stream(await here.worker.connect(), "t", "s", "other")
        await other.open()
        assert [item.uid for item in await other.receive(1)] == ["b"]
        await asyncio.sleep(10)
        assert await other.waiting() == []


@in_virtual_time
async def test_acks_and_what_is_behind_them_are_done_though_the_connection_ends(
    server: FakeServer, under_way: bool
) -> None:
    async with scene(server) as here:
        withheld = Withheld(here.worker)
        first, second = here.items
        here.ack(first)
        if under_way:
            await withheld.begun.wait()
        here.begin(wire.Nack(here.stream.number, 0, delay_ms=60_000), second)
        await here.peer.close()
        await asyncio.sleep(1)
        withheld.released.set()
        await asyncio.sleep(1)
        again = Stream(await here.worker.connect(), "t", "s", "c")
        assert (await again.open()).held == 0
        [item] = await again.receive(1)
        assert (item.uid, item.retries) == ("b", 1)


@in_virtual_time
async def test_an_ack_is_done_though_another_connection_takes_over(
    server: FakeServer, under_way: bool
) -> None:
    async with scene(server) as here:
        withheld = Withheld(here.worker)
        acked = here.ack(here.items[0])
        if under_way:
            await withheld.begun.wait()
        taking_over = asyncio.create_task(here.comes_back())
        await asyncio.sleep(1)
        withheld.released.set()
        assert settled(await acked)
        assert (await taking_over)[-1] == "b"  # and what was not settled when it was asked
        assert await here.comes_back() == ["b"]


@in_virtual_time
async def test_an_ack_is_answered_truly_though_the_partition_moves(
    server: FakeServer, under_way: bool
) -> None:
    async with scene(server) as here, SmallWorker(server, "w1") as new:
        engine, withheld = here.worker.engine, Withheld(here.worker)
        acked = here.ack(here.items[0])
        if under_way:
            await withheld.begun.wait()
        assert await engine.assign((await engine.owners()).version, {"t": ["w1"]})
        moving = asyncio.create_task(here.worker.membership.refresh())
        await asyncio.sleep(0.1)
        withheld.released.set()
        try:
            done = settled(await acked)
        except (Elsewhere, Refused):  # and so it is asked of the other one
            done = False
        await moving
        await here.peer.push(wire.Redirect)
        await new.membership.refresh()
        assert await here.comes_back(new) == (["b"] if done else ["a", "b"])


@pytest.mark.parametrize("what", ["topic", "subscription", "made anew"])
@in_virtual_time
async def test_an_ack_is_answered_though_all_that_it_is_about_is_deleted(
    server: FakeServer, under_way: bool, what: str
) -> None:
    async with scene(server) as here:
        withheld = Withheld(here.worker)
        acked = here.ack(here.items[0])
        if under_way:
            await withheld.begun.wait()
        engine = here.worker.engine
        if what == "subscription":
            await engine.delete_subscription("t", "s")
        else:
            await engine.delete_topic("t")
        if what == "made anew":
            await engine.create_topic("t", TopicSettings(1))
        withheld.released.set()
        async with asyncio.timeout(10):
            assert (await acked).type in (Type.OK, Type.ERROR, Type.REDIRECT)
        if what == "made anew":
            await here.worker.membership.topics_changed()
            stream = Stream(await here.worker.connect(), "t", "s", "c")
            await stream.open()
            await publish(stream.peer, "t", 0, "x")
            assert [item.uid for item in await stream.receive(1)] == ["x"]


@in_virtual_time
async def test_an_ack_goes_on_under_a_new_lease(server: FakeServer) -> None:
    async with scene(server) as here:
        partition = here.worker.partitions.get("t", 0)
        before = (await partition.lease()).epoch
        acks = [here.ack(item) for item in here.items]
        await asyncio.sleep(0)
        partition.drop_lease()
        assert [settled(await acked) for acked in acks] == [True, True]
        assert (await partition.lease()).epoch >= before
        assert await here.comes_back() == []


@in_virtual_time
async def test_a_seek_behind_an_ack_voids_what_is_left(server: FakeServer) -> None:
    async with scene(server) as here:
        acked = here.ack(here.items[0])
        sought = here.peer.begin(wire.Seek("t", "s", "latest"))
        assert settled(await acked)
        checked(await sought)
        assert not settled(await here.ack(here.items[1]))
        await publish(here.peer, "t", 0, "c")
        assert [item.uid for item in await here.stream.receive(1)] == ["c"]


@in_virtual_time
async def test_a_worker_that_stops_answers_publishes_that_wait_for_others(server: FakeServer) -> None:
    async with scene(server) as here:
        worker, withheld = here.worker, Withheld(here.worker)
        answers = [here.peer.begin(wire.Publish("t", 0), messages("c"))]
        await withheld.begun.wait()
        answers.append(here.peer.begin(wire.Publish("t", 0), messages("d")))
        await asyncio.sleep(0.01)
        worker.background.stopping = True
        finished = asyncio.create_task(worker.partitions.finish_calls())
        await asyncio.sleep(0.01)
        assert not finished.done()
        withheld.released.set()
        await finished
        await here.peer.echo()
        replies = [wire.properties_of(checked(answer.result()), wire.PublishReply) for answer in answers]
        assert [reply.first for reply in replies] == [4, 5]


@in_virtual_time
async def test_a_worker_that_stops_waits_for_acks_that_wait_for_others(server: FakeServer) -> None:
    async with scene(server) as here:
        await publish(here.peer, "t", 0, "c")
        items = [*here.items, *await here.stream.receive(1)]
        partitions, withheld = here.worker.partitions, Withheld(here.worker)
        acks = [here.ack(items[2])]
        await withheld.begun.wait()
        acks += [here.ack(item) for item in items[:2]]
        await asyncio.sleep(0.01)
        finished = asyncio.create_task(partitions.finish_calls())
        await asyncio.sleep(0.01)
        assert not finished.done()
        withheld.released.set()
        await finished
        await here.peer.echo()
        assert [settled(acked.result()) for acked in acks] == [True] * 3


@in_virtual_time
async def test_publishes_of_a_connection_are_answered_in_their_order_ordinary_or_not(
    server: FakeServer,
) -> None:
    async with scene(server) as here:
        order: list[asyncio.Future[Frame]] = []
        frames = (("x", "y"), ("a",), ("z",), ("y", "u"))  # the second and the last one repeat something
        answers = [here.peer.begin(wire.Publish("t", 0), messages(*uids)) for uids in frames]
        for answer in answers:
            answer.add_done_callback(order.append)
        replies = [wire.properties_of(checked(await answer), wire.PublishReply) for answer in answers]
        await asyncio.sleep(0)
        assert order == answers
        assert [list(reply.duplicates) for reply in replies] == [[], [0], [], [0]]
        assert [reply.first for reply in replies] == [4, 6, 6, 7]


@pytest.mark.parametrize("version", [1, 2])
@in_virtual_time
async def test_who_is_to_delete_bodies_hears_of_it_before_the_answer_to_its_ack(
    server: FakeServer, version: int
) -> None:
    async with scene(server) as here:
        peer = here.peer
        await peer.ask(wire.Info((1, version), "", "a test", store="advertised"), wire.InfoReply)
        body = wire.pack(["", "c", wire.pack_about(1, size=3)])
        await peer.ask(wire.Publish("t", 0), wire.PublishReply, body)
        [item] = [one for one in await here.stream.receive(1) if one.uid == "c"]
        before = len(peer.came)
        acked = here.begin(wire.Ack(here.stream.number, 0, [item.entry, "c"]), item)
        assert settled(await acked)
        assert peer.came[before] == Type.DELETE_BODIES
