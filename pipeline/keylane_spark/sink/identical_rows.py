"""Rows of a batch that are the same: the uid of each is that of their content and its number among them.

So uids do not depend on the tasks into which Spark cuts a batch: run again with more cores, it has the same
ones. But a task can only number its own rows. Where two tasks have a row each that is the same, both call it
the first, and the broker stores one of them. The driver, who is told by all tasks what they had, finds these
and publishes the rest under the numbers that are left. Whatever the tasks were, there is then each of the
uids from the first to the last once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from keylane.errors import InvalidArgument
from keylane_spark.sink.uids import Uids, head_of, is_first, numbered

_LIMIT = 8 * 1024 * 1024  # bytes of rows that a task sends to the driver
_ROWS = 5_000  # of a record batch


@dataclass
class Told:
    """What a task tells of rows whose uids it has made."""

    heads: Any  # of the uids of its different rows, in their order
    repeated: dict[int, int]  # head -> how many rows, if more than one
    repeats: list[Any] = field(default_factory=list)  # rows whose first uid the broker knew, with their uid
    left_out: list[int] = field(default_factory=list)  # the heads of those that were too many


class Repeats:
    """The rows of a task of which the broker said that it has them: by an earlier attempt or another task."""

    def __init__(self, limit: int = _LIMIT) -> None:
        self._room = limit
        self._rows: list[Any] = []
        self._left_out: list[int] = []

    def add(self, rows: Any, uids: Sequence[str | None], repeated: Sequence[str]) -> None:
        """Keep those rows whose uids the broker knew; not those with a uid of their own."""
        known = set(repeated)
        own = rows.column("uid").to_pylist() if "uid" in rows.schema.names else [None] * rows.num_rows
        found = [
            (row, uid)
            for row, uid in enumerate(uids)
            if uid and uid in known and is_first(uid) and not own[row]  # one of each is enough
        ]
        if not found:
            return
        some = with_uids(rows.take(pa.array([row for row, _ in found])), [uid for _, uid in found])
        if some.nbytes > self._room:
            self._left_out += [head_of(uid) for _, uid in found]
            return
        self._room -= some.nbytes
        self._rows.append(some)

    def tell(self, uids: Uids) -> Told:
        """What the driver has to know at the end of the task."""
        return Told(uids.seen.all(), uids.seen.repeated, self._rows, self._left_out)


def missing(tasks: Sequence[Told]) -> Iterator[Any]:
    """The rows that tasks took for those of one another, as record batches with the uids that are left."""
    counts = _shared(tasks)
    for task in tasks:
        for rows in task.repeats:
            places, uids = [], []
            for row, uid in enumerate(rows.column("uid").to_pylist()):
                most, all_of_them = counts.pop(head_of(uid), (0, 0))
                for number in range(most, all_of_them):
                    places.append(row)
                    uids.append(numbered(uid, number))
            for start in range(0, len(places), _ROWS):
                end = start + _ROWS
                yield with_uids(rows.take(pa.array(places[start:end])), uids[start:end])
    # What is still there was stored by nobody (there is no subscription), or is left out.
    if lost := sum(head in counts for task in tasks for head in task.left_out):
        raise InvalidArgument(
            f"{lost:,} rows of this batch are the same as rows of other tasks, and too large for the driver "
            "to sort out. Nothing is lost yet: put identical rows into the same task, with "
            ".repartition('key'), and start the query again. After this batch the option 'uidColumns' or a "
            "column `uid` make that unnecessary"
        )


def _shared(tasks: Sequence[Told]) -> dict[int, tuple[int, int]]:
    """The heads that several tasks have: how often the one that has it most, and all of them together."""
    runs = [task.heads for task in tasks if len(task.heads)]
    heads = np.sort(np.concatenate([np.empty(0, np.uint64), *runs]), kind="stable")  # of sorted ones: a merge
    several = np.unique(heads[1:][heads[1:] == heads[:-1]])
    counts: dict[int, tuple[int, int]] = {}
    for task in tasks if len(several) else ():
        for head in several[np.isin(several, task.heads)].tolist():
            count = task.repeated.get(head, 1)
            most, all_of_them = counts.get(head, (0, 0))
            counts[head] = max(most, count), all_of_them + count
    return counts


def with_uids(rows: Any, uids: list[str]) -> Any:
    """Rows with these uids."""
    column = pa.array(uids, pa.string())
    if "uid" in rows.schema.names:
        return rows.set_column(rows.schema.get_field_index("uid"), "uid", column)
    return rows.append_column("uid", column)
