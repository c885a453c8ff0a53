"""A topic as an audit sees it: where everything is, then the log, then its bodies, then the journal, in this
order.

The order is what makes a live topic safe to look at. Whatever was published before the first look, and is not
settled where the journal ends, had to be in the log at every moment between the two, and its body in the
payload store: so also when these were looked at. What is newer than the first look is not judged. And records
that were still there after the journal had been read were there all the time, so none is missing between
them, unless somebody has deleted it: their numbers are consecutive, and the broker knows the last one.
"""

from datetime import UTC, datetime

import msgspec

from keylane import Client
from keylane.errors import SubscriptionNotFound
from keylane.types import PartitionOffsets
from keylane_spark.errors import JobError
from keylane_spark.files import Files

ABOUT = "snapshot.json"
JOURNAL = "journal"
LOG = "log"


class PartitionState(msgspec.Struct, frozen=True):
    """Where a partition's log and journal begin and end; positions are the next entry or record."""

    partition: int
    earliest: int
    latest: int
    journal_earliest: int  # after the journal had been read
    journal_latest: int  # before the log was
    journal_end: int  # up to where the journal was read


class SubscriptionState(msgspec.Struct, frozen=True):
    """How far a subscription was, by partition."""

    name: str
    mode: str
    positions: list[int | None]  # None: not there, as while it is being made


class BodiesState(msgspec.Struct, frozen=True):
    """What the payload store had of the bodies of what was in the log."""

    there: int  # messages in the log that have one, about
    checked: int
    missing: dict[int, list[tuple[int, int]]]  # by partition: ranges of entries


class Snapshot(msgspec.Struct, frozen=True):
    """What was asked of the broker."""

    topic: str
    taken_at: datetime
    journal: int  # records to keep by partition, 0: it is off
    partitions: list[PartitionState]
    subscriptions: list[SubscriptionState]
    bodies: BodiesState | None = None  # None: they were not looked for
    incarnation: int = 0  # of the topic, 0: not known


class SnapshotTaker:
    """Takes a snapshot: looks at the topic first here, then in note_journal_end() and in finish()."""

    def __init__(self, client: Client, topic: str) -> None:
        self.topic = topic
        self._client = client
        self._about = client.describe_topic(topic)
        self.first = client.offsets(topic)
        found = [_state(client, topic, name) for name in sorted(self._about.subscriptions)]
        self._subscriptions = [state for state in found if state is not None]
        self.before_journal: list[PartitionOffsets] = []

    @property
    def messages(self) -> int:
        """How many there are in the log, at most."""
        return sum(at.latest - at.earliest for at in self.first)

    @property
    def records(self) -> int:
        """How many the journal has, at most."""
        return sum(at.journal_latest - at.journal_earliest for at in self.first)

    @property
    def incarnation(self) -> int:
        """Of the topic."""
        return self.first[0].incarnation

    def note_journal_end(self) -> list[PartitionOffsets]:
        """The look before the journal is read: up to where it is to be."""
        self.before_journal = self._client.offsets(self.topic)
        return self.before_journal

    def finish(self, bodies: BodiesState | None) -> Snapshot:
        """The last look, after the journal was read."""
        last = self._client.offsets(self.topic)
        if self.incarnation != last[0].incarnation:
            raise JobError(
                f"topic {self.topic!r} was deleted and recreated while it was looked at: try again"
            )
        return Snapshot(
            topic=self.topic,
            taken_at=datetime.now(UTC),
            journal=self._about.journal,
            partitions=[
                PartitionState(
                    at.partition,
                    at.earliest,
                    at.latest,
                    last[at.partition].journal_earliest,
                    at.journal_latest,
                    self.before_journal[at.partition].journal_latest,
                )
                for at in self.first
            ],
            subscriptions=self._subscriptions,
            bodies=bodies,
            incarnation=self.incarnation,
        )


def load(path: str, topic: str, files: Files) -> tuple[Snapshot, str]:
    """A snapshot of a topic that an earlier audit left, by its folder or its journal's; and the folder."""
    for folder in (path.rstrip("/"), path.rstrip("/").rpartition("/")[0] or "."):
        if text := files.read(f"{folder}/{ABOUT}"):
            seen = msgspec.json.decode(text, type=Snapshot)
            if seen.topic != topic:
                raise JobError(f"{folder} holds an audit of topic {seen.topic!r}, not of {topic!r}")
            return seen, folder
    raise JobError(f"no {ABOUT} in {path}: give the --out folder of an earlier audit")


def check_free(out: str, files: Files) -> None:
    """Refuse a folder that has something else in it than an audit."""
    if files.entries(out) and not files.exists(f"{out}/{ABOUT}"):
        raise JobError(f"{out} is not empty, and not from an earlier audit: choose another --out folder")


def prepare(out: str, files: Files) -> None:
    """Make a folder for a snapshot; one that an earlier audit has filled is emptied of what it wrote."""
    check_free(out, files)
    files.make_folder(out)
    files.write(f"{out}/{ABOUT}", "{}")  # what follows is ours, should it end half-way
    for name in (LOG, JOURNAL):
        files.delete(f"{out}/{name}")


def save(snapshot: Snapshot, out: str, files: Files) -> None:
    """Write down what is known beside log and journal."""
    files.write(f"{out}/{ABOUT}", msgspec.json.format(msgspec.json.encode(snapshot)).decode())


def _state(client: Client, topic: str, name: str) -> SubscriptionState | None:
    try:
        mode = client.describe_subscription(topic, name).mode
        positions = [at.position for at in client.offsets(topic, name)]
    except SubscriptionNotFound:
        return None  # deleted since; the journal has when
    return SubscriptionState(name, mode, positions)
