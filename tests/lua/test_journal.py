"""The journal: every transition leaves one record, in the same step, where a topic asks for it."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from keylane.errors import InvalidArgument, TopicNotFound
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.entries import settle_missing
from keylane_broker.engine.values import Capacity, SubscriptionSettings, TopicSettings
from keylane_broker.inspect.topic_checker import check_topic
from tests.model.journal import numbers
from tests.support.clock import ManualTime
from tests.support.story import HOUR_MS, Story, fetch_settled, message, must_acquire, part, receipts

pytestmark = pytest.mark.anyio

JOURNALED = TopicSettings(journal=10_000)


class Record(NamedTuple):
    """What a record says, without its time."""

    what: str
    sub: str
    by: str
    entries: str


async def journal(story: Story) -> list[Record]:
    """All records, oldest first."""
    [found] = await story.engine.store.entries(story.keys.journal, [("-", "+")])
    begun = int(found[0][0].partition("-")[2]) if found else 1
    assert [id for id, _ in found] == [f"0-{number}" for number in range(begun, begun + len(found))]
    for _, fields in found:
        assert fields[::2] == ["at", "what", "sub", "by", "entries"]
    return [Record(*fields[3::2]) for _, fields in found]


async def news(story: Story, before: list[Record]) -> list[Record]:
    """The records that have come since."""
    after = await journal(story)
    assert after[: len(before)] == before
    return after[len(before) :]


async def test_without_a_journal_nothing_is_written(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    await story.publish_many(3)
    await story.ack(*receipts(await story.fetch()))
    assert not await story.exists(story.keys.journal)


async def test_a_message_is_published_delivered_and_acked(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe()
    await story.publish_many(5)
    await story.ack(*receipts(await story.fetch(permits=4)))
    assert await journal(story) == [
        Record("moved", "", story.lease.text, "1"),
        Record("subscribed", "s", "", "1"),
        Record("published", "", str(story.lease.epoch), "1-5"),
        Record("delivered", "s", "c", "1-4"),
        Record("acked", "s", "c", "1-4"),
    ]


async def test_records_have_the_time_of_the_partition(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic, JOURNALED)
    await story.subscribe()
    await timed.advance(500)
    await story.publish_many(1)
    [found] = await story.engine.store.entries(story.keys.journal, [("-", "+")])
    assert [fields[1] for _, fields in found] == ["1000000", "1000000", "1000500"]


async def test_duplicates_and_what_nobody_owes_are_not_published(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    before = await journal(story)
    await engine.publish(story.lease, [message(uid="unowed")])
    assert await news(story, before) == []
    await story.subscribe()
    await engine.publish(story.lease, [message(uid="one")])
    before = await journal(story)
    await engine.publish(story.lease, [message(uid="one")])
    assert await news(story, before) == []
    await engine.publish(story.lease, [message(uid="one"), message(uid="two"), message(uid="two")])
    assert await news(story, before) == [Record("published", "", str(story.lease.epoch), "2")]


async def test_each_consumer_of_a_fetch_has_a_record_with_its_ranges(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe(mode="key_shared", consumers=("c1", "c2"))
    await story.publish("a", "b", "a", "b", "a")
    before = await journal(story)
    result = await engine.fetch(story.lease, "s", [Capacity("c1", 10), Capacity("c2", 10)])
    told = await news(story, before)
    assert sorted(told) == [
        Record("delivered", "s", "c1", "1 3 5"),
        Record("delivered", "s", "c2", "2 4"),
    ]
    before = await journal(story)
    await story.ack(*receipts(result.deliveries))
    assert sorted(await news(story, before)) == [
        Record("acked", "s", "c1", "1 3 5"),
        Record("acked", "s", "c2", "2 4"),
    ]


@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive", "failover"])
async def test_what_is_stale_leaves_no_record(engine: Engine, topic: str, mode: str) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe(mode=mode)
    await story.publish("a", "a", "a")
    given = receipts(await story.fetch())
    await story.ack(*given)
    before = await journal(story)
    await story.ack(*given)
    await story.nack(*given)
    await engine.extend(story.lease, "s", given, lease_ms=1_000)
    assert await story.fetch() == []
    assert await news(story, before) == []


async def test_a_nack_without_order_charges_all_that_it_names(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe()
    await story.publish_many(5)
    [receipt] = receipts(await story.fetch())
    before = await journal(story)
    await story.nack(part(receipt, 1), part(receipt, 3, 4))
    assert await news(story, before) == [Record("nacked", "s", "c", "1 3-4")]


async def test_a_nack_in_a_lane_charges_the_head_and_releases_what_goes_with_it(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe(mode="key_shared")
    await story.publish("a", "b", "a", "a", "b")
    given = {receipt.first: receipt for receipt in receipts(await story.fetch())}
    before = await journal(story)
    await story.nack(given[3])
    assert await news(story, before) == [
        Record("nacked", "s", "c", "3"),
        Record("released", "s", "c", "4"),
    ]
    before = await journal(story)
    await engine.nack(story.lease, "s", [given[2]], charged=False)
    assert await news(story, before) == [Record("released", "s", "c", "2 5")]


async def test_a_deadline_that_passes_is_timed_out(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic, JOURNALED)
    await story.subscribe(mode="key_shared")
    await story.publish("a", "", "a", "")
    await story.fetch(lease_ms=1_000)
    before = await journal(story)
    await timed.advance(1_000)
    await timed.engine.expire(story.lease, "s")
    assert sorted(await news(story, before)) == [
        Record("released", "s", "c", "3-4"),
        Record("timed_out", "s", "c", "1-2"),
    ]


async def test_who_leaves_releases_and_who_crashes_is_said_to_have(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic, JOURNALED)
    await story.subscribe(mode="key_shared", consumers=("c1",))
    await timed.engine.join(story.lease, "s", "c2", 1_000)
    await story.publish("a", "", "a", "b")
    await story.fetch("c1")
    before = await journal(story)
    await timed.engine.leave(story.lease, "s", "c1")
    assert await news(story, before) == [Record("released", "s", "c1", "1-4")]
    await story.fetch("c2")
    before = await journal(story)
    await timed.advance(1_000)
    await timed.engine.expire(story.lease, "s")
    assert await news(story, before) == [Record("crashed", "s", "c2", "1-4")]


@pytest.mark.parametrize("mode", ["shared", "key_shared", "exclusive"])
async def test_an_extended_lease_is_told(engine: Engine, topic: str, mode: str) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe(mode=mode)
    await story.publish("a", "a", "a")
    [*given] = receipts(await story.fetch())
    before = await journal(story)
    await engine.extend(story.lease, "s", [part(given[0], 2, 3)], lease_ms=60_000)
    assert await news(story, before) == [Record("extended", "s", "c", "2-3")]


async def test_a_new_owner_is_told_with_the_first_entry_of_its_ledger(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe()
    await story.publish_many(3)
    await engine.release(story.lease)
    lease = await must_acquire(engine, topic, worker="w2")
    assert (await journal(story))[-1] == Record("moved", "", lease.text, "4")


async def test_what_operators_do_to_subscriptions_is_told(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe("one")
    await story.publish_many(10)
    before = await journal(story)
    await engine.create_subscription(topic, "two", start=4)
    await engine.create_subscription(topic, "two", SubscriptionSettings(), exist_ok=True)
    await engine.seek(topic, "two", 8, 0)
    await engine.seek(topic, "two", "earliest")
    await engine.seek(topic, "two", "latest")
    await engine.delete_subscription(topic, "two")
    assert await news(story, before) == [
        Record("subscribed", "two", "", "4"),
        Record("sought", "two", "", "8"),
        Record("sought", "two", "", "1"),
        Record("sought", "two", "", "11"),
        Record("unsubscribed", "two", "", "11"),
    ]


async def test_at_most_once_is_acked_before_anybody_sees_it(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe()
    await story.publish_many(3)
    before = await journal(story)
    await fetch_settled(engine, story.lease, "s", [Capacity("c", 2)])
    assert await news(story, before) == [
        Record("delivered", "s", "c", "1-2"),
        Record("acked", "s", "c", "1-2"),
    ]


async def test_a_commit_tells_what_the_cursor_has_passed(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await engine.create_subscription(topic, "s", SubscriptionSettings(mode="cursor"))
    await story.publish_many(10)
    assert (await engine.claim(topic, "s", "spark-1", HOUR_MS)).granted
    before = await journal(story)
    await engine.commit(topic, "s", "spark-1", 0, 5)
    await engine.commit(topic, "s", "spark-1", 0, 5)
    await engine.commit(topic, "s", "spark-1", 0, 11)
    told = [entry for record in await news(story, before) for entry in numbers(record.entries)]
    assert told == list(range(1, 11))
    assert {record[:3] for record in await news(story, before)} == {("committed", "s", "spark-1")}


async def test_a_record_has_a_thousand_ranges_at_most(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe()
    for _ in range(3):
        await story.publish_many(1_000)
    for _ in range(3):
        [receipt] = receipts(await story.fetch(permits=1_000))
        even = [part(receipt, entry) for entry in range(receipt.first + 1, receipt.last + 1, 2)]
        await story.ack(*even)
    before = await journal(story)
    await engine.leave(story.lease, "s", "c")
    told = await news(story, before)
    assert {record[:3] for record in told} == {("released", "s", "c")}
    texts = [text for record in told for text in record.entries.split()]
    assert texts == [str(entry) for entry in range(1, 3_000, 2)]
    assert max(len(record.entries.split()) for record in told) <= 1_000


async def test_the_oldest_records_make_room(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, TopicSettings(journal=100))
    await story.subscribe()
    for _ in range(400):
        await story.publish_many(1)
    [found] = await engine.store.entries(story.keys.journal, [("-", "+")])
    assert 100 <= len(found) <= 250, "whole nodes of the stream are dropped"
    assert found[-1][0] == "0-402"
    assert await check_topic(engine, topic) == []


async def test_a_journal_that_is_switched_off_stays_and_one_switched_on_begins_anew(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic, TopicSettings(partitions=3))
    await story.subscribe()
    assert (await engine.change_topic(topic, journal=500)).journal == 500
    assert (await engine.describe_topic(topic)).journal == 500
    await story.publish_many(2)
    await engine.change_topic(topic, journal=0)
    assert (await engine.describe_topic(topic)).journal == 0
    await story.publish_many(2)
    ledger = str(story.lease.epoch)
    assert await journal(story) == [Record("begun", "", "", "1"), Record("published", "", ledger, "1-2")]
    await engine.change_topic(topic, journal=500)
    await story.publish_many(1)
    await engine.change_topic(topic, journal=600)
    await story.publish_many(1)
    assert await journal(story) == [
        Record("begun", "", "", "5"),
        Record("published", "", ledger, "5"),
        Record("published", "", ledger, "6"),
    ]
    await must_acquire(engine, topic, 2)
    length = await engine.store.command("XLEN", story.keys.journal.replace(":0}", ":2}"))
    assert length == 2, "every partition has been told, also where nothing has happened"


async def test_a_journal_that_begins_anew_goes_on_with_its_numbers(timed: ManualTime, topic: str) -> None:
    """Who reads by position would take the records of another journal for those that it knows."""
    story = await Story.begin(timed.engine, topic, JOURNALED)
    await story.subscribe()
    await story.publish_many(1)
    before = (await timed.engine.offsets(topic))[0]
    assert (before.journal_earliest, before.journal_latest) == (1, 4)
    await timed.engine.change_topic(topic, journal=0)
    await timed.advance(500)
    await timed.engine.change_topic(topic, journal=0)
    await timed.engine.change_topic(topic, journal=100)
    after = (await timed.engine.offsets(topic))[0]
    assert (after.journal_earliest, after.journal_latest) == (4, 5)
    [found] = await timed.engine.store.entries(story.keys.journal, [("-", "+")])
    assert found == [["0-4", ["at", "1000500", "what", "begun", "sub", "", "by", "", "entries", "2"]]]
    assert await check_topic(timed.engine, topic) == []


async def test_a_journal_ends_where_its_last_record_was_even_if_that_is_gone(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe()
    await story.publish_many(1)
    await engine.store.command("XDEL", story.keys.journal, "0-3")
    assert (await engine.offsets(topic))[0].journal_latest == 4
    assert await check_topic(engine, topic) == [
        "partition 0: the journal ends with record 2, and record 3 was the last one written"
    ]
    page = await engine.read(topic, 0, 1, 4, journal=True)
    assert (page.ranges, page.next) == ([1, 2], 4)
    await engine.store.command("XDEL", story.keys.journal, "0-1", "0-2")
    there = (await engine.offsets(topic))[0]
    assert (there.journal_earliest, there.journal_latest) == (4, 4)
    assert await check_topic(engine, topic) == [
        "partition 0: the journal is empty, and record 3 was the last one written"
    ]
    await engine.delete_topic(topic)


@pytest.mark.parametrize("cap", [-1, 10**10, True, "on"])
async def test_a_journal_keeps_a_number_of_records(engine: Engine, topic: str, cap: int) -> None:
    with pytest.raises(InvalidArgument, match="journal is"):
        await engine.create_topic(topic, TopicSettings(journal=cap))
    await engine.create_topic(topic)
    with pytest.raises(InvalidArgument, match="journal is"):
        await engine.change_topic(topic, journal=cap)


async def test_a_topic_that_is_not_there_cannot_be_changed(
    engine: Engine, topic: str, make_topic_name: Callable[[], str]
) -> None:
    await engine.create_topic(topic)
    with pytest.raises(TopicNotFound, match="no topic"):
        await engine.change_topic(make_topic_name(), journal=5)


async def test_the_checker_finds_a_record_that_is_gone(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe()
    await story.publish_many(1)
    await engine.store.command("XDEL", story.keys.journal, "0-2")
    assert await check_topic(engine, topic) == [
        "partition 0: the journal goes on with record 3 after record 1"
    ]
    await engine.delete_topic(topic)


# Messages that somebody deleted from the log


async def without_tail(story: Story) -> None:
    """Let the worker begin anew, so that it has to read the log."""
    story.lease = await must_acquire(story.engine, story.topic)


async def drop(story: Story, *entries: int) -> None:
    """Delete entries from the log, as somebody with redis-cli would."""
    [found] = await story.engine.store.entries(story.keys.log, [("-", "+")])
    ids = [id for id, _ in found if int(id.partition("-")[2]) in entries]
    assert await story.engine.store.command("XDEL", story.keys.log, *ids) == len(entries)


@pytest.mark.parametrize("mode", ["shared", "exclusive", "failover", "key_shared"])
async def test_a_fresh_message_that_was_deleted_is_passed_and_told(
    engine: Engine, topic: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe(mode=mode)
    await story.publish("a", "a", "b", "", "a")
    await without_tail(story)
    await drop(story, 2, 4)
    before = await journal(story)
    deliveries = await story.fetch()
    assert sorted(entry for one in deliveries for entry in (m.entry for m in one.messages)) == [1, 3, 5]
    lost = [record for record in await news(story, before) if record.what == "lost"]
    assert lost == [Record("lost", "s", "" if mode == "key_shared" else "c", "2 4")]
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert {"2", "4", "'s'"} <= set(warning.replace(",", " ").split())
    assert await story.ack(*receipts(deliveries)) == ["settled"] * len(deliveries)
    assert await story.log() == []


@pytest.mark.parametrize("mode", ["shared", "exclusive", "key_shared"])
async def test_a_leased_message_that_was_deleted_blocks_nobody(
    engine: Engine, topic: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe(mode=mode)
    await story.publish("a", "a", "b", "", "a", "b")
    await story.nack(*receipts(await story.fetch()))
    await without_tail(story)
    await drop(story, 1, 4, 6)
    before = await journal(story)
    deliveries = await story.fetch()
    assert sorted(m.entry for one in deliveries for m in one.messages) == [2, 3, 5]
    lost = [record for record in await news(story, before) if record.what == "lost"]
    assert lost == [Record("lost", "s", "c", "1 4 6")]
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert set(await story.retries()) <= {2, 3, 5}
    assert await check_topic(engine, topic) == []
    await story.ack(*receipts(deliveries))
    assert await story.log() == []
    assert not await story.exists(story.sub().lanes, story.sub().retries)


async def test_who_comes_back_does_not_hold_what_was_deleted(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe(mode="key_shared")
    await story.publish("a", "a", "b")
    await story.fetch()
    await without_tail(story)
    await drop(story, 1, 3)
    held = await engine.list_leases(story.lease, "s", "c")
    assert [m.entry for one in held for m in one.messages] == [2]
    assert (await journal(story))[-1] == Record("lost", "s", "c", "1 3")
    await story.nack(*receipts(held))
    assert await story.take() == [2]


async def test_what_waits_behind_others_can_be_lost_too(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe(mode="key_shared", consumers=("c1", "c2"))
    await story.publish("a", "a", "a")
    [first] = await story.fetch("c1", permits=1)
    assert await story.fetch("c2") == []
    await without_tail(story)
    await drop(story, 2, 3)
    await story.ack(first.receipt)
    assert await story.fetch("c2") == []
    assert [record for record in await journal(story) if record.what == "lost"] == [
        Record("lost", "s", "c2", "2-3")
    ]
    assert not await story.exists(story.sub().lanes, story.sub().queue)


async def test_what_an_operator_dropped_meanwhile_is_not_lost(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe()
    await story.publish_many(3)
    before = await journal(story)
    await settle_missing(engine, story.lease, "s", [1, 2, 3])
    assert await news(story, before) == [], "they are in the log"
    await story.fetch()
    await engine.seek(topic, "s", "latest")
    before = await journal(story)
    await settle_missing(engine, story.lease, "s", [1, 2, 3])
    assert await news(story, before) == [], "nobody is owed them"


async def test_the_lost_are_found_among_many_lanes(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, JOURNALED)
    await story.subscribe(mode="key_shared")
    await engine.join(story.lease, "s", "c", HOUR_MS)
    for start in (0, 1_000):
        await story.publish(*[f"key-{number}" for number in range(start, start + 1_000)])
        await story.fetch(permits=1_000)
    lost = list(range(7, 2_000, 11))
    await drop(story, *lost)
    await settle_missing(engine, story.lease, "s", lost)
    assert await engine.store.command("HLEN", story.sub().lanes) == 2_000 - len(lost)
    assert await check_topic(engine, topic) == []
