"""What a topic's journal says of itself: how far back it is a proof, and the lives of subscriptions in it.

A subscription has a **life** in each partition from `subscribed` to `unsubscribed`; one that was there before
the journal begins has a life without a beginning.
"""

from collections.abc import Collection
from typing import Any

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from pipeline.snapshot import PartitionState, Snapshot, local

LIFE = ("subscribed", "sought", "unsubscribed")
FOREVER = 2**62  # an offset after all others


class Coverage(msgspec.Struct, frozen=True):
    """What the journal covers of a partition: entries from `first` to before `end`, without a hole."""

    partition: int
    first: int  # what was published before it is unproven
    end: int
    began_ms: int | None  # its oldest record
    first_ms: int | None  # when `first` was published
    hole: bool  # whether it misses records in between, and not just its beginning


class Extent(msgspec.Struct, frozen=True):
    """How much journal there is, and of which time."""

    began_ms: dict[int, int]  # by partition
    ended_ms: int
    rows: int


def millis(name: str = "timestamp") -> Column:
    """A timestamp as milliseconds."""
    return F.unix_millis(F.col(name))


def timeline_of(journal: DataFrame) -> DataFrame:
    """Publishes and the marks of lives, each with the last entry that was `before` it."""
    order = Window.partitionBy("partition").orderBy("offset", "first")
    earlier = order.rowsBetween(Window.unboundedPreceding, -1)
    published = F.when(F.col("transition") == "published", F.col("last"))
    return (
        journal.where(F.col("transition").isin("published", *LIFE))
        .select("partition", "offset", "timestamp", "transition", "subscription", "first", "last")
        .withColumn("before", F.max(published).over(earlier))
    )


def extent_of(journal: DataFrame) -> Extent:
    """Look at all rows once."""
    rows = journal.groupBy("partition").agg(
        F.min(millis()).alias("least"), F.max(millis()).alias("most"), F.count("*").alias("rows")
    )
    found = rows.collect()
    return Extent(
        {row.partition: row.least for row in found},
        max((row.most for row in found), default=0),
        sum(row.rows for row in found),
    )


def coverage_of(timeline: DataFrame, extent: Extent, snapshot: Snapshot) -> list[Coverage]:
    """For each partition, the last stretch of entries whose publish is in the journal without a hole."""
    # Where entries are missing the journal was off for a while: what happened then to earlier entries is
    # not known, so these are not proven either.
    after_hole = F.col("first") > F.col("before") + 1
    begins = F.col("before").isNull() | after_hole
    published = (
        timeline.where(F.col("transition") == "published")
        .groupBy("partition")
        .agg(
            F.max(F.when(begins, F.col("first"))).alias("first"),
            F.max_by(millis(), F.when(begins, F.col("first"))).alias("first_ms"),
            (F.max("last") + 1).alias("end"),
            F.max(after_hole).alias("hole"),
        )
    )
    found = {row.partition: row for row in published.collect()}
    return [
        _coverage(state, found.get(state.partition), extent.began_ms.get(state.partition), snapshot.journal)
        for state in snapshot.partitions
    ]


def frame_of(spark: SparkSession, coverage: list[Coverage], snapshot: Snapshot) -> DataFrame:
    """Where proof begins, and how far log and journal reached at the first look.

    Columns partition, proven, latest, looked.
    """
    rows = [
        (part.partition, part.first, state.latest, state.journal_latest)
        for part, state in zip(coverage, snapshot.partitions, strict=True)
    ]
    return local(spark, rows, "partition int, proven long, latest long, looked long")


def _coverage(state: PartitionState, found: Any, began_ms: int | None, journal: int) -> Coverage:
    if found is None or found.end < state.latest or not journal:  # it is off, or was when these came
        return Coverage(state.partition, state.latest, state.latest, began_ms, None, found is not None)
    return Coverage(state.partition, found.first, found.end, began_ms, found.first_ms, bool(found.hole))


