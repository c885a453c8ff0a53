"""Archive topics as Parquet, by topic and date: each message once, for whoever reads the files.

    spark-submit jobs/archive.py orders --to /data/archive
    keylane pipeline archive orders --to s3a://bucket/archive --interval 30

The state (checkpoint, notes, files on their way) is in the folder `<archive>.keylane`: one for each
subscription, whichever topics it archives from one run to the next.
"""

import json
import time
from collections.abc import Callable

import msgspec
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from keylane.commandline.words import count_of
from keylane.errors import InvalidArgument, Overloaded
from keylane_spark.archiving.batches import Batches, BatchNote
from keylane_spark.archiving.compaction import TIMESTAMPS, Compactor, MergeLimits, merging
from keylane_spark.archiving.folders import folders_of
from keylane_spark.archiving.locks import archiving, check_topics, enter_topics, state_of
from keylane_spark.archiving.removed_topics import done_of, leave, plan_of
from keylane_spark.files import check_written, files_at

COLUMNS = ("key", "value", "partition", "offset", "message_id", "timestamp", "event_time", "attributes")

_LOOK = 0.2  # seconds between two looks at whether a query has ended

Progress = Callable[[str], None]


class Archived(msgspec.Struct):
    """What a run has done: `files` were added, `merged` ones taken away by compaction."""

    topics: list[str]
    path: str
    rows: int = 0
    files: int = 0
    batches: int = 0
    compactions: int = 0
    merged: int = 0


class ArchiveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an archive is of, and how it is written."""

    server: str
    topics: list[str]
    path: str
    subscription: str = "archive"
    token: str | None = None
    payloads: str | None = None
    starting: str = "earliest"
    batch_rows: int = 1_000_000
    interval: float | None = None  # seconds between batches; None: archive what is there and end
    compact_every: int = 20  # batches; 0: never
    limits: MergeLimits = MergeLimits()
    fail_on_data_loss: bool = True  # False: go on where messages or bodies are gone

    @property
    def root(self) -> str:
        """The archive, without a slash at its end."""
        return self.path.rstrip("/")

    @property
    def state(self) -> str:
        """The folder of the query, whichever topics it has from one run to the next."""
        return state_of(self.root, self.subscription)


def run(spark: SparkSession, options: ArchiveOptions, progress: Progress = print) -> Archived:
    """Archive what there is, or go on until stopped; the result tells what this run has done."""
    files = files_at(options.path, spark)
    if files.plain(options.path).strip("/") == "":
        raise InvalidArgument(
            f"{options.path} is a whole file system: name a folder in it, so that its state can be next to it"
        )
    with archiving(files, options.root, options.subscription):
        check_topics(files, options.root, options.subscription, options.topics)
        archive = Archive(spark, options, progress)
        query = archive.start()
        try:
            while query.isActive:
                time.sleep(_LOOK)  # in Python: Ctrl-C would make a page of errors of a call to Java
            query.awaitTermination()
        except KeyboardInterrupt:
            pass
        finally:
            query.stop()
    return archive.result


class Archive:
    """One query that writes an archive."""

    def __init__(self, spark: SparkSession, options: ArchiveOptions, progress: Progress) -> None:
        self._spark = spark
        self._options = options
        self._progress = progress
        self._files = files_at(options.root, spark)
        self._checkpoint = f"{options.state}/checkpoint"
        self._batches = Batches(self._files, options.root, options.state)
        self._compactor = Compactor(self._files, options.root, options.limits, merging(spark))
        self._touched: set[str] = set()  # folders that have grown since the last compaction
        self._query = ""
        self.result = Archived(options.topics, options.path)

    def start(self) -> StreamingQuery:
        """Finish what a crash has left, and start the query."""
        options = self._options
        self.recover()
        self._leave()
        frame = self._spark.readStream.format("keylane").options(**self._source()).load()
        writer = frame.writeStream.foreachBatch(self.write).option("checkpointLocation", self._checkpoint)
        if options.interval is None:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{round(options.interval * 1000)} milliseconds").start()

    def recover(self) -> None:
        """Finish what a crash has left."""
        self._batches.recover()
        self._compactor.recover()

    def _leave(self) -> None:
        """Tell the broker how far the archive got with topics that it no longer has."""
        if not self._files.exists(f"{self._checkpoint}/metadata"):
            return
        self._query = self._query_id()
        done = done_of(self._files, self._checkpoint, lambda batch: self._find(batch) is not None)
        for topic in leave(self._source(), done) if done else ():
            self._progress(
                f"topic {topic} is no longer archived, but its subscription still keeps what is published"
            )

    def write(self, frame: DataFrame, batch: int) -> None:
        """Add a batch to the archive, unless it is there already."""
        self._query = self._query or self._query_id()
        note = self._find(batch) or self._add(frame, batch)
        if note is None:
            return
        self.result.rows += note.rows
        self.result.files += len(note.moves)
        self.result.batches += 1
        rows, files = count_of(note.rows, "row"), count_of(len(note.moves), "file")
        self._progress(f"batch {batch}: {rows} in {files}, {self.result.rows:,} in all")
        self._touched.update(target.rpartition("/")[0] for _, target in note.moves)
        if self._options.compact_every and (batch + 1) % self._options.compact_every == 0:
            self._compact()

    def _find(self, batch: int) -> BatchNote | None:
        """A batch that is in the archive already, of the rows that are planned now."""
        return self._batches.find(self._query, batch, self._plan(batch))

    def _plan(self, batch: int) -> str:
        return plan_of(self._files, self._checkpoint, batch)

    def _add(self, frame: DataFrame, batch: int) -> BatchNote | None:
        """Write the files of a batch where nobody looks, and add them; None if it has no rows."""
        staged = self._batches.stage(self._query, batch)
        counted = Observation()
        frame.sparkSession.conf.set(*TIMESTAMPS)  # that of the query alone
        day = F.date_from_unix_date(F.floor(F.unix_seconds("timestamp") / 86_400).cast("int"))  # UTC
        (
            frame.select("topic", day.alias("date"), *COLUMNS)
            .observe(counted, F.count(F.lit(1)).alias("rows"))
            .sortWithinPartitions("topic", "date", "partition", "offset")
            .write.partitionBy("topic", "date")
            .parquet(staged)
        )
        rows = counted.get.get("rows", 0)
        check_written(self._files, staged, rows)
        if not rows:
            self._files.delete(staged)
            return None
        topics = {
            folder.partition("/")[0].removeprefix("topic=") for folder in folders_of(self._files, staged)
        }
        enter_topics(self._files, self._options.root, self._options.subscription, sorted(topics))
        return self._batches.add(self._query, batch, staged, rows, self._plan(batch))

    def _compact(self) -> None:
        try:
            done = self._compactor.compact(sorted(self._touched), self._progress)
        except Overloaded as busy:
            self._progress(f"not merging files now: {busy}")
            return
        self._touched.clear()
        self.result.compactions += done.compactions
        self.result.merged += done.merged

    def _query_id(self) -> str:
        """Spark's name for the query, which it keeps for as long as the checkpoint is there."""
        text = self._files.read(f"{self._checkpoint}/metadata") or "{}"
        return str(json.loads(text.strip().splitlines()[-1])["id"])

    def _source(self) -> dict[str, str]:
        options = self._options
        given = {
            "server": options.server,
            "subscribe": ",".join(options.topics),
            "subscription": options.subscription,
            "startingOffsets": options.starting,
            "maxOffsetsPerTrigger": str(options.batch_rows),
            "failOnDataLoss": str(options.fail_on_data_loss).lower(),
            "token": options.token,
            "payloads": options.payloads,
        }
        return {name: value for name, value in given.items() if value is not None}
