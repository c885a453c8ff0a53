"""The audit by Spark, for what does not fit into memory."""

from datetime import datetime

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from keylane_spark.auditing.counts import (
    MOST_ATTEMPTS,
    Count,
    Happening,
    bars_of,
    tally_activity,
    tally_subscriptions,
)
from keylane_spark.auditing.findings import Audit
from keylane_spark.auditing.rules import Extent, coverage_of, lives_of, oldest_ledger, trust_of, witnesses_of
from keylane_spark.auditing.verdict import conclude, milliseconds
from keylane_spark.auditing.with_spark import snapshot
from keylane_spark.auditing.with_spark.archive_check import Archive
from keylane_spark.auditing.with_spark.judge import judge, list_lost, with_keys
from keylane_spark.auditing.with_spark.latency import latencies_of
from keylane_spark.auditing.with_spark.lives import (
    extent_of,
    frame_of,
    lives_frame,
    marks_in,
    millis,
    numbers_in,
    published_in,
    timeline_of,
    witnesses_frame,
)
from keylane_spark.auditing.with_spark.stretches import first_deliveries, ranges_of, stretches_of
from keylane_spark.connection import Connection
from keylane_spark.files import check_written, files_at
from keylane_spark.snapshot import JOURNAL, LOG, Snapshot, SnapshotTaker


class SparkEngine:
    """Has Spark read, write and judge."""

    def __init__(self, spark: SparkSession, out: str) -> None:
        self.files = files_at(out, spark)
        self._spark = spark
        self._out = out

    def write_log(self, connection: Connection, taker: SnapshotTaker) -> None:
        """Write the log of a topic as it is now."""
        rows = snapshot.write_log(self._spark, connection, taker.topic, self._out)
        check_written(self.files, f"{self._out}/{LOG}", rows)

    def write_journal(self, connection: Connection, taker: SnapshotTaker) -> None:
        """Write the journal up to where the look before has seen its end."""
        rows = snapshot.write_journal(self._spark, connection, taker, self._out)
        check_written(self.files, f"{self._out}/{JOURNAL}", rows)

    def archive(self, path: str, topic: str, subscription: str) -> Archive:
        """The archive of a topic."""
        return Archive.read(self._spark, path, topic, subscription, files_at(path, self._spark))

    def examine(
        self,
        seen: Snapshot,
        folder: str,
        archive: Archive | None,
        since: datetime | None,
        listed: int,
        lines: int,
    ) -> Audit:
        """Judge the snapshot in a folder."""
        journal, log = (self._spark.read.parquet(f"{folder}/{name}") for name in (JOURNAL, LOG))
        return examine(
            self._spark, seen, journal, log, archive=archive, since=since, listed=listed, lines=lines
        )


def examine(
    spark: SparkSession,
    seen: Snapshot,
    journal: DataFrame,
    log: DataFrame,
    *,
    archive: Archive | None = None,
    since: datetime | None = None,
    listed: int,
    lines: int,
) -> Audit:
    """Judge a snapshot."""
    since_ms = milliseconds(since)
    if archive is not None and seen.incarnation:
        ledgers = journal.where(F.col("transition") == "published").select("by").distinct().collect()
        archive = archive.since(oldest_ledger(seen.incarnation, (row.by for row in ledgers)))
    numbers = numbers_in(journal)
    trust = [trust_of(state, numbers.get(state.partition, [])) for state in seen.partitions]
    journal = snapshot.journal_of(journal, trust)
    timeline = timeline_of(journal)
    extent, about = extent_of(journal)
    coverage = coverage_of(seen, published_in(timeline), extent, trust)
    covered = frame_of(spark, coverage, seen)
    marks = marks_in(timeline)
    all_lives = lives_of(marks, about, seen)
    lives = lives_frame(spark, all_lives)
    others = witnesses_frame(spark, witnesses_of(all_lives, marks))
    held = None
    if archive is not None:
        mine = lives.where(F.col("subscription") == archive.subscription).select("partition").distinct()
        held = snapshot.islands(archive.rows).join(F.broadcast(mine), "partition")
    gone = snapshot.bodiless(spark, seen)
    ranges = ranges_of(journal, lives, covered, snapshot.islands(log), gone, held, since_ms, others)
    stretches = stretches_of(ranges).persist(StorageLevel.DISK_ONLY)
    try:
        judged = judge(stretches, lives, covered)
        activity = tally_activity(happened_in(journal, extent, since_ms), extent, since_ms)
        subscriptions = tally_subscriptions(counts_in(judged), activity)
        lost = []
        if any(one.lost for one in subscriptions):
            known = [log] if archive is None else [log, archive.rows]
            lost = with_keys(list_lost(judged, journal, listed), *known)
        checked = None if archive is None else archive.check(judged, journal, covered, listed)
        again = first_deliveries(stretches, ranges) if any(one.duplicates for one in subscriptions) else None
        latencies = latencies_of(judged, again, activity.span_ms, lines)
    finally:
        stretches.unpersist()
    return conclude(seen, since, coverage, extent, activity, subscriptions, lost, checked, latencies)


def counts_in(judged: DataFrame) -> list[Count]:
    """How many messages are in which state."""
    attempts = F.least(F.col("delivered"), F.lit(MOST_ATTEMPTS))
    deliveries = F.sum(F.col("entries") * F.col("delivered"))
    rows = judged.groupBy("subscription", "state", "reason", attempts.alias("attempts")).agg(
        F.sum("entries").alias("messages"), deliveries.alias("deliveries")
    )
    return [Count(*row) for row in rows.collect()]


def happened_in(journal: DataFrame, extent: Extent, since_ms: int) -> list[Happening]:
    """How many messages each transition was about, by time."""
    least, width = bars_of(extent, since_ms)
    rows = (
        journal.where(millis() >= since_ms)
        .groupBy("subscription", "transition", F.floor((millis() - least) / width).alias("bar"))
        .agg(F.sum(F.coalesce(F.col("last") - F.col("first"), F.lit(0)) + 1).alias("messages"))
    )
    return [Happening(*row) for row in rows.collect()]
