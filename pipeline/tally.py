"""Counting: what became of the messages of each subscription, and what happened when."""

from collections import defaultdict
from typing import Any

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline import judgement
from pipeline.findings import Bar, SubscriptionAudit
from pipeline.journal import Extent, millis

BARS = 120  # of activity over time
MOST_ATTEMPTS = 10  # told apart
STATES = ("settled", "backlog", "let_go", "not_owed", "lost")
_MARKS = ("begun", "subscribed", "sought", "unsubscribed", "moved")


class Activity(msgspec.Struct, frozen=True):
    """What the journal tells, counted."""

    published: int
    transitions: dict[str, dict[str, int]]  # by subscription -> messages, each time counted
    bars: list[Bar]


def tally_subscriptions(judged: DataFrame, activity: Activity) -> list[SubscriptionAudit]:
    """One line for each subscription."""
    attempts = F.least(F.col("delivered"), F.lit(MOST_ATTEMPTS))
    deliveries = F.sum(F.col("entries") * F.col("delivered"))
    rows = (
        judged.groupBy("subscription", "state", "reason", attempts.alias("attempts"))
        .agg(F.sum("entries").alias("messages"), deliveries.alias("deliveries"))
        .collect()
    )
    by_name: dict[str, list[Any]] = {name: [] for name in activity.transitions}
    for row in rows:
        by_name.setdefault(row.subscription, []).append(row)
    return [_one(name, by_name[name], activity.transitions.get(name, {})) for name in sorted(by_name)]


def _one(name: str, rows: list[Any], transitions: dict[str, int]) -> SubscriptionAudit:
    states = dict.fromkeys(STATES, 0)
    reasons: dict[str, int] = {}
    attempts: dict[int, int] = defaultdict(int)
    for row in rows:
        states[row.state] += row.messages
        if row.state == judgement.LOST:
            reasons[row.reason] = reasons.get(row.reason, 0) + row.messages
        if row.attempts:
            attempts[row.attempts] += row.messages
    return SubscriptionAudit(
        name=name,
        messages=sum(states.values()),
        **states,
        undelivered=sum(row.messages for row in rows if row.state == judgement.BACKLOG and not row.attempts),
        duplicates=sum(count for times, count in attempts.items() if times > 1),
        deliveries=sum(row.deliveries for row in rows),
        attempts={str(times): attempts[times] for times in sorted(attempts)},
        transitions=transitions,
        lost_by_reason=reasons,
    )


def tally_activity(journal: DataFrame, extent: Extent, since_ms: int) -> Activity:
    """Messages by subscription and transition, and by transition over time, in so many bars."""
    least = max(since_ms, min(extent.began_ms.values(), default=0))
    width = max(1_000, -(-(extent.ended_ms - least + 1) // BARS))
    rows = (
        journal.where(millis() >= since_ms)
        .groupBy("subscription", "transition", F.floor((millis() - least) / width).alias("bar"))
        .agg(F.sum(F.coalesce(F.col("last") - F.col("first"), F.lit(0)) + 1).alias("messages"))
        .collect()
    )
    transitions: dict[str, dict[str, int]] = {}
    bars: dict[tuple[int, str], int] = defaultdict(int)
    for row in sorted(rows, key=lambda row: (row.bar, row.transition)):
        if row.subscription:
            mine = transitions.setdefault(row.subscription, {})
            mine[row.transition] = mine.get(row.transition, 0) + row.messages
        if row.transition not in _MARKS:
            bars[row.bar, row.transition] += row.messages
    return Activity(
        sum(messages for (_, transition), messages in bars.items() if transition == "published"),
        transitions,
        [Bar(least + bar * width, transition, messages) for (bar, transition), messages in bars.items()],
    )
