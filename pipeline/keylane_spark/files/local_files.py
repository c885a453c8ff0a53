"""Files of this machine, without Java."""

import os
import shutil
from pathlib import Path
from uuid import uuid4

from keylane.errors import InvalidArgument
from keylane_spark.files.files import Entry, Files
from keylane_spark.files.folder_swap import move


class LocalFiles(Files):
    """The file system of this machine.

    Nothing is written beside them (Hadoop's checksums can be left behind by a crash, and then say that a file
    is broken which is not).
    """

    local = True

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder."""
        return self._path(path).exists()

    def entries(self, folder: str) -> list[Entry]:
        """What a folder holds, by name; nothing if there is no folder."""
        found = []
        try:
            with os.scandir(self._path(folder)) as entries:
                for entry in entries:
                    try:
                        found.append(Entry(entry.name, entry.stat().st_size, entry.is_dir()))
                    except FileNotFoundError:
                        continue  # it went while we looked
        except FileNotFoundError:
            return []
        return sorted(found)

    def make_folder(self, path: str) -> None:
        """Make a folder and those above it."""
        self._path(path).mkdir(parents=True, exist_ok=True)

    def move(self, source: str, target: str) -> None:
        """Move a file to a name that is free: FileExistsError if it is not, and nothing has changed."""
        move(self._path(source), self._path(target))

    def delete(self, path: str) -> None:
        """Delete a file or folder with all in it; one that is not there is no error."""
        place = self._path(path)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)

    def read(self, path: str) -> str | None:
        """The text of a small file; None if there is none."""
        try:
            return self._path(path).read_text("utf-8")
        except FileNotFoundError:
            return None

    def write(self, path: str, text: str) -> None:
        """Write a small file: it is there as a whole, or as it was before."""
        self._draft(path, text).replace(self._path(path))

    def create(self, path: str, text: str) -> bool:
        """Write a small file as a whole unless there is one; False if there was."""
        draft = self._draft(path, text)
        try:
            move(draft, self._path(path))
        except FileExistsError:
            draft.unlink()
            return False
        return True

    def sync(self, path: str) -> None:
        """Make a file outlast a power cut."""
        with self._path(path).open("rb") as file:
            os.fsync(file.fileno())

    def plain(self, path: str) -> str:
        """A path without the name of its file system."""
        return str(self._path(path).absolute())

    def _path(self, path: str) -> Path:
        rest = path.removeprefix("file:")
        return Path(path if rest == path else "/" + rest.lstrip("/"))

    def _draft(self, path: str, text: str) -> Path:
        draft = self._path(f"{path}.{uuid4().hex[:8]}.draft")
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return draft


def check_folder(path: str) -> None:
    """Refuse a path of this machine that cannot be a folder to write to."""
    place = next(part for part in (Path(path).absolute(), *Path(path).absolute().parents) if part.exists())
    if not place.is_dir():
        raise InvalidArgument(f"{path} cannot be a folder: {place} is a file")
    if not os.access(place, os.W_OK):
        raise InvalidArgument(f"cannot write to {path}: no permission for {place}")


def check_written(files: Files, folder: str, rows: int) -> None:
    """Check that what executors wrote to a folder is here: on other machines they have their own folders.

    Only a local file system has to be looked at: any other is the same one for all.
    """
    if not files.local:
        return
    from pyarrow.parquet import read_metadata

    here = Path(files.plain(folder))
    found = sum(
        read_metadata(file).num_rows
        for file in here.rglob("*.parquet")
        if not file.name.startswith((".", "_"))
    )
    if found != rows:
        raise InvalidArgument(
            f"Spark wrote {rows:,} rows to {folder}, but {found:,} are there: its executors run on other "
            "machines and wrote to their own disks. Use a folder that all of them share: hdfs:, s3a: …"
        )
