"""The audit where messages have come to every end there is: it is complete, and a theft is named.

KEYLANE_AUDIT_MESSAGES=200000 makes a large one of it.
"""

import os
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import anyio
import pytest

from keylane import AsyncClient, Client, OutgoingMessage
from keylane_broker.engine.engine import Engine
from keylane_broker.store.keys import partition_keys
from keylane_broker.store.store import Store
from keylane_spark.auditing.findings import Audit
from tests.pipeline.audits import audited
from tests.pipeline.inbox import problems_of
from tests.support.running import RunningBroker
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_600)]

MESSAGES = int(os.environ.get("KEYLANE_AUDIT_MESSAGES", "3000"))
PARTITIONS = 3
JOURNAL = 10_000_000  # records of a partition
BATCH = 1_000
SINGLE = 30  # messages that are deleted, and as many that are skipped, one by one
PURGED = 50  # messages that go with a purge of the topic
KINDS = (
    "again",
    "never",
    "brief",
    *["plain"] * 7,
)  # by number: those that fail and are redriven, or purged; with a TTL


def message(number: int) -> OutgoingMessage:
    """One of each ten is for the subscription with a filter."""
    kind = KINDS[number % 10]
    attributes = {"kind": kind, "region": "eu" if number % 10 == 5 else "us"}
    ttl = 0.05 if kind == "brief" else None
    return OutgoingMessage(f"body {number}", f"customer-{number % 997}", attributes, ttl=ttl)


async def make(client: AsyncClient, topic: str) -> None:
    """The topic and its dead letters, both with journals, and who is subscribed."""
    dead = f"{topic}.dead"
    for name in (topic, dead):
        await client.create_topic(name, partitions=PARTITIONS, journal=JOURNAL)
    await client.create_subscription(topic, "billing", max_retries=0)
    await client.create_subscription(topic, "europe", filter={"region": "eu"})
    await client.create_subscription(topic, "asleep")
    await client.create_subscription(dead, "alarms")


async def publish(client: AsyncClient, topic: str, count: int) -> list[str]:
    """So many messages; answers their ids."""
    ids: list[str] = []
    for start in range(0, count, BATCH):
        batch = [message(number) for number in range(start, min(start + BATCH, count))]
        ids += [str(answer.id) for answer in await client.publish_many(topic, batch)]
    return ids


async def consume(client: AsyncClient, topic: str, name: str, failing: Collection[str]) -> None:
    """Ack what comes until cancelled, but not what is of a kind that fails."""
    async with client.subscribe(topic, name, mode=None) as consumer:
        async for batch in consumer.batches(max_messages=BATCH, max_wait=0.1):
            messages = list(batch)
            for kind in failing:
                some = [one for one in messages if one.attributes["kind"] == kind]
                await consumer.nack(some, delay=0, reason=kind)
            await consumer.ack([one for one in messages if one.attributes["kind"] not in failing])


async def settle(
    client: AsyncClient,
    topic: str,
    names: tuple[str, ...] = ("billing", "europe"),
    failing: Collection[str] = (),
) -> None:
    """Consume until nothing is left, nor on its way to the dead letters."""

    async def is_over() -> bool:
        return not any([(await client.describe_subscription(topic, name)).backlog for name in names])

    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(consume, client, topic, name, failing)
        await until(is_over)
        group.cancel_scope.cancel()


async def empty(url: str, topic: str, command: str, part: str) -> None:
    """Wait until a key of each partition is empty."""
    engine = Engine.connect(url)
    keys = [getattr(partition_keys(topic, number), part) for number in range(PARTITIONS)]

    async def is_empty() -> bool:
        return not any([await engine.store.command(command, key) for key in keys])

    await until(is_empty)
    await engine.close()


