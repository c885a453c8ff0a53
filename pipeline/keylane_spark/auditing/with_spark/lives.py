"""What a topic's journal says of itself, found with Spark: how far back it is a proof, and its lives."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from keylane_spark.auditing.rules import LIFE, Coverage, Extent, Life, Mark, Published, Witness
from keylane_spark.auditing.with_spark.snapshot import local
from keylane_spark.snapshot import Snapshot

_BITS = 63  # of a word
_FULL = 2**_BITS - 1
_EDGES = 4  # of ranges of records, the newest ones, in a partition


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


def extent_of(journal: DataFrame) -> tuple[Extent, set[tuple[int, str]]]:
    """Look at all rows once; and the partitions and subscriptions that they are about."""
    found = (
        journal.groupBy("partition", "subscription")
        .agg(F.min(millis()).alias("least"), F.max(millis()).alias("most"), F.count("*").alias("rows"))
        .collect()
    )
    began: dict[int, int] = {}
    for row in found:
        began[row.partition] = min(row.least, began.get(row.partition, row.least))
    extent = Extent(began, max((row.most for row in found), default=0), sum(row.rows for row in found))
    return extent, {(row.partition, row.subscription) for row in found if row.subscription}


def numbers_in(journal: DataFrame) -> dict[int, list[tuple[int, int]]]:
    """The numbers of a journal's records as ranges, by partition: the last two, which is where a hole shows.

    Sixty-three numbers are the bits of one word, so that it costs a sum and no sort.
    """
    word = F.floor(F.col("offset") / _BITS).cast("long").alias("word")
    bits = F.bit_or(F.expr(f"shiftleft(1L, int(offset % {_BITS}))"))
    words = journal.groupBy("partition", word).agg(bits.alias("bits"))
    order = Window.partitionBy("partition").orderBy("word")
    after, before = F.lead("word").over(order), F.lag("word").over(order)
    edges = words.withColumns({"after": after, "before": before}).where(
        (F.col("bits") != _FULL)
        | F.col("after").isNull()
        | F.col("before").isNull()
        | (F.col("after") != F.col("word") + 1)
        | (F.col("before") != F.col("word") - 1)
    )
    newest = Window.partitionBy("partition").orderBy(F.col("word").desc())
    some = edges.withColumn("place", F.row_number().over(newest)).where(F.col("place") <= _EDGES)
    by_partition: dict[int, list[Any]] = defaultdict(list)
    for row in some.orderBy("partition", "word").collect():
        by_partition[row.partition].append(row)
    return {partition: _numbers(rows) for partition, rows in by_partition.items()}


def _numbers(words: list[Any]) -> list[tuple[int, int]]:
    """Ranges from the words at their edges, in order; all words between an edge and the next are full."""
    ranges: list[tuple[int, int]] = []

    def add(first: int, last: int) -> None:
        if ranges and ranges[-1][1] == first - 1:
            ranges[-1] = (ranges[-1][0], last)
        elif first <= last:
            ranges.append((first, last))

    for index, row in enumerate(words):
        if index and words[index - 1].after == (inner := words[index - 1].word + 1) < row.word:
            add(inner * _BITS, row.word * _BITS - 1)
        for bit in range(_BITS):
            if row.bits >> bit & 1:
                add(row.word * _BITS + bit, row.word * _BITS + bit)
    return ranges


def published_in(timeline: DataFrame) -> dict[int, Published]:
    """What the journal has of publishes, by partition."""
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
    return {
        row.partition: Published(row.first, row.first_ms, row.end, bool(row.hole))
        for row in published.collect()
    }


def frame_of(spark: SparkSession, coverage: list[Coverage], snapshot: Snapshot) -> DataFrame:
    """Where proof begins, and how far log and journal reached at the first look.

    Columns partition, proven, latest, looked.
    """
    rows = [
        (part.partition, part.first, state.latest, state.journal_latest)
        for part, state in zip(coverage, snapshot.partitions, strict=True)
    ]
    return local(spark, rows, "partition int, proven long, latest long, looked long")


def marks_in(timeline: DataFrame) -> list[Mark]:
    """The marks of lives: as few as subscriptions were made and moved, times the partitions."""
    names = ("partition", "subscription", "offset", "transition", "first")
    before = F.coalesce("before", F.lit(0)).alias("before")
    found = timeline.where(F.col("transition").isin(*LIFE)).select(*names, before)
    return [Mark(*row) for row in found.collect()]


def lives_frame(spark: SparkSession, lives: Sequence[Life]) -> DataFrame:
    """Lives as a small table."""
    return local(
        spark,
        [msgspec.structs.astuple(life) for life in lives],
        "number int, partition int, subscription string, begins long, ends long, owed long, moved long, "
        "lowest long, historic long, mode string, position long",
    )


def witnesses_frame(spark: SparkSession, witnesses: Sequence[Witness]) -> DataFrame | None:
    """Witnesses as a small table; None if there are none."""
    schema = "witness int, number int, partition int, subscription string, first long, last long, before long"
    return local(spark, witnesses, schema) if witnesses else None


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
