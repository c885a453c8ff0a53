"""The archive compared with the journal: with_spark/archive_check.py, by NumPy."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.compute as pc

from keylane_spark.auditing.findings import ArchiveAudit
from keylane_spark.auditing.in_memory.journal import JournalTable
from keylane_spark.auditing.rules import FINE, FOREIGN, FOREVER, LEDGER, NEWER, UNPROVEN, Coverage


@dataclass
class InMemoryArchive:
    """The archive of a topic."""

    path: str
    subscription: str
    rows: pa.Table  # partition, offset, message_id, key
    newest: dict[int, int] | None = None  # where the log of each partition ended after the rows had been read
    earlier: int = 0  # rows of earlier topics of the name, which are not in `rows` any more

    def since(self, ledger: int) -> "InMemoryArchive":
        """Without the rows of older ledgers."""
        named = pc.extract_regex(self.rows.column("message_id"), LEDGER.replace("(", "(?P<ledger>"))
        older = pc.less(pc.cast(pc.struct_field(named, "ledger"), pa.int64()), ledger)
        rows = self.rows.filter(pc.invert(pc.fill_null(older, False)))
        return replace(self, rows=rows, earlier=len(self.rows) - len(rows))


@dataclass
class Committed:
    """What the archive's subscription has committed, and what of that the archive lacks."""

    known: bool = False  # whether the journal knows the subscription
    messages: int = 0
    missing: int = 0
    gone: list[tuple[int, int, int]] = field(default_factory=list)  # partition, first, last

    def add(self, partition: int, found: SimpleNamespace) -> None:
        """Add the stretches of a life."""
        self.known |= len(found.first) > 0
        done = (found.published > 0) & (found.acked > 0)
        absent = done & (found.archived == 0)
        self.messages += int(found.entries[done].sum())
        self.missing += int(found.entries[absent].sum())
        bounds = zip(found.first[absent].tolist(), found.last[absent].tolist(), strict=True)
        self.gone += [(partition, first, last) for first, last in bounds]


def check_archive(
    archive: InMemoryArchive,
    journal: JournalTable,
    coverage: Sequence[Coverage],
    committed: Committed,
    cap: int,
) -> ArchiveAudit:
    """Count its rows, and list the first of each kind of finding; `cap` lines at most."""
    columns = ["partition", "offset", "message_id"]
    order = [(name, "ascending") for name in columns]
    rows = archive.rows.select(columns).sort_by(order)
    judge = _RowJudge(journal, coverage, archive.newest)
    counts: Counter[tuple[bool, str]] = Counter()
    twice, foreign = dict[str, None](), dict[str, None]()
    before = None
    for partition, offset, name in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        again, before = (partition, offset) == before, (partition, offset)
        found = judge(partition, offset, name)
        counts[again, found] += 1
        if again:
            twice[name] = None
        if found == FOREIGN:
            foreign[name] = None
    total = sum(counts.values())
    doubled = sum(count for (again, _), count in counts.items() if again)
    ids: list[str] = []
    for partition, first, last in sorted(committed.gone):
        for entry in range(first, min(last, first + cap - len(ids) - 1) + 1):
            ids.append(f"{partition}:{journal.publish_of(partition, entry)[0]}-{entry}")
    return ArchiveAudit(
        path=archive.path,
        subscription=archive.subscription,
        rows=total,
        messages=total - doubled,
        duplicates=doubled,
        committed=committed.messages if committed.known else None,
        missing=committed.missing,
        never_published=sum(count for (_, found), count in counts.items() if found == FOREIGN),
        unproven=counts[False, UNPROVEN],
        newer=counts[False, NEWER],
        missing_ids=ids,
        duplicate_ids=list(twice)[:cap],
        never_published_ids=list(foreign)[:cap],
        earlier=archive.earlier,
    )


class _RowJudge:
    """Says of a row of the archive what became of it."""

    def __init__(
        self, journal: JournalTable, coverage: Sequence[Coverage], newest: dict[int, int] | None
    ) -> None:
        self._proven = {part.partition: part.first for part in coverage}
        self._newest = newest
        self._ledgers: dict[int, list[tuple[int, int, str]]] = {}
        self._ends: dict[int, int] = {}
        for part in coverage:
            rows = journal.publishes(part.partition)
            ledgers: dict[str, tuple[int, int]] = {}
            for row, ledger in zip(rows.tolist(), journal.by.take(pa.array(rows)).to_pylist(), strict=True):
                first, last = ledgers.get(ledger, (FOREVER, 0))
                ledgers[ledger] = min(first, int(journal.first[row])), max(last, int(journal.last[row]))
            self._ledgers[part.partition] = [(*bounds, ledger) for ledger, bounds in ledgers.items()]
            if ledgers:
                self._ends[part.partition] = max(last for _, last in ledgers.values()) + 1

    def __call__(self, partition: int, offset: int, name: str) -> str:
        proven = self._proven.get(partition)
        newest = FOREVER if self._newest is None else self._newest.get(partition, 0)
        if proven is None or offset < 1 or offset >= newest:
            return FOREIGN
        if offset < proven:
            return UNPROVEN
        if offset >= self._ends.get(partition, FOREVER):
            return NEWER
        for first, last, ledger in self._ledgers[partition]:
            if first <= offset <= last:
                return FINE if name == f"{partition}:{ledger}-{offset}" else FOREIGN
        return FOREIGN
