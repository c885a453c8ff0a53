"""Moving a free key to a consumer, by the client and by the command, on a server and on a cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from keylane import AsyncClient, InvalidArgument, MessageLeased
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


async def test_the_named_consumer_gets_the_key_next(broker: RunningBroker, topic: str) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=2)
        await client.create_subscription(topic, "s", mode="key_shared")
        await client.create_subscription(topic, "t")
        async with (
            client.subscribe(topic, "s", mode="key_shared", name="big", permits=500),
            client.subscribe(topic, "s", mode="key_shared", name="small", permits=4) as small,
        ):
            assert await client.move_key(topic, "s", "hot", "small") == 0
            await client.publish(topic, "1", key="hot")
            message = await small.receive(SOON)
            assert await message.data() == b"1"
            with pytest.raises(MessageLeased, match="'small' has messages of key 'hot'"):
                await client.move_key(topic, "s", "hot", "big")
            await message.ack()
            move = ["lanes", "move", topic, "s", "--key", "cold", "--consumer"]
            said = commands.keylane(*move, "small", KEYLANE_SERVER=broker.url).stdout
            assert said == "key 'cold' goes to consumer 'small' next (0 messages wait)\n"
            await client.publish(topic, "2", key="cold")
            message = await small.receive(SOON)
            assert await message.data() == b"2"
            await message.ack()
            refused = commands.keylane(*move, "nobody", KEYLANE_SERVER=broker.url, status=1).stderr
            assert "no consumer 'nobody' is connected" in refused
            with pytest.raises(InvalidArgument, match="has mode shared"):
                await client.move_key(topic, "t", "hot", "small")
        await client.purge(topic)
    await leaves_nothing(broker, topic)
