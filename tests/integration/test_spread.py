"""Spread: how many workers a topic concentrates on, as a setting that clients and commands change."""

import json
from pathlib import Path

import pytest

from keylane import AsyncClient, InvalidArgument
from tests.support import commands
from tests.support.emptied import PLACES, broker_on
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("place", PLACES)
async def test_partitions_go_to_as_many_workers_as_the_spread_says(
    topic: str, place: str, server_binary: Path
) -> None:
    with broker_on(place, server_binary, workers=4) as broker:
        async with AsyncClient(broker.url) as client:

            async def is_on(count: int) -> bool:
                found = [about.worker for about in await client.partitions(topic)]
                each = [found.count(worker) for worker in set(found)]
                return len(each) == count and all(found) and max(each) - min(each) <= 1

            made = await client.create_topic(topic, partitions=8, spread=4)
            assert made.spread == 4
            await client.create_topic(f"{topic}-even", partitions=8)
            await client.create_subscription(topic, "s")
            await until(lambda: is_on(1))
            assert (await client.change_topic(topic, spread=2)).spread == 2
            await until(lambda: is_on(2))
            held = {about.worker for about in await client.partitions(topic)}
            [outside, *_] = sorted(set(broker.ids) - held)
            with pytest.raises(InvalidArgument, match="has a spread of 2: its partitions stay on"):
                await client.move_partition(topic, 0, outside)
            await client.delete_topic(f"{topic}-even")  # so that counts are not even any more
            said = commands.keylane(
                "topic", "change", topic, "--spread", "1", KEYLANE_SERVER=broker.url
            ).stdout
            assert said == f"the partitions of topic {topic!r} go to all workers\n"
            await until(lambda: is_on(4))
            told = commands.keylane("topic", "describe", topic, "--json", KEYLANE_SERVER=broker.url).stdout
            assert json.loads(told)["spread"] == 1
            with pytest.raises(InvalidArgument, match="spread is 9"):
                await client.change_topic(topic, spread=9)
            counts = [about.worker for about in await client.partitions(topic)]
            assert sorted(counts.count(worker) for worker in broker.ids) == [2, 2, 2, 2]
            async with client.subscribe(topic, "s") as consumer:
                for number in range(8):
                    await client.publish(topic, f"{number}", partition=number)
                found = []
                for _ in range(8):
                    message = await consumer.receive(60.0)
                    found.append(int(await message.data()))
                    await message.ack()
            assert sorted(found) == list(range(8))
