"""Parquet files read without Spark, also while a compaction merges them."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from keylane_spark.archiving.compaction import GRACE, MERGED
from keylane_spark.errors import JobError
from keylane_spark.files import LocalFiles, local_at

_LOOKS = 5
_PATIENCE = 10 * GRACE  # seconds to wait for files that are being merged


class Merging(JobError):
    """Files of an archive were merged all the time, or nobody is there to finish it."""

    status = 3  # 1 would be the finding of an audit


def count_rows(folder: str, *names: str) -> int:
    """How many rows the parquet files of some folders have, by what their ends say."""
    files = LocalFiles()
    places = [Path(files.plain(f"{folder}/{name}" if name else folder)) for name in names]
    return sum(_of(place, lambda found: found.count_rows()) for place in places if place.is_dir())


def rows_in_archive(path: str) -> int | None:
    """How many rows an archive has, if that can be said without Java."""
    return None if local_at(path) is None else count_rows(path, "")


def read_columns(folder: Path, schema: pa.Schema) -> pa.Table:
    """The columns of a schema; what Spark keeps beside them (_SUCCESS, .crc) does not count."""
    return _of(folder, lambda found: found.to_table(schema.names).cast(schema))


def _of(folder: Path, look: Callable[[ds.Dataset], Any]) -> Any:
    """Look at the files of a folder, again if they are merged just then: old ones go for a new one."""
    end, looks = time.monotonic() + _PATIENCE, 0
    while True:
        try:
            return look(ds.dataset(folder, format="parquet"))
        except (FileNotFoundError, pa.ArrowInvalid):
            looks = 0 if _merging(folder) else looks + 1
            if looks == _LOOKS:
                raise
            if time.monotonic() >= end and not looks:
                raise _stuck(folder) from None
        _wait()


def _wait() -> None:
    time.sleep(GRACE / 10)


def _merging(folder: Path) -> bool:
    """Whether there are files that a compaction has put in the place of old ones."""
    for file in folder.rglob("*.parquet"):
        with suppress(FileNotFoundError):  # it went while we looked
            if file.stat().st_size == len(MERGED) and file.read_bytes() == MERGED.encode():
                return True
    return False


def _stuck(folder: Path) -> Merging:
    root = folder.parent if folder.name.startswith("topic=") else folder
    return Merging(
        f"files of {folder} are being merged, or the process that did so was killed: try again later; to "
        f"have it finished, run: keylane pipeline archive --compact --to {root}"
    )
