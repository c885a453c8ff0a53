"""Filters through the real client and the command line, on one server and on a Redis Cluster."""

import contextlib
from collections.abc import Iterator

import pytest

from keylane import (
    AsyncClient,
    Client,
    Consumer,
    InvalidArgument,
    OutgoingMessage,
    SubscriptionExists,
)
from keylane.types import Mode
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from loadtest.topology import three_node_cluster
from tests.support.commands import ask_keylane
from tests.support.running import RunningBroker
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # a cluster is three processes

PATIENCE = 60.0
MODES: tuple[Mode, ...] = ("shared", "key_shared", "exclusive", "failover")


@pytest.fixture(scope="module", params=["one server", "cluster"])
def place(request: pytest.FixtureRequest, server_binary: str) -> Iterator[RunningBroker]:
    """Two workers on one server, or on a cluster of three."""
    with contextlib.ExitStack() as stack:
        url = None
        if request.param == "cluster":
            url = stack.enter_context(three_node_cluster(binary=server_binary)).broker_url
        yield stack.enter_context(RunningBroker(url, workers=2))


async def keys_of(consumer: Consumer, count: int) -> list[str | None]:
    """Take and ack so many; answers their keys, sorted."""
    keys = []
    for _ in range(count):
        message = await consumer.receive(timeout=PATIENCE)
        await message.ack()
        keys.append(message.key)
    return sorted(keys, key=str)


async def check(place: RunningBroker, topic: str) -> None:
    """Nothing is wrong, and nothing is left."""
    engine = Engine.connect(place.redis_url)
    try:
        assert await check_topic(engine, topic) == []
        logs = [await engine.store.command("XLEN", f"kl:{{{topic}:{n}}}:log") for n in range(3)]
        assert logs == [0, 0, 0]
    finally:
        await engine.close()


@pytest.mark.parametrize("mode", MODES)
async def test_a_consumer_gets_what_matches_and_nothing_else(
    place: RunningBroker, topic: str, mode: Mode
) -> None:
    async with AsyncClient(place.url) as client:
        await client.create_topic(topic, partitions=3)
        async with client.subscribe(
            topic, "europe", mode=mode, keys="eu-*", filter={"kind": "order", "urgent": None}
        ) as consumer:
            wanted = {"kind": "order", "urgent": "no"}
            messages = [
                OutgoingMessage(b"x", key=f"{region}-{n}", attributes=attributes)
                for n in range(50)
                for region in ("eu", "us")
                for attributes in (wanted, {"kind": "order"}, {**wanted, "kind": "bill"})
            ]
            published = await client.publish_many(topic, messages)
            stored = [one for one in published if not one.no_subscribers]
            assert len({one.id for one in stored}) == len(stored) == 50
            assert all(one.id is None for one in published if one.no_subscribers)
            assert await keys_of(consumer, 50) == sorted(f"eu-{n}" for n in range(50))
            with pytest.raises(TimeoutError):
                await consumer.receive(timeout=0.1)
        about = await client.describe_subscription(topic, "europe")
        assert (about.keys, about.filter, about.backlog) == ("eu-*", {"kind": "order", "urgent": None}, 0)
    await check(place, topic)


async def test_what_was_there_before_is_looked_through(place: RunningBroker, topic: str) -> None:
    async with AsyncClient(place.url) as client:
        await client.create_topic(topic, partitions=3)
        await client.create_subscription(topic, "all")
        await client.publish_many(topic, [OutgoingMessage(b"x", key=f"k-{n}") for n in range(3_000)])
        await client.create_subscription(topic, "some", keys="k-*99", start="earliest")
        assert (await client.describe_subscription(topic, "some")).backlog == 30
        async with client.subscribe(topic, "some") as consumer:
            assert await keys_of(consumer, 30) == sorted(f"k-{n}" for n in range(99, 3_000, 100))
        await client.seek(topic, "some", "earliest")
        async with client.subscribe(topic, "some", keys="k-*99") as consumer:
            assert len(await keys_of(consumer, 30)) == 30
        async with client.subscribe(topic, "all") as consumer:
            assert len(await keys_of(consumer, 3_000)) == 3_000
    await check(place, topic)


