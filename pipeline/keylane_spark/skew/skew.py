"""Skew: which keys and partitions are hot, when, and what to do about it.

keylane pipeline skew orders --archive /data/archive --out skew
keylane rebalance --plan skew/plan.json --dry-run
"""

from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from keylane import Client
from keylane_spark.archiving.folders import archive_folder
from keylane_spark.connection import Connection
from keylane_spark.errors import JobError
from keylane_spark.files import files_at
from keylane_spark.reports.spans import width_of
from keylane_spark.skew import packing
from keylane_spark.skew.findings import Cluster, HotKey, Keys, Skew, Times, conclude
from keylane_spark.snapshot import JOURNAL, load

TOP = 20
SPANS = (12, 120)  # of time: at least and at most so many, if messages are spread out
FULL = 10  # messages of a partition that a span should have: with fewer, imbalance is chance


def run(
    spark: SparkSession,
    topic: str,
    connection: Connection,
    *,
    archive: str | None = None,
    journal: str | None = None,
    top: int = TOP,
) -> Skew:
    """Look at a topic: at its archive, else at what is in its log; at a journal for what happened when."""
    with connection.sync() as client:
        cluster = cluster_of(client, topic)
    if archive is not None:
        folder = archive_folder(archive, topic, files_at(archive, spark))
        messages, source = spark.read.parquet(folder), f"the archive in {archive}"
    else:
        reader = spark.read.format("keylane").options(**connection.options())
        messages, source = reader.options(subscribe=topic, includeValue="false").load(), "the log"
    rates = None
    if journal is not None:
        _, where = load(journal, topic, files_at(journal, spark))
        rates = spark.read.parquet(f"{where}/{JOURNAL}")
    return examine(
        topic, messages.select("key", "partition", "timestamp"), cluster, source, rates=rates, top=top
    )


def cluster_of(client: Client, topic: str) -> Cluster:
    """Ask who serves what."""
    partitions = client.partitions(topic)
    serving = [worker.id for worker in client.cluster().workers if worker.state == "serving"]
    homeless = [info.partition for info in partitions if info.worker not in serving]
    if homeless:
        raise JobError(f"partition {homeless[0]} of {topic!r} is not served right now; try again in a moment")
    return Cluster({info.partition: info.worker for info in partitions}, sorted(serving))


def examine(
    topic: str,
    messages: DataFrame,
    cluster: Cluster,
    source: str,
    *,
    rates: DataFrame | None = None,
    top: int = TOP,
) -> Skew:
    """Look at messages (key, partition, timestamp), and at a journal for rates if there is one."""
    count = len(cluster.owners)
    keys = count_keys(messages, count, top)
    times = over_time(messages, rates, count)
    return conclude(topic, keys, times, cluster, source, by_journal=rates is not None)


def count_keys(messages: DataFrame, count: int, top: int) -> Keys:
    """Count messages by key: each key once is few rows, however many messages there are."""
    keyed = messages.where(F.coalesce(F.length("key"), F.lit(0)) > 0)
    keys = (
        keyed.groupBy("key", "partition")
        .count()
        .withColumn("hash", F.crc32(F.encode("key", "UTF-8")))  # as keylane.wire.partition_of has it
        .persist(StorageLevel.DISK_ONLY)
    )
    wrong = F.sum(F.when(F.col("hash") % count != F.col("partition"), F.col("count")).otherwise(0))
    sums = keys.groupBy((F.col("hash") % packing.PERIOD).alias("place")).agg(
        F.sum("count").alias("messages"), F.countDistinct("key").alias("keys"), wrong.alias("wrong")
    )
    most = keys.groupBy("key", "hash").agg(F.sum("count").alias("messages"))
    try:
        places = sums.collect()
        hottest = most.orderBy(F.col("messages").desc(), "key").limit(top).collect()
    finally:
        keys.unpersist()
    total = sum(row.messages for row in places)
    return Keys(
        by_hash={row.place: row.messages for row in places},
        known=sum(row["keys"] for row in places),
        misplaced=sum(row.wrong for row in places),
        hottest=[HotKey(row.key, row.messages, row.messages / total, row.hash % count) for row in hottest],
    )


def over_time(messages: DataFrame, rates: DataFrame | None, count: int) -> Times:
    """Count messages by time and partition: those of a journal, where there is one."""
    if rates is None:
        events = messages.select(
            "partition", F.unix_millis("timestamp").alias("at"), F.lit(1).alias("amount")
        )
    else:
        published = rates.where(F.col("transition") == "published")
        amount = (F.col("last") - F.col("first") + 1).alias("amount")
        events = published.select("partition", F.unix_millis("timestamp").alias("at"), amount)
    extent: Any = events.agg(
        F.min("at").alias("least"), F.max("at").alias("most"), F.sum("amount").alias("amount")
    ).first()
    if extent.least is None:
        return Times(width_of(0, 1), {})
    fewest, most = SPANS
    width = width_of(extent.most - extent.least, min(most, max(fewest, extent.amount // (FULL * count))))
    rows = (
        events.groupBy((F.floor(F.col("at") / width) * width).alias("span"), "partition")
        .agg(F.sum("amount").alias("messages"))
        .collect()
    )
    found: dict[int, dict[int, int]] = {}
    for row in rows:
        found.setdefault(row.span, {})[row.partition] = row.messages
    return Times(width, found)
