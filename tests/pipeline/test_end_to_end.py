"""The whole story: skewed traffic through real consumers, archived, audited, looked at for skew, replayed."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import anyio
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession

from keylane import Client
from keylane_spark.archiving import archive
from keylane_spark.auditing import audit
from keylane_spark.connection import Connection
from keylane_spark.replaying import replay
from keylane_spark.replaying.options import ReplayOptions
from keylane_spark.skew import skew
from tests.pipeline.traffic import HOT, Traffic
from tests.support.java import NO_CODE
from tests.support.running import RunningBroker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# More than one of all that is cut: three batches of the archive, three rounds of the replay of which the last
# is smaller, three pages of 5,000 in each partition, and more than the 50,000 rows up to which replay may end
# a round at any row. The next limit is a block of 262,144 entries of one partition in the audit: `a million`
# in test_audit.py crosses that.
MESSAGES = 60_000
PARTITIONS = 4
JOURNAL = 10_000_000  # records of a partition


@pytest.fixture
def cluster() -> Iterator[RunningBroker]:
    """Two workers, of which one is going to die."""
    with RunningBroker(workers=2) as broker:
        yield broker


@pytest.fixture
def compiled(spark: SparkSession) -> Iterator[SparkSession]:
    """The session of all tests, with code compiled for each query as Spark has it elsewhere."""
    before = {name: spark.conf.get(name) or "" for name in NO_CODE}
    for name in NO_CODE:
        spark.conf.unset(name)
    yield spark
    for name, value in before.items():
        spark.conf.set(name, value)


def test_traffic_is_archived_proven_complete_and_replayed_in_order(
    compiled: SparkSession, cluster: RunningBroker, tmp_path: Path
) -> None:
    spark = compiled
    folder = str(tmp_path / "archive")
    traffic = Traffic("orders", MESSAGES, {"billing": "key_shared", "mail": "shared"}, seed=5)

    def kill_a_worker() -> None:
        cluster.kill_worker(0)
        cluster.start_worker(0)

    with Client(cluster.url) as client:
        client.create_topic("orders", partitions=PARTITIONS, journal=JOURNAL)
        client.create_subscription("orders", "archive", mode="cursor")
        anyio.run(traffic.run, cluster.url, kill_a_worker)
        assert all(seen == traffic.published.keys() for seen in traffic.seen.values())
        assert sum(traffic.nacked.values()) > 0

        # Archive: every message once, for any reader of Parquet, and the broker is empty.
        archived = archive.run(
            spark,
            archive.ArchiveOptions(server=cluster.url, topics=["orders"], path=folder, batch_rows=20_000),
        )
        assert archived.rows == MESSAGES
        assert archived.batches > 1
        table = pyarrow.parquet.read_table(
            folder, columns=["message_id", "key", "value", "partition", "offset"]
        )
        rows = table.to_pylist()
        assert {row["message_id"]: row["key"] for row in rows} == traffic.published
        assert len(rows) == MESSAGES
        assert client.describe_topic("orders").messages == 0

        # Audit: nothing was lost, and what came twice is known.
        where = Connection(cluster.url)
        options = audit.AuditOptions(
            topic="orders",
            out=str(tmp_path / "audit"),
            connection=where,
            archive=folder,
            small=audit.WITH_SPARK,
        )
        verdict, _ = audit.run(options, lambda _: spark)
        assert (verdict.verdict, verdict.lost_total, verdict.messages) == ("complete", 0, MESSAGES), (
            verdict.why
        )
        assert {item.name for item in verdict.subscriptions} == {"billing", "mail", "archive"}

        # Skew: the hot keys, with their shares.
        found = skew.run(spark, "orders", where, archive=folder)
        hottest = {item.key: item.share for item in found.hot_keys[: len(HOT)]}
        assert hottest == {key: pytest.approx(share, abs=0.02) for key, share in HOT.items()}

        # Replay: the same messages of each key in the same order, in a topic of another size.
        client.create_topic("again", partitions=PARTITIONS + 3)
        client.create_subscription("again", "keeper", mode="cursor")
        replayed = replay.run(
            spark, ReplayOptions(server=cluster.url, path=folder, topic="again", round_rows=25_000)
        )
        assert (replayed.rows, replayed.stored, replayed.duplicates) == (MESSAGES, MESSAGES, 0)
        again = (
            spark.read.format("keylane")
            .options(server=cluster.url, subscribe="again")
            .load()
            .selectExpr("key", "cast(value AS string) AS value", "partition", "offset")
            .collect()
        )

    assert order(
        (row["key"], row["value"].decode(), row["partition"], row["offset"]) for row in rows
    ) == order((row.key, row.value, row.partition, row.offset) for row in again)


def order(rows: Iterator[tuple[str, str, int, int]]) -> dict[str, list[str]]:
    """The bodies of each key in the order of the log."""
    found = defaultdict(list)
    for key, value, _, _ in sorted(rows, key=lambda row: row[2:]):
        found[key].append(value)
    return found
