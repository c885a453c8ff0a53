"""The delivery contract, sentence by sentence, as a client of a real broker sees it."""

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta

import pytest

from keylane import (
    AsyncClient,
    Backoff,
    Consumer,
    DurabilityNotReached,
    InvalidArgument,
    InvalidName,
    Message,
    MessageTooLarge,
    OutgoingMessage,
    Published,
    StaleReceipt,
    SubscriptionBusy,
    SubscriptionExists,
    SubscriptionNotFound,
    TopicExists,
    TopicNotFound,
    Unavailable,
)
from keylane.types import Mode
from tests.support.running import RunningBroker

pytestmark = pytest.mark.slow  # leases and sessions take their time to end

SOON = 60.0  # seconds in which anything that is to happen has happened
A_WHILE = 0.15  # seconds in which something that must not happen would have


@pytest.fixture(scope="module")
def quick() -> Iterator[RunningBroker]:
    """A broker that gives up a lost consumer soon, and none that a busy machine lets wait."""
    with RunningBroker(session=3.0) as broker:
        yield broker


@pytest.fixture(scope="module")
def mortal() -> Iterator[RunningBroker]:
    """A broker to kill and start again."""
    with RunningBroker() as broker:
        yield broker


@pytest.fixture
async def client(quick: RunningBroker) -> AsyncIterator[AsyncClient]:
    """A client of that broker."""
    async with AsyncClient(quick.url) as client:
        yield client


@pytest.fixture
async def other(quick: RunningBroker) -> AsyncIterator[AsyncClient]:
    """Another client, with a connection of its own."""
    async with AsyncClient(quick.url) as client:
        yield client


async def take(consumer: Consumer, count: int) -> list[Message]:
    """The next messages."""
    return [await consumer.receive(SOON) for _ in range(count)]


async def gets_nothing(consumer: Consumer) -> bool:
    """Whether nothing comes for a while."""
    try:
        await consumer.receive(A_WHILE)
    except TimeoutError:
        return True
    return False


async def publish(
    client: AsyncClient, topic: str, texts: str, key: str | None = None, partition: int | None = None
) -> list[Published]:
    """Publish a message for each letter."""
    return await client.publish_many(
        topic, [OutgoingMessage(text, key, partition=partition) for text in texts]
    )


async def text(messages: Sequence[Message]) -> str:
    """The letters of messages."""
    return "".join([(await message.data()).decode() for message in messages])


def retries(messages: Sequence[Message]) -> list[int]:
    """The retry counts of messages."""
    return [message.retry_count for message in messages]


async def crash(client: AsyncClient) -> None:
    """Let a client go without a word to the broker, as its process would."""
    await client._cluster.close()


# Publishing


async def test_a_publish_answers_with_the_durability_that_was_reached(
    client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic)
    await client.create_subscription(topic, "s")
    assert (await client.publish(topic)).durability == "memory"
    assert (await client.publish(topic, durability="fsync")).durability == "fsync"
    with pytest.raises(InvalidArgument):
        await client.publish(topic, durability="perhaps")


