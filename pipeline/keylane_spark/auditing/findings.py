"""What an audit has found, and the verdict on it."""

from collections.abc import Iterable
from datetime import datetime
from typing import Literal

import msgspec

from keylane.commandline.words import count_of
from keylane_spark.auditing.rules import REASONS, Coverage, Extent
from keylane_spark.snapshot import Snapshot

Verdict = Literal["complete", "incomplete", "unproven"]
STATUS: dict[Verdict, int] = {"complete": 0, "incomplete": 1, "unproven": 3}  # 2 is a mistake in the command

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

_NEVER = 2**62


class SubscriptionAudit(msgspec.Struct, frozen=True):
    """What became of the messages of a subscription; all partitions and lives of it together."""

    name: str
    messages: int  # published while it was there, and known to the journal
    settled: int
    backlog: int  # not settled yet, as `keylane subscription describe` has it
    let_go: int
    not_owed: int
    lost: int
    undelivered: int  # of the backlog, never delivered
    duplicates: int  # messages that were delivered more than once
    deliveries: int
    attempts: dict[str, int]  # how often delivered -> messages; the last one also stands for more
    transitions: dict[str, int]  # nacked, timed_out, ... -> messages, each time counted
    lost_by_reason: dict[str, int] = {}


class PartitionCoverage(msgspec.Struct, frozen=True):
    """Which entries of a partition the journal proves anything about."""

    partition: int
    published: int  # ever
    proven_from: int
    unproven: int
    why: str = ""


class Bar(msgspec.Struct, frozen=True):
    """What happened in a span of time."""

    at_ms: int
    transition: str
    messages: int


class LostMessage(msgspec.Struct, frozen=True):
    """A message that a subscription was owed and did not get."""

    message_id: str  # its ledger is "?" where its publish is not in the journal
    subscription: str
    partition: int
    entry: int
    reason: str
    published_ms: int | None = None
    key: str | None = None


class ArchiveAudit(msgspec.Struct, frozen=True):
    """What was found in an archive; listings are cut, counts are not.

    Rows of earlier topics of this name are `earlier`, and in no other count.
    """

    path: str
    subscription: str
    rows: int
    messages: int  # rows less duplicates
    duplicates: int
    committed: (
        int | None
    )  # messages that the archive's subscription has committed; None: it is not in the journal
    missing: int  # of these, not in the archive
    never_published: int
    unproven: int
    newer: int
    missing_ids: list[str] = []
    duplicate_ids: list[str] = []
    never_published_ids: list[str] = []
    earlier: int = 0


class Latency(msgspec.Struct, frozen=True):
    """Of the messages of a subscription that were published in a span of time; milliseconds."""

    subscription: str
    at_ms: int | None  # where the span begins; None: all of them
    what: str  # delivered (first) or acked
    messages: int
    p50: int
    p90: int
    p99: int
    max: int


class BodiesAudit(msgspec.Struct, frozen=True):
    """Whether the bodies of what is owed are there."""

    there: int  # messages in the log that have one, about
    checked: int
    missing: int  # of these, not in the payload store, owed or not


class Activity(msgspec.Struct, frozen=True):
    """What the journal tells, counted."""

    published: int
    transitions: dict[str, dict[str, int]]  # by subscription -> messages, each time counted
    bars: list[Bar]
    span_ms: int


class Audit(msgspec.Struct, frozen=True):
    """The result of an audit."""

    verdict: Verdict
    topic: str
    taken_at: datetime
    since: datetime | None
    why: list[str]  # the verdict, in sentences
    records: int  # rows of the journal
    messages: int  # whose publish is in it
    unproven: int
    coverage: list[PartitionCoverage]
    subscriptions: list[SubscriptionAudit]
    lost: list[LostMessage]  # the first ones; `lost_total` has all
    lost_total: int
    bodies: BodiesAudit | None  # None: they were not looked for
    archive: ArchiveAudit | None
    latency: list[Latency]
    latency_over_time: list[Latency]
    span_ms: int  # the width of a span of time, in latencies and activity
    activity: list[Bar]


