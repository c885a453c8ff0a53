"""Files wherever Spark can reach them: a few words for folders here, and for Hadoop's file systems.

Paths are text: `/data/archive`, `file:///data/archive`, `hdfs://name/archive`, `s3a://bucket/archive`.
"""

import errno
import os
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from keylane.errors import InvalidArgument
from keylane_spark.archiving.folder_swap import move

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Entry(NamedTuple):
    """What a folder holds."""

    name: str
    size: int
    folder: bool

    @property
    def rows(self) -> bool:
        """Whether it is a file of rows, and not something that Spark keeps beside them."""
        return self.name.endswith(".parquet") and not self.name.startswith((".", "_")) and not self.folder


class Files(ABC):
    """The file system of a path."""

    local = False  # of this machine, as far as this process can tell

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file or folder."""

    @abstractmethod
    def entries(self, folder: str) -> list[Entry]:
        """What a folder holds, by name; nothing if there is no folder."""

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """Make a folder and those above it."""

    @abstractmethod
    def move(self, source: str, target: str) -> None:
        """Move a file to a name that is free: FileExistsError if it is not, and nothing has changed."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file or folder with all in it; one that is not there is no error."""

    @abstractmethod
    def read(self, path: str) -> str | None:
        """The text of a small file; None if there is none."""

    @abstractmethod
    def write(self, path: str, text: str) -> None:
        """Write a small file: it is there as a whole, or as it was before."""

    @abstractmethod
    def create(self, path: str, text: str) -> bool:
        """Write a small file as a whole unless there is one; False if there was."""

    @abstractmethod
    def sync(self, path: str) -> None:
        """See that a file outlasts a power cut."""

    @abstractmethod
    def plain(self, path: str) -> str:
        """A path without the name of its file system."""


class LocalFiles(Files):
    """Files of this machine, without Java.

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
        """See that a file outlasts a power cut."""
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


class HadoopFiles(Files):
    """Files of any of Hadoop's file systems, through the driver's Java."""

    def __init__(self, spark: "SparkSession", path: str) -> None:
        gateway: Any = spark.sparkContext._gateway
        self._gateway = gateway
        self._jvm: Any = gateway.jvm
        self._conf: Any = spark.sparkContext._jsc.hadoopConfiguration()
        self._fs: Any = self._path(path).getFileSystem(self._conf)

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(path)

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder."""
        return bool(self._fs.exists(self._path(path)))

    def entries(self, folder: str) -> list[Entry]:
        """What a folder holds, by name; nothing if there is no folder."""
        if not self.exists(folder):
            return []
        found = self._fs.listStatus(self._path(folder))
        entries = [Entry(one.getPath().getName(), one.getLen(), one.isDirectory()) for one in found]
        return sorted(entries)

    def make_folder(self, path: str) -> None:
        """Make a folder and those above it."""
        self._fs.mkdirs(self._path(path))

    def move(self, source: str, target: str) -> None:
        """Move a file to a name that is free: FileExistsError if it is not, and nothing has changed."""
        self._rename(source, target, "NONE")

    def delete(self, path: str) -> None:
        """Delete a file or folder with all in it; one that is not there is no error."""
        self._fs.delete(self._path(path), True)

    def read(self, path: str) -> str | None:
        """The text of a small file; None if there is none."""
        if not self.exists(path):
            return None
        stream = self._fs.open(self._path(path))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def write(self, path: str, text: str) -> None:
        """Write a small file: it is there as a whole, or as it was before."""
        self._rename(self._draft(path, text), path, "OVERWRITE")

    def create(self, path: str, text: str) -> bool:
        """Write a small file as a whole unless there is one; False if there was."""
        draft = self._draft(path, text)
        try:
            self._rename(draft, path, "NONE")
        except FileExistsError:
            self.delete(draft)
            return False
        return True

    def sync(self, path: str) -> None:
        """See that a file outlasts a power cut: it does, since it was closed."""

    def plain(self, path: str) -> str:
        """A path without the name of its file system."""
        return str(self._fs.makeQualified(self._path(path)).toUri().getPath())

    def _draft(self, path: str, text: str) -> str:
        draft = f"{path}.{uuid4().hex[:8]}.draft"
        stream = self._fs.create(self._path(draft), True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        return draft

    def _rename(self, source: str, target: str, how: str) -> None:
        """Rename in one step, where the file system has one; what is in the way is said by itself."""
        from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

        rename = self._jvm.org.apache.hadoop.fs.Options.Rename
        options = self._gateway.new_array(rename, 1)
        options[0] = rename.valueOf(how)
        context = self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(self._fs.getUri(), self._conf)
        try:
            context.rename(self._path(source), self._path(target), options)
        except Py4JJavaError as error:
            kind = error.java_exception.getClass().getSimpleName()
            if kind == "FileAlreadyExistsException":
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from error
            raise OSError(f"{source} cannot be moved to {target}: {kind}") from error


def files_at(path: str, spark: "SparkSession") -> Files:
    """The files of a path: of this machine if Hadoop says so, which may have another default."""
    jvm: Any = spark.sparkContext._gateway.jvm  # type: ignore[union-attr]
    conf: Any = spark.sparkContext._jsc.hadoopConfiguration()
    scheme = jvm.org.apache.hadoop.fs.Path(path).getFileSystem(conf).getUri().getScheme()
    return LocalFiles() if scheme == "file" else HadoopFiles(spark, path)


def local_at(path: str) -> LocalFiles | None:
    """The files of a path before there is Java; None where only Hadoop can tell what it is."""
    scheme = path.partition("/")[0].partition(":")[0] if ":" in path.partition("/")[0] else ""
    here = scheme == "file" or (not scheme and "HADOOP_CONF_DIR" not in os.environ)
    return LocalFiles() if here else None


def check_written(files: Files, folder: str, rows: int) -> None:
    """See that what executors wrote to a folder is here: on other machines they have folders of their own.

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
            f"of {rows:,} rows that Spark has written to {folder} {found:,} are there: its executors run on "
            "other machines and wrote to their own disks. Name a folder that all of them share: hdfs:, s3a: …"
        )
