"""Archive topics as Parquet, by topic and date: each message once, for whoever reads the files.

    spark-submit pipeline/archive.py orders --to /data/archive
    keylane pipeline archive orders --to s3a://bucket/archive --interval 30

A batch is written beside the archive, noted down with the names that its files are to have, and moved. A
crash before the note leaves files that nobody sees and that are written anew; after it, the next start
finishes moving. The state (checkpoint, notes, files on their way) is in the folder `<archive>.keylane`.
"""

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import msgspec
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from client.errors import InvalidArgument, Overloaded
from pipeline.compaction import TIMESTAMPS, Compactor, Limits
from pipeline.files import Files, files_at

COLUMNS = ("key", "value", "partition", "offset", "message_id", "timestamp", "event_time", "attributes")

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


class Options(msgspec.Struct, frozen=True, kw_only=True):
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
    limits: Limits = Limits()
    fail_on_data_loss: bool = True  # False: go on where messages or bodies are gone

    @property
    def root(self) -> str:
        """The archive, without a slash at its end."""
        return self.path.rstrip("/")

    @property
    def state(self) -> str:
        """The folder of this query: that of another set of topics is another one."""
        return f"{self.root}.keylane/{self.subscription}@{'+'.join(sorted(self.topics))}"


def run(spark: SparkSession, options: Options, progress: Progress = print) -> Archived:
    """Archive what there is, or go on until stopped; the result tells what this run has done."""
    if files_at(options.path, spark).plain(options.path).strip("/") == "":
        raise InvalidArgument(
            f"{options.path} is a whole file system: name a folder in it, beside which the state can be"
        )
    archive = Archive(spark, options, progress)
    query = archive.start()
    try:
        while not query.awaitTermination(1):
            pass
    except KeyboardInterrupt:
        query.stop()
    return archive.result


class Archive:
    """One query that writes an archive."""

    def __init__(self, spark: SparkSession, options: Options, progress: Progress) -> None:
        self._spark = spark
        self._options = options
        self._progress = progress
        self._files = files_at(options.root, spark)
        self._compactor = Compactor(spark, options.root, options.limits)
        self._touched: set[str] = set()  # folders that have grown since the last compaction
        self._query = ""
        self.result = Archived(options.topics, options.path)

    def start(self) -> StreamingQuery:
        """Finish what a crash has left, and start the query."""
        options = self._options
        self.recover()
        frame = self._spark.readStream.format("keylane").options(**self._source()).load()
        writer = frame.writeStream.foreachBatch(self.write).option(
            "checkpointLocation", f"{options.state}/checkpoint"
        )
        if options.interval is None:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{round(options.interval * 1000)} milliseconds").start()

    def recover(self) -> None:
        """Finish what a crash has left."""
        for note in self._notes():
            self._move(self._read(note))
        self._compactor.recover()

    def write(self, frame: DataFrame, batch: int) -> None:
        """Add a batch to the archive, unless it is there already."""
        self._query = self._query or self._query_id()
        note = f"{self._query}-{batch:08}.json"
        for other in self._notes():
            if other != note:  # its files are where they belong, and its batch does not come again
                self._files.delete(f"{self._options.state}/notes/{other}")
        known = self._read(note)
        if known is None:
            known = self._stage(frame, batch)
            if not known["rows"]:
                return
            self._files.make_folder(f"{self._options.state}/notes")
            self._files.write(f"{self._options.state}/notes/{note}", json.dumps(known))
        self._move(known)
        self.result.rows += known["rows"]
        self.result.files += len(known["moves"])
        self.result.batches += 1
        count = len(known["moves"])
        self._progress(f"batch {batch}: {known['rows']:,} rows in {count} files, {self.result.rows:,} in all")
        self._touched.update(target.rpartition("/")[0] for _, target in known["moves"])
        if self._options.compact_every and (batch + 1) % self._options.compact_every == 0:
            self._compact()

    def _stage(self, frame: DataFrame, batch: int) -> dict[str, Any]:
        """Write the files of a batch where nobody looks, and say where each is to go."""
        # Executors of a driver that was killed may still write to its folder, and a state from a backup
        # counts batches again that there were: neither folders nor files ever have the names of others.
        attempt = uuid4().hex[:12]
        staging = f"{self._options.state}/staging/{attempt}"
        counted = Observation()
        frame.sparkSession.conf.set(*TIMESTAMPS)  # that of the query alone
        day = F.date_from_unix_date(F.floor(F.unix_seconds("timestamp") / 86_400).cast("int"))  # UTC
        (
            frame.select("topic", day.alias("date"), *COLUMNS)
            .observe(counted, F.count(F.lit(1)).alias("rows"))
            .sortWithinPartitions("topic", "date", "partition", "offset")
            .write.partitionBy("topic", "date")
            .parquet(staging)
        )
        moves: list[list[str]] = []
        for folder in folders_of(self._files, staging):
            for entry in self._files.entries(f"{staging}/{folder}"):
                if entry.name.endswith(".parquet") and not entry.name.startswith((".", "_")):
                    name = f"part-{self._query[:8]}-{batch:08}-{attempt}-{len(moves):04}.parquet"
                    moves.append([f"{attempt}/{folder}/{entry.name}", f"{folder}/{name}"])
        return {"rows": counted.get.get("rows", 0), "moves": moves}

    def _move(self, note: dict[str, Any] | None) -> None:
        """Move the files of a batch to where they belong; what else was written is of no use."""
        for source, target in note["moves"] if note else ():
            staged, place = f"{self._options.state}/staging/{source}", f"{self._options.root}/{target}"
            if self._files.exists(staged) and not self._files.exists(
                place
            ):  # its name is of this attempt alone
                self._files.make_folder(place.rpartition("/")[0])
                self._files.move(staged, place)
        self._files.delete(f"{self._options.state}/staging")

    def _compact(self) -> None:
        try:
            done = self._compactor.compact(sorted(self._touched), self._progress)
        except Overloaded as busy:
            self._progress(f"no files are merged now: {busy}")
            return
        self._touched.clear()
        self.result.compactions += done.compactions
        self.result.merged += done.merged

    def _notes(self) -> list[str]:
        return [
            entry.name
            for entry in self._files.entries(f"{self._options.state}/notes")
            if entry.name.endswith(".json")
        ]

    def _read(self, note: str) -> dict[str, Any] | None:
        text = self._files.read(f"{self._options.state}/notes/{note}")
        return None if text is None else dict(json.loads(text))

    def _query_id(self) -> str:
        """Spark's name for the query, which it keeps for as long as the checkpoint is there."""
        text = self._files.read(f"{self._options.state}/checkpoint/metadata") or "{}"
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


def folders_of(files: Files, root: str) -> list[str]:
    """The folders of an archive that hold files: `topic=…/date=…`."""
    return [
        f"{topic.name}/{day.name}"
        for topic in files.entries(root)
        if topic.folder and topic.name.startswith("topic=")
        for day in files.entries(f"{root}/{topic.name}")
        if day.folder and day.name.startswith("date=")
    ]


if __name__ == "__main__":
    from pipeline.commands import main

    main("archive")
