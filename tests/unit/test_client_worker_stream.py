"""A consumer's stream at one worker: what it opens, what came too early, and what it does after an error."""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from keylane import wire
from keylane.connect.pool import Peer
from keylane.consume.permits import Permits
from keylane.consume.worker_stream import WorkerStream
from keylane.errors import BrokerError, ConnectionClosed, SubscriptionNotFound, Unavailable
from keylane.tasks import Tasks
from keylane.wire import Frame, Properties
from tests.support.virtual_time import virtual as virtual

Run = Callable[[Coroutine[Any, Any, None]], None]


class FakeConnection:
    """Notes what is asked and leaves the answers to the test."""

    def __init__(self) -> None:
        self.streams: dict[int, Callable[[Frame], None]] = {}
        self.closed: asyncio.Future[BrokerError] = asyncio.get_running_loop().create_future()
        self.asked: list[tuple[Properties, asyncio.Future[Frame]]] = []
        self.sent: list[Properties] = []
        self.session_left = 5.0

    def request(self, properties: Properties, body: bytes = b"") -> asyncio.Future[Frame]:
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.asked.append((properties, answer))
        return answer

    def send(self, properties: Properties) -> None:
        self.sent.append(properties)

    def push(self, properties: Properties) -> None:
        """Something comes from the worker."""
        self.streams[1](frame(properties))

    async def subscribed(self, count: int = 1) -> tuple[wire.Subscribe, asyncio.Future[Frame]]:
        """Wait for the so-manieth SUBSCRIBE."""
        while True:
            found = [(asked, answer) for asked, answer in self.asked if isinstance(asked, wire.Subscribe)]
            if len(found) >= count:
                return found[count - 1]
            await asyncio.sleep(0.01)


def frame(properties: Properties) -> Frame:
    return Frame(properties.TYPE, 1, 0, memoryview(wire.pack(properties)), memoryview(b""))


OPENED = wire.SubscribeReply("shared", "at_least_once", 30_000, 4)


class FakePeer:
    """A worker with a connection, or the errors instead of it that the test wants."""

    address = "worker:1"

    def __init__(self) -> None:
        self.connection = FakeConnection()
        self.errors: list[BrokerError] = []

    async def connect(self) -> FakeConnection:
        if self.errors:
            raise self.errors.pop(0)
        return self.connection


