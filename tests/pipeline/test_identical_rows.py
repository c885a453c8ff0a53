"""Rows of a batch that are the same: each is published, once, into whatever tasks the batch is cut."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from keylane import Client, InvalidArgument
from keylane_spark.sink.identical_rows import Repeats, Told, missing
from keylane_spark.sink.options import SinkOptions
from keylane_spark.sink.rows import columns_of
from keylane_spark.sink.uids import Uids
from keylane_spark.sink.writer import Written, complete, publish
from tests.pipeline.inbox import arrivals, make_topic, problems_of
from tests.support.running import RunningBroker

Row = tuple[str, str]  # key and value


class Killed(Exception):
    """The process of a task has ended."""


@pytest.fixture
def options(broker: RunningBroker, client: Client, topic: str) -> SinkOptions:
    make_topic(client, topic)
    return SinkOptions.parse({"server": broker.url, "topic": topic})


def batch_of(rows: Sequence[Row]) -> Any:
    columns = {"key": [key for key, _ in rows], "value": [value for _, value in rows]}
    return pa.record_batch(columns, pa.schema([("key", pa.string()), ("value", pa.string())]))


def run_task(options: SinkOptions, rows: Sequence[Row], upto: int | None = None) -> Written:
    """A task of batch 7, which is killed when it has published some rows."""

    def batches() -> Iterator[Any]:
        yield batch_of(rows[:upto])
        if upto is not None:
            raise Killed

    return publish(options, batches(), Uids("query", "q", 7), Repeats())


def cut(rows: Sequence[Row], tasks: int, rng: random.Random) -> list[list[Row]]:
    """The rows in some tasks, in any order."""
    parts: list[list[Row]] = [[] for _ in range(tasks)]
    for row in rng.sample(rows, len(rows)):
        parts[rng.randrange(tasks)].append(row)
    return parts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_batch_that_was_killed_is_finished_by_other_tasks(
    broker: RunningBroker, client: Client, topic: str, options: SinkOptions, seed: int
) -> None:
    rng = random.Random(seed)
    rows = [(f"k{rng.randrange(3)}", str(rng.randrange(12))) for _ in range(120)]
    for _ in range(2):  # runs that do not come to an end
        for part in cut(rows, rng.randint(1, 5), rng):
            if rng.random() < 0.5:
                run_task(options, part)
                continue
            with pytest.raises(Killed):
                run_task(options, part, rng.randint(0, len(part)))
    tasks = [run_task(options, part) for part in cut(rows, rng.randint(1, 5), rng)]
    complete(options, tasks)
    complete(options, tasks)  # as if Spark had been killed before its own commit
    found = Counter((message.key, message.data) for message in arrivals(client, topic))
    assert found == Counter((key, value.encode()) for key, value in rows)
    assert problems_of(broker, topic) == []


def test_rows_that_are_the_same_in_two_tasks_are_published_twice(
    client: Client, topic: str, options: SinkOptions
) -> None:
    tasks = [run_task(options, [("k", "a"), ("k", "b")]), run_task(options, [("k", "a"), ("k", "a")])]
    assert client.describe_topic(topic).published == 3
    [extra] = missing([task.told for task in tasks if task.told])
    assert extra.column("value").to_pylist() == ["a"]
    assert complete(options, tasks).tallies[topic].stored == 1
    assert Counter(message.data for message in arrivals(client, topic)) == Counter({b"a": 3, b"b": 1})


def test_rows_that_are_all_different_leave_nothing_to_the_driver(
    options: SinkOptions,
) -> None:
    tasks = [
        run_task(options, [("k", str(number)) for number in part]) for part in (range(50), range(50, 99))
    ]
    again = [run_task(options, [("k", str(number)) for number in part]) for part in (range(9), range(9, 99))]
    for run in (tasks, again):
        assert list(missing([task.told for task in run if task.told])) == []


def test_rows_that_are_the_same_and_too_large_for_the_driver_are_refused(options: SinkOptions) -> None:
    rows = [("k", "x" * 1_000), ("k", "y" * 1_000)]
    tasks: list[Told | None] = []
    for _ in range(2):
        tasks.append(publish(options, iter([batch_of(rows)]), Uids("query", "q", 7), Repeats(1_500)).told)
    with pytest.raises(InvalidArgument, match=r"2 rows of this batch are the same .* \.repartition\('key'\)"):
        list(missing([task for task in tasks if task]))
    # One task whose rows have room is enough.
    room = publish(options, iter([batch_of(rows)]), Uids("query", "q", 7), Repeats()).told
    found = missing([task for task in (*tasks, room) if task])
    assert sum(batch.num_rows for batch in found) == 4
    # In one task they are sorted out by themselves.
    finished = publish(options, iter([batch_of(rows + rows)]), Uids("query", "q", 7), Repeats(1_500))
    assert finished.tallies[options.topic or ""].stored == 2


def test_rows_with_a_uid_of_their_own_are_left_alone(
    client: Client, topic: str, options: SinkOptions
) -> None:
    own = "!" * 24  # as long as those of the sink
    schema = pa.schema([("value", pa.string()), ("uid", pa.string())])
    batch = pa.record_batch({"value": ["a", "a", "a"], "uid": [own, None, ""]}, schema)
    tasks = [publish(options, iter([batch]), Uids("query", "q", 7), Repeats()) for _ in range(2)]
    complete(options, tasks)
    found = arrivals(client, topic)
    assert len(found) == 5
    assert sum(message.uid == own for message in found) == 1


def test_rows_for_nobody_are_for_nobody(client: Client, topic: str, broker: RunningBroker) -> None:
    client.create_topic(topic, dedupe_window=7_200.0)
    options = SinkOptions.parse({"server": broker.url, "topic": topic})
    tasks = [run_task(options, [("k", "a")]) for _ in range(2)]
    assert complete(options, tasks) == Written()


def columns(*names: str) -> StructType:
    return StructType([StructField(name, StringType()) for name in names])


def test_columns_make_the_uid_of_a_row_in_any_batch(
    broker: RunningBroker, client: Client, make_topic_name: Callable[[], str]
) -> None:
    """Once in the topic, whatever else the row holds; other columns are there for that only."""
    topic = make_topic(client, make_topic_name())
    given = {"server": broker.url, "topic": topic, "uidColumns": "ORDER_ID, line"}
    options = SinkOptions.parse(given).check(columns("key", "value", "order_id", "line"))
    rows = {
        "key": ["k", "k", "k", "k"],
        "value": ["a", "b", "c", "d"],
        "order_id": ["1", "1", "2", "1"],
        "line": ["1", None, "1", "1"],
    }
    for batch in range(2):
        publish(options, iter([pa.record_batch(rows)]), Uids("query", "q", batch), Repeats())
    assert [message.data for message in arrivals(client, topic)] == [b"a", b"b", b"c"]
    nothing = pa.record_batch(
        {"value": ["a"], "order_id": pa.nulls(1, pa.string()), "line": pa.nulls(1, pa.string())}
    )
    with pytest.raises(InvalidArgument, match="a row has nothing in order_id and line"):
        publish(options, iter([nothing]), Uids("query", "q", 9))


def test_columns_of_all_kinds_make_the_same_uid_in_every_time_zone() -> None:
    at = datetime(2026, 11, 16, 12, 30, tzinfo=UTC)

    def uids(zone: str, *, number: int = 7, moment: datetime = at) -> Sequence[str | None] | None:
        rows = pa.record_batch(
            {
                "number": pa.array([number], pa.int32()),
                "price": pa.array([Decimal("1.50")], pa.decimal128(10, 2)),
                "day": pa.array([at.date()], pa.date32()),
                "moment": pa.array([moment], pa.timestamp("us", zone)),
                "paid": pa.array([True]),
                "raw": pa.array([b"\xff"], pa.binary()),
            }
        )
        return columns_of(rows, "t", rows.schema.names, None).uids

    assert uids("UTC") == uids("Europe/Berlin")
    others = [uids("UTC"), uids("UTC", number=8), uids("UTC", moment=at + timedelta(microseconds=1))]
    assert len({uid for some in others for uid in some or ()}) == 3


@pytest.mark.parametrize(
    ("option", "schema", "complaint"),
    [
        ("id", columns("value"), "names 'id': the columns are value"),
        ("id", columns("value", "uid", "id"), "not both"),
        ("id,,x", columns("value", "id"), "option 'uidColumns' is 'id,,x'"),
        ("id", columns("value", "id", "other"), "column 'other' cannot be published"),
    ],
)
def test_columns_for_uids_that_cannot_be_meant_are_refused(
    option: str, schema: StructType, complaint: str
) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        SinkOptions.parse({"topic": "t", "uidColumns": option}).check(schema)
