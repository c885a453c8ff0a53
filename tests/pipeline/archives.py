"""Archives without Spark: files of rows, what a plain reader finds, and a kill at any step."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from keylane_spark.files import LocalFiles

MIDNIGHT = datetime(2026, 11, 17, tzinfo=UTC).timestamp()
YESTERDAY = "topic=orders/date=2026-11-16"
TODAY = "topic=orders/date=2026-11-17"


def ids_in(folder: Path) -> Counter[str]:
    """The message ids that a plain reader finds, which knows nothing but that files end in .parquet."""
    found: Counter[str] = Counter()
    for file in sorted(folder.rglob("*.parquet")):
        found.update(pq.ParquetFile(file).read(["message_id"]).column(0).to_pylist())
    return found


def files_in(folder: Path) -> list[str]:
    """The files of a folder and of those in it."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def ids_of(offsets: Iterable[int]) -> Counter[str]:
    """The ids that rows of these offsets have."""
    return Counter(f"0:1-{offset}" for offset in offsets)


def write_rows(file: Path, offsets: Sequence[int]) -> None:
    """Write rows of these offsets as an archive has them."""
    at = datetime.fromtimestamp(MIDNIGHT - 1, UTC)
    rows = {
        "key": ["k"] * len(offsets),
        "value": [b"%d" % offset for offset in offsets],
        "partition": pa.array([0] * len(offsets), pa.int32()),
        "offset": list(offsets),
        "message_id": [f"0:1-{offset}" for offset in offsets],
        "timestamp": pa.array([at] * len(offsets), pa.timestamp("us", "UTC")),
        "event_time": pa.array([at] * len(offsets), pa.timestamp("us", "UTC")),
        "attributes": pa.array([[]] * len(offsets), pa.map_(pa.string(), pa.string())),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(rows), file)


def merge_plainly(sources: Sequence[str], folder: str) -> int:
    """Merge files as Spark would."""
    merged = pa.concat_tables([pq.ParquetFile(source).read() for source in sources])
    place = Path(LocalFiles().plain(folder))
    place.mkdir(parents=True)
    pq.write_table(merged.sort_by("offset"), place / "part-0.parquet")
    (place / "_SUCCESS").touch()
    return int(merged.num_rows)


class Killed(BaseException):
    """Nothing that the code does afterwards happens."""


class Kill:
    """Ends whatever changes files, before its step of a number."""

    def __init__(self) -> None:
        self._left: int | None = None
        self.steps: list[str] = []
        sys.addaudithook(self._hear)  # it cannot be taken away again, only be deaf

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """What is done here is ended before this step; counted from 0."""
        self._left, self.steps = step, []
        try:
            yield
        finally:
            self._left = None

    def run(self, step: int, action: Callable[[], object]) -> bool:
        """Whether it was killed."""
        try:
            with self.at(step):
                action()
        except Killed:
            return True
        return False

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._left is None or not self._changes(event, arguments):
            return
        self.steps.append(event)
        if self._left == 0:
            raise Killed(event)
        self._left -= 1

    def _changes(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open":
            return isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if event == "ctypes.dlopen":
            return arguments[0] is None  # renameat2 comes next
        return event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link")


KILL = Kill()
