"""Hot keys through client and command line, from all workers that serve the topic."""

import json
from pathlib import Path

import pytest

from keylane import AsyncClient, Client, OutgoingMessage
from tests.support import commands
from tests.support.emptied import PLACES, broker_on


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
async def test_the_keys_under_which_most_is_published_are_named_with_their_share(
    topic: str, place: str, server_binary: Path
) -> None:
    with broker_on(place, server_binary) as pair:
        async with AsyncClient(pair.url) as client:
            await client.create_topic(topic, partitions=8)
            await client.create_subscription(topic, "s")
            assert await client.hot_keys(topic) == []
            keys = [f"cold-{number % 1_000}" for number in range(12_000)] + ["hot"] * 6_000 + ["warm"] * 2_000
            keys.sort(key=lambda key: hash((key, len(key))))
            for at in range(0, len(keys), 500):
                await client.publish_many(topic, [OutgoingMessage(key=key) for key in keys[at : at + 500]])
            hot, warm, *_ = await client.hot_keys(topic)
            assert (hot.key, warm.key) == ("hot", "warm")
            assert abs(hot.share - 0.3) <= 2 * hot.error
            assert abs(warm.share - 0.1) <= 2 * warm.error
        with Client(pair.url) as sync:
            assert sync.hot_keys(topic, limit=1) == [hot]
        found = json.loads(commands.keylane("hot-keys", topic, "--json", KEYLANE_SERVER=pair.url).stdout)
        assert found[0]["key"] == "hot"
        assert "hot" in commands.keylane("topic", "describe", topic, KEYLANE_SERVER=pair.url).stdout