class Owner:
    """Has one stream, and notes what it is told."""

    paused = False

    def __init__(self, tasks: Tasks) -> None:
        self.permits: Permits[WorkerStream] = Permits(10, tasks)
        self.peer = FakePeer()
        self.stream = WorkerStream(self, cast(Peer, self.peer), "orders", 1)
        self.stream.wanted = {0, 1}
        self.served: set[int] = set()
        self.told: list[Any] = []
        self.looked: list[float] = []
        self.permits.share({self.stream: 2})

    def serving(self, partition: int) -> WorkerStream | None:
        return self.stream if partition in self.served else None

    def may_open(self, stream: WorkerStream) -> bool:
        return True

    def opening(self, partitions: Collection[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def request(self, partitions: Collection[int], permits: int) -> wire.Subscribe:
        return wire.Subscribe(1, "orders", "s", "c", permits=permits, partitions=sorted(partitions))

    def opened(self, stream: WorkerStream, partitions: frozenset[int], reply: wire.SubscribeReply) -> None:
        self.served |= partitions
        self.told.append(("opened", sorted(partitions)))

    def received(self, frame: Frame, data: wire.Data) -> None:
        self.told.append(("data", data.partition))

    def leases_ended(self, frame: Frame, ended: wire.Ended) -> None:
        self.told.append(("ended", ended.partition))

    def moved(self, stream: WorkerStream, partition: int, address: str, permits: int) -> None:
        self.told.append(("moved", partition, address, permits))

    def closed(self, stream: WorkerStream, partitions: set[int], void: bool) -> None:
        self.served -= partitions
        self.told.append(("closed", sorted(partitions), void))

    async def look_again(self, error: BrokerError) -> None:
        self.looked.append(asyncio.get_running_loop().time())

    def drop(self, stream: WorkerStream) -> None:
        self.told.append("dropped")

    def end(self, error: BrokerError) -> None:
        self.told.append(type(error))


def play(virtual: Run, story: Callable[[Owner], Coroutine[Any, Any, None]]) -> None:
    """Run a story with a stream that runs."""

    async def run() -> None:
        tasks = Tasks()
        owner = Owner(tasks)
        running = tasks.start(owner.stream.run())
        await story(owner)
        running.cancel()
        await tasks.cancel()

    virtual(run())


def data(partition: int) -> wire.Data:
    return wire.Data(1, partition, 1, 0, "7:1")


def test_what_comes_before_the_answer_waits_for_it(virtual: Run) -> None:
    async def story(owner: Owner) -> None:
        connection = owner.peer.connection
        request, answer = await connection.subscribed()
        assert (request.partitions, request.permits) == ([0, 1], 10)
        connection.push(data(1))
        assert owner.told == []
        answer.set_result(frame(OPENED))
        await asyncio.sleep(0.01)
        assert owner.told == [("opened", [0, 1]), ("data", 1)]
        connection.push(data(0))
        connection.push(data(3))
        assert owner.told[2:] == [("data", 0)], "another worker has 3"

    play(virtual, story)


def test_partitions_are_added_to_a_stream_that_is_open(virtual: Run) -> None:
    async def story(owner: Owner) -> None:
        connection = owner.peer.connection
        (await connection.subscribed())[1].set_result(frame(OPENED))
        await asyncio.sleep(0.01)
        owner.stream.wanted.add(3)
        owner.stream.wake()
        request, answer = await connection.subscribed(2)
        assert request.partitions == [3]
        connection.push(data(3))
        connection.push(data(0))
        answer.set_result(frame(OPENED))
        await asyncio.sleep(0.01)
        assert owner.told == [("opened", [0, 1]), ("data", 0), ("opened", [3]), ("data", 3)]

    play(virtual, story)


def test_after_a_lost_connection_it_subscribes_at_once_then_ever_more_slowly(virtual: Run) -> None:
    async def story(owner: Owner) -> None:
        connection = owner.peer.connection
        (await connection.subscribed())[1].set_result(frame(OPENED))
        await asyncio.sleep(0.01)
        owner.peer.connection = FakeConnection()
        owner.peer.errors = [Unavailable("not now")] * 8
        connection.closed.set_result(ConnectionClosed("lost"))
        (await owner.peer.connection.subscribed())[1].set_result(frame(OPENED))
        await asyncio.sleep(0.01)
        assert owner.told == [("opened", [0, 1]), ("closed", [0, 1], False), ("opened", [0, 1])]
        waits = [after - before for before, after in zip(owner.looked, owner.looked[1:], strict=False)]
        assert len(waits) == 7
        assert waits[-1] > 4 * waits[0], "and each time it was asked who has the partitions"
        assert max(waits) <= 2.0

    play(virtual, story)


def test_an_error_that_is_final_ends_the_consumer(virtual: Run) -> None:
    async def story(owner: Owner) -> None:
        _, answer = await owner.peer.connection.subscribed()
        answer.set_exception(SubscriptionNotFound("no subscription 's'"))
        await asyncio.sleep(60.0)
        assert owner.told == [SubscriptionNotFound]
        assert len(owner.peer.connection.asked) == 1
        assert owner.peer.connection.streams == {}

    play(virtual, story)


def test_a_worker_that_lets_go_of_the_consumer_voids_its_leases(virtual: Run) -> None:
    async def story(owner: Owner) -> None:
        connection = owner.peer.connection
        (await connection.subscribed())[1].set_result(frame(OPENED))
        await asyncio.sleep(0.01)
        connection.push(wire.Redirect("orders", 1, "other:1", 1, permits=3))
        connection.push(wire.Error("unavailable", "stopping", stream=1))
        assert owner.told[1:] == [("moved", 1, "other:1", 3), ("closed", [0, 1], True)]

    play(virtual, story)


def test_permits_that_come_back_without_a_receipt_are_said_together(virtual: Run) -> None:
    async def story(owner: Owner) -> None:
        connection = owner.peer.connection
        (await connection.subscribed())[1].set_result(frame(OPENED))
        await asyncio.sleep(0.01)
        for partition in (0, 1, 0, 0):
            owner.stream.credit(partition, 1)
        await asyncio.sleep(0.01)
        assert connection.sent == [
            wire.Flow(1, permits=3, partition=0),
            wire.Flow(1, permits=1, partition=1),
        ]

    play(virtual, story)


def test_a_stream_with_nothing_left_to_serve_leaves(virtual: Run) -> None:
    async def story(owner: Owner) -> None:
        connection = owner.peer.connection
        (await connection.subscribed())[1].set_result(frame(OPENED))
        await asyncio.sleep(0.01)
        owner.stream.wanted.clear()
        for partition in (0, 1):
            owner.served.discard(partition)
            owner.stream.release(partition)
        await asyncio.sleep(0.01)
        assert owner.told[-1] == "dropped"
        assert connection.asked[-1][0] == wire.Unsubscribe(1, []), "what is held goes back nowhere"
        assert connection.streams == {}

    play(virtual, story)
