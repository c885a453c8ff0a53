"""The rules of the audit, for both that follow them: the job on Spark, and the plain one without.

A subscription has a **life** in each partition from `subscribed` to `unsubscribed`; one that was there before
the journal begins has a life without a beginning.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

import msgspec

from keylane_spark.snapshot import PartitionState, Snapshot

FOREVER = 2**62  # an offset after all others

# States of messages for a subscription. Of these only `lost` is a failure.
SETTLED = (
    "settled"  # acked, committed, dead-lettered, expired, skipped, deleted, redriven, purged or filtered
)
BACKLOG = "backlog"  # not settled yet: in the log, or newer than the first look at it
LET_GO = "let_go"  # the subscription was deleted, or sought past it
NOT_OWED = "not_owed"  # older than the subscription, and no sign that it was still in the log then
LOST = "lost"
STATES = (SETTLED, BACKLOG, LET_GO, NOT_OWED, LOST)

REASONS = {
    "missing": "the worker that leased it did not find it in the log",
    "undelivered": "never delivered, and not in the log any more",
    "unsettled": "delivered, not settled, and not in the log any more",
    "passed_over": "in the log, but the subscription has passed it without a delivery",
    "no_body": "in the log, but its body is not in the payload store",
}

# What became of a row of the archive.
FINE = "fine"
UNPROVEN = "unproven"  # from before the journal
NEWER = "newer"  # from after it
FOREIGN = "never_published"

LEDGER = r"^\d+:(\d{1,18})-\d+$"  # in the id of a message

# What a range can be to a life.
PUBLISHED, DELIVERED, ACKED, SETTLED_OTHERWISE, MISSING, IN_LOG, NO_BODY, HELD, ARCHIVED, CUT = range(10)
KINDS = {
    "published": PUBLISHED,
    "delivered": DELIVERED,
    "acked": ACKED,
    "committed": ACKED,
    "dead_lettered": SETTLED_OTHERWISE,
    "expired": SETTLED_OTHERWISE,
    "skipped": SETTLED_OTHERWISE,
    "deleted": SETTLED_OTHERWISE,
    "filtered": SETTLED_OTHERWISE,
    "redriven": SETTLED_OTHERWISE,
    "purged": SETTLED_OTHERWISE,
    "lost": MISSING,
}
# Signs that an entry was in the log: of others, since it was settled. A commit is none: it passes holes, too.
HANDLED = ("acked", "dead_lettered", "expired", "skipped", "deleted", "filtered", "redriven", "purged")
# After one of these the subscription does not keep an entry in the log any more.
DONE = (ACKED, SETTLED_OTHERWISE, MISSING)

_STARTS = ("subscribed", "sought")
LIFE = (*_STARTS, "unsubscribed")


class Coverage(msgspec.Struct, frozen=True):
    """What the journal covers of a partition: entries from `first` to before `end`, without a hole."""

    partition: int
    first: int  # what was published before it is unproven
    end: int
    began_ms: int | None  # its oldest record
    first_ms: int | None  # when `first` was published
    hole: bool  # whether it misses publishes in between, and not just its beginning
    missing: str = ""  # records that should be there: what was before them does not count


class Published(NamedTuple):
    """What the journal has of the publishes of a partition."""

    first: int  # of the last stretch of entries without a hole
    first_ms: int
    end: int
    hole: bool


class Extent(msgspec.Struct, frozen=True):
    """How much journal there is, and of which time."""

    began_ms: dict[int, int]  # by partition
    ended_ms: int
    rows: int


class Mark(NamedTuple):
    """A record about a subscription, with the last entry that was published before it, 0 for none."""

    partition: int
    subscription: str
    offset: int
    transition: str
    first: int
    before: int


class Life(msgspec.Struct, frozen=True):
    """A life, from which to which record, and what was owed.

    `owed` is the first entry owed at the end; `lowest` the lowest that ever was. Entries before `historic`
    had been published, or passed, when the subscription was made or moved to `owed` (by record `moved`): it
    is owed those that were still in the log. `mode` is "" and `position` 0 unless it is there now.
    """

    number: int
    partition: int
    subscription: str
    begins: int
    ends: int
    owed: int
    moved: int
    lowest: int
    historic: int
    mode: str
    position: int


class Witness(NamedTuple):
    """A subscription that was owed entries first..last since their publish when a life began or moved.

    Those of them that it had not settled `before` this record were in the log then, so the life is owed them.
    """

    witness: int
    number: int  # of the life
    partition: int
    subscription: str
    first: int
    last: int
    before: int


class Trust(NamedTuple):
    """From which record on a partition's journal has no hole, and what is missing before that."""

    start: int
    missing: str = ""


