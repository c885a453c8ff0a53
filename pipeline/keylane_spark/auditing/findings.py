"""What an audit has found."""

from datetime import datetime
from typing import Literal

import msgspec

Verdict = Literal["complete", "incomplete", "unproven"]
STATUS: dict[Verdict, int] = {"complete": 0, "incomplete": 1, "unproven": 3}  # 2 is a mistake in the command

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


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
