"""A worker that was paused past its lease wakes up with work in its hands, and must not write any of it.

The same run with fencing switched off in a copy of the scripts shows that the record can tell.
"""

import asyncio
import os
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import anyio
import anyio.to_thread
import pytest

from keylane import AsyncClient, Consumer, Published, StaleReceipt, ksuid, wire
from keylane.types import Mode
from tests.chaos.cluster import Cluster
from tests.chaos.crowd import keys_of
from tests.chaos.recorder import Name, Recorder
from tests.support.running import RunningBroker, broker_with_scripts_of_its_own

pytestmark = pytest.mark.slow

PARTITIONS = 8
LEASE = 1.0
PATIENCE = 60.0  # seconds until something that should come counts as lost
MODES: dict[str, Mode] = {"keyed": "key_shared", "failover": "failover"}

PART, COMPARISON = "lib/require_lease.lua", "redis.call('GET', lease) ~= held"


class Parcel(NamedTuple):
    """A message that is published to one worker and nobody else."""

    name: Name
    partition: int
    key: str
    uid: str


class StubbornProducer:
    """A client that knows one worker and waits for its answers, however long that sleeps."""

    def __init__(self, port: int, topic: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self._reader = wire.FrameReader()
        self._answers: dict[int, wire.Frame] = {}
        self._topic = topic
        self._sent = 0
        self._send(wire.Info())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()

    def publish(self, parcel: Parcel) -> int:
        """Send a message; answers what to ask for the answer with."""
        about = wire.pack_about(0, attributes={"name": f"{parcel.name[0]} {parcel.name[1]}"})
        body = wire.pack([parcel.key, parcel.uid, about])
        return self._send(wire.Publish(self._topic, parcel.partition), body)

    def answer(self, sequence: int) -> wire.PublishReply | None:
        """What the worker said: None if it would not."""
        while sequence not in self._answers:
            for frame in self._reader.feed(self._socket.recv(65_536)):
                if frame.type != wire.Type.HEARTBEAT:
                    self._answers[frame.sequence] = frame
        frame = self._answers[sequence]
        return wire.properties_of(frame, wire.PublishReply) if frame.type == wire.Type.OK else None

    def _send(self, properties: wire.Properties, body: bytes = b"") -> int:
        self._sent += 1
        self._socket.sendall(wire.frame(properties, self._sent, body=body))
        return self._sent


class Run:
    """Messages through a worker before it sleeps, while it sleeps, and through the others afterwards."""

    def __init__(self, topic: str) -> None:
        self.record = Recorder(MODES)
        self._topic = topic
        self._moved = asyncio.Event()
        self._count = 0

    def parcels(self, partitions: list[int]) -> list[Parcel]:
        """The next message of each partition, all of them with one key."""
        keys = keys_of(PARTITIONS)
        made = []
        for partition in partitions:
            name = ("stubborn", self._count)
            self._count += 1
            made.append(Parcel(name, partition, keys[partition][0], ksuid.take(1)[0]))
            self.record.publishing(name, made[-1].key)
        return made

    async def consume(self, consumer: Consumer, subscription: str) -> None:
        """Note and ack whatever comes."""
        async for message in consumer:
            name = self.record.delivered(subscription, consumer.name, message)
            since = self.record.acking(subscription, [name])
            try:
                await message.ack()
                self.record.acked(subscription, name, "settled", since)
            except StaleReceipt:
                self.record.acked(subscription, name, "stale", since)
            self._moved.set()

    async def publish_alone(self, producer: StubbornProducer, sent: dict[Parcel, int]) -> list[Parcel]:
        """Note what one worker answered; what is left is what it would not do."""
        refused = []
        for parcel, sequence in sent.items():
            reply = await anyio.to_thread.run_sync(producer.answer, sequence)
            if reply is None:
                refused.append(parcel)
            else:
                place = (parcel.partition, parcel.uid, reply.ledger, reply.first)
                self.record.published(parcel.name, Published(*place))
        return refused

    async def publish(self, client: AsyncClient, parcels: list[Parcel]) -> None:
        """Publish as applications do."""
        for parcel in parcels:
            attributes = {"name": f"{parcel.name[0]} {parcel.name[1]}"}
            answer = await client.publish(self._topic, key=parcel.key, uid=parcel.uid, attributes=attributes)
            self.record.published(parcel.name, answer)

    async def until_settled(self, parcels: list[Parcel]) -> None:
        """Wait until everybody has settled these, or for long enough; or until something is wrong."""
        names = {parcel.name for parcel in parcels}
        with anyio.move_on_after(PATIENCE):
            while not self.record.problems and any(
                not names <= told.settled for told in self.record.told.values()
            ):
                self._moved.clear()
                await self._moved.wait()


async def sleep_past_the_lease(broker: RunningBroker, topic: str) -> list[str]:
    """Let a worker sleep with publishes at its door while another takes over; what was not as promised."""
    run = Run(topic)
    async with Cluster.open(broker, [], topic) as cluster, AsyncExitStack() as stack:
        await cluster.create_topic(PARTITIONS, MODES)
        sleeper, waker = broker.ids
        own = await cluster.owned_by(sleeper)
        client = await stack.enter_async_context(AsyncClient(broker.url))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        consuming = []
        for subscription, mode in MODES.items():
            opened = client.subscribe(topic, subscription, mode=mode, name=f"c-{subscription}")
            consumer = await stack.enter_async_context(opened)
            consuming.append(tasks.create_task(run.consume(consumer, subscription)))
        with StubbornProducer(broker.workers[0].settings.port, topic) as producer:
            first = run.parcels(own)
            assert await run.publish_alone(producer, {p: producer.publish(p) for p in first}) == []
            await run.until_settled(first)
            broker.pause(0)
            at_the_door = run.parcels(own)
            sent = {parcel: producer.publish(parcel) for parcel in at_the_door}
            while set(await cluster.holders()) != {waker}:  # noqa: ASYNC110 - Redis does not tell
                await asyncio.sleep(0.05)
            broker.resume(0)
            refused = await run.publish_alone(producer, sent)
        last = run.parcels(own)
        await run.publish(client, refused + last)
        await run.until_settled(last)
        for task in consuming:
            task.cancel()
        return run.record.verdict() + await cluster.check()


async def test_a_worker_that_slept_past_its_lease_writes_nothing(topic: str) -> None:
    with RunningBroker(workers=2, partition_lease=LEASE) as broker:
        problems = await sleep_past_the_lease(broker, topic)
        assert not problems, "\n".join(problems)


async def test_without_fencing_it_is_found_out(
    topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = broker_with_scripts_of_its_own(tmp_path)
    script = scripts / PART
    assert script.read_text().count(COMPARISON) == 1
    script.write_text(script.read_text().replace(COMPARISON, "false"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with RunningBroker(workers=2, partition_lease=LEASE) as broker:
        problems = await sleep_past_the_lease(broker, topic)
    print("\n".join(problems))
    assert any("never came" in problem for problem in problems), "no publish was lost"
    assert any("is in the log under ledger" in problem for problem in problems), "the checker saw nothing"
