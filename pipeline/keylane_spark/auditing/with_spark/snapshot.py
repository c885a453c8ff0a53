"""The snapshot of a topic as Spark writes and reads it; keylane_spark/snapshot.py says what it is."""

import json
from collections.abc import Sequence
from typing import Any

import pyarrow
from pyspark.sql import Column, DataFrame, Observation, SparkSession, Window
from pyspark.sql import functions as F

from keylane_spark.auditing.rules import Trust
from keylane_spark.connection import Connection
from keylane_spark.snapshot import JOURNAL, LOG, Snapshot, SnapshotTaker


def write_log(spark: SparkSession, connection: Connection, topic: str, out: str) -> int:
    """Write the log of a topic to a folder; how many rows."""
    # Parquet has no room for what was never there: an empty log is written with its columns all the same.
    log = _read(spark, connection, topic, includeValue="false")
    return _write(log.select("partition", "offset", "key", "message_id"), f"{out}/{LOG}")


def write_journal(spark: SparkSession, connection: Connection, taker: SnapshotTaker, out: str) -> int:
    """Write the journal of a topic to a folder, up to where the look before it has seen its end."""
    ends = json.dumps({taker.topic: {at.partition: at.journal_latest for at in taker.before_journal}})
    journal = _read(
        spark, connection, taker.topic, journal="true", failOnDataLoss="false", endingOffsets=ends
    )
    return _write(journal.drop("topic"), f"{out}/{JOURNAL}")


def _write(frame: DataFrame, folder: str) -> int:
    counted = Observation()
    frame.observe(counted, F.count(F.lit(1)).alias("rows")).write.parquet(folder)
    return int(counted.get["rows"])


def journal_of(journal: DataFrame, trust: Sequence[Trust]) -> DataFrame:
    """The records of a journal from which on none is missing."""
    late = {partition: at.start for partition, at in enumerate(trust) if at.start > 1}
    return journal.where(F.col("offset") >= _by_partition(late, 1)) if late else journal


def islands(entries: DataFrame) -> DataFrame:
    """Partitions and offsets, some of them perhaps twice, as ranges: partition, first, last."""
    rank = F.dense_rank().over(Window.partitionBy("partition").orderBy("offset"))
    return (
        entries.select("partition", "offset", (F.col("offset") - rank).alias("island"))
        .groupBy("partition", "island")
        .agg(F.min("offset").alias("first"), F.max("offset").alias("last"))
        .drop("island")
    )


def bodiless(spark: SparkSession, seen: Snapshot) -> DataFrame:
    """Messages whose bodies are gone, as ranges: partition, first, last."""
    missing = {} if seen.bodies is None else seen.bodies.missing
    rows = [(partition, *range_) for partition, ranges in missing.items() for range_ in ranges]
    return local(spark, rows, "partition int, first long, last long")


def local(spark: SparkSession, rows: Sequence[tuple[Any, ...]], schema: str) -> DataFrame:
    """A small table that is a part of the plan: it costs no job, and no Python process.

    local(spark, [(0, 17)], "partition int, latest long")
    """
    kinds = {"int": pyarrow.int32(), "long": pyarrow.int64(), "string": pyarrow.string()}
    fields = [field.split() for field in schema.split(",")]
    columns = pyarrow.schema([(name, kinds[kind]) for name, kind in fields])
    lines = [dict(zip(columns.names, row, strict=True)) for row in rows]
    return spark.createDataFrame(pyarrow.Table.from_pylist(lines, schema=columns))


def _by_partition(values: dict[int, int], otherwise: int) -> Column:
    pairs = [F.lit(part) for pair in values.items() for part in pair]
    return F.coalesce(F.try_element_at(F.create_map(*pairs), F.col("partition")), F.lit(otherwise))


def _read(spark: SparkSession, connection: Connection, topic: str, **options: str) -> DataFrame:
    return spark.read.format("keylane").options(**connection.options(), subscribe=topic, **options).load()
