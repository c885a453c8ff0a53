"""The values that users pass in and get back."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import Enum
from typing import Literal

import msgspec


class Unchanged(Enum):
    """What a setting is where a call that changes settings does not name it; None may mean "none"."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED = Unchanged.UNCHANGED
Retention = float | timedelta | Literal["forever"]

Body = bytes | bytearray | memoryview | str | None
Mode = Literal["shared", "key_shared", "exclusive", "failover", "multicast", "cursor"]
Delivery = Literal["at_least_once", "at_most_once"]
Outcome = Literal["settled", "stale"]
MessageState = Literal[
    "fresh",  # never delivered
    "leased",
    "waiting",  # to be delivered again, or behind others of its key
    "delayed",
    "settled",
    "deleted",
    "not_subscribed",  # older than the subscription, or passed by a seek
    "never_existed",
    "parked",
    "filtered",
    "expired",
    "dead_lettered",
]
Poison = Literal["skip", "park"]
UnparkAction = Literal["resume", "skip", "redrive"]


class Backoff(msgspec.Struct, frozen=True):
    """Seconds before redelivery n: initial * factor^(n-1) up to maximum, less a random share up to jitter."""

    initial: float = 1.0
    factor: float = 2.0
    maximum: float = 300.0
    jitter: float = 0.2


BACKOFF = Backoff()  # of a subscription that is made without saying


class OutgoingMessage(msgspec.Struct, frozen=True):
    """One of the messages for publish_many; the options are those of publish."""

    data: Body = None
    key: str | None = None
    attributes: Mapping[str, str] | None = None
    partition: int | None = None
    # Identifies the message together with its key: published again within the window it is a duplicate.
    uid: str | None = None
    durability: str | None = None
    delay: float | timedelta | None = None  # seconds until it is published
    deliver_at: datetime | None = None  # or when
    ttl: float | timedelta | None = None  # seconds after which it expires
    expires_at: datetime | None = None  # or when
    priority: int | None = None  # 0 to 9: in mode shared, larger goes first


class Published(msgspec.Struct, frozen=True, gc=False):
    """The broker's answer for one message."""

    partition: int
    uid: str
    ledger: int
    entry: int  # 0: the log does not have it
    durability: str = "memory"
    duplicate: bool = False
    no_subscribers: bool = False
    delayed: bool = False  # it waits, and has no id before it is due

    @property
    def id(self) -> str | None:
        """`<partition>:<ledger>-<entry>`, the same as Message.id; None if the log does not have it (yet)."""
        return f"{self.partition}:{self.ledger}-{self.entry}" if self.entry else None


class TopicInfo(msgspec.Struct, frozen=True):
    """A topic, as describe_topic returns it."""

    name: str
    partitions: int
    subscriptions: list[str]
    dedupe_window: float  # seconds
    messages: int  # stored: not settled by every subscription, or retained
    published: int  # ever
    journal: int = 0  # records that each partition keeps of what happens there; 0: none
    delayed: int = 0  # messages that are not due yet
    retention: float | Literal["forever"] | None = None  # seconds that settled messages stay
    retention_bytes: int | None = None  # of bodies that stay so, at most
    ttl: float | None = None  # seconds after which messages expire that do not say when
    backlog_quota: int | None = None  # messages that may be unsettled
    backlog_quota_bytes: int | None = None  # bytes of bodies of these
    spread: int = 1  # its partitions are on every so-manieth worker: 1, on all, to 8
    inline: int = 0  # bytes of a body up to which it is in the message itself, not in a payload store


class SubscriptionInfo(msgspec.Struct, frozen=True):
    """A subscription over all its partitions, as describe_subscription returns it."""

    topic: str
    name: str
    mode: str
    delivery: str
    lease: float  # seconds
    backoff: Backoff | None
    paused: bool
    backlog: int  # messages not settled: the three below together
    fresh: int  # never delivered
    leased: int
    waiting: int  # to be delivered again, or behind others of their key
    consumers: list[str]
    keys: str | None = None  # a glob: it is owed messages whose key fits
    filter: dict[str, str | None] | None = None  # and that have these attributes; None: with any value
    max_retries: int | None = None  # redeliveries that a message has; None: no end of them
    dead_letter: str = ""  # the topic that messages go to which have failed too often
    poison: str = "skip"  # or park: their lane stops


class PartitionOffsets(msgspec.Struct, frozen=True):
    """Positions in a partition: each the next entry to read, so that a range of them ends before its end."""

    partition: int
    earliest: int  # the oldest entry in the log; `latest` where it is empty
    latest: int  # the next entry that will be given
    position: int | None  # the next entry owed to the subscription, None without one
    sparse: int  # from here on all that is owed to the subscription is in the log; before there may be holes
    journal_earliest: int
    journal_latest: int
    sought: int = 0  # grows with each seek, another when it was made anew; a commit repeats it
    incarnation: int = 0  # of the topic: another one of its name has another; all that follows may repeat it
    subscription_incarnation: int = 0  # likewise
    ledger: int = 0  # the newest; all before `latest` was given in it, or before
    anew: int = 0  # the first entry that was given after the ledger that was asked about, 0 for none


