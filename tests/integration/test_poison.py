"""What one producer says of its messages kills nobody else's consumer, whatever it says."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from keylane import AsyncClient, Backoff, Consumer, OutgoingMessage, wire
from keylane.types import Mode
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Lease, Outgoing
from keylane_broker.store.keys import PartitionKeys
from tests.support.peer import Peer, Refused, connect
from tests.support.running import RunningBroker
from tests.support.waiting import until

SOON = 60.0  # seconds in which anything that is to happen has happened
GOOD = '1794803456029 web 5:name {"region":"eu"}'
POISON = {
    "": "4 fields",
    "1": "4 fields",
    "1 2 3": "4 fields",
    "now   ": "produced_ms",
    "-1   ": "produced_ms",
    "٣   ": "produced_ms",
    "999999999999999   ": "produced_ms",
    "   ": "produced_ms",
    "1  x ": "body",
    "1  -5 ": "body",
    "1  :name ": "body",
    "1  9999999999999999 ": "body",
    '1   {"a":1}': "attributes",
    '1   {"a":null}': "attributes",
    "1   []": "attributes",
    "1   {": "attributes",
    '1   "text"': "attributes",
    '1   {"a":"b"} more': "attributes",
    '1   {"a":"\\ud800"}': "attributes",
    "1    ": "attributes",
}


@pytest.fixture
async def peer(broker: RunningBroker) -> AsyncIterator[Peer]:
    async with connect(broker.url) as peer:
        yield peer


@pytest.fixture
async def client(broker: RunningBroker) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(broker.url) as client:
        yield client


@pytest.fixture
async def engine(broker: RunningBroker) -> AsyncIterator[Engine]:
    engine = Engine.connect(broker.redis_url)
    yield engine
    await engine.close()


async def store(engine: Engine, topic: str, partition: int, *messages: Outgoing) -> None:
    """Publish as a worker that looks at nothing, with the lease of the one that serves the partition."""
    lease = PartitionKeys.of(topic, partition).lease
    [held] = await engine.store.read_all([("GET", lease)])
    worker, _, epoch = held.rpartition(" ")
    connection = engine.store.connections.get(await engine.store.server_of(lease))
    assert connection is not None
    engine.store.homes.settle(lease, connection)  # as if it had been taken over this one
    await engine.publish(Lease(topic, partition, worker, int(epoch)), messages)


@pytest.mark.parametrize("about", POISON)
async def test_a_publish_that_nobody_could_read_is_refused_and_stores_nothing(
    peer: Peer, client: AsyncClient, topic: str, about: str
) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s")
    body = wire.pack(["", "u1", GOOD, "", "u2", about, "", "u3", GOOD])
    with pytest.raises(Refused, match=f"invalid_argument: message 1, uid 'u2': .*{POISON[about]}"):
        await peer.answer(wire.Publish(topic, 0), body)
    with pytest.raises(Refused, match="invalid_argument: message 1, uid 'u2'"):
        await peer.answer(wire.Publish(topic, 0, due_ms=[1, 1, 1]), body)
    assert (await client.describe_topic(topic)).messages == 0
    # What is refused for good does not hold up what comes behind it.
    await peer.answer(wire.Publish(topic, 0), wire.pack(["", "u1", GOOD]))
    assert (await client.describe_topic(topic)).messages == 1


@pytest.mark.parametrize(
    "about", ["1   ", "0   {}", "99999999999999 g 0 ", "1  5:a:b ", '1   { "ü" : "\\n" }']
)
async def test_what_is_allowed_is_stored_and_read(
    peer: Peer, client: AsyncClient, topic: str, about: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s") as consumer:
        await peer.answer(wire.Publish(topic, 0), wire.pack(["", "u1", about]))
        message = await consumer.receive(SOON)
        assert (message.produced_at.year, message.attributes.keys()) is not None
        await message.ack()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive", "failover"])
@pytest.mark.parametrize("about", ["", "now   ", "1  x ", '1   {"a":1}'])
async def test_a_consumer_survives_poison_that_is_stored_already(
    engine: Engine, client: AsyncClient, topic: str, mode: Mode, about: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is nacked, charged and told once; other lanes go on, and its own keeps its order."""
    caplog.set_level(logging.WARNING, "keylane.client")
    await client.create_topic(topic, partitions=2)
    await client.create_subscription(topic, "s", mode=mode, backoff=Backoff(0.01))
    async with client.subscribe(topic, "s", mode=mode) as consumer:
        first, last = OutgoingMessage(key="b", partition=0), OutgoingMessage(key="c", partition=1)
        await client.publish_many(topic, [first])
        await store(engine, topic, 0, Outgoing("a", "poison", about), Outgoing("a", "behind", "1   "))
        await client.publish_many(topic, [first, last])
        wanted = {"shared": 4, "key_shared": 3}.get(mode, 2)
        seen = await uids_of(consumer, wanted)
        assert "poison" not in seen
        # Its lane waits for it, and so for whoever takes it away; nothing else does.
        assert ("behind" in seen) == (mode == "shared")
        if mode not in ("shared", "key_shared"):
            assert (await client.describe_subscription(topic, "s")).backlog == 3
        await charged(client, topic)
        told = [record.getMessage() for record in caplog.records if "0:" in record.getMessage()]
        assert len(told) == 1, told
        await client.seek(topic, "s", "latest")
        await client.publish_many(topic, [OutgoingMessage(key="a", partition=0)])
        assert len(await uids_of(consumer, 1)) == 1


async def test_a_consumer_at_most_once_survives_poison_and_gets_its_permits_back(
    engine: Engine, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", delivery="at_most_once")
    async with client.subscribe(topic, "s", permits=2) as consumer:
        for _ in range(5):
            await store(engine, topic, 0, *(Outgoing("", f"poison-{at}", "garbage") for at in range(3)))
        await client.publish(topic, b"fine")
        message = await consumer.receive(SOON)
        assert await message.data() == b"fine"


async def test_the_rest_of_a_block_is_read_and_settled_beside_poison(
    engine: Engine, client: AsyncClient, topic: str
) -> None:
    """In one batch with bodies: the names of bodies are looked up together."""
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s")
    await client.publish_many(topic, [OutgoingMessage(b"1")])
    await store(engine, topic, 0, Outgoing("", "poison", "x"))
    await client.publish_many(topic, [OutgoingMessage(b"2")])
    async with client.subscribe(topic, "s") as consumer:
        async with asyncio.timeout(SOON):
            batch = await anext(consumer.batches(max_wait=0.2))
            assert await batch.data() == [b"1", b"2"]
            assert await consumer.ack(batch) == ["settled", "settled"]
    assert (await client.describe_topic(topic)).messages == 1


async def test_an_operator_sees_poison_with_what_can_be_read_of_it(
    engine: Engine, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s")
    await client.publish(topic)
    await store(engine, topic, 0, Outgoing("k", "poison", "x"))
    _, shown = await client.peek(topic, "s")
    assert (shown.key, shown.uid, shown.attributes) == ("k", "poison", {})


async def uids_of(consumer: Consumer, count: int) -> list[str]:
    """Ack so many messages; their uids."""
    found = []
    for _ in range(count):
        message = await consumer.receive(SOON)
        found.append(message.uid)
        await message.ack()
    return found


async def charged(client: AsyncClient, topic: str) -> None:
    """Wait until the poison was given back twice."""

    async def given_back() -> bool:
        found = await client.peek(topic, "s")
        return any(message.uid == "poison" and message.retry_count > 1 for message in found)

    await until(given_back)
