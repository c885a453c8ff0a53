"""Filters: what does not match is never owed, in every mode, and costs no fetch anything."""

import re
from collections.abc import AsyncIterator
from fnmatch import fnmatchcase
from pathlib import Path
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.errors import InvalidArgument, SubscriptionExists
from keylane.wire import pack_about
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.filters import MAX_GLOB, Filter, parse_filter
from keylane_broker.engine.values import Capacity, Outgoing, Published, SubscriptionSettings, TopicSettings
from keylane_broker.store.scripts import Scripts, read_sources
from keylane_broker.store.store import Store
from tests.support.calls import watch_calls
from tests.support.clock import ManualTime
from tests.support.fake import fake_engine
from tests.support.servers import SERVERS, Backends, look_and_leave
from tests.support.story import HOUR_MS, Story, entries, message, must_acquire, receipts

NOBODY = Published(None, no_subscribers=True)
MODES = ("shared", "key_shared", "exclusive", "failover")
EU = Filter(keys="eu-*")
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text("utf-8")


def about(**attributes: str) -> Outgoing:
    """A message with attributes."""
    return message()._replace(about=pack_about(1, attributes=attributes))


async def subscribe(
    story: Story, name: str, filter: Filter, mode: str = "shared", start: str | int = "latest"
) -> None:
    """Make a filtered subscription with a consumer."""
    made = SubscriptionSettings(mode, filter=filter)
    await story.engine.create_subscription(story.topic, name, made, start=start)
    await story.engine.join(story.lease, name, "c", HOUR_MS)


# Globs


def script() -> str:
    """The script that says which keys a filter lets through."""
    source = read_sources()["lib/filter"]
    return source + "\n".join(
        [
            "",
            "local filters = open_filters()",
            "local filter, answers = filters.read(ARGV[1]), {}",
            "for index = 2, #ARGV do",
            "answers[#answers + 1] = filters.wants(filter, ARGV[index], {}) and 1 or 0",
            "end",
            "return answers",
        ]
    )


async def fitting(engine: Engine, glob: str, keys: list[str]) -> list[bool]:
    """Which keys a glob fits, as the scripts see it."""
    text = Filter(keys=glob).text
    answers = await engine.store.command("EVAL", script(), 0, text, *keys)
    return [answer == 1 for answer in answers]


