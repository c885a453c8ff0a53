"""Mode cursor: read by position, drained by commit, and never leased."""

from typing import Any

import pytest

from keylane.errors import (
    ConsumerReplaced,
    InvalidArgument,
    MessagesLost,
    SubscriptionMoved,
    SubscriptionNotFound,
    TopicNotFound,
    TopicReplaced,
)
from keylane.wire import pack_about
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Capacity, Claimed, Outgoing, SubscriptionSettings, TopicSettings
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.limits import FOREVER
from keylane_broker.store.keys import subscription_keys
from tests.support.clock import ManualTime
from tests.support.story import HOUR_MS, Story, must_acquire, part, receipts

MODES = ("shared", "key_shared", "exclusive", "failover")


async def begin(engine: Engine, topic: str, count: int = 0, settings: TopicSettings | None = None) -> Story:
    """A topic with a subscription "spark" that "r1" has claimed, and messages with a body each."""
    story = await Story.begin(engine, topic, settings)
    await story.subscribe("spark", "cursor", consumers=())
    assert (await engine.claim(topic, "spark", "r1", HOUR_MS)).granted
    await publish(story, count)
    return story


async def publish(story: Story, count: int) -> None:
    """Messages with the keys a, b, a, b, … and a body each."""
    for start in range(0, count, 1_000):
        batch = [
            Outgoing("ab"[number % 2], f"uid-{number}", pack_about(1, size=7))
            for number in range(start, min(start + 1_000, count))
        ]
        await story.engine.publish(story.lease, batch)


async def commit(story: Story, position: int, reader: str = "r1", name: str = "spark") -> list[str]:
    """Commit in as many steps as it takes; answers the names of bodies."""
    [here] = await story.engine.offsets(story.topic, name)
    committed = await story.engine.commit(story.topic, name, reader, 0, position, sought=here.sought)
    assert committed.done
    return await story.take_names()


async def position(story: Story, name: str = "spark") -> int | None:
    """The next entry that a subscription is owed."""
    [here] = await story.engine.offsets(story.topic, name)
    return here.position


# What a commit does


async def test_a_commit_moves_the_cursor_and_drops_what_lies_behind(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic, 10)
    assert await commit(story, 5) == ["uid-0", "uid-1", "uid-2", "uid-3"]
    assert await story.log() == [5, 6, 7, 8, 9, 10]
    assert await position(story) == 5
    assert len(await commit(story, 11)) == 6
    assert await story.log() == []
    [here] = await engine.offsets(topic, "spark")
    assert (here.earliest, here.latest, here.position) == (11, 11, 11)


async def test_a_position_at_or_behind_the_cursor_changes_nothing(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic, 10)
    await commit(story, 7)
    assert await commit(story, 7) == []
    assert await commit(story, 2) == []
    assert await position(story) == 7
    assert await story.log() == [7, 8, 9, 10]


async def test_a_position_beyond_the_log_is_refused_by_name(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic, 3)
    with pytest.raises(InvalidArgument, match=f"position 5 in partition 0 of '{topic}': it ends at 4"):
        await commit(story, 5)
    assert await position(story) == 1


async def test_a_script_call_passes_no_more_than_its_limit(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic, 2_500)
    first = await engine.commit(topic, "spark", "r1", 0, 2_501, steps=1)
    assert (first.done, len(await story.take_names())) == (False, 1_000)
    assert (await story.log())[0] == 1_001
    rest = await engine.commit(topic, "spark", "r1", 0, 2_501)
    assert (rest.done, rest.steps, len(await story.take_names())) == (True, 2, 1_500)
    assert await story.log() == []


