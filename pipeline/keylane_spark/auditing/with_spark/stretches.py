"""From ranges to stretches: the entries that a life is about, cut wherever anything about them changes.

Journal records are ranges that overlap as they like. Each range is a step up at its first entry and a step
down after its last; sorted by entry, running sums of the steps say for every stretch between two of them how
often it was delivered, settled, and so on. That costs a sort, whatever the ranges look like, and no entry is
ever spelled out. Times are summed alike: where just one range covers a stretch, the sum is its time.
"""

from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from keylane_spark.auditing.rules import (
    ACKED,
    ARCHIVED,
    CUT,
    DELIVERED,
    DONE,
    FOREVER,
    HANDLED,
    HELD,
    IN_LOG,
    KINDS,
    MISSING,
    NO_BODY,
    PUBLISHED,
    SETTLED_OTHERWISE,
)
from keylane_spark.auditing.with_spark.lives import millis

BLOCK = 1 << 18  # entries that are sorted together: so many fit in memory, and blocks go to all cores
FINE = 256  # entries, where ranges look for each other

_RANGE = ("number", "kind", "first", "last", "at")


def ranges_of(
    journal: DataFrame,
    lives: DataFrame,
    coverage: DataFrame,
    log: DataFrame,
    bodiless: DataFrame,
    archived: DataFrame | None,
    since_ms: int = 0,
    witnesses: DataFrame | None = None,
) -> DataFrame:
    """All that is known of each life as ranges: number, kind, first, last, at.

    `coverage` is a frame_of it; `log`, `bodiless` and `archived` have partition, first, last.
    """
    known = F.broadcast(lives)
    numbers = [F.lit(part) for pair in KINDS.items() for part in pair]
    records = journal.select(
        "partition",
        "offset",
        "subscription",
        F.try_element_at(F.create_map(*numbers), F.col("transition")).alias("kind"),
        "first",
        "last",
        millis().alias("at"),
    ).where(F.col("kind").isNotNull() & (F.col("at") >= since_ms))

    published = (
        records.where(F.col("kind") == PUBLISHED)
        .drop("subscription")
        .join(F.broadcast(coverage), "partition")
        .where(F.col("first") >= F.col("proven"))
        .join(known, "partition")
        .where((F.col("offset") < F.col("ends")) & (F.col("last") >= F.col("lowest")))
    )
    own = (
        records.where(F.col("kind") != PUBLISHED)
        .join(known, ["partition", "subscription"])
        .where((F.col("offset") >= F.col("begins")) & (F.col("offset") <= F.col("ends")))
    )
    now = F.broadcast(lives.where(F.col("ends") == FOREVER))
    there = log.join(now, "partition").where(F.col("last") >= F.col("lowest"))
    parts = [
        published.select(*_RANGE),
        own.select(*_RANGE),
        _of_kind(there, IN_LOG),
        _of_kind(bodiless.join(now, "partition"), NO_BODY),
        _held(journal, lives),
        _cuts(lives, coverage),
    ]
    if archived is not None:
        parts.append(_of_kind(archived.join(known, "partition"), ARCHIVED))
    if witnesses is not None:
        parts.append(_witnessed(journal, witnesses))
    return reduce(DataFrame.unionByName, parts)


def _of_kind(ranges: DataFrame, kind: int) -> DataFrame:
    return ranges.select(
        "number",
        F.lit(kind).alias("kind"),
        "first",
        "last",
        F.lit(0).cast("long").alias("at"),
    )


def _held(journal: DataFrame, lives: DataFrame) -> DataFrame:
    """Signs that an older entry was in the log when a life began or moved: then the life owed it.

    It was delivered in this life afterwards, or somebody else settled it afterwards. A commit is no sign: it
    passes holes, too.
    """
    late = lives.where(F.col("historic") > F.col("owed")).withColumnRenamed("subscription", "mine")
    signs = journal.where(F.col("transition").isin("delivered", *HANDLED))
    delivered, own = F.col("transition") == "delivered", F.col("subscription") == F.col("mine")
    held = signs.join(F.broadcast(late), "partition").where(
        (delivered == own)
        & (F.col("offset") > F.col("moved"))
        & (F.col("offset") < F.col("ends"))
        & (F.col("first") < F.col("historic"))
        & (F.col("last") >= F.col("owed"))
    )
    return _of_kind(held, HELD)