def vectors() -> list[tuple[str, list[str], list[str]]]:
    """The globs in the protocol's table, and the keys that they fit and do not fit."""
    table = PAGE[PAGE.index("| glob | fits | does not fit |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[re.findall("`([^`]+)`", cell) for cell in line.strip("|").split(" | ")] for line in table]
    return [(glob[0], good, bad) for glob, good, bad in cells]


@pytest.mark.parametrize(("glob", "good", "bad"), vectors())
async def test_the_globs_of_the_protocol(glob: str, good: list[str], bad: list[str], engine: Engine) -> None:
    assert await fitting(engine, glob, good) == [True] * len(good)
    assert await fitting(engine, glob, bad) == [False] * len(bad)


GLOBS = st.lists(
    st.sampled_from(["*", "?", "[ab]", "[!a]", "[a-c-]", "a", "b", "é", "日", ".", "%", "^", "-"])
)
TEXTS = st.text("abcé日.%^-", max_size=12)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(pieces=GLOBS.filter(bool), keys=st.lists(TEXTS, min_size=20, max_size=60))
async def test_a_glob_fits_what_python_says(pieces: list[str], keys: list[str]) -> None:
    engine, glob = fake_engine(), "".join(pieces)
    keys += [glob.replace("*", "a").replace("?", "é"), ""]
    assert await fitting(engine, glob, keys) == [fnmatchcase(key, glob) for key in keys]


async def test_no_glob_takes_long(engine: Engine) -> None:
    key = "a" * 1_023 + "c"
    for glob in ("a*" * 60 + "b", "*" + "a" * 200 + "b", "*" + "?" * 100 + "b", "*a?" * 50 + "b"):
        began = perf_counter()
        assert await fitting(engine, glob, [key] * 3) == [False] * 3
        assert perf_counter() - began < 2, glob  # exponential would be for ever


@pytest.mark.parametrize(
    "filter",
    [
        Filter(keys=""),
        Filter(keys="a" * (MAX_GLOB + 1)),
        Filter(keys="a\0b"),
        Filter(keys="a[b"),
        Filter(keys="[]"),
        Filter(keys="[é]"),
        Filter(keys="[z-a]"),
        Filter(keys="\ud800"),
        Filter(keys=7),  # type: ignore[arg-type]
        Filter(filter={}),
        Filter(filter={"a": "\0"}),
        Filter(filter={"a": "x" * 5_000}),
        Filter(filter={"a": 7}),  # type: ignore[dict-item]
        Filter(filter={f"a{n}": "" for n in range(17)}),
        Filter(filter=["a"]),  # type: ignore[arg-type]
    ],
)
async def test_a_filter_that_cannot_be_judged_is_refused(filter: Filter) -> None:
    engine = fake_engine()
    await engine.create_topic("t")
    with pytest.raises(InvalidArgument):
        await engine.create_subscription("t", "s", SubscriptionSettings(filter=filter))
    assert await engine.subscriptions("t") == []


async def test_what_is_read_by_position_has_no_filter(engine: Engine, topic: str) -> None:
    await engine.create_topic(topic)
    with pytest.raises(InvalidArgument, match="mode cursor"):
        await engine.create_subscription(topic, "s", SubscriptionSettings("cursor", filter=EU))


# What is owed


@pytest.mark.parametrize("mode", MODES)
async def test_only_what_matches_is_delivered_and_the_rest_is_not_stored(
    mode: str, engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await subscribe(story, "s", EU, mode)
    result = await story.publish("eu-1", "us-1", "eu-2", "", "us-2")
    assert result.each() == [Published(story.id(1)), NOBODY, Published(story.id(2)), NOBODY, NOBODY]
    deliveries = await story.fetch()
    assert [message.key for delivery in deliveries for message in delivery.messages] == ["eu-1", "eu-2"]
    assert await story.ack(*receipts(deliveries)) == ["settled"] * len(deliveries)
    assert await story.log() == []
    assert not await story.exists(story.sub().matches)


@pytest.mark.parametrize("mode", MODES)
async def test_what_others_are_owed_is_passed_without_a_trace(mode: str, engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("all")
    await subscribe(story, "s", EU, mode)
    await story.publish("us-1", "eu-1", "us-2", "us-3", "eu-2", "eu-3", "us-4")
    assert await story.take() == [2, 5, 6]
    assert await story.take() == []
    assert await story.take(name="all") == [1, 2, 3, 4, 5, 6, 7]


async def test_an_entry_goes_when_those_who_want_it_have_settled_it(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("all")
    await subscribe(story, "s", EU)
    await story.publish("us-1", "eu-1", "us-2")
    await story.ack(*receipts(await story.fetch(name="all")), name="all")
    assert await story.log() == [2]  # owed to s, which has not been asked
    await story.ack(*receipts(await story.fetch()))
    assert await story.log() == []


async def test_attributes_are_equal_or_there(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await subscribe(story, "eu", Filter(filter={"region": "eu"}))
    await subscribe(story, "urgent", Filter(filter={"urgent": None}))
    await subscribe(story, "both", Filter(filter={"region": "eu", "urgent": None}))
    odd = message()._replace(about="1  5 not even JSON")
    batch = [about(region="eu"), about(region="eu", urgent=""), about(urgent="x"), about(region="EU"), odd]
    result = await engine.publish(story.lease, [*batch, message(), about(Region="eu")])
    assert [answer.no_subscribers for answer in result.each()] == [False] * 3 + [True] * 4
    assert await story.take(name="eu") == [1, 2]
    assert await story.take(name="urgent") == [2, 3]
    assert await story.take(name="both") == [2]


async def test_attributes_are_compared_as_they_are_meant_not_as_they_are_written(
    engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await subscribe(story, "s", Filter(filter={"name": 'Zoë "7"'}))
    escaped = message()._replace(about=r'1 {group} 5:{body} {"x":"1", "name" : "Zo\u00eb \"7\""}')
    result = await engine.publish(story.lease, [escaped, about(name="Zoe"), about(name='Zoë "7"')])
    assert [answer.no_subscribers for answer in result.each()] == [False, True, False]


async def test_a_topic_that_retains_keeps_what_matches_nobody(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic, TopicSettings(retention_ms=HOUR_MS))
    await subscribe(story, "s", EU)
    assert (await story.publish("us-1", "eu-1", "us-2", "us-3")).stored == 4
    deliveries = await story.fetch()
    assert entries(deliveries) == [2]
    [written] = await engine.store.entries(story.keys.retained, [("-", "+")])
    assert [fields for _, fields in written] == [["entries", "1 3-4"]]
    await story.ack(*receipts(deliveries))
    [written] = await engine.store.entries(story.keys.retained, [("-", "+")])
    assert [fields for _, fields in written] == [["entries", "1 3-4"], ["entries", "2"]]
    await subscribe(story, "later", EU, start="earliest")
    assert await story.take(name="later") == [2]


async def test_a_uid_that_nobody_wanted_is_no_duplicate_later(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await subscribe(story, "s", EU)
    batch = [message("us-1", "u1"), message("eu-1", "u2"), message("us-1", "u1")]
    result = await engine.publish(story.lease, batch)
    assert result.each() == [NOBODY, Published(story.id(1)), NOBODY]
    await story.subscribe("all")
    result = await engine.publish(story.lease, batch)
    assert [answer.duplicate for answer in result.each()] == [False, True, True]


async def test_delayed_messages_are_judged_when_they_fall_due(timed: ManualTime, topic: str) -> None:
    story = await Story.begin(timed.engine, topic)
    await subscribe(story, "s", EU)
    batch = [message("us-1"), message("eu-1"), message("eu-2")]
    await timed.engine.delay(story.lease, batch, [timed.now_ms + 1_000] * 3)
    await timed.advance(1_000)
    told = await timed.engine.promote(story.lease)
    assert (told.appended, told.dropped) == (2, 1)
    assert await story.take() == [1, 2]


# What was there before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("start", "found"), [("earliest", [2, 4, 6, 7]), (4, [4, 6, 7]), ("latest", [7])])
async def test_a_filter_looks_through_what_was_there(
    mode: str, start: str | int, found: list[int], engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keylane_broker.engine.base.STEP", 2)
    story = await Story.begin(engine, topic)
    await story.subscribe("all")
    await story.publish("us-1", "eu-1", "us-2", "eu-2", "us-3", "eu-3")
    made = SubscriptionSettings(mode, filter=EU)
    at = {"start": start, "partition": None if isinstance(start, str) else 0}
    await engine.create_subscription(topic, "s", made, **at)  # type: ignore[arg-type]
    await engine.join(story.lease, "s", "c", HOUR_MS)
    await story.publish("eu-4", "us-4")
    assert await story.take() == found
    await story.ack(*receipts(await story.fetch(name="all")), name="all")
    assert await story.log() == found


async def test_a_seek_looks_through_the_log_again(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("all")
    await subscribe(story, "s", EU)
    await story.publish("us-1", "eu-1", "us-2", "eu-2")
    await story.ack(*receipts(await story.fetch()))
    await engine.seek(topic, "s", "earliest")
    assert await story.take() == [2, 4]
    await engine.seek(topic, "s", "latest")
    await story.ack(*receipts(await story.fetch(name="all")), name="all")
    assert await story.log() == []


async def test_a_fetch_goes_on_where_nobody_has_compared(engine: Engine, topic: str) -> None:
    """Who made or moved it has crashed in between."""
    story = await Story.begin(engine, topic)
    await story.subscribe("all")
    await subscribe(story, "s", EU)
    await story.publish(*["us-1"] * 700, "eu-1")
    await story.publish(*["us-2"] * 700, "eu-2")
    answer = await engine.store.run("subscription/seek", story.sub(), "", "s", "earliest", "")
    assert answer[0] == "OK"
    await story.publish("eu-3", "us-4")  # it is not abreast: this is compared later, too
    for _ in range(4):
        result = await engine.fetch(story.lease, "s", [Capacity("c", 10)])
        assert result.more
        if result.deliveries:
            break
    found = entries(result.deliveries)
    while result.more:
        result = await engine.fetch(story.lease, "s", [Capacity("c", 10)])
        found += entries(result.deliveries)
    assert found == [701, 1402, 1403]
    await story.ack(*receipts(await story.fetch(name="all", permits=1_000)), name="all")


async def test_what_left_the_log_meanwhile_is_not_missed(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("all")
    await story.publish("us-1", "eu-1", "us-2")
    await subscribe(story, "s", EU, start="earliest")
    await story.ack(*receipts(await story.fetch(name="all")), name="all")
    assert await story.log() == [2]
    deliveries = await story.fetch()
    assert entries(deliveries) == [2]
    await story.ack(*receipts(deliveries))
    assert await story.log() == []


@pytest.mark.parametrize("mode", MODES)
async def test_what_is_deleted_by_hand_holds_nothing_up(mode: str, engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await subscribe(story, "s", EU, mode)
    await story.publish("eu-1", "eu-2", "eu-3")
    await engine.store.command("XDEL", story.keys.log, story.id(1), story.id(2))
    story.lease = await must_acquire(engine, topic)  # else the engine still knows them
    for _ in range(4):
        if found := await story.take(permits=2):
            break
    assert found == [3]


# What is removed by hand


@pytest.mark.parametrize("mode", MODES)
async def test_what_matches_and_is_skipped_deleted_or_purged_is_not_delivered(
    mode: str, engine: Engine, topic: str
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("all")
    await subscribe(story, "s", EU, mode)
    await story.publish("us-1", "eu-1", "eu-2", "eu-3", "us-2")
    await engine.skip(topic, "s", f"0:{story.id(2)}")
    await engine.delete_message(topic, f"0:{story.id(3)}")
    assert await story.take() == [4]
    await story.publish("eu-4", "us-3")
    await engine.purge(topic, "s")
    assert await story.take() == []
    assert await story.take(name="all") == [1, 2, 4, 5, 6, 7]


async def test_what_is_skipped_before_it_was_compared_is_not_delivered(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("all")
    await subscribe(story, "s", EU)
    await story.publish("us-1", "eu-1", "eu-2")
    answer = await engine.store.run("subscription/seek", story.sub(), "", "s", "earliest", "")
    assert answer[0] == "OK"
    await engine.skip(topic, "s", f"0:{story.id(2)}")
    await engine.compare(topic, 0, "s")
    assert await story.take() == [3]
    assert not await story.exists(story.sub().skipped)


# What it costs


async def test_a_fetch_does_not_look_at_what_does_not_match(
    engine: Engine, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe("all")
    await subscribe(story, "s", EU, "key_shared")
    for _ in range(3):
        await story.publish(*["us-1"] * 999, "eu-1")
    calls = watch_calls(engine, monkeypatch)
    assert await story.take(permits=2) == [1_000, 2_000]
    assert await story.take() == [3_000]
    assert calls == ["subscription/fetch"] * 2
    monkeypatch.undo()
    await engine.delete_subscription(topic, "all")


@pytest.fixture
async def hurried(backends: Backends, topic: str) -> AsyncIterator[Engine]:
    """An engine whose calls judge a few messages each."""
    sources = read_sources()
    sources["lib/filter"] = sources["lib/filter"].replace("most = 5000", "most = 6")
    engine = Engine(Store.connect(backends.url(SERVERS[0]), Scripts(sources)))
    yield engine
    await look_and_leave(engine, topic)


async def test_a_publish_that_has_no_time_for_all_filters_leaves_the_rest_to_others(
    hurried: Engine, topic: str
) -> None:
    engine = hurried
    story = await Story.begin(engine, topic)
    await subscribe(story, "s", EU)
    await subscribe(story, "t", Filter(keys="us-*"), "key_shared")
    batch = [message(key) for key in ("eu-1", "x", "us-1", "x", "eu-2", "x", "us-2", "x")]
    batch = [one._replace(about=pack_about(1, size=3)) for one in batch]
    result = await engine.publish(story.lease, batch)
    assert result.behind
    assert 2 < result.stored < 8, "what was not judged was stored, and what was judged was not"
    await engine.compare_all(topic, 0)
    keys = {
        name: [one.key for item in await story.fetch(name=name) for one in item.messages] for name in "st"
    }
    assert keys == {"s": ["eu-1", "eu-2"], "t": ["us-1", "us-2"]}
    assert len(await story.log()) == 4
    gone = set(await story.take_names())
    stored = [one.uid for one, told in zip(batch, result.each(), strict=True) if not told.no_subscribers]
    assert gone == {one.uid for one in batch if one.key == "x" and one.uid in stored}
    assert not (await engine.publish(story.lease, [message("eu-9")])).behind


# A subscription keeps its filter


async def test_another_filter_is_refused_and_says_what_differs(engine: Engine, topic: str) -> None:
    await engine.create_topic(topic)
    made = SubscriptionSettings(filter=Filter("eu-*", {"kind": "order"}))
    await engine.create_subscription(topic, "s", made)
    await engine.create_subscription(topic, "s", made, exist_ok=True)
    assert (await engine.describe_subscription(topic, "s")).filter == made.filter
    for other, words in (
        (Filter(), "has keys eu-*, not None"),
        (Filter("us-*", {"kind": "order"}), "has keys eu-*, not us-*"),
        (Filter("eu-*", {"kind": None}), "has filter {'kind': 'order'}, not {'kind': None}"),
    ):
        with pytest.raises(SubscriptionExists, match=re.escape(words)):
            await engine.create_subscription(topic, "s", SubscriptionSettings(filter=other), exist_ok=True)


async def test_nothing_is_left_of_a_filter(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await subscribe(story, "s", EU)
    await story.publish("eu-1")
    assert await story.exists(story.keys.filters, story.sub().matches)
    await engine.delete_subscription(topic, "s")
    assert await story.log() == []
    assert not await story.exists(story.keys.filters, story.sub().matches)
    assert await engine.store.command("HGET", story.keys.meta, "filters") is None
    await subscribe(story, "s", EU)
    await story.publish("eu-1")
    await engine.delete_topic(topic)
    assert not await story.exists(story.keys.filters, story.sub().matches, story.keys.log)
    await engine.create_topic(topic)


def test_a_filter_is_stored_as_readable_text() -> None:
    made = Filter("eu-*", {"b": None, "a": "1"})
    assert made.text == '{"keys":"eu-*","filter":{"a":"1","b":null}}' or parse_filter(made.text) == made
    assert (Filter().text, parse_filter("")) == ("", Filter())
