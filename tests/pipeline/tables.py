"""Streaming queries that write parquet, and what they have written."""

import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

DEADLINE = 120


class Table:
    """A streaming query that writes parquet, in runs that go on from one another."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self.folder = folder

    def run(self, frame: DataFrame) -> StreamingQuery:
        """Read all that is there now, and wait for it."""
        query = self.start(frame, now=True)
        try:
            assert query.awaitTermination(200), "the query does not end"
        finally:
            query.stop()
        return query

    def start(self, frame: DataFrame, *, now: bool = False) -> StreamingQuery:
        """Read on until stopped, or only what is there now."""
        writer = frame.writeStream.format("parquet").option(
            "checkpointLocation", str(self.folder / "checkpoint")
        )
        writer = writer.trigger(availableNow=True) if now else writer.trigger(processingTime="0 seconds")
        return writer.start(str(self.folder / "rows"))

    def rows(self) -> DataFrame:
        """What was written."""
        return self._spark.read.parquet(str(self.folder / "rows"))


def numbers(table: Table) -> list[int]:
    """What was written."""
    return sorted(int(bytes(row.value)) for row in table.rows().select("value").collect())


def wait(what: Callable[[], bool], *, query: StreamingQuery | None = None) -> None:
    """Wait until it is so."""
    end = time.monotonic() + DEADLINE
    while not what():
        assert time.monotonic() < end, "it does not come to be"
        if query is not None and query.exception() is not None:
            raise AssertionError(f"the query has failed: {query.exception()}")
        time.sleep(0.05)
