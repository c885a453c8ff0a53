"""The verdict of an audit: complete, incomplete or unproven, and why."""

from collections.abc import Iterable
from datetime import datetime

from keylane.commandline.words import count_of
from keylane_spark.auditing.findings import (
    Activity,
    ArchiveAudit,
    Audit,
    BodiesAudit,
    Latency,
    LostMessage,
    PartitionCoverage,
    SubscriptionAudit,
    Verdict,
)
from keylane_spark.auditing.rules import REASONS, Coverage, Extent
from keylane_spark.snapshot import Snapshot

_NEVER = 2**62


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