def trust_of(state: PartitionState, there: Sequence[tuple[int, int]]) -> Trust:
    """What to make of the records that were read, as ranges of their numbers, in order.

    Numbers are consecutive, and the broker has said which one was to be the last.
    """
    end = state.journal_end
    if end <= state.journal_earliest:  # there is nothing, or it was gone when the journal had been read
        return Trust(max(end, state.journal_earliest))
    last = there[-1][1] if there else state.journal_earliest - 1
    if last < end - 1:
        return Trust(end, _numbers(last + 1, end - 1))
    begin = there[-1][0]
    if begin <= state.journal_earliest:
        return Trust(state.journal_earliest)
    before = there[-2][1] if len(there) > 1 else state.journal_earliest - 1
    return Trust(begin, _numbers(max(before + 1, state.journal_earliest), begin - 1))


def _numbers(first: int, last: int) -> str:
    return f"record {first}" if first == last else f"records {first} to {last}"


def oldest_ledger(incarnation: int, ledgers: Iterable[str]) -> int:
    """The ledger before which all are of earlier topics of the name; 0 where nobody knows.

    Both numbers are times, and a topic gets its own before its ledgers; should the clock have been set back
    in between, those in the journal are its own all the same.
    """
    return min([incarnation, *(int(ledger) for ledger in ledgers if ledger.isdecimal())])


def coverage_of(
    snapshot: Snapshot, found: dict[int, Published], extent: Extent, trust: Sequence[Trust]
) -> list[Coverage]:
    """For each partition, the last stretch of entries whose publish is in the journal without a hole."""
    covered = []
    for state, trusted in zip(snapshot.partitions, trust, strict=True):
        of, began_ms = found.get(state.partition), extent.began_ms.get(state.partition)
        if of is None or of.end < state.latest or not snapshot.journal:  # it is off, or was when these came
            first, end, first_ms, hole = state.latest, state.latest, None, of is not None
        else:
            first, end, first_ms, hole = of.first, of.end, of.first_ms, of.hole
        covered.append(Coverage(state.partition, first, end, began_ms, first_ms, hole, trusted.missing))
    return covered


def lives_of(marks: Iterable[Mark], seen: Iterable[tuple[int, str]], snapshot: Snapshot) -> list[Life]:
    """All lives; `seen` are the partitions and subscriptions of all records."""
    groups: dict[tuple[int, str], list[list[Mark]]] = defaultdict(list)
    for mark in sorted(marks, key=lambda mark: (mark.partition, mark.subscription, mark.offset)):
        of = groups[mark.partition, mark.subscription]
        if mark.transition == "subscribed" or not of:
            of.append([])
        of[-1].append(mark)
    now = {
        (partition, subscription.name): (subscription.mode, position)
        for subscription in snapshot.subscriptions
        for partition, position in enumerate(subscription.positions)
        if position is not None
    }
    for place in (*seen, *now):
        groups.setdefault(place, [[]])
    number = count(1)
    return [
        _life(next(number), *place, mine, now.get(place, ("", 0)))
        for place in sorted(groups)
        for mine in groups[place]
    ]


