"""The audit without any cleverness: one entry and one subscription at a time, as its documentation has it."""

from collections import Counter
from dataclasses import dataclass

from tests.pipeline.simulation import STARTS, Look, Record

SETTLED = ("acked", "committed", "dead_lettered", "expired", "skipped", "deleted", "filtered")
HANDLED = ("acked", "dead_lettered", "expired", "skipped", "deleted", "filtered")


@dataclass
class Life:
    """From `subscribed` to `unsubscribed`, or from before the journal, or until now."""

    sub: str
    begins: int
    ends: int | None
    marks: list[tuple[Record, int]]  # subscribed and sought, with the last entry published before


def records_of(look: Look) -> list[Record]:
    """The records that were there all the time."""
    return [record for record in look.records if record.offset >= look.first]


def lives_of(look: Look) -> list[Life]:
    """In the order of their beginnings."""
    lives: list[Life] = []
    current: dict[str, Life] = {}
    published = 0
    for record in records_of(look):
        if record.what == "published":
            published = record.ranges[-1][1] or 0
        elif record.what == "subscribed":
            current[record.sub] = Life(record.sub, record.offset, None, [(record, published)])
            lives.append(current[record.sub])
        elif record.sub:
            if record.sub not in current:
                current[record.sub] = Life(record.sub, 0, None, [])
                lives.append(current[record.sub])
            if record.what == "sought":
                current[record.sub].marks.append((record, published))
            elif record.what == "unsubscribed":
                current.pop(record.sub).ends = record.offset
    named = {life.sub for life in lives}
    return lives + [Life(name, 0, None, []) for name in look.positions if name not in named]


def proven_from(look: Look) -> int:
    """The first entry whose publish is known, with no hole after it."""
    known = [r for record in records_of(look) if record.what == "published" for r in record.ranges]
    return known[0][0] if known else look.latest


def judge_plainly(look: Look) -> Counter[tuple[str, int, str, int]]:
    """How many (subscription, entry, state, deliveries) there are: one for each life of a subscription."""
    records = records_of(look)
    found: Counter[tuple[str, int, str, int]] = Counter()
    for life in lives_of(look):
        starts = [mark.ranges[0][0] for mark, _ in life.marks]
        lowest = min(starts) if life.begins else 0
        counted: set[int] = set()
        for record in records:
            if record.what != "published" or (life.ends is not None and record.offset > life.ends):
                continue
            (first, last) = record.ranges[0]
            assert last is not None
            if last < lowest:
                continue
            for entry in range(first, last + 1):
                state, deliveries = _state(look, life, records, entry)
                found[life.sub, entry, state, deliveries] += 1
                counted.add(entry)
        own = [record for record in records if record.what == "lost" and record.sub == life.sub]
        for entry in {entry for record in own for entry in _entries(record)}:
            if entry not in counted:
                state, deliveries = _state(look, life, records, entry)
                if state == "lost":
                    found[life.sub, entry, state, deliveries] += 1
    return found


def _entries(record: Record) -> list[int]:
    return [entry for first, last in record.ranges for entry in range(first, (last or first) + 1)]


def _state(look: Look, life: Life, records: list[Record], entry: int) -> tuple[str, int]:
    def mine(record: Record) -> bool:
        return (
            record.sub == life.sub
            and record.offset >= life.begins
            and (life.ends is None or record.offset <= life.ends)
        )

    own = [r.what for r in records if mine(r) and r.what not in STARTS and entry in _entries(r)]
    deliveries = own.count("delivered")
    starts = [mark.ranges[0][0] for mark, _ in life.marks]
    owed = starts[-1] if starts else 0
    moved = life.marks[-1][0].offset if life.marks else 0
    historic = max(
        [*starts, *(before + 1 for mark, before in life.marks if mark.what == "subscribed")], default=0
    )
    if "lost" in own:
        return "lost", deliveries
    if any(what in SETTLED for what in own):
        return "settled", deliveries
    if entry < owed or life.ends is not None:
        return "let_go", deliveries
    if entry >= look.latest:
        return "backlog", deliveries
    if entry in look.log:
        mode, position = look.positions.get(life.sub, ("", 0))
        passed = mode not in ("", "key_shared") and entry < position and moved < look.looked
        if passed and not deliveries:
            return "lost", deliveries
        return "backlog", deliveries
    if entry < historic:
        signs = [r for r in records if r.offset > moved and entry in _entries(r)]
        held = any(
            (r.what in HANDLED and r.sub != life.sub) or (r.what == "delivered" and mine(r)) for r in signs
        )
        held = held or any(_kept(other, records, entry, moved) for other in lives_of(look) if other != life)
        return "lost" if held else "not_owed", deliveries
    return "lost", deliveries


def _kept(other: Life, records: list[Record], entry: int, at: int) -> bool:
    """Whether another life owed an entry since its publish, and had not settled it before a record."""
    if not other.begins < at or (other.ends is not None and other.ends < at):
        return False
    marks = [(mark, before) for mark, before in other.marks if mark.offset < at]
    passed = [mark.ranges[0][0] for mark, _ in marks]
    passed += [before + 1 for mark, before in marks if mark.what == "subscribed"]
    done = [r for r in records if r.sub == other.sub and r.offset < at and r.what in (*SETTLED, "lost")]
    return entry >= max(passed, default=0) and not any(entry in _entries(r) for r in done)
