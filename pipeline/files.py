"""Files wherever Spark can reach them: a few words over Hadoop's file systems, through the driver's Java."""

from typing import Any, NamedTuple

from pyspark.sql import SparkSession


class Entry(NamedTuple):
    """What a folder holds."""

    name: str
    size: int
    folder: bool


class Files:
    """The file system of a path.

    On a local one nothing is written beside the files (Hadoop's checksums can be left behind by a crash, and
    then say that a file is broken which is not).
    """

    def __init__(self, spark: SparkSession, path: str) -> None:
        gateway: Any = spark.sparkContext._gateway
        self._jvm: Any = gateway.jvm
        self._gateway = gateway
        self._conf: Any = spark.sparkContext._jsc.hadoopConfiguration()
        self._fs: Any = self._path(path).getFileSystem(self._conf)
        self.local = self._fs.getUri().getScheme() == "file"
        if self.local:
            self._fs = self._fs.getRawFileSystem()

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
        """Move a file to a name that is free; what was done already is not done again."""
        if self.exists(target):  # where a move is a copy and a delete, the delete is missing
            self.delete(source)
        elif not self._fs.rename(self._path(source), self._path(target)):
            raise OSError(f"{source} cannot be moved to {target}")

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
        draft = f"{path}.draft"
        stream = self._fs.create(self._path(draft), True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        if self.local:
            if not self._fs.rename(self._path(draft), self._path(path)):
                raise OSError(f"{path} cannot be written")
            return
        rename = self._jvm.org.apache.hadoop.fs.Options.Rename
        options = self._gateway.new_array(rename, 1)
        options[0] = rename.OVERWRITE
        context = self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(self._fs.getUri(), self._conf)
        context.rename(self._path(draft), self._path(path), options)

    def plain(self, path: str) -> str:
        """A local path as the operating system has it."""
        return str(self._fs.makeQualified(self._path(path)).toUri().getPath())
