"""A connection in virtual time, without a socket: frames in, frames out, and its share of memory."""

import asyncio
from typing import Any

import pytest
from fakeredis import FakeServer

from keylane import wire
from keylane.wire import Frame, Type
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.request_turns import Reply
from tests.support.peer import Refused, messages, publish
from tests.support.small_worker import SmallWorker, before_storing
from tests.support.virtual_time import in_virtual_time


async def nothing(connection: Connection, frame: Frame) -> Reply:
    """Answer any request."""
    return wire.Properties(), b""


@in_virtual_time
async def test_the_first_frame_must_be_a_greeting(server: FakeServer) -> None:
    async with SmallWorker(server) as worker:
        peer = await worker.connect(greet=False)
        with pytest.raises((Refused, ConnectionError)):
            await peer.answer(wire.Topics())
        await asyncio.sleep(1)
        assert peer.ended
        assert worker.connections.all == set()


@in_virtual_time
async def test_who_does_not_greet_in_time_is_closed(server: FakeServer) -> None:
    async with SmallWorker(server, heartbeat=10.0) as worker:
        peer = await worker.connect(greet=False)
        await asyncio.sleep(29)
        assert not peer.ended
        await asyncio.sleep(2)
        assert peer.ended


@in_virtual_time
async def test_who_is_silent_for_three_heartbeats_is_closed_and_who_answers_is_not(
    server: FakeServer,
) -> None:
    async with SmallWorker(server, heartbeat=10.0) as worker:
        answers, silent = await worker.connect(), await worker.connect()
        silent.ignore_heartbeats = True
        for _ in range(5):
            await asyncio.sleep(10)
            worker.connections.check_heartbeats(asyncio.get_running_loop().time() - 30)
            await asyncio.sleep(0.01)
        assert silent.ended
        assert not answers.ended


@in_virtual_time
async def test_one_connection_too_many_is_told_so(server: FakeServer) -> None:
    async with SmallWorker(server, max_connections=2) as worker:
        first, _ = await worker.connect(), await worker.connect()
        third = await worker.connect(greet=False)
        said = await third.push(wire.Error)
        assert said.code == "overloaded"
        await asyncio.sleep(1)
        assert third.ended
        await first.close()
        await asyncio.sleep(1)
        await worker.connect()


@in_virtual_time
async def test_of_requests_that_may_answer_a_lot_two_are_under_way_and_the_others_wait(
    server: FakeServer,
) -> None:
    under_way, most = 0, 0

    async def slow(connection: Connection, frame: Frame) -> Reply:
        nonlocal under_way, most
        if frame.type == Type.TOPICS:
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(1)
            under_way -= 1
        return wire.Properties(), b""

    async with SmallWorker(server) as worker:
        peer = await worker.connect(handle=slow, greet=False, greeted=True)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(peer.answer(wire.Topics()) for _ in range(10)))
        assert most == 2
        assert asyncio.get_running_loop().time() - began == pytest.approx(5.0, abs=0.1)


@in_virtual_time
async def test_nobody_is_listened_to_who_has_too_many_requests_under_way(server: FakeServer) -> None:
    gate, begun = asyncio.Event(), 0

    async def wait(connection: Connection, frame: Frame) -> Reply:
        nonlocal begun
        begun += 1
        await gate.wait()
        return wire.Properties(), b""

    async with SmallWorker(server) as worker:
        peer = await worker.connect(handle=wait, greet=False, greeted=True)
        answers = []
        for _ in range(300):
            answers.append(peer.begin(wire.Rebalance()))
            await asyncio.sleep(0.001)
        assert begun == 200
        gate.set()
        await asyncio.gather(*answers)
        assert begun == 300