class Page(msgspec.Struct, frozen=True):
    """What was read from a partition, flat: no object is made per message.

    `ranges` are first, last, … of the entries that are there; `flat` has key, uid, about of each of them (of
    the journal: at, what, sub, by, entries); `ledgers` is "<ledger>:<first entry> …"; go on from `next`.
    """

    ranges: list[int]
    flat: list[str]
    ledgers: str
    next: int


class RawPage(msgspec.Struct, frozen=True):
    """A page as Redis returned it, for keylane.wire.lines or a faster parser."""

    answers: list[bytes]
    ledgers: str
    next: int


class Claim(msgspec.Struct, frozen=True):
    """Whether the reader has the subscription; if not, who has it, and for at least how many seconds."""

    granted: bool
    holder: str
    remaining: float


class WorkerAddress(msgspec.Struct, frozen=True):
    """A worker of the cluster and where it listens."""

    id: str
    address: str


class ClusterInfo(msgspec.Struct, frozen=True):
    """The cluster; `worker` is the one that answered."""

    version: str
    protocol: int
    worker: str
    workers: list[WorkerAddress]
    time: datetime  # the cluster's clock
    payloads: str  # the payload store's URL, without credentials


class WorkerInfo(WorkerAddress, frozen=True):
    """A worker as the cluster sees it."""

    release: str
    state: str  # serving, draining, stopping or lost
    started_at: datetime
    heartbeat_at: datetime  # when it was last heard of
    partitions: int  # that it is to serve
    messages_per_second: float  # published and delivered
    script_time: float  # seconds that its scripts take in Redis, a second


class ClusterReport(msgspec.Struct, frozen=True):
    """The workers, and who places the partitions; `version` counts the changes of placement."""

    controller: str
    version: int
    workers: list[WorkerInfo]


class LedgerInfo(msgspec.Struct, frozen=True):
    """What was published in one epoch of a partition, from entry `first` on, and how much of it remains."""

    ledger: int
    first: int
    remaining: int


class PartitionInfo(msgspec.Struct, frozen=True):
    """Who is to serve a partition, who has its lease, and its ledgers, the oldest first."""

    partition: int
    worker: str  # "" for nobody
    holder: str  # "" while nobody has the lease
    epoch: int
    lease: float  # seconds until it ends, unless renewed
    ledgers: list[LedgerInfo]
    messages_per_second: float
    script_time: float


class PartitionMove(msgspec.Struct, frozen=True):
    """A partition that gets another worker; `source` is "" where it had none."""

    topic: str
    partition: int
    source: str
    target: str
    reason: str


class HotKey(msgspec.Struct, frozen=True):
    """A key under which a large share of a topic's messages is published; `share` is right within `error`."""

    key: str
    share: float  # of the messages of the topic, of late
    error: float


class Explanation(msgspec.Struct, frozen=True):
    """What becomes of a message for a subscription; `reason` says in a sentence what it waits for."""

    state: MessageState
    reason: str
    id: str | None  # None: it has none yet, or nothing is known of it
    key: str | None
    uid: str
    consumer: str  # who has it leased
    until: datetime | None  # the lease's deadline, or when it falls due
    retry_count: int
    behind: str | None  # the id of the message of its key, or partition, that it waits for
    dead_letter_topic: str | None = None  # of a dead letter: the topic that keeps it, or will
    dead_letter_id: str | None = None  # and its id there; None while it is on its way, or among very many


class NewToken(msgspec.Struct, frozen=True):
    """A token that was just created: `token` is told now and never again."""

    id: str
    token: str


class TokenInfo(msgspec.Struct, frozen=True):
    """A token, without its secret."""

    id: str
    name: str
    allow: list[str]
    created_at: datetime
    expires_at: datetime | None


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that has failed too often, in the topic that keeps it, with its history."""

    id: str  # in that topic, as the next
    dead_letter_topic: str
    topic: str  # where it failed, and so on down to `consumer`
    subscription: str
    source_id: str  # the id that it had there
    key: str | None
    uid: str
    retries: int
    reason: str  # of the last failure
    first_failed_at: datetime
    last_failed_at: datetime
    consumer: str  # who had it last
    attributes: dict[str, str]  # without the history
    size: int  # of its body
    body: str  # the name of its body, "" for none: see bodies()
    producer_group: str
    produced_at: datetime


class ParkedLane(msgspec.Struct, frozen=True):
    """A lane that has stopped at a message which has no retry left, and what waits behind it."""

    key: str | None
    id: str  # of that message
    reason: str  # of its last failure
    waiting: int  # messages that were to be delivered, that one included
    since: datetime
    retries: int
    consumer: str  # who had it last


class PeekedMessage(msgspec.Struct, frozen=True):
    """A message as peek shows it, without leasing it."""

    id: str
    key: str | None
    uid: str
    attributes: dict[str, str]
    size: int  # of its body
    producer_group: str
    produced_at: datetime
    published_at: datetime
    state: str  # fresh, leased or waiting
    consumer: str  # who has it leased
    retry_count: int
    due: datetime | None  # the lease's deadline, or when it falls due again
    data: bytes | None = None  # its body, if asked for and there
