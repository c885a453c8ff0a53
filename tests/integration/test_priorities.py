"""Priorities through the real client and the command line, on a server and on a cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from keylane import AsyncClient, Client, InvalidArgument, OutgoingMessage
from tests.support import commands
from tests.support.emptied import PLACES, broker_on, leaves_nothing
from tests.support.running import RunningBroker

pytestmark = pytest.mark.slow

SOON = 60.0  # seconds


@pytest.fixture(scope="module", params=PLACES)
def broker(request: pytest.FixtureRequest, server_binary: Path) -> Iterator[RunningBroker]:
    """A broker of two workers, on each of these."""
    with broker_on(request.param, server_binary) as broker:
        yield broker


async def test_larger_goes_first(broker: RunningBroker, topic: str) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s")
        await client.create_subscription(topic, "in-order", mode="failover")
        ranks = [None, 1, 9, 0, 5, 9]
        await client.publish_many(
            topic, [OutgoingMessage(f"{n}", priority=rank) for n, rank in enumerate(ranks)]
        )
        await client.publish(topic, "6", priority=7)
        commands.keylane("publish", topic, "7", "--priority", "8", KEYLANE_SERVER=broker.url)
        refused = commands.keylane(
            "publish", topic, "x", "--priority", "10", KEYLANE_SERVER=broker.url, status=2
        )
        assert "priority" in refused.stderr
        with pytest.raises(InvalidArgument, match="priority is 10"):
            await client.publish(topic, "x", priority=10)
        for name, mode, expected in (("s", "shared", "25764103"), ("in-order", "failover", "01234567")):
            found = []
            async with client.subscribe(topic, name, mode=mode, permits=1) as consumer:  # type: ignore[arg-type]
                for _ in expected:
                    message = await consumer.receive(SOON)
                    found.append((await message.data()).decode())
                    await message.ack()
            assert "".join(found) == expected
    await leaves_nothing(broker, topic)


def test_a_flood_of_them_is_delivered_once_each(broker: RunningBroker, topic: str) -> None:
    count = 3_000
    with Client(broker.url) as client:
        client.create_topic(topic, partitions=2)
        client.create_subscription(topic, "s")
        client.publish_many(topic, [OutgoingMessage(f"{n}", priority=n % 10) for n in range(count)])
        found = []
        with client.subscribe(topic, "s", permits=100) as consumer:
            for _ in range(count):
                with consumer.receive(SOON) as message:
                    found.append(int(message.data()))
        assert sorted(found) == list(range(count))
