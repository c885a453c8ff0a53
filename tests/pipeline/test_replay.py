"""Replay: an archive becomes messages again, the order of each key as it was, each once."""

import json
import random
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from keylane import Client, InvalidArgument, SubscriptionNotFound
from keylane.errors import TopicReplaced
from keylane_spark.replaying.options import ReplayOptions
from keylane_spark.replaying.publish import REPLAYED_FROM
from keylane_spark.replaying.replay import Replayed, run
from keylane_spark.replaying.rounds import Cut, Stretch, gather, in_order
from keylane_spark.sink.options import SinkOptions
from keylane_spark.sink.pace import paced
from keylane_spark.sink.uids import Uids
from keylane_spark.sink.writer import UidsForgotten, publish
from tests.pipeline.drivers import Driver, keylane
from tests.pipeline.inbox import Arrived, arrivals, make_topic, problems_of
from tests.support.running import RunningBroker

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
        return run(spark, ReplayOptions(**given), progress)

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
    # What is archived meanwhile is for another run, also where its time is that of rows of other partitions.
    late = {**row(ROWS), "timestamp": NOON + timedelta(minutes=ROWS - 2)}
    assert (late["partition"], ALL[-1]["partition"]) == (0, 2)
    pq.write_table(
        pa.Table.from_pylist([late], SCHEMA),
        path / "topic=orders" / f"date={late['timestamp'].date()}" / "part-late.parquet",
    )
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
    with pytest.raises(InvalidArgument, match="was started with other rows"):
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


def test_a_round_that_the_broker_has_forgotten_is_not_published_again(
    client: Client, make_topic_name: Callable[[], str], path: Path, replay: Callable[..., Replayed]
) -> None:
    """A slow rate makes rounds that end long before; one that stood still in between is refused."""
    topic = make_topic(client, make_topic_name(), dedupe_window=2.0)
    result = replay(topic=topic, rate=600.0, round_rows=ROWS)
    assert (result.rounds, result.stored) == (3, ROWS)
    note = Path(f"{path}.keylane/replays/{topic}@replay.json")
    note.write_text(json.dumps({**json.loads(note.read_text()), "done": 2, "begun": time.time() - 10}))
    with pytest.raises(InvalidArgument, match=r"round 3 of run 'replay' was begun .* may come twice"):
        replay(topic=topic)
    assert client.describe_topic(topic).published == ROWS
    lines: list[str] = []
    result = replay(lines.append, topic=topic, accept_duplicates=True)
    assert lines[0].startswith("round 3 of run 'replay' was begun")
    assert (result.resumed, result.rounds) == (True, 1)
    # Killed before it had published anything of the next round: nothing can come twice.
    note.write_text(json.dumps({**json.loads(note.read_text()), "done": 2, "begun": None}))
    assert replay(topic=topic).rounds == 1


def test_a_task_that_runs_again_too_late_publishes_nothing(
    spark: SparkSession, broker: RunningBroker, client: Client, topic: str
) -> None:
    """The first attempt of a round may take its time, since nothing of it is there; any other may not."""
    make_topic(client, topic)
    rows = spark.range(0, 20, 1, 1).selectExpr("cast(id AS string) AS value")

    def write(frame: DataFrame, **own: str) -> None:
        given = {"server": broker.url, "topic": topic, "_until": str(time.time() - 1), **own}
        frame.write.format("keylane").options(**given).mode("append").save()

    write(rows)
    with pytest.raises(PySparkException, match="may have forgotten their uids"):
        write(rows, _again="true")

    def stumble(partition: Iterable[Any]) -> Iterator[Any]:
        task = TaskContext.get()
        assert task is not None
        if task.attemptNumber() == 0:
            raise ConnectionError("planted")
        yield from partition

    with pytest.raises(PySparkException, match="may have forgotten their uids"):
        write(spark.createDataFrame(rows.rdd.mapPartitions(stumble), rows.schema))
    assert client.describe_topic(topic).published == 20
    options = SinkOptions.parse({"server": broker.url, "topic": topic, "_until": str(time.time() + 600)})
    publish(options, iter([pa.record_batch({"value": ["x"]})]), Uids("job", 1))
    late = msgspec.structs.replace(options, until=time.time() - 1)
    with pytest.raises(UidsForgotten):
        publish(late, iter([pa.record_batch({"value": ["x"]})]), Uids("job", 1))


