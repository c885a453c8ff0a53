"""Skew: which keys and partitions are hot, when, and what to do about it.

keylane pipeline skew orders --archive /data/archive --out skew
keylane rebalance --plan skew/plan.json --dry-run
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from client import Client
from pipeline import packing, snapshot
from pipeline.archived import Archive
from pipeline.commandline import Trouble
from pipeline.journal import millis
from pipeline.packing import Candidate, imbalance

TOP = 20
SPANS = 240  # of time, at most
MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS


class HotKey(msgspec.Struct, frozen=True):
    """One of the keys with most messages."""

    key: str
    messages: int
    share: float  # of all messages
    partition: int  # that it hashes to


class HotPartition(msgspec.Struct, frozen=True):
    """How much a partition has."""

    partition: int
    messages: int
    share: float


class Span(msgspec.Struct, frozen=True):
    """A minute, an hour or a day: how many messages, and the busiest partition over the mean."""

    at_ms: int
    messages: int
    imbalance: float


class WorkerLoad(msgspec.Struct, frozen=True):
    """A worker's share of the messages now, and with the plan."""

    worker: str
    partitions: int
    before: float
    after: float


class PlannedMove(msgspec.Struct, frozen=True):
    """Which worker is to serve a partition."""

    topic: str
    partition: int
    worker: str


class Skew(msgspec.Struct, frozen=True):
    """What was found, and what to do."""

    topic: str
    made_at: datetime
    source: str
    messages: int
    keyless: int
    keys: int
    misplaced: int  # messages that are not in the partition that their key hashes to
    partitions: list[HotPartition]
    imbalance: float
    hot_keys: list[HotKey]
    span_ms: int
    spans: list[Span]
    candidates: list[Candidate]
    recommended: int | None
    advice: list[str]
    workers: list[WorkerLoad]
    moves: list[PlannedMove]


class Cluster(msgspec.Struct, frozen=True):
    """Who serves the partitions of the topic, by partition, and who could."""

    owners: dict[int, str]
    workers: list[str]


def run(
    spark: SparkSession,
    topic: str,
    out: Path,
    *,
    server: str,
    archive: Path | None = None,
    journal: Path | None = None,
    top: int = TOP,
) -> Skew:
    """Look at a topic: at its archive, else at what is in its log; at a journal for what happened when."""
    out.mkdir(parents=True, exist_ok=True)
    with Client(server) as client:
        cluster = cluster_of(client, topic)
    if archive is not None:
        folder = Archive.read(spark, archive, topic, "").path / f"topic={topic}"
        messages, source = spark.read.parquet(str(folder)), f"the archive in {archive}"
    else:
        reader = spark.read.format("keylane").options(server=server, subscribe=topic, includeValue="false")
        messages, source = reader.load(), "the log"
    rates = None
    if journal is not None:
        seen, where = snapshot.load(journal)
        rates = snapshot.journal_of(spark, where, seen)
    return examine(
        topic, messages.select("key", "partition", "timestamp"), cluster, source, rates=rates, top=top
    )


