"""The records of a journal as arrays, by partition: those from which on none is missing."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keylane_spark.auditing.counts import Happening, bars_of
from keylane_spark.auditing.in_memory.stretches import Ints, islands_of
from keylane_spark.auditing.rules import LIFE, Extent, Mark, Published, trust_of
from keylane_spark.snapshot import Snapshot


class JournalTable:
    """The journal of a snapshot, in the order of partitions and records."""

    def __init__(self, seen: Snapshot, journal: pa.Table) -> None:
        self._seen = seen
        self._publishes: dict[int, Ints] = {}
        journal = journal.sort_by(
            [("partition", "ascending"), ("offset", "ascending"), ("first", "ascending")]
        )
        partition, offset = (ints(journal, name) for name in ("partition", "offset"))
        self.trust = []
        keep = np.zeros(len(partition), np.bool_)
        for state in seen.partitions:
            low, high = np.searchsorted(partition, [state.partition, state.partition + 1])
            there = islands_of(offset[low:high])
            trusted = trust_of(state, list(zip(there[0].tolist(), there[1].tolist(), strict=True)))
            self.trust.append(trusted)
            keep[low:high] = offset[low:high] >= trusted.start
        journal = journal.filter(pa.array(keep))
        self.partition = partition[keep]
        self.names, self.name = _coded(journal, "subscription")
        self.transitions, self.transition = _coded(journal, "transition")
        self.at = pc.cast(journal.column("timestamp"), pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
        self.at = self.at.to_numpy()
        self.offset, self.first = ints(journal, "offset"), ints(journal, "first")
        self.last = pc.coalesce(journal.column("last"), journal.column("first")).to_numpy()
        self.point = journal.column("last").is_null().to_numpy()
        self.by = journal.column("by").combine_chunks()

    def codes(self) -> dict[str, int]:
        """The number by which `name` has each subscription."""
        return {name: code for code, name in enumerate(self.names)}

    def subscriptions(self) -> set[tuple[int, str]]:
        """The partitions and subscriptions of all records."""
        about = set(zip(self.partition.tolist(), self.name.tolist(), strict=True))
        return {(number, self.names[name]) for number, name in about if self.names[name]}

    def slice(self, partition: int) -> slice:
        """The rows of a partition."""
        low, high = np.searchsorted(self.partition, [partition, partition + 1])
        return slice(int(low), int(high))

    def rows(self, partition: int, *transitions: str) -> Ints:
        """Which rows of a partition are of these."""
        here = self.slice(partition)
        codes = [code for code, text in enumerate(self.transitions) if text in transitions]
        found: Ints = np.flatnonzero(np.isin(self.transition[here], codes)) + here.start
        return found

    def publishes(self, partition: int) -> Ints:
        """Which rows of a partition are publishes."""
        if partition not in self._publishes:
            self._publishes[partition] = self.rows(partition, "published")
        return self._publishes[partition]

    def extent(self) -> Extent:
        """How much there is, and of which time."""
        began: dict[int, int] = {}
        for state in self._seen.partitions:
            if len(at := self.at[self.slice(state.partition)]):
                began[state.partition] = int(at.min())
        return Extent(began, int(self.at.max()) if len(self.at) else 0, len(self.at))

    def published(self, partition: int) -> Published | None:
        """What there is of the publishes of a partition."""
        rows = self.publishes(partition)
        if not len(rows):
            return None
        first, last = self.first[rows], self.last[rows]
        hole = np.r_[False, first[1:] > np.maximum.accumulate(last)[:-1] + 1]
        begins = np.flatnonzero(hole | (np.arange(len(rows)) == 0))
        start = begins[np.argmax(first[begins])]
        return Published(int(first[start]), int(self.at[rows[start]]), int(last.max()) + 1, bool(hole.any()))

    def marks(self) -> Iterable[Mark]:
        """The marks of lives, each with the last entry that was published before it."""
        for state in self._seen.partitions:
            marks, publishes = self.rows(state.partition, *LIFE), self.publishes(state.partition)
            upto = np.maximum.accumulate(self.last[publishes]) if len(publishes) else publishes
            for row in marks.tolist():
                before = int(np.searchsorted(self.offset[publishes], self.offset[row]))
                yield Mark(
                    state.partition,
                    self.names[self.name[row]],
                    int(self.offset[row]),
                    self.transitions[self.transition[row]],
                    int(self.first[row]),
                    int(upto[before - 1]) if before else 0,
                )

    def publish_of(self, partition: int, entry: int) -> tuple[str, int | None]:
        """The ledger and the time, ms, of an entry, as far as its publish is there."""
        rows = self.publishes(partition)
        at = int(np.searchsorted(self.first[rows], entry, "right")) - 1
        if at < 0 or self.last[rows[at]] < entry:
            return "?", None
        return self.by[int(rows[at])].as_py(), int(self.at[rows[at]])

    def happened(self, extent: Extent, since_ms: int) -> list[Happening]:
        """How many messages each transition was about, by time."""
        least, width = bars_of(extent, since_ms)
        recent = self.at >= since_ms
        amounts = np.where(self.point, 1, self.last - self.first + 1)[recent]
        bars = (self.at[recent] - least) // width
        sums: Counter[tuple[int, int, int]] = Counter()
        keys = np.stack([self.name[recent], self.transition[recent], bars], axis=1)
        each, places = np.unique(keys, axis=0, return_inverse=True)
        totals = np.zeros(len(each), np.int64)
        np.add.at(totals, places.reshape(-1), amounts)
        for (name, transition, bar), total in zip(each.tolist(), totals.tolist(), strict=True):
            sums[name, transition, bar] += total
        return [
            Happening(self.names[name], self.transitions[transition], bar, total)
            for (name, transition, bar), total in sums.items()
        ]


class Entries:
    """The offsets of rows by partition."""

    def __init__(self, table: pa.Table | None) -> None:
        empty = np.array([], np.int64)
        partition, offset = (
            (empty, empty) if table is None else (ints(table, "partition"), ints(table, "offset"))
        )
        order = np.argsort(partition, kind="stable")
        self._partition, self._offset = partition[order], offset[order]

    def of(self, partition: int) -> Ints:
        """Those of a partition; there is none for -1."""
        low, high = np.searchsorted(self._partition, [partition, partition + 1])
        return self._offset[low:high]


def ints(table: pa.Table, name: str) -> Ints:
    """A column of whole numbers."""
    return np.asarray(table.column(name).to_numpy(), np.int64)


def _coded(table: pa.Table, name: str) -> tuple[list[str], Ints]:
    """The texts of a column, each once, and which one each row has."""
    encoded = table.column(name).combine_chunks().dictionary_encode()
    return encoded.dictionary.to_pylist(), np.asarray(encoded.indices.to_numpy(), np.int64)
