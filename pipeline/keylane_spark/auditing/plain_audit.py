"""The audit without Spark and Java, for what fits into memory: the same rules, by NumPy.

That it says what the job on Spark says is for tests/pipeline/test_plain_audit.py.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import ceil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keylane_spark.auditing.counts import (
    MOST_ATTEMPTS,
    Count,
    Happening,
    bars_of,
    tally_activity,
    tally_subscriptions,
)
from keylane_spark.auditing.findings import (
    QUANTILES,
    ArchiveAudit,
    Audit,
    Latency,
    LostMessage,
    conclude,
    milliseconds,
)
from keylane_spark.auditing.looks import Snapshot
from keylane_spark.auditing.plain_stretches import (
    Ints,
    Journal,
    arrays,
    islands_of,
    judged,
    ranges_of,
    stretches_of,
)
from keylane_spark.auditing.rules import (
    FINE,
    FOREIGN,
    FOREVER,
    HANDLED,
    KINDS,
    LEDGER,
    LIFE,
    LOST,
    NEWER,
    REASONS,
    STATES,
    UNPROVEN,
    Extent,
    Life,
    Mark,
    Published,
    Witness,
    coverage_of,
    lives_of,
    oldest_ledger,
    trust_of,
    witnesses_of,
)

_POWERS = np.array([10**digits for digits in range(19)], np.int64)


@dataclass
class PlainArchive:
    """The archive of a topic."""

    path: str
    subscription: str
    rows: pa.Table  # partition, offset, message_id, key
    newest: dict[int, int] | None = None  # where the log of each partition ended after the rows had been read
    earlier: int = 0  # rows of earlier topics of the name, which are not in `rows` any more

    def since(self, ledger: int) -> "PlainArchive":
        """Without the rows of older ledgers."""
        named = pc.extract_regex(self.rows.column("message_id"), LEDGER.replace("(", "(?P<ledger>"))
        older = pc.less(pc.cast(pc.struct_field(named, "ledger"), pa.int64()), ledger)
        rows = self.rows.filter(pc.invert(pc.fill_null(older, False)))
        return replace(self, rows=rows, earlier=len(self.rows) - len(rows))


def examine(
    seen: Snapshot,
    journal: pa.Table,
    log: pa.Table,
    *,
    archive: PlainArchive | None = None,
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


@dataclass
class _Latencies:
    """Of stretches: subscription, span of publish, class of three digits, how many, and the most."""

    width_ms: int
    parts: dict[str, list[tuple[int, Ints, Ints, Ints]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, what: str, name: int, published_at: Ints, at: Ints, entries: Ints) -> None:
        known = at >= 0
        if known.any():
            taken = np.maximum(at[known] - published_at[known], 0)
            self.parts[what].append((name, published_at[known] // self.width_ms, taken, entries[known]))

    def lines(self, names: Sequence[str], cap: int) -> list[Latency]:
        found = []
        for what, parts in self.parts.items():
            name = np.concatenate([np.full(len(span), name, np.int64) for name, span, _, _ in parts])
            span, taken, entries = (np.concatenate([part[at] for part in parts]) for at in (1, 2, 3))
            for at in (np.full(len(span), -1, np.int64), span):
                found += _percentiles(what, names, name, at, self.width_ms, taken, entries)
        found.sort(key=lambda line: (-FOREVER if line.at_ms is None else -line.at_ms, *line_of(line)))
        return sorted(found[:cap], key=lambda line: (*line_of(line), line.at_ms or 0))


def line_of(line: Latency) -> tuple[str, str]:
    """What a line is about."""
    return line.subscription, line.what


def _percentiles(
    what: str, names: Sequence[str], name: Ints, span: Ints, width_ms: int, taken: Ints, entries: Ints
) -> list[Latency]:
    """A line for each subscription and span; -1 is all of them."""
    unit = _POWERS[np.maximum(np.searchsorted(_POWERS, np.maximum(taken, 1), "right") - 3, 0)]
    classes = taken - taken % unit
    order = np.lexsort((classes, span, name))
    name, span, taken, entries, classes = (column[order] for column in (name, span, taken, entries, classes))
    starts = np.flatnonzero(np.r_[True, (np.diff(name) != 0) | (np.diff(span) != 0)])
    ends = np.r_[starts[1:], len(name)]
    found = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        upto = np.cumsum(entries[start:end])
        total = int(upto[-1])
        shares = {
            label: int(classes[start + int(np.searchsorted(upto, ceil(total * share)))])
            for label, share in QUANTILES.items()
        }
        at = int(span[start])
        found.append(
            Latency(
                subscription=names[int(name[start])],
                at_ms=None if at < 0 else at * width_ms,
                what=what,
                messages=total,
                **shares,
                max=int(taken[start:end].max()),
            )
        )
    return found


class Examination:
    """One snapshot, and what is found in it."""

    def __init__(
        self, seen: Snapshot, journal: pa.Table, log: pa.Table, archive: PlainArchive | None, since_ms: int
    ) -> None:
        self.seen, self.since_ms, self.archive, self.log = seen, since_ms, archive, log
        self._publishes: dict[int, Ints] = {}
        self._in_log = _Entries(log)
        self._archived = _Entries(None if archive is None else archive.rows)
        journal = journal.sort_by(
            [("partition", "ascending"), ("offset", "ascending"), ("first", "ascending")]
        )
        partition, offset = (_ints(journal, name) for name in ("partition", "offset"))
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
        self.offset, self.first = _ints(journal, "offset"), _ints(journal, "first")
        self.last = pc.coalesce(journal.column("last"), journal.column("first")).to_numpy()
        self.point = journal.column("last").is_null().to_numpy()
        self.by = journal.column("by").combine_chunks()
        self.extent = self._extent()
        self.published = {state.partition: self._published(state.partition) for state in seen.partitions}
        found = {number: at for number, at in self.published.items() if at is not None}
        self.coverage = coverage_of(seen, found, self.extent, self.trust)
        about = set(zip(self.partition.tolist(), self.name.tolist(), strict=True))
        named = {(number, self.names[name]) for number, name in about if self.names[name]}
        marks = list(self._marks())
        self.lives = lives_of(marks, named, seen)
        self.witnesses: dict[int, list[Witness]] = defaultdict(list)
        for witness in witnesses_of(self.lives, marks):
            self.witnesses[witness.number].append(witness)

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

    def _extent(self) -> Extent:
        began: dict[int, int] = {}
        for state in self.seen.partitions:
            if len(at := self.at[self.slice(state.partition)]):
                began[state.partition] = int(at.min())
        return Extent(began, int(self.at.max()) if len(self.at) else 0, len(self.at))

    def _published(self, partition: int) -> Published | None:
        rows = self.publishes(partition)
        if not len(rows):
            return None
        first, last = self.first[rows], self.last[rows]
        hole = np.r_[False, first[1:] > np.maximum.accumulate(last)[:-1] + 1]
        begins = np.flatnonzero(hole | (np.arange(len(rows)) == 0))
        start = begins[np.argmax(first[begins])]
        return Published(int(first[start]), int(self.at[rows[start]]), int(last.max()) + 1, bool(hole.any()))

    def _marks(self) -> Iterable[Mark]:
        for state in self.seen.partitions:
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

    def journal_of(self, number: int) -> Journal:
        """What is known of a partition; they are numbered from 0."""
        state, covered, here = self.seen.partitions[number], self.coverage[number], self.slice(number)
        kinds = np.array([KINDS.get(text, -1) for text in self.transitions], np.int64)
        signs = np.array([text in HANDLED for text in self.transitions], np.bool_)
        bodies = self.seen.bodies
        mine = {life.subscription for life in self.lives if life.partition == number}
        held = self.archive is not None and self.archive.subscription in mine
        codes = self.transition[here]
        return Journal(
            offset=self.offset[here],
            at=self.at[here],
            kind=kinds[codes] if len(kinds) else codes,
            name=self.name[here],
            handled=signs[codes] if len(signs) else codes.astype(np.bool_),
            first=self.first[here],
            last=self.last[here],
            log=islands_of(self._in_log.of(number)),
            bodiless=arrays(bodies.missing.get(number, []) if bodies else []),
            archived=islands_of(self._archived.of(number) if held else self._archived.of(-1)),
            proven=covered.first,
            latest=state.latest,
            looked=state.journal_latest,
        )

    def judged(self) -> Iterator[tuple[Life, SimpleNamespace]]:
        """Every life with its stretches, and what the rules say of them."""
        codes = {name: code for code, name in enumerate(self.names)}
        journals: dict[int, Journal] = {}
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
        latencies, lost = (
            _Latencies(bars_of(self.extent, self.since_ms)[1]),
            list[tuple[int, int, int, str, str]](),
        )
        committed = missing = 0
        known, gone = False, list[tuple[int, int, int]]()
        codes = {name: code for code, name in enumerate(self.names)}
        for life, found in self.judged():
            _count(counts, deliveries, life.subscription, found)
            lost += _ranges_in(found, found.state == LOST, life)
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
                known |= len(found.first) > 0
                done = shown & (found.acked > 0)
                committed += int(found.entries[done].sum())
                absent = done & (found.archived == 0)
                missing += int(found.entries[absent].sum())
                gone += [(part, first, last) for part, first, last, *_ in _ranges_in(found, absent, life)]
        activity = tally_activity(self._happened(), self.extent, self.since_ms)
        tallied = [
            Count(*key, messages=messages, deliveries=deliveries[key]) for key, messages in counts.items()
        ]
        checked = None
        if self.archive is not None:
            checked = self._check_archive(self.archive, committed if known else None, missing, gone, listed)
        return conclude(
            self.seen,
            since,
            self.coverage,
            self.extent,
            activity,
            tally_subscriptions(tallied, activity),
            self._list_lost(lost, listed),
            checked,
            latencies.lines(self.names, lines),
        )

    def _happened(self) -> list[Happening]:
        least, width = bars_of(self.extent, self.since_ms)
        recent = self.at >= self.since_ms
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

    def _publish_of(self, partition: int, entry: int) -> tuple[str, int | None]:
        """The ledger and the time, ms, of an entry, as far as its publish is there."""
        rows = self.publishes(partition)
        at = int(np.searchsorted(self.first[rows], entry, "right")) - 1
        if at < 0 or self.last[rows[at]] < entry:
            return "?", None
        return self.by[int(rows[at])].as_py(), int(self.at[rows[at]])

    def _list_lost(self, lost: list[tuple[int, int, int, str, str]], cap: int) -> list[LostMessage]:
        lost.sort(key=lambda one: (one[0], one[1], one[3]))
        found: list[LostMessage] = []
        for partition, first, last, subscription, reason in lost:
            for entry in range(first, min(last, first + cap - len(found) - 1) + 1):
                ledger, at = self._publish_of(partition, entry)
                message_id = f"{partition}:{ledger}-{entry}"
                found.append(LostMessage(message_id, subscription, partition, entry, reason, at))
        keys = self._keys({(message.partition, message.entry) for message in found})
        return [
            LostMessage(
                m.message_id,
                m.subscription,
                m.partition,
                m.entry,
                m.reason,
                m.published_ms,
                keys.get((m.partition, m.entry)),
            )
            for m in found
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

    def _check_archive(
        self,
        archive: PlainArchive,
        committed: int | None,
        missing: int,
        gone: list[tuple[int, int, int]],
        cap: int,
    ) -> ArchiveAudit:
        columns = ["partition", "offset", "message_id"]
        order = [(name, "ascending") for name in columns]
        rows = archive.rows.select(columns).sort_by(order)
        judge = _RowJudge(self, archive.newest)
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
        for partition, first, last in sorted(gone):
            for entry in range(first, min(last, first + cap - len(ids) - 1) + 1):
                ids.append(f"{partition}:{self._publish_of(partition, entry)[0]}-{entry}")
        return ArchiveAudit(
            path=archive.path,
            subscription=archive.subscription,
            rows=total,
            messages=total - doubled,
            duplicates=doubled,
            committed=committed,
            missing=missing,
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

    def __init__(self, of: Examination, newest: dict[int, int] | None) -> None:
        self._proven = {part.partition: part.first for part in of.coverage}
        self._newest = newest
        self._ledgers: dict[int, list[tuple[int, int, str]]] = {}
        self._ends: dict[int, int] = {}
        for part in of.coverage:
            rows = of.publishes(part.partition)
            ledgers: dict[str, tuple[int, int]] = {}
            for row, ledger in zip(rows.tolist(), of.by.take(pa.array(rows)).to_pylist(), strict=True):
                first, last = ledgers.get(ledger, (FOREVER, 0))
                ledgers[ledger] = min(first, int(of.first[row])), max(last, int(of.last[row]))
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


def _ranges_in(
    found: SimpleNamespace, chosen: np.ndarray[Any, Any], life: Life
) -> list[tuple[int, int, int, str, str]]:
    columns = (found.first[chosen].tolist(), found.last[chosen].tolist(), found.reason[chosen].tolist())
    return [
        (life.partition, first, last, life.subscription, reason)
        for first, last, reason in zip(*columns, strict=True)
    ]


class _Entries:
    """The offsets of rows by partition."""

    def __init__(self, table: pa.Table | None) -> None:
        empty = np.array([], np.int64)
        partition, offset = (
            (empty, empty) if table is None else (_ints(table, "partition"), _ints(table, "offset"))
        )
        order = np.argsort(partition, kind="stable")
        self._partition, self._offset = partition[order], offset[order]

    def of(self, partition: int) -> Ints:
        """Those of a partition; there is none for -1."""
        low, high = np.searchsorted(self._partition, [partition, partition + 1])
        return self._offset[low:high]


def _ints(table: pa.Table, name: str) -> Ints:
    return np.asarray(table.column(name).to_numpy(), np.int64)


def _coded(table: pa.Table, name: str) -> tuple[list[str], Ints]:
    """The texts of a column, each once, and which one each row has."""
    encoded = table.column(name).combine_chunks().dictionary_encode()
    return encoded.dictionary.to_pylist(), np.asarray(encoded.indices.to_numpy(), np.int64)
