"""Replay an archive into a topic: the order of each key as it was, as fast as allowed, each message once.

    spark-submit jobs/replay.py /data/archive orders-again --rate 5000

It goes in rounds, in the order of time; how far it is stands in a file, so that a run that was stopped goes
on with the round that was not finished. What that one had published already are duplicates to the broker, for
as long as it remembers: a message's uid is made of where it comes from and goes, and the name of the run.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DateType, StructField, StructType

from keylane import Client, Tally, TopicInfo
from keylane.errors import InvalidArgument, SubscriptionNotFound, TopicReplaced
from keylane_spark.archiving.archive import COLUMNS
from keylane_spark.files import files_at
from keylane_spark.replaying.options import ReplayOptions
from keylane_spark.replaying.progress import ReplayNote
from keylane_spark.replaying.publish import publish_round
from keylane_spark.replaying.rounds import (
    Found,
    between,
    found_in,
    last_of,
    rounds_of,
    stretches_of,
    with_ledger,
)
from keylane_spark.source.schema import MESSAGES

SAFE = 0.9  # of a dedupe window: clocks differ, and what is sent arrives a little later

Progress = Callable[[str], None]


class Replayed(msgspec.Struct):
    """What a run has published; with `dry_run` what it would."""

    source: str
    topic: str
    run_id: str
    rows: int  # that the archive has for it; one that is there twice counts once
    stored: int = 0
    duplicates: int = 0
    no_subscribers: int = 0  # none: a round that has some is not done
    rounds: int = 0
    seconds: float = 0.0
    resumed: bool = False  # a part was done before
    dry_run: bool = False


def run(spark: SparkSession, options: ReplayOptions, progress: Progress = print) -> Replayed:
    """Publish what is archived; the result tells what became of it."""
    return Replay(spark, options, progress).run()


class Replay:
    """One run from an archive into a topic."""

    def __init__(self, spark: SparkSession, options: ReplayOptions, progress: Progress) -> None:
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
        about = self._topic()
        note = self._note(about)
        result = Replayed(self._source, options.topic, options.run_id, note.rows, dry_run=options.dry_run)
        result.resumed = note.done > 0 or note.begun is not None
        if options.dry_run:
            result.rounds = note.rounds - note.done
            return result
        self._files.make_folder(options.note.rpartition("/")[0])
        for number in range(note.done, note.rounds):
            self._check_target(note)
            rows = self._chosen(note, number)
            found = found_in(rows)
            self._check_found(note, number, found)
            tally = self._publish(note, rows, found.rows, about.dedupe_window)
            self._check_target(note)  # a round that went elsewhere is not done
            self._check_tally(note, number, found, tally)
            result.stored += tally.stored
            result.duplicates += tally.duplicates
            result.rounds += 1
            result.seconds = round(time.monotonic() - began, 3)
            note.done, note.begun = number + 1, None
            self._write(note)
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
        return with_ledger(frame)

    def _only_topic(self) -> str:
        found = [
            entry.name.removeprefix("topic=")
            for entry in self._files.entries(self._options.root)
            if entry.folder and entry.name.startswith("topic=")
        ]
        if len(found) != 1:
            what = (
                f"has topics {', '.join(found)}: choose one with --from" if found else "has no topic=… folder"
            )
            raise InvalidArgument(f"the archive {self._options.root} {what}")
        return found[0]

    def _note(self, about: TopicInfo) -> ReplayNote:
        """How far a run of this name is; with other rows or into another topic it cannot go on."""
        options = self._options
        choice = {
            "from": self._source,
            "since": options.since.isoformat() if options.since else None,
            "until": options.until.isoformat() if options.until else None,
            "keys": options.keys,
        }
        text = self._files.read(options.note)
        if text is None:
            return self._plan(choice, about.dedupe_window)
        note = msgspec.json.decode(text, type=ReplayNote)
        if note.choice != choice:
            raise InvalidArgument(
                f"run {options.run_id!r} into {options.topic!r} was started with other rows: {note.choice}; "
                "give another --run-id to publish these"
            )
        self._check_target(note)
        if note.begun is not None and time.time() > note.begun + SAFE * about.dedupe_window:
            self._check_memory(note, about.dedupe_window)
        if note.done == note.rounds:
            self._progress(
                f"run {options.run_id!r} into {options.topic!r} was finished before: give another --run-id "
                "to publish it all again, or what was archived since"
            )
        return note

    def _plan(self, choice: dict[str, Any], window: float) -> ReplayNote:
        """Settle which rows there are, and the rounds in which they come."""
        options, frame = self._options, self._rows()
        stretches = stretches_of(frame)
        most = options.round_rows
        if options.rate is not None and window:
            # None may last so long that its beginning is forgotten when a task runs again.
            most = max(1, min(most, int(options.rate * window / 4)))
        rounds = rounds_of(frame, sum(item.rows for item in stretches), most) if stretches else []
        cuts, sizes = [cut for cut, _ in rounds], [rows for _, rows in rounds]
        return ReplayNote(choice, self._incarnation(), stretches, cuts, sizes=sizes)

    def _check_memory(self, note: ReplayNote, window: float) -> None:
        """The broker may have forgotten what the round that was not finished has published."""
        options, number = self._options, note.done + 1
        what = (
            f"round {number} of run {options.run_id!r} was begun "
            f"{datetime.fromtimestamp(note.begun or 0, UTC):%Y-%m-%dT%H:%M:%SZ} and not finished, and "
            f"{options.topic!r} remembers uids for {window:g} s: what it had published may come twice"
        )
        if not options.accept_duplicates:
            raise InvalidArgument(
                f"{what}. Continue anyway with --accept-duplicates, or publish all of it with another "
                "--run-id into an empty topic with a longer dedupe_window"
            )
        self._progress(what)
        note.begun = None

    def _check_target(self, note: ReplayNote) -> None:
        """What was published into a topic that is gone is gone with it."""
        options = self._options
        if self._incarnation() != note.target:
            raise TopicReplaced(
                f"topic {options.topic!r} was deleted and recreated since run {options.run_id!r} began: what "
                f"{note.done} of {note.rounds} rounds had published is gone; give another --run-id to "
                "publish it all into the new one"
            )

    def _check_found(self, note: ReplayNote, number: int, found: Found) -> None:
        """A round of which rows are away is not begun: its keys would lose their order, or the rows."""
        planned = note.sizes[number] if note.sizes else 0
        if found.messages < planned:
            raise InvalidArgument(
                f"{self._named(note, number)} has {planned:,} rows, of which the archive has "
                f"{found.messages:,} at the moment: files are missing (a compaction may be running, or they "
                "were deleted). Nothing of this round was published; start it again when they are back, and "
                "it continues with this round"
            )

    def _check_tally(self, note: ReplayNote, number: int, found: Found, tally: Tally) -> None:
        """A round is done when each of its rows is in the topic."""
        what = f"of {found.rows:,} rows of {self._named(note, number)}"
        if tally.no_subscribers:
            self._topic()
            raise SubscriptionNotFound(
                f"{tally.no_subscribers:,} {what} were not stored: topic {self._options.topic!r} had no "
                "subscription for a while. Start it again: it goes on with that round; or give another "
                "--run-id to publish it all, including what was stored before the current subscription was "
                "created"
            )
        arrived = tally.stored + tally.duplicates
        if arrived != found.rows:
            raise InvalidArgument(
                f"{arrived:,} {what} were published: files of the archive went away meanwhile. Start it "
                "again: it goes on with that round"
            )

    def _named(self, note: ReplayNote, number: int) -> str:
        return f"round {number + 1} of {note.rounds} of run {self._options.run_id!r}"

    def _incarnation(self) -> int:
        with Client(self._options.server, token=self._options.token) as client:
            return client.offsets(self._options.topic)[0].incarnation

    def _write(self, note: ReplayNote) -> None:
        self._files.write(self._options.note, msgspec.json.encode(note).decode())

    def _topic(self) -> TopicInfo:
        """The target, which somebody must read; what is wrong with it comes before anything is done."""
        options = self._options
        with Client(options.server, token=options.token) as client:
            about = client.describe_topic(options.topic)
        if not about.subscriptions:
            raise SubscriptionNotFound(
                f"topic {options.topic!r} has no subscription, so nothing would be stored; create one first: "
                f"keylane subscription create {options.topic} NAME"
            )
        return about

    def _chosen(self, note: ReplayNote, number: int) -> DataFrame:
        """The rows of a round as they are now: files may have been merged since the last one."""
        after = note.cuts[number - 1] if number else None
        return self._rows().where(between(after, note.cuts[number], last_of(note.stretches)))

    def _publish(self, note: ReplayNote, rows: DataFrame, count: int, window: float) -> Tally:
        """Publish the rows of a round, which is noted before it begins."""
        again = note.begun is not None
        if note.begun is None:
            note.begun = time.time()
            self._write(note)
        until = note.begun + SAFE * window
        return publish_round(rows, count, self._options, self._source, until=until, again=again)
