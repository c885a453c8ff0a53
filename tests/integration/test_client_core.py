"""The real client with a real worker and a real server: what API.md and DELIVERY.md promise a client."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import anyio
import pytest

from keylane import (
    AsyncClient,
    ConnectionClosed,
    Consumer,
    InvalidArgument,
    InvalidName,
    Message,
    OutgoingMessage,
    PayloadMissing,
    StaleReceipt,
    SubscriptionBusy,
    SubscriptionExists,
    SubscriptionNotFound,
    TopicExists,
    TopicNotFound,
)
from keylane.types import Mode
from keylane.wire import partition_of
from tests.support.clock import bodies_are_gone
from tests.support.running import RunningBroker

PATIENCE = 60.0
MODES: tuple[Mode, ...] = ("shared", "key_shared", "exclusive", "failover")


@pytest.fixture
async def client(broker: RunningBroker) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(broker.url) as client:
        yield client


async def take(consumer: Consumer, count: int) -> list[Message]:
    return [await consumer.receive(timeout=PATIENCE) for _ in range(count)]


async def until_settled(client: AsyncClient, topic: str, subscription: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await client.describe_subscription(topic, subscription)).backlog:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_first_session_that_a_user_sees(broker: RunningBroker, topic: str) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic)
        await client.create_subscription(topic, "billing", mode="key_shared")
        published = await client.publish(topic, b"42", key="customer-7", attributes={"colour": "blue"})
        async with client.subscribe(topic, "billing", mode="key_shared") as consumer:
            async for message in consumer:
                async with message:
                    assert await message.data() == b"42"
                    assert (message.id, message.uid) == (published.id, published.uid)
                    assert (message.key, message.attributes) == ("customer-7", {"colour": "blue"})
                break
        await until_settled(client, topic, "billing")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_every_message_arrives_once_and_in_the_order_of_its_key(
    client: AsyncClient, topic: str, mode: Mode
) -> None:
    await client.create_topic(topic, partitions=3)
    await client.create_subscription(topic, "s", mode=mode)
    published = await client.publish_many(
        topic, [OutgoingMessage(f"{n}", key=f"key-{n % 7}") for n in range(3_000)]
    )
    seen: dict[str, list[int]] = defaultdict(list)
    async with client.subscribe(topic, "s", mode=mode, permits=100) as consumer:
        total = 0
        async for batch in consumer.batches(max_messages=50):
            for message, body in zip(batch, await batch.data(), strict=True):
                assert message.key is not None
                assert message.id == published[int(body)].id
                seen[message.key].append(int(body))
            assert set(await consumer.ack(batch)) == {"settled"}
            total += len(batch)
            if total == 3_000:
                break
    assert seen == {f"key-{k}": list(range(k, 3_000, 7)) for k in range(7)}
    info = await client.describe_topic(topic)
    assert (info.messages, info.published, info.subscriptions) == (0, 3_000, ["s"])


async def test_two_subscriptions_get_everything_and_with_the_last_the_bodies_go(
    broker: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    for name in ("a", "b"):
        await client.create_subscription(topic, name)
    await client.publish_many(topic, [OutgoingMessage(f"{n}") for n in range(20)])
    kept: list[Message] = []
    for name in ("a", "b"):
        async with client.subscribe(topic, name) as consumer:
            taken = await take(consumer, 20)
            assert [await message.data() for message in taken] == [b"%d" % n for n in range(20)]
            assert await consumer.ack(taken) == ["settled"] * 20
            kept = taken
    await bodies_are_gone(broker.redis_url, topic)
    with pytest.raises(PayloadMissing):
        await kept[0].data()


async def test_the_same_uid_is_stored_once(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    await client.create_subscription(topic, "s")
    first = await client.publish(topic, b"one", uid="order-1")
    second = await client.publish(topic, b"two", uid="order-1")
    assert (second.id, second.duplicate, first.duplicate) == (first.id, True, False)
    async with client.subscribe(topic, "s") as consumer:
        (message,) = await take(consumer, 1)
        assert await message.data() == b"one"
        await message.ack()
        with pytest.raises(TimeoutError):
            await consumer.receive(timeout=0.1)


async def test_a_uid_names_one_message_with_its_key_and_without_one_it_is_enough(
    broker: RunningBroker, client: AsyncClient, topic: str
) -> None:
    """The key decides about the partition, and each partition knows its uids; see docs/protocol.md."""
    await client.create_topic(topic, partitions=8)
    await client.create_subscription(topic, "s")
    first = await client.publish(topic, b"1", key="a", uid="order-1")
    alone = await client.publish(topic, b"1", uid="order-2")
    async with AsyncClient(broker.url) as another:
        for known, key, uid in ((first, "a", "order-1"), (alone, None, "order-2")):
            again = await another.publish(topic, b"2", key=key, uid=uid)
            assert (again.id, again.duplicate) == (known.id, True)
        other = next(key for key in "bcdefgh" if partition_of(key, 8) != first.partition)
        assert not (await another.publish(topic, b"2", key=other, uid="order-1")).duplicate


@pytest.mark.parametrize("key", ["a", None])
@pytest.mark.parametrize("body", [b"1", None])
async def test_a_message_published_again_by_the_uid_that_was_made_for_it_is_stored_once(
    broker: RunningBroker, client: AsyncClient, topic: str, key: str | None, body: bytes | None
) -> None:
    """Its worker knows it as long as that remembers it, also when nobody is owed it any more."""
    await client.create_topic(topic, partitions=8)
    await client.create_subscription(topic, "s")
    first = await client.publish(topic, body, key=key)
    async with AsyncClient(broker.url) as another:
        again = await another.publish(topic, b"other", key=key, uid=first.uid)
        assert (again.id, again.uid, again.duplicate) == (first.id, first.uid, True)
        async with client.subscribe(topic, "s") as consumer:
            await (await consumer.receive()).ack()
        await bodies_are_gone(broker.redis_url, topic)
        told = await another.publish_many(
            topic, [OutgoingMessage(body, key=key, uid=uid) for uid in (first.uid, "order-1")]
        )
        assert [(one.id == first.id, one.duplicate) for one in told] == [(True, True), (False, False)]
        safe = await another.publish(topic, body, key=key, uid=first.uid, durability="fsync")
        assert (safe.id, safe.duplicate, safe.durability) == (first.id, True, "fsync")


async def test_without_subscriptions_nothing_is_stored(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    published = await client.publish(topic, b"hello")
    assert (published.id, published.no_subscribers) == (None, True)


async def test_a_nack_brings_the_message_back_with_its_count_raised(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    await client.create_subscription(topic, "s", backoff=3600)
    await client.publish(topic, b"1")
    async with client.subscribe(topic, "s") as consumer:
        message = await consumer.receive(timeout=PATIENCE)
        await message.nack(delay=0)
        again = await consumer.receive(timeout=PATIENCE)
        assert (again.id, message.retry_count, again.retry_count) == (message.id, 0, 1)
        assert again.token > message.token
        with pytest.raises(StaleReceipt):
            await message.ack()
        await again.nack(until=datetime.now(UTC) + timedelta(milliseconds=50))
        assert (await consumer.receive(timeout=PATIENCE)).retry_count == 2


@pytest.mark.slow
async def test_a_lease_that_runs_out_brings_the_message_back(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    await client.create_subscription(topic, "s", lease=2.0)
    await client.publish(topic, b"1")
    async with client.subscribe(topic, "s", auto_extend=False, permits=1) as consumer:
        message = await consumer.receive(timeout=PATIENCE)
        again = await consumer.receive(timeout=PATIENCE)
        assert (again.id, again.retry_count) == (message.id, 1)
        with pytest.raises(StaleReceipt, match="lease"):
            await message.ack()
        await again.ack()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_leases_are_extended_while_the_application_works(
    client: AsyncClient, topic: str, mode: Mode
) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", mode=mode, lease=2.0)
    await client.publish_many(topic, [OutgoingMessage(key=f"k{n % 2}") for n in range(4)])
    async with client.subscribe(topic, "s", mode=mode) as consumer:
        first = await consumer.receive(timeout=PATIENCE)
        deadline = first.deadline
        async with asyncio.timeout(PATIENCE):
            while first.deadline < deadline + timedelta(seconds=2):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await first.ack()
        assert await consumer.ack(rest := await take(consumer, 3)) == ["settled"] * 3
        assert {message.retry_count for message in rest} == {0}


async def test_extend_counts_from_now(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    await client.create_subscription(topic, "s", lease=5)
    await client.publish_many(topic, [OutgoingMessage(partition=0)] * 3)
    async with client.subscribe(topic, "s") as consumer:
        taken = await take(consumer, 3)
        await taken[0].extend(100)
        assert await consumer.extend(taken[1:], timedelta(seconds=100)) == ["settled"] * 2
        for message in taken:
            assert 90 < (message.deadline - datetime.now(UTC)).total_seconds() <= 101
        await taken[0].ack()
        assert await consumer.extend(taken, 1) == ["stale", "settled", "settled"]


async def test_nack_in_key_shared_rewinds_the_lane_and_charges_only_the_head(
    client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", mode="key_shared")
    await client.publish_many(topic, [OutgoingMessage(str(n), key="ab"[n % 2]) for n in range(8)])
    async with client.subscribe(topic, "s", mode="key_shared") as consumer:
        taken = await take(consumer, 8)
        a = [message for message in taken if message.key == "a"]
        b = [message for message in taken if message.key == "b"]
        await a[0].ack()
        await a[1].nack(delay=0)
        again = await take(consumer, 3)
        assert [(message.id, message.retry_count) for message in again] == [
            (a[1].id, 1),
            (a[2].id, 0),
            (a[3].id, 0),
        ]
        assert await consumer.ack(a) == ["stale"] * 4
        assert await consumer.ack(again + b) == ["settled"] * 7
    assert (await client.describe_subscription(topic, "s")).backlog == 0


async def test_closing_gives_back_at_once_and_uncharged(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    await client.create_subscription(topic, "s", lease=3600)
    await client.publish_many(topic, [OutgoingMessage(partition=0)] * 10)
    async with client.subscribe(topic, "s") as consumer:
        first = await consumer.receive(timeout=PATIENCE)
    with pytest.raises(StaleReceipt):
        await first.ack()
    async with client.subscribe(topic, "s") as consumer:
        taken = await take(consumer, 10)
        assert {message.retry_count for message in taken} == {0}
        assert await consumer.ack(taken) == ["settled"] * 10


async def test_pause_gives_others_what_is_not_handed_out(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    await client.create_subscription(topic, "s", lease=3600)
    await client.publish_many(topic, [OutgoingMessage(partition=0)] * 10)
    async with client.subscribe(topic, "s") as slow, client.subscribe(topic, "s", permits=20) as quick:
        taken = await take(slow, 1)
        await slow.pause()
        rest = await take(quick, 9)
        assert {message.retry_count for message in rest} == {0}
        assert await quick.ack(rest) == ["settled"] * 9
        await quick.pause()
        await slow.resume()
        await client.publish(topic, partition=0)
        taken += await take(slow, 1)
        assert await slow.ack(taken) == ["settled"] * 2


async def test_permits_limit_what_is_held(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=2)
    await client.create_subscription(topic, "s")
    await client.publish_many(topic, [OutgoingMessage(partition=n % 2) for n in range(50)])
    async with client.subscribe(topic, "s", permits=5) as consumer:
        for _ in range(10):
            taken = await take(consumer, 5)
            assert (await client.describe_subscription(topic, "s")).leased == 5
            assert await consumer.ack(taken) == ["settled"] * 5
    assert (await client.describe_subscription(topic, "s")).backlog == 0


async def test_an_exclusive_subscription_has_one_consumer(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    async with client.subscribe(topic, "s", mode="exclusive"):
        with pytest.raises(SubscriptionBusy):
            async with client.subscribe(topic, "s", mode="exclusive"):
                pass


async def test_at_most_once_is_settled_when_it_is_delivered(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", delivery="at_most_once")
    await client.publish_many(topic, [OutgoingMessage(str(n)) for n in range(30)])
    async with client.subscribe(topic, "s", permits=10) as consumer:
        for number in range(30):
            message = await consumer.receive(timeout=PATIENCE)
            assert await message.data() == b"%d" % number
            await (message.ack() if number % 2 else message.nack())
        with pytest.raises(TimeoutError):
            await consumer.receive(timeout=0.1)
    assert (await client.describe_subscription(topic, "s")).backlog == 0


async def test_positions_to_start_from_and_to_seek_to(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "keeper")
    published = await client.publish_many(topic, [OutgoingMessage(str(n)) for n in range(5)])
    async with client.subscribe(topic, "early", start="earliest") as consumer:
        assert [message.id for message in await take(consumer, 5)] == [answer.id for answer in published]
    async with client.subscribe(topic, "id", start=published[3].id or "") as consumer:
        assert [message.id for message in await take(consumer, 2)] == [answer.id for answer in published[3:]]
    await client.seek(topic, "keeper", published[2].id or "")
    assert (await client.describe_subscription(topic, "keeper")).backlog == 3
    await client.seek(topic, "keeper", datetime.now(UTC) + timedelta(hours=1))
    assert (await client.describe_subscription(topic, "keeper")).backlog == 0
    async with client.subscribe(topic, "late") as consumer:
        with pytest.raises(TimeoutError):
            await consumer.receive(timeout=0.05)
        last = await client.publish(topic)
        assert (await consumer.receive(timeout=PATIENCE)).id == last.id


async def test_peek_shows_without_taking(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s")
    await client.publish(topic, b"hello", key="k", attributes={"a": "b"})
    (peeked,) = await client.peek(topic, "s")
    assert (peeked.key, peeked.attributes, peeked.size, peeked.state) == ("k", {"a": "b"}, 5, "fresh")
    async with client.subscribe(topic, "s", name="me") as consumer:
        await take(consumer, 1)
        (peeked,) = await client.peek(topic, "s", partition=0)
        assert (peeked.state, peeked.consumer) == ("leased", "me")


async def test_a_paused_subscription_delivers_to_nobody(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    await client.create_subscription(topic, "s")
    await client.pause_subscription(topic, "s")
    assert (await client.describe_subscription(topic, "s")).paused
    async with client.subscribe(topic, "s") as consumer:
        await client.publish(topic)
        with pytest.raises(TimeoutError):
            await consumer.receive(timeout=0.1)
        await client.resume_subscription(topic, "s")
        await consumer.receive(timeout=PATIENCE)


async def test_fan_out_reaches_every_topic(client: AsyncClient, topic: str) -> None:
    names = [f"{topic}-{n}" for n in range(3)]
    for name in names:
        await client.create_topic(name, partitions=1)
        await client.create_subscription(name, "s")
    published = await client.fan_out(names, "news", key="k")
    assert list(published) == names
    for name in names:
        async with client.subscribe(name, "s") as consumer:
            (message,) = await take(consumer, 1)
            assert await message.data() == b"news"
            await message.ack()
    with pytest.raises(TopicNotFound):
        await client.fan_out([names[0], f"{topic}-9"], "news")


async def test_fan_out_takes_the_options_of_publish(client: AsyncClient, topic: str) -> None:
    names = [f"{topic}-{n}" for n in range(2)]
    for name in names:
        await client.create_topic(name, partitions=3)
        await client.create_subscription(name, "s")
    soon = await client.fan_out(names, "news", uid="u", partition=2, ttl=60, priority=3, delay=0.05)
    assert {(answer.uid, answer.partition, answer.id) for answer in soon.values()} == {("u", 2, None)}
    again = await client.fan_out(names, "news", uid="u", partition=2)
    assert all(answer.duplicate for answer in again.values())
    hour = datetime.now(UTC) + timedelta(hours=1)
    later = await client.fan_out(names, "news", deliver_at=hour, expires_at=hour + timedelta(hours=1))
    assert all(answer.delayed for answer in later.values())
    for name in names:
        async with client.subscribe(name, "s") as consumer:
            (message,) = await take(consumer, 1)
            assert (message.uid, message.partition) == ("u", 2)
            await message.ack()


async def test_publish_many_has_a_durability_for_those_that_say_none(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s")
    many = [OutgoingMessage(b"1"), OutgoingMessage(b"2", durability="memory")]
    for messages in (many, iter(many)):
        published = await client.publish_many(topic, messages, durability="fsync")
        assert [answer.durability for answer in published] == ["fsync", "memory"]
    with pytest.raises(InvalidArgument, match="durability 'never'"):
        await client.publish_many(topic, many[:1], durability="never")


async def test_a_topic_that_exists_is_returned_as_it_is(client: AsyncClient, topic: str) -> None:
    """By what creates it if need be, and by what changes it."""
    await client.create_topic(topic, partitions=3)
    await client.create_subscription(topic, "billing")
    await client.publish(topic, b"x")
    there = await client.describe_topic(topic)
    assert (there.partitions, there.subscriptions, there.messages, there.published) == (3, ["billing"], 1, 1)
    assert await client.create_topic(topic, exist_ok=True) == there
    changed = await client.change_topic(topic, journal=5)
    assert (changed.journal, changed.subscriptions, changed.published) == (5, ["billing"], 1)


async def test_errors_have_names(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    with pytest.raises(TopicExists):
        await client.create_topic(topic)
    await client.create_topic(topic, exist_ok=True)
    with pytest.raises(TopicNotFound, match=topic):
        await client.publish(topic + "s", b"x")
    with pytest.raises(TopicNotFound):
        await client.describe_topic(topic + "s")
    with pytest.raises(SubscriptionNotFound):
        await client.describe_subscription(topic, "nobody")
    await client.create_subscription(topic, "s")
    with pytest.raises(SubscriptionExists):
        await client.create_subscription(topic, "s", mode="exclusive")
    with pytest.raises(SubscriptionExists):
        async with client.subscribe(topic, "s", mode="key_shared"):
            pass
    with pytest.raises(InvalidName):
        await client.create_topic("no spaces")
    with pytest.raises(InvalidArgument):
        await client.seek(topic, "s", "yesterday")
    with pytest.raises(InvalidArgument, match="no partition 99"):
        await client.seek(topic, "s", "99:1-1")
    with pytest.raises(InvalidArgument, match="name at least one"):
        client.subscribe(topic, "s", partitions=[])
    assert topic in await client.topics()
    await client.delete_subscription(topic, "s")
    await client.delete_topic(topic)
    assert topic not in await client.topics()


async def test_a_deleted_subscription_ends_its_consumers(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    async with client.subscribe(topic, "s") as consumer:
        waiting = asyncio.ensure_future(consumer.receive())
        await client.delete_subscription(topic, "s")
        with pytest.raises(SubscriptionNotFound):
            await asyncio.wait_for(waiting, PATIENCE)


async def test_info_says_who_answers(client: AsyncClient) -> None:
    info = await client.info()
    assert info.workers[0].id == info.worker
    assert abs(info.time - datetime.now(UTC)) < timedelta(minutes=1)


async def test_nothing_is_left_behind(broker: RunningBroker, topic: str) -> None:
    before = asyncio.all_tasks()
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic)
        async with client.subscribe(topic, "s") as consumer:
            await client.publish_many(topic, [OutgoingMessage("x")] * 100)
            async for message in consumer:
                async with message:
                    await message.data()
                break
            cancelled = asyncio.ensure_future(consumer.receive())
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait({cancelled})
    assert asyncio.all_tasks() == before


async def test_a_client_closes_consumers_that_are_still_open(broker: RunningBroker, topic: str) -> None:
    before = asyncio.all_tasks()
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic)
        consumer = await client.subscribe(topic, "s", name="forgotten").__aenter__()
    assert asyncio.all_tasks() == before
    with pytest.raises(ConnectionClosed, match="closed"):
        await consumer.receive()
    async with AsyncClient(broker.url) as client:
        assert (await client.describe_subscription(topic, "s")).consumers == []


async def test_a_cancelled_block_still_leaves_in_good_order(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    await client.create_subscription(topic, "s", lease=3600)
    await client.publish_many(topic, [OutgoingMessage(partition=0)] * 2)
    with anyio.CancelScope() as scope:
        async with client.subscribe(topic, "s") as consumer:
            async with await consumer.receive():
                pass
            await consumer.receive()
            asyncio.get_running_loop().call_soon(scope.cancel)
            await consumer.receive()
    assert scope.cancelled_caught
    info = await client.describe_subscription(topic, "s")
    assert (info.backlog, info.leased, info.consumers) == (1, 0, [])


@pytest.mark.slow
async def test_however_many_topics_are_made_at_once_none_fails(client: AsyncClient, topic: str) -> None:
    names = [f"{topic}-{number}" for number in range(150)]
    await asyncio.gather(*(client.create_topic(name) for name in names))
    await asyncio.gather(*(client.delete_topic(name) for name in names))
    assert not set(names) & set(await client.topics())


async def test_a_topic_without_a_name_is_refused_at_once(broker: RunningBroker) -> None:
    """A shell variable that is not set, for instance."""
    async with AsyncClient(broker.url) as client:
        for name in ("", None):
            with pytest.raises(InvalidName, match="the topic is"):
                await client.publish(name, b"1")  # type: ignore[arg-type]
            with pytest.raises(InvalidName, match="the topic is"):
                await client.publish_many(name, [OutgoingMessage(b"1")])  # type: ignore[arg-type]
            with pytest.raises(InvalidName, match="the topic is"):
                async with client.subscribe(name, "s"):  # type: ignore[arg-type]
                    pass
