"""Errors that come again, consumers that are entered again, and topics that are no more."""

import asyncio
import gc
import pickle
import traceback
from collections.abc import AsyncIterator

import pytest

from keylane import AsyncClient, BrokerError, ConnectionClosed, SubscriptionBusy, TopicNotFound, errors, wire
from keylane.connect.connection import Connection, Redirected
from keylane.connect.partition_map import TopicMap
from keylane.produce.outbox import Outbox
from keylane_broker.config import Settings
from keylane_broker.worker.worker import Worker
from loadtest.topology import single_server
from tests.support.running import RunningBroker
from tests.support.scripted_worker import ScriptedWorker

PATIENCE = 60.0


@pytest.fixture
async def client(broker: RunningBroker) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(broker.url) as client:
        yield client


async def test_a_consumer_that_was_refused_can_be_entered_again(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=2)
    await client.create_subscription(topic, "s", mode="exclusive")
    await client.publish(topic, b"x")
    second = client.subscribe(topic, "s", mode="exclusive")
    async with client.subscribe(topic, "s", mode="exclusive"):
        for _ in range(3):
            with pytest.raises(SubscriptionBusy):
                await second.__aenter__()
    async with second:
        message = await second.receive(PATIENCE)
        await message.ack()
    with pytest.raises(ConnectionClosed, match="subscribe again"):
        await second.__aenter__()


async def test_an_error_that_is_raised_again_does_not_grow(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    lengths = set()
    async with client.subscribe(topic, "s") as consumer:
        await client.delete_subscription(topic, "s")
        for _ in range(20):
            with pytest.raises(BrokerError) as caught:
                await consumer.receive(PATIENCE)
            lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(lengths) == 1
    await client.close()
    lengths = set()
    for _ in range(20):
        with pytest.raises(ConnectionClosed) as closed:
            await client.publish(topic, b"x")
        lengths.add(len(traceback.extract_tb(closed.value.__traceback__)))
    assert len(lengths) == 1


def test_every_error_can_be_pickled() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    made = [kind("because") for kind in kinds]
    made += [Redirected("orders", 3, "a:1"), errors.DurabilityNotReached("no", stored=True)]
    for error in made:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.slow
async def test_nothing_of_a_deleted_topic_stays_in_the_client(client: AsyncClient, topic: str) -> None:
    for number in range(20):
        name = f"{topic}-{number}"
        with pytest.raises(TopicNotFound):
            await client.publish(name, b"x")
        await client.create_topic(name, partitions=2)
        await client.create_subscription(name, "s")
        for partition in range(2):
            await client.publish(name, b"x", partition=partition)
        async with client.subscribe(name, "s") as consumer:
            await (await consumer.receive(PATIENCE)).ack()
        await client.delete_topic(name)
        with pytest.raises(TopicNotFound):
            await client.publish(name, b"x")
    del consumer
    async with asyncio.timeout(PATIENCE):  # of the last one the worker has yet to tell
        while _kept(topic):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await client.create_topic(f"{topic}-0", partitions=1)
    await client.create_subscription(f"{topic}-0", "s")
    assert (await client.publish(f"{topic}-0", b"x")).id is not None


def _kept(topic: str) -> list[str]:
    gc.collect()
    kept = [item for item in gc.get_objects() if isinstance(item, TopicMap | Outbox | Connection)]
    names = [name for item in kept for name in (item.maps if isinstance(item, Connection) else [item.topic])]
    return [name for name in names if name.startswith(topic)]


@pytest.mark.slow
async def test_nothing_of_a_deleted_topic_stays_in_a_worker_s_connections(topic: str) -> None:
    with single_server() as server:
        worker, ready = Worker(Settings(port=0), server.url, worker_id=topic), asyncio.Event()
        serving = asyncio.create_task(worker.serve(ready.set))
        await ready.wait()
        async with AsyncClient(f"keylane://{worker.address}") as client:
            for number in range(5):
                name = f"{topic}-{number}"
                await client.create_topic(name, partitions=2)
                await client.create_subscription(name, "s")
                await client.publish(name, b"x")
                async with client.subscribe(name, "s") as consumer:
                    await (await consumer.receive(PATIENCE)).ack()
                assert [name in connection.topics for connection in worker.connections.all] == [True]
                await client.delete_topic(name)
            async with asyncio.timeout(PATIENCE):
                while any(connection.topics for connection in worker.connections.all):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        worker.stop()
        await serving


async def test_a_consumer_that_was_cancelled_while_it_opened_can_be_entered_again_at_once() -> None:
    async with ScriptedWorker() as worker, AsyncClient(worker.url) as client:
        consumer = client.subscribe("orders", "s")
        opening = asyncio.create_task(consumer.__aenter__())
        first = await worker.expect(wire.Subscribe)
        opening.cancel()
        await asyncio.wait({opening})
        opening = asyncio.create_task(consumer.__aenter__())
        second = await worker.expect(wire.Subscribe)
        first.ok(wire.SubscribeReply("shared", "at_least_once", 30_000, 1))
        left = await worker.expect(wire.Unsubscribe)
        assert left.properties.stream == first.properties.stream != second.properties.stream
        left.ok()
        second.ok(wire.SubscribeReply("shared", "at_least_once", 30_000, 1))
        await opening
        worker.link.data(1, stream=second.properties.stream)
        await consumer.receive(PATIENCE)
        closing = asyncio.create_task(consumer.close())
        await worker.expect_leaving()
        await closing


async def test_an_error_that_many_hear_is_each_one_s_own(topic: str) -> None:
    async with ScriptedWorker() as worker, AsyncClient(worker.url, timeout=1) as client:
        connection = await client._cluster.connection()
        asked = [connection.request(wire.Topics()) for _ in range(10)]
        await worker.expect(wire.Topics)
        worker.link.drop()
        heard = await asyncio.gather(*asked, return_exceptions=True)
        heard += await asyncio.gather(
            *(connection.request(wire.Topics()) for _ in range(10)), return_exceptions=True
        )
        assert {type(error) for error in heard} == {ConnectionClosed}
        assert len(set(map(id, heard))) == 20


async def test_an_error_of_what_many_wait_for_is_each_one_s_own(client: AsyncClient, topic: str) -> None:
    heard = await asyncio.gather(*(client.publish(topic, b"x") for _ in range(10)), return_exceptions=True)
    assert {type(error) for error in heard} == {TopicNotFound}
    assert len(set(map(id, heard))) == 10
    depths = {len(traceback.extract_tb(error.__traceback__)) for error in heard if error is not None}  # type: ignore[union-attr]
    assert max(depths) < 20
