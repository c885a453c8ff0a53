"""Bad input: a named error with the fact that explains it, and not one byte of the keyspace changed."""

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from keylane.errors import (
    BrokerError,
    InvalidArgument,
    InvalidName,
    MessageTooLarge,
    SubscriptionNotFound,
    TopicNotFound,
)
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import (
    Backoff,
    Capacity,
    Lease,
    Outgoing,
    Receipt,
    SubscriptionSettings,
    TopicSettings,
)
from tests.support.clock import ManualTime
from tests.support.story import HOUR_MS, Story, message, must_acquire, receipts

BAD_NAMES = {
    "empty": "",
    "oversize": "n" * 201,
    "colon": "a:b",
    "opening brace": "a{b",
    "closing brace": "a}b",
    "star": "a*",
    "question mark": "a?",
    "space": "a b",
    "leading dot": ".a",
    "leading dash": "-a",
    "line feed": "a\n",
    "NUL": "a\0",
    "escape": "a\x1b[2J",
    "delete": "a\x7f",
    "slash": "a/b",
    "bar": "a|b",
    "letters with accents": "naïve",
    "fullwidth letters": "\uff41",
    "lone surrogate": "\ud800",
    "bytes": b"abc",
    "number": 7,
    "nothing": None,
}
LARGE = 10**14  # what Lua would print as a float
FAR = int(timedelta.max.total_seconds()) * 1000
NOT_TIMES = {"negative": -1, "float": 1.5, "large": LARGE, "far": FAR, "bool": True, "text": "5"}