def _witnessed(journal: DataFrame, witnesses: DataFrame) -> DataFrame:
    """What others had owed since its publish, and had not settled, when a life began or moved."""
    whose = F.broadcast(witnesses.withColumnsRenamed({"first": "begin", "last": "end", "number": "life"}))
    transitions = [transition for transition, kind in KINDS.items() if kind in DONE]
    done = (
        journal.where(F.col("transition").isin(transitions))
        .join(whose, ["partition", "subscription"])
        .where(F.col("offset") < F.col("before"))
        .where((F.col("first") <= F.col("end")) & (F.col("last") >= F.col("begin")))
    )
    # A sweep of its own, with a witness for a life, and all that it may have been owed for publishes.
    owed = _of_kind(witnesses.withColumn("number", F.col("witness")), PUBLISHED)
    found = stretches_of(owed.unionByName(_of_kind(done.withColumn("number", F.col("witness")), ACKED)))
    left = found.where(F.col("settled") == 0).select(F.col("number").alias("witness"), "first", "last")
    return _of_kind(left.join(F.broadcast(witnesses.select("witness", "number")), "witness"), HELD)


def _cuts(lives: DataFrame, coverage: DataFrame) -> DataFrame:
    """Entries at which a life's stretches must begin anew, since they are judged otherwise from there on."""
    places = lives.join(F.broadcast(coverage), "partition").select(
        "number", F.explode(F.array("owed", "historic", "position", "latest")).alias("first")
    )
    return _of_kind(places.where(F.col("first") > 0).withColumn("last", F.col("first")), CUT)


def in_blocks(ranges: DataFrame, size: int, column: str = "block") -> DataFrame:
    """The same ranges, cut where a block ends."""
    here = F.col(column) * size
    return ranges.withColumn(
        column, F.explode(F.sequence(_block("first", size), _block("last", size)))
    ).withColumns({"first": F.greatest("first", here), "last": F.least(F.col("last"), here + (size - 1))})


def _block(name: str, size: int) -> Column:
    return F.floor(F.col(name) / F.lit(size)).cast("long")


def stretches_of(ranges: DataFrame) -> DataFrame:
    """For each life, stretches first..last of entries that are alike, with what happened to them and how
    often.

    Only entries whose publish is known, and those that the journal calls lost. `delivered_at` and `acked_at`
    are null unless there was just one.
    """
    edges = F.explode(
        F.array(
            F.struct(F.col("first").alias("entry"), F.lit(1).alias("step")),
            F.struct((F.col("last") + 1).alias("entry"), F.lit(-1).alias("step")),
        )
    )
    steps = in_blocks(ranges, BLOCK).select("number", "block", "kind", "at", edges.alias("edge"))
    steps = steps.select("number", "block", "kind", "at", "edge.entry", "edge.step")
    ordered = Window.partitionBy("number", "block").orderBy("entry")
    running = ordered.rowsBetween(Window.unboundedPreceding, Window.currentRow)

    def count(*kinds: int) -> Column:
        return F.sum(F.when(F.col("kind").isin(*kinds), F.col("step")).otherwise(0)).over(running)

    def time(kind: int) -> Column:
        return F.sum(F.when(F.col("kind") == kind, F.col("step") * F.col("at")).otherwise(0)).over(running)

    # Of several steps at one entry all but the last make stretches of no length, with sums that are not
    # complete.
    return (
        steps.select(
            "number",
            F.col("entry").alias("first"),
            (F.lead("entry").over(ordered) - 1).alias("last"),
            count(PUBLISHED).alias("published"),
            time(PUBLISHED).alias("published_at"),
            count(DELIVERED).alias("delivered"),
            time(DELIVERED).alias("delivered_at"),
            count(ACKED).alias("acked"),
            time(ACKED).alias("acked_at"),
            count(ACKED, SETTLED_OTHERWISE).alias("settled"),
            count(MISSING).alias("missing"),
            count(IN_LOG).alias("in_log"),
            count(NO_BODY).alias("no_body"),
            count(HELD).alias("held"),
            count(ARCHIVED).alias("archived"),
        )
        .where((F.col("last") >= F.col("first")) & ((F.col("published") > 0) | (F.col("missing") > 0)))
        .withColumn("delivered_at", F.when(F.col("delivered") == 1, F.col("delivered_at")))
        .withColumn("acked_at", F.when(F.col("acked") == 1, F.col("acked_at")))
        .withColumn("entries", F.col("last") - F.col("first") + 1)
    )


def first_deliveries(stretches: DataFrame, ranges: DataFrame) -> DataFrame:
    """When stretches that were delivered more than once were first: number, first, delivered_at."""
    again = stretches.where(F.col("delivered") > 1).select("number", "first", "last")
    # A stretch lies within one range or beside it, so its first entry tells.
    wanted = again.select("number", "first", _block("first", FINE).alias("fine"))
    places = wanted.select("number", "fine").distinct()
    deliveries = in_blocks(ranges.where(F.col("kind") == DELIVERED), FINE, "fine").select(
        "number", "fine", F.col("first").alias("begin"), F.col("last").alias("end"), "at"
    )
    near = deliveries.join(places, ["number", "fine"], "left_semi")
    return (
        wanted.join(near, ["number", "fine"])
        .where(F.col("first").between(F.col("begin"), F.col("end")))
        .groupBy("number", "first")
        .agg(F.min("at").alias("delivered_at"))
    )
