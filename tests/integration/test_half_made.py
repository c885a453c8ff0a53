"""What is done partition by partition is half done after a crash: the next one who comes finishes it."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from keylane import AsyncClient
from keylane.errors import BrokerError, SubscriptionExists, SubscriptionNotFound, TopicExists, TopicNotFound
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import SubscriptionSettings, TopicSettings
from keylane_broker.inspect.snapshot import scan
from keylane_broker.inspect.topic_checker import check_leftovers, check_topic
from keylane_broker.store.keys import TOPICS, PartitionKeys, records_key, topic_key
from keylane_broker.store.scripts import Scripts
from loadtest.topology import single_server
from tests.support.cut_store import Crash, CutStore
from tests.support.running import RunningBroker
from tests.support.story import Story, message, must_acquire

PARTITIONS = 3
SCRIPTS = Scripts()

Act = Callable[[Engine, str], Awaitable[Any]]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with single_server() as server:
        yield server.url


@asynccontextmanager
async def engine_on(
    url: str, left: int | None = None, chance: random.Random | None = None
) -> AsyncIterator[Engine]:
    store = CutStore.connect(url, SCRIPTS)
    assert isinstance(store, CutStore)
    store.left, store.chance = left, chance
    engine = Engine(store)
    try:
        yield engine
    finally:
        await engine.close()


async def make_topic(engine: Engine, topic: str) -> None:
    await engine.create_topic(topic, TopicSettings(partitions=PARTITIONS))


async def make_topic_anyhow(engine: Engine, topic: str) -> None:
    await engine.create_topic(topic, TopicSettings(partitions=PARTITIONS), exist_ok=True)


async def delete_topic(engine: Engine, topic: str) -> None:
    await engine.delete_topic(topic)


async def make(engine: Engine, topic: str) -> None:
    await engine.create_subscription(topic, "s", SubscriptionSettings("key_shared"), start="earliest")


async def make_anyhow(engine: Engine, topic: str) -> None:
    await engine.create_subscription(topic, "s", SubscriptionSettings("key_shared"), exist_ok=True)


async def make_of_another_mode(engine: Engine, topic: str) -> None:
    await engine.create_subscription(topic, "s", SubscriptionSettings("shared"), exist_ok=True)


async def describe(engine: Engine, topic: str) -> None:
    await engine.describe_subscription(topic, "s")


async def delete(engine: Engine, topic: str) -> None:
    await engine.delete_subscription(topic, "s")


async def fill(engine: Engine, topic: str) -> None:
    """A message in each partition."""
    for number in range(PARTITIONS):
        await engine.publish(await must_acquire(engine, topic, number), [message("a")])


async def everything_fits(engine: Engine, topic: str) -> set[str]:
    """Nothing is half-made; answers which of topic and subscription are there."""
    if topic not in await engine.topics():
        assert await engine.store.keys_like(f"*{topic}*") == set()
        return set()
    assert await check_topic(engine, topic) == []
    names = await engine.subscriptions(topic)
    stories = [Story(engine, await must_acquire(engine, topic, number)) for number in range(PARTITIONS)]
    for story in stories:
        answer = await story.publish("a")
        assert bool(answer.stored) is bool(names), "owed in every partition, or in none"
        assert bool(await story.log()) is bool(names), "what nobody is owed has left the log"
    return {"topic", *names}


INTERRUPTED: dict[str, tuple[Act, list[Act], list[Act]]] = {
    # what is interrupted, what was before, what may come next
    "making a topic": (make_topic, [], [make_topic, make_topic_anyhow, delete_topic]),
    "deleting a topic": (
        delete_topic,
        [make_topic, make, fill],
        [make_topic, make_topic_anyhow, delete_topic],
    ),
    "making a subscription": (
        make,
        [make_topic],
        [make, make_anyhow, make_of_another_mode, describe, delete, delete_topic],
    ),
    "deleting a subscription": (
        delete,
        [make_topic, make, fill],
        [make, make_anyhow, make_of_another_mode, describe, delete, delete_topic],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("label", INTERRUPTED)
async def test_whatever_call_a_crash_comes_before_the_next_one_finishes_the_work(
    url: str, topic: str, label: str
) -> None:
    act, before, followers = INTERRUPTED[label]
    for number, follow in enumerate(followers):
        for calls in range(50):
            name = f"{topic}-{number}-{calls}"
            async with engine_on(url) as engine, engine_on(url) as crashing:
                for step in before:
                    await step(engine, name)
                assert isinstance(crashing.store, CutStore)
                crashing.store.left = calls
                crashed = False
                try:
                    await act(crashing, name)
                except Crash:
                    crashed = True
                where = f"{label}, after {calls} calls, then {follow.__name__}"
                error: BrokerError | None = None
                try:
                    await follow(engine, name)
                except (SubscriptionExists, SubscriptionNotFound, TopicExists, TopicNotFound) as raised:
                    error = raised
                there = await everything_fits(engine, name)
                if follow in (make_topic, make_topic_anyhow):
                    assert "topic" in there, where
                if follow in (make, make_anyhow):
                    assert "s" in there, where
                if follow in (describe, make_of_another_mode):
                    assert ("s" in there) is (error is None or follow is make_of_another_mode), where
                if follow is delete:
                    assert "s" not in there, where
                if follow is delete_topic:
                    assert not there, where
                with suppress(TopicNotFound):
                    await engine.delete_topic(name)
            if not crashed:
                assert calls > 4
                break
        else:
            raise AssertionError(f"{label} takes over 50 calls")


async def test_what_is_half_made_is_listed_nowhere_and_named_by_the_checker(url: str, topic: str) -> None:
    async with engine_on(url) as engine, engine_on(url) as crashing:
        await make_topic(engine, topic)
        assert isinstance(crashing.store, CutStore)
        crashing.store.left = 5  # what there is to know, the record, and two partitions
        with pytest.raises(Crash):
            await make(crashing, topic)
        assert await engine.subscriptions(topic) == []
        [problem] = await check_topic(engine, topic)
        assert "subscription s" in problem
        assert "half-created, in state creating" in problem
        assert f"`keylane subscription describe {topic} s` finishes it" in problem
        found = await engine.describe_subscription(topic, "s")
        assert found.mode == "key_shared"
        assert await check_topic(engine, topic) == []
        assert await engine.subscriptions(topic) == ["s"]


async def test_a_half_made_subscription_is_finished_with_the_start_that_was_asked_for(
    url: str, topic: str
) -> None:
    async with engine_on(url) as engine, engine_on(url) as crashing:
        await make_topic(engine, topic)
        await engine.create_subscription(topic, "keeper")
        await fill(engine, topic)
        assert isinstance(crashing.store, CutStore)
        crashing.store.left = 4
        with pytest.raises(Crash):
            await make(crashing, topic)  # from the earliest on
        await make_anyhow(engine, topic)  # from the latest on, if it were new
        for number in range(PARTITIONS):
            story = Story(engine, await must_acquire(engine, topic, number))
            await engine.join(story.lease, "s", "c")
            assert await story.take() == [1]


async def test_who_is_late_makes_nothing_in_a_partition_where_it_was_deleted(url: str, topic: str) -> None:
    async with engine_on(url) as engine:
        await make_topic(engine, topic)
        await make(engine, topic)
        number = (await engine.describe_subscription(topic, "s")).incarnation
        about = await engine.describe_topic(topic)
        await delete(engine, topic)
        story = Story(engine, await must_acquire(engine, topic))
        numbers = [str(about.incarnation), str(number)]
        late = await engine.store.run("subscription/create", story.sub(), "", "s", *numbers, "latest", "")
        assert late == ["DELETED"]
        await make(engine, topic)
        assert (await engine.describe_subscription(topic, "s")).incarnation > number
        late = await engine.store.run("subscription/create", story.sub(), "", "s", *numbers, "latest", "")
        assert late == ["NEWER"]
        numbers[0] = "7"
        for script in ("create", "delete"):
            other = await engine.store.run(
                f"subscription/{script}", story.sub(), "", "s", *numbers, "latest", ""
            )
            assert other == ["NO_TOPIC"]
        keys = [topic_key(topic), records_key(topic)]
        assert await engine.store.run("topic/record", keys, "7", "t", "", "{}") == ["NO_TOPIC"]
        number_now = str(about.incarnation)
        assert await engine.store.run("topic/record", keys, number_now, "s", "{}", "") == ["CHANGED"]
        assert await everything_fits(engine, topic) == {"topic", "s"}


async def test_the_deletion_of_another_does_not_stop_one_that_is_being_made(url: str, topic: str) -> None:
    async with engine_on(url) as engine, engine_on(url) as crashing:
        await make_topic(engine, topic)
        assert isinstance(crashing.store, CutStore)
        crashing.store.left = 4
        with pytest.raises(Crash):
            await make(crashing, topic)
        await engine.create_subscription(topic, "t")
        await engine.delete_subscription(topic, "t")
        await describe(engine, topic)
        assert await everything_fits(engine, topic) == {"topic", "s"}


async def test_a_subscription_that_a_partition_has_lost_is_made_there_again(url: str, topic: str) -> None:
    """On a cluster the partition's node may fail over, and the one that has the record not."""
    async with engine_on(url) as engine:
        await make_topic(engine, topic)
        await make(engine, topic)
        await fill(engine, topic)
        number = (await engine.describe_subscription(topic, "s")).incarnation
        story = Story(engine, await must_acquire(engine, topic, 1))
        await engine.store.command("HDEL", story.keys.subs, "s")
        await engine.store.command("DEL", *story.sub()[4:13])
        await make_anyhow(engine, topic)
        assert (await engine.describe_subscription(topic, "s")).incarnation == number
        assert await everything_fits(engine, topic) == {"topic", "s"}
        for other in (0, 1, 2):
            story = Story(engine, await must_acquire(engine, topic, other))
            await engine.join(story.lease, "s", "c")
            assert await story.take() == [1, 2], "what the others owe stays, and this one owes what is there"