def proof_of(part: Coverage, latest: int, since_ms: int) -> PartitionCoverage:
    """What the journal proves about a partition, of what was published at or after a time."""
    published = latest - 1
    unproven, why = min(part.first - 1, published), ""
    # Of the entries before the first one that is covered nobody knows when they were published; but before
    # the journal's oldest record they were, unless something is missing between it and them.
    if since_ms and since_ms >= ((part.first_ms if part.hole else part.began_ms) or _NEVER):
        unproven = 0
    if unproven and part.missing:
        why = f"{part.missing} of the journal {'is' if part.missing.startswith('record ') else 'are'} gone"
    elif unproven and part.first >= latest:
        why = "the journal is off, or has nothing of its publishes"
    elif unproven and part.hole:
        why = f"the journal was off before entry {part.first}"
    elif unproven:
        why = f"the journal begins at entry {part.first}"
    return PartitionCoverage(part.partition, published, part.first, unproven, why)


def verdict_of(
    proof: Iterable[PartitionCoverage],
    subscriptions: Iterable[SubscriptionAudit],
    archive: ArchiveAudit | None,
    bodies: BodiesAudit | None,
) -> tuple[Verdict, list[str]]:
    """The verdict, and the sentences that say why."""
    subscriptions = list(subscriptions)
    wrong = [
        f"{subscription.name}: {_messages(count)} lost: {REASONS[reason]}"
        for subscription in subscriptions
        for reason, count in subscription.lost_by_reason.items()
    ]
    if archive is not None:
        if archive.missing:
            wrong.append(
                f"the archive lacks {_messages(archive.missing)} that {archive.subscription} has committed"
            )
        if archive.never_published:
            wrong.append(f"the archive has {_messages(archive.never_published)} that were never published")
    doubts = [
        f"partition {part.partition}: {_messages(part.unproven)} unproven: {part.why}"
        for part in proof
        if part.unproven
    ]
    if archive is not None and archive.committed is None:
        doubts.append(
            f"the archive: unproven, since the journal has no subscription {archive.subscription!r}; "
            "name the archive's with --archive-subscription"
        )
    notes = []
    if bodies is None:
        notes.append("bodies not checked")
    elif bodies.checked < bodies.there:
        notes.append(f"bodies of {bodies.checked:,} of {_messages(bodies.there)} in the log checked")
    if archive is not None and archive.earlier:
        notes.append(f"the archive also has {_messages(archive.earlier)} of earlier topics of this name")
    if wrong:
        return "incomplete", wrong + doubts + notes
    if doubts:
        return "unproven", doubts + notes
    fine = "every message that a subscription was owed has been delivered to it, or is in its backlog"
    if not any(subscription.messages for subscription in subscriptions):
        fine = "no message was judged: none is owed to a subscription, of the time that was asked for"
    return "complete", [fine, *notes]


def conclude(
    seen: Snapshot,
    since: datetime | None,
    coverage: Iterable[Coverage],
    extent: Extent,
    activity: Activity,
    subscriptions: list[SubscriptionAudit],
    lost: list[LostMessage],
    checked: ArchiveAudit | None,
    latencies: list[Latency],
) -> Audit:
    """The audit, from all that was found."""
    proof = [
        proof_of(part, at.latest, milliseconds(since))
        for part, at in zip(coverage, seen.partitions, strict=True)
    ]
    bodies = None
    if (at := seen.bodies) is not None:
        gone = sum(last - first + 1 for ranges in at.missing.values() for first, last in ranges)
        bodies = BodiesAudit(at.there, at.checked, gone)
    verdict, why = verdict_of(proof, subscriptions, checked, bodies)
    return Audit(
        verdict=verdict,
        topic=seen.topic,
        taken_at=seen.taken_at,
        since=since,
        why=why,
        records=extent.rows,
        messages=activity.published,
        unproven=sum(part.unproven for part in proof),
        coverage=proof,
        subscriptions=subscriptions,
        lost=lost,
        lost_total=sum(subscription.lost for subscription in subscriptions),
        bodies=bodies,
        archive=checked,
        latency=[line for line in latencies if line.at_ms is None],
        latency_over_time=[line for line in latencies if line.at_ms is not None],
        span_ms=activity.span_ms,
        activity=activity.bars,
    )


def milliseconds(since: datetime | None) -> int:
    """A time in ms, 0 for none."""
    return 0 if since is None else int(since.timestamp() * 1_000)


def _messages(number: int) -> str:
    return count_of(number, "message")
