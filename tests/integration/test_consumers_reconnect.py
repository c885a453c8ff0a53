"""Consumers that lose their connection, come back, are replaced, or get stuck."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import anyio
import pytest

from keylane import AsyncClient, Consumer, ConsumerReplaced, Message, OutgoingMessage, wire
from keylane.connect.connection import Connection
from keylane.types import Mode
from keylane_broker.supervise.embedded_server import Server
from tests.support.running import RunningBroker

pytestmark = pytest.mark.slow  # sessions take their time to end

SOON = 60.0  # seconds in which anything that is to happen has happened
SESSION = 4.0  # seconds: one that ends while somebody looks on; a busy machine may not forget one for so long
A_WHILE = 0.2  # seconds in which something that must not happen would have
MODES: list[Mode] = ["shared", "key_shared", "exclusive", "failover"]


@pytest.fixture(scope="module")
def mortal() -> Iterator[RunningBroker]:
    """A broker whose worker may be killed, by one test after the other."""
    with RunningBroker() as broker:
        yield broker


@pytest.fixture
async def client(mortal: RunningBroker) -> AsyncIterator[AsyncClient]:
    """A client of that broker."""
    async with AsyncClient(mortal.url) as client:
        yield client


@pytest.fixture
async def other(mortal: RunningBroker) -> AsyncIterator[AsyncClient]:
    """Another client, with a connection of its own."""
    async with AsyncClient(mortal.url) as client:
        yield client


def cut(client: AsyncClient) -> None:
    """Take the client's connection away underneath it."""
    assert client._cluster.current is not None
    client._cluster.current._transport.abort()


async def publish(client: AsyncClient, topic: str, letters: str, key: str = "k") -> None:
    """Publish a message for each letter."""
    await client.publish_many(topic, [OutgoingMessage(key=key, attributes={"is": at}) for at in letters])


async def take(consumer: Consumer, count: int) -> list[Message]:
    """The next messages."""
    return [await consumer.receive(SOON) for _ in range(count)]


async def gets_nothing(consumer: Consumer) -> bool:
    """Whether nothing comes for a while."""
    try:
        await consumer.receive(A_WHILE)
    except TimeoutError:
        return True
    return False


def told(messages: list[Message]) -> list[tuple[str, int]]:
    """What messages are, and how often they were delivered in vain."""
    return [(message.attributes["is"], message.retry_count) for message in messages]


def uncharged(letters: str) -> list[tuple[str, int]]:
    """The same for messages that nobody was charged for."""
    return [(letter, 0) for letter in letters]