async def test_who_subscribes_is_let_in_where_a_partition_has_lost_the_subscription(
    broker: RunningBroker, topic: str
) -> None:
    async with AsyncClient(broker.url) as client, engine_on(broker.redis_url) as engine:
        await client.create_topic(topic, partitions=2)
        await client.create_subscription(topic, "s")
        keys = PartitionKeys.of(topic, 1)
        await engine.store.command("HDEL", keys.subs, "s")
        await engine.store.command("DEL", *keys.subscription("s")[4:13])
        assert (await client.publish(topic, partition=1)).no_subscribers
        async with client.subscribe(topic, "s") as consumer:
            assert not (await client.publish(topic, partition=1)).no_subscribers
            await (await consumer.receive(timeout=20)).ack()
        assert await check_topic(engine, topic) == []


async def test_a_subscription_whose_deletion_was_lost_with_its_record_is_made_anew(
    url: str, topic: str
) -> None:
    async with engine_on(url) as engine:
        await make_topic(engine, topic)
        await make(engine, topic)
        number = (await engine.describe_subscription(topic, "s")).incarnation
        [record] = await engine.store.read_all([("HGET", records_key(topic), "s")])
        await delete(engine, topic)
        await engine.store.command("HSET", records_key(topic), "s", record)
        await make_anyhow(engine, topic)
        assert (await engine.describe_subscription(topic, "s")).incarnation > number
        assert await everything_fits(engine, topic) == {"topic", "s"}


