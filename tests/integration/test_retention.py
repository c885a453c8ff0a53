"""Retention and replay as applications see them, by clients and commands, on a server and on a cluster."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from keylane import AsyncClient, Client, InvalidArgument, OutgoingMessage
from tests.support import commands
from tests.support.emptied import PLACES, broker_on, is_empty, leaves_nothing
from tests.support.running import RunningBroker
from tests.support.waiting import until, wait_until

pytestmark = pytest.mark.slow

SOON = 60.0  # seconds


@pytest.fixture(scope="module", params=PLACES)
def broker(request: pytest.FixtureRequest, server_binary: Path) -> Iterator[RunningBroker]:
    """A broker of two workers, on each of these."""
    with broker_on(request.param, server_binary) as broker:
        yield broker


@pytest.fixture
async def client(broker: RunningBroker) -> AsyncIterator[AsyncClient]:
    """A client of the broker."""
    async with AsyncClient(broker.url) as client:
        yield client


async def take(client: AsyncClient, topic: str, name: str, count: int, start: str = "latest") -> list[str]:
    """The next bodies of a subscription, sorted; all acked."""
    found = []
    async with client.subscribe(topic, name, start=start) as consumer:
        for _ in range(count):
            message = await consumer.receive(timeout=SOON)
            found.append((await message.data()).decode())
            await message.ack()
    return sorted(found)


async def test_a_topic_that_does_not_say_retains_what_the_broker_is_set_to(topic: str) -> None:
    with RunningBroker(retention=90) as broker:
        async with AsyncClient(broker.url) as client:
            assert (await client.create_topic(topic)).retention == 90
            assert (await client.create_topic(topic, exist_ok=True)).retention == 90
            options: list[tuple[dict[str, Any], tuple[int | None, int | None]]] = [
                ({"retention": 0}, (None, None)),
                ({"retention": 5}, (5, None)),
                ({"retention_bytes": 7}, (None, 7)),
            ]
            for number, (said, retained) in enumerate(options):
                about = await client.create_topic(f"{topic}-{number}", **said)
                assert (about.retention, about.retention_bytes) == retained
            assert (await client.change_topic(topic, retention=None)).retention is None


async def test_settled_messages_are_replayed_from_any_position_and_then_go_with_their_bodies(
    broker: RunningBroker, client: AsyncClient, topic: str
) -> None:
    made = await client.create_topic(topic, partitions=2, retention=timedelta(hours=1))
    assert (made.retention, made.retention_bytes) == (3_600.0, None)
    await client.create_subscription(topic, "s")
    first = await client.publish_many(topic, [OutgoingMessage(f"{n}", partition=0) for n in range(3)])
    await asyncio.sleep(0.01)  # so that they have times of their own
    await client.publish_many(topic, [OutgoingMessage(f"{n}", partition=1) for n in range(3, 6)])
    everything = [str(n) for n in range(6)]
    peeked = await client.peek(topic, "s", partition=1)
    assert await take(client, topic, "s", 6) == everything
    assert (await client.describe_topic(topic)).messages == 6

    await client.seek(topic, "s", "earliest")
    assert await take(client, topic, "s", 6) == everything
    await client.seek(topic, "s", str(first[1].id))
    assert await take(client, topic, "s", 2) == ["1", "2"]
    await client.seek(topic, "s", peeked[0].published_at)
    assert await take(client, topic, "s", 3) == ["3", "4", "5"]
    assert await take(client, topic, "late", 6, "earliest") == everything
    await client.seek(topic, "late", "latest")

    changed = await client.change_topic(topic, retention=0.5)
    assert changed.retention == 0.5
    await until(lambda: is_empty(client, topic))
    await leaves_nothing(broker, topic)


async def test_an_idle_topic_is_trimmed_also_after_its_worker_is_killed(
    broker: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=4, retention=3.0)
    await client.create_subscription(topic, "s", mode="key_shared", start="latest")
    await client.publish_many(topic, [OutgoingMessage("x", key=f"k{n}") for n in range(50)])
    assert await take_all(client, topic, "s", 50)
    assert (await client.describe_topic(topic)).messages == 50
    broker.kill_worker(1)
    broker.start_worker(1)
    await until(lambda: is_empty(client, topic))
    await leaves_nothing(broker, topic)


async def take_all(client: AsyncClient, topic: str, name: str, count: int) -> bool:
    """Ack all of a subscription, whatever its mode."""
    async with client.subscribe(topic, name, mode=None) as consumer:
        messages = [await consumer.receive(timeout=SOON) for _ in range(count)]
        return set(await consumer.ack(messages)) == {"settled"}


async def test_bytes_and_at_most_once(broker: RunningBroker, client: AsyncClient, topic: str) -> None:
    """What was delivered at most once is retained with its body, too: no client deletes it."""
    await client.create_topic(topic, partitions=1, retention_bytes=1_000)
    await client.create_subscription(topic, "s", delivery="at_most_once")
    await client.publish_many(topic, [OutgoingMessage(f"{n:0400}") for n in range(2)])
    async with client.subscribe(topic, "s") as consumer:
        for n in range(2):
            assert int(await (await consumer.receive(timeout=SOON)).data()) == n
    assert await take(client, topic, "late", 2, "earliest") == [f"{n:0400}" for n in range(2)]
    await client.publish(topic, "x" * 700)
    await take(client, topic, "late", 1)
    async with client.subscribe(topic, "s") as consumer:
        await consumer.receive(timeout=SOON)
    await client.change_topic(topic, retention_bytes=800)  # it is looked at once
    await until(lambda: has_messages(client, topic, 1))
    await client.change_topic(topic, retention_bytes=None)
    await until(lambda: is_empty(client, topic))
    await leaves_nothing(broker, topic)


async def has_messages(client: AsyncClient, topic: str, count: int) -> bool:
    """Whether the logs have so many."""
    return (await client.describe_topic(topic)).messages == count


def test_without_await_and_for_ever(broker: RunningBroker, topic: str) -> None:
    with Client(broker.url) as client:
        made = client.create_topic(topic, partitions=1, retention="forever")
        assert made.retention == "forever"
        published = client.publish(topic, b"kept")  # with nobody there
        assert published.id is not None
        with client.subscribe(topic, "s", start="earliest") as consumer, consumer.receive(SOON) as message:
            assert message.data() == b"kept"
        for wrong in ("for ever", -1, True):
            with pytest.raises(InvalidArgument, match="retention is"):
                client.change_topic(topic, retention=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="retention_bytes is"):
            client.create_topic(topic, retention_bytes=0)
        assert client.describe_topic(topic).messages == 1
        client.change_topic(topic, retention=None)
        wait_until(lambda: client.describe_topic(topic).messages == 0)


def test_commands(broker: RunningBroker, topic: str) -> None:
    def keylane(*arguments: str, status: int = 0) -> str:
        done = commands.keylane(*arguments, status=status, KEYLANE_SERVER=broker.url)
        return done.stderr if status else done.stdout

    made = json.loads(keylane("topic", "create", topic, "--partitions", "1", "--retention", "3600", "--json"))
    assert (made["retention"], made["retention_bytes"]) == (3_600.0, None)
    ids = [json.loads(keylane("publish", topic, f"{n}", "--json"))["id"] for n in range(3)]
    everything = keylane("subscribe", topic, "s", "--offset", "earliest", "--max", "3", "--json").splitlines()
    assert [json.loads(line)["id"] for line in everything] == ids
    again = keylane("subscribe", topic, "by-id", "--offset", ids[1], "--max", "2", "--json").splitlines()
    assert [json.loads(line)["id"] for line in again] == ids[1:]
    keylane("subscription", "seek", topic, "s", "earliest")
    assert len(keylane("subscribe", topic, "s", "--max", "3", "--json").splitlines()) == 3
    hour_ago = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    keylane("subscription", "seek", topic, "s", hour_ago)
    assert len(keylane("subscribe", topic, "s", "--max", "3", "--json").splitlines()) == 3
    assert f"topic {topic!r} retains settled messages up to 5,000 bytes" in keylane(
        "topic", "change", topic, "--retention", "forever", "--retention-bytes", "5000"
    )
    assert "neither a number" in keylane("topic", "change", topic, "--retention", "long", status=2)
    assert "retains nothing" in keylane(
        "topic", "change", topic, "--retention", "0", "--retention-bytes", "0"
    )
    assert json.loads(keylane("topic", "describe", topic, "--json"))["messages"] == 0
