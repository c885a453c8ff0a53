"""Replay an archive into a topic: the order of each key as it was, as fast as allowed, each message once.

    spark-submit pipeline/replay.py /data/archive orders-again --rate 5000

It goes in rounds, each a slice of every partition; how far it is stands in a file, so that a run that was
stopped goes on with the round that was not finished. What that one had published already are duplicates to
the broker: a message's uid is made of where it comes from, where it goes, and the name of the run.
"""

import math
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import DateType, StructField, StructType

from client import Client, Tally, TopicInfo
from client.errors import InvalidArgument, SubscriptionNotFound
from pipeline.archive import COLUMNS
from pipeline.columns import MESSAGES
from pipeline.files import files_at
from pipeline.pace import DUE

REPLAYED_FROM = "keylane-replayed-from"

Progress = Callable[[str], None]


class Replayed(msgspec.Struct):
    """What a run has published; with `dry_run` what it would."""

    source: str
    topic: str
    run_id: str
    rows: int  # that the archive has for it
    stored: int = 0
    duplicates: int = 0
    no_subscribers: int = 0
    rounds: int = 0
    seconds: float = 0.0
    resumed: bool = False  # a part was done before
    dry_run: bool = False


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What is replayed, and where to."""

    server: str
    path: str
    topic: str
    source: str | None = None  # the archived topic; the only one if not named
    run_id: str = "replay"
    token: str | None = None
    payloads: str | None = None
    durability: str | None = None
    rate: float | None = None  # rows a second, of all tasks together
    since: datetime | None = None
    until: datetime | None = None
    keys: list[str] | None = None
    round_rows: int = 250_000
    dry_run: bool = False

    @property
    def root(self) -> str:
        """The archive, without a slash at its end."""
        return self.path.rstrip("/")

    @property
    def note(self) -> str:
        """The file that says how far it is."""
        return f"{self.root}.keylane/replays/{self.topic}@{self.run_id}.json"


class Slice(msgspec.Struct, frozen=True):
    """What there is to replay of one partition: so many rows, of offsets `first` to `last`."""

    partition: int
    first: int
    last: int
    rows: int


class Note(msgspec.Struct):
    """How far a run is: which rows are in which round is settled when it begins."""

    choice: dict[str, Any]
    slices: list[Slice]
    rounds: int
    done: int = 0
    at: float = 0.0  # unix time at which the last round was done

    @property
    def rows(self) -> int:
        """How many there are to replay."""
        return sum(item.rows for item in self.slices)


def run(spark: SparkSession, options: Options, progress: Progress = print) -> Replayed:
    """Publish what is archived; the result tells what became of it."""
    return Replay(spark, options, progress).run()


class Replay:
    """One run from an archive into a topic."""

    def __init__(self, spark: SparkSession, options: Options, progress: Progress) -> None:
        if options.rate is not None and options.rate <= 0:
            raise InvalidArgument(f"a rate of {options.rate:g} rows a second: it must be more than 0")
        self._spark = spark
        self._options = options
        self._progress = progress
        self._files = files_at(options.root, spark)
        self._source = options.source or self._only_topic()

    def run(self) -> Replayed:
        """Do the rounds that are not done."""
        options, began = self._options, time.monotonic()
        note = self._note()
        result = Replayed(self._source, options.topic, options.run_id, note.rows, dry_run=options.dry_run)
        result.resumed = note.done > 0
        if options.dry_run:
            result.rounds = note.rounds - note.done
            return result
        for number in range(note.done, note.rounds):
            tally = self._round(note, number)
            if tally.no_subscribers:
                self._topic()  # a round that went nowhere is not done
            result.stored += tally.stored
            result.duplicates += tally.duplicates
            result.no_subscribers += tally.no_subscribers
            result.rounds += 1
            result.seconds = round(time.monotonic() - began, 3)
            note.done, note.at = number + 1, time.time()
            self._files.write(options.note, msgspec.json.encode(note).decode())
            self._progress(
                f"round {note.done} of {note.rounds}: {result.stored:,} of {note.rows:,} rows published, "
                f"{result.stored / result.seconds:,.0f}/s"
            )
        return result

    def _rows(self) -> DataFrame:
        """The rows of the archive that are asked for."""
        options = self._options
        folder = f"{options.root}/topic={self._source}"
        if not self._files.exists(folder):
            raise InvalidArgument(f"the archive {options.root} has no topic {self._source!r}")
        schema = StructType([*(MESSAGES[name] for name in COLUMNS), StructField("date", DateType())])
        frame = self._spark.read.schema(schema).parquet(folder)
        if options.since is not None:
            frame = frame.where(F.col("date") >= options.since.astimezone(UTC).date())  # spares files
            frame = frame.where(F.col("timestamp") >= F.lit(options.since))
        if options.until is not None:
            frame = frame.where(F.col("date") <= options.until.astimezone(UTC).date())
            frame = frame.where(F.col("timestamp") < F.lit(options.until))
        if options.keys is not None:
            frame = frame.where(F.col("key").isin(options.keys))
        return frame

    def _only_topic(self) -> str:
        found = [
            entry.name.removeprefix("topic=")
            for entry in self._files.entries(self._options.root)
            if entry.folder and entry.name.startswith("topic=")
        ]
        if len(found) != 1:
            what = (
                f"has topics {', '.join(found)}: say which with --from" if found else "has no topic=… folder"
            )
            raise InvalidArgument(f"the archive {self._options.root} {what}")
        return found[0]

    def _note(self) -> Note:
        """How far a run of this name is; with another choice of rows it cannot go on."""
        options = self._options
        choice = {
            "from": self._source,
            "since": options.since.isoformat() if options.since else None,
            "until": options.until.isoformat() if options.until else None,
            "keys": options.keys,
        }
        window = self._topic().dedupe_window
        text = self._files.read(options.note)
        if text is None:
            slices = slices_of(self._rows())
            return Note(
                choice, slices, self._rounds(sum(item.rows for item in slices), window), at=time.time()
            )
        note = msgspec.json.decode(text, type=Note)
        if note.choice != choice:
            raise InvalidArgument(
                f"run {options.run_id!r} into {options.topic!r} was begun with other rows: {note.choice}; "
                "give another --run-id to publish these"
            )
        if note.done < note.rounds and time.time() - note.at > window:
            self._progress(
                f"this run stood still for longer than {options.topic!r} remembers uids ({window:g} s): what "
                f"round {note.done + 1} had published already comes twice"
            )
        if note.done == note.rounds:
            self._progress(
                f"run {options.run_id!r} into {options.topic!r} was finished before: give another --run-id "
                "to publish it all again, or what was archived since"
            )
        return note

    def _topic(self) -> TopicInfo:
        """The target, which somebody must read; what is wrong with it comes before anything is done."""
        options = self._options
        with Client(options.server, token=options.token) as client:
            about = client.describe_topic(options.topic)
        if not about.subscriptions:
            raise SubscriptionNotFound(
                f"topic {options.topic!r} has no subscription, so nothing would be stored; make one first: "
                f"keylane subscription create {options.topic} NAME"
            )
        return about

    def _rounds(self, rows: int, window: float) -> int:
        """How many rounds: none may last so long that its beginning is forgotten when a task runs again."""
        most = float(self._options.round_rows)
        if self._options.rate is not None:
            most = max(1.0, min(most, self._options.rate * window / 4))
        return math.ceil(rows / most)

    def _round(self, note: Note, number: int) -> Tally:
        """Publish the rows of a round: a task has whole partitions, each in the order of its offsets."""
        options, slices = self._options, note.slices
        chosen = F.lit(False)
        for item in slices:
            start, end = bounds(item, number, note.rounds)
            chosen |= (F.col("partition") == item.partition) & F.col("offset").between(start, end - 1)
        tasks = max(1, min(len(slices), self._spark.sparkContext.defaultParallelism))
        place = {item.partition: index % tasks for index, item in enumerate(slices)}
        task = F.element_at(
            F.create_map(*(F.lit(part) for pair in place.items() for part in pair)), F.col("partition")
        )
        rows = self._rows().where(chosen)  # files may have been merged since the last round
        order = ["partition", "offset"]
        extra: list[Column] = []
        if options.rate is not None:
            # Every partition takes as long as the whole round is to take.
            seconds = rows.count() / options.rate
            window = Window.partitionBy("partition").orderBy("offset")
            total = F.count(F.lit(1)).over(Window.partitionBy("partition"))
            rows = rows.withColumn(DUE, (F.row_number().over(window) - 1) / total * seconds)
            order, extra = [DUE, *order], [F.col(DUE)]
        rows = rows.repartitionById(tasks, task).sortWithinPartitions(*order)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            sink = rows.select("key", "value", self._attributes(), self._uid(), *extra).write.format(
                "keylane"
            )
            paced = {"_paced": "true"} if extra else {}
            sink.options(**self._target(), **paced, _report=str(report)).mode("append").save()
            told = msgspec.json.decode(report.read_bytes(), type=dict[str, Tally])
        return told.get(options.topic, Tally())

    def _attributes(self) -> Column:
        """Those that a message had, and where it comes from."""
        before = F.map_filter(F.col("attributes"), lambda name, _: name != REPLAYED_FROM)
        origin = F.create_map(F.lit(REPLAYED_FROM), F.col("message_id"))
        return F.coalesce(F.map_concat(before, origin), origin).alias("attributes")

    def _uid(self) -> Column:
        """The same whenever a message is replayed into the topic by the same run."""
        options = self._options
        parts = [F.lit(text) for text in (options.run_id, options.topic, self._source)]
        parts += [F.col("message_id"), F.unix_micros("timestamp").cast("string")]  # a topic may be made anew
        return F.substring(F.sha2(F.concat_ws("\0", *parts), 256), 1, 32).alias("uid")

    def _target(self) -> dict[str, str]:
        options = self._options
        given = {
            "server": options.server,
            "topic": options.topic,
            "token": options.token,
            "payloads": options.payloads,
            "durability": options.durability,
        }
        return {name: value for name, value in given.items() if value is not None}


def slices_of(frame: DataFrame) -> list[Slice]:
    """What there is of each partition."""
    found = frame.groupBy("partition").agg(
        F.min("offset").alias("first"), F.max("offset").alias("last"), F.count(F.lit(1)).alias("rows")
    )
    return [
        Slice(row["partition"], row["first"], row["last"], row["rows"])
        for row in found.sort("partition").collect()
    ]


def bounds(item: Slice, number: int, rounds: int) -> tuple[int, int]:
    """The offsets of a partition that are in a round: from the first up to, not including, the second.

    >>> [bounds(Slice(0, 5, 14, 10), number, 3) for number in range(3)]
    [(5, 8), (8, 11), (11, 15)]
    """
    size = item.last + 1 - item.first
    return item.first + size * number // rounds, item.first + size * (number + 1) // rounds


if __name__ == "__main__":
    from pipeline.commands import main

    main("replay")
