"""How long messages took from publish to first delivery and to ack: percentiles, weighed by messages.

Latencies are counted in classes of three digits (an error below 1 %), so that what is held in memory does not
grow with the messages.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from keylane_spark.auditing.findings import QUANTILES, Latency


def latencies_of(judged: DataFrame, again: DataFrame | None, width_ms: int, cap: int) -> list[Latency]:
    """Over all by subscription, and by time of publish, the newest spans of at most `cap` lines.

    `again` has the first delivery of stretches that were delivered more than once. Those that were acked more
    than once, after a seek, do not count.
    """
    known = judged.where(F.col("published") > 0)
    first = F.col("delivered_at")
    if again is not None:
        known = known.join(again.withColumnRenamed("delivered_at", "first_at"), ["number", "first"], "left")
        first = F.coalesce("delivered_at", "first_at")
    delivered = F.struct(F.lit("delivered").alias("what"), first.alias("at"))
    acked = F.struct(F.lit("acked").alias("what"), F.col("acked_at").alias("at"))
    taken = F.greatest(F.col("event.at") - F.col("published_at"), F.lit(0))
    span = F.floor(F.col("published_at") / width_ms)
    times = (
        known.select(
            "subscription", "published_at", "entries", F.explode(F.array(delivered, acked)).alias("event")
        )
        .where(F.col("event.at").isNotNull())
        .select("subscription", span.alias("span"), "event.what", taken.alias("taken"), "entries")
    )
    classes = times.groupBy("subscription", "span", "what", _class(F.col("taken")).alias("class")).agg(
        F.sum("entries").alias("entries"), F.max("taken").alias("taken")
    )
    each = classes.withColumn("span", F.explode(F.array("span", F.lit(None).cast("long"))))
    both = each.groupBy("subscription", "span", "what", "class").agg(
        F.sum("entries").alias("entries"), F.max("taken").alias("taken")
    )
    return _percentiles(both, width_ms, cap)


def _class(taken: Column) -> Column:
    """Milliseconds with all but the first three digits cut off."""
    unit = F.pow(F.lit(10), F.greatest(F.length(taken.cast("string")) - 3, F.lit(0))).cast("long")
    return taken - taken % unit


def _percentiles(classes: DataFrame, width_ms: int, cap: int) -> list[Latency]:
    group = ["subscription", "span", "what"]
    upto = Window.partitionBy(*group).orderBy("class")
    ranked = classes.withColumns(
        {
            "upto": F.sum("entries").over(upto.rowsBetween(Window.unboundedPreceding, Window.currentRow)),
            "all": F.sum("entries").over(Window.partitionBy(*group)),
        }
    )
    rows = (
        ranked.groupBy(*group)
        .agg(
            F.max("all").alias("messages"),
            *(
                F.min(F.when(F.col("upto") >= F.ceil(F.col("all") * share), F.col("class"))).alias(name)
                for name, share in QUANTILES.items()
            ),
            F.max("taken").alias("max"),
        )
        .orderBy(F.col("span").desc_nulls_first(), "subscription", "what")
        .limit(cap)
        .collect()
    )
    found = [
        Latency(
            row.subscription,
            None if row.span is None else row.span * width_ms,
            row.what,
            row.messages,
            row.p50,
            row.p90,
            row.p99,
            row["max"],
        )
        for row in rows
    ]
    return sorted(found, key=lambda line: (line.subscription, line.what, line.at_ms or 0))