async def test_a_durability_that_cannot_be_reached_is_an_error_that_says_what_is_stored(
    client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s") as consumer:
        with pytest.raises(DurabilityNotReached, match="nothing was stored") as caught:
            await client.publish(topic, b"x", uid="a" * 27, durability="replicated")
        assert not caught.value.stored
        again = await client.publish(topic, b"x", uid="a" * 27)
        assert not again.duplicate
        (message,) = await take(consumer, 1)
        assert again.id == message.id


async def test_the_same_uid_answers_with_the_first_id_whatever_crashed_between(
    mortal: RunningBroker, topic: str
) -> None:
    message = OutgoingMessage(b"1", uid="1" * 27)
    async with AsyncClient(mortal.url) as client:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s")
        (first,) = await client.publish_many(topic, [message])
        crash_of_everything(mortal)
        again, fresh, twice = await client.publish_many(topic, [message, OutgoingMessage(b"2"), message])
        assert [item.duplicate for item in (first, again, fresh, twice)] == [False, True, False, True]
        assert first.id == again.id == twice.id != fresh.id


async def test_ids_rise_and_are_dense_within_a_ledger(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=2)
    await client.create_subscription(topic, "s")
    published = await publish(client, topic, "abcdefgh", partition=1)
    published += await publish(client, topic, "ij", partition=1)
    assert {item.ledger for item in published} == {published[0].ledger}
    first = published[0].entry
    assert [item.entry for item in published] == list(range(first, first + 10))
    assert published[3].id == f"1:{published[3].ledger}-{first + 3}"


async def test_a_batch_answers_for_each_message(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=3)
    await client.create_subscription(topic, "s")
    before = await client.publish(topic, key="b", uid="b" * 27)
    keys = ["a", "b", "c", "d"]
    answers = await client.publish_many(topic, [OutgoingMessage(key=key, uid=key * 27) for key in keys])
    assert [answer.uid for answer in answers] == [key * 27 for key in keys]
    assert [answer.duplicate for answer in answers] == [False, True, False, False]
    assert answers[1].id == before.id


async def test_a_message_that_nobody_is_owed_leaves_no_trace(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    answer = await client.publish(topic, b"x", key="k")
    assert answer.no_subscribers
    assert answer.id is None
    assert (await client.describe_topic(topic)).messages == 0
    async with client.subscribe(topic, "late", start="earliest") as consumer:
        assert await gets_nothing(consumer)


async def test_the_key_alone_chooses_the_partition_unless_one_is_named(
    client: AsyncClient, other: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=7)
    await client.create_subscription(topic, "s")
    for key in ("a", "customer-7", "Zürich", " "):
        for publisher in (client, other):
            assert (await publisher.publish(topic, key=key)).partition == zlib.crc32(key.encode()) % 7
        assert (await client.publish(topic, key=key, partition=5)).partition == 5


# Consuming


async def test_every_subscription_gets_every_message_and_a_later_one_from_where_it_asks(
    client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "one")
    await client.create_subscription(topic, "two", mode="key_shared")
    early = await publish(client, topic, "abc")
    await asyncio.sleep(0.005)  # positions in time are in milliseconds
    between = (await client.peek(topic, "one"))[-1].published_at + timedelta(milliseconds=2)
    await publish(client, topic, "de")
    assert early[1].id is not None
    starts = {"one": "latest", "two": "latest", "from-start": "earliest", "from-id": early[1].id}
    wanted = {"one": "abcde", "two": "abcde", "from-start": "abcde", "from-id": "bcde", "from-time": "de"}
    for name, letters in wanted.items():
        mode = "key_shared" if name == "two" else "shared"
        start = starts.get(name, between)
        async with client.subscribe(topic, name, mode=mode, start=start) as consumer:  # type: ignore[arg-type]
            assert await text(await take(consumer, len(letters))) == letters
    async with client.subscribe(topic, "late") as consumer:
        await publish(client, topic, "f")
        assert await text(await take(consumer, 1)) == "f"


async def test_only_the_current_receipt_settles(client: AsyncClient, other: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s", lease=0.3, auto_extend=False) as slow:
        await publish(client, topic, "a")
        (before,) = await take(slow, 1)
        await slow.pause()  # or it would get the message again itself
        async with other.subscribe(topic, "s") as fast:
            (now,) = await take(fast, 1)
            assert now.id == before.id
            assert now.retry_count >= 1  # more, if the pause came late
            for settle in (before.ack, before.nack):
                with pytest.raises(StaleReceipt):
                    await settle()
            assert await slow.ack([before]) == ["stale"]
            assert await fast.ack([now]) == ["settled"]
            assert await gets_nothing(fast)


async def test_tokens_only_grow(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s") as consumer:
        await publish(client, topic, "a")
        tokens = []
        for _ in range(4):
            (message,) = await take(consumer, 1)
            tokens.append(message.token)
            await message.nack(delay=0)
        assert tokens == sorted(set(tokens))


async def test_an_acked_message_is_gone(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s") as consumer:
        await publish(client, topic, "ab")
        for message in await take(consumer, 2):
            await message.ack()
        assert (await client.describe_subscription(topic, "s")).backlog == 0
        assert (await client.describe_topic(topic)).messages == 0
        await client.seek(topic, "s", "earliest")
        assert await gets_nothing(consumer)


async def test_a_nack_returns_the_message_after_its_delay_with_the_retry_count_raised(
    client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s") as consumer:
        await publish(client, topic, "a")
        for count in range(3):
            (message,) = await take(consumer, 1)
            assert message.retry_count == count
            began = time.monotonic()
            await message.nack(delay=timedelta(seconds=0.2))
        (message,) = await take(consumer, 1)
        assert time.monotonic() - began >= 0.19
        (peeked,) = await client.peek(topic, "s")
        assert (peeked.state, peeked.consumer) == ("leased", consumer.name)
        await message.nack(delay=timedelta(hours=1))
        (peeked,) = await client.peek(topic, "s")
        assert (peeked.state, peeked.retry_count) == ("waiting", 4)
        assert peeked.due is not None


async def test_a_timeout_does_the_same_with_backoff(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", lease=1.0, backoff=Backoff(0.2, 2.0, 1.0, 0.0))
    async with client.subscribe(topic, "s", auto_extend=False) as consumer:
        began = time.monotonic()
        await publish(client, topic, "a")
        (message,) = await take(consumer, 1)
        for count, wait in ((1, 1.2), (2, 2.6)):  # leases and backoffs up to then
            (message,) = await take(consumer, 1)
            assert message.retry_count == count
            assert time.monotonic() - began >= wait - 0.05


async def test_who_is_not_let_in_everywhere_keeps_nobody_out(
    client: AsyncClient, other: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=2)
    async with client.subscribe(topic, "s", mode="exclusive", partitions=[1]):
        with pytest.raises(SubscriptionBusy):
            await other.subscribe(topic, "s", mode="exclusive").__aenter__()
        async with other.subscribe(topic, "s", mode="exclusive", partitions=[0]):
            pass


async def test_extend_moves_the_deadline(client: AsyncClient, other: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s", lease=3.0, auto_extend=False) as consumer:
        await publish(client, topic, "ab")
        messages = await take(consumer, 2)
        await consumer.pause()  # or it would get the first again itself
        await messages[1].extend(120)
        async with other.subscribe(topic, "s") as fast:
            (returned,) = await take(fast, 1)
            assert returned.id == messages[0].id
            assert await gets_nothing(fast)
        await messages[1].ack()


async def test_a_graceful_leave_charges_nobody(client: AsyncClient, other: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    async with other.subscribe(topic, "s", name="next", permits=5) as consumer:
        async with client.subscribe(topic, "s") as leaving:
            await other.pause_subscription(topic, "s")
            await consumer.pause()
            await other.resume_subscription(topic, "s")
            await publish(client, topic, "abc")
            await take(leaving, 2)
        await consumer.resume()
        messages = await take(consumer, 3)
        assert (await text(messages), retries(messages)) == ("abc", [0, 0, 0])


async def test_retry_counts_survive_restarts_of_everything(mortal: RunningBroker, topic: str) -> None:
    async with AsyncClient(mortal.url) as client:
        await client.create_topic(topic, partitions=1)
        async with client.subscribe(topic, "s") as consumer:
            await publish(client, topic, "ab")
            first, second = await take(consumer, 2)
            await first.nack(delay=0)
            (first,) = await take(consumer, 1)
            await first.nack(delay=0.5)
            await second.ack()
            crash_of_everything(mortal)
            (first,) = await take(consumer, 1)
            assert (await text([first]), first.retry_count) == ("a", 2)
            await first.ack()
            assert (await client.describe_subscription(topic, "s")).backlog == 0


def crash_of_everything(broker: RunningBroker) -> None:
    """Kill the worker, and restart the server, which loses nothing if it is asked to stop."""
    assert not isinstance(broker.server, str)
    broker.kill_worker()
    broker.server.restart()
    broker.start_worker()


async def test_of_a_crashed_consumer_only_the_oldest_is_charged(
    quick: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with AsyncClient(quick.url) as doomed, doomed.subscribe(topic, "s") as lost:
        await publish(client, topic, "abcd")
        (first, *_) = await take(lost, 3)
        await first.ack()
        await crash(doomed)
        async with client.subscribe(topic, "s") as consumer:
            messages = await take(consumer, 3)
            assert (await text(messages), retries(messages)) == ("bcd", [1, 0, 0])


async def test_of_a_crashed_consumer_each_lanes_oldest_is_charged_in_key_shared(
    quick: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with AsyncClient(quick.url) as doomed, doomed.subscribe(topic, "s", mode="key_shared") as lost:
        for key in ("k", "l"):
            await publish(client, topic, "abc", key=key)
        await take(lost, 6)
        await crash(doomed)
        async with client.subscribe(topic, "s", mode="key_shared") as consumer:
            messages = await take(consumer, 6)
        for key in ("k", "l"):
            lane = [message for message in messages if message.key == key]
            assert retries(lane) == [1, 0, 0]
            assert [message.id for message in lane] == sorted(message.id for message in lane)


async def test_at_most_once_is_settled_at_delivery(
    quick: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", delivery="at_most_once")
    async with AsyncClient(quick.url) as doomed, doomed.subscribe(topic, "s") as lost:
        await publish(client, topic, "ab")
        assert await text(await take(lost, 2)) == "ab"
        assert (await client.describe_subscription(topic, "s")).backlog == 0
        await crash(doomed)
        async with client.subscribe(topic, "s") as consumer:
            await publish(client, topic, "c")
            assert await text(await take(consumer, 1)) == "c"


async def test_a_consumer_has_at_most_its_permits_unsettled(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=4)
    async with client.subscribe(topic, "s", permits=3) as consumer:
        await client.publish_many(topic, [OutgoingMessage(key=str(key)) for key in range(20)])
        messages = await take(consumer, 3)
        assert await gets_nothing(consumer)
        assert (await client.describe_subscription(topic, "s")).leased == 3
        await messages[0].ack()
        await messages[1].nack(delay=60)
        await take(consumer, 2)
        assert await gets_nothing(consumer)


async def test_pause_stops_pushes_at_once_and_gives_back_uncharged_what_was_not_handed_out(
    client: AsyncClient, other: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s") as paused:
        await publish(client, topic, "abcd")
        (first,) = await take(paused, 1)
        await paused.pause()
        async with other.subscribe(topic, "s") as consumer:
            messages = await take(consumer, 3)
            assert (sorted(await text(messages)), retries(messages)) == (list("bcd"), [0, 0, 0])
            assert await consumer.ack(messages) == ["settled"] * 3
        await publish(client, topic, "e")
        assert await gets_nothing(paused)
        await first.ack()
        await paused.resume()
        assert await text(await take(paused, 1)) == "e"


# Key-shared


async def test_what_is_leased_of_a_key_is_a_prefix_and_all_with_one_consumer(
    client: AsyncClient, other: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with (
        client.subscribe(topic, "s", mode="key_shared", permits=2) as one,
        other.subscribe(topic, "s", mode="key_shared", permits=2) as two,
    ):
        await publish(client, topic, "abcdef", key="k")
        (held, *_) = await client.peek(topic, "s")
        holder, idle = (one, two) if held.consumer == one.name else (two, one)
        messages = await take(holder, 2)
        assert await text(messages) == "ab"
        assert await gets_nothing(idle)
        states = [item.state for item in await client.peek(topic, "s")]
        assert states == ["leased", "leased", *states[2:]]
        assert "leased" not in states[2:]
        await messages[0].ack()
        assert await text(await take(holder, 1)) == "c"
        assert await gets_nothing(idle)


async def test_a_nack_rewinds_the_lane_charges_only_the_head_and_other_keys_do_not_notice(
    client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s", mode="key_shared") as consumer:
        await publish(client, topic, "abcd", key="k")
        await publish(client, topic, "xyz", key="l")
        messages = {await text([message]): message for message in await take(consumer, 7)}
        await messages["a"].ack()
        await messages["b"].nack(delay=0.3)
        for late in "cd":
            with pytest.raises(StaleReceipt):
                await messages[late].ack()
        assert await consumer.ack([messages[letter] for letter in "xyz"]) == ["settled"] * 3
        await publish(client, topic, "e", key="k")
        await publish(client, topic, "w", key="l")
        (other_key,) = await take(consumer, 1)
        assert await text([other_key]) == "w"
        again = await take(consumer, 4)
        assert (await text(again), retries(again)) == ("bcde", [1, 0, 0, 0])


async def test_messages_behind_a_slow_head_do_not_expire(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s", mode="key_shared", lease=3.0, auto_extend=False) as consumer:
        await publish(client, topic, "abcd", key="k")
        for message in await take(consumer, 4):
            await asyncio.sleep(1.0)  # the work that each takes: together more than the lease
            await message.ack()
        assert (await client.describe_subscription(topic, "s")).backlog == 0


async def test_a_lane_that_times_out_is_rewound_and_charged_once(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s", mode="key_shared", lease=2.0, auto_extend=False) as consumer:
        await publish(client, topic, "abc", key="k")
        held = await take(consumer, 3)
        again = await take(consumer, 3)
        assert (await text(again), retries(again)) == ("abc", [1, 0, 0])
        assert await consumer.ack(held) == ["stale"] * 3
        assert await consumer.ack(again) == ["settled"] * 3


async def test_a_join_steals_no_lane_that_is_in_flight(
    client: AsyncClient, other: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s", mode="key_shared", permits=10) as busy:
        await publish(client, topic, "ab", key="k")
        messages = await take(busy, 2)
        async with other.subscribe(topic, "s", mode="key_shared") as joined:
            await publish(client, topic, "cd", key="k")
            messages += await take(busy, 2)
            assert await text(messages) == "abcd"
            assert await gets_nothing(joined)
            assert await busy.ack(messages) == ["settled"] * 4
            await busy.pause()
            await publish(client, topic, "e", key="k")
            assert await text(await take(joined, 1)) == "e"


async def test_a_free_key_goes_to_the_consumer_with_the_most_spare_capacity(
    client: AsyncClient, other: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with (
        client.subscribe(topic, "s", mode="key_shared", permits=10) as busy,
        other.subscribe(topic, "s", mode="key_shared", permits=4) as idle,
    ):
        await publish(client, topic, "abcdefgh", key="k")
        await take(busy, 8)
        await publish(client, topic, "x", key="l")
        assert await text(await take(idle, 1)) == "x"


async def test_one_stuck_key_and_one_slow_consumer_delay_no_other_key(
    client: AsyncClient, other: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s", mode="key_shared", permits=2) as stuck:
        await publish(client, topic, "ab" * 100, key="k")
        await take(stuck, 2)
        async with other.subscribe(topic, "s", mode="key_shared", permits=50) as consumer:
            keys = [f"key-{number}" for number in range(200)]
            await client.publish_many(topic, [OutgoingMessage(key=key) for key in keys])
            seen: set[str | None] = set()
            while len(seen) < 200:
                (message,) = await take(consumer, 1)
                seen.add(message.key)
                await message.ack()
            assert seen == set(keys)


# Exclusive and failover


async def test_an_exclusive_subscription_has_one_consumer_and_the_next_when_that_has_gone(
    client: AsyncClient, other: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=2)
    async with client.subscribe(topic, "s", mode="exclusive"):
        with pytest.raises(SubscriptionBusy):
            async with other.subscribe(topic, "s", mode="exclusive"):
                pass
    async with other.subscribe(topic, "s", mode="exclusive") as consumer:
        await publish(client, topic, "a")
        assert await text(await take(consumer, 1)) == "a"


async def test_failover_takes_over_and_keeps_the_order_of_the_partition(
    quick: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with (
        AsyncClient(quick.url) as doomed,
        doomed.subscribe(topic, "s", mode="failover") as active,
        client.subscribe(topic, "s", mode="failover") as standby,
    ):
        await publish(client, topic, "abcd")
        messages = await take(active, 4)
        await messages[0].ack()
        await messages[1].nack(delay=0)
        assert await text(await take(active, 3)) == "bcd"
        assert await gets_nothing(standby)
        await crash(doomed)
        again = await take(standby, 3)
        assert (await text(again), retries(again)) == ("bcd", [2, 0, 0])


# Looking and moving


async def test_seek_moves_to_the_start_the_end_an_id_and_a_time(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "keeper")
    await client.create_subscription(topic, "s")
    published = await publish(client, topic, "abc")
    await asyncio.sleep(0.005)  # positions in time are in milliseconds
    between = (await client.peek(topic, "s"))[-1].published_at + timedelta(milliseconds=2)
    await publish(client, topic, "de")
    assert published[2].id is not None
    for position, letters in ((published[2].id, "cde"), ("earliest", "abcde"), (between, "de")):
        await client.seek(topic, "s", position)
        async with client.subscribe(topic, "s") as consumer:
            messages = await take(consumer, len(letters))
            assert await text(messages) == letters
            assert await consumer.ack(messages) == ["settled"] * len(letters)
            assert await gets_nothing(consumer)
    await client.seek(topic, "s", "earliest")
    await client.seek(topic, "s", "latest")
    assert (await client.describe_subscription(topic, "s")).backlog == 0
    assert (await client.describe_subscription(topic, "keeper")).backlog == 5


@pytest.mark.parametrize("mode", ["shared", "key_shared", "failover"])
async def test_after_a_seek_nothing_is_handed_out_that_came_before_it(
    client: AsyncClient, topic: str, mode: Mode
) -> None:
    """Its leases ended with the seek: who has it buffered hears that before the answer."""
    await client.create_topic(topic, partitions=1, retention=600)
    await client.create_subscription(topic, "s", mode=mode)
    published = await publish(client, topic, "abcdef")
    for _ in range(10):
        async with client.subscribe(topic, "s", mode=mode) as consumer:
            await client.seek(topic, "s", "earliest")
            await consumer.receive(SOON)  # the others are buffered
            await client.seek(topic, "s", published[4].id or "")
            messages = await take(consumer, 2)
            assert await text(messages) == "ef"
            assert await consumer.ack(messages) == ["settled"] * 2


async def test_a_paused_subscription_delivers_to_nobody_until_it_is_resumed(
    client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    async with client.subscribe(topic, "s") as consumer:
        await client.pause_subscription(topic, "s")
        assert (await client.describe_subscription(topic, "s")).paused
        await publish(client, topic, "ab")
        assert await gets_nothing(consumer)
        await client.resume_subscription(topic, "s")
        assert await text(await take(consumer, 2)) == "ab"


async def test_descriptions_count_what_is_fresh_leased_and_waiting(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=2)
    async with client.subscribe(topic, "s", permits=4) as consumer:
        for key in ("a", "b", "c", "d", "e", "f", "g"):
            await client.publish(topic, key, key=key)
        messages = await take(consumer, 4)
        await client.pause_subscription(topic, "s")
        await messages[0].ack()
        await messages[1].nack(delay=60)
        found = await client.describe_subscription(topic, "s")
        assert (found.backlog, found.fresh, found.leased, found.waiting) == (6, 3, 2, 1)
        assert found.consumers == [consumer.name]
        info = await client.describe_topic(topic)
        assert (info.published, info.messages, info.subscriptions) == (7, 6, ["s"])
        peeked = await client.peek(topic, "s", limit=100)
        assert sorted(item.state for item in peeked) == ["fresh"] * 3 + ["leased"] * 2 + ["waiting"]
        assert {item.key for item in peeked} == set("abcdefg") - {messages[0].key}


# Failure


async def test_what_was_published_and_acked_is_still_so_after_a_restart_of_the_server(
    mortal: RunningBroker, topic: str
) -> None:
    assert not isinstance(mortal.server, str)
    async with AsyncClient(mortal.url) as client:
        await client.create_topic(topic, partitions=1)
        async with client.subscribe(topic, "s") as consumer:
            await publish(client, topic, "abc")
            messages = await take(consumer, 3)
            await messages[0].ack()
            mortal.server.restart()
            assert await consumer.ack(messages[1:2]) == ["settled"]
            assert (await client.describe_subscription(topic, "s")).backlog == 1


async def test_while_the_server_is_away_publishes_and_acks_wait_within_the_deadline_or_fail_retriably(
    mortal: RunningBroker, topic: str
) -> None:
    assert not isinstance(mortal.server, str)
    async with AsyncClient(mortal.url) as client, AsyncClient(mortal.url, timeout=3.0) as hasty:
        await client.create_topic(topic, partitions=1)
        async with client.subscribe(topic, "s") as consumer:
            await publish(client, topic, "a")
            (first,) = await take(consumer, 1)
            await hasty.publish(topic, key="knows the topic")
            mortal.server.kill()
            with pytest.raises(Unavailable) as caught:
                await hasty.publish(topic)
            assert caught.value.retriable
            publishing = asyncio.create_task(client.publish(topic))
            acking = asyncio.create_task(first.ack())
            mortal.server.start()
            await publishing
            await acking
            assert len(await take(consumer, 2)) == 2


async def test_bad_input_has_a_named_error_that_explains_and_harms_nobody(
    client: AsyncClient, other: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=2)
    async with other.subscribe(topic, "s") as consumer:
        with pytest.raises(TopicExists, match=topic):
            await client.create_topic(topic)
        with pytest.raises(TopicNotFound, match=topic):
            await client.publish(topic[:-1])
        with pytest.raises(InvalidName):
            await client.create_topic("a:{b}*")
        with pytest.raises(InvalidName):
            await client.create_subscription(topic, "with a space")
        with pytest.raises(SubscriptionExists, match="shared"):
            async with client.subscribe(topic, "s", mode="exclusive"):
                pass
        with pytest.raises(SubscriptionNotFound):
            await client.seek(topic, "nobody", "earliest")
        with pytest.raises(InvalidArgument):
            await client.seek(topic, "s", "somewhere")
        with pytest.raises(InvalidArgument, match="0 to 1"):
            await client.publish(topic, partition=2)
        with pytest.raises(MessageTooLarge):
            await client.publish(topic, attributes={"a": "x" * 1_000_000})
        with pytest.raises(InvalidArgument):
            await client.publish(topic, durability="replicated:many")
        await publish(client, topic, "a")
        assert await text(await take(consumer, 1)) == "a"
