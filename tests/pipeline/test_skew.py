"""Hot keys and partitions, of messages that are made up and of a real topic."""

import json
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

from keylane import Client, OutgoingMessage
from keylane.wire import partition_of
from keylane_broker.commandline.main import app
from keylane_spark.auditing.with_spark.snapshot import local
from keylane_spark.connection import Connection
from keylane_spark.errors import JobError
from keylane_spark.files import LocalFiles
from keylane_spark.skew.findings import Cluster
from keylane_spark.skew.report import write_skew
from keylane_spark.skew.skew import examine, run
from tests.pipeline.journals import NOON_MS, Line, journal_of
from tests.support.running import RunningBroker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

COUNT = 6
HOUR_MS = 3_600_000
CLUSTER = Cluster({number: f"w{number // 3}" for number in range(COUNT)}, ["w0", "w1"])


def messages_of(spark: SparkSession, amounts: dict[str | None, int], *, apart_ms: int = 100) -> DataFrame:
    """Messages with these keys, one after the other; those without go round."""
    rows: list[tuple[str | None, int, int]] = []
    for key, amount in amounts.items():
        for number in range(amount):
            partition = number % COUNT if key is None else partition_of(key, COUNT)
            rows.append((key, partition, NOON_MS + len(rows) * apart_ms))
    frame = local(spark, rows, "key string, partition int, at long")
    return frame.selectExpr("key", "partition", "timestamp_millis(at) AS timestamp")


def test_hot_keys_and_partitions_are_named_with_their_share(spark: SparkSession, tmp_path: Path) -> None:
    """And a key that no number of partitions spreads is called that."""
    amounts: dict[str | None, int] = {f"k{number}": 5 for number in range(40)}
    found = examine(
        "orders", messages_of(spark, {"Zürich": 600, "Bern": 100, **amounts, None: 100}), CLUSTER, "a test"
    )
    assert (found.messages, found.keyless, found.keys, found.misplaced) == (1_000, 100, 42, 0)
    assert [(key.key, key.messages, key.share) for key in found.hot_keys[:2]] == [
        ("Zürich", 600, 0.6),
        ("Bern", 100, 0.1),
    ]
    hot = partition_of("Zürich", COUNT)
    assert found.hot_keys[0].partition == hot
    busiest = max(found.partitions, key=lambda one: one.messages)
    assert busiest.partition == hot
    assert found.imbalance == pytest.approx(busiest.messages * COUNT / 1_000)
    assert "key 'Zürich' alone has 60% of the messages" in found.advice[0]
    assert all(one.workers >= 1.2 - 1e-9 for one in found.candidates)
    write_skew(found, str(tmp_path), LocalFiles())
    assert (tmp_path / "skew.html").read_text().count("data:image/png;base64,") == 5


def test_the_plan_parts_hot_partitions_of_one_worker(spark: SparkSession, tmp_path: Path) -> None:
    """With even counts, as the cluster wants it."""
    mine = [key for key in (f"k{number}" for number in range(99)) if partition_of(key, COUNT) in (0, 1)]
    first = next(key for key in mine if partition_of(key, COUNT) == 0)
    second = next(key for key in mine if partition_of(key, COUNT) == 1)
    found = examine("orders", messages_of(spark, {first: 400, second: 400, None: 60}), CLUSTER, "a test")
    after = {**CLUSTER.owners, **{move.partition: move.worker for move in found.moves}}
    assert after[0] != after[1]
    assert sorted(after.values()) == sorted(CLUSTER.owners.values())
    assert [(one.worker, round(one.before, 2), round(one.after, 2)) for one in found.workers] == [
        ("w0", 0.97, 0.5),
        ("w1", 0.03, 0.5),
    ]
    write_skew(found, str(tmp_path), LocalFiles())
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["version"] == 1
    assert plan["moves"] == [
        {"topic": "orders", "partition": move.partition, "worker": move.worker} for move in found.moves
    ]


def test_imbalance_over_time_by_seconds_or_from_a_journal_by_hour(spark: SparkSession) -> None:
    """A mean over all partitions, those without messages too."""
    first = next(key for key in map(str, range(99)) if partition_of(key, COUNT) == 0)
    found = examine("orders", messages_of(spark, {first: 600, None: 600}), CLUSTER, "a test")
    assert found.span_ms == 10_000
    assert [(span.messages, round(span.imbalance, 1)) for span in found.spans] == [(100, 6.0)] * 6 + [
        (100, 1.0)
    ] * 6
    lines: list[Line] = [("published", "", "1-10", 0), ("published", "", "11-20", 8 * HOUR_MS)]
    rates = spark.createDataFrame(journal_of({0: lines, 1: lines[:1]}))
    found = examine("orders", messages_of(spark, {first: 3}), CLUSTER, "a test", rates=rates)
    assert found.span_ms == HOUR_MS
    assert [(span.messages, span.imbalance) for span in found.spans] == [(20, 3.0), (10, 6.0)]
    assert [one.messages for one in found.partitions] == [20, 10, 0, 0, 0, 0]


def test_nothing_is_no_skew(spark: SparkSession) -> None:
    """And no plan."""
    found = examine("orders", messages_of(spark, {}), CLUSTER, "a test")
    assert (found.messages, found.imbalance, found.moves, found.spans) == (0, 1.0, [], [])


def test_the_command_looks_at_a_real_topic_and_its_plan_is_followed(
    spark: SparkSession, tmp_path: Path, elsewhere: str, topic: str
) -> None:
    """From hot keys to owners that have changed, and all files on a file system that only Hadoop knows."""
    with RunningBroker(workers=2, rebalance_interval=3_600) as broker:
        with Client(broker.url) as client:
            client.create_topic(topic, partitions=4)
            client.create_subscription(topic, "billing")
            wait_until(lambda: all(at.holder == at.worker != "" for at in client.partitions(topic)))
            worker_of = [info.worker for info in client.partitions(topic)]
            hot = [number for number in range(4) if worker_of[number] == worker_of[0]]
            keys = [
                next(k for k in map(str, range(999)) if partition_of(k, 4) == number) for number in range(4)
            ]
            amounts = [100 if number in hot else 1 for number in range(4)]
            client.publish_many(
                topic,
                [
                    OutgoingMessage(key=key)
                    for key, amount in zip(keys, amounts, strict=True)
                    for _ in range(amount)
                ],
            )
        runner = CliRunner(env={"KEYLANE_SERVER": broker.url})
        done = runner.invoke(app, ["pipeline", "skew", topic, "--out", f"{elsewhere}/skew", "--json"])
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert [key["key"] for key in found["hot_keys"][:2]] == sorted(keys[number] for number in hot)
        assert len(found["moves"]) == 2
        assert {path.name for path in (tmp_path / "skew").iterdir()} >= {
            "skew.html",
            "skew.json",
            "plan.json",
        }
        rows = spark.read.format("keylane").options(server=broker.url, subscribe=topic).load()
        rows.write.parquet(f"{elsewhere}/archive/topic={topic}/date=2026-11-16")
        again = run(spark, topic, Connection(broker.url), archive=f"{elsewhere}/archive")
        assert [key.key for key in again.hot_keys] == [key["key"] for key in found["hot_keys"]]
        with pytest.raises(JobError, match="no archive of"):
            run(spark, topic, Connection(broker.url), archive=f"{elsewhere}/nothing")
        moved = runner.invoke(app, ["rebalance", "--plan", str(tmp_path / "skew" / "plan.json")])
        assert moved.exit_code == 0, moved.output
        with Client(broker.url) as client:
            now = [info.holder for info in client.partitions(topic)]
        assert now[hot[0]] != now[hot[1]]
