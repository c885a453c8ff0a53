"""What `keylane top` shows: rates from two looks at the cluster, and the tables of them."""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from keylane.types import ClusterReport, SubscriptionInfo, TopicInfo

__all__ = ["TOPIC_COLUMNS", "Look", "SubscriptionLoad", "Top", "TopicLoad", "fitting", "top_of", "topic_rows"]

TOPIC_COLUMNS = [
    *("topic", "subscription", "in/s", "out/s", "backlog", "leased", "waiting", "consumers", "state"),
]
_DETAILS = ("leased", "waiting")  # parts of the backlog
_WIDE = 100  # characters, in which there is room for these


class Look(msgspec.Struct, frozen=True):
    """The cluster at one moment; `seconds` is the moment by the clock of this machine."""

    seconds: float
    time: datetime
    report: ClusterReport
    topics: dict[str, TopicInfo]
    subscriptions: dict[tuple[str, str], SubscriptionInfo]


class SubscriptionLoad(msgspec.Struct, frozen=True):
    """A subscription, and how fast it settles."""

    name: str
    mode: str
    backlog: int
    leased: int
    waiting: int
    consumers: int
    paused: bool
    settled_per_second: float


class TopicLoad(msgspec.Struct, frozen=True):
    """A topic, and how fast it is published to."""

    name: str
    partitions: int
    messages: int
    delayed: int
    published_per_second: float
    subscriptions: list[SubscriptionLoad]


class Top(msgspec.Struct, frozen=True):
    """What `keylane top --json` prints; `left_out` is how many topics are not in it."""

    time: datetime
    topics: list[TopicLoad]
    left_out: int
    cluster: ClusterReport


def top_of(before: Look, now: Look, most: int) -> Top:
    """Return the busiest topics, at most so many; what was not there before has no rates yet."""
    seconds = max(now.seconds - before.seconds, 0.001)
    loads = [_topic(name, before, now, seconds) for name in now.topics]
    loads.sort(key=_by_load)
    return Top(now.time, loads[:most], max(len(loads) - most, 0), now.report)


def _by_load(load: TopicLoad) -> tuple[float, int, str]:
    settled = sum(one.settled_per_second for one in load.subscriptions)
    return -load.published_per_second - settled, -sum(one.backlog for one in load.subscriptions), load.name


def _topic(name: str, before: Look, now: Look, seconds: float) -> TopicLoad:
    about, then = now.topics[name], before.topics.get(name)
    published = max(about.published - then.published, 0) if then else 0
    return TopicLoad(
        name,
        about.partitions,
        about.messages,
        about.delayed,
        round(published / seconds, 1),
        [
            _subscription(one, before.subscriptions.get((name, one.name)), published, seconds)
            for (topic, _), one in sorted(now.subscriptions.items())
            if topic == name
        ],
    )


def _subscription(
    about: SubscriptionInfo, then: SubscriptionInfo | None, published: int, seconds: float
) -> SubscriptionLoad:
    """What was published and is not in the backlog has been settled."""
    settled = max(then.backlog + published - about.backlog, 0) if then else 0
    return SubscriptionLoad(
        about.name,
        about.mode,
        about.backlog,
        about.leased,
        about.waiting,
        len(about.consumers),
        about.paused,
        round(settled / seconds, 1),
    )


def topic_rows(top: Top) -> list[Sequence[object]]:
    """A line for each subscription; the topic is named in the first."""
    rows: list[Sequence[object]] = []
    first: tuple[object, ...]
    for topic in top.topics:
        first = (topic.name, round(topic.published_per_second))
        if not topic.subscriptions:
            rows.append((first[0], None, *first[1:], None, topic.messages, None, None, None, "unsubscribed"))
        for one in topic.subscriptions:
            rows.append(
                (
                    first[0],
                    one.name,
                    *first[1:],
                    round(one.settled_per_second),
                    one.backlog,
                    one.leased,
                    one.waiting,
                    one.consumers,
                    _state(one),
                )
            )
            first = ("", "")
    return rows


def fitting(rows: list[Sequence[object]], width: int) -> tuple[list[str], list[Sequence[object]]]:
    """Columns and rows for a terminal of a width: a narrow one has no room for all without broken words."""
    shown = [place for place, name in enumerate(TOPIC_COLUMNS) if width >= _WIDE or name not in _DETAILS]
    return [TOPIC_COLUMNS[place] for place in shown], [[row[place] for place in shown] for row in rows]


def _state(one: SubscriptionLoad) -> str:
    if one.paused:
        return "paused"
    return "no consumer" if one.backlog and not one.consumers else "ok"
