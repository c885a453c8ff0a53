"""The partition's time: it never goes back, and after the clock of Redis did it goes on at its own speed."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keylane_broker.engine.values import Capacity, TopicSettings
from tests.support.clock import ManualTime
from tests.support.story import HOUR_MS, Story, entries, message, receipts

pytestmark = pytest.mark.anyio

WINDOW_MS = 60_000


async def begin(timed: ManualTime, topic: str, *keys: str) -> Story:
    """A story whose subscription owes messages of these keys."""
    await timed.advance(10 * HOUR_MS)  # so that there is something to go back to
    story = await Story.begin(timed.engine, topic, TopicSettings(dedupe_ms=WINDOW_MS))
    await story.subscribe()
    if keys:
        await story.publish(*keys)
    return story


async def now_of(story: Story) -> int:
    """The partition's time."""
    return (await story.engine.promote(story.lease)).now_ms


@pytest.mark.parametrize("there_and_back", [False, True], ids=["back", "forth and back"])
async def test_a_lease_lasts_as_long_as_it_should_after_the_clock_went_back(
    timed: ManualTime, topic: str, there_and_back: bool
) -> None:
    story = await begin(timed, topic, "a")
    if there_and_back:
        await timed.advance(HOUR_MS)
        await now_of(story)
    await timed.engine.join(story.lease, "s", "c", HOUR_MS)
    result = await timed.engine.fetch(story.lease, "s", [Capacity("c", 1, 1_000)])
    await timed.advance(-HOUR_MS)
    assert (await timed.engine.expire(story.lease, "s")).released == 0
    await timed.advance(999)
    assert (await timed.engine.expire(story.lease, "s")).released == 0
    await timed.advance(1)
    assert (await timed.engine.expire(story.lease, "s")).released == 1
    [outcome] = await story.ack(*receipts(result.deliveries))
    assert outcome == "stale"


async def test_a_session_lasts_as_long_as_it_should_after_the_clock_went_back(
    timed: ManualTime, topic: str
) -> None:
    story = await begin(timed, topic)
    await timed.engine.join(story.lease, "s", "d", 2_000)
    await timed.advance(-HOUR_MS)
    assert await timed.engine.renew_sessions(story.lease, "s", ["d"], 2_000) == []
    await timed.advance(1_999)
    assert (await timed.engine.expire(story.lease, "s")).expired_consumers == []
    await timed.advance(1)
    assert "d" in (await timed.engine.expire(story.lease, "s")).expired_consumers


async def test_a_uid_is_remembered_for_its_window_whatever_the_clock_does(
    timed: ManualTime, topic: str
) -> None:
    story = await begin(timed, topic)

    async def is_duplicate(uid: str) -> bool:
        return bool((await timed.engine.publish(story.lease, [message("k", uid)])).duplicates)

    await timed.advance(HOUR_MS)
    assert not await is_duplicate("one")
    await timed.advance(-HOUR_MS)
    assert await is_duplicate("one")
    await timed.advance(WINDOW_MS - 1)
    assert await is_duplicate("one"), "inside its window"
    await timed.advance(WINDOW_MS + 1)
    assert not await is_duplicate("one"), "and it goes with the window, in real time"


async def test_marks_have_no_life_of_their_own(timed: ManualTime, topic: str) -> None:
    story = await begin(timed, topic, "a")
    for key in (story.keys.marks_0, story.keys.marks_1):
        assert await timed.engine.store.command("PTTL", key) < 0, "one clock decides: the partition's"


async def test_a_delay_lasts_as_long_as_it_should(timed: ManualTime, topic: str) -> None:
    story = await begin(timed, topic)
    await timed.engine.delay(story.lease, [message("before")], [timed.now_ms + 1_000])
    await timed.advance(-HOUR_MS)
    assert (await timed.engine.promote(story.lease)).appended == 0
    # The caller knows the clock of Redis, and not how far the partition is ahead of it.
    await timed.engine.delay(story.lease, [message("after")], [timed.now_ms + 2_000])
    for ms, appended in ((999, 0), (1, 1), (999, 0), (1, 1)):
        await timed.advance(ms)
        assert (await timed.engine.promote(story.lease)).appended == appended


async def test_times_that_a_caller_names_are_those_of_redis(timed: ManualTime, topic: str) -> None:
    story = await begin(timed, topic, "a", "b")
    first, second = receipts(await story.fetch("c", 1) + await story.fetch("c", 1))
    await timed.advance(-HOUR_MS)
    assert (await timed.engine.nack(story.lease, "s", [first], until_ms=timed.now_ms + 500)).stale == []
    await timed.engine.extend(story.lease, "s", [second], until_ms=timed.now_ms + 700)
    await timed.advance(499)
    assert entries(await story.fetch()) == []
    await timed.advance(1)
    assert entries(await story.fetch()) == [1]
    await timed.advance(199)
    assert (await timed.engine.expire(story.lease, "s")).released == 0
    await timed.advance(1)
    assert (await timed.engine.expire(story.lease, "s")).released == 1


async def test_deadlines_are_answered_by_the_clock_of_the_caller(timed: ManualTime, topic: str) -> None:
    story = await begin(timed, topic, "a")
    await timed.advance(-HOUR_MS)
    await timed.engine.join(story.lease, "s", "c", HOUR_MS)
    clock_ms = 5_000_000
    fetched = await timed.engine.fetch_flat(story.lease, "s", [Capacity("c", 1, 700)], at_ms=clock_ms)
    assert fetched.now_ms == clock_ms
    assert fetched.next_due_ms == clock_ms + 700
    [held] = await timed.engine.list_leases(story.lease, "s", "c", at_ms=clock_ms)
    assert held.deadline_ms == clock_ms + 700
    extended = await timed.engine.extend(story.lease, "s", [held.receipt], lease_ms=1_300, at_ms=clock_ms)
    assert extended.deadline_ms == clock_ms + 1_300


STEPS = st.lists(
    st.tuples(st.integers(0, 5_000), st.one_of(st.just(0), st.integers(-HOUR_MS, HOUR_MS))), max_size=15
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
async def test_time_never_goes_back_and_runs_at_its_own_speed(
    timed: ManualTime, topic: str, steps: list[tuple[int, int]]
) -> None:
    """Between two calls some time passes, and then the clock may be set."""
    await timed.engine.create_topic(topic, exist_ok=True)
    lease = await timed.engine.acquire(topic, 0, "w1", HOUR_MS)
    assert lease is not None
    before = (await timed.engine.promote(lease)).now_ms
    for passed_ms, jump_ms in steps:
        await timed.advance(passed_ms + jump_ms)
        now = (await timed.engine.promote(lease)).now_ms
        # What a jump takes with it, it takes of what has passed unseen since the last call.
        assert now - before == max(0, passed_ms + jump_ms)
        assert now >= before
        if jump_ms == 0:
            assert now - before == passed_ms
        before = now
