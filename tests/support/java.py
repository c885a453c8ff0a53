"""A Spark whose processes start fast, made once.

Its Java has no optimising compiler, and Spark's classes from an archive. The archive is for one Java and one
place of Spark; where it does not fit, or is not there, Java does without.

Its Python is unpacked. Spark starts Python with a zip of its sources, which has no compiled code in it: each
process would compile all that it imports, which takes longer than all else that most of them do in a test.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from keylane_spark.session import find_java

ROOT = Path(__file__).resolve().parents[2]
JAVA = Path(find_java() or "java").resolve()
INSTALLED = Path(pyspark.__file__).parent
MADE = ROOT / ".pytest_cache" / f"spark-{pyspark.__version__}"
HOME = MADE / "home"
ARCHIVE = MADE / f"{JAVA.parents[1].name}.jsa"
PLAIN = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
ROOM = "-XX:ReservedCodeCacheSize=240m -XX:MetaspaceSize=256m"  # or much time goes into freeing some
QUICK = f"{PLAIN} {ROOM} -XX:SharedArchiveFile={ARCHIVE} -Xlog:disable"
MAKE_SECONDS = 100.0

# The rows of a test are so few that to compile code for each query takes longer than to do without.
NO_CODE = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": QUICK,
    "spark.executor.extraJavaOptions": QUICK,
    "spark.log.level": "ERROR",
    "spark.buffer.pageSize": "1m",  # each of a query's tables and sorters takes at least one
    **NO_CODE,
}

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


def make_home() -> Path:
    """The SPARK_HOME of tests, made unless it is there: the installed one, with its Python unpacked."""
    with _making():
        if (HOME / "jars").exists() and (HOME / "jars").samefile(INSTALLED / "jars"):
            return HOME
        part = MADE / "part"
        for old in (HOME, part):
            shutil.rmtree(old, ignore_errors=True)
        (part / "python" / "lib").mkdir(parents=True)
        for entry in INSTALLED.iterdir():
            if entry.name not in ("python", "work"):
                (part / entry.name).symlink_to(entry)
        for packed in (INSTALLED / "python" / "lib").glob("*.zip"):
            with zipfile.ZipFile(packed) as zipped:  # in PYTHONPATH a folder of its name does as well
                zipped.extractall(part / "python" / "lib" / packed.name)
        part.rename(HOME)
    return HOME


def make_archive(folder: Path) -> None:
    """Make the archive unless it is there; one process does so and others wait.

    A machine that is too busy to do so in time does without, for as long as `folder` is there.
    """
    home = make_home()
    given_up = folder / "no-archive"
    with _making():
        if ARCHIVE.exists() or given_up.exists():
            return
        part = ARCHIVE.with_suffix(".part")
        part.unlink(missing_ok=True)
        options = f"{PLAIN} -XX:ArchiveClassesAtExit={part} -Xlog:disable"
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), options],
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(home)},
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


@contextmanager
def _making() -> Iterator[None]:
    """One process at a time."""
    MADE.mkdir(parents=True, exist_ok=True)
    with (MADE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
