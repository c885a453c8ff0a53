"""The sink: rows become messages, each exactly once, however often Spark runs a task.

A row's uid says which row of which batch it is, and the broker takes a uid once: what a task has published
before it failed is a duplicate when the task runs again. So there is nothing to undo, and nothing to commit
but rows of several tasks that are the same: see keylane_spark.sink.identical_rows.
"""

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from time import time
from typing import Any
from uuid import uuid4

import msgspec
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from keylane import Client, Tally
from keylane.produce.columns import Columns
from keylane_spark.plain_errors import plainly
from keylane_spark.sink.identical_rows import Repeats, Told, missing
from keylane_spark.sink.options import SinkOptions
from keylane_spark.sink.pace import paced
from keylane_spark.sink.rows import by_topic, columns_of, plain_names
from keylane_spark.sink.uids import Uids

_ROWS = 5_000  # of a call: the client's event loop has to breathe
_UNDER_WAY = 8  # calls
SHORT_WINDOW = 3_600.0  # seconds

_log = logging.getLogger("keylane.spark")
_checked: set[str] = set()  # topics that this process has looked at


class UidsForgotten(Exception):
    """What is to be published again may be there, and the broker would not know."""


@dataclass
class Written(WriterCommitMessage):
    """What a task has published, by topic."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    told: Told | None = None  # where other tasks make their uids in the same way


def batch_writer(options: Mapping[str, str], schema: StructType) -> DataSourceArrowWriter:
    """For df.write: what cannot be published is refused here, on the driver."""
    parsed = SinkOptions.parse(options).check(schema)
    if parsed.topic is not None and parsed.report is None:  # a job of our own has looked
        with parsed.client() as client:
            _check_window(client, parsed.topic)
    return BatchWriter(parsed)


def stream_writer(options: Mapping[str, str], schema: StructType) -> DataSourceStreamArrowWriter:
    """For df.writeStream; Spark makes one for each micro-batch, and another one to commit it."""
    parsed = SinkOptions.parse(options).check(schema)
    return StreamWriter(parsed)


class BatchWriter(DataSourceArrowWriter):
    """Publishes the rows of a job that ends."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._job = str(uuid4())  # made on the driver, for all attempts of all tasks

    @plainly
    def write(self, iterator: Iterator[Any]) -> Written:
        """Publish the rows of a task."""
        if self._options.topic is not None:
            _checked.add(self._options.topic)  # the driver has
        task, options = _task(), self._options
        if not (options.again or task.attemptNumber()):
            options = msgspec.structs.replace(options, until=None)  # nothing of it can be there
        # A job's tasks stay as they are.
        return publish(options, iterator, Uids("job", self._job, task.partitionId()))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Say what was not stored; the rest has been published."""
        tallies = report(messages)
        if self._options.report is not None:
            Path(self._options.report).write_bytes(msgspec.json.encode(tallies))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Leave it: what is published may have been consumed."""


class StreamWriter(DataSourceStreamArrowWriter):
    """Publishes the rows of a query, which runs a batch again, under the same id, unless it was committed."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    @plainly
    def write(self, iterator: Iterator[Any]) -> Written:
        """Publish the rows of a task."""
        task = _task()
        query, batch = (
            task.getLocalProperty(name) for name in ("sql.streaming.queryId", "streaming.sql.batchId")
        )
        if not query or batch is None:
            raise RuntimeError(
                "Spark does not say which query and batch a task is of: this needs Spark 4.1 or newer"
            )
        return publish(self._options, iterator, Uids("query", query, batch), Repeats())

    @plainly
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Publish what tasks took for rows of one another, and say what was not stored."""
        report([*messages, complete(self._options, messages)])

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Leave it: Spark calls this even after a commit, and runs the batch again."""


def publish(
    options: SinkOptions, batches: Iterator[Any], uids: Uids, repeats: Repeats | None = None
) -> Written:
    """Publish record batches, several calls under way; those of a key in the order given."""
    tallies: dict[str, Tally] = {}
    under_way: deque[tuple[str, Any, Columns, Future[Tally]]] = deque()

    def collect() -> None:
        topic, rows, columns, future = under_way.popleft()
        tally = future.result()
        if repeats is not None and tally.repeated and not options.uid_columns:
            repeats.add(rows, columns.uids or (), tally.repeated)
        tallies[topic] = tallies.get(topic, Tally()) + msgspec.structs.replace(tally, repeated=())

    with options.client() as client:
        for batch in map(plain_names, paced(batches) if options.paced else batches):
            for start in range(0, batch.num_rows, _ROWS):
                for topic, rows in by_topic(batch.slice(start, _ROWS), options.topic):
                    if topic not in _checked:
                        _check_window(client, topic)
                    if options.until is not None and time() > options.until:
                        raise UidsForgotten(
                            f"rows of this job were published before, and {topic!r} may have forgotten their "
                            "uids: they would come twice"
                        )
                    columns = columns_of(rows, topic, options.uid_columns or uids, options.durability)
                    under_way.append((topic, rows, columns, client.publish_columns(topic, columns)))
                while len(under_way) > _UNDER_WAY:
                    collect()
        while under_way:
            collect()
    return Written(tallies, None if repeats is None else repeats.tell(uids))


def complete(options: SinkOptions, messages: Sequence[WriterCommitMessage | None]) -> Written:
    """Publish the rows that tasks took for those of one another."""
    told = [message.told for message in messages if isinstance(message, Written) and message.told is not None]
    rows = missing(told)
    if (first := next(rows, None)) is None:
        return Written()
    return publish(options, chain([first], rows), Uids("none"))  # each has a uid


def report(messages: Sequence[WriterCommitMessage | None]) -> dict[str, Tally]:
    """Add up what the tasks have published, and warn of rows that nobody is owed: they are not stored."""
    tallies: dict[str, Tally] = {}
    for message in messages:
        if isinstance(message, Written):
            for topic, tally in message.tallies.items():
                tallies[topic] = tallies.get(topic, Tally()) + tally
    for topic, tally in sorted(tallies.items()):
        if tally.no_subscribers:
            _log.warning(
                "%d rows for topic %r were not stored: it has no subscription; create one before you write",
                tally.no_subscribers,
                topic,
            )
    return tallies


def _check_window(client: Client, topic: str) -> None:
    """Warn where a restart may well come after the broker has forgotten the uids."""
    _checked.add(topic)
    window = client.describe_topic(topic).dedupe_window
    if window < SHORT_WINDOW:
        _log.warning(
            "topic %r forgets uids after %g s: rows that are retried later than that are published twice; "
            "create the topic with --dedupe-window 3600 or more",
            topic,
            window,
        )


def _task() -> TaskContext:
    task = TaskContext.get()
    if task is None:
        raise RuntimeError("this runs in a Spark task only")
    return task