@in_virtual_time
async def test_who_publishes_more_than_memory_is_set_aside_for_is_held_back_until_redis_has_it(
    server: FakeServer,
) -> None:
    async with SmallWorker(server, topic=("t", 1), max_inflight_bytes=1024 * 1024) as worker:
        peer, other = await worker.connect(), await worker.connect()
        gate = asyncio.Event()

        async def wait(_: int, __: int) -> None:
            await gate.wait()

        before_storing(worker, wait)
        body = messages(*(f"m{number}" for number in range(900)), key="k" * 1_000)
        begun = [peer.begin(wire.Publish("t", 0), body) for _ in range(5)]
        await asyncio.sleep(1)
        assert worker.connections.memory.over_limit
        assert worker.connections.memory.paused
        late = other.begin(wire.Publish("t", 0), messages("small"))  # has nothing under way: is listened to
        await asyncio.sleep(1)
        gate.set()
        await asyncio.gather(*begun, late)
        assert worker.connections.memory.inflight == 0
        assert not worker.connections.memory.paused


@in_virtual_time
async def test_who_reads_slowly_is_not_looked_at_whenever_somebody_is_answered(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        peer, slow = await worker.connect(), await worker.connect()
        connections: list[Any] = list(worker.connections.all)
        echo = slow.begin(wire.Heartbeat())
        await echo
        for connection in connections:
            connection.pause_writing()
        assert not worker.connections.memory.paused
        for connection in connections:
            connection.resume_writing()
        await publish(peer, "t", 0, "m")


@in_virtual_time
async def test_who_is_held_back_is_listened_to_again_when_others_have_made_room(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 2), max_inflight_bytes=1024 * 1024) as worker:
        large, small = await worker.connect(), await worker.connect()
        gates = [asyncio.Event(), asyncio.Event()]

        async def wait(partition: int, _: int) -> None:
            await gates[partition].wait()

        before_storing(worker, wait)
        body = messages(*(f"m{number}" for number in range(900)), key="k" * 1_000)
        begun = [large.begin(wire.Publish("t", 0), body) for _ in range(2)]
        await asyncio.sleep(0.1)
        begun.append(small.begin(wire.Publish("t", 1), messages("a")))
        await asyncio.sleep(0.1)
        echo = small.begin(wire.Heartbeat())
        await asyncio.sleep(1)
        assert not echo.done()
        gates[0].set()
        await asyncio.sleep(1)
        assert echo.done()
        gates[1].set()
        await asyncio.gather(*begun)


@in_virtual_time
async def test_of_unfinished_frames_the_largest_is_closed_when_they_are_too_much_together(
    server: FakeServer,
) -> None:
    async with SmallWorker(server, max_inflight_bytes=1024 * 1024) as worker:
        small, large = await worker.connect(), await worker.connect()
        for peer, size in ((large, 700_000), (small, 500_000)):
            frame = wire.frame(wire.Publish("t", 0), 99, 0, b"x" * 900_000)
            peer.write(frame[:size])
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        assert large.ended
        assert not small.ended
        assert (await large.push(wire.Error)).code == "overloaded"


@pytest.mark.slow
@in_virtual_time
async def test_a_flood_of_frames_leaves_others_their_turn_and_is_answered_in_its_order(
    server: FakeServer,
) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        flood, other = await worker.connect(), await worker.connect()
        order: list[int] = []
        answers = flood.begin_all([(wire.Publish("t", 0), b"no messages")] * 5_000)
        for number, answer in enumerate(answers):
            answer.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
        await other.echo()
        assert len(order) < 2_500
        await asyncio.gather(*answers)
        assert order == list(range(5_000))
        assert worker.connections.memory.buffered == 0
        await flood.echo()  # it is listened to


