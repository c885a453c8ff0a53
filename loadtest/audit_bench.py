"""How fast an audit is: a journal of ten million rows, made up, on two cores.

    python -m loadtest.audit_bench --rows 10_000_000 --master 'local[2]'

Prints one line of JSON: seconds, seconds of work, rows a second, and the most memory (MB) that the JVM and
Python had.
"""

import argparse
import json
import shutil
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from keylane_spark.auditing.audit import LINES, LISTED
from keylane_spark.auditing.in_memory.engine import InMemoryEngine
from keylane_spark.auditing.report import write_audit
from keylane_spark.auditing.with_spark.engine import SparkEngine
from keylane_spark.files import LocalFiles
from keylane_spark.session import session
from keylane_spark.snapshot import BodiesState, PartitionState, Snapshot, SubscriptionState

PARTITIONS = 8
SUBSCRIPTIONS = ("billing", "search", "warehouse")
BATCH = 20  # entries that are published together
STEP = 32  # journal offsets for each batch, more than it has records
SPAN_MS = 6 * 3_600_000
START_MS = int(datetime(2026, 11, 16, tzinfo=UTC).timestamp() * 1_000)
RECORDS = 10.4  # of a batch, about


class Meter(threading.Thread):
    """Watches the memory of this process and all that it has started, the JVM among them."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most: dict[str, int] = {"jvm": 0, "python": 0, "together": 0}
        self._over = threading.Event()

    def run(self) -> None:
        """Look ten times a second."""
        mine = psutil.Process()
        while not self._over.wait(0.1):
            now = {"jvm": 0, "python": 0}
            for process in (mine, *mine.children(recursive=True)):
                try:
                    now["jvm" if "java" in process.name() else "python"] += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            now["together"] = sum(now.values())
            self.most = {name: max(most, now[name]) for name, most in self.most.items()}

    def stop(self) -> dict[str, int]:
        """The most that was seen, in MB."""
        self._over.set()
        self.join()
        return {name: most // 2**20 for name, most in self.most.items()}


def cpu_seconds() -> float:
    """What this process and all that it has started have worked: more telling than time on a busy machine."""
    mine = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (mine, *mine.children(recursive=True)))


def make_journal(spark: SparkSession, rows: int) -> tuple[DataFrame, int]:
    """About so many rows, and how many batches each partition has.

    Every batch is published as one range. Each subscription has it delivered, and acks it whole or in two
    ranges; of one in eleven some is nacked, delivered and acked again, and of one in fifty a message times
    out.
    """
    batches = round(rows / RECORDS / PARTITIONS)
    batch = F.col("id") % batches
    first = batch * BATCH + 1
    base = spark.range(batches * PARTITIONS, numPartitions=16).select(
        F.floor(F.col("id") / batches).cast("int").alias("partition"),
        batch.alias("batch"),
        first.alias("from"),
        (F.lit(START_MS) + batch * SPAN_MS / batches).cast("long").alias("ms"),
        F.xxhash64("id").alias("luck"),
    )
    lucky: list[Column] = [F.pmod(F.shiftright("luck", 7 * nth), F.lit(1_100)) for nth in range(3)]
    records = [_record(0, "published", "", "1", 0, BATCH - 1, 0)]
    for nth, (name, luck) in enumerate(zip(SUBSCRIPTIONS, lucky, strict=True)):
        at, wait = 1 + nth * 10, 3 + F.pmod(luck, F.lit(40 * (nth + 1)))
        consumer = F.concat(F.lit(f"{name}-"), F.pmod("batch", F.lit(4)).cast("string"))
        whole, nacked, late = luck < 700, luck % 11 == 0, luck % 50 == 0
        records += [
            _record(at, "delivered", name, consumer, 0, BATCH - 1, wait),
            _record(at + 1, "acked", name, consumer, 0, BATCH - 5, 2 * wait, whole & ~nacked),
            _record(at + 2, "acked", name, consumer, BATCH - 4, BATCH - 1, 3 * wait, ~nacked | ~whole),
            _record(at + 3, "acked", name, consumer, 0, BATCH - 5, 4 * wait, ~whole & ~nacked),
            _record(at + 4, "nacked", name, consumer, 0, BATCH - 5, 2 * wait, nacked),
            _record(at + 5, "delivered", name, consumer, 0, BATCH - 5, 1_000 + 2 * wait, nacked),
            _record(at + 6, "acked", name, consumer, 0, BATCH - 1, 1_000 + 3 * wait, nacked & whole),
            _record(at + 7, "acked", name, consumer, 0, BATCH - 5, 1_000 + 3 * wait, nacked & ~whole),
            _record(at + 8, "timed_out", name, consumer, 3, 3, 30_000, late),
        ]
    each = F.explode(F.array_compact(F.array(*records)))
    made = base.select("partition", "batch", "from", "ms", each.alias("r")).select(
        "partition",
        (F.col("batch") * STEP + F.col("r.at") + 1).alias("offset"),
        F.timestamp_millis(F.col("ms") + F.col("r.wait")).alias("timestamp"),
        F.col("r.transition").alias("transition"),
        F.col("r.subscription").alias("subscription"),
        F.col("r.by").alias("by"),
        (F.col("from") + F.col("r.first")).alias("first"),
        (F.col("from") + F.col("r.last")).alias("last"),
    )
    return made, batches


def _record(
    at: int,
    transition: str,
    subscription: str,
    by: str | Column,
    first: int,
    last: int,
    wait: int | Column,
    when: Column | None = None,
) -> Column:
    record = F.struct(
        F.lit(at).alias("at"),
        F.lit(transition).alias("transition"),
        F.lit(subscription).alias("subscription"),
        (F.lit(by) if isinstance(by, str) else by).alias("by"),
        F.lit(first).alias("first"),
        F.lit(last).alias("last"),
        (F.lit(wait) if isinstance(wait, int) else wait).cast("long").alias("wait"),
    )
    return record if when is None else F.when(when, record)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--heap", default="2g", help="of the JVM")
    parser.add_argument("--keep", type=Path, help="folder for journal and report, instead of a temporary one")
    parser.add_argument("--plain", action="store_true", help="judge without Spark")
    chosen = parser.parse_args()
    folder = chosen.keep or Path(tempfile.mkdtemp(prefix="audit-bench-"))
    spark = session(
        "audit-bench",
        chosen.master,
        **{
            "spark.driver.memory": chosen.heap,
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "16",
            "spark.ui.showConsoleProgress": "false",
        },
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        print(json.dumps(measure(spark, chosen.rows, folder, plain=chosen.plain)))
    finally:
        spark.stop()
        if chosen.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def measure(spark: SparkSession, rows: int, folder: Path, *, plain: bool = False) -> dict[str, object]:
    """Make the journal, then audit it, with Spark or without."""
    journal, batches = make_journal(spark, rows)
    # Records have consecutive numbers; a row here is a record.
    order = Window.partitionBy("partition").orderBy("offset")
    journal = journal.withColumn("offset", F.row_number().over(order).cast("long"))
    journal.write.mode("overwrite").parquet(str(folder / "journal"))
    written = (
        spark.read.parquet(str(folder / "journal")).groupBy("partition").agg(F.max("offset").alias("last"))
    )
    ends = {row.partition: row.last + 1 for row in written.collect()}
    empty = spark.createDataFrame([], "partition int, offset long, key string, message_id string")
    empty.write.mode("overwrite").parquet(str(folder / "log"))
    latest = batches * BATCH + 1
    seen = Snapshot(
        topic="orders",
        taken_at=datetime.now(UTC),
        journal=2**31,
        partitions=[PartitionState(p, latest, latest, 1, ends[p], ends[p]) for p in range(PARTITIONS)],
        subscriptions=[SubscriptionState(name, "shared", [latest] * PARTITIONS) for name in SUBSCRIPTIONS],
        bodies=BodiesState(0, 0, {}),
    )
    engine = InMemoryEngine(str(folder)) if plain else SparkEngine(spark, str(folder))
    meter = Meter()
    meter.start()
    begun, worked = time.perf_counter(), cpu_seconds()
    found = engine.examine(seen, str(folder), None, None, LISTED, LINES)
    seconds, worked = time.perf_counter() - begun, cpu_seconds() - worked
    most = meter.stop()
    write_audit(found, str(folder), LocalFiles())
    return {
        "rows": found.records,
        "messages": found.messages,
        "deliveries": sum(one.deliveries for one in found.subscriptions),
        "verdict": found.verdict,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(worked, 1),
        "rows_per_second": round(found.records / seconds),
        "peak_mb": most,
    }


if __name__ == "__main__":
    main()
