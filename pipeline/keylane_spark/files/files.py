"""What can be done with files, whichever file system they are on.

Paths are text: `/data/archive`, `file:///data/archive`, `hdfs://name/archive`, `s3a://bucket/archive`.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple


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
        """Make a file outlast a power cut."""

    @abstractmethod
    def plain(self, path: str) -> str:
        """A path without the name of its file system."""
