"""What an audit has found, and the verdict on it."""

from collections.abc import Iterable
from datetime import datetime
from typing import Literal

import msgspec

from pipeline.archived import ArchiveAudit
from pipeline.journal import Coverage
from pipeline.judgement import REASONS, LostMessage
from pipeline.latency import Latency

Verdict = Literal["complete", "incomplete", "unproven"]
STATUS: dict[Verdict, int] = {"complete": 0, "incomplete": 1, "unproven": 3}  # 2 is a mistake in the command

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
    archive: ArchiveAudit | None
    latency: list[Latency]
    latency_by_hour: list[Latency]
    activity: list[Bar]


def proof_of(part: Coverage, latest: int, since_ms: int) -> PartitionCoverage:
    """What the journal proves about a partition, of what was published at or after a time."""
    published = latest - 1
    unproven, why = min(part.first - 1, published), ""
    # Of the entries before the first one that is covered nobody knows when they were published; but before
    # the journal's oldest record they were, unless something is missing between it and them.
    if since_ms and since_ms >= ((part.first_ms if part.hole else part.began_ms) or _NEVER):
        unproven = 0
    if unproven and part.first >= latest:
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
) -> tuple[Verdict, list[str]]:
    """The verdict, and the sentences that say why."""
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
    if wrong:
        return "incomplete", wrong + doubts
    if doubts:
        return "unproven", doubts
    return "complete", [
        "every message that a subscription was owed has been delivered to it, or is in its backlog"
    ]


def _messages(count: int) -> str:
    return f"{count:,} message{'' if count == 1 else 's'}"
