"""Replay: an archive becomes messages again, the order of each key as it was, each once."""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from client import Client, InvalidArgument, SubscriptionNotFound
from pipeline.pace import paced
from pipeline.replay import REPLAYED_FROM, Options, Replayed, Slice, bounds, run
from tests.pipeline.inbox import Arrived, arrivals, make_topic, problems_of
from tests.running import RunningBroker

pytestmark = pytest.mark.slow  # a few dozen Spark jobs

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
PARTITIONS = 3
ROWS = 900

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("value", pa.binary()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("message_id", pa.string()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("event_time", pa.timestamp("us", "UTC")),
        ("attributes", pa.map_(pa.string(), pa.string())),
    ]
)


def row(number: int) -> dict[str, Any]:
    """A message as it was archived: one a minute, keys by partition, some without key or attributes."""
    partition, offset = number % PARTITIONS, number // PARTITIONS + 1
    at = NOON + timedelta(minutes=number)
    return {
        "key": f"k{partition}-{number % 21}" if number % 10 else None,
        "value": b"%d" % number if number % 7 else None,
        "partition": partition,
        "offset": offset,
        "message_id": f"{partition}:1-{offset}",
        "timestamp": at,
        "event_time": at,
        "attributes": [("n", str(number)), (REPLAYED_FROM, "elsewhere")] if number % 3 else None,
    }


ALL = [row(number) for number in range(ROWS)]


def put(path: Path, rows: list[dict[str, Any]], topic: str = "orders") -> None:
    """Archive rows in files of no order at all."""
    days = defaultdict(list)
    for one in random.Random(7).sample(rows, len(rows)):
        days[one["timestamp"].date()].append(one)
    for day, some in days.items():
        folder = path / f"topic={topic}" / f"date={day}"
        folder.mkdir(parents=True, exist_ok=True)
        for number, start in enumerate(range(0, len(some), 200)):
            pq.write_table(
                pa.Table.from_pylist(some[start : start + 200], SCHEMA), folder / f"part-{number}.parquet"
            )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "archive"
    put(path, ALL)
    return path


@pytest.fixture
def replay(
    spark: SparkSession, broker: RunningBroker, client: Client, topic: str, path: Path
) -> Callable[..., Replayed]:
    make_topic(client, topic, partitions=5)

    def replay(progress: Callable[[str], None] = print, **options: Any) -> Replayed:
        given = {"server": broker.url, "path": str(path), "topic": topic, "round_rows": 300, **options}
        return run(spark, Options(**given), progress)

    return replay


def origins(messages: list[Arrived]) -> Counter[str]:
    return Counter(message.attributes[REPLAYED_FROM] for message in messages)


