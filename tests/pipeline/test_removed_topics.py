"""Topics come to an archive and go, and a run is killed in between: each message is archived once.

Spark and the files of rows are left out: what counts is the order of what is done.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from keylane import Client, OutgoingMessage
from keylane_spark.archiving.removed_topics import done_of, leave, plan_of
from keylane_spark.files import LocalFiles
from tests.pipeline.spark_calls import Checkpoint, Run
from tests.support.running import RunningBroker

READ, ADDED, DONE = "read", "added", "done"  # how far a batch is when its run is killed


class Killed(BaseException):
    """The run ends here."""


class Archive:
    """Runs of an archive: what Spark's checkpoint has, which batches were added, and their rows."""

    def __init__(self, server: str, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._added: set[int] = set()
        self.rows: Counter[str] = Counter()

    def run(self, topics: list[str], kill: str | None = None) -> None:
        """Archive what there is, or be killed with the first batch that is new."""
        given = {"server": self._server, "subscribe": ",".join(topics), "subscription": "archive"}
        if done := done_of(LocalFiles(), str(self._folder), self._added.__contains__):
            leave(given, done)
        run = Run(given)
        try:
            run.reader.prepareForTriggerAvailableNow()
            start, number = self._resume(run)
            while (end := self._kept(run.reader.latestOffset(start, ReadAllAvailable()))) != start:
                self._note("offsets", number, end)
                self._batch(run, number, start, end, kill)
                start, number = end, number + 1
        except Killed:
            pass
        finally:
            run.reader.stop()

    def _resume(self, run: Run) -> tuple[Checkpoint, int]:
        """Do the batch again that was begun last, unless it is done."""
        begun = sorted(int(file.name) for file in self._folder.glob("offsets/*"))
        start = self._read(begun[-2]) if len(begun) > 1 else self._kept(run.reader.initialOffset())
        if not begun:
            return start, 0
        end = self._read(begun[-1])
        if not (self._folder / "commits" / str(begun[-1])).exists():
            self._batch(run, begun[-1], start, end, None)
        return end, begun[-1] + 1

    def _batch(self, run: Run, number: int, start: Checkpoint, end: Checkpoint, kill: str | None) -> None:
        if number not in self._added:
            run.values.clear()
            run.read(start, end)
            if kill == READ:
                raise Killed
            self.rows.update(run.values)
            self._added.add(number)
        if kill == ADDED:
            raise Killed
        self._note("commits", number, {})
        if kill == DONE:
            raise Killed

    def _note(self, folder: str, number: int, offset: Checkpoint) -> None:
        file = self._folder / folder / str(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"v1\n{{}}\n{json.dumps(offset)}")

    def _read(self, number: int) -> Checkpoint:
        return self._kept(json.loads((self._folder / "offsets" / str(number)).read_text().splitlines()[2]))

    def _kept(self, offset: Checkpoint) -> Checkpoint:
        kept: Checkpoint = json.loads(json.dumps(offset))
        return kept


@pytest.mark.parametrize("kill", [None, READ, ADDED, DONE])
def test_topics_come_and_go_and_each_row_is_there_once(
    client: Client, broker: RunningBroker, topic: str, tmp_path: Path, kill: str | None
) -> None:
    a, b = topic, f"{topic}-b"
    archive, expected = Archive(broker.url, tmp_path / "checkpoint"), Counter[str]()
    for name in (a, b):
        client.create_topic(name, partitions=2)
        client.create_subscription(name, "archive", mode="cursor", start="earliest")
    for number, topics in enumerate(([a], [a, b], [b], [b, a])):
        for name in (a, b):
            values = [f"{name} {number} {at}" for at in range(10)]
            client.publish_many(name, [OutgoingMessage(value, key=value) for value in values])
            expected.update(values)
        archive.run(topics, kill if number == 1 else None)
    assert archive.rows == expected


def test_a_topic_that_is_gone_or_was_moved_is_left_as_it_is(
    client: Client, broker: RunningBroker, topic: str, tmp_path: Path
) -> None:
    a, b = topic, f"{topic}-b"
    archive = Archive(broker.url, tmp_path / "checkpoint")
    for name in (a, b):
        client.create_topic(name, partitions=1)
        client.create_subscription(name, "archive", mode="cursor", start="earliest")
        client.publish_many(name, [OutgoingMessage(text) for text in ("one", "two", "three")])
    archive.run([a, b], DONE)
    client.seek(a, "archive", "earliest")
    client.delete_topic(b)
    client.create_topic(f"{topic}-c")
    archive.run([f"{topic}-c"])
    assert client.describe_subscription(a, "archive").backlog == 3, "the seek counts"


def test_a_plan_is_where_a_batch_begins_and_ends(tmp_path: Path) -> None:
    folder = tmp_path / "offsets"
    folder.mkdir()

    def plan(batch: int) -> str:
        return plan_of(LocalFiles(), str(tmp_path), batch)

    for batch, end in enumerate((3, 5)):
        (folder / str(batch)).write_text(f'v1\n{{"batchTimestampMs":{batch}}}\n{{"orders":{{"0":{end}}}}}')
    assert plan(0) == '{"orders":{"0":3}}'
    assert plan(1) == '{"orders":{"0":3}}\n{"orders":{"0":5}}'
    (folder / "1").write_text('v1\n{"batchTimestampMs":9}\n{"orders":{"0":5}}')
    assert plan(1) == '{"orders":{"0":3}}\n{"orders":{"0":5}}', "the same rows at another time"
    assert plan(7) == ""