def lives_of(spark: SparkSession, journal: DataFrame, timeline: DataFrame, snapshot: Snapshot) -> DataFrame:
    """The lives: a number, from which to which journal offset, and what was owed.

    `owed` is the first entry owed at the end; `lowest` the lowest that ever was. Entries before `historic`
    had been published, or passed, when the subscription was made or moved to `owed` (at offset `moved`): it
    owes those that were still in the log. `mode` and `position` are null unless it is there now.
    """
    mine = Window.partitionBy("partition", "subscription").orderBy("offset")
    marks = timeline.where(F.col("transition").isin(*LIFE))
    made = F.col("transition") == "subscribed"
    starts = F.col("transition").isin("subscribed", "sought")
    numbered = marks.withColumn("life", F.sum(made.cast("int")).over(mine))
    marked = numbered.groupBy("partition", "subscription", "life").agg(
        F.coalesce(F.min(F.when(made, F.col("offset"))), F.lit(0)).alias("begins"),
        F.max(F.when(F.col("transition") == "unsubscribed", F.col("offset"))).alias("ends"),
        F.max_by("first", F.when(starts, F.col("offset"))).alias("owed"),
        F.max(F.when(starts, F.col("offset"))).alias("moved"),
        F.max(F.when(starts, F.col("first"))).alias("highest"),
        F.min(F.when(starts, F.col("first"))).alias("lowest"),
        F.max(F.when(made, F.coalesce("before", F.lit(0)) + 1)).alias("fresh"),
    )
    seen = journal.where(F.col("subscription") != "").select("partition", "subscription").distinct()
    live = local(
        spark,
        [
            (partition, subscription.name, subscription.mode, position)
            for subscription in snapshot.subscriptions
            for partition, position in enumerate(subscription.positions)
            if position is not None
        ],
        "partition int, subscription string, mode string, position long",
    )
    everybody = seen.union(live.select("partition", "subscription")).distinct()
    before = everybody.join(marks, ["partition", "subscription"], "left_anti")
    lives = marked.unionByName(
        before.select("partition", "subscription", F.lit(0).alias("life"), F.lit(0).alias("begins")),
        allowMissingColumns=True,
    )
    ended = F.col("ends").isNotNull()
    number = F.row_number().over(Window.orderBy("partition", "subscription", "life"))
    made_up = lives.join(F.broadcast(live), ["partition", "subscription"], "left").select(
        number.alias("number"),
        "partition",
        "subscription",
        "begins",
        F.coalesce("ends", F.lit(FOREVER)).alias("ends"),
        F.coalesce("owed", F.lit(0)).alias("owed"),
        F.coalesce("moved", F.lit(0)).alias("moved"),
        F.when(F.col("begins") > 0, F.col("lowest")).otherwise(0).alias("lowest"),
        F.greatest(F.coalesce("highest", F.lit(0)), F.coalesce("fresh", F.lit(0))).alias("historic"),
        F.when(~ended, F.col("mode")).alias("mode"),
        F.when(~ended, F.col("position")).alias("position"),
    )
    # They are as many as subscriptions were made, times the partitions: few enough to have at hand, and each
    # use of them is then a small table instead of all this once more.
    return spark.createDataFrame(made_up.toArrow())


def publishes_of(
    journal: DataFrame, entries: Collection[tuple[int, int]]
) -> dict[tuple[int, int], tuple[str, int]]:
    """The ledger and the time, ms, of some entries (partition, entry), as far as their publish is there."""
    if not entries:
        return {}
    wanted = local(journal.sparkSession, sorted(set(entries)), "partition int, entry long")
    published = journal.where(F.col("transition") == "published").select(
        "partition", "first", "last", "by", millis().alias("at")
    )
    found = published.join(F.broadcast(wanted), "partition").where(
        F.col("entry").between(F.col("first"), F.col("last"))
    )
    return {(row.partition, row.entry): (row.by, row["at"]) for row in found.collect()}
