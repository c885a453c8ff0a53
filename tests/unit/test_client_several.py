"""Requests of one turn of the event loop share a frame where the worker takes that, and answers may, too."""

import asyncio
from typing import Any

import pytest

from keylane import AsyncClient, OutgoingMessage, wire
from keylane.wire import Frame, Type
from tests.support.scripted_client import Open, Shelf, take
from tests.support.scripted_worker import Link, ScriptedWorker

PARTITIONS = 4


class Recording(ScriptedWorker):
    """Remembers the frames as they came, before they are taken apart."""

    def __init__(self, **info: Any) -> None:
        super().__init__(**info)
        self.partitions = PARTITIONS
        self.frames: list[Frame] = []

    def received(self, link: Link, frame: Frame) -> None:
        if frame.type in (Type.PUBLISH, Type.PUBLISHES, Type.ACK, Type.ACKS):
            self.frames.append(frame)
        super().received(link, frame)

    def types(self) -> list[str]:
        """The frames that have come since the last call."""
        found = [Type(frame.type).name for frame in self.frames]
        self.frames.clear()
        return found


async def publish_each(worker: Recording, client: AsyncClient, uids: str, *, together: bool) -> list[Any]:
    """Publish a message to each partition; the worker stores all."""
    publishing = [
        asyncio.create_task(client.publish("orders", uid=None, partition=number, attributes={"n": uid}))
        for number, uid in enumerate(uids)
    ]
    requests = [await worker.expect(wire.Publish) for _ in uids]
    if together:
        stored = [(one.frame.sequence, 7, 10 + one.properties.partition, 1) for one in requests]
        worker.link.send(wire.Answers([number for row in stored for number in row]))
    else:
        for one in requests:
            one.ok(wire.PublishReply(7, 10 + one.properties.partition, 1))
    return [await one for one in publishing]


@pytest.mark.parametrize("together", [False, True], ids=["answered by themselves", "answered together"])
async def test_publishes_to_several_partitions_share_a_frame(together: bool) -> None:
    async with Recording() as worker, AsyncClient(worker.url) as client:
        await publish_each(worker, client, "abcd", together=together)  # learns the map
        worker.types()
        published = await publish_each(worker, client, "efgh", together=together)
        assert worker.types() == ["PUBLISHES"]
        assert [one.id for one in published] == [f"{number}:7-{10 + number}" for number in range(PARTITIONS)]


async def test_a_worker_of_version_1_gets_a_frame_for_each() -> None:
    async with Recording(version=1) as worker, AsyncClient(worker.url) as client:
        await publish_each(worker, client, "abcd", together=False)
        assert worker.types() == ["PUBLISH"] * PARTITIONS


async def test_large_messages_have_frames_of_their_own() -> None:
    async with Recording() as worker, AsyncClient(worker.url) as client:
        await publish_each(worker, client, "abcd", together=False)
        worker.types()
        large = [OutgoingMessage(partition=number, attributes={"x": "y" * 20_000}) for number in range(2)]
        publishing = asyncio.create_task(client.publish_many("orders", large))
        for _ in range(2):
            request = await worker.expect(wire.Publish)
            request.ok(wire.PublishReply(7, 20, 1))
        await publishing
        assert worker.types() == ["PUBLISH"] * 2


async def test_what_shares_a_frame_has_one_durability_and_the_order_of_its_partition() -> None:
    async with Recording() as worker, AsyncClient(worker.url) as client:
        await publish_each(worker, client, "abcd", together=False)
        worker.types()
        levels = ["memory", "memory", "fsync", "fsync"]
        publishing = [
            asyncio.create_task(client.publish("orders", partition=number, durability=level))
            for number, level in enumerate(levels)
        ]
        for _ in levels:
            request = await worker.expect(wire.Publish)
            assert request.properties.durability == levels[request.properties.partition]
            request.ok(wire.PublishReply(7, 30, 1))
        await asyncio.gather(*publishing)
        assert worker.types() == ["PUBLISHES"] * 2


@pytest.mark.parametrize("together", [False, True], ids=["answered by themselves", "answered together"])
async def test_acks_of_several_partitions_share_a_frame(together: bool) -> None:
    async with Recording() as worker, Open(worker, Shelf()) as consumer:
        for number in range(PARTITIONS):
            worker.link.data(2, partition=number)
        taken = await take(consumer, 2 * PARTITIONS)
        acking = asyncio.create_task(consumer.ack(taken))
        requests = [await worker.expect(wire.Ack) for _ in range(PARTITIONS)]
        assert worker.types() == ["ACKS"]
        assert sorted(one.properties.partition for one in requests) == list(range(PARTITIONS))
        assert [one.body for one in requests] == [["", 1, 1, 2]] * PARTITIONS
        if together:
            worker.link.send(wire.Answers(settled=[one.frame.sequence for one in requests]))
        else:
            requests[0].ok(wire.SettleReply([0, 2, 2]))
            for one in requests[1:]:
                one.ok(wire.SettleReply())
        outcomes = await asyncio.wait_for(acking, 60)
        stale = [] if together else [requests[0].properties.partition]
        assert [one.partition for one, said in zip(taken, outcomes, strict=True) if said == "stale"] == stale


async def test_an_answer_that_nobody_waits_for_and_a_broken_one() -> None:
    async with Recording() as worker, AsyncClient(worker.url) as client:
        await publish_each(worker, client, "abcd", together=False)
        worker.link.send(wire.Answers([999, 7, 1, 1], [998]))
        await publish_each(worker, client, "efgh", together=True)
        link = worker.link
        link.send(wire.Answers([1, 2, 3]))
        await asyncio.wait_for(link.closed, 60)  # it is no worker's way to speak