@in_virtual_time
async def test_publishes_that_come_at_once_are_stored_in_their_order(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        peer = await worker.connect()
        await peer.ask(wire.CreateSubscription("t", "s"), wire.Properties)
        answers = peer.begin_all((wire.Publish("t", 0), messages(f"m{number}")) for number in range(2_000))
        peer.write(wire.frame(wire.Heartbeat(), 99_999)[:-3])
        replies = [wire.properties_of(frame, wire.PublishReply) for frame in await asyncio.gather(*answers)]
        entries = [reply.first for reply in replies]
        assert entries == list(range(entries[0], entries[0] + 2_000))
        await asyncio.sleep(1)
        assert worker.connections.memory.buffered > 0  # the beginning of the last frame
        await peer.close()
        await asyncio.sleep(1)
        assert worker.connections.memory.buffered == 0


@in_virtual_time
async def test_who_has_no_room_left_is_not_heard_in_the_middle_of_what_came_at_once(
    server: FakeServer,
) -> None:
    gate, begun = asyncio.Event(), 0

    async def wait(connection: Connection, frame: Frame) -> Reply:
        nonlocal begun
        begun += 1
        await gate.wait()
        return wire.Properties(), b""

    async with SmallWorker(server) as worker:
        peer = await worker.connect(handle=wait, greet=False, greeted=True)
        answers = peer.begin_all([(wire.Rebalance(), b"")] * 1_000)
        await asyncio.sleep(1)
        assert begun == 200
        gate.set()
        await asyncio.gather(*answers)
        assert begun == 1_000


@pytest.mark.slow
@in_virtual_time
async def test_publishes_to_topics_that_are_not_there_take_little_memory(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        peer, other = await worker.connect(), await worker.connect()
        gate, describe = asyncio.Event(), worker.engine.describe_topic

        async def later(topic: str) -> Any:
            await gate.wait()
            return await describe(topic)

        worker.engine.describe_topic = later  # type: ignore[method-assign]
        answers = peer.begin_all(
            (wire.Publish(f"gone-{number}", 0), messages("m")) for number in range(2_000)
        )
        await asyncio.sleep(1)
        assert 400 < len(worker.partitions.by_place) < 450
        await publish(other, "t", 0, "others do not wait")
        gate.set()
        for number, frame in enumerate(await asyncio.gather(*answers)):
            said = wire.properties_of(frame, wire.Error)
            assert (said.code, said.message) == ("topic_not_found", f"no topic 'gone-{number}'")
        assert list(worker.partitions.by_place) == [("t", 0)]
        assert worker.connections.memory.inflight == 0


@pytest.mark.slow
@in_virtual_time
async def test_what_is_kept_of_refused_publishes_does_not_grow(server: FakeServer) -> None:
    settings: dict[str, Any] = {"auth": True, "admin_token": "that nobody needs here", "publish_rate": 0.001}
    async with SmallWorker(server, topic=("t", 1), **settings) as worker:
        peer = await worker.connect()
        await publish(peer, "t", 0, "the only one for a while")
        for topic in ("t", "gone", "no name", "x" * 1_000):
            for _ in range(2):
                with pytest.raises(Refused):
                    await publish(peer, topic, 0, "m")
        [connection] = worker.connections.all
        assert isinstance(connection, Connection)
        assert connection.publishes.refused.keys() == {("t", 0), ("gone", 0)}
        assert [error.__traceback__ for error in connection.publishes.refused.values()] == [None, None]
        for number in range(2, 10_000):
            peer.begin(wire.Publish("gone", number), messages("m"))
        await peer.echo()
        for topic in ("gone-1", "gone-2"):
            peer.begin(wire.Publish(topic, 0), messages("m"))
        assert (await peer.push(wire.Error)).code == "overloaded"
        await asyncio.sleep(1)
        assert peer.ended


@in_virtual_time
async def test_answers_to_a_connections_publishes_keep_their_order_whatever_their_levels(
    server: FakeServer,
) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        peer = await worker.connect()
        await peer.ask(wire.CreateSubscription("t", "s"), wire.Properties)
        order: list[str] = []

        async def confirm(*_: Any) -> None:
            await asyncio.sleep(5)

        async def require(*_: Any) -> None:
            pass

        worker.engine.confirm = confirm  # type: ignore[assignment, method-assign]
        worker.engine.require = require  # type: ignore[assignment, method-assign]
        for name, level in (("safe", "fsync"), ("quick", "memory")):
            answer = peer.begin(wire.Publish("t", 0, level), messages(name))
            answer.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
        await asyncio.sleep(4)
        assert order == []
        await publish(await worker.connect(), "t", 0, "another connection does not wait")
        await asyncio.sleep(2)
        assert order == ["safe", "quick"]
