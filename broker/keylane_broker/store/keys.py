"""Every key name, and the rules for the names inside them; docs/keyspace.md shows each to an operator."""

import re
from functools import lru_cache
from typing import NamedTuple

from keylane.errors import InvalidName

TOPICS = "kl:topics"  # all topics, each by its incarnation
INCARNATION = "kl:incarnation"  # the number that was given last to a topic or a subscription
WORKERS = "kl:workers"  # the workers, by their last heartbeat
CONTROLLER = "kl:controller"  # the worker that places partitions
OWNERS = "kl:owners"  # which worker is to own which partition
REMAINS = "kl:remains"  # partitions of deleted topics whose bodies are not deleted yet
TOKENS = "kl:tokens"  # who is let in
EVENTS = "kl:events"  # a channel: hints to all workers that something has changed

PLACE = "@"  # between a multicast subscription and its consumer in the name of the place that it has there

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def check_name(kind: str, name: str) -> str:
    """Return the name, or raise InvalidName: letters, digits, `.`, `_` and `-`, at most 200 of them."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidName(
            f"{kind} name {_shorten(name)} is not allowed: 1 to 200 letters, digits, '.', '_' or '-', "
            "the first a letter or digit"
        )
    return name


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def topic_key(topic: str) -> str:
    """Return the key of the topic's own hash, in a slot of its own."""
    return f"kl:topic:{topic}"


def records_key(topic: str) -> str:
    """Return the key of the records of the topic's subscriptions, in the slot of the topic's own hash."""
    return f"{{{topic_key(topic)}}}:subs"


def worker_key(worker: str) -> str:
    """Return the key of what a worker says of itself."""
    return f"kl:worker:{worker}"


class SubscriptionKeys(NamedTuple):
    """The keys of a subscription's scripts, in the order that lua/lib/subscription.lua names them."""

    lease: str
    meta: str
    log: str
    subs: str
    sub: str
    lanes: str
    runs: str
    deadlines: str
    ready: str
    queue: str
    beyond: str
    retries: str
    consumers: str
    charged: str
    skipped: str
    journal: str
    bodies: str

    @property
    def matches(self) -> str:
        """What a filtered subscription is owed up to its cursor, and has not been given."""
        return self.sub + MATCHES

    def leases(self, consumer: str) -> str:
        """Return the key of what one consumer holds; lua/lib/holders.lua names these keys."""
        return f"{self.deadlines}:{consumer}"

    @property
    def parked(self) -> str:
        """Why lanes are parked; lua/lib/poison.lua names this key."""
        return self.sub + PARKED


class PartitionKeys(NamedTuple):
    """The keys of one partition; all share one hash tag, so they live in one slot."""

    lease: str
    meta: str
    log: str
    subs: str
    marks_0: str
    marks_1: str
    journal: str

    @classmethod
    def of(cls, topic: str, partition: int) -> "PartitionKeys":
        """Name the keys of a partition."""
        base = f"kl:{{{topic}:{partition}}}:"
        parts = ("lease", "meta", "log", "subs", "marks:0", "marks:1", "journal")
        return cls(*(base + part for part in parts))

    @property
    def delayed(self) -> str:
        """Which messages wait for their time, by when that is."""
        return self.lease.removesuffix("lease") + "delayed"

    @property
    def delayed_data(self) -> str:
        """What these messages are."""
        return self.delayed + ":data"

    @property
    def producers(self) -> tuple[str, str]:
        """What producers have numbered, beside each generation of marks; lua/lib/dedupe.lua names these."""
        return self.marks_0 + ":producers", self.marks_1 + ":producers"

    @property
    def bodies(self) -> str:
        """Which bodies are to be deleted from the payload store."""
        return self.lease.removesuffix("lease") + "bodies"

    @property
    def retained(self) -> str:
        """What was settled and stays for a while, by when that was; lua/lib/retention.lua names it, too."""
        return self.lease.removesuffix("lease") + "retained"

    @property
    def filters(self) -> str:
        """The filters of subscriptions that have one, by subscription."""
        return self.lease.removesuffix("lease") + "filters"

    @property
    def expiring(self) -> str:
        """Which messages expire, by when; lua/lib/expiry.lua names it, too, as the next."""
        return self.lease.removesuffix("lease") + "expiring"

    @property
    def overdue(self) -> str:
        """Which have expired, and somebody may finish."""
        return self.lease.removesuffix("lease") + "overdue"

    @property
    def priority(self) -> str:
        """Which messages have a priority; lua/lib/priority.lua names it."""
        return self.lease.removesuffix("lease") + "priority"

    @property
    def expired(self) -> str:
        """What has expired of late; lua/lib/expiry.lua names it."""
        return self.lease.removesuffix("lease") + "expired"

    @property
    def dead(self) -> str:
        """Which messages have become dead letters, and are not on their way yet."""
        return self.lease.removesuffix("lease") + "dead"

    @property
    def outbox(self) -> str:
        """Messages that are on their way to other topics."""
        return self.lease.removesuffix("lease") + "outbox"

    @property
    def held(self) -> str:
        """Which entries dead letters hold, whose bodies they have."""
        return self.lease.removesuffix("lease") + "held"

    @property
    def received(self) -> str:
        """What was taken in last from each outbox."""
        return self.lease.removesuffix("lease") + "received"

    @property
    def subscription_prefix(self) -> str:
        """What the name of every subscription's key starts with."""
        return self.lease.removesuffix("lease") + "sub:"

    def subscription(self, name: str) -> SubscriptionKeys:
        """Name the keys of one subscription."""
        own = (self.subscription_prefix + name + suffix for suffix in SUBSCRIPTION_SUFFIXES)
        return SubscriptionKeys._make(
            (self.lease, self.meta, self.log, self.subs, *own, self.journal, self.bodies)
        )


KEPT = 16_384  # partitions, and subscriptions on them, whose keys are kept: some 3 KB each
partition_keys = lru_cache(maxsize=KEPT)(PartitionKeys.of)


@lru_cache(maxsize=KEPT)
def subscription_keys(topic: str, partition: int, subscription: str) -> SubscriptionKeys:
    """Return the keys of a subscription on one partition."""
    for part in subscription.split(PLACE, 1) if isinstance(subscription, str) else [subscription]:
        check_name("subscription", part)
    return partition_keys(topic, partition).subscription(subscription)


def partition_of(key: str) -> tuple[str, int]:
    """Return the topic and the number of the partition that a key belongs to."""
    topic, _, number = key[key.index("{") + 1 : key.index("}")].rpartition(":")
    return topic, int(number)


PARKED = ":parked"  # lists lanes that have stopped
HOLDERS = ":deadlines"  # lists who holds leases; those of each are in a key of its own
SUBSCRIPTION_SUFFIXES = (
    "",
    ":lanes",
    ":runs",
    HOLDERS,
    ":ready",
    ":queue",
    ":beyond",
    ":retries",
    ":consumers",
    ":charged",
    ":skipped",
)
WISHES = ":wishes"  # keys that were moved to a consumer
MATCHES = ":matches"  # of a filtered subscription
ALL_SUFFIXES = (*SUBSCRIPTION_SUFFIXES, MATCHES, PARKED, WISHES)