async def test_names_are_those_of_bodies_only(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    abouts = [pack_about(1), pack_about(1, size=3), pack_about(1, size=3, body="elsewhere"), "foreign"]
    abouts += [pack_about(1, "group", {"a b": "c d"}, size=9)]
    await engine.publish(story.lease, [Outgoing("", f"u{at}", about) for at, about in enumerate(abouts)])
    assert await commit(story, 6) == ["u1", "elsewhere", "u4"]


async def test_a_retained_topic_keeps_what_is_committed(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic, 5, TopicSettings(retention_ms=FOREVER))
    assert await commit(story, 6) == []
    assert await story.log() == [1, 2, 3, 4, 5]
    assert await position(story) == 6


async def test_a_wide_hole_is_passed_in_one_step(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic, 3)
    await story.subscribe("slow", start="earliest", consumers=())
    await commit(story, 4)
    await engine.store.command("HSET", story.keys.meta, "last", 5_000_000)  # as if they had come and gone
    await engine.publish(story.lease, [Outgoing("", "new", pack_about(1, size=1))])
    await engine.delete_subscription(topic, "slow")
    await story.take_names()
    committed = await engine.commit(topic, "spark", "r1", 0, 5_000_002)
    assert (committed.done, committed.steps, await story.take_names()) == (True, 1, ["new"])


# Others on the same topic


@pytest.mark.parametrize("mode", MODES)
async def test_an_entry_stays_while_another_subscription_owes_it(
    engine: Engine, topic: str, mode: str
) -> None:
    story = await begin(engine, topic)
    await story.subscribe("other", mode)
    await publish(story, 10)
    assert await commit(story, 11) == []  # the other has not begun
    assert await story.log() == list(range(1, 11))
    deliveries = await story.fetch(permits=6, name="other")  # leases 1 to 6
    await story.nack(*receipts(deliveries)[:1], delay_ms=600_000, name="other")
    held = {entry for one in deliveries for entry in range(one.receipt.first, one.receipt.last + 1)}
    assert await check_topic(engine, topic) == []
    await engine.seek(topic, "spark", "earliest")
    assert await commit(story, 11) == []
    assert await story.log() == list(range(1, 11))
    assert held <= set(await story.log())


@pytest.mark.parametrize("mode", MODES)
async def test_what_another_has_settled_goes_and_what_it_holds_stays(
    engine: Engine, topic: str, mode: str
) -> None:
    story = await begin(engine, topic)
    await story.subscribe("other", mode)
    await publish(story, 12)
    deliveries = await story.fetch(permits=12, name="other")
    settled = {"shared": [3, 4, 9], "key_shared": [1, 2]}.get(mode, [1, 2, 3])
    lanes = {entry: one.receipt for one in deliveries for entry in [m.entry for m in one.messages]}
    await story.ack(*(part(lanes[entry], entry) for entry in settled), name="other")
    assert await commit(story, 13) == [f"uid-{entry - 1}" for entry in settled]
    left = [entry for entry in range(1, 13) if entry not in settled]
    assert await story.log() == left
    await story.ack(*(part(lanes[entry], entry) for entry in left), name="other")
    assert await story.log() == []


async def test_the_last_of_many_readers_drops_the_entries(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    await story.subscribe("second", "cursor", consumers=())
    await engine.claim(topic, "second", "r2", HOUR_MS)
    await publish(story, 6)
    assert await commit(story, 5) == []
    assert await commit(story, 4, "r2", "second") == ["uid-0", "uid-1", "uid-2"]
    assert await story.log() == [4, 5, 6]
    assert await commit(story, 7, "r2", "second") == ["uid-3"]
    assert await commit(story, 7) == ["uid-4", "uid-5"]


async def test_entries_across_ledgers_are_dropped_by_their_ids(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic, 5)
    for _ in range(3):
        await engine.release(story.lease)
        story.lease = await must_acquire(engine, topic)
        await engine.publish(story.lease, [Outgoing("a", f"l{story.lease.epoch}", pack_about(1, size=1))])
    await story.subscribe("other", "shared", start="earliest")
    await story.fetch(permits=1, name="other")
    await story.engine.seek(topic, "other", "latest")
    lines = await engine.read(topic, 0, 1, 9)
    assert lines.ranges == [1, 8]
    assert len(await commit(story, 8)) == 7
    assert await story.log() == [8]
    assert (await engine.read(topic, 0, 1, 9)).ranges == [8, 8]


async def test_deleting_the_other_subscription_drops_what_was_committed(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    await story.subscribe("other")
    await publish(story, 6)
    await commit(story, 4)
    assert await story.log() == [1, 2, 3, 4, 5, 6]
    await engine.delete_subscription(topic, "other")
    assert await story.log() == [4, 5, 6]


# The one reader


async def test_a_second_reader_is_told_who_has_it_and_for_how_long(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    await begin(engine, topic)
    await engine.release_claim(topic, "spark", "r1")
    assert await engine.claim(topic, "spark", "r2", 10_000) == Claimed(True, "r2", 10_000)
    await timed.advance(4_000)
    assert await engine.claim(topic, "spark", "r3", 10_000) == Claimed(False, "r2", 6_000)
    assert (await engine.claim(topic, "spark", "r2", 10_000)).granted  # renewed
    await timed.advance(9_999)
    assert await engine.claim(topic, "spark", "r3", 10_000) == Claimed(False, "r2", 1)
    await timed.advance(1)
    assert (await engine.claim(topic, "spark", "r3", 10_000)).granted
    assert await engine.claim(topic, "spark", "r2", 10_000) == Claimed(False, "r3", 10_000)


async def test_only_the_reader_that_claimed_last_commits(timed: ManualTime, topic: str) -> None:
    engine = timed.engine
    story = await begin(engine, topic, 9)
    await timed.advance(2 * HOUR_MS)
    assert await commit(story, 3) == ["uid-0", "uid-1"]  # its session is over, but nobody has taken its place
    assert (await engine.claim(topic, "spark", "r2", 1_000)).granted
    await timed.advance(2_000)
    with pytest.raises(ConsumerReplaced, match="is now read by 'r2', which claimed it after 'r1'"):
        await commit(story, 5)
    assert await position(story) == 3
    assert await commit(story, 4, "r2") == ["uid-2"]
    await engine.release_claim(topic, "spark", "r2")
    with pytest.raises(ConsumerReplaced):
        await commit(story, 6)
    assert await commit(story, 5, "r2") == ["uid-3"]


async def test_a_commit_needs_a_claim(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("spark", "cursor", consumers=())
    await publish(story, 2)
    with pytest.raises(InvalidArgument, match="'r1' must claim it before it commits"):
        await commit(story, 2)


async def test_a_release_by_somebody_else_ends_nothing(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    await engine.release_claim(topic, "spark", "r2")
    assert await engine.store.command("ZRANGE", story.sub("spark").consumers, 0, -1) == ["r1"]


async def test_of_two_claims_that_overtake_each_other_the_newer_counts_everywhere(
    timed: ManualTime, topic: str
) -> None:
    engine = timed.engine
    await engine.create_topic(topic, TopicSettings(partitions=2))
    await engine.create_subscription(topic, "spark", SubscriptionSettings("cursor"))

    async def claim(partition: int, reader: str, decision: int | str) -> list[Any]:
        keys = subscription_keys(topic, partition, "spark")
        return await engine.store.run("subscription/claim", keys, "", "spark", reader, 1_000, decision, 0, 0)

    _, old = await claim(0, "r1", "")
    await timed.advance(2_000)
    _, new = await claim(0, "r2", "")
    assert await claim(1, "r2", new) == ["OK", new]
    assert await claim(1, "r1", old) == ["BUSY", "r2", 1_000]
    assert await claim(0, "r1", "") == ["BUSY", "r2", 1_000]


# What it is not


async def test_nothing_of_it_can_be_leased(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic, 3)
    with pytest.raises(InvalidArgument, match=r"read by position .* use another subscription"):
        await engine.join(story.lease, "spark", "c")
    with pytest.raises(InvalidArgument, match=r"read by position .* use another subscription"):
        await engine.fetch(story.lease, "spark", [Capacity("c", 10)])
    with pytest.raises(InvalidArgument, match="no deliveries to pause"):
        await engine.pause_subscription(topic, "spark", True)
    await engine.pause_subscription(topic, "spark", False)
    settings = SubscriptionSettings("cursor", "at_most_once")
    with pytest.raises(InvalidArgument, match="at_most_once does not apply"):
        await engine.create_subscription(topic, "other", settings)


async def test_expire_does_no_harm_to_its_reader(timed: ManualTime, topic: str) -> None:
    story = await begin(timed.engine, topic, 3)
    assert (await timed.engine.expire(story.lease, "spark")).released == 0
    await timed.advance(2 * HOUR_MS)
    assert (await timed.engine.expire(story.lease, "spark")).expired_consumers == ["r1"]
    assert await commit(story, 3) == ["uid-0", "uid-1"]


@pytest.mark.parametrize("mode", MODES)
async def test_other_modes_are_not_read_by_position(engine: Engine, topic: str, mode: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("s", mode)
    await story.publish_many(2)
    with pytest.raises(InvalidArgument, match=f"has mode {mode}: only one of mode cursor is read"):
        await engine.claim(topic, "s", "r1", 1_000)
    with pytest.raises(InvalidArgument, match=f"has mode {mode}"):
        await engine.commit(topic, "s", "r1", 0, 2)
    assert await position(story, "s") == 1


async def test_a_deleted_subscription_is_named(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic, 3)
    await engine.delete_subscription(topic, "spark")
    with pytest.raises(SubscriptionNotFound, match="'spark'"):
        await commit(story, 2)
    with pytest.raises(SubscriptionNotFound, match="'spark'"):
        await engine.claim(topic, "spark", "r1", 1_000)
    with pytest.raises(SubscriptionNotFound, match="'spark'"):
        await engine.offsets(topic, "spark")


# Moving it


async def test_seek_moves_it_back_and_forth(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic, 10)
    await story.subscribe("other", start="earliest")
    await commit(story, 6)
    await engine.seek(topic, "spark", "earliest")
    assert await position(story) == 1
    assert await commit(story, 4) == []
    await engine.seek(topic, "spark", 9, 0)
    assert await position(story) == 9
    await engine.delete_subscription(topic, "other")
    assert await story.log() == [9, 10]
    await engine.seek(topic, "spark", "latest")
    assert await story.log() == []


# Reading


async def test_a_range_is_read_page_by_page_with_its_holes(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    await story.subscribe("other", "shared")
    await publish(story, 10)
    [delivery] = await story.fetch(permits=10, name="other")
    await engine.seek(topic, "spark", "latest")
    await story.ack(*(part(delivery.receipt, entry) for entry in (1, 4, 5, 9)), name="other")
    whole = await engine.read(topic, 0, 1, 11)
    assert (whole.ranges, whole.next) == ([2, 3, 6, 8, 10, 10], 11)
    assert whole.flat[1::3] == [f"uid-{entry - 1}" for entry in (2, 3, 6, 7, 8, 10)]
    page = await engine.read(topic, 0, 1, 11, limit=3)
    assert (page.ranges, page.next) == ([2, 3, 6, 6], 7)
    page = await engine.read(topic, 0, page.next, 9, limit=3)
    assert (page.ranges, page.next) == ([7, 8], 9)
    assert (await engine.read(topic, 0, 4, 6)).ranges == []
    assert (await engine.read(topic, 0, 11, 11)).next == 11


@pytest.mark.parametrize("limit", [1, 7, 100, 5_000])
async def test_pages_are_the_whole_whether_or_not_there_are_holes(
    engine: Engine, topic: str, limit: int
) -> None:
    story = await begin(engine, topic)
    await story.subscribe("other", "shared")
    await publish(story, 260)
    [delivery] = await story.fetch(permits=260, name="other")
    await engine.seek(topic, "spark", "latest")
    gone = {entry for entry in range(1, 261) if (120 < entry < 200 and entry % 3) or entry in (1, 230, 260)}
    await story.ack(*(part(delivery.receipt, entry) for entry in sorted(gone)), name="other")
    for first, end in ((1, 261), (100, 240), (121, 123), (199, 261)) if limit > 1 else ((120, 150),):
        found, start = [], first
        while start < end:
            page = await engine.read(topic, 0, start, end, limit=limit)
            assert len(page.flat) <= 3 * limit
            assert start < page.next <= end
            found += page.flat[1::3]
            start = page.next
        assert found == [f"uid-{entry - 1}" for entry in range(first, end) if entry not in gone]


async def test_what_is_heavy_comes_in_more_pages(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic)
    heavy = "x" * 60_000
    await engine.publish(story.lease, [Outgoing("", f"u{n}", heavy) for n in range(25)])
    pages, start = 0, 1
    while start < 26:
        page = await engine.read(topic, 0, start, 26)
        assert page.ranges == [start, page.next - 1]
        assert len(page.flat) == 3 * (page.next - start)
        assert sum(map(len, page.flat)) < 600_000
        pages, start = pages + 1, page.next
    assert pages == 4


@pytest.mark.parametrize(("start", "end"), [(0, 2), (3, 2), (1, 5), (-1, 1), (2, 10**15)])
async def test_a_range_that_cannot_be_is_refused_by_name(
    engine: Engine, topic: str, start: int, end: int
) -> None:
    await begin(engine, topic, 3)
    with pytest.raises(InvalidArgument, match=f"positions {start} to {end} of the log of partition 0"):
        await engine.read(topic, 0, start, end)
    with pytest.raises(TopicNotFound, match="no partition 1 in topic"):
        await engine.read(topic, 1, 1, 2)
    with pytest.raises(TopicNotFound, match="no-such-topic"):
        await engine.read("no-such-topic", 0, 1, 2)


async def journal(story: Story) -> list[tuple[str, ...]]:
    """What, sub, by and entries of each record but those of other kinds."""
    [here] = await story.engine.offsets(story.topic)
    lines = await story.engine.read(story.topic, 0, 1, here.journal_latest, journal=True)
    records = list(zip(*(iter(lines.flat),) * 5, strict=True))
    return [record[1:] for record in records if record[1] in ("committed", "lost")]


async def test_the_journal_tells_what_was_committed_and_is_not_there(engine: Engine, topic: str) -> None:
    story = await begin(engine, topic, 0, TopicSettings(journal=1_000))
    await story.subscribe("other")
    await publish(story, 12)
    for entry in (3, 7, 8, 12):
        await engine.store.command("XDEL", story.keys.log, story.id(entry))
    await commit(story, 6)
    assert await journal(story) == [("committed", "spark", "r1", "1-2 4-5"), ("lost", "spark", "", "3")]
    await engine.delete_subscription(topic, "other")
    assert len(await commit(story, 13)) == 8  # those that went with the other one, too
    assert (await journal(story))[2:] == [
        ("committed", "spark", "r1", "6 9-11"),
        ("lost", "spark", "", "7-8 12"),
    ]


async def test_what_had_left_the_log_before_is_neither_committed_nor_lost(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, TopicSettings(journal=1_000))
    await story.subscribe("other")
    await publish(story, 6)
    [receipt] = receipts(await story.fetch(name="other"))
    await story.ack(part(receipt, 2, 4), name="other")
    await story.subscribe("spark", "cursor", consumers=(), start="earliest")
    await engine.claim(topic, "spark", "r1", HOUR_MS)
    await commit(story, 7)
    assert await journal(story) == [("committed", "spark", "r1", "1 5-6")]


@pytest.mark.parametrize("behind", [False, True])
async def test_with_a_journal_a_commit_goes_step_by_step_too(
    engine: Engine, topic: str, behind: bool
) -> None:
    story = await begin(engine, topic, 0, TopicSettings(journal=1_000))
    if behind:
        await story.subscribe("other")
    await publish(story, 2_500)
    committed = await engine.commit(topic, "spark", "r1", 0, 2_501)
    assert (committed.done, committed.steps) == (True, 3)
    assert [record[3] for record in await journal(story)] == ["1-1000", "1001-2000", "2001-2500"]


async def test_the_journal_is_read_like_a_log(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, TopicSettings(journal=1_000))
    await story.subscribe("spark", "cursor", consumers=())
    await engine.claim(topic, "spark", "r1", HOUR_MS)
    await publish(story, 3)
    await commit(story, 3)
    [here] = await engine.offsets(topic)
    assert here.journal_earliest == 1
    lines = await engine.read(topic, 0, 1, here.journal_latest, journal=True)
    records = list(zip(*(iter(lines.flat),) * 5, strict=True))
    assert lines.ranges == [1, len(records)]
    assert [record[1:] for record in records] == [
        ("moved", "", story.lease.text, "1"),
        ("subscribed", "spark", "", "1"),
        ("published", "", str(story.lease.epoch), "1-3"),
        ("committed", "spark", "r1", "1-2"),
    ]
    with pytest.raises(InvalidArgument, match="of the journal of partition 0"):
        await engine.read(topic, 0, 1, here.journal_latest + 1, journal=True)
    with pytest.raises(TopicNotFound, match="no partition 7"):
        await engine.read(topic, 7, 1, 2, journal=True)


async def test_a_seek_is_not_undone_by_a_commit_of_what_was_read_before(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, TopicSettings(retention_ms=FOREVER))
    await story.subscribe("spark", "cursor", consumers=())
    await story.publish_many(10)
    assert (await engine.claim(topic, "spark", "r1", HOUR_MS)).granted
    [before] = await engine.offsets(topic, "spark")
    await engine.commit(topic, "spark", "r1", 0, 5, sought=before.sought)
    await engine.seek(topic, "spark", "earliest")
    with pytest.raises(SubscriptionMoved, match="moved by a seek to position 1 of partition 0"):
        await engine.commit(topic, "spark", "r1", 0, 8, sought=before.sought)
    [after] = await engine.offsets(topic, "spark")
    assert (after.position, after.sought) == (1, before.sought + 1)
    await engine.commit(topic, "spark", "r1", 0, 3, sought=after.sought)
    [here] = await engine.offsets(topic, "spark")
    assert here.position == 3
    assert (await engine.offsets(topic))[0].sought == 0


async def test_a_commit_of_what_was_read_before_does_not_move_a_subscription_made_anew(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic, TopicSettings(retention_ms=FOREVER))
    await story.subscribe("spark", "cursor", consumers=())
    await story.publish_many(10)
    assert (await engine.claim(topic, "spark", "r1", HOUR_MS)).granted
    [before] = await engine.offsets(topic, "spark")
    await engine.delete_subscription(topic, "spark")
    await story.subscribe("spark", "cursor", consumers=(), start="earliest")
    assert (await engine.claim(topic, "spark", "r1", HOUR_MS)).granted
    with pytest.raises(SubscriptionMoved):
        await engine.commit(topic, "spark", "r1", 0, 8, sought=before.sought)
    [after] = await engine.offsets(topic, "spark")
    assert after.position == 1
    await engine.commit(topic, "spark", "r1", 0, 3, sought=after.sought)
    assert (await engine.offsets(topic, "spark"))[0].position == 3


async def test_bodies_are_kept_by_their_age_also_when_the_clock_went_back(
    timed: ManualTime, topic: str
) -> None:
    """What was published is ahead of the clock of Redis then, by which lifetimes end."""
    story = await begin(timed.engine, topic, 1)
    await timed.set_back(500_000)
    await publish(story, 2)
    await timed.advance(100_000)
    names, _ = await timed.engine.owed(topic, 0, "log -", timed.clock_ms - 50_000)
    assert names == ["uid-0", "uid-1"]


# Which topic, which subscription, which history


async def test_a_claim_and_a_commit_are_for_the_topic_and_the_subscription_that_they_mean(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("spark", "cursor", consumers=())
    [first] = await engine.offsets(topic, "spark")
    meant = {
        "incarnation": first.incarnation,
        "subscription_incarnation": first.subscription_incarnation,
    }
    assert first.subscription_incarnation == (await engine.describe_subscription(topic, "spark")).incarnation
    assert (await engine.offsets(topic))[0].subscription_incarnation == 0
    assert (await engine.claim(topic, "spark", "r1", HOUR_MS, **meant)).granted

    await engine.delete_subscription(topic, "spark")
    await story.subscribe("spark", "cursor", consumers=())
    await story.publish_many(5)
    with pytest.raises(SubscriptionNotFound, match="deleted and recreated"):
        await engine.claim(topic, "spark", "r1", HOUR_MS, **meant)
    assert await engine.store.command("HGET", story.sub("spark").sub, "reader") is None
    [second] = await engine.offsets(topic, "spark")
    assert (await engine.claim(topic, "spark", "r1", HOUR_MS)).granted
    with pytest.raises(SubscriptionNotFound, match="deleted and recreated"):
        await engine.commit(topic, "spark", "r1", 0, 3, sought=second.sought, **meant)
    with pytest.raises(TopicReplaced):
        await engine.claim(topic, "spark", "r1", HOUR_MS, incarnation=first.incarnation + 1)
    with pytest.raises(TopicReplaced):
        await engine.commit(topic, "spark", "r1", 0, 3, sought=second.sought, incarnation=1)
    assert await position(story) == 1


async def test_entries_that_are_given_twice_are_told_from_those_of_another_owner(
    engine: Engine, topic: str
) -> None:
    """The server has lost writes: it gives the same entries again, in a newer ledger."""
    story = await begin(engine, topic, 10)
    [read] = await engine.offsets(topic, "spark")
    assert (read.ledger, read.anew) == (story.lease.epoch, 0)
    known = {0: read.ledger}
    await engine.release(story.lease)
    await must_acquire(engine, topic, 0, "w2")
    [here] = await engine.offsets(topic, "spark", known)
    assert (here.ledger > read.ledger, here.anew) == (True, 11)  # nothing before that
    await engine.commit(topic, "spark", "r1", 0, 5, sought=read.sought, ledger=read.ledger)

    # As if the newest had not been written; then there are others, and one more owner.
    await engine.store.command("XDEL", story.keys.log, *(f"{read.ledger}-{entry}" for entry in (8, 9, 10)))
    await engine.store.command("HSET", story.keys.meta, "last", "7")
    for entries in (range(3), range(3, 9)):
        lease = await must_acquire(engine, topic, 0, "w2")
        await engine.publish(lease, [Outgoing("", f"other-{number}", pack_about(1)) for number in entries])
    [here] = await engine.offsets(topic, "spark", known)
    assert (here.latest, here.ledger, here.anew) == (17, lease.epoch, 8)
    assert (await engine.offsets(topic, "spark", {0: lease.epoch}))[0].anew == 0
    await engine.commit(topic, "spark", "r1", 0, 8, sought=read.sought, ledger=read.ledger)  # before them
    with pytest.raises(MessagesLost, match="from entry 8 on"):
        await engine.commit(topic, "spark", "r1", 0, 9, sought=read.sought, ledger=read.ledger)
    assert await position(story) == 8
    with pytest.raises(InvalidArgument, match="ledger"):
        await engine.offsets(topic, "spark", {0: -1})
