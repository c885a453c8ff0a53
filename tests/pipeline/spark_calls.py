"""What Spark calls of a streaming source, and in which order, without Spark."""

import json
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from keylane_spark.source.options import ReadOptions
from keylane_spark.source.schema import MESSAGES
from keylane_spark.source.stream import StreamReader

Checkpoint = dict[str, Any]  # the end of the last batch that is done


class Run:
    """One start of a query: its reader, the values that it has read so far, and its checkpoint."""

    def __init__(self, options: dict[str, str], checkpoint: Checkpoint | None = None) -> None:
        self.reader = StreamReader(ReadOptions.parse(options, streaming=True), MESSAGES)
        self.values: list[str] = []
        self.checkpoint = checkpoint
        self._resumed = checkpoint is not None

    def batch(self, limit: ReadLimit | None = None) -> bool:
        """Plan a batch, read it, and have it done; False if there is nothing new."""
        start = self.checkpoint or _kept(self.reader.initialOffset())
        end = _kept(self.reader.latestOffset(start, limit or ReadAllAvailable()))
        self.checkpoint = self.checkpoint or start
        if self._resumed:  # of the batch before
            self.reader.commit(start)
        if end == start:
            return False
        self.read(start, end)
        self.checkpoint, self._resumed = end, True
        return True

    def read(self, start: Checkpoint, end: Checkpoint) -> None:
        """Read what lies between two offsets."""
        for piece in self.reader.partitions(start, end):
            for rows in self.reader.read(piece):
                self.values += [value.decode() for value in rows.column("value").to_pylist()]


def run(options: dict[str, str], checkpoint: Checkpoint | None = None) -> Run:
    """All that is there now, as with trigger(availableNow=True)."""
    done = Run(options, checkpoint)
    try:
        done.reader.prepareForTriggerAvailableNow()
        while done.batch():
            pass
    finally:
        done.reader.stop()
    return done


def _kept(offset: dict[str, Any]) -> Checkpoint:
    kept: Checkpoint = json.loads(json.dumps(offset))
    return kept