async def test_the_checker_compares_every_partition_with_the_record(url: str, topic: str) -> None:
    async with engine_on(url) as engine:
        await make_topic(engine, topic)
        await make(engine, topic)
        story = Story(engine, await must_acquire(engine, topic, 1))
        await story.drop(keep_record=True)
        [problem] = await check_topic(engine, topic)
        assert problem.startswith("partition 1: subscription s is not here, and its record says ")
        await engine.store.command("HDEL", records_key(topic), "s")
        assert await check_topic(engine, topic) == [
            f"partition {number}: subscription s has no record, and is owed messages forever: create it, "
            "and delete it"
            for number in (0, 2)
        ]
        await make(engine, topic)
        assert await everything_fits(engine, topic) == {"topic", "s"}
        await engine.store.command("HSET", story.keys.meta, "incarnation", "5")
        problems = await check_topic(engine, topic)
        assert any(
            problem.startswith("partition 1: is of number 5, and the topic is ") for problem in problems
        )


OPERATIONS = [make_topic, make_topic_anyhow, delete_topic, make, make_anyhow, describe, delete]


@pytest.mark.slow
@pytest.mark.parametrize("crashes", [False, True], ids=["nobody crashes", "some crash"])
async def test_however_they_come_in_each_others_way_nothing_is_left_half_made(
    url: str, topic: str, crashes: bool
) -> None:
    for seed in range(60):
        chance = random.Random(seed)
        name = f"{topic}-{seed}"
        acts = [chance.choice(OPERATIONS) for _ in range(8)]

        async def act(
            chosen: Act, ends: int | None, chance: random.Random = chance, name: str = name
        ) -> None:
            async with engine_on(url, ends, chance) as engine:
                with suppress(Crash, SubscriptionExists, SubscriptionNotFound, TopicExists, TopicNotFound):
                    await chosen(engine, name)

        async with engine_on(url) as engine:
            await make_topic(engine, name)
            await make(engine, name)
            await asyncio.gather(*(act(chosen, chance.randrange(30) if crashes else None) for chosen in acts))
            if crashes:
                await make_topic_anyhow(engine, name)
                await make_anyhow(engine, name)
            there = await everything_fits(engine, name)
            assert not crashes or there == {"topic", "s"}, (seed, acts)
            with suppress(TopicNotFound):
                await engine.delete_topic(name)
            assert await engine.store.keys_like(f"*{name}*") == set(), (seed, acts)


