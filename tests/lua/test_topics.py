"""Topics: made and deleted as a whole, also when a crash came between."""

import msgspec
import pytest

from keylane.errors import Fenced, TopicExists, TopicNotFound
from keylane.wire import pack_about
from keylane_broker.engine.bodies import add_orphans, list_orphans, read_body_records, remove_body_records
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Outgoing, TopicSettings
from keylane_broker.limits import FOREVER
from keylane_broker.store.keys import PartitionKeys, topic_key
from tests.support.story import HOUR_MS, Story, message, must_acquire


async def test_a_topic_has_its_partitions_and_its_settings(engine: Engine, topic: str) -> None:
    settings = TopicSettings(partitions=5, retention_ms=FOREVER, dedupe_ms=1_000)
    made = await engine.create_topic(topic, settings)
    assert made == msgspec.structs.replace(settings, incarnation=made.incarnation)
    assert await engine.describe_topic(topic) == made
    assert topic in await engine.topics()
    for partition in range(5):
        assert (await must_acquire(engine, topic, partition)).partition == partition


async def test_a_topic_exists_once(engine: Engine, topic: str) -> None:
    await engine.create_topic(topic, TopicSettings(partitions=2))
    with pytest.raises(TopicExists, match=topic):
        await engine.create_topic(topic)
    assert (await engine.create_topic(topic, exist_ok=True)).partitions == 2


