"""From ranges to stretches, for one life at a time: with_spark/stretches.py, by NumPy."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from keylane_spark.auditing.rules import (
    ACKED,
    ARCHIVED,
    CUT,
    DELIVERED,
    DONE,
    FOREVER,
    HELD,
    IN_LOG,
    MISSING,
    NO_BODY,
    PUBLISHED,
    SETTLED_OTHERWISE,
    Life,
    Witness,
    reason_of,
    state_of,
)

Ints = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

_NONE = np.array([], np.int64)
_COUNTED = {
    "published": (PUBLISHED,),
    "delivered": (DELIVERED,),
    "acked": (ACKED,),
    "settled": (ACKED, SETTLED_OTHERWISE),
    "missing": (MISSING,),
    "in_log": (IN_LOG,),
    "no_body": (NO_BODY,),
    "held": (HELD,),
    "archived": (ARCHIVED,),
}
_TIMED = {"published_at": PUBLISHED, "delivered_at": DELIVERED, "acked_at": ACKED}


class Ranges:
    """Ranges of entries that are known of a life, each of a kind and a time."""

    def __init__(self) -> None:
        self._parts: list[tuple[int | Ints, Ints, Ints, int | Ints]] = []

    def add(self, kind: int | Ints, first: Ints, last: Ints, at: int | Ints = 0) -> None:
        """Add some."""
        if len(first):
            self._parts.append((kind, first, last, at))

    def whole(self) -> tuple[Ints, Ints, Ints, Ints]:
        """All of them: kind, first, last, at."""
        if not self._parts:
            return _NONE, _NONE, _NONE, _NONE
        parts = ((_wide(kind, first), first, last, _wide(at, first)) for kind, first, last, at in self._parts)
        kinds, firsts, lasts, times = (np.concatenate(column) for column in zip(*parts, strict=True))
        return kinds, firsts, lasts, times


def _wide(value: int | Ints, like: Ints) -> Ints:
    return np.full(len(like), value, np.int64) if isinstance(value, int) else value


class PartitionJournal(SimpleNamespace):
    """The records of a partition as arrays, in the order of their numbers, and what is known beside them."""

    offset: Ints
    at: Ints  # ms
    kind: Ints  # of rules.KINDS, -1 for none
    name: Ints  # of the subscription, -1 for none
    handled: Flags  # a sign that the entries were in the log
    first: Ints
    last: Ints
    by: np.ndarray[Any, Any]

    log: tuple[Ints, Ints]  # ranges of entries that are in it
    bodiless: tuple[Ints, Ints]
    archived: tuple[Ints, Ints]
    proven: int
    latest: int
    looked: int


def ranges_of(
    journal: PartitionJournal,
    life: Life,
    name: int,
    since_ms: int,
    witnesses: Sequence[tuple[int, Witness]] = (),
) -> Ranges:
    """All that is known of a life; `witnesses` with the numbers of their names."""
    j, found = journal, Ranges()
    recent = j.at >= since_ms
    published = recent & (j.kind == PUBLISHED) & (j.first >= j.proven)
    published &= (j.offset < life.ends) & (j.last >= life.lowest)
    found.add(PUBLISHED, j.first[published], j.last[published], j.at[published])
    own = j.name == name
    mine = recent & own & (j.kind > PUBLISHED) & (j.offset >= life.begins) & (j.offset <= life.ends)
    found.add(j.kind[mine], j.first[mine], j.last[mine], j.at[mine])
    if life.ends == FOREVER:
        first, last = j.log
        fits = last >= life.lowest
        found.add(IN_LOG, first[fits], last[fits])
        found.add(NO_BODY, *j.bodiless)
    if life.historic > life.owed:
        signs = np.where(own, j.kind == DELIVERED, j.handled)
        signs &= (j.offset > life.moved) & (j.offset < life.ends)
        signs &= (j.first < life.historic) & (j.last >= life.owed)
        found.add(HELD, j.first[signs], j.last[signs])
    for code, witness in witnesses:
        done = (j.name == code) & np.isin(j.kind, DONE) & (j.offset < witness.before)
        found.add(HELD, *_between(j.first[done], j.last[done], witness.first, witness.last))
    cuts = np.array([at for at in (life.owed, life.historic, life.position, j.latest) if at > 0], np.int64)
    found.add(CUT, cuts, cuts)
    found.add(ARCHIVED, *j.archived)
    return found


def _between(first: Ints, last: Ints, begin: int, end: int) -> tuple[Ints, Ints]:
    """What these ranges leave of begin..end."""
    order = np.argsort(first)
    starts = np.maximum(np.r_[begin, np.maximum.accumulate(last[order]) + 1], begin)
    ends = np.minimum(np.r_[first[order] - 1, end], end)
    some = starts <= ends
    return starts[some], ends[some]


def stretches_of(ranges: Ranges) -> SimpleNamespace:
    """Stretches first..last of entries that are alike, with what happened to them and how often.

    As with Spark; `delivered_at` and `acked_at` are -1 unless there was just one.
    """
    kind, first, last, at = ranges.whole()
    entries, places = np.unique(np.concatenate([first, last + 1]), return_inverse=True)
    begins, ends = places[: len(first)], places[len(first) :]

    def running(chosen: Flags, amounts: Ints | int) -> Ints:
        steps = np.zeros(len(entries), np.int64)
        some = amounts if isinstance(amounts, int) else amounts[chosen]
        np.add.at(steps, begins[chosen], some)
        np.subtract.at(steps, ends[chosen], some)
        return np.cumsum(steps)[:-1]

    found = {name: running(np.isin(kind, kinds), 1) for name, kinds in _COUNTED.items()}
    found |= {name: running(kind == one, at) for name, one in _TIMED.items()}
    known = (found["published"] > 0) | (found["missing"] > 0)
    made = SimpleNamespace(first=entries[:-1][known], last=entries[1:][known] - 1)
    for name, column in found.items():
        setattr(made, name, column[known])
    made.delivered_at = np.where(made.delivered == 1, made.delivered_at, -1)
    made.acked_at = np.where(made.acked == 1, made.acked_at, -1)
    made.entries = made.last - made.first + 1
    _fill_first_deliveries(made, kind, first, last, at)
    return made


def _fill_first_deliveries(made: SimpleNamespace, kind: Ints, first: Ints, last: Ints, at: Ints) -> None:
    """When stretches that were delivered more than once were first: `first_at`, -1 where never."""
    made.first_at = made.delivered_at.copy()
    again = np.flatnonzero(made.delivered > 1)
    if not len(again):
        return
    deliveries = kind == DELIVERED
    starts = made.first[again]
    low = np.searchsorted(starts, first[deliveries], "left")
    high = np.searchsorted(starts, last[deliveries], "right")
    counts = high - low
    which = np.repeat(low, counts) + _within(counts)
    least = np.full(len(again), FOREVER, np.int64)
    np.minimum.at(least, which, np.repeat(at[deliveries], counts))
    made.first_at[again] = least


def _within(counts: Ints) -> Ints:
    """0, 1, 2, … for each count."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def judged(stretches: SimpleNamespace, life: Life, journal: PartitionJournal) -> SimpleNamespace:
    """The stretches with state and reason, by the rules."""
    for name in ("owed", "historic", "position", "moved", "ends", "mode"):
        setattr(stretches, name, getattr(life, name))
    stretches.latest, stretches.looked = journal.latest, journal.looked
    stretches.reason = reason_of(stretches, _choose)
    stretches.state = state_of(stretches, _choose)
    return stretches


def _choose(*cases: tuple[Flags, str], otherwise: str) -> np.ndarray[Any, Any]:
    size = max((np.size(condition) for condition, _ in cases), default=0)
    conditions = [np.broadcast_to(condition, (size,)) for condition, _ in cases]
    return np.select(conditions, [value for _, value in cases], otherwise)


def islands_of(entries: Ints) -> tuple[Ints, Ints]:
    """Entries, some of them perhaps twice, as ranges."""
    ordered = np.unique(entries)
    if not len(ordered):
        return _NONE, _NONE
    cuts = np.flatnonzero(np.diff(ordered) > 1)
    return ordered[np.concatenate([[0], cuts + 1])], ordered[np.concatenate([cuts, [len(ordered) - 1]])]


def arrays(ranges: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    """Ranges as arrays."""
    flat = np.array(ranges, np.int64).reshape(-1, 2)
    return flat[:, 0], flat[:, 1]