async def test_half_made_topics_and_partitions_of_none_are_named(url: str, topic: str) -> None:
    async with engine_on(url) as engine, engine_on(url) as crashing:

        async def found() -> list[str]:
            left = await check_leftovers(engine, await scan(engine.store))
            return [problem for problem in left if topic in problem]

        await make_topic(engine, topic)
        assert await found() == []
        assert isinstance(crashing.store, CutStore)
        crashing.store.left = 5
        with pytest.raises(Crash):
            await delete_topic(crashing, topic)
        [problem] = await found()
        assert f"topic {topic} is half-created, in state deleting" in problem
        assert f"`keylane topic delete {topic}` finishes it" in problem
        await delete_topic(engine, topic)
        assert await found() == []
        keys = PartitionKeys.of(topic, 2)
        await engine.store.run("partition/create", [keys.meta], "5", "retain", "0")
        [problem] = await found()
        assert f"partition 2 of {topic} belongs to no topic" in problem
        await engine.create_topic(topic, TopicSettings(partitions=3))
        await engine.delete_topic(topic)
        assert await found() == []


async def test_numbers_that_crashed_makers_have_left_in_the_list_of_topics_go(url: str, topic: str) -> None:
    async with engine_on(url) as engine:
        await make_topic(engine, topic)
        made = await engine.describe_topic(topic)
        for number, name in ((7, topic), (8, f"{topic}-gone"), (9, f"{topic}-gone")):
            await engine.store.command("HSET", TOPICS, number, name)
        half = f"{topic}-half"  # listed, and not ready
        await engine.store.run("topic/create", [topic_key(half)], "10", "partitions", "1")
        await engine.store.command("HSET", TOPICS, 10, half)
        await engine.forget_topics()
        listed = await engine.store.fields(TOPICS)
        assert {number: name for number, name in listed.items() if name.startswith(topic)} == {
            str(made.incarnation): topic,
            "10": half,
        }
        assert topic in await engine.topics()


async def pause(engine: Engine, topic: str) -> None:
    await engine.pause_subscription(topic, "s", True)


async def resume(engine: Engine, topic: str) -> None:
    await engine.pause_subscription(topic, "s", False)


async def change(engine: Engine, topic: str) -> None:
    await engine.change_topic(topic, journal=100)


@pytest.mark.parametrize(
    ("act", "again", "problem"),
    [
        (pause, pause, "subscription s is paused in partitions [0] alone"),
        (pause, resume, "subscription s is paused in partitions [0] alone"),
        (change, change, "the journal of partitions [1, 2] is not what the topic says, '100'"),
    ],
)
async def test_a_change_that_came_to_some_partitions_only_is_named_and_finished_by_the_next_one(
    url: str, topic: str, act: Act, again: Act, problem: str
) -> None:
    async with engine_on(url) as engine:
        await make_topic(engine, topic)
        await make(engine, topic)
        keys = [PartitionKeys.of(topic, number) for number in range(PARTITIONS)]
        before = [
            await engine.store.fields(key) for one in keys for key in (one.meta, one.subscription("s").sub)
        ]
        await act(engine, topic)
        for number in (1, 2):  # as they were before it
            for key, fields in zip(
                (keys[number].meta, keys[number].subscription("s").sub), before[number * 2 :], strict=False
            ):
                await engine.store.command("DEL", key)
                await engine.store.command("HSET", key, *[text for pair in fields.items() for text in pair])
        [found] = await check_topic(engine, topic)
        assert problem in found
        await again(engine, topic)
        assert await check_topic(engine, topic) == []
