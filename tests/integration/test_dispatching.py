"""Deliveries come when there is something to deliver, and cost nothing when there is not."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
from redis.asyncio import Redis

from keylane import AsyncClient, Consumer, Message, OutgoingMessage, SubscriptionNotFound, wire
from keylane.types import Mode
from keylane_broker.config import Settings
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Lease, Outgoing
from keylane_broker.store.keys import PartitionKeys
from keylane_broker.worker.worker import Worker
from loadtest.topology import single_server
from tests.support.running import RunningBroker
from tests.support.servers import SCRIPT_CALLS

SOON = 60.0  # seconds; what is forgotten comes at the end of a session, after 600
FEW = 40  # script calls; a loop without end makes some hundred in this time
A_WHILE = 0.3


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    """A broker whose sessions outlast every test: when one ends, everything is looked at."""
    with RunningBroker(session=600.0) as broker:
        yield broker


@pytest.fixture
async def client(broker: RunningBroker) -> AsyncIterator[AsyncClient]:
    """A client of the broker that these tests share."""
    async with AsyncClient(broker.url) as client:
        yield client


async def publish(client: AsyncClient, topic: str, count: int, key: str = "k") -> None:
    """Publish messages of one key."""
    await client.publish_many(topic, [OutgoingMessage(key=key) for _ in range(count)])


async def take(consumer: Consumer, count: int) -> list[Message]:
    """The next messages."""
    return [await consumer.receive(SOON) for _ in range(count)]


async def scripts_in_a_while(broker: RunningBroker, topic: str) -> list[str]:
    """The scripts that the server runs on a topic while nothing happens."""
    seen: list[str] = []
    async with Redis.from_url(broker.redis_url, decode_responses=True) as redis, redis.monitor() as monitor:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(A_WHILE):  # the time that is looked at
                while True:
                    command = (await monitor.next_command())["command"]
                    if command.startswith(SCRIPT_CALLS) and f"{{{topic}:" in command:
                        seen.append(command)
    return seen


async def test_a_paused_subscription_is_left_alone(
    broker: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s") as consumer:
        await client.pause_subscription(topic, "s")
        await publish(client, topic, 1)
        assert len(await scripts_in_a_while(broker, topic)) < FEW
        await client.resume_subscription(topic, "s")
        await take(consumer, 1)


async def test_a_lane_that_waits_for_its_time_is_left_alone(
    broker: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s", mode="exclusive") as consumer:
        await publish(client, topic, 1)
        [message] = await take(consumer, 1)
        await message.nack(delay=60)
        await publish(client, topic, 1)
        assert len(await scripts_in_a_while(broker, topic)) < FEW


async def test_the_room_of_a_standby_does_not_leave_the_active_one_waiting(
    broker: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with (
        AsyncClient(broker.url) as other,
        client.subscribe(topic, "s", mode="failover", permits=2) as active,
    ):
        await publish(client, topic, 2)
        first = await take(active, 2)
        async with other.subscribe(topic, "s", mode="failover"):
            await publish(client, topic, 2)
            assert len(await scripts_in_a_while(broker, topic)) < FEW
            assert await active.ack(first) == ["settled"] * 2
            assert await active.ack(await take(active, 2)) == ["settled"] * 2
            await active.pause()
            await publish(client, topic, 1)
            await active.resume()
            assert await active.receive(SOON)


async def test_at_most_once_goes_on_with_a_key_whose_messages_are_settled(
    client: AsyncClient, topic: str
) -> None:
    """One consumer takes ten and has no more room; settling them sets the key free for the other."""
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", mode="key_shared", delivery="at_most_once")
    async with (
        client.subscribe(topic, "s", mode="key_shared", permits=10),
        client.subscribe(topic, "s", mode="key_shared", permits=10),
    ):
        await publish(client, topic, 20)
        async with asyncio.timeout(SOON):
            while (await client.describe_subscription(topic, "s")).backlog:
                continue


@pytest.mark.slow
async def test_a_lease_that_is_cut_short_ends_when_it_says(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s", auto_extend=False) as consumer:
        await publish(client, topic, 1)
        [message] = await take(consumer, 1)
        await message.extend(0.2)
        [again] = await take(consumer, 1)
        assert (again.id, again.retry_count) == (message.id, 1)


@pytest.mark.slow
async def test_a_deleted_subscription_ends_its_own_consumers_at_once_and_no_others(topic: str) -> None:
    """Also one without room, which would not find out by itself."""
    with RunningBroker(session=3.0) as broker:
        async with AsyncClient(broker.url) as client:
            for name in (topic, f"{topic}-other"):
                await client.create_topic(name, partitions=1)
            async with (
                client.subscribe(topic, "s", permits=1) as doomed,
                client.subscribe(f"{topic}-other", "s", lease=60) as other,
            ):
                await publish(client, topic, 2)
                await publish(client, f"{topic}-other", 1)
                await take(doomed, 1)
                [kept] = await take(other, 1)
                await client.delete_subscription(topic, "s")
                with pytest.raises(SubscriptionNotFound):
                    await doomed.receive(SOON)
                with pytest.raises(TimeoutError):
                    await other.receive(7.0)  # longer than two sessions: nothing comes back
                await kept.ack()


async def test_three_hundred_consumers_come_at_once(broker: RunningBroker, topic: str) -> None:
    """As after a restart of a worker."""
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=1)
        consumers = [client.subscribe(topic, "s", permits=1) for _ in range(300)]
        await asyncio.gather(*(consumer.__aenter__() for consumer in consumers))
        assert len((await client.describe_subscription(topic, "s")).consumers) == 300
        await asyncio.gather(*(consumer.close() for consumer in consumers))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shared", "key_shared"])
async def test_many_consumers_of_one_client_get_their_share(
    client: AsyncClient, topic: str, mode: Mode
) -> None:
    """Also of many partitions, whose fetches together are more than one client may have under way."""
    consumers, partitions, messages = 20, 32, 60
    got = [0] * consumers
    all_there = asyncio.Event()

    async def take(number: int, consumer: Consumer) -> None:
        async for _ in consumer:  # nothing is settled: who has more has less room
            got[number] += 1
            if sum(got) % messages == 0:
                all_there.set()

    await client.create_topic(topic, partitions=partitions)
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(client.subscribe(topic, "s", mode=mode)) for _ in range(consumers)
        ]
        takers = [asyncio.create_task(take(number, consumer)) for number, consumer in enumerate(opened)]
        for batch in range(20):
            all_there.clear()
            names = [f"{batch}-{number}" for number in range(messages)]
            await client.publish_many(topic, [OutgoingMessage(key=name) for name in names])
            async with asyncio.timeout(SOON):
                await all_there.wait()
        for taker in takers:
            taker.cancel()
    assert max(got) < 4 * sum(got) / consumers, got


@pytest.mark.slow
async def test_a_client_that_does_not_read_does_not_hold_up_a_stop(topic: str) -> None:
    with RunningBroker() as broker:
        async with AsyncClient(broker.url) as client:
            await client.create_topic(topic, partitions=1)
            await client.create_subscription(topic, "s")
            attributes = {"long": "x" * 30_000}
            await client.publish_many(topic, [OutgoingMessage(attributes=attributes) for _ in range(100)])
        with socket.create_connection(("127.0.0.1", broker.settings.port)) as deaf:
            deaf.sendall(wire.frame(wire.Info(), 1))
            deaf.recv(1)
            deaf.sendall(wire.frame(wire.Peek(topic, "s", limit=100), 2) * 300)
            engine = Engine.connect(broker.redis_url)
            assert await asyncio.to_thread(broker.stop_worker) == 0
            assert not await engine.store.command("EXISTS", PartitionKeys.of(topic, 0).lease)
            await engine.close()


@pytest.fixture
def own_url() -> Iterator[str]:
    """A server whose partitions no other test has."""
    with single_server() as server:
        yield server.url


async def test_nothing_is_leased_to_a_consumer_that_went_while_the_lease_was_taken(
    own_url: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been told by then what it holds: more would be skipped, and what comes after handed out."""
    worker, ready = Worker(Settings(port=0), own_url, worker_id=topic), asyncio.Event()
    serving = asyncio.create_task(worker.serve(ready.set))
    await ready.wait()
    async with AsyncClient(f"keylane://{worker.address}") as client:
        await client.create_topic(topic, partitions=1)
        async with client.subscribe(topic, "s", mode="exclusive"):
            partition = worker.partitions.get(topic, 0)
            dispatcher = partition.dispatchers["s"]
            await dispatcher.wait_for_fetch()
            lease, waits, may_go = await partition.lease(), asyncio.Event(), asyncio.Event()

            async def lease_later() -> Lease:
                waits.set()
                await may_go.wait()
                return lease

            monkeypatch.setattr(partition, "lease", lease_later)
            await worker.engine.publish(lease, [Outgoing("", "u", wire.pack_about(1))])
            dispatcher.notify()
            await waits.wait()
            [consumer] = dispatcher.consumers.values()
            consumer.reopen(0)
            ended = consumer.listing[0] = []  # as one has that is coming back
            may_go.set()
            await dispatcher.wait_for_fetch()
            assert await worker.engine.list_leases(lease, "s", consumer.name) == []
            async with asyncio.timeout(SOON):
                while dispatcher.recovery.lost:  # noqa: ASYNC110 -- nothing tells when a fetch is made good
                    await asyncio.sleep(0.01)
            assert consumer.listing.get(0) is ended, "whoever makes the fetch good leaves that to it"
            monkeypatch.undo()
    worker.stop()
    await serving
