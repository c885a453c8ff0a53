"""Audits of real topics, as tests run them."""

from pathlib import Path

from pyspark.sql import SparkSession

from keylane_spark.auditing.audit import SMALL, WITH_SPARK, AuditOptions, run
from keylane_spark.auditing.findings import Audit
from keylane_spark.connection import Connection
from tests.support.running import RunningBroker


def no_spark(_: int) -> SparkSession:
    """Where there must be no need of it."""
    raise AssertionError("Spark was asked for")


def audited(broker: RunningBroker, topic: str, out: Path | str, spark: SparkSession | None = None) -> Audit:
    """An audit, without Spark unless there is one."""
    options = AuditOptions(
        topic=topic, out=str(out), connection=Connection(broker.url), small=WITH_SPARK if spark else SMALL
    )
    return run(options, (lambda _: spark) if spark else no_spark)[0]