async def tell_the_story(broker: RunningBroker, topic: str) -> None:
    """Every message comes to one of its ends, for each subscription."""
    async with AsyncClient(broker.url, timeout=120) as client:
        await make(client, topic)
        ids = await publish(client, topic, MESSAGES)
        plain = [id for number, id in enumerate(ids) if KINDS[number % 10] == "plain"]
        for id in plain[:SINGLE]:
            await client.delete_message(topic, id)
        for id in plain[SINGLE : 2 * SINGLE]:
            await client.skip(topic, "asleep", id)
        await empty(broker.redis_url, topic, "ZCARD", "expiring")
        await settle(client, topic, failing=("again", "never"))
        for part in ("dead", "outbox"):
            await empty(broker.redis_url, topic, "XLEN", part)
        expected = sum(KINDS[number % 10] == "again" for number in range(MESSAGES))
        assert await client.redrive(topic, reason="again") == expected
        assert await client.purge_dead_letters(topic, reason="never") == expected
        await empty(broker.redis_url, f"{topic}.dead", "XLEN", "outbox")
        await settle(client, topic)
        assert await client.purge(topic, "asleep")
        await publish(client, topic, PURGED)
        assert await client.purge(topic)


def counts(found: Audit) -> dict[str, Counter[str]]:
    """What has happened to messages, by subscription."""
    return {one.name: Counter(one.transitions) for one in found.subscriptions}


def test_every_end_of_a_message_is_accounted_for_and_a_theft_is_named(tmp_path: Path, topic: str) -> None:
    with RunningBroker() as broker:
        start = time.monotonic()
        anyio.run(tell_the_story, broker, topic)
        told = time.monotonic()
        found, dead = (audited(broker, name, tmp_path / name) for name in (topic, f"{topic}.dead"))
        print(f"{MESSAGES} messages: {told - start:.1f} s, two audits {time.monotonic() - told:.1f} s")
        print(found.verdict, found.messages, counts(found), dead.verdict, dead.messages, counts(dead))
        again, plain = MESSAGES // 10, MESSAGES * 7 // 10
        assert (found.verdict, found.lost_total) == ("complete", 0), found.why
        assert (dead.verdict, dead.lost_total) == ("complete", 0), dead.why
        assert (found.messages, dead.messages) == (MESSAGES + again + PURGED, 2 * again)
        for one in (*found.subscriptions, *dead.subscriptions):
            assert (one.lost, one.backlog) == (0, 0), one
        billing, europe, asleep = (counts(found)[name] for name in ("billing", "europe", "asleep"))
        assert (billing["dead_lettered"], billing["deleted"]) == (2 * again, SINGLE)
        assert billing["acked"] == plain - SINGLE + again
        assert billing["expired"] >= again
        assert europe["filtered"] >= MESSAGES * 9 // 10
        assert europe["acked"] > 0
        assert asleep["deleted"] == SINGLE
        assert asleep["expired"] >= again
        assert asleep["skipped"] >= plain + 2 * again - SINGLE  # one by one, and by the purge
        assert (counts(dead)["alarms"]["redriven"], counts(dead)["alarms"]["purged"]) == (again, again)
        assert problems_of(broker, topic) == problems_of(broker, f"{topic}.dead") == []

        stolen = steal_one(broker, topic)
        found = audited(broker, topic, tmp_path / "stolen")
        assert found.verdict == "incomplete"
        assert {(one.message_id, one.subscription) for one in found.lost} == {
            (stolen, "billing"),
            (stolen, "asleep"),
        }


def steal_one(broker: RunningBroker, topic: str) -> str:
    """Take one of some more messages out of the log, with all others settled; answers its id."""
    with Client(broker.url) as client:
        ids = [str(answer.id) for answer in client.publish_many(topic, [message(6) for _ in range(20)])]
    # A worker that has just published has the message at hand; one that has not looks into the log.
    broker.kill_worker()
    broker.start_worker()
    partition, _, entry = ids[11].partition(":")

    async def steal() -> None:
        store = Store.connect(broker.redis_url)
        assert await store.command("XDEL", partition_keys(topic, int(partition)).log, entry) == 1
        await store.close()
        async with AsyncClient(broker.url) as client:
            await settle(client, topic, ("billing", "europe", "asleep"))

    anyio.run(steal)
    return ids[11]
