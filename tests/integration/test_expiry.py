"""Messages that expire, as applications see them, by clients and commands, on a server and on a cluster."""

import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from keylane import AsyncClient, Client, InvalidArgument, OutgoingMessage
from tests.support import commands
from tests.support.emptied import PLACES, broker_on, is_empty, leaves_nothing
from tests.support.running import RunningBroker
from tests.support.waiting import until

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


@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive", "failover"])
async def test_nobody_gets_what_has_expired_and_its_key_goes_on(
    broker: RunningBroker,
    client: AsyncClient,
    topic: str,
    mode: str,
) -> None:
    await client.create_topic(topic, partitions=1, journal=True)
    await client.create_subscription(topic, "s", mode=mode)  # type: ignore[arg-type]
    await client.publish_many(
        topic,
        [
            OutgoingMessage("1", key="a"),
            OutgoingMessage("2", key="a", ttl=timedelta(milliseconds=200)),
            OutgoingMessage("3", key="a", expires_at=datetime.now(UTC) + timedelta(hours=1)),
            OutgoingMessage("4", key="b", delay=0.1, ttl=0.1),
            OutgoingMessage("5", key="a", ttl=3_600),
        ],
    )

    async def are_left() -> bool:  # also while nobody asks for them
        about = await client.describe_topic(topic)
        return (about.messages, about.delayed) == (3, 0)

    await until(are_left)
    async with client.subscribe(topic, "s", mode=mode) as consumer:  # type: ignore[arg-type]
        for number in (1, 3, 5):
            message = await consumer.receive(timeout=SOON)
            assert int(await message.data()) == number
            await message.ack()
    assert await is_empty(client, topic)
    await leaves_nothing(broker, topic)


async def test_what_is_in_hands_may_be_finished(
    broker: RunningBroker,
    client: AsyncClient,
    topic: str,
) -> None:
    await client.create_topic(topic, partitions=1, ttl=1.0)
    await client.create_subscription(topic, "other")
    async with client.subscribe(topic, "s") as consumer:
        await client.publish_many(topic, [OutgoingMessage(f"{n}") for n in range(2)])
        first, second = [await consumer.receive(timeout=SOON) for _ in range(2)]

        async def has_expired() -> bool:
            return (await client.info()).time > first.published_at + timedelta(seconds=1.5)

        await until(has_expired)
        assert await first.data() == b"0"
        await first.ack()
        await second.nack(delay=0)
        await until(lambda: is_empty(client, topic))
        with pytest.raises(TimeoutError):
            await consumer.receive(timeout=0.2)
    async with client.subscribe(topic, "other") as consumer:
        with pytest.raises(TimeoutError):
            await consumer.receive(timeout=0.2)
    await leaves_nothing(broker, topic)


def test_commands_and_the_client_without_await(broker: RunningBroker, topic: str) -> None:
    def keylane(*arguments: str) -> str:
        return commands.keylane(*arguments, KEYLANE_SERVER=broker.url).stdout

    made = json.loads(keylane("topic", "create", topic, "--partitions", "1", "--ttl", "0.1", "--json"))
    assert made["ttl"] == 0.1
    with Client(broker.url) as client:
        client.create_subscription(topic, "s")
        client.publish(topic, "by the topic")
        keylane("publish", topic, "by itself", "--ttl", "3600")
        keylane("publish", topic, "at a time", "--expires-at", "2099-01-01T00:00")
        shown = keylane("subscribe", topic, "s", "--max", "2", "--json").splitlines()
        assert [json.loads(line)["data"] for line in shown] == ["by itself", "at a time"]
        with pytest.raises(InvalidArgument, match="both ttl and expires_at"):
            client.publish(topic, "x", ttl=1, expires_at=datetime.now(UTC))
        with pytest.raises(InvalidArgument, match="ttl is"):
            client.publish(topic, "x", ttl=-1)
    assert "never expire" in keylane("topic", "change", topic, "--ttl", "0")
    assert "expire after 60 s" in keylane("topic", "change", topic, "--ttl", "60")


@pytest.fixture(scope="module")
def patient() -> Iterator[RunningBroker]:
    """A broker that looks at sessions hardly ever: only what it is told makes it look."""
    with RunningBroker(session=20 * SOON) as broker:
        yield broker


@pytest.mark.parametrize("mode", ["key_shared", "exclusive"])
@pytest.mark.parametrize("held", [False, True], ids=["free", "held by another"])
async def test_a_head_that_expires_while_it_waits_lets_its_lane_go_on(
    patient: RunningBroker, topic: str, mode: str, held: bool
) -> None:
    """Also where somebody of another subscription has it, so that it stays in the log."""
    async with AsyncClient(patient.url) as client:
        await client.create_topic(topic, partitions=1)
        for name in ("s", "other"):
            await client.create_subscription(topic, name, mode=mode)  # type: ignore[arg-type]
        async with (
            client.subscribe(topic, "s", mode=None) as consumer,
            client.subscribe(topic, "other", mode=None) as another,
        ):
            await client.publish_many(
                topic, [OutgoingMessage("1", key="a", ttl=1.0), OutgoingMessage("2", key="a")]
            )
            first = await consumer.receive(timeout=SOON)
            theirs = await another.receive(timeout=SOON)
            if not held:
                await theirs.ack()
            await first.nack(delay=3 * SOON)
            second = await consumer.receive(timeout=SOON)
            assert await second.data() == b"2"
