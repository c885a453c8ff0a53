"""The audit without Spark and Java, for what fits into memory: the same rules, by NumPy.

That it says what the job on Spark says is for tests/pipeline/test_in_memory_audit.py.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime
from types import SimpleNamespace

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keylane_spark.auditing.counts import (
    MOST_ATTEMPTS,
    Count,
    bars_of,
    tally_activity,
    tally_subscriptions,
)
from keylane_spark.auditing.findings import Audit, LostMessage
from keylane_spark.auditing.in_memory.archive_check import Committed, InMemoryArchive, check_archive
from keylane_spark.auditing.in_memory.journal import Entries, JournalTable
from keylane_spark.auditing.in_memory.latency import Latencies
from keylane_spark.auditing.in_memory.stretches import (
    PartitionJournal,
    arrays,
    islands_of,
    judged,
    ranges_of,
    stretches_of,
)
from keylane_spark.auditing.rules import (
    HANDLED,
    KINDS,
    LOST,
    REASONS,
    STATES,
    Life,
    Witness,
    coverage_of,
    lives_of,
    oldest_ledger,
    witnesses_of,
)
from keylane_spark.auditing.verdict import conclude, milliseconds
from keylane_spark.snapshot import Snapshot


def examine(
    seen: Snapshot,
    journal: pa.Table,
    log: pa.Table,
    *,
    archive: InMemoryArchive | None = None,
    since: datetime | None = None,
    listed: int,
    lines: int,
) -> Audit:
    """Judge a snapshot."""
    if archive is not None and seen.incarnation:
        published = journal.filter(pc.equal(journal.column("transition"), "published"))
        ledgers = pc.unique(published.column("by")).to_pylist()
        archive = archive.since(oldest_ledger(seen.incarnation, ledgers))
    return Examination(seen, journal, log, archive, milliseconds(since)).audit(since, listed, lines)


class Examination:
    """One snapshot, and what is found in it."""

    def __init__(
        self, seen: Snapshot, journal: pa.Table, log: pa.Table, archive: InMemoryArchive | None, since_ms: int
    ) -> None:
        self.seen, self.since_ms, self.archive, self.log = seen, since_ms, archive, log
        self.journal = JournalTable(seen, journal)
        self._in_log = Entries(log)
        self._archived = Entries(None if archive is None else archive.rows)
        self.extent = self.journal.extent()
        self.published = {
            state.partition: self.journal.published(state.partition) for state in seen.partitions
        }
        found = {number: at for number, at in self.published.items() if at is not None}
        self.coverage = coverage_of(seen, found, self.extent, self.journal.trust)
        marks = list(self.journal.marks())
        self.lives = lives_of(marks, self.journal.subscriptions(), seen)
        self.witnesses: dict[int, list[Witness]] = defaultdict(list)
        for witness in witnesses_of(self.lives, marks):
            self.witnesses[witness.number].append(witness)

    def journal_of(self, number: int) -> PartitionJournal:
        """What is known of a partition; they are numbered from 0."""
        state, covered, journal = self.seen.partitions[number], self.coverage[number], self.journal
        here = journal.slice(number)
        kinds = np.array([KINDS.get(text, -1) for text in journal.transitions], np.int64)
        signs = np.array([text in HANDLED for text in journal.transitions], np.bool_)
        bodies = self.seen.bodies
        mine = {life.subscription for life in self.lives if life.partition == number}
        held = self.archive is not None and self.archive.subscription in mine
        codes = journal.transition[here]
        return PartitionJournal(
            offset=journal.offset[here],
            at=journal.at[here],
            kind=kinds[codes] if len(kinds) else codes,
            name=journal.name[here],
            handled=signs[codes] if len(signs) else codes.astype(np.bool_),
            first=journal.first[here],
            last=journal.last[here],
            log=islands_of(self._in_log.of(number)),
            bodiless=arrays(bodies.missing.get(number, []) if bodies else []),
            archived=islands_of(self._archived.of(number) if held else self._archived.of(-1)),
            proven=covered.first,
            latest=state.latest,
            looked=state.journal_latest,
        )

    def judged(self) -> Iterator[tuple[Life, SimpleNamespace]]:
        """Every life with its stretches, and what the rules say of them."""
        codes = self.journal.codes()
        journals: dict[int, PartitionJournal] = {}
        for life in self.lives:
            if life.partition not in journals:
                journals = {life.partition: self.journal_of(life.partition)}
            journal, code = journals[life.partition], codes.get(life.subscription, -1)
            others = [(codes.get(one.subscription, -1), one) for one in self.witnesses[life.number]]
            ranges = ranges_of(journal, life, code, self.since_ms, others)
            yield life, judged(stretches_of(ranges), life, journal)

    def audit(self, since: datetime | None, listed: int, lines: int) -> Audit:
        """Judge all lives, and count."""
        counts: Counter[tuple[str, str, str, int]] = Counter()
        deliveries: Counter[tuple[str, str, str, int]] = Counter()
        latencies = Latencies(bars_of(self.extent, self.since_ms)[1])
        lost: list[tuple[int, int, int, str, str]] = []
        committed = Committed()
        codes = self.journal.codes()
        for life, found in self.judged():
            _count(counts, deliveries, life.subscription, found)
            lost += _lost_in(found, life)
            shown = found.published > 0
            for what, at in (("delivered", found.first_at), ("acked", found.acked_at)):
                latencies.add(
                    what,
                    codes.get(life.subscription, -1),
                    found.published_at[shown],
                    at[shown],
                    found.entries[shown],
                )
            if self.archive is not None and life.subscription == self.archive.subscription:
                committed.add(life.partition, found)
        activity = tally_activity(
            self.journal.happened(self.extent, self.since_ms), self.extent, self.since_ms
        )
        tallied = [
            Count(*key, messages=messages, deliveries=deliveries[key]) for key, messages in counts.items()
        ]
        checked = None
        if self.archive is not None:
            checked = check_archive(self.archive, self.journal, self.coverage, committed, listed)
        return conclude(
            self.seen,
            since,
            self.coverage,
            self.extent,
            activity,
            tally_subscriptions(tallied, activity),
            self._list_lost(lost, listed),
            checked,
            latencies.lines(self.journal.names, lines),
        )

    def _list_lost(self, lost: list[tuple[int, int, int, str, str]], cap: int) -> list[LostMessage]:
        lost.sort(key=lambda one: (one[0], one[1], one[3]))
        found: list[LostMessage] = []
        for partition, first, last, subscription, reason in lost:
            for entry in range(first, min(last, first + cap - len(found) - 1) + 1):
                ledger, at = self.journal.publish_of(partition, entry)
                message_id = f"{partition}:{ledger}-{entry}"
                found.append(LostMessage(message_id, subscription, partition, entry, reason, at))
        keys = self._keys({(message.partition, message.entry) for message in found})
        return [
            msgspec.structs.replace(message, key=keys.get((message.partition, message.entry)))
            for message in found
        ]

    def _keys(self, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], str]:
        """The keys of entries, as far as the log or the archive has them."""
        keys: dict[tuple[int, int], str] = {}
        for table in (self.log, *([self.archive.rows] if self.archive else [])) if wanted else ():
            some = pc.is_in(table.column("offset"), pa.array(sorted({entry for _, entry in wanted})))
            for row in table.select(["partition", "offset", "key"]).filter(some).to_pylist():
                if (row["partition"], row["offset"]) in wanted and row["key"] is not None:
                    keys[row["partition"], row["offset"]] = row["key"]
        return keys


def _count(
    counts: Counter[tuple[str, str, str, int]],
    deliveries: Counter[tuple[str, str, str, int]],
    subscription: str,
    found: SimpleNamespace,
) -> None:
    attempts = np.minimum(found.delivered, MOST_ATTEMPTS)
    for state in STATES:
        for reason in REASONS if state == LOST else ("",):
            chosen = (found.state == state) & (found.reason == reason)
            if not chosen.any():
                continue
            for times in np.unique(attempts[chosen]).tolist():
                some = chosen & (attempts == times)
                key = (subscription, state, reason, times)
                counts[key] += int(found.entries[some].sum())
                deliveries[key] += int((found.entries[some] * found.delivered[some]).sum())


def _lost_in(found: SimpleNamespace, life: Life) -> list[tuple[int, int, int, str, str]]:
    lost = found.state == LOST
    columns = (found.first[lost].tolist(), found.last[lost].tolist(), found.reason[lost].tolist())
    return [
        (life.partition, first, last, life.subscription, reason)
        for first, last, reason in zip(*columns, strict=True)
    ]
