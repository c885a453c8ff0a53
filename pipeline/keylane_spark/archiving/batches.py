"""Batches become files of an archive, each batch once, whoever is killed when.

A batch is written beside the archive, noted down with the names that its files are to have, and moved. A
crash before the note leaves files that nobody sees, and the batch is written anew; after it, the next start
finishes moving. A note is only ever made once, and the last one stays: so of two processes that have the same
batch (one of them was taken for dead) one adds it, and the other finds it done.

A note outlasts a power cut, and what Spark's checkpoint says of the batch may not: Spark then gives its
number to other rows. So a note has the plan of its batch, and a batch with another plan is not taken for
done.
"""

from uuid import uuid4

import msgspec

from keylane.errors import ConsumerReplaced
from keylane_spark.archiving.folders import folders_of
from keylane_spark.archiving.locks import moving
from keylane_spark.files import Files


class BatchNote(msgspec.Struct, frozen=True):
    """A batch that is to be added: how many rows, and which file of its staging folder goes where."""

    rows: int
    moves: list[tuple[str, str]]
    plan: str = ""  # where it begins and ends; older versions did not note that down


class Batches:
    """The batches of the archive at `root`, whose notes and files on their way are in the folder `state`."""

    def __init__(self, files: Files, root: str, state: str) -> None:
        self._files = files
        self._root = root
        self._staging = f"{state}/staging"
        self._notes = f"{state}/notes"

    def recover(self) -> None:
        """Finish what a crash has left; to be called by who is alone, as far as the file system can tell."""
        for name in self._names():
            self._finish(name)
        if self._files.local:  # elsewhere somebody may still write there
            self._files.delete(self._staging)

    def stage(self, query: str, batch: int) -> str:
        """A folder for the files of a batch.

        Executors of a driver that was killed may still write to theirs, and a state from a backup counts
        batches again that there were: neither folders nor files ever have the names of others.
        """
        return f"{self._staging}/{_stem(query, batch)}-{uuid4().hex[:12]}"

    def find(self, query: str, batch: int, plan: str = "") -> BatchNote | None:
        """A batch that was noted down before, with its files where they belong."""
        name = f"{query}-{batch:08}.json"
        return self._check(name, batch, plan) if name in self._names() else None

    def add(self, query: str, batch: int, staged: str, rows: int, plan: str = "") -> BatchNote:
        """Add the files of a staging folder to the archive; the note of who was first, if it was another."""
        name = f"{query}-{batch:08}.json"
        attempt = staged.rpartition("/")[2]
        moves: list[tuple[str, str]] = []
        for folder in folders_of(self._files, staged):
            for entry in self._files.entries(f"{staged}/{folder}"):
                if entry.rows:
                    place = f"{folder}/part-{attempt}-{len(moves):04}.parquet"
                    moves.append((f"{attempt}/{folder}/{entry.name}", place))
                    self._files.sync(f"{staged}/{folder}/{entry.name}")  # the broker forgets its rows
        if later := [other for other in self._names() if other.startswith(f"{query}-") and other > name]:
            raise ConsumerReplaced(
                f"batch {batch} of {self._root} cannot be added, since {self._notes} has {later[-1]}: "
                "another process continues this archive, or its checkpoint was replaced by an older one"
            )
        self._files.make_folder(self._notes)
        text = msgspec.json.encode(BatchNote(rows, moves, plan)).decode()
        self._files.create(f"{self._notes}/{name}", text)
        note = self._check(name, batch, plan)
        for other in self._names():
            if other != name:  # its files are where they belong, and its batch does not come again
                self._files.delete(f"{self._notes}/{other}")
        return note

    def _check(self, name: str, batch: int, plan: str) -> BatchNote:
        """Finish a batch, and see that it is the one that is meant: of the same rows."""
        note = self._finish(name)
        if note.plan and note.plan != plan:
            raise ConsumerReplaced(
                f"batch {batch} of {self._root} is planned with other rows than those that were archived by "
                f"this number, as {self._notes}/{name} says: the checkpoint was replaced by an older one, or "
                "has lost its end in a power cut. To continue, delete this file: all that is planned is then "
                "archived, and rows that were archived before are there twice"
            )
        return note

    def _finish(self, name: str) -> BatchNote:
        """Move the files of a batch to where they belong; what else was written for it is of no use."""
        text = self._files.read(f"{self._notes}/{name}")
        note = msgspec.json.decode(text or "", type=BatchNote)
        with moving(self._files, self._root):
            for source, target in note.moves:
                self._move(f"{self._staging}/{source}", f"{self._root}/{target}")
        query, _, batch = name.removesuffix(".json").rpartition("-")
        for entry in self._files.entries(self._staging):
            if entry.name.startswith(f"{query[:8]}-") and entry.name < f"{_stem(query, int(batch) + 1)}":
                self._files.delete(f"{self._staging}/{entry.name}")
        return note

    def _move(self, staged: str, place: str) -> None:
        if not self._files.exists(staged):
            return  # it is done, and what became of the file since is not for us to say
        if self._files.exists(place):
            return  # where a move is a copy and a delete, the delete is missing
        self._files.make_folder(place.rpartition("/")[0])
        try:
            self._files.move(staged, place)
        except OSError:
            if self._files.exists(staged):  # else somebody was faster
                raise

    def _names(self) -> list[str]:
        return [entry.name for entry in self._files.entries(self._notes) if entry.name.endswith(".json")]


def _stem(query: str, batch: int) -> str:
    return f"{query[:8]}-{batch:08}"
