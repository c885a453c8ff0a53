"""Multicast through the real client and the command line: everybody who is registered gets everything."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from keylane import AsyncClient, Client, Consumer, InvalidArgument, OutgoingMessage, SubscriptionNotFound
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from loadtest.topology import three_node_cluster
from tests.support.commands import ask_keylane
from tests.support.peer import Elsewhere, Stream, connect
from tests.support.running import RunningBroker
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # a cluster is three processes

PATIENCE = 60.0


@pytest.fixture(scope="module", params=["one server", "cluster"])
def place(request: pytest.FixtureRequest, server_binary: str) -> Iterator[RunningBroker]:
    """Two workers on one server, or on a cluster of three; sessions of two seconds."""
    with contextlib.ExitStack() as stack:
        url = None
        if request.param == "cluster":
            url = stack.enter_context(three_node_cluster(binary=server_binary)).broker_url
        yield stack.enter_context(RunningBroker(url, workers=2, session=2.0))


async def take(consumer: Consumer, count: int) -> list[str]:
    """Take and ack so many; answers their bodies, sorted."""
    found = []
    for _ in range(count):
        message = await consumer.receive(timeout=PATIENCE)
        found.append((await message.data()).decode())
        await message.ack()
    return sorted(found)


async def publish(client: AsyncClient, topic: str, *bodies: str) -> None:
    """Publish bodies under keys of their own, and see that somebody is there for them."""
    answers = await client.publish_many(topic, [OutgoingMessage(body, key=body) for body in bodies])
    assert not any(answer.no_subscribers for answer in answers)


async def nothing_is_left(broker: RunningBroker, topic: str, partitions: int = 3) -> None:
    """Nobody has a place, the logs are empty, and no invariant is broken."""
    engine = Engine.connect(broker.redis_url)

    async def empty() -> bool:
        places = [await engine.places(topic, number, "news") for number in range(partitions)]
        logs = [
            await engine.store.command("XLEN", f"kl:{{{topic}:{number}}}:log") for number in range(partitions)
        ]
        return not any(places) and not any(logs)

    try:
        await until(empty)
        assert await check_topic(engine, topic) == []
    finally:
        await engine.close()


async def test_every_consumer_gets_what_is_published_while_it_is_registered(
    place: RunningBroker, topic: str
) -> None:
    async with AsyncClient(place.url) as client:
        await client.create_topic(topic, partitions=3)
        await client.create_subscription(topic, "news", mode="multicast")
        assert (await client.publish(topic, b"early")).no_subscribers
        async with client.subscribe(topic, "news", mode="multicast", name="anna") as anna:
            assert anna.mode == "multicast"
            await publish(client, topic, "1", "2", "3")
            async with client.subscribe(topic, "news", mode="multicast", name="bert") as bert:
                await publish(client, topic, "4", "5")
                assert await take(bert, 2) == ["4", "5"]
                about = await client.describe_subscription(topic, "news")
                assert (about.consumers, about.backlog, about.mode) == (["anna", "bert"], 5, "multicast")
                assert (await client.describe_topic(topic)).subscriptions == ["news"]
            assert await take(anna, 5) == ["1", "2", "3", "4", "5"]
        assert (await client.publish(topic, b"late")).no_subscribers
    await nothing_is_left(place, topic)


async def test_a_nack_brings_it_back_to_the_same_consumer_alone(place: RunningBroker, topic: str) -> None:
    async with AsyncClient(place.url) as client:
        await client.create_topic(topic, partitions=3)
        async with (
            client.subscribe(topic, "news", mode="multicast", name="anna") as anna,
            client.subscribe(topic, "news", mode="multicast", name="bert") as bert,
        ):
            await publish(client, topic, "1")
            message = await anna.receive(timeout=PATIENCE)
            assert await take(bert, 1) == ["1"]
            await message.nack(delay=0)
            again = await anna.receive(timeout=PATIENCE)
            assert (again.id, again.retry_count) == (message.id, 1)
            await again.ack()
            with pytest.raises(TimeoutError):
                await bert.receive(timeout=0.2)
    await nothing_is_left(place, topic)


async def test_who_is_away_for_less_than_its_session_misses_nothing(
    broker: RunningBroker, topic: str
) -> None:
    """Its connection breaks, and it comes back under its name."""
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=1)
        async with connect(broker.urls[0]) as peer:
            stream = Stream(peer, topic, "news", "anna")
            await stream.open(mode="multicast")
            await publish(client, topic, "1")
            [item] = await stream.receive(1)
        await publish(client, topic, "2")  # while it is away
        async with client.subscribe(topic, "news", mode="multicast", name="anna") as back:
            held = await back.receive(timeout=PATIENCE)
            assert (held.uid, held.retry_count) == (item.uid, 0)
            await held.ack()
            assert await take(back, 1) == ["2"]
    await nothing_is_left(broker, topic, 1)


async def test_a_place_goes_with_its_session_whoever_is_connected(topic: str) -> None:
    """Also when the worker that heard of it last has died meanwhile."""
    with RunningBroker(workers=2, session=2.0) as broker:
        async with AsyncClient(broker.url) as client:
            await client.create_topic(topic, partitions=1)
            for kill in (False, True):
                for url in broker.urls:
                    with contextlib.suppress(Elsewhere):
                        async with connect(url) as peer:
                            await Stream(peer, topic, "news", "anna").open(mode="multicast")
                await publish(client, topic, "1", "2")
                if kill:
                    broker.kill_worker(0)
        await nothing_is_left(broker, topic, 1)


async def test_a_consumer_stays_registered_while_workers_die(topic: str) -> None:
    with RunningBroker(workers=2) as broker:
        async with AsyncClient(broker.url) as client:
            await client.create_topic(topic, partitions=3)
            async with client.subscribe(topic, "news", mode="multicast", name="anna") as anna:
                await publish(client, topic, "1", "2", "3")
                broker.kill_worker(0)
                assert await take(anna, 3) == ["1", "2", "3"]
                await publish(client, topic, "4", "5", "6")
                broker.start_worker(0)
                broker.kill_worker(1)
                assert await take(anna, 3) == ["4", "5", "6"]
        await nothing_is_left(broker, topic)


async def test_many_consumers(broker: RunningBroker, topic: str) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=2)
        async with contextlib.AsyncExitStack() as stack:
            consumers = [
                await stack.enter_async_context(
                    client.subscribe(topic, "news", mode="multicast", name=f"c{n}")
                )
                for n in range(200)
            ]
            bodies = [str(number) for number in range(20)]
            await publish(client, topic, *bodies)
            found = await asyncio.gather(*(take(consumer, len(bodies)) for consumer in consumers))
            assert all(one == sorted(bodies) for one in found)
            about = await client.describe_subscription(topic, "news")
            assert (len(about.consumers), about.backlog) == (200, 0)
    await nothing_is_left(broker, topic, 2)


async def test_a_filter_holds_for_every_consumer(place: RunningBroker, topic: str) -> None:
    async with AsyncClient(place.url) as client:
        await client.create_topic(topic, partitions=3)
        await client.create_subscription(topic, "news", mode="multicast", keys="eu-*")
        async with (
            client.subscribe(topic, "news", mode="multicast", name="anna") as anna,
            client.subscribe(topic, "news", mode="multicast", name="bert") as bert,
        ):
            answers = await client.publish_many(
                topic, [OutgoingMessage(key, key=key) for key in ("eu-1", "us-1", "eu-2")]
            )
            assert [answer.no_subscribers for answer in answers] == [False, True, False]
            assert await take(anna, 2) == await take(bert, 2) == ["eu-1", "eu-2"]
    await nothing_is_left(place, topic)


async def test_what_makes_no_sense_is_refused(broker: RunningBroker, topic: str) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic)
        with pytest.raises(InvalidArgument, match="begins when it registers"):
            await client.create_subscription(topic, "news", mode="multicast", start="earliest")
        await client.create_subscription(topic, "news", mode="multicast")
        for call in (
            client.seek(topic, "news", "earliest"),
            client.pause_subscription(topic, "news"),
            client.peek(topic, "news"),
            client.explain(topic, "news", "0:1-1"),
            client.skip(topic, "news", "0:1-1"),
            client.purge(topic, "news"),
            client.parked(topic, "news"),
            client.unpark(topic, "news", "k"),
        ):
            with pytest.raises(InvalidArgument, match="place of its own"):
                await call
        async with client.subscribe(topic, "news", mode="multicast") as consumer:
            await publish(client, topic, "1")
            await client.delete_subscription(topic, "news")
            with pytest.raises(SubscriptionNotFound):
                await take(consumer, 2)
    await nothing_is_left(broker, topic, 1)


def test_the_client_without_await_and_the_command_line_have_it(place: RunningBroker, topic: str) -> None:
    ask_keylane(place, "topic", "create", topic, "--partitions", "3")
    made = ask_keylane(place, "subscription", "create", topic, "news", "--mode", "multicast", "--json")
    assert made["mode"] == "multicast"
    with (
        Client(place.url) as client,
        client.subscribe(topic, "news", mode="multicast", name="anna") as consumer,
    ):
        ask_keylane(place, "publish", topic, "hello", "--key", "k")
        message = consumer.receive(timeout=PATIENCE)
        assert message.data() == b"hello"
        shown = ask_keylane(place, "subscription", "list", topic, "--json")
        listed = shown if isinstance(shown, list) else [shown]
        assert [(one["name"], one["mode"], one["backlog"]) for one in listed] == [("news", "multicast", 1)]
        message.ack()
