"""Two topics of the same name at different times are different topics, whoever was away in between."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator

import pytest

from keylane import (
    AsyncClient,
    InvalidArgument,
    OutgoingMessage,
    PublishFailed,
    StaleReceipt,
    SubscriptionNotFound,
    TopicNotFound,
    TopicReplaced,
    wire,
)
from keylane.types import Mode, Published
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import SubscriptionSettings, TopicSettings
from tests.support.peer import Peer, Refused, connect
from tests.support.running import RunningBroker

PATIENCE = 60.0
KEYS = [f"key-{number}" for number in range(20)]


@pytest.fixture(scope="module")
def mortal() -> Iterator[RunningBroker]:
    """A broker whose worker may be killed, by one test after the other."""
    with RunningBroker() as broker:
        yield broker


@pytest.fixture
async def client(mortal: RunningBroker) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(mortal.url) as client:
        yield client


@pytest.fixture
async def engine(mortal: RunningBroker) -> AsyncIterator[Engine]:
    """For what is done while no worker is there, or behind its back: as if a hint was lost."""
    engine = Engine.connect(mortal.redis_url)
    yield engine
    await engine.close()


@pytest.fixture
async def peer(mortal: RunningBroker) -> AsyncIterator[Peer]:
    async with connect(mortal.urls[0]) as peer:
        yield peer


async def make(engine: Engine, topic: str, partitions: int, mode: Mode | None = "shared") -> int:
    """Make a topic, with a subscription; answers its incarnation."""
    made = await engine.create_topic(topic, TopicSettings(partitions))
    if mode:
        await engine.create_subscription(topic, "s", SubscriptionSettings(mode))
    return made.incarnation


async def replace(engine: Engine, topic: str, partitions: int, mode: Mode | None = "shared") -> int:
    """Delete a topic and make another one of its name."""
    await engine.delete_topic(topic)
    return await make(engine, topic, partitions, mode)


def publish(incarnation: int, topic: str, partition: int, *uids: str) -> tuple[wire.Publish, bytes]:
    """A PUBLISH of messages without keys."""
    flat = [text for uid in uids for text in ("", uid, "1   ")]
    return wire.Publish(topic, partition, incarnation=incarnation), wire.pack(flat)


# Consumers


@pytest.mark.slow
@pytest.mark.parametrize("again", [True, False], ids=["subscription made again", "no subscription"])
@pytest.mark.parametrize("partitions", [5, 2, 1])
async def test_a_consumer_that_was_cut_off_ends_when_its_topic_is_another_one(
    mortal: RunningBroker, engine: Engine, client: AsyncClient, topic: str, partitions: int, again: bool
) -> None:
    """However many partitions it has now; and nothing is made that nobody has asked for."""
    await make(engine, topic, 2)
    async with client.subscribe(topic, "s") as consumer:
        mortal.kill_worker()
        await replace(engine, topic, partitions, "shared" if again else None)
        mortal.start_worker()
        with pytest.raises(TopicNotFound, match="deleted and recreated") as ended:
            await consumer.receive(PATIENCE)
        assert ended.value.code == "topic_replaced"
    assert await engine.subscriptions(topic) == (["s"] if again else [])
    async with client.subscribe(topic, "s") as consumer:  # who subscribes anew has all of it
        await client.publish_many(topic, [OutgoingMessage(partition=at) for at in range(partitions)])
        found = [await consumer.receive(PATIENCE) for _ in range(partitions)]
        assert {message.partition for message in found} == set(range(partitions))


@pytest.mark.parametrize("again", [True, False], ids=["made again", "gone"])
async def test_a_consumer_that_was_cut_off_ends_when_its_subscription_was_deleted(
    mortal: RunningBroker, engine: Engine, client: AsyncClient, topic: str, again: bool
) -> None:
    await make(engine, topic, 2)
    async with client.subscribe(topic, "s") as consumer:
        mortal.kill_worker()
        await engine.delete_subscription(topic, "s")
        if again:
            await engine.create_subscription(topic, "s")
        mortal.start_worker()
        with pytest.raises(SubscriptionNotFound):
            await consumer.receive(PATIENCE)
    assert await engine.subscriptions(topic) == (["s"] if again else [])


@pytest.mark.parametrize("partitions", [5, 2, 1])
async def test_a_consumer_whose_worker_was_not_told_ends_as_soon_as_the_worker_finds_out(
    mortal: RunningBroker, engine: Engine, client: AsyncClient, topic: str, partitions: int
) -> None:
    """Nothing of the new topic comes to those of the old one, whatever the worker remembers."""
    await make(engine, topic, 2)
    async with client.subscribe(topic, "s") as consumer:
        await client.publish(topic, b"old", partition=0)
        old = await consumer.receive(PATIENCE)
        mortal.pause()  # else it may look by itself in the moment in which there is no topic
        await replace(engine, topic, partitions)
        mortal.resume()
        published = await client.publish(topic, b"new", partition=0)
        assert published.id is not None
        with pytest.raises(TopicNotFound, match="deleted and recreated"):
            await consumer.receive(PATIENCE)
        with pytest.raises(StaleReceipt):
            await old.ack()
    async with client.subscribe(topic, "s") as consumer:
        assert await (await consumer.receive(PATIENCE)).data() == b"new"


async def test_a_consumer_that_is_opened_by_an_old_map_gets_all_partitions_of_the_new_topic(
    engine: Engine, client: AsyncClient, topic: str
) -> None:
    await make(engine, topic, 2)
    await client.publish(topic, b"x")  # the client knows the map now
    await replace(engine, topic, 6)
    async with client.subscribe(topic, "s") as consumer:
        await client.publish_many(topic, [OutgoingMessage(partition=at) for at in range(6)])
        found = [await consumer.receive(PATIENCE) for _ in range(6)]
        assert {message.partition for message in found} == set(range(6))


# Producers


@pytest.mark.parametrize("partitions", [7, 3, 1])
async def test_an_idle_producer_places_keys_by_the_count_of_the_topic_that_is_there(
    engine: Engine, client: AsyncClient, topic: str, partitions: int
) -> None:
    await make(engine, topic, 3)
    for key in KEYS:
        await client.publish(topic, b"x", key=key)
    await replace(engine, topic, partitions)
    one = await client.publish(topic, b"x", key=KEYS[0])
    many = await client.publish_many(topic, [OutgoingMessage(b"x", key=key) for key in KEYS])
    for key, published in [(KEYS[0], one), *zip(KEYS, many, strict=True)]:
        assert published.partition == wire.partition_of(key, partitions)
        assert not published.duplicate
    counts = await engine.offsets(topic)
    assert sum(one.latest - 1 for one in counts) == len(KEYS) + 1


async def test_publishes_under_way_keep_the_order_of_a_key_when_the_topic_is_another_one(
    engine: Engine, client: AsyncClient, topic: str
) -> None:
    await make(engine, topic, 2, "key_shared")
    await client.publish(topic, b"first", key="k")
    await replace(engine, topic, 5, "key_shared")
    calls: list[Awaitable[object]] = []
    for number in range(30):
        if number % 3:
            calls.append(client.publish(topic, f"{number}", key="k", attributes={"at": str(number)}))
        else:
            some = [OutgoingMessage(b"", key=key, attributes={"at": str(number)}) for key in ("k", *KEYS)]
            calls.append(client.publish_many(topic, some))
    await asyncio.gather(*map(asyncio.ensure_future, calls))
    async with client.subscribe(topic, "s", mode="key_shared") as consumer:
        seen: list[int] = []
        for _ in range(30 + 10 * len(KEYS)):
            async with await consumer.receive(PATIENCE) as message:
                if message.key == "k":
                    seen.append(int(message.attributes["at"]))
    assert seen == list(range(30))


@pytest.mark.slow
async def test_later_publishes_do_not_overtake_those_that_are_placed_anew(
    engine: Engine, client: AsyncClient, topic: str
) -> None:
    """A topic is made anew in the midst of many publishes, single ones and batches, that nobody waits for."""
    await make(engine, topic, 2, "key_shared")
    await client.publish(topic, b"first", key="k")
    calls: list[asyncio.Task[object]] = []

    async def publish_until(done: Callable[[], bool]) -> None:
        while not done():
            at = {"at": str(len(calls))}
            if len(calls) % 5:
                call: Coroutine[None, None, object] = client.publish(topic, b"x", key="k", attributes=at)
            else:
                some = [OutgoingMessage(b"", key=key, attributes=at) for key in ("k", *KEYS)]
                call = client.publish_many(topic, some)
            calls.append(asyncio.ensure_future(call))
            await asyncio.sleep(0)

    await publish_until(lambda: len(calls) == 200)
    replaced = asyncio.ensure_future(replace(engine, topic, 5, "key_shared"))
    await publish_until(replaced.done)
    maps = client._cluster.maps  # while there is no such topic it may have none
    await publish_until(lambda: topic in maps and maps[topic].incarnation == replaced.result())
    enough = max(600, len(calls) + 200)  # for a while everything may have been refused
    await publish_until(lambda: len(calls) > enough)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    errors = {type(one) for one in answers if isinstance(one, BaseException)}
    assert errors <= {TopicNotFound, TopicReplaced, PublishFailed}, "for a moment there is no such topic"
    of_key = [one[0] if isinstance(one, list) else one for one in answers]
    last = max(at for at, one in enumerate(of_key) if isinstance(one, Published) and one.id)
    async with client.subscribe(topic, "s", mode="key_shared") as consumer:
        seen = [-1]
        while seen[-1] < last:
            async with await consumer.receive(PATIENCE) as message:
                if message.key == "k":
                    seen.append(int(message.attributes["at"]))
    assert seen == sorted(seen)
    assert len(seen) > 100


# Frames


async def test_a_publish_to_a_topic_that_is_another_one_is_refused_and_changes_nothing(
    engine: Engine, peer: Peer, topic: str
) -> None:
    first = await make(engine, topic, 2)
    info = await peer.ask(wire.Info(topic=topic), wire.InfoReply)
    assert info.incarnation == first
    await peer.answer(*publish(first, topic, 0, "a"))
    second = await replace(engine, topic, 2)
    assert second > first
    for _ in range(2):
        with pytest.raises(Refused, match="topic_replaced"):
            await peer.answer(*publish(first, topic, 0, "b"))
    with pytest.raises(Refused, match="topic_replaced"):
        await peer.answer(*publish(second + 1, topic, 0, "b"))
    assert [one.latest for one in await engine.offsets(topic)] == [1, 1]
    await peer.answer(*publish(second, topic, 0, "b"))
    await peer.answer(*publish(0, topic, 0, "c"))  # whatever is there
    assert [one.latest for one in await engine.offsets(topic)] == [3, 1]
    assert (await peer.ask(wire.DescribeTopic(topic), wire.TopicReply)).incarnation == second


@pytest.mark.parametrize("partition", [0, 1])
async def test_a_worker_that_was_not_told_says_that_the_topic_is_another_one(
    engine: Engine, peer: Peer, topic: str, partition: int
) -> None:
    """Also for a partition that the topic there does not have: the client is to place the keys anew."""
    first = await make(engine, topic, 2)
    await peer.answer(*publish(first, topic, partition, "a"))  # so it has the lease
    await replace(engine, topic, 1)
    for _ in range(2):
        with pytest.raises(Refused, match="topic_replaced"):
            await peer.answer(*publish(first, topic, partition, "b"))


async def test_a_worker_with_the_lease_of_a_topic_that_is_gone_takes_the_new_one(
    engine: Engine, peer: Peer, topic: str
) -> None:
    """The client knows of the new topic before its worker does."""
    await peer.answer(*publish(await make(engine, topic, 1), topic, 0, "a"))
    second = await replace(engine, topic, 1)
    request, body = publish(second, topic, 0, "b")
    reply = await peer.ask(request, wire.PublishReply, body)
    assert reply.first == 1


async def test_who_comes_back_to_another_topic_or_subscription_is_told_and_nothing_is_made(
    engine: Engine, peer: Peer, topic: str
) -> None:
    first = await make(engine, topic, 1)
    ask = wire.Subscribe(1, topic, "s", "me", incarnation=first)
    reply = await peer.ask(ask, wire.SubscribeReply)
    known = reply.subscription_incarnation
    assert known > first
    await peer.answer(wire.Unsubscribe(1))
    back = wire.Subscribe(1, topic, "s", "me", incarnation=first, subscription_incarnation=known)
    assert (await peer.ask(back, wire.SubscribeReply)).subscription_incarnation == known
    await peer.answer(wire.Unsubscribe(1))

    await engine.delete_subscription(topic, "s")
    with pytest.raises(Refused, match="subscription_not_found"):
        await peer.answer(back)
    assert await engine.subscriptions(topic) == []
    await engine.create_subscription(topic, "s")
    with pytest.raises(Refused, match=r"subscription_not_found.*recreated"):
        await peer.answer(back)

    await replace(engine, topic, 1, None)
    for request in (ask, back):
        with pytest.raises(Refused, match="topic_replaced"):
            await peer.answer(request)
    assert await engine.subscriptions(topic) == []
    await peer.answer(wire.Subscribe(1, topic, "s", "me"))  # whatever is there, made if it is not


# Positions


async def test_an_id_of_a_topic_that_is_gone_is_no_position_in_another_one(
    engine: Engine, client: AsyncClient, topic: str
) -> None:
    await make(engine, topic, 2)
    old = await client.publish(topic, b"x", partition=0)
    await replace(engine, topic, 2)
    new = [await client.publish(topic, b"x", partition=0) for _ in range(2)]
    assert old.id is not None
    assert new[1].id is not None
    for act in (client.seek(topic, "s", old.id), client.create_subscription(topic, "t", start=old.id)):
        with pytest.raises(InvalidArgument, match="of an earlier topic of that name"):
            await act
    assert await engine.subscriptions(topic) == ["s"]
    await client.seek(topic, "s", new[1].id)
    assert (await engine.offsets(topic, "s"))[0].position == 2


async def test_a_range_of_a_topic_that_is_gone_is_not_read_from_another_one(
    engine: Engine, client: AsyncClient, topic: str
) -> None:
    for journal in (False, True):
        await engine.create_topic(topic, TopicSettings(1, journal=100))
        await engine.create_subscription(topic, "s")
        await client.publish(topic, b"x", partition=0)
        [said] = await client.offsets(topic)
        page = await client.read(topic, 0, 1, 2, journal=journal, incarnation=said.incarnation)
        assert page.ranges == [1, 1]
        await engine.delete_topic(topic)
        with pytest.raises(TopicNotFound):
            await client.read(topic, 0, 1, 2, journal=journal, incarnation=said.incarnation)
        await engine.create_topic(topic, TopicSettings(1, journal=100))
        await engine.create_subscription(topic, "s")
        await client.publish(topic, b"x", partition=0)
        with pytest.raises(TopicReplaced):
            await client.read(topic, 0, 1, 2, journal=journal, incarnation=said.incarnation)
        await engine.delete_topic(topic)