def witnesses_of(lives: Sequence[Life], marks: Iterable[Mark]) -> list[Witness]:
    """Who else knows what was in the log when the lives that are there now began or moved."""
    starts: dict[tuple[int, str], list[Mark]] = defaultdict(list)
    for mark in marks:
        if mark.transition in _STARTS:
            starts[mark.partition, mark.subscription].append(mark)
    newest = {(life.partition, life.subscription): life for life in lives}
    sure: dict[int, list[Life]] = defaultdict(list)
    for life in lives:  # one without an end that is not there now has an end that nobody knows
        if life.ends < FOREVER or (life.mode and newest[life.partition, life.subscription] is life):
            sure[life.partition].append(life)
    found: list[Witness] = []
    for life in lives:
        if life.ends < FOREVER or life.historic <= life.owed:
            continue
        for other in sure[life.partition]:
            if other.subscription != life.subscription and other.begins < life.moved < other.ends:
                before = [
                    mark
                    for mark in starts[other.partition, other.subscription]
                    if other.begins <= mark.offset < life.moved
                ]
                first = max(life.owed, _historic(before))
                if first < life.historic:
                    place = (life.partition, other.subscription)
                    found.append(
                        Witness(len(found) + 1, life.number, *place, first, life.historic - 1, life.moved)
                    )
    return found


def _historic(starts: Iterable[Mark]) -> int:
    """From which entry on all are owed since their publish."""
    passed = ((mark.first, mark.before + 1 if mark.transition == "subscribed" else 0) for mark in starts)
    return max((max(pair) for pair in passed), default=0)


def _life(number: int, partition: int, subscription: str, marks: list[Mark], now: tuple[str, int]) -> Life:
    begins = min((mark.offset for mark in marks if mark.transition == "subscribed"), default=0)
    ends = max((mark.offset for mark in marks if mark.transition == "unsubscribed"), default=FOREVER)
    starts = [mark for mark in marks if mark.transition in _STARTS]
    mode, position = now if ends == FOREVER else ("", 0)
    return Life(
        number=number,
        partition=partition,
        subscription=subscription,
        begins=begins,
        ends=ends,
        owed=starts[-1].first if starts else 0,
        moved=starts[-1].offset if starts else 0,
        lowest=min((mark.first for mark in starts), default=0) if begins else 0,
        historic=_historic(starts),
        mode=mode,
        position=position,
    )


Choose = Callable[..., Any]  # choose((condition, value), …, otherwise=value), of columns or arrays


def reason_of(row: Any, choose: Choose) -> Any:
    """Why a stretch of entries is lost for a life; "" if it is not.

    `row` has what is known of the stretch, of its life and of the coverage, as columns or as arrays.
    """
    settled, delivered, there = row.settled > 0, row.delivered > 0, row.in_log > 0
    over, past, newer = row.ends < FOREVER, row.first < row.owed, row.first >= row.latest
    older = (row.first < row.historic) & (row.held == 0) & ~there
    # With lanes by key the cursor passes what must wait behind others of its key: there it says nothing. The
    # position was read before the journal: of one that has moved back since it is not the position any more.
    passed = (row.mode != "key_shared") & (row.first < row.position) & (row.moved < row.looked)
    return choose(
        (row.missing > 0, "missing"),
        (settled | past | over | newer, ""),
        (there & ~delivered & passed, "passed_over"),
        # Bodies are looked for before the journal is read: one that was deleted when its message was settled
        # is that of a settled message.
        (there & (row.no_body > 0), "no_body"),
        (there | older, ""),
        (delivered, "unsettled"),
        otherwise="undelivered",
    )


def state_of(row: Any, choose: Choose) -> Any:
    """The state of a stretch of entries for a life, once the `reason` is known."""
    there, newer = row.in_log > 0, row.first >= row.latest
    over, past = row.ends < FOREVER, row.first < row.owed
    return choose(
        (row.reason != "", LOST),
        (row.settled > 0, SETTLED),
        (past | over, LET_GO),
        (~there & ~newer, NOT_OWED),
        otherwise=BACKLOG,
    )
