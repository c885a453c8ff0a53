"""A Spark session that works: Java is there, and Spark's Python processes are of this interpreter."""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEAST_JAVA = 17
_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"  # without it Spark keeps filters to itself
BRING_JAVA = "apt-get install openjdk-17-jre-headless  (or: brew install openjdk@17)"


class JavaMissing(RuntimeError):
    """Spark needs Java, which pip cannot bring."""


def session(app: str, master: str | None = None, **conf: str) -> "SparkSession":
    """The Spark session of this process, made if there is none; under spark-submit that one's.

    spark = session("reports", "local[*]", **{"spark.sql.shuffle.partitions": "8"})
    """
    require_java()
    # Spark starts `python3` from PATH unless told otherwise, which need not be the one that has Keylane.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # Imported here: it takes a second, and a process that has no Java should hear of that first.
    from pyspark.sql import SparkSession

    builder = SparkSession.Builder().appName(app).config(_PUSHDOWN, "true")
    if master is not None:
        builder = builder.master(master)
    for name, value in conf.items():
        builder = builder.config(name, value)
    others = _children()
    try:
        return builder.getOrCreate()
    except KeyboardInterrupt:
        for java in _children() - others:  # it would wait forever for somebody to connect
            with suppress(ProcessLookupError):
                os.kill(java, signal.SIGTERM)
        raise


def _children() -> set[int]:
    """The processes that this one has started, as far as `ps` is there to tell."""
    command = ["ps", "-A", "-o", "pid=,ppid="]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:  # small images of containers do not have it
        return set()
    pairs = [line.split() for line in listed.splitlines()]
    return {int(pid) for pid, parent in pairs if int(parent) == os.getpid()}


def require_java() -> None:
    """Raise JavaMissing, with the command that brings it, unless there is a Java that Spark can use."""
    java = find_java()
    if java is None:
        raise JavaMissing(f"no Java found; Spark needs {LEAST_JAVA} or newer: {BRING_JAVA}")
    version = java_version(java)
    if version < LEAST_JAVA:
        raise JavaMissing(f"{java} is Java {version}; Spark needs {LEAST_JAVA} or newer: {BRING_JAVA}")


def find_java() -> str | None:
    """The java that Spark will start."""
    home = os.environ.get("JAVA_HOME")
    if home:
        inside = Path(home) / "bin" / "java"
        return str(inside) if inside.exists() else None
    return shutil.which("java")


def java_version(java: str) -> int:
    """The major version of a java, 0 if it does not run."""
    try:
        said = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found[1]) if found else 0
