"""The archive compared with the journal: what it lacks, what it has twice, and what was never published."""

from dataclasses import dataclass, replace

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from keylane_spark.archiving.folders import archive_folder
from keylane_spark.auditing.findings import ArchiveAudit
from keylane_spark.auditing.rules import FINE, FOREIGN, FOREVER, LEDGER, NEWER, UNPROVEN
from keylane_spark.auditing.with_spark.judge import some_entries
from keylane_spark.auditing.with_spark.lives import publishes_of
from keylane_spark.auditing.with_spark.snapshot import local
from keylane_spark.files import Files


@dataclass
class Archive:
    """The archive of a topic."""

    path: str
    subscription: str
    rows: DataFrame  # partition, offset, message_id, key
    newest: dict[int, int] | None = None  # where the log of each partition ended after the rows had been read
    earlier: int = 0  # rows of earlier topics of the name, which are not in `rows` any more

    @classmethod
    def read(cls, spark: SparkSession, path: str, topic: str, subscription: str, files: Files) -> "Archive":
        """The archive of a topic in a folder."""
        rows = spark.read.parquet(archive_folder(path, topic, files))
        return cls(path, subscription, rows.select("partition", "offset", "message_id", "key"))

    def since(self, ledger: int) -> "Archive":
        """Without the rows of older ledgers."""
        number = F.regexp_extract("message_id", LEDGER, 1)
        older = F.coalesce(F.when(number != "", number).cast("long") < ledger, F.lit(False))
        return replace(self, rows=self.rows.where(~older), earlier=self.rows.where(older).count())

    def check(self, judged: DataFrame, journal: DataFrame, coverage: DataFrame, cap: int) -> ArchiveAudit:
        """SubscriptionClaim it against the journal; lists have `cap` lines at most."""
        rows = check_rows(self.rows, journal, coverage, self.newest).persist(StorageLevel.DISK_ONLY)
        try:
            return summarise(self, rows, judged, journal, cap)
        finally:
            rows.unpersist()


def check_rows(
    archive: DataFrame, journal: DataFrame, coverage: DataFrame, newest: dict[int, int] | None
) -> DataFrame:
    """The rows with `again`, of one that is there before, and `found`; `newest` is where logs end now."""
    # A ledger's entries are consecutive, so two numbers tell which they are.
    ledgers = (
        journal.where(F.col("transition") == "published")
        .groupBy("partition", F.col("by").alias("ledger"))
        .agg(F.min("first").alias("from"), F.max("last").alias("upto"))
    )
    ends = ledgers.groupBy("partition").agg((F.max("upto") + 1).alias("end"))
    about = coverage.select("partition", "proven").join(ends, "partition", "left")
    if newest is None:  # nobody knows
        about = about.withColumn("newest", F.lit(FOREVER))
    else:
        now = local(journal.sparkSession, list(newest.items()), "partition int, newest long")
        about = about.join(now, "partition")
    same = Window.partitionBy("partition", "offset").orderBy("message_id")
    rows = archive.withColumn("again", F.row_number().over(same) > 1).join(
        F.broadcast(about), "partition", "left"
    )
    rows = rows.join(
        F.broadcast(ledgers.withColumnRenamed("partition", "of")),
        (F.col("of") == F.col("partition")) & F.col("offset").between(F.col("from"), F.col("upto")),
        "left",
    )
    expected = F.concat_ws("", "partition", F.lit(":"), "ledger", F.lit("-"), "offset")
    found = (
        F.when(
            F.col("proven").isNull() | (F.col("offset") < 1) | (F.col("offset") >= F.col("newest")), FOREIGN
        )
        .when(F.col("offset") < F.col("proven"), UNPROVEN)
        .when(F.col("offset") >= F.col("end"), NEWER)
        .when(F.col("ledger").isNull() | (F.col("message_id") != expected), FOREIGN)
        .otherwise(FINE)
    )
    return rows.select("partition", "offset", "message_id", "again", found.alias("found"))


def summarise(
    archive: Archive, rows: DataFrame, judged: DataFrame, journal: DataFrame, cap: int
) -> ArchiveAudit:
    """Count, and list the first of each kind."""
    counts = {
        (row.again, row.found): row["count"] for row in rows.groupBy("again", "found").count().collect()
    }
    total = sum(counts.values())
    twice = sum(count for (again, _), count in counts.items() if again)
    settled = judged.where(
        (F.col("subscription") == archive.subscription) & (F.col("published") > 0) & (F.col("acked") > 0)
    )
    gone = settled.where(F.col("archived") == 0)
    known = judged.where(F.col("subscription") == archive.subscription).limit(1).count() > 0
    committed = settled.agg(F.sum("entries")).first()
    missing = gone.agg(F.sum("entries")).first()
    return ArchiveAudit(
        path=archive.path,
        subscription=archive.subscription,
        rows=total,
        messages=total - twice,
        duplicates=twice,
        committed=(committed[0] or 0) if known and committed else None,
        missing=(missing[0] or 0) if missing else 0,
        never_published=sum(count for (_, found), count in counts.items() if found == FOREIGN),
        unproven=counts.get((False, UNPROVEN), 0),
        newer=counts.get((False, NEWER), 0),
        missing_ids=_missing(gone, journal, cap),
        duplicate_ids=_ids(rows.where("again"), cap),
        never_published_ids=_ids(rows.where(F.col("found") == FOREIGN), cap),
        earlier=archive.earlier,
    )


def _ids(rows: DataFrame, cap: int) -> list[str]:
    some = rows.select("partition", "offset", "message_id").distinct().orderBy("partition", "offset")
    return [row.message_id for row in some.limit(cap).collect()]


def _missing(stretches: DataFrame, journal: DataFrame, cap: int) -> list[str]:
    """The archive does not have their ids, so they are made from the journal."""
    entries = some_entries(stretches.orderBy("partition", "first").select("partition", "first", "last"), cap)
    published = publishes_of(journal, [(partition, entry) for partition, entry in entries])
    return [f"{partition}:{published[partition, entry][0]}-{entry}" for partition, entry in entries]