def cluster_of(client: Client, topic: str) -> Cluster:
    """Ask who serves what."""
    partitions = client.partitions(topic)
    serving = [worker.id for worker in client.cluster().workers if worker.state == "serving"]
    homeless = [info.partition for info in partitions if info.worker not in serving]
    if homeless:
        raise Trouble(f"partition {homeless[0]} of {topic!r} is not served right now; try again in a moment")
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
    # Each key once, with what all else follows from: few rows, however many messages there are.
    keyed = messages.where(F.coalesce(F.length("key"), F.lit(0)) > 0)
    keys = (
        keyed.groupBy("key", "partition")
        .count()
        .withColumn("hash", F.crc32(F.encode("key", "UTF-8")))  # as client.wire.partition_of has it
        .persist(StorageLevel.DISK_ONLY)
    )
    try:
        by_hash: dict[int, int] = {}
        misplaced = known = 0
        wrong = F.sum(F.when(F.col("hash") % count != F.col("partition"), F.col("count")).otherwise(0))
        sums = keys.groupBy((F.col("hash") % packing.PERIOD).alias("place")).agg(
            F.sum("count").alias("messages"), F.countDistinct("key").alias("keys"), wrong.alias("wrong")
        )
        for row in sums.collect():
            by_hash[row.place] = row.messages
            misplaced, known = misplaced + row.wrong, known + row["keys"]
        hottest = (
            keys.groupBy("key", "hash")
            .agg(F.sum("count").alias("messages"))
            .orderBy(F.col("messages").desc(), "key")
            .limit(top)
            .collect()
        )
    finally:
        keys.unpersist()
    span_ms, over_time = _over_time(messages, rates)
    loads = dict.fromkeys(range(count), 0)
    for at in over_time.values():
        for partition, amount in at.items():
            loads[partition] = loads.get(partition, 0) + amount
    total, with_key = sum(loads.values()), sum(by_hash.values())
    keyless = 0 if rates is not None else max(0, total - with_key)
    hot_keys = [
        HotKey(row.key, row.messages, row.messages / max(1, with_key + keyless), row.hash % count)
        for row in hottest
    ]
    found = packing.candidates(by_hash, keyless, len(cluster.workers))
    placed = packing.place(loads, cluster.owners, cluster.workers)
    before = packing.worker_loads(loads, cluster.owners, cluster.workers)
    after = packing.worker_loads(loads, placed, cluster.workers)
    best = packing.recommend(found)
    moves = [
        PlannedMove(topic, partition, worker)
        for partition, worker in sorted(placed.items())
        if cluster.owners[partition] != worker
    ]
    return Skew(
        topic=topic,
        made_at=datetime.now(UTC),
        source=source if rates is None else f"{source}; rates from the journal",
        messages=total,
        keyless=keyless,
        keys=known,
        misplaced=misplaced,
        partitions=[
            HotPartition(number, load, load / max(1, total)) for number, load in sorted(loads.items())
        ],
        imbalance=imbalance(list(loads.values())),
        hot_keys=hot_keys,
        span_ms=span_ms,
        spans=[
            Span(at_ms, sum(at.values()), imbalance([at.get(number, 0) for number in range(count)]))
            for at_ms, at in sorted(over_time.items())
        ],
        candidates=found,
        recommended=best.partitions if best else None,
        advice=advice_of(count, hot_keys, found, best, before, after, moves),
        workers=[
            WorkerLoad(
                worker,
                sum(owner == worker for owner in cluster.owners.values()),
                before[worker] / max(1, total),
                after[worker] / max(1, total),
            )
            for worker in cluster.workers
        ],
        moves=moves,
    )


def _over_time(messages: DataFrame, rates: DataFrame | None) -> tuple[int, dict[int, dict[int, int]]]:
    """The width of a span, and messages by span and partition."""
    if rates is None:
        events = messages.select("partition", millis().alias("at"), F.lit(1).alias("amount"))
    else:
        published = rates.where(F.col("transition") == "published")
        amount = (F.col("last") - F.col("first") + 1).alias("amount")
        events = published.select("partition", millis().alias("at"), amount)
    extent = events.agg(F.min("at").alias("least"), F.max("at").alias("most")).first()
    if extent is None or extent.least is None:
        return MINUTE_MS, {}
    length = extent.most - extent.least
    width = next((w for w in (MINUTE_MS, HOUR_MS, 24 * HOUR_MS) if length <= w * SPANS), 7 * 24 * HOUR_MS)
    rows: list[Any] = (
        events.groupBy((F.floor(F.col("at") / width) * width).alias("span"), "partition")
        .agg(F.sum("amount").alias("messages"))
        .collect()
    )
    found: dict[int, dict[int, int]] = {}
    for row in rows:
        found.setdefault(row.span, {})[row.partition] = row.messages
    return width, found


def advice_of(
    count: int,
    hot_keys: list[HotKey],
    found: list[Candidate],
    best: Candidate | None,
    before: Mapping[str, float],
    after: Mapping[str, float],
    moves: list[PlannedMove],
) -> list[str]:
    """What to do, in sentences."""
    said = []
    workers = len(before)
    if hot_keys and workers > 1 and hot_keys[0].share * workers > 1:
        key = hot_keys[0]
        said.append(
            f"key {key.key!r} alone has {key.share:.0%} of the messages: one key is one lane in one "
            f"partition, so one of {workers} workers has at least {key.share * workers:.1f} times the mean, "
            "whatever the number of partitions; to spread it, make its key finer"
        )
    now = next((one for one in found if one.partitions == count), None)
    if best is not None and best.partitions != count and (now is None or best.workers < now.workers - 0.05):
        said.append(
            f"{best.partitions} partitions would be more even than {count}: the busiest of {workers} workers "
            f"would have {best.workers:.2f} times the mean; the count of a topic is fixed, so make a new one "
            "and replay"
        )
    elif best is not None:
        said.append(f"{count} partitions are enough")
    if moves:
        said.append(
            f"the plan moves {len(moves)} of {count} partitions: the busiest worker comes from "
            f"{imbalance(list(before.values())):.2f} to {imbalance(list(after.values())):.2f} times the mean"
        )
    else:
        said.append("no other placement of the partitions is worth a move")
    return said


if __name__ == "__main__":
    from pipeline.commands import main

    main("skew")