def lanes(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The ids of each key in the order of the archived topic."""
    found = defaultdict(list)
    for one in sorted(rows, key=lambda one: (one["partition"], one["offset"])):
        if one["key"]:
            found[one["key"]].append(one["message_id"])
    return dict(found)


def test_messages_come_again_with_all_they_had_in_the_order_of_their_keys(
    client: Client, broker: RunningBroker, topic: str, replay: Callable[..., Replayed]
) -> None:
    lines: list[str] = []
    result = replay(lines.append)
    assert (result.rows, result.stored, result.rounds, result.resumed) == (ROWS, ROWS, 3, False)
    assert [line.partition(":")[0] for line in lines] == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]
    found = arrivals(client, topic)
    assert origins(found) == Counter(one["message_id"] for one in ALL)
    again = defaultdict(list)
    for message in found:
        if message.key:
            again[message.key].append(message.attributes[REPLAYED_FROM])
    assert again == lanes(ALL)
    by_id = {one["message_id"]: one for one in ALL}
    for message in found:
        one = by_id[message.attributes[REPLAYED_FROM]]
        assert (message.key, message.data) == (one["key"], one["value"] or b"")
        assert message.attributes == {**dict(one["attributes"] or []), REPLAYED_FROM: one["message_id"]}
    assert problems_of(broker, topic) == []


def test_a_run_that_was_stopped_goes_on_without_duplicates(
    client: Client, topic: str, path: Path, replay: Callable[..., Replayed]
) -> None:
    def stop(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(stop)
    assert 0 < client.describe_topic(topic).published < ROWS
    # A round that was published and not noted down: it is published again, and the broker knows.
    [note] = Path(f"{path}.keylane/replays").iterdir()
    note.write_text(note.read_text().replace('"done":1', '"done":0'))
    result = replay()
    assert result.duplicates == ROWS / 3
    assert origins(arrivals(client, topic)) == Counter(one["message_id"] for one in ALL)
    put(path, [row(ROWS + number) for number in range(30)])  # that is for another run
    assert replay().stored == 0
    assert client.describe_topic(topic).published == ROWS


def test_a_run_of_another_name_publishes_all_again(
    client: Client, topic: str, replay: Callable[..., Replayed]
) -> None:
    replay(round_rows=ROWS)
    assert replay(run_id="second", round_rows=ROWS).stored == ROWS
    assert set(origins(arrivals(client, topic)).values()) == {2}


def test_times_and_keys_choose(client: Client, topic: str, replay: Callable[..., Replayed]) -> None:
    since, until = NOON + timedelta(minutes=100), NOON + timedelta(minutes=831)
    keys = ["k0-3", "k1-1"]
    options: dict[str, Any] = {"since": since, "until": until, "keys": keys}
    expected = [one for one in ALL if one["key"] in keys and since <= one["timestamp"] < until]
    assert len(expected) > 20
    planned = replay(dry_run=True, **options)
    assert (planned.rows, planned.stored, client.describe_topic(topic).published) == (len(expected), 0, 0)
    assert replay(**options).stored == len(expected)
    assert origins(arrivals(client, topic)) == Counter(one["message_id"] for one in expected)
    with pytest.raises(InvalidArgument, match="was begun with other rows"):
        replay(since=since)


def test_a_rate_keeps_order_and_completeness(
    client: Client, topic: str, replay: Callable[..., Replayed]
) -> None:
    result = replay(rate=2_000.0, round_rows=ROWS)
    assert (result.stored, result.rounds) == (ROWS, 1)
    again = defaultdict(list)
    for message in arrivals(client, topic):
        if message.key:
            again[message.key].append(message.attributes[REPLAYED_FROM])
    assert again == lanes(ALL)


def test_a_round_ends_long_before_the_broker_forgets_its_uids(
    client: Client, make_topic_name: Callable[[], str], path: Path, replay: Callable[..., Replayed]
) -> None:
    topic = make_topic(client, make_topic_name(), dedupe_window=2.0)
    result = replay(topic=topic, rate=600.0, round_rows=ROWS)
    assert (result.rounds, result.stored) == (3, ROWS)
    note = Path(f"{path}.keylane/replays/{topic}@replay.json")
    note.write_text(json.dumps({**json.loads(note.read_text()), "done": 2, "at": 0}))
    lines: list[str] = []
    replay(lines.append, topic=topic, rate=600.0)
    assert lines[0].startswith("this run stood still for longer than")


def test_what_cannot_be_replayed_is_said(path: Path, replay: Callable[..., Replayed]) -> None:
    with pytest.raises(InvalidArgument, match="rate of -1 rows a second"):
        replay(rate=-1.0)
    put(path, ALL[:3], "payments")
    with pytest.raises(InvalidArgument, match="has topics orders, payments: say which with --from"):
        replay()
    with pytest.raises(InvalidArgument, match=r"has no topic=… folder"):
        replay(path=f"{path}/nowhere")
    with pytest.raises(InvalidArgument, match="has no topic 'nothing'"):
        replay(source="nothing")
    assert replay(source="payments").stored == 3


def test_a_topic_without_subscription_is_refused_before_anything_runs(
    client: Client, topic: str, path: Path, replay: Callable[..., Replayed]
) -> None:
    """It would store nothing; with a subscription the same run then does all of it."""
    client.create_topic(f"{topic}-again", partitions=2)
    for options in ({}, {"dry_run": True}):
        with pytest.raises(SubscriptionNotFound, match=f"keylane subscription create {topic}-again NAME"):
            replay(topic=f"{topic}-again", **options)
    assert not Path(f"{path}.keylane").exists()
    client.create_subscription(f"{topic}-again", "s")
    assert replay(topic=f"{topic}-again").stored == ROWS


def test_a_round_that_nobody_was_there_for_is_not_counted_as_done(
    client: Client, topic: str, path: Path, replay: Callable[..., Replayed]
) -> None:
    """The subscription goes away after the first of three rounds, and comes back for the next run."""
    target = f"{topic}-again"
    client.create_topic(target, partitions=2)
    client.create_subscription(target, "s")

    def leave(line: str) -> None:
        client.delete_subscription(target, "s")

    with pytest.raises(SubscriptionNotFound, match="has no subscription"):
        replay(leave, topic=target)
    client.create_subscription(target, "s")
    result = replay(topic=target)
    assert (result.resumed, result.rounds, result.stored) == (True, 2, ROWS * 2 // 3)


def test_rounds_cover_all_offsets_once() -> None:
    for rounds in range(1, 9):
        found = [bounds(Slice(0, 7, 19, 5), number, rounds) for number in range(rounds)]
        assert [offset for start, end in found for offset in range(start, end)] == list(range(7, 20))


def test_rows_wait_until_they_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("pipeline.pace.monotonic", lambda: now[0])
    monkeypatch.setattr("pipeline.pace.sleep", lambda seconds: now.append(now.pop() + seconds))
    due = [0.0, 0.05, 0.1, 0.19, 1.0]
    batches = [
        pa.record_batch({"value": list(range(5)), "_due": due}),
        pa.record_batch({"value": [5], "_due": [2.5]}),
    ]
    seen = [(round(now[0] - 100, 1), part.to_pydict()) for part in paced(iter(batches))]
    assert seen == [
        (0.0, {"value": [0, 1]}),
        (0.1, {"value": [2, 3]}),
        (1.0, {"value": [4]}),
        (2.5, {"value": [5]}),
    ]