async def contents(engine: Engine) -> dict[str, Any]:
    """Everything that the server holds, key by key."""
    keys = sorted(await engine.store.keys_like("*"))
    types = await engine.store.atomically([("TYPE", key) for key in keys])
    readers = {
        "hash": ("HGETALL",),
        "set": ("SMEMBERS",),
        "stream": ("XRANGE", "-", "+"),
        "string": ("GET",),
        "zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    }
    commands = []
    for key, kind in zip(keys, types, strict=True):
        command, *options = readers[kind]
        commands.append((command, key, *options))
    return dict(zip(keys, await engine.store.atomically(commands), strict=True))


class Scene:
    """A topic in the middle of its life, and one receipt of each kind that is still good."""

    def __init__(self, story: Story, run: Receipt, lane: Receipt) -> None:
        self.story = story
        self.engine: Any = story.engine  # the bad calls are exactly those that types forbid
        self.lease: Lease = story.lease
        self.topic = story.topic
        self.run = run
        self.lane = lane


Call = Callable[[Scene], Awaitable[Any]]
BAD_CALLS: dict[str, tuple[type[BrokerError], Call]] = {}


def bad(label: str, error: type[BrokerError], call: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
    """Note a call that must be refused, with the scene and these arguments."""
    assert label not in BAD_CALLS
    BAD_CALLS[label] = (error, lambda scene: call(scene, *arguments))


for what, name in BAD_NAMES.items():
    bad(f"topic named {what}", InvalidName, lambda s, name: s.engine.create_topic(name), name)
    bad(f"delete topic {what}", InvalidName, lambda s, name: s.engine.delete_topic(name), name)
    bad(f"acquire of topic {what}", InvalidName, lambda s, name: s.engine.acquire(name, 0, "w1", 1_000), name)
    bad(f"worker named {what}", InvalidName, lambda s, name: s.engine.acquire(s.topic, 0, name, 1_000), name)
    bad(
        f"subscription named {what}",
        InvalidName,
        lambda s, name: s.engine.create_subscription(s.topic, name),
        name,
    )
    bad(
        f"fetch for {what}",
        InvalidName,
        lambda s, name: s.engine.fetch(s.lease, name, [Capacity("c", 1)]),
        name,
    )
    bad(f"seek of {what}", InvalidName, lambda s, name: s.engine.seek(s.topic, name, "latest"), name)
    bad(f"consumer named {what}", InvalidName, lambda s, name: s.engine.join(s.lease, "s", name), name)

for what, count in {"none": 0, "negative": -1, "too many": 10_001, "float": 2.5, "bool": True}.items():
    settings = TopicSettings(partitions=count)  # type: ignore[arg-type]
    bad(
        f"partitions {what}",
        InvalidArgument,
        lambda s, settings: s.engine.create_topic(s.topic + "x", settings),
        settings,
    )
for what, window in {"negative": -1, "float": 1.25, "large": LARGE, "text": "x"}.items():
    settings = TopicSettings(dedupe_ms=window)  # type: ignore[arg-type]
    bad(
        f"dedupe window {what}",
        InvalidArgument,
        lambda s, settings: s.engine.create_topic(s.topic + "x", settings),
        settings,
    )

for what, batch in {
    "empty": [],
    "of 1,001": [message()] * 1_001,
    "of 10,000": [message()] * 10_000,
    "with a NUL in a key": [message(), message("a\0b")],
    "with an empty uid": [message(), Outgoing("a", "", "")],
    "with a key of bytes": [message(), Outgoing(b"a", "u", "")],  # type: ignore[arg-type]
    "with a uid that is a number": [message(), Outgoing("a", 5, "")],  # type: ignore[arg-type]
    "with nothing about it": [message(), Outgoing("a", "u", None)],  # type: ignore[arg-type]
    "with half a message": [message(), ("a", "u")],
    "with no message": [message(), 5],
    "with a surrogate in a key": [message(), message("\ud800")],
    "with a surrogate in a uid": [message(), message("a", "\ud800")],
    "with a surrogate about it": [message(), Outgoing("a", "u", "\ud800")],
}.items():
    bad(f"batch {what}", InvalidArgument, lambda s, batch: s.engine.publish(s.lease, batch), batch)
for what, large in {
    "key": message("k" * 1_025),
    "key in bytes": message("é" * 513),
    "uid": message("", "u" * 257),
    "about": Outgoing("", "u", "x" * 65_537),
}.items():
    bad(
        f"oversize {what}",
        MessageTooLarge,
        lambda s, large: s.engine.publish(s.lease, [message(), large]),
        large,
    )
for level in ("", "MEMORY", "disk", "memory:1", "fsync:1", "replicated:x", "replicated:0", "replicated:-1"):
    bad(
        f"durability {level!r}",
        InvalidArgument,
        lambda s, level: s.engine.publish(s.lease, [message()], durability=level, timeout_ms=10),
        level,
    )

for what, given in {
    "no receipts": lambda s: [],
    "1,001 receipts": lambda s: [s.run] * 1_001,
    "receipt of another partition": lambda s: [s.run, s.run._replace(partition=1)],
    "receipt without a partition": lambda s: [s.run._replace(partition=None)],
    "token that is zero": lambda s: [s.run._replace(token=0)],
    "token that is negative": lambda s: [s.run._replace(token=-s.run.token)],
    "token that is large": lambda s: [s.run._replace(token=LARGE)],
    "token that is text": lambda s: [s.run._replace(token=str(s.run.token))],
    "token that is a float": lambda s: [s.run._replace(token=float(s.run.token))],
    "token that is a bool": lambda s: [s.run._replace(token=True)],
    "token that is nothing": lambda s: [s.run._replace(token=None)],
    "entry that is half": lambda s: [s.run._replace(first=1.5)],
    "entry that is a float": lambda s: [s.run._replace(last=float(s.run.last))],
    "entry that is a bool": lambda s: [s.run._replace(first=True)],
    "entry that is zero": lambda s: [s.run._replace(first=0)],
    "entries backwards": lambda s: [s.run._replace(first=s.run.last, last=s.run.first)],
    "entries without end": lambda s: [s.run._replace(last=10**13)],
    "lane that is nothing": lambda s: [s.lane._replace(lane=None)],
    "lane of bytes": lambda s: [s.lane._replace(lane=b"=a")],
    "lane that is a run": lambda s: [s.run._replace(lane=f"#{s.run.first}")],
    "lane that is a surrogate": lambda s: [s.lane._replace(lane="=\ud800")],
    "half a receipt": lambda s: [tuple(s.run[:4])],
    "text for a receipt": lambda s: ["receipt"],
    "nothing for a receipt": lambda s: [None],
    "number for a receipt": lambda s: [7],
}.items():
    bad(f"ack with {what}", InvalidArgument, lambda s, given: s.engine.ack(s.lease, "s", given(s)), given)
    bad(f"nack with {what}", InvalidArgument, lambda s, given: s.engine.nack(s.lease, "s", given(s)), given)
    bad(
        f"extend with {what}",
        InvalidArgument,
        lambda s, given: s.engine.extend(s.lease, "s", given(s), lease_ms=1),
        given,
    )

for what, ms in NOT_TIMES.items():
    for option in ("delay_ms", "until_ms"):
        bad(
            f"nack {option} {what}",
            InvalidArgument,
            lambda s, option, ms: s.engine.nack(s.lease, "s", [s.run], **{option: ms}),
            option,
            ms,
        )
    for option in ("lease_ms", "until_ms"):
        bad(
            f"extend {option} {what}",
            InvalidArgument,
            lambda s, option, ms: s.engine.extend(s.lease, "s", [s.run], **{option: ms}),
            option,
            ms,
        )
    bad(
        f"lease {what} in fetch",
        InvalidArgument,
        lambda s, ms: s.engine.fetch(s.lease, "s", [Capacity("c", 1, ms)]),
        ms,
    )
    bad(f"session {what}", InvalidArgument, lambda s, ms: s.engine.join(s.lease, "s", "new", ms), ms)
    bad(
        f"renew sessions {what}",
        InvalidArgument,
        lambda s, ms: s.engine.renew_sessions(s.lease, "s", ["c"], ms),
        ms,
    )
    bad(f"ttl {what} in acquire", InvalidArgument, lambda s, ms: s.engine.acquire(s.topic, 1, "w1", ms), ms)
    bad(f"ttl {what} in renew", InvalidArgument, lambda s, ms: s.engine.renew([s.lease], ms), ms)
    bad(
        f"known epoch {what}",
        InvalidArgument,
        lambda s, ms: s.engine.acquire(s.topic, 1, "w1", 1_000, known_epoch=ms),
        ms,
    )
bad("ttl of nothing", InvalidArgument, lambda s: s.engine.acquire(s.topic, 1, "w1", 0))
bad("extend with neither", InvalidArgument, lambda s: s.engine.extend(s.lease, "s", [s.run]))
bad(
    "extend with both",
    InvalidArgument,
    lambda s: s.engine.extend(s.lease, "s", [s.run], lease_ms=1, until_ms=1),
)

for what, permits in {"float": 2.5, "nothing": None, "bool": True, "text": "many"}.items():
    bad(
        f"permits {what}",
        InvalidArgument,
        lambda s, permits: s.engine.fetch(s.lease, "s", [Capacity("c", permits)]),
        permits,
    )
for limit in (0, -1, 1_001, 1.5, None, "9"):
    bad(
        f"limit {limit!r}",
        InvalidArgument,
        lambda s, limit: s.engine.fetch(s.lease, "s", [Capacity("c", 1)], limit=limit),
        limit,
    )

for what, wrong in {
    "mode": SubscriptionSettings(mode="queue"),
    "mode of nothing": SubscriptionSettings(mode=None),  # type: ignore[arg-type]
    "delivery": SubscriptionSettings(delivery="exactly_once"),
    "lease of zero": SubscriptionSettings(lease_ms=0),
    "lease that is a float": SubscriptionSettings(lease_ms=1.5),  # type: ignore[arg-type]
    "lease that is large": SubscriptionSettings(lease_ms=LARGE),
    "backoff that is negative": SubscriptionSettings(backoff=Backoff(-1.0)),
    "backoff over its maximum": SubscriptionSettings(backoff=Backoff(2.0, maximum=1.0)),
    "backoff that shrinks": SubscriptionSettings(backoff=Backoff(1.0, factor=0.5)),
    "backoff with too much jitter": SubscriptionSettings(backoff=Backoff(1.0, jitter=1.5)),
    "backoff with negative jitter": SubscriptionSettings(backoff=Backoff(1.0, jitter=-0.5)),
    "backoff without end": SubscriptionSettings(backoff=Backoff(float("inf"), maximum=float("inf"))),
    "backoff that is no number": SubscriptionSettings(backoff=Backoff(float("nan"))),
    "backoff factor without end": SubscriptionSettings(backoff=Backoff(0.0, factor=float("inf"))),
    "backoff maximum that is far": SubscriptionSettings(backoff=Backoff(1.0, maximum=1e12)),
}.items():
    bad(
        f"subscription with {what}",
        InvalidArgument,
        lambda s, wrong: s.engine.create_subscription(s.topic, "new", wrong),
        wrong,
    )

for what, position in {
    "a word": "newest",
    "nothing": None,
    "zero": 0,
    "negative": -4,
    "large": LARGE,
    "float": 1.5,
    "bool": True,
    "naive datetime": datetime(2026, 1, 1),
}.items():
    bad(
        f"start at {what}",
        InvalidArgument,
        lambda s, position: s.engine.create_subscription(s.topic, "new", start=position),
        position,
    )
    bad(
        f"seek to {what}",
        InvalidArgument,
        lambda s, position: s.engine.seek(s.topic, "s", position, partition=0),
        position,
    )
bad("seek to an entry of no partition", InvalidArgument, lambda s: s.engine.seek(s.topic, "s", 1))

bad("unknown topic", TopicNotFound, lambda s: s.engine.create_subscription("unknown", "s"))
bad("unknown topic to delete", TopicNotFound, lambda s: s.engine.delete_topic("unknown"))
bad("unknown topic to acquire", TopicNotFound, lambda s: s.engine.acquire("unknown", 0, "w1", 1_000))
bad("unknown partition", TopicNotFound, lambda s: s.engine.acquire(s.topic, 9, "w1", 1_000))
bad(
    "nack until the beginning of time",
    InvalidArgument,
    lambda s: s.engine.nack(s.lease, "s", [s.run], until_ms=0),
)
bad("negative partition", InvalidArgument, lambda s: s.engine.acquire(s.topic, -1, "w1", 1_000))
bad("unknown partition to seek", InvalidArgument, lambda s: s.engine.seek(s.topic, "s", 1, partition=9))
bad("unknown subscription", SubscriptionNotFound, lambda s: s.engine.ack(s.lease, "unknown", [s.run]))
bad(
    "unknown subscription to delete",
    SubscriptionNotFound,
    lambda s: s.engine.delete_subscription(s.topic, "no"),
)
bad("unknown subscription to seek", SubscriptionNotFound, lambda s: s.engine.seek(s.topic, "no", "latest"))
bad("unknown subscription to join", SubscriptionNotFound, lambda s: s.engine.join(s.lease, "no", "c"))


ERRORS = list(dict.fromkeys(error for error, _ in BAD_CALLS.values()))


async def answer_of(call: Call, scene: Scene) -> Any:
    """What a call answers or raises."""
    try:
        return await call(scene)
    except Exception as error:
        return error


@pytest.fixture
async def scene(timed: ManualTime, topic: str) -> Scene:
    """Messages that are leased, waiting, charged and fresh, on a clock that stands still."""
    story = await Story.begin(timed.engine, topic, TopicSettings(partitions=2))
    await must_acquire(timed.engine, topic, 1, worker="w2")
    await story.subscribe("s")
    await story.subscribe("k", "key_shared")
    await story.publish("a", "a", "b", "b", "b")
    [returned] = receipts(await story.fetch(permits=1))
    await story.nack(returned)
    held = receipts(await story.fetch(permits=3))
    lanes = receipts(await story.fetch(name="k", permits=3))
    return Scene(story, held[-1], lanes[0])


@pytest.mark.parametrize("error", ERRORS)
async def test_bad_input_is_refused_by_name_and_changes_nothing(
    scene: Scene, error: type[BrokerError]
) -> None:
    before = await contents(scene.story.engine)
    for label, (expected, call) in BAD_CALLS.items():
        if expected is error:
            answer = await answer_of(call, scene)
            assert type(answer) is error, f"{label}: {answer!r}"
            assert str(answer), label
            assert await contents(scene.story.engine) == before, label


async def test_well_made_receipts_that_were_never_given_are_stale_and_change_nothing(scene: Scene) -> None:
    run, lane = scene.run, scene.lane
    garbage = [
        run._replace(token=run.token + 1),
        run._replace(token=1),
        run._replace(first=500, last=600),
        run._replace(lane="=a"),
        run._replace(lane="="),
        run._replace(lane="=a|b\0c"),
        lane._replace(lane="=" + "k" * 2_000),
    ]
    before = await contents(scene.story.engine)
    for settle in (scene.story.ack, scene.story.nack):
        assert await settle(*garbage) == ["stale"] * len(garbage)
    result = await scene.engine.extend(scene.lease, "s", garbage, lease_ms=HOUR_MS)
    assert result.outcomes(len(garbage)) == ["stale"] * len(garbage)
    assert await contents(scene.story.engine) == before


async def test_one_bad_message_refuses_its_whole_batch(engine: Engine, topic: str) -> None:
    story = await Story.begin(engine, topic)
    await story.subscribe()
    with pytest.raises(InvalidArgument):
        await engine.publish(story.lease, [message("good"), message("bad\0"), message("good")])
    assert await story.log() == []
