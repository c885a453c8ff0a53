"""Files of any of Hadoop's file systems (hdfs:, s3a:, …), through the driver's Java."""

import errno
import os
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from keylane_spark.files.files import Entry, Files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
        """Make a file outlast a power cut: it does, since it was closed."""

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
