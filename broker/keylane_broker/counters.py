"""What a worker counts while it works: plain numbers, one addition a batch, that /metrics reads when asked.

Names of topics and subscriptions are bounded: what comes when there are enough of them counts as one more,
which is called OTHER.
"""

import time
from bisect import bisect_left
from collections.abc import Collection

MOST_TOPICS, MOST_SUBSCRIPTIONS = 500, 1_000
OTHER = "_other"  # no name begins like this

_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0, 3600.0),
)
_MESSAGES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)
DROPS = (
    *("silent", "not_greeted", "slow_reader", "unfinished_frame", "refused_publishes"),
    *("protocol_error", "token", "refused"),
)


class Histogram:
    """How many values were up to each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Take in a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class _NoHistogram(Histogram):
    def add(self, value: float) -> None:
        pass


class TopicCounts:
    """Messages of one topic."""

    __slots__ = ("duplicates", "expired", "no_subscribers", "published", "told_unowed")

    def __init__(self) -> None:
        self.published = 0
        self.duplicates = 0
        self.no_subscribers = 0
        self.expired = 0
        self.told_unowed = False  # that messages without a subscription come, in the log


class SubscriptionCounts:
    """Messages of one subscription."""

    __slots__ = (
        "acked",
        "dead_lettered",
        "delivered",
        "nacked",
        "redelivered",
        "released",
        "stale",
        "timed_out",
    )

    def __init__(self) -> None:
        self.delivered = 0
        self.redelivered = 0
        self.acked = 0
        self.nacked = 0
        self.released = 0
        self.timed_out = 0
        self.stale = 0
        self.dead_lettered = 0


class Counters:
    """All that one worker has counted since it started; without `timing` no clock is read."""

    def __init__(self, *, timing: bool = True) -> None:
        self.now = time.monotonic if timing else _no_time
        self._kind = Histogram if timing else _NoHistogram
        self.topics: dict[str, TopicCounts] = {}
        self.subscriptions: dict[tuple[str, str], SubscriptionCounts] = {}
        self.scripts: dict[str, Histogram] = {}
        self.publish_seconds = self._kind()
        self.delivery_seconds = self._kind()
        self.publish_batch = self._kind(_MESSAGES)
        self.delivery_batch = self._kind(_MESSAGES)
        self.ack_batch = self._kind(_MESSAGES)
        self.connections = 0  # that were accepted
        self.drops = dict.fromkeys(DROPS, 0)
        self.errors: dict[str, int] = {}  # answers, by their code
        self.leases_taken = 0
        self.leases_lost = 0
        self.handed_over = 0
        self.fenced = 0
        self.redis_reconnects = 0

    def topic(self, name: str) -> TopicCounts:
        """Return where the messages of a topic are counted."""
        if name not in self.topics and len(self.topics) >= MOST_TOPICS:
            name = OTHER
        return self.topics.setdefault(name, TopicCounts())

    def subscription(self, topic: str, name: str) -> SubscriptionCounts:
        """Return where the messages of a subscription are counted, for all consumers of a multicast one."""
        key = (topic, name.partition("@")[0])
        if key not in self.subscriptions and len(self.subscriptions) >= MOST_SUBSCRIPTIONS:
            key = (OTHER, OTHER)
        return self.subscriptions.setdefault(key, SubscriptionCounts())

    def forget_others(self, topics: Collection[str]) -> None:
        """Keep the counts of these topics, since the others are gone."""
        for topic in self.topics.keys() - topics - {OTHER}:
            del self.topics[topic]
        for key in [key for key in self.subscriptions if key[0] != OTHER and key[0] not in topics]:
            del self.subscriptions[key]

    def script_ran(self, script: str, began: float) -> None:
        """A script that was sent at `began` has been answered."""
        histogram = self.scripts.get(script)
        if histogram is None:
            histogram = self.scripts[script] = self._kind()
        histogram.add(self.now() - began)

    def refused(self, code: str) -> None:
        """A request is answered with an error."""
        self.errors[code] = self.errors.get(code, 0) + 1


def _no_time() -> float:
    return 0.0
