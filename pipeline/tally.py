"""Counting: what became of the messages of each subscription, and what happened when."""

from collections import defaultdict
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline import judgement
from pipeline.findings import Bar, SubscriptionAudit
from pipeline.journal import millis

BARS = 120  # of activity over time
MOST_ATTEMPTS = 10  # told apart
STATES = ("settled", "in_flight", "waiting", "let_go", "not_owed", "lost")
_MARKS = ("subscribed", "sought", "unsubscribed", "moved")


def tally_subscriptions(judged: DataFrame, journal: DataFrame, since_ms: int) -> list[SubscriptionAudit]:
    """One line for each subscription."""
    attempts = F.least(F.col("delivered"), F.lit(MOST_ATTEMPTS))
    rows = (
        judged.groupBy("subscription", "state", "reason", attempts.alias("attempts"))
        .agg(
            F.sum("entries").alias("messages"),
            F.sum(F.col("entries") * F.col("delivered")).alias("deliveries"),
        )
        .collect()
    )
    totals = (
        journal.where((F.col("subscription") != "") & (millis() >= since_ms))
        .groupBy("subscription", "transition")
        .agg(F.sum(F.coalesce(F.col("last") - F.col("first"), F.lit(0)) + 1).alias("messages"))
        .collect()
    )
    by_name: dict[str, list[Any]] = defaultdict(list)
    transitions: dict[str, dict[str, int]] = defaultdict(dict)
    for row in rows:
        by_name[row.subscription].append(row)
    for row in sorted(totals, key=lambda row: row.transition):
        transitions[row.subscription][row.transition] = row.messages
    return [
        _one(name, by_name[name], transitions[name]) for name in sorted(by_name.keys() | transitions.keys())
    ]


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
        duplicates=sum(count for times, count in attempts.items() if times > 1),
        deliveries=sum(row.deliveries for row in rows),
        attempts={str(times): attempts[times] for times in sorted(attempts)},
        transitions=transitions,
        lost_by_reason=reasons,
    )


def tally_activity(journal: DataFrame, since_ms: int) -> tuple[int, int, list[Bar]]:
    """Rows and published messages in the journal, and messages by transition over time, in so many bars."""
    rows = journal.where((millis() >= since_ms) & ~F.col("transition").isin(*_MARKS))
    span = rows.agg(
        F.min(millis()).alias("least"), F.max(millis()).alias("most"), F.count("*").alias("rows")
    ).first()
    if span is None or span.rows == 0:
        return 0, 0, []
    width = max(1_000, -(-(span.most - span.least + 1) // BARS))
    bars = (
        rows.groupBy(F.floor((millis() - span.least) / width).alias("bar"), "transition")
        .agg(F.sum(F.col("last") - F.col("first") + 1).alias("messages"))
        .orderBy("bar", "transition")
        .collect()
    )
    published = sum(row.messages for row in bars if row.transition == "published")
    return (
        span.rows,
        published,
        [Bar(span.least + row.bar * width, row.transition, row.messages) for row in bars],
    )
