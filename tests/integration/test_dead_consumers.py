"""Consumers that die: what they held comes back, whoever else is there, and a successor gets in."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from keylane import AsyncClient, Consumer, Message, OutgoingMessage, SubscriptionBusy
from keylane.types import Mode
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from tests.support.running import ROOT, RunningBroker
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # real processes, and sessions that run out

SOON = 60.0  # seconds; machines stall

# Takes three messages, says so, and waits to be killed.
VICTIM = """
import asyncio, json, sys
from keylane import AsyncClient

async def main(url, topic, mode, name):
    async with AsyncClient(url) as client, client.subscribe(topic, "s", mode=mode, name=name) as consumer:
        for _ in range(3):
            await consumer.receive(60)
        print("taken", flush=True)
        await asyncio.sleep(600)

asyncio.run(main(*json.loads(sys.argv[1])))
"""


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    """A broker whose sessions are short."""
    with RunningBroker(session=3.0, partition_lease=2.0, heartbeat=1.0) as broker:
        yield broker


@pytest.fixture
async def client(broker: RunningBroker) -> AsyncIterator[AsyncClient]:
    """A client of it."""
    async with AsyncClient(broker.url, timeout=SOON) as client, asyncio.timeout(SOON):
        yield client


@pytest.fixture
async def engine(broker: RunningBroker) -> AsyncIterator[Engine]:
    """A look into its Redis."""
    engine = Engine.connect(broker.redis_url)
    yield engine
    await engine.close()


async def kill_a_consumer(broker: RunningBroker, client: AsyncClient, topic: str, mode: Mode) -> None:
    """Have three messages in the hands of a process that dies by SIGKILL."""
    await client.create_topic(topic, partitions=2)
    await client.create_subscription(topic, "s", mode=mode)
    for number in range(3):
        await client.publish(topic, str(number), partition=1)
    order = json.dumps([broker.url, topic, mode, "victim"])
    victim = await asyncio.create_subprocess_exec(
        sys.executable, "-c", VICTIM, order, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert victim.stdout is not None
    assert await victim.stdout.readline() == b"taken\n"
    victim.send_signal(signal.SIGKILL)
    await victim.wait()


def leave_alone(_: RunningBroker) -> None:
    """The worker goes on."""


def kill(broker: RunningBroker) -> None:
    """The worker dies, too, and another one comes."""
    broker.kill_worker()
    broker.start_worker()


def stop(broker: RunningBroker) -> None:
    """The worker stops in good order, and another one comes."""
    broker.stop_worker()
    broker.start_worker()


async def admitted(client: AsyncClient, topic: str, mode: Mode) -> Consumer:
    """A successor, which has another name, as soon as it is let in."""
    while True:
        consumer = client.subscribe(topic, "s", mode=mode)
        try:
            return await consumer.__aenter__()
        except SubscriptionBusy:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("change", [leave_alone, kill, stop])
@pytest.mark.parametrize("mode", ["exclusive", "failover", "shared", "key_shared"])
async def test_the_leases_of_a_dead_consumer_return_although_nobody_else_is_connected(
    broker: RunningBroker,
    client: AsyncClient,
    engine: Engine,
    topic: str,
    mode: Mode,
    change: Callable[[RunningBroker], None],
) -> None:
    await kill_a_consumer(broker, client, topic, mode)
    change(broker)

    async def is_over() -> bool:
        found = await client.describe_subscription(topic, "s")
        return not found.consumers and not found.leased

    await until(is_over)
    assert await check_topic(engine, topic) == []


async def test_a_crowd_comes_back_to_a_new_worker_with_all_that_it_holds(topic: str) -> None:
    # With time enough for a slow machine: what is asked is that nobody loses anything.
    with RunningBroker(session=30.0, partition_lease=2.0) as broker:
        async with AsyncClient(broker.url, timeout=SOON) as client, asyncio.timeout(2 * SOON):
            engine = Engine.connect(broker.redis_url)
            await client.create_topic(topic, partitions=2)
            consumers = [client.subscribe(topic, "s", mode="key_shared", permits=25) for _ in range(60)]
            await asyncio.gather(*(consumer.__aenter__() for consumer in consumers))
            await client.publish_many(
                topic, [OutgoingMessage(key=f"key-{number}") for number in range(1_000)]
            )
            held: list[list[Message]] = [[] for _ in consumers]

            async def hold(number: int) -> None:
                async for message in consumers[number]:
                    held[number].append(message)

            async with asyncio.TaskGroup() as tasks:
                holding = [tasks.create_task(hold(number)) for number in range(60)]
                while sum(map(len, held)) < 1_000:  # noqa: ASYNC110 - of many consumers
                    await asyncio.sleep(0.02)
                kill(broker)
                acked = await asyncio.gather(
                    *(consumer.ack(list(mine)) for consumer, mine in zip(consumers, held, strict=True))
                )
                assert {outcome for outcomes in acked for outcome in outcomes} == {"settled"}
                await client.publish(topic, "", key="after")
                while sum(map(len, held)) < 1_001:  # noqa: ASYNC110 - of many consumers
                    await asyncio.sleep(0.02)
                for task in holding:
                    task.cancel()
            assert sum(map(len, held)) == 1_001, "each was handed out once"
            assert await check_topic(engine, topic) == []
            await engine.close()


@pytest.mark.parametrize("change", [leave_alone, kill, stop])
@pytest.mark.parametrize("mode", ["exclusive", "failover"])
async def test_a_successor_under_another_name_gets_what_a_dead_consumer_had(
    broker: RunningBroker,
    client: AsyncClient,
    engine: Engine,
    topic: str,
    mode: Mode,
    change: Callable[[RunningBroker], None],
) -> None:
    await kill_a_consumer(broker, client, topic, mode)
    change(broker)
    consumer = await admitted(client, topic, mode)
    taken = [await consumer.receive(SOON) for _ in range(3)]
    assert [await message.data() for message in taken] == [b"0", b"1", b"2"]
    assert [message.retry_count for message in taken] == [1, 0, 0]
    await consumer.ack(taken)
    await consumer.close()
    assert await check_topic(engine, topic) == []
