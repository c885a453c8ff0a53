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
EVENTS = "kl:events"  # a channel: hints to all workers that something has changed

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
    journal: str
    bodies: str

    def leases(self, consumer: str) -> str:
        """Return the key of what one consumer holds; lua/lib/holders.lua names these keys."""
        return f"{self.deadlines}:{consumer}"


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
    def bodies(self) -> str:
        """Which bodies are to be deleted from the payload store."""
        return self.lease.removesuffix("lease") + "bodies"

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


partition_keys = lru_cache(maxsize=65_536)(PartitionKeys.of)


@lru_cache(maxsize=65_536)
def subscription_keys(topic: str, partition: int, subscription: str) -> SubscriptionKeys:
    """Return the keys of a subscription on one partition."""
    check_name("subscription", subscription)
    return partition_keys(topic, partition).subscription(subscription)


def partition_of(key: str) -> tuple[str, int]:
    """Return the topic and the number of the partition that a key belongs to."""
    topic, _, number = key[key.index("{") + 1 : key.index("}")].rpartition(":")
    return topic, int(number)


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
)
