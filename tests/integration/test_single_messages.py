"""Skip, delete and purge through the real client and the command line, on one server and on a cluster."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from keylane import (
    AsyncClient,
    Client,
    Forbidden,
    MessageLeased,
    MessageNotFound,
    OutgoingMessage,
    StaleReceipt,
)
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from loadtest.topology import three_node_cluster
from tests.support import commands
from tests.support.clock import bodies_are_gone
from tests.support.running import RunningBroker
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # a cluster is three processes

PATIENCE = 60.0


@pytest.fixture(scope="module", params=["server", pytest.param("cluster", marks=pytest.mark.slow)])
def pair(request: pytest.FixtureRequest) -> Iterator[RunningBroker]:
    """Two workers, on one server or on a cluster: who is asked is mostly not who serves."""
    with contextlib.ExitStack() as stack:
        url = (
            stack.enter_context(three_node_cluster()).url.replace("redis:", "redis+cluster:")
            if request.param == "cluster"
            else None
        )
        yield stack.enter_context(RunningBroker(url, workers=2))


@pytest.fixture
async def client(pair: RunningBroker) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(pair.url) as client:
        yield client


async def is_sound(pair: RunningBroker, topic: str, partitions: int = 1) -> None:
    """Nothing is left behind, and no rule is broken."""
    await bodies_are_gone(pair.redis_url, topic, partitions)
    engine = Engine.connect(pair.redis_url)
    try:
        assert await check_topic(engine, topic) == []
    finally:
        await engine.close()


async def test_a_message_in_hands_is_skipped_and_its_lane_goes_on(
    client: AsyncClient, pair: RunningBroker, topic: str
) -> None:
    await client.create_topic(topic, partitions=2)
    await client.create_subscription(topic, "s", mode="key_shared")
    stale: list[str] = []
    async with client.subscribe(
        topic, "s", mode="key_shared", permits=1, on_stale=lambda message: stale.append(message.id)
    ) as consumer:
        ids = [(await client.publish(topic, b"x", key="a")).id for _ in range(3)]
        first = await consumer.receive(timeout=PATIENCE)
        assert (first.id, ids[0]) == (ids[0], first.id)
        assert ids[0] is not None
        assert ids[1] is not None
        await client.skip(topic, "s", ids[1])  # it waits behind the first
        await client.skip(topic, "s", ids[0])  # and this one is in hands: its permit comes back
        third = await consumer.receive(timeout=PATIENCE)
        assert third.id == ids[2]
        with pytest.raises(StaleReceipt):
            await first.ack()
        await third.ack()
        with pytest.raises(MessageNotFound):
            await client.skip(topic, "s", ids[0])
    assert (await client.describe_topic(topic)).messages == 0
    await is_sound(pair, topic, 2)


async def test_a_message_is_deleted_by_id_and_by_uid_by_its_producer_group(
    client: AsyncClient, pair: RunningBroker, topic: str
) -> None:
    await client.create_topic(topic, partitions=3)
    await client.create_subscription(topic, "s")
    async with AsyncClient(pair.url, producer_group="shop") as shop:
        mine = await shop.publish(topic, b"mine", uid="order-1")
        later = await shop.publish(topic, b"later", delay=3600)
        assert mine.id is not None
        assert later.id is None
        for handle in (mine.id, "order-1", later.uid):
            with pytest.raises(Forbidden, match="producer group 'shop'"):
                await client.delete_message(topic, handle)
        await shop.delete_message(topic, "order-1")
        await shop.delete_message(topic, later.uid, partition=later.partition)
    held = await client.publish(topic, b"held", partition=1)
    assert held.id is not None
    async with client.subscribe(topic, "s") as consumer:
        message = await consumer.receive(timeout=PATIENCE)
        assert message.id == held.id
        with pytest.raises(MessageLeased, match="of subscription 's' has message"):
            await client.delete_message(topic, held.id)
        await message.nack(delay=60)
        await client.delete_message(topic, held.id)
    about = await client.describe_topic(topic)
    assert (about.messages, about.delayed) == (0, 0)
    await is_sound(pair, topic, 3)


async def test_a_uid_that_was_made_for_the_producer_finds_its_message(
    client: AsyncClient, pair: RunningBroker, topic: str
) -> None:
    """Nothing is kept for that: it is looked for among the newest."""
    await client.create_topic(topic, partitions=2)
    await client.create_subscription(topic, "s")
    one = await client.publish(topic, b"one", partition=1)
    soon = await client.publish(topic, b"soon", partition=1, delay=0.01)
    many = [OutgoingMessage(None, partition=1) for _ in range(2_500)]
    last = (await client.publish_many(topic, many))[-1]
    for published in (one, last):
        found = await client.explain(topic, "s", published.uid)
        assert (found.state, found.id, found.uid) == ("fresh", published.id, published.uid)
        assert found == await client.explain(topic, "s", published.uid, partition=1)
        assert (await client.explain(topic, "s", published.uid, partition=0)).state == "never_existed"

    async def is_due() -> bool:
        return (await client.explain(topic, "s", soon.uid)).state == "fresh"

    await until(is_due)
    async with AsyncClient(pair.url, producer_group="shop") as shop:
        theirs = await shop.publish(topic, b"theirs")
        with pytest.raises(Forbidden, match=f"message {theirs.uid} .* producer group 'shop'"):
            await client.delete_message(topic, theirs.uid)
    for published in (one, soon, last):
        await client.delete_message(topic, published.uid)
        with pytest.raises(MessageNotFound, match=published.uid):
            await client.delete_message(topic, published.uid)
    assert (await client.describe_topic(topic)).messages == 2_500
    await is_sound(pair, topic, 2)


async def test_a_purge_of_a_subscription_and_of_a_topic(
    client: AsyncClient, pair: RunningBroker, topic: str
) -> None:
    await client.create_topic(topic, partitions=2)
    await client.create_subscription(topic, "s", mode="key_shared")
    await client.create_subscription(topic, "other")
    await client.publish_many(topic, [OutgoingMessage(b"x", key=str(n % 50)) for n in range(1_200)])
    await client.publish(topic, b"later", delay=3600)
    async with client.subscribe(topic, "s", mode="key_shared", permits=100) as consumer:
        held = await consumer.receive(timeout=PATIENCE)
        assert await client.purge(topic, "s") == 1_200
        assert (await client.describe_subscription(topic, "s")).backlog == 0
        with pytest.raises(StaleReceipt):
            await held.ack()
        await client.publish(topic, b"new", key="k")
        new = await consumer.receive(timeout=PATIENCE)
        assert await new.data() == b"new"
        assert (await client.describe_subscription(topic, "other")).backlog == 1_201
        assert await client.purge(topic) == 1_202
    about = await client.describe_topic(topic)
    assert (about.messages, about.delayed) == (0, 0)
    assert await client.purge(topic) == 0
    await is_sound(pair, topic, 2)


async def test_a_message_is_explained_in_a_sentence(
    client: AsyncClient, pair: RunningBroker, topic: str
) -> None:
    await client.create_topic(topic, partitions=2)
    await client.create_subscription(topic, "s", mode="key_shared")
    ids = [str((await client.publish(topic, b"x", key="a")).id) for _ in range(2)]
    found = await client.explain(topic, "s", ids[1])
    assert found.state == "fresh"
    assert (
        found.reason
        == f"it was not delivered yet, behind 1 other, first {ids[0]} of its lane: no consumer is connected"
    )
    await client.pause_subscription(topic, "s")
    assert (await client.explain(topic, "s", ids[0])).reason.endswith(": the subscription is paused")
    await client.resume_subscription(topic, "s")
    async with client.subscribe(topic, "s", mode="key_shared", name="c1", permits=1) as consumer:
        message = await consumer.receive(timeout=PATIENCE)
        held = await client.explain(topic, "s", ids[0])
        assert (held.state, held.consumer, held.key) == ("leased", "c1", "a")
        assert held.until is not None
        assert "consumer 'c1' has it until " in held.reason
        last = str((await client.publish(topic, b"x", key="a")).id)
        waits = await client.explain(topic, "s", last)
        assert (waits.state, waits.behind) == ("waiting", ids[0])
        assert (
            f"behind {ids[0]} of its lane, which consumer 'c1' has: all its consumers are full"
            in waits.reason
        )
        await message.nack(delay=3600)
        behind = await client.explain(topic, "s", ids[1])
        assert (behind.state, behind.behind) == ("waiting", ids[0])
        assert behind.reason.startswith(f"it waits behind {ids[0]} of its lane: that is due at ")
    later = await client.publish(topic, b"x", delay=3600)
    assert (await client.explain(topic, "s", later.uid)).state == "delayed"
    assert (await client.explain(topic, "s", "0:1-1")).state == "never_existed"


@pytest.mark.slow
async def test_a_message_that_nobody_gets_is_explained_in_a_sentence(
    client: AsyncClient, pair: RunningBroker, topic: str
) -> None:
    def said(name: str, id: str) -> str:
        return commands.keylane("explain", topic, name, id, KEYLANE_SERVER=pair.url).stdout

    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "skips", max_retries=0)
    await client.create_subscription(topic, "parks", mode="key_shared", max_retries=0, poison="park")
    await client.create_subscription(topic, "europe", keys="eu-*")
    ids = [str((await client.publish(topic, b"x", key="a", ttl=ttl)).id) for ttl in (None, None, 0.001)]
    await client.create_subscription(topic, "late")
    for name, mode in (("skips", "shared"), ("parks", "key_shared")):
        async with client.subscribe(topic, name, mode=mode, permits=1) as consumer:  # type: ignore[arg-type]
            message = await consumer.receive(timeout=PATIENCE)
            await message.nack(reason="no such account")

    head = await client.explain(topic, "parks", ids[0])
    assert (head.state, head.behind) == ("parked", None)
    again = "resume the lane, skip that message, or redrive it\n"
    assert said("parks", ids[0]) == f"parked: its lane is parked at it (no such account): {again}"
    second = await client.explain(topic, "parks", ids[1])
    assert (second.state, second.behind) == ("parked", ids[0])
    where = f"it waits behind {ids[0]}, at which its lane is parked (no such account)"
    assert said("parks", ids[1]) == f"parked: {where}: {again}"

    dead = await client.explain(topic, "skips", ids[0])
    assert (dead.state, dead.dead_letter_topic) == ("dead_lettered", f"{topic}.dead")
    async with asyncio.timeout(PATIENCE):
        while dead.dead_letter_id is None:
            assert "is being handed over to the dead-letter topic" in dead.reason
            dead = await client.explain(topic, "skips", ids[0])
    [letter] = [letter async for letter in client.dead_letters(topic)]
    assert dead.dead_letter_id == letter.id
    told = f"it had no retry left, and is dead letter {letter.id} of '{topic}.dead': redrive it\n"
    assert said("skips", ids[0]) == f"dead lettered: {told}"
    assert await client.redrive(topic) == 1
    gone = "redrive it, unless it has gone from there since, redriven or purged"
    went = f"it had no retry left, and went to the dead-letter topic '{topic}.dead'"
    assert said("skips", ids[0]) == f"dead lettered: {went}: {gone}\n"

    assert (
        said("skips", ids[2]) == "expired: its time to live was over before anybody had it: publish it anew\n"
    )
    assert said("europe", ids[1]).startswith("filtered: the subscription's filter does not match it")
    assert said("late", ids[1]).startswith("not subscribed: it was published before the subscription began")
    assert said("late", "0:1-1").startswith("never existed: ")
    await is_sound(pair, topic)
    for name in ("skips", "parks", "europe", "late"):
        await client.purge(topic, name)
    async with asyncio.timeout(PATIENCE):
        while (await client.explain(topic, "skips", ids[0])).state != "settled":
            pass  # until its body has gone
    assert "it was a dead letter, and that was redriven, under another id, or purged" in said("skips", ids[0])


async def test_a_look_shows_bodies(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s")
    for body in (b"one", None):
        await client.publish(topic, body)
    assert [one.data for one in await client.peek(topic, "s", bodies=True)] == [b"one", b""]
    assert [one.data for one in await client.peek(topic, "s")] == [None, None]


def test_the_client_that_does_not_await_does_the_same(pair: RunningBroker, topic: str) -> None:
    with Client(pair.url) as client:
        client.create_topic(topic, partitions=1)
        client.create_subscription(topic, "s")
        ids = [client.publish(topic, b"x").id for _ in range(3)]
        assert ids[0] is not None
        assert ids[1] is not None
        client.skip(topic, "s", ids[0])
        client.delete_message(topic, ids[1])
        assert client.explain(topic, "s", ids[0]).state == "settled"
        assert [one.data for one in client.peek(topic, "s", bodies=True)] == [b"x"]
        assert client.purge(topic, "s") == 1


@pytest.mark.slow
def test_the_commands_say_what_they_have_done(pair: RunningBroker, topic: str) -> None:
    def keylane(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return commands.keylane(*arguments, KEYLANE_SERVER=pair.url, **more)

    with Client(pair.url) as client:
        client.create_topic(topic, partitions=1)
        client.create_subscription(topic, "s")
        ids = [str(client.publish(topic, b"x").id) for _ in range(4)]
    said = keylane("skip", topic, "s", ids[0]).stdout
    assert said == f"message {ids[0]} is settled for subscription 's' of {topic!r}\n"
    assert "is not owed a message" in keylane("skip", topic, "s", ids[0], status=1).stderr
    told = "fresh: it was not delivered yet: no consumer is connected\n"
    assert keylane("explain", topic, "s", ids[1]).stdout == told
    assert json.loads(keylane("explain", topic, "s", ids[0], "--json").stdout)["state"] == "settled"
    peeked = json.loads(keylane("peek", topic, "s", "--max", "1", "--json").stdout)
    assert (peeked[0]["id"], peeked[0]["data"]) == (ids[1], "x")
    assert keylane("delete-message", topic, ids[1]).stdout == f"message {ids[1]} of {topic!r} is deleted\n"
    assert "confirm with --yes" in keylane("purge", topic, "s", status=2).stderr
    purged = json.loads(keylane("purge", topic, "s", "--yes", "--json").stdout)
    assert purged == {"topic": topic, "subscription": "s", "messages": 2}
    assert keylane("purge", topic, "--yes").stdout == f"purged 0 messages of topic {topic!r}\n"


@pytest.mark.slow
async def test_a_purge_is_finished_whichever_worker_is_killed_meanwhile(topic: str) -> None:
    count = 30_000
    with RunningBroker(workers=2) as pair:
        async with AsyncClient(pair.url) as client:
            await client.create_topic(topic, partitions=2, journal=True)
            await client.create_subscription(topic, "s", mode="key_shared")
            messages = [OutgoingMessage(b"", key=str(number % 500)) for number in range(count)]
            await client.publish_many(topic, messages)
            home = (await client.info()).worker
            purging = asyncio.create_task(client.purge(topic, "s"))
            async with AsyncClient(pair.url) as other, asyncio.timeout(PATIENCE):
                while (await other.describe_subscription(topic, "s")).backlog == count:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            pair.kill_worker(pair.ids.index(home))
            assert await purging in (count, 0), "all, unless it was done before the answer got lost"
            assert (await client.describe_subscription(topic, "s")).backlog == 0
            assert (await client.describe_topic(topic)).messages == 0
        await is_sound(pair, topic, 2)