async def test_bodies_of_what_nobody_wants_do_not_stay(broker: RunningBroker, topic: str) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic)
        await client.create_subscription(topic, "s", filter={"region": "eu"})
        messages = [OutgoingMessage(b"body", attributes={"region": "us"}) for _ in range(20)]
        assert all(one.no_subscribers for one in await client.publish_many(topic, messages))
        assert (await client.publish(topic, b"body")).no_subscribers
        engine = Engine.connect(broker.redis_url)
        try:

            async def gone() -> bool:
                return not await engine.store.keys_like(f"kl:bodies:{topic}:*")

            await until(gone)
        finally:
            await engine.close()


async def test_another_filter_is_refused_and_says_what_differs(broker: RunningBroker, topic: str) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic)
        await client.create_subscription(topic, "s", keys="eu-*")
        with pytest.raises(SubscriptionExists, match=r"has keys eu-\*, not us-\*"):
            async with client.subscribe(topic, "s", keys="us-*"):
                pass
        with pytest.raises(SubscriptionExists, match=r"has filter None, not {'a': None}"):
            async with client.subscribe(topic, "s", keys="eu-*", filter={"a": None}):
                pass
        with pytest.raises(SubscriptionExists, match=r"has keys eu-\*, not None"):
            await client.create_subscription(topic, "s", exist_ok=True)
        async with client.subscribe(topic, "s") as consumer:  # as it is
            await client.publish(topic, key="eu-1")
            assert await keys_of(consumer, 1) == ["eu-1"]
        for bad in ("[", "", "[z-a]"):
            with pytest.raises(InvalidArgument, match="keys"):
                await client.create_subscription(topic, "t", keys=bad)
        with pytest.raises(InvalidArgument, match="filter"):
            await client.create_subscription(topic, "t", filter=["a"])  # type: ignore[arg-type]


def test_the_client_without_await_has_them_too(place: RunningBroker, topic: str) -> None:
    with Client(place.url) as client:
        client.create_topic(topic, partitions=3)
        client.create_subscription(topic, "s", keys="a*", filter={"x": None})
        with client.subscribe(topic, "s", keys="a*", filter={"x": None}) as consumer:
            client.publish_many(
                topic, [OutgoingMessage(key=key, attributes={"x": "1"}) for key in ("b", "ab", "ba")]
            )
            message = consumer.receive(timeout=PATIENCE)
            assert message.key == "ab"
            message.ack()


def test_the_command_line_has_them(place: RunningBroker, topic: str) -> None:
    ask_keylane(place, "topic", "create", topic, "--partitions", "3")
    arguments = ("--keys", "eu-*", "--filter", "kind=order", "--filter", "urgent")
    made = ask_keylane(place, "subscription", "create", topic, "s", *arguments, "--json")
    assert (made["keys"], made["filter"]) == ("eu-*", {"kind": "order", "urgent": None})
    ask_keylane(place, "subscription", "create", topic, "s", *arguments, "--exist-ok")
    assert "has keys eu-*, not us-*" in ask_keylane(
        place, "subscription", "create", topic, "s", "--keys", "us-*", "--exist-ok", status=1
    )
    assert "--filter needs a name" in ask_keylane(
        place, "subscription", "create", topic, "t", "--filter", "=eu", status=2
    )
    attributes = ("--attr", "kind=order", "--attr", "urgent=no")
    said = ask_keylane(place, "publish", topic, "no", "--key", "us-1", *attributes, "--json")
    assert (said["id"], said["no_subscribers"]) == (None, True)
    said = ask_keylane(place, "publish", topic, "yes", "--key", "eu-1", *attributes, "--json")
    assert said["id"] is not None
    shown = ask_keylane(place, "subscription", "describe", topic, "s")
    assert "eu-*" in shown
    shown = ask_keylane(place, "subscribe", topic, "s", "--max", "1", *arguments, "--json")
    assert shown["data"] == "yes"
    assert "has filter" in ask_keylane(
        place, "subscribe", topic, "s", "--max", "1", "--keys", "eu-*", "--filter", "kind=bill", status=1
    )
