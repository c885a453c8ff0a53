"""Counting: what became of the messages of each subscription, and what happened when."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from keylane_spark.auditing.findings import Activity, Bar, SubscriptionAudit
from keylane_spark.auditing.rules import BACKLOG, LOST, STATES, Extent
from keylane_spark.reports.spans import width_of

BARS = 120  # of activity over time
MOST_ATTEMPTS = 10  # told apart
_MARKS = ("begun", "subscribed", "sought", "unsubscribed", "moved")


class Count(NamedTuple):
    """How many messages of a subscription are in a state, by deliveries: up to MOST_ATTEMPTS, and all."""

    subscription: str
    state: str
    reason: str
    attempts: int
    messages: int
    deliveries: int


class Happening(NamedTuple):
    """How many messages a transition was about, in a span of time."""

    subscription: str
    transition: str
    bar: int
    messages: int


def tally_subscriptions(counts: Iterable[Count], activity: Activity) -> list[SubscriptionAudit]:
    """One line for each subscription."""
    by_name: dict[str, list[Count]] = {name: [] for name in activity.transitions}
    for count in counts:
        by_name.setdefault(count.subscription, []).append(count)
    return [_one(name, by_name[name], activity.transitions.get(name, {})) for name in sorted(by_name)]


def _one(name: str, counts: list[Count], transitions: dict[str, int]) -> SubscriptionAudit:
    states = dict.fromkeys(STATES, 0)
    reasons: dict[str, int] = {}
    attempts: dict[int, int] = defaultdict(int)
    for count in counts:
        states[count.state] += count.messages
        if count.state == LOST:
            reasons[count.reason] = reasons.get(count.reason, 0) + count.messages
        if count.attempts:
            attempts[count.attempts] += count.messages
    return SubscriptionAudit(
        name=name,
        messages=sum(states.values()),
        **states,
        undelivered=sum(one.messages for one in counts if one.state == BACKLOG and not one.attempts),
        duplicates=sum(messages for times, messages in attempts.items() if times > 1),
        deliveries=sum(count.deliveries for count in counts),
        attempts={str(times): attempts[times] for times in sorted(attempts)},
        transitions=dict(sorted(transitions.items())),
        lost_by_reason=dict(sorted(reasons.items())),
    )


def bars_of(extent: Extent, since_ms: int) -> tuple[int, int]:
    """Where the first bar of activity begins, and how long each is, in ms."""
    least = max(since_ms, min(extent.began_ms.values(), default=0))
    width = width_of(extent.ended_ms - least, BARS)
    return least // width * width, width


def tally_activity(happened: Iterable[Happening], extent: Extent, since_ms: int) -> Activity:
    """Messages by subscription and transition, and by transition over time, in so many bars."""
    least, width = bars_of(extent, since_ms)
    transitions: dict[str, dict[str, int]] = {}
    bars: dict[tuple[int, str], int] = defaultdict(int)
    for one in sorted(happened, key=lambda one: (one.bar, one.transition, one.subscription)):
        if one.subscription:
            mine = transitions.setdefault(one.subscription, {})
            mine[one.transition] = mine.get(one.transition, 0) + one.messages
        if one.transition not in _MARKS:
            bars[one.bar, one.transition] += one.messages
    return Activity(
        sum(messages for (_, transition), messages in bars.items() if transition == "published"),
        transitions,
        [Bar(least + bar * width, transition, messages) for (bar, transition), messages in bars.items()],
        width,
    )
