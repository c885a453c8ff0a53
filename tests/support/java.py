"""Java that starts fast: no optimising compiler, and Spark's classes from an archive that is made once.

The archive is for one Java and one Spark; where it does not fit, or is not there, Java does without.
"""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyspark

from keylane_spark.session import find_java

ROOT = Path(__file__).resolve().parents[2]
JAVA = Path(find_java() or "java").resolve()
ARCHIVE = ROOT / ".pytest_cache" / f"{JAVA.parents[1].name}-spark-{pyspark.__version__}.jsa"
PLAIN = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
QUICK = f"{PLAIN} -XX:SharedArchiveFile={ARCHIVE} -Xlog:disable"
MAKE_SECONDS = 100.0

# What most jobs do: a query with a function in Python, a shuffle, files, and a stream.
PROGRAM = """
import sys
from keylane_spark.session import session

folder, options = sys.argv[1:]
settings = {"spark.driver.extraJavaOptions": options, "spark.ui.enabled": "false", "spark.log.level": "OFF"}
spark = session("archive", "local[1]", **{**settings, "spark.sql.shuffle.partitions": "1"})
rows = spark.range(100).selectExpr("id", "cast(id AS string) AS key").repartition(2, "key")
rows.mapInArrow(lambda batches: batches, rows.schema).write.parquet(f"{folder}/rows")
spark.read.parquet(f"{folder}/rows").groupBy("key").count().orderBy("key").collect()
stream = spark.readStream.schema(rows.schema).parquet(f"{folder}/rows").writeStream
stream = stream.foreachBatch(lambda batch, number: batch.write.parquet(f"{folder}/out"))
stream = stream.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
stream.start().awaitTermination()
java = spark.sparkContext._gateway.proc
spark.stop()
java.stdin.close()  # at which it ends, and writes the archive
java.wait()
"""


def make_archive(folder: Path) -> None:
    """Make the archive unless it is there; one process does so and others wait.

    A machine that is too busy to do so in time does without, for as long as `folder` is there.
    """
    ARCHIVE.parent.mkdir(exist_ok=True)
    given_up = folder / "no-archive"
    with ARCHIVE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if ARCHIVE.exists() or given_up.exists():
            return
        part = ARCHIVE.with_suffix(".part")
        part.unlink(missing_ok=True)
        options = f"{PLAIN} -XX:ArchiveClassesAtExit={part} -Xlog:disable"
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), options],
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            made = program.wait(MAKE_SECONDS) == 0
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
            made = False
        if made:
            part.rename(ARCHIVE)
        else:
            given_up.touch()
