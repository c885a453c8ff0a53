"""Messages for later through client and workers: in order, once, whatever is restarted meanwhile."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from redis.asyncio import Redis

from keylane import AsyncClient, Client, Columns, Consumer, InvalidArgument, OutgoingMessage
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from tests.support.running import RunningBroker
from tests.support.servers import SCRIPT_CALLS

SOON = 60.0  # seconds
A_WHILE = 0.4

pytestmark = pytest.mark.slow


@pytest.fixture
async def client(broker: RunningBroker) -> AsyncIterator[AsyncClient]:
    """A client of the broker that tests share."""
    async with AsyncClient(broker.url) as client:
        yield client


async def bodies(consumer: Consumer, count: int) -> list[str]:
    """The next bodies, in the order of delivery; all acked."""
    found = []
    for _ in range(count):
        async with asyncio.timeout(SOON):
            message = await consumer.receive()
            found.append((await message.data()).decode())
            await consumer.ack([message])
    return found


async def check(broker: RunningBroker, topic: str) -> None:
    """The keyspace is as it should be, with nothing left over."""
    engine = Engine.connect(broker.redis_url)
    assert await check_topic(engine, topic) == []
    assert await engine.store.keys_like(f"*{topic}*delayed*") == set()
    await engine.close()


async def test_messages_come_in_the_order_of_their_times(
    broker: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s", mode="exclusive") as consumer:
        due = datetime.now(UTC) + timedelta(seconds=4)
        published = await client.publish_many(
            topic,
            [
                OutgoingMessage(b"third", delay=0.6),
                OutgoingMessage(b"now"),
                OutgoingMessage(b"second", delay=timedelta(seconds=0.3)),
                OutgoingMessage(b"last", deliver_at=due),
            ],
        )
        assert [one.delayed for one in published] == [True, False, True, True]
        assert [one.id for one in published] == [None, published[1].id, None, None]
        assert {one.partition for one in published} == {0}
        assert all(one.uid for one in published)
        assert await bodies(consumer, 3) == ["now", "second", "third"]
        last = await consumer.receive(SOON)
        assert last.published_at >= due - timedelta(milliseconds=2), "not before its time"
        assert last.uid == published[3].uid
        await consumer.ack([last])
    await check(broker, topic)


async def test_nobody_looks_before_the_time_has_come(
    broker: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s"):
        await client.publish(topic, b"x", delay=60)
        seen: list[str] = []
        async with (
            Redis.from_url(broker.redis_url, decode_responses=True) as redis,
            redis.monitor() as monitor,
        ):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(A_WHILE):  # the time that is looked at
                    while True:
                        command = (await monitor.next_command())["command"]
                        if command.startswith(SCRIPT_CALLS) and f"{{{topic}:0}}:delayed" in command:
                            seen.append(command)
        assert seen == []
    await client.delete_topic(topic)
    async with Redis.from_url(broker.redis_url) as redis:
        assert await redis.keys(f"kl:*{topic}:0*") == []


async def test_a_uid_is_delivered_once(broker: RunningBroker, client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s") as consumer:
        first = await client.publish(topic, b"one", uid="u", delay=2.0)
        again = await client.publish(topic, b"two", uid="u", delay=0.1)
        plain = await client.publish(topic, b"three", uid="u")
        assert [one.duplicate for one in (first, again, plain)] == [False, True, True]
        assert plain.id is None
        assert await bodies(consumer, 1) == ["one"]
        known = await client.publish(topic, b"four", uid="u", delay=0.1)
        assert known.duplicate
        assert known.id is not None
        await client.publish(topic, b"end")
        assert await bodies(consumer, 1) == ["end"]
    await check(broker, topic)


async def test_what_is_no_time_to_wait_for_is_refused(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    assert (
        await client.publish(topic, b"x", delay=timedelta(days=8))
    ).delayed  # longer than a body's lifetime
    assert (await client.publish(topic, delay=timedelta(days=8), attributes={"a": "b"})).delayed
    with pytest.raises(InvalidArgument, match="delay and deliver_at"):
        await client.publish(topic, b"x", delay=1, deliver_at=datetime.now(UTC))
    with pytest.raises(InvalidArgument, match="time zone"):
        await client.publish(topic, b"x", deliver_at=datetime(2030, 1, 1))
    with pytest.raises(InvalidArgument, match="delay is -1"):
        await client.publish(topic, b"x", delay=-1)
    await client.delete_topic(topic)


async def test_what_is_due_while_no_worker_runs_comes_when_one_does(topic: str) -> None:
    with RunningBroker(partition_lease=3.0) as broker:
        async with AsyncClient(broker.url) as client:
            await client.create_topic(topic, partitions=3)
            await client.create_subscription(topic, "s")
            delays = [0.1, 0.5, 0.9, 3.0, 3.5, 4.0]
            for number, delay in enumerate(delays):
                await client.publish(topic, str(number), key="k", delay=delay)
            broker.kill_worker()
            await asyncio.sleep(1.0)  # the time that passes without a worker
            broker.start_worker()
            async with client.subscribe(topic, "s") as consumer:
                assert await bodies(consumer, len(delays)) == [str(number) for number in range(len(delays))]
        await check(broker, topic)


async def test_another_worker_takes_over_what_waits(topic: str) -> None:
    with RunningBroker(workers=2, partition_lease=3.0) as broker:
        async with AsyncClient(broker.url) as client:
            await client.create_topic(topic, partitions=4)
            async with client.subscribe(topic, "s") as consumer:
                messages = [
                    OutgoingMessage(str(number), partition=number % 4, delay=2.0 + number / 20)
                    for number in range(40)
                ]
                assert all(one.delayed for one in await client.publish_many(topic, messages))
                broker.kill_worker(0)
                found = await bodies(consumer, 40)
        assert sorted(map(int, found)) == list(range(40))
        for partition in range(4):
            own = [int(text) for text in found if int(text) % 4 == partition]
            assert own == sorted(own), "in order within each partition"
        await check(broker, topic)


async def test_columns_can_have_times(broker: RunningBroker, client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=2)
    async with client.subscribe(topic, "s") as consumer:
        now = round(datetime.now(UTC).timestamp() * 1_000)
        dues = [now + 2_100, None, now + 2_200, now + 2_000]  # with time enough for a slow machine
        columns = Columns(keys=["a"] * 4, bodies=[b"3", b"1", b"4", b"2"], dues=dues)
        tally = await (await client.publish_columns(topic, columns))
        assert (tally.stored, tally.duplicates, tally.no_subscribers) == (4, 0, 0)
        assert await bodies(consumer, 4) == ["1", "2", "3", "4"]
    await check(broker, topic)


def test_the_sync_client_does_the_same(broker: RunningBroker, topic: str) -> None:
    with Client(broker.url) as client:
        client.create_topic(topic, partitions=1)
        with client.subscribe(topic, "s") as consumer:
            assert client.publish(topic, b"later", delay=2.0).delayed
            assert client.publish(topic, b"at", deliver_at=datetime.now(UTC)).delayed
            assert [consumer.receive(SOON).data() for _ in range(2)] == [b"at", b"later"]
        client.delete_topic(topic)
