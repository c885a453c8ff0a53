"""The audit: proves from a topic's journal that every message reached every subscription that was owed it.

keylane pipeline audit orders --out /var/audits/orders --archive /data/archive
spark-submit audit.py orders --out /var/audits/orders
"""

from datetime import datetime
from pathlib import Path

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from client import Client
from pipeline import snapshot
from pipeline.archived import Archive
from pipeline.findings import Audit, proof_of, verdict_of
from pipeline.journal import coverage_of, extent_of, frame_of, lives_of, timeline_of
from pipeline.judgement import judge, list_lost, with_keys
from pipeline.latency import latencies_of
from pipeline.sweep import first_deliveries, ranges_of, stretches_of
from pipeline.tally import tally_activity, tally_subscriptions

LISTED = 1_000  # messages, of each kind of finding
HOURS = 2_000  # lines of latencies by hour
ARCHIVE_SUBSCRIPTION = "archive"


def run(
    spark: SparkSession,
    topic: str,
    out: Path,
    *,
    server: str = "",
    journal: Path | None = None,
    archive: Path | None = None,
    archive_subscription: str = ARCHIVE_SUBSCRIPTION,
    since: datetime | None = None,
    listed: int = LISTED,
) -> Audit:
    """Audit a topic: a fresh snapshot, written to `out`, or in `journal` what an earlier audit has left."""
    if journal is None:
        seen, folder = snapshot.take(spark, server, topic, out), out
    else:
        seen, folder = snapshot.load(journal)
        out.mkdir(parents=True, exist_ok=True)
    held = None if archive is None else Archive.read(spark, archive, topic, archive_subscription)
    if held is not None and journal is None:
        # Asked after the archive's files have been listed: what is in them was published before.
        with Client(server) as client:
            held.newest = {at.partition: at.latest for at in client.offsets(topic)}
    return examine(
        spark,
        seen,
        snapshot.journal_of(spark, folder, seen),
        snapshot.log_of(spark, folder),
        archive=held,
        since=since,
        listed=listed,
    )


def examine(
    spark: SparkSession,
    seen: snapshot.Snapshot,
    journal: DataFrame,
    log: DataFrame,
    *,
    archive: Archive | None = None,
    since: datetime | None = None,
    listed: int = LISTED,
) -> Audit:
    """Judge a snapshot."""
    since_ms = 0 if since is None else int(since.timestamp() * 1_000)
    timeline = timeline_of(journal)
    extent = extent_of(journal)
    coverage = coverage_of(timeline, extent, seen)
    covered = frame_of(spark, coverage, seen)
    lives = lives_of(spark, journal, timeline, seen)
    held = None
    if archive is not None:
        mine = lives.where(F.col("subscription") == archive.subscription).select("partition").distinct()
        held = snapshot.islands(archive.rows).join(F.broadcast(mine), "partition")
    ranges = ranges_of(journal, lives, covered, snapshot.islands(log), held, since_ms)
    stretches = stretches_of(ranges).persist(StorageLevel.DISK_ONLY)
    try:
        judged = judge(stretches, lives, covered)
        activity = tally_activity(journal, extent, since_ms)
        subscriptions = tally_subscriptions(judged, activity)
        lost = []
        if any(one.lost for one in subscriptions):
            known = [log] if archive is None else [log, archive.rows]
            lost = with_keys(list_lost(judged, journal, listed), *known)
        checked = None if archive is None else archive.check(judged, journal, covered, listed)
        again = first_deliveries(stretches, ranges) if any(one.duplicates for one in subscriptions) else None
        latencies = latencies_of(judged, again, HOURS)
    finally:
        stretches.unpersist()
    proof = [proof_of(part, at.latest, since_ms) for part, at in zip(coverage, seen.partitions, strict=True)]
    verdict, why = verdict_of(proof, subscriptions, checked)
    return Audit(
        verdict=verdict,
        topic=seen.topic,
        taken_at=seen.taken_at,
        since=since,
        why=why,
        records=extent.rows,
        messages=activity.published,
        unproven=sum(part.unproven for part in proof),
        coverage=proof,
        subscriptions=subscriptions,
        lost=lost,
        lost_total=sum(subscription.lost for subscription in subscriptions),
        archive=checked,
        latency=[line for line in latencies if line.hour_ms is None],
        latency_by_hour=[line for line in latencies if line.hour_ms is not None],
        activity=activity.bars,
    )


if __name__ == "__main__":
    from pipeline.commands import main

    main("audit")