@pytest.mark.parametrize("how", ["cut", "killed worker", "stopped worker"])
@pytest.mark.parametrize("mode", MODES)
async def test_a_consumer_that_comes_back_has_its_leases_and_nothing_twice(
    mortal: RunningBroker, client: AsyncClient, other: AsyncClient, topic: str, mode: Mode, how: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s", mode=mode) as consumer:
        await publish(other, topic, "abcde")
        messages = await take(consumer, 2)
        if how == "cut":
            cut(client)
        else:
            mortal.kill_worker() if how == "killed worker" else mortal.stop_worker()
            mortal.start_worker()
        await publish(other, topic, "fg")
        messages += await take(consumer, 5)
        assert told(messages) == uncharged("abcdefg")
        assert await gets_nothing(consumer)
        assert await consumer.ack(messages) == ["settled"] * 7
        assert (await other.describe_subscription(topic, "s")).backlog == 0


@pytest.mark.parametrize("mode", MODES)
async def test_a_process_that_starts_again_under_its_name_gets_what_it_held_first(
    mortal: RunningBroker, client: AsyncClient, topic: str, mode: Mode
) -> None:
    await client.create_topic(topic, partitions=1)
    async with (
        AsyncClient(mortal.url) as crashed,
        crashed.subscribe(topic, "s", mode=mode, name="me", permits=4) as consumer,
    ):
        await publish(client, topic, "abcdef")
        held = await take(consumer, 3)
        await held[0].ack()
        await take(consumer, 2)
        await crashed._cluster.close()
        async with client.subscribe(topic, "s", mode=mode, name="me") as again:
            messages = await take(again, 5)
            assert told(messages) == uncharged("bcdef")
            assert await again.ack(messages) == ["settled"] * 5


async def test_a_take_over_by_the_same_name_ends_the_older_consumer(
    client: AsyncClient, other: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=2)
    async with client.subscribe(topic, "s", name="me") as older:
        await publish(client, topic, "abc")
        held = await take(older, 2)
        async with other.subscribe(topic, "s", name="me") as newer:
            with pytest.raises(ConsumerReplaced) as told_so:
                await take(older, 2)
            assert not told_so.value.retriable  # or the two would take each other's place for ever
            messages = await take(newer, 3)
            assert told(messages) == uncharged("abc")
            assert await older.ack(held) == ["stale", "stale"]
            assert await newer.ack(messages) == ["settled"] * 3


async def test_what_was_acked_while_the_connection_went_is_not_handed_out_again(
    mortal: RunningBroker, client: AsyncClient, other: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=2)
    await client.create_subscription(topic, "keeper")  # or an entry would leave the log with its ack
    async with client.subscribe(topic, "s", mode="key_shared", permits=3_000) as consumer:
        await other.publish_many(topic, [OutgoingMessage(key=str(number)) for number in range(3_000)])
        messages = await take(consumer, 3_000)
        mortal.kill_worker()
        acking = asyncio.create_task(consumer.ack(messages))
        await anyio.to_thread.run_sync(mortal.start_worker)
        assert await acking == ["settled"] * 3_000
        assert await gets_nothing(consumer)
        assert (await other.describe_subscription(topic, "s")).backlog == 0


async def test_a_nack_that_the_connection_took_along_rewinds_the_lane_when_it_is_back(
    mortal: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s", mode="key_shared") as consumer:
        await publish(client, topic, "abcd")
        messages = await take(consumer, 3)
        mortal.kill_worker()
        nacking = asyncio.create_task(messages[0].nack(delay=0))
        await anyio.to_thread.run_sync(mortal.start_worker)
        again = await take(consumer, 4)
        await nacking
        assert told(again) == [("a", 1), *uncharged("bcd")]
        assert await consumer.ack(messages) == ["stale"] * 3
        assert await consumer.ack(again) == ["settled"] * 4


@pytest.fixture(scope="module")
def impatient() -> Iterator[RunningBroker]:
    """A broker that gives up a lost consumer after a moment, on a server that can be killed.

    The worker's own lease outlasts that: under a new one it would spare its consumers, as any new owner does.
    """
    with (
        Server(appendfsync="always") as server,
        RunningBroker(server, session=SESSION, partition_lease=600.0) as broker,
    ):
        yield broker


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
async def test_a_consumer_that_was_away_for_longer_than_its_session_hands_out_nothing_that_others_have(
    impatient: RunningBroker, topic: str, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(impatient.url) as away, AsyncClient(impatient.url) as other:
        await other.create_topic(topic, partitions=1)
        async with away.subscribe(topic, "s", mode=mode) as lost:
            await publish(other, topic, "abcd")
            held = await take(lost, 2)
            back = asyncio.Event()
            dial = away._cluster._pool.dial

            async def dial_later(address: str) -> Connection:
                await back.wait()
                return await dial(address)

            monkeypatch.setattr(away._cluster._pool, "dial", dial_later)
            cut(away)
            async with other.subscribe(topic, "s", mode=mode) as consumer:
                messages = await take(consumer, 4)
                assert told(messages) == [("a", 1), *uncharged("bcd")]
                back.set()
                async with asyncio.timeout(SOON):
                    while len((await other.describe_subscription(topic, "s")).consumers) < 2:
                        continue
                await lost._streams.reach(0, SOON)  # it has been told what it holds
                assert await gets_nothing(lost)
                assert await lost.ack(held) == ["stale", "stale"]
                assert await consumer.ack(messages) == ["settled"] * 4
                await consumer.pause()
                await publish(other, topic, "e")
                assert told(await take(lost, 1)) == uncharged("e")


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
async def test_after_an_absence_of_the_server_longer_than_the_session_nobody_hands_out_what_others_have(
    impatient: RunningBroker, topic: str, mode: Mode
) -> None:
    assert not isinstance(impatient.server, str)
    async with AsyncClient(impatient.url) as client, AsyncClient(impatient.url) as other:
        await client.create_topic(topic, partitions=1)
        async with (
            client.subscribe(topic, "s", mode=mode, permits=4) as one,
            other.subscribe(topic, "s", mode=mode) as two,
        ):
            await two.pause()
            await publish(client, topic, "abcd")
            held = await take(one, 2)
            impatient.server.kill()
            await asyncio.sleep(SESSION + 0.5)  # the absence
            await asyncio.to_thread(impatient.server.start)
            await two.resume()
            # It ends sessions, or it takes a new lease first, under which it spares its consumers.
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * SESSION):
                    while not any(item.retry_count for item in await client.peek(topic, "s")):
                        continue
            spared = await one.ack(held) == ["settled", "settled"]  # which waits until it is subscribed again
            expected = uncharged("cd") if spared else [("a", 1), *uncharged("bcd")]
            messages: list[Message] = []
            async with asyncio.timeout(SOON):
                while len(messages) < len(expected):
                    messages += await what_is_there(one) + await what_is_there(two)
            assert sorted(told(messages)) == expected
            assert spared or min(message.token for message in messages) > held[0].token
            for message in messages:
                await message.ack()


async def what_is_there(consumer: Consumer) -> list[Message]:
    """What comes in a while."""
    found = []
    with suppress(TimeoutError):
        while True:
            found.append(await consumer.receive(A_WHILE))
    return found


async def test_what_was_leased_before_a_nack_is_not_handed_out_behind_it(
    mortal: RunningBroker, client: AsyncClient, topic: str
) -> None:
    """A worker that has just started reads messages from the log, which takes it longer than the nack."""
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", mode="key_shared")
    about = {"much": "x" * 3_000}
    await client.publish_many(topic, [OutgoingMessage(key="k", attributes=about) for _ in range(1_500)])
    mortal.kill_worker()
    mortal.start_worker()
    async with client.subscribe(topic, "s", mode="key_shared", permits=60) as consumer:
        nacked: Message | None = None
        for number in range(1_500):
            message = await consumer.receive(SOON)
            if nacked is not None:
                assert (message.id, message.retry_count) == (nacked.id, 1)
                nacked = None
            if number % 30 == 29 and not message.retry_count:
                nacked = message
                await message.nack(delay=0)
            else:
                async with message:  # acked in the background: that makes room, and the worker fetches
                    pass


async def test_a_consumer_that_never_settles_does_not_slow_the_others(
    client: AsyncClient, other: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=2)
    stuck = asyncio.Event()

    async def handler(message: Message) -> None:
        await stuck.wait()

    async with (
        client.subscribe(topic, "s", permits=20, handler=handler),
        other.subscribe(topic, "s", permits=20) as consumer,
    ):
        await other.publish_many(topic, [OutgoingMessage(key=str(number)) for number in range(1_000)])
        for message in await take(consumer, 20):
            await message.ack()
        for _ in range(960):
            await (await consumer.receive(SOON)).ack()
        assert await gets_nothing(consumer)
        assert (await other.describe_subscription(topic, "s")).leased == 20
        stuck.set()  # nobody has to wait for it any more


async def test_a_consumer_that_does_not_read_does_not_slow_the_others(
    mortal: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "same")
    await client.create_subscription(topic, "another")
    with socket.create_connection(("127.0.0.1", mortal.settings.port)) as deaf:
        for stream, subscription in enumerate(("same", "another"), 1):
            request = wire.Subscribe(stream, topic, subscription, "deaf", lease_ms=500, permits=100)
            deaf.sendall(wire.frame(wire.Info(), 1) + wire.frame(request, 2))
        reader, answers = wire.FrameReader(), 0
        while answers < 4:
            answers += len(list(reader.feed(deaf.recv(10_000))))
        async with client.subscribe(topic, "same") as consumer:
            about = {"much": "x" * 30_000}
            await client.publish_many(
                topic, [OutgoingMessage(key=str(n), attributes=about) for n in range(400)]
            )
            seen: set[str] = set()
            while len(seen) < 400:
                message = await consumer.receive(SOON)
                seen.add(message.id)
                await message.ack()