def test_keys_keep_their_order_over_topics_of_one_name(
    client: Client, topic: str, tmp_path: Path, replay: Callable[..., Replayed]
) -> None:
    """The second one has fewer partitions, so that keys are elsewhere, and begins again with offset 1."""
    path = tmp_path / "twice"
    rows = []
    for number in range(600):
        partitions, ledger, born = (3, 1_000, 0) if number < 400 else (2, 2_000, 400)
        key = number % 12
        partition = key % partitions
        offset = sum(other % 12 % partitions == partition for other in range(born, number)) + 1
        at = NOON + timedelta(minutes=number // 4)  # some at the same moment
        message_id = f"{partition}:{ledger + partition}-{offset}"
        rows.append(
            {**row(number), "key": f"k{key}", "partition": partition, "offset": offset}
            | {"message_id": message_id, "timestamp": at, "attributes": None}
        )
    put(path, rows)
    lines: list[str] = []
    assert replay(lines.append, path=str(path), round_rows=130).stored == 600
    assert [line.partition(" rows")[0] for line in lines] == [
        f"round {number} of 5: {number * 120} of 600" for number in range(1, 6)
    ]
    again = defaultdict(list)
    for message in arrivals(client, topic):
        again[message.key].append(message.attributes[REPLAYED_FROM])
    expected = defaultdict(list)
    for one in rows:
        expected[one["key"]].append(one["message_id"])
    assert again == expected


def test_rounds_are_cut_by_rows_and_not_by_offsets(path: Path, replay: Callable[..., Replayed]) -> None:
    """Most of what there was between the offsets is not archived, as when a topic was read by chance."""
    some = [{**row(number), "offset": number**3 + 1, "partition": 0} for number in range(90)]
    for one in some:
        one["message_id"] = f"0:1-{one['offset']}"
    put(path, some, "sparse")
    lines: list[str] = []
    replay(lines.append, source="sparse", round_rows=30)
    assert [line.partition(" of 90")[0] for line in lines] == [
        f"round {number} of 3: {number * 30}" for number in (1, 2, 3)
    ]


def test_a_target_that_was_made_anew_is_noticed(
    client: Client, topic: str, replay: Callable[..., Replayed]
) -> None:
    """While a run is under way, when it is started again, and when it was finished."""

    def replace(line: str = "") -> None:
        client.delete_topic(topic)
        make_topic(client, topic, partitions=5)

    for _ in range(2):
        with pytest.raises(TopicReplaced, match="what 1 of 3 rounds had published is gone"):
            replay(replace)
        assert client.describe_topic(topic).published == 0
    assert replay(run_id="second").stored == ROWS
    replace()
    with pytest.raises(TopicReplaced, match="what 3 of 3 rounds had published is gone"):
        replay(run_id="second")


@pytest.mark.timeout(600)
def test_a_replay_that_is_killed_goes_on_with_each_message_once_and_in_order(
    client: Client, broker: RunningBroker, topic: str, path: Path, new_java: None
) -> None:
    make_topic(client, topic, partitions=5)
    words = ["replay", str(path), topic, "--server", broker.url, "--round-rows", "300"]
    with Driver(*keylane(*words, "--rate", "30")) as driver:
        driver.until(lambda: client.describe_topic(topic).published > 330)  # in the second of three rounds
    assert client.describe_topic(topic).published < ROWS
    with Driver(*keylane(*words, "--json", master="local[1]")) as driver:
        said = json.loads(driver.finish().splitlines()[-1])
    assert said["resumed"]
    assert 0 < said["duplicates"] < said["stored"] + said["duplicates"] < ROWS, (
        "a part of the rounds was done"
    )
    found = arrivals(client, topic)
    assert origins(found) == Counter(one["message_id"] for one in ALL)
    again = defaultdict(list)
    for message in found:
        if message.key:
            again[message.key].append(message.attributes[REPLAYED_FROM])
    assert again == lanes(ALL)
    assert problems_of(broker, topic) == []


def test_what_cannot_be_replayed_is_said(path: Path, replay: Callable[..., Replayed]) -> None:
    with pytest.raises(InvalidArgument, match="rate of -1 rows a second"):
        replay(rate=-1.0)
    put(path, ALL[:3], "payments")
    with pytest.raises(InvalidArgument, match="has topics orders, payments: choose one with --from"):
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


def test_a_round_of_which_files_are_away_is_not_published_and_not_done(
    client: Client, topic: str, path: Path, replay: Callable[..., Replayed]
) -> None:
    """A file goes away after the first of three rounds, and comes back for the next run."""
    name = path / "topic=orders" / f"date={ALL[450]['timestamp'].date()}" / "part-0.parquet"
    away = path.parent / "away.parquet"

    def take(line: str) -> None:
        name.rename(away)

    with pytest.raises(InvalidArgument, match=r"round 2 of 3 of run 'replay' has 300 rows, of which .* has"):
        replay(take)
    assert client.describe_topic(topic).published == ROWS / 3
    away.rename(name)
    result = replay()
    assert (result.resumed, result.rounds, result.stored) == (True, 2, ROWS * 2 // 3)
    assert origins(arrivals(client, topic)) == Counter(one["message_id"] for one in ALL)


def test_rows_that_are_archived_twice_count_once(
    client: Client, topic: str, path: Path, replay: Callable[..., Replayed]
) -> None:
    """All that are there twice in the first round are there once in the others, as after a compaction."""
    again = path / "topic=orders" / f"date={NOON.date()}" / "again.parquet"
    tomorrow = path / "topic=orders" / f"date={ALL[-1]['timestamp'].date()}" / "again.parquet"
    for name in (again, tomorrow):
        some = [one for one in ALL if f"date={one['timestamp'].date()}" == name.parent.name]
        pq.write_table(pa.Table.from_pylist(some, SCHEMA), name)
    result = replay(lambda _: tomorrow.unlink(missing_ok=True))
    assert (result.rows, result.stored, result.rounds) == (ROWS, ROWS, 3)
    assert result.duplicates > 0
    assert origins(arrivals(client, topic)) == Counter(one["message_id"] for one in ALL)


def test_rounds_have_as_many_rows_as_allowed_and_end_with_the_last() -> None:
    rng = random.Random(7)
    for most in range(3, 40):
        steps = [(Cut(at, 1, 0, at), rng.randint(1, 3)) for at in range(rng.randint(1, 60))]
        rounds = gather(steps, most)
        cuts = [cut for cut, _ in rounds]
        assert cuts == sorted(set(cuts))
        assert cuts[-1] == steps[-1][0]
        sizes = [0] * len(cuts)
        for cut, rows in steps:
            sizes[bisect_left(cuts, cut)] += rows
        assert sizes == [rows for _, rows in rounds]
        assert max(sizes) <= most
        assert gather([(cut, 1) for cut, _ in steps], most)[0][0].micros + 1 >= min(most, len(steps)) / 2


def test_what_has_no_order_is_refused() -> None:
    old, new = Stretch(0, 1_000, 90, 10, 50, 90), Stretch(0, 2_000, 40, 50, 70, 40)
    elsewhere = Stretch(1, 1_500, 40, 5, 7, 40)
    assert in_order([elsewhere, new, old]) == [old, new, elsewhere]
    with pytest.raises(InvalidArgument, match=r"older than some of ledger 1000.*1970-01-01T00:00:00.000049Z"):
        in_order([old, Stretch(0, 2_000, 40, 49, 70, 40)])


def test_rows_wait_until_they_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("keylane_spark.sink.pace.monotonic", lambda: now[0])
    monkeypatch.setattr("keylane_spark.sink.pace.sleep", lambda seconds: now.append(now.pop() + seconds))
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