async def test_making_a_topic_again_leaves_what_is_in_it(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish("a")
    await engine.create_topic(topic, exist_ok=True)
    assert await story.take() == [1]


async def test_a_half_made_topic_is_not_there_until_somebody_finishes_it(engine: Engine, topic: str) -> None:
    fields = ["partitions", "3", "retain", "0", "dedupe_ms", "1000", "journal", "0"]
    assert await engine.store.run("topic/create", [topic_key(topic)], 5, *fields) == ["OK"]
    with pytest.raises(TopicNotFound):
        await engine.describe_topic(topic)
    made = await engine.create_topic(topic, TopicSettings(partitions=8), exist_ok=True)
    assert made == TopicSettings(3, 1_000, incarnation=5)  # as it was begun
    assert await engine.describe_topic(topic) == made
    await must_acquire(engine, topic, 2)


async def test_a_half_made_topic_can_be_deleted(engine: Engine, topic: str) -> None:
    fields = ["partitions", "3", "retain", "0", "dedupe_ms", "1000", "journal", "0"]
    await engine.store.run("topic/create", [topic_key(topic)], 5, *fields)
    await engine.store.run("partition/create", [PartitionKeys.of(topic, 1).meta], 5, "retain", 0)
    await engine.delete_topic(topic)
    assert topic not in await engine.topics()
    assert await engine.store.keys_like(f"*{topic}*") == set()


async def test_a_partition_that_is_being_deleted_is_not_there_for_anybody(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish_many(3)
    number = (await engine.describe_topic(topic)).incarnation
    assert await engine._delete_step(topic, 1, str(number), 2)  # and there is more
    with pytest.raises(TopicNotFound):
        await engine.publish(story.lease, [message()])
    with pytest.raises(TopicNotFound):
        await engine.note_own_store(story.lease)
    assert await engine.store.run("partition/configure", [story.keys.meta, story.keys.journal], 10) == [
        "NO_TOPIC"
    ]
    await engine.delete_topic(topic)


async def test_the_names_of_bodies_outlive_their_topic_until_these_are_deleted(
    engine: Engine, topic: str
) -> None:
    store, place = engine.store, (topic, 0)

    async def left() -> bool:
        return place in await list_orphans(store)

    async def hand_on(_topic: str, _partitions: int) -> None:
        await add_orphans(store, [place])

    engine.delete_bodies = hand_on
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await engine.publish(story.lease, [Outgoing("", "u", pack_about(1, size=5))])
    await engine.delete_topic(topic)
    assert await left()
    [[record]] = await read_body_records(store, [place], 10)
    assert record.names == ["u"]
    await engine.create_topic(topic, TopicSettings(partitions=1))
    assert not await left()  # for its new owner, who works off what there is
    await engine.delete_topic(topic)
    assert await left()
    assert await read_body_records(store, [place], 10) == [[record]]
    await remove_body_records(store, place, [record.id])
    assert not await left()
    assert await store.keys_like(f"*{topic}*") == set()


async def test_deleting_a_topic_takes_everything_with_it_and_fences_its_workers(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic, TopicSettings(partitions=3))
    await story.subscribe("s")
    await story.subscribe("t", "key_shared")
    await story.publish("a", "b", "", "a")
    await story.fetch(name="s", permits=2)
    await story.fetch(name="t", permits=3)
    await engine.delete_topic(topic)
    assert await engine.store.keys_like(f"*{topic}*") == set()
    assert topic not in await engine.topics()
    assert await engine.renew([story.lease], HOUR_MS) == [False]
    with pytest.raises(TopicNotFound):
        await story.publish("a")


async def test_a_topic_made_anew_knows_nothing_of_the_old_one(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await engine.publish(story.lease, [message("a", "u1")])
    await engine.delete_topic(topic)
    await engine.create_topic(topic)
    with pytest.raises(Fenced):
        await story.publish("a")
    again = Story(engine, await must_acquire(engine, topic, worker="w2"))
    await again.subscribe(start="earliest")
    assert (await engine.publish(again.lease, [message("a", "u1")])).duplicates == {}


async def test_a_half_deleted_topic_is_gone_for_all_and_can_be_deleted_again(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic, TopicSettings(partitions=2))
    await story.subscribe()
    await story.publish("a")
    answer = await engine.store.run("topic/transition", [topic_key(topic)], "deleting", "", "ready")
    assert answer[0] == "OK"
    with pytest.raises(TopicNotFound):
        await engine.describe_topic(topic)
    await engine.delete_topic(topic)
    assert await engine.store.keys_like(f"*{topic}*") == set()


async def test_making_a_half_deleted_topic_deletes_it_first(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, TopicSettings(partitions=2))
    await story.subscribe()
    await story.publish("a")
    await engine.store.run("topic/transition", [topic_key(topic)], "deleting", "", "ready")
    assert (await engine.create_topic(topic, TopicSettings(partitions=4))).partitions == 4
    assert not await story.exists(story.keys.log, story.keys.subs, story.keys.lease)


async def test_deleting_what_is_not_there_says_so(engine: Engine, topic: str) -> None:
    with pytest.raises(TopicNotFound, match=topic):
        await engine.delete_topic(topic)


async def test_a_topic_only_changes_from_a_state_that_is_asked_for(engine: Engine, topic: str) -> None:
    await engine.create_topic(topic)
    key = topic_key(topic)
    assert await engine.store.run("topic/transition", [key], "ready", "", "creating") == ["NO_TOPIC"]
    assert await engine.store.run("topic/transition", [key], "deleting", "7", "ready") == ["NO_TOPIC"]
    answer = await engine.store.run("topic/create", [key], "9", "partitions", 9)
    assert answer[0] == "EXISTS"
    assert (await engine.describe_topic(topic)).partitions == 1


@pytest.mark.slow
async def test_many_partitions_are_made_and_deleted_in_several_round_trips(
    engine: Engine, topic: str
) -> None:
    await engine.create_topic(topic, TopicSettings(partitions=501))
    await must_acquire(engine, topic, 500)
    await engine.delete_topic(topic)
    assert await engine.store.keys_like(f"*{topic}*") == set()


async def test_a_partition_left_over_from_an_earlier_topic_is_made_anew(engine: Engine, topic: str) -> None:
    keys = PartitionKeys.of(topic, 0)
    await engine.store.run("partition/create", [keys.meta], "5", "retain", "1", "dedupe_ms", "5")
    await engine.store.command("XADD", keys.log, "1-1", "key", "")
    made = await engine.create_topic(topic, TopicSettings(dedupe_ms=7))
    stored = await engine.store.command("HGETALL", keys.meta)
    assert (stored["retain"], stored["dedupe_ms"]) == ("0", "7")
    assert stored["incarnation"] == str(made.incarnation)
    assert not await engine.store.command("EXISTS", keys.log)


async def test_who_is_late_neither_makes_nor_deletes_a_partition_of_another_topic(
    engine: Engine, topic: str
) -> None:
    made = await engine.create_topic(topic)
    keys = PartitionKeys.of(topic, 0)
    before = await engine.store.command("HGETALL", keys.meta)
    late, own = str(made.incarnation - 1), str(made.incarnation)
    assert await engine.store.run("partition/create", [keys.meta], late, "retain", "1") == ["OTHER", own]
    every = [*keys, keys.delayed, keys.delayed_data]
    assert await engine.store.run("partition/delete", every, late, keys.subscription_prefix, "") == ["OTHER"]
    assert await engine.store.command("HGETALL", keys.meta) == before
