"""A worker that dies in the middle: the client comes back by itself, and nothing is lost or out of order."""

import asyncio
from collections import defaultdict

import pytest

from keylane import AsyncClient, OutgoingMessage, Published
from keylane.types import Mode
from tests.support.running import RunningBroker

MESSAGES = 6_000
KEYS = 20
PATIENCE = 60.0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive"])
async def test_a_killed_worker_costs_neither_messages_nor_order(topic: str, mode: Mode) -> None:
    with RunningBroker() as broker:
        async with AsyncClient(broker.url, timeout=PATIENCE) as client, asyncio.timeout(PATIENCE):
            await client.create_topic(topic, partitions=2)
            await client.create_subscription(topic, "s", mode=mode, lease=5)
            publishing = asyncio.ensure_future(publish(client, topic))
            seen: dict[str, list[int]] = defaultdict(list)
            acked: set[int] = set()
            again: set[int] = set()
            async with client.subscribe(topic, "s", mode=mode, permits=500) as consumer:
                kills = [MESSAGES // 4, MESSAGES // 2]
                async for batch in consumer.batches(max_messages=100):
                    numbers = [int(body) for body in await batch.data()]
                    again.update(acked.intersection(numbers))
                    for message, number in zip(batch, numbers, strict=True):
                        assert message.key is not None
                        seen[message.key].append(number)
                    outcomes = await consumer.ack(batch)
                    acked.update(
                        number
                        for number, outcome in zip(numbers, outcomes, strict=True)
                        if outcome == "settled"
                    )
                    if kills and len(acked) > kills[0]:
                        kills.pop(0)
                        broker.kill_worker()
                        broker.start_worker()
                    if publishing.done() and (await client.describe_subscription(topic, "s")).backlog == 0:
                        break
            published = await publishing
            assert len({answer.id for answer in published}) == MESSAGES
            assert again == set(), "what was acked is not delivered again"
            for key in range(KEYS):
                expected = list(range(key, MESSAGES, KEYS))
                assert sorted(set(seen[f"k{key}"])) == expected
                if mode != "shared":
                    assert rewound(seen[f"k{key}"]) == expected


async def publish(client: AsyncClient, topic: str) -> list[Published]:
    """In calls of a few hundred, so that the kills fall into the middle of it."""
    published = []
    for start in range(0, MESSAGES, 300):
        published += await client.publish_many(
            topic, [OutgoingMessage(str(n), key=f"k{n % KEYS}") for n in range(start, start + 300)]
        )
    return published


def rewound(numbers: list[int]) -> list[int]:
    """What was seen, with what a rewind delivered again taken out; a skip stays visible."""
    kept: list[int] = []
    for number in numbers:
        while kept and kept[-1] >= number:
            kept.pop()
        kept.append(number)
    return kept


@pytest.mark.slow
async def test_while_the_server_is_away_publishes_wait_and_then_go_through(topic: str) -> None:
    with RunningBroker() as broker:
        async with AsyncClient(broker.url, timeout=PATIENCE) as client:
            await client.create_topic(topic, partitions=2)
            await client.create_subscription(topic, "s")
            await client.publish(topic, b"before")
            assert not isinstance(broker.server, str)
            broker.server.kill()
            waiting = asyncio.ensure_future(
                client.publish_many(topic, [OutgoingMessage(str(n), key="k") for n in range(100)])
            )
            await asyncio.wait({waiting}, timeout=0.3)
            assert not waiting.done()
            broker.server.start()
            published = await asyncio.wait_for(waiting, PATIENCE)
            assert len({answer.id for answer in published}) == 100
            async with client.subscribe(topic, "s") as consumer:
                bodies: list[bytes] = []
                while len(bodies) < 101:
                    message = await consumer.receive(timeout=PATIENCE)
                    bodies.append(await message.data())
                    await message.ack()
            assert sorted(bodies) == sorted([b"before", *(b"%d" % n for n in range(100))])
