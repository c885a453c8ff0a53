"""What the engine takes and returns: small typed values, no dicts of bytes."""

from typing import NamedTuple

import msgspec

from keylane.wire.lines import read
from keylane_broker.engine.filters import Filter

Place = tuple[str, int]  # topic and partition


class Outgoing(NamedTuple):
    """A message to publish: `key` is "" for none, `about` is what keylane.wire.about() makes."""

    key: str
    uid: str
    about: str


class NumberedFrame(NamedTuple):
    """Messages that their producer has numbered, from `number` on; it waits for no answer before `oldest`."""

    producer: str
    number: int
    oldest: int
    size: int
    named: bool = False  # somebody chose their uids: who publishes one again need not be this producer


STALE = ""  # instead of a first id: the producer waits for no answer any more, and it was not stored

Extras = dict[int, tuple[int, int]]  # place in a batch -> when that message expires, ms or 0; its priority


class Lease(msgspec.Struct, frozen=True):
    """A partition lease: who holds which partition in which epoch.

    As it was taken: `sweep`: a sweep is to be finished; `due_ms`: when the next delayed message is due,
    `marks_due_ms`: when old marks are, both by the clock that showed `now_ms`; 0 for never; `in_use`: name,
    mode, delivery, ... of the subscriptions that have consumers; `incarnation`: that of the topic; `retains`:
    what is retained is to be trimmed; `expires`: there are messages that expire.
    """

    topic: str
    partition: int
    worker: str
    epoch: int
    sweep: bool = False
    now_ms: int = 0
    due_ms: int = 0
    marks_due_ms: int = 0
    in_use: tuple[str, ...] = ()
    incarnation: int = 0
    retains: bool = False
    expires: bool = False

    @property
    def text(self) -> str:
        """The value of the lease's key while it is valid."""
        return f"{self.worker} {self.epoch}"


class Published(msgspec.Struct, frozen=True):
    """The answer for one message of a batch."""

    id: str | None
    duplicate: bool = False
    no_subscribers: bool = False
    full: bool = False  # the backlog has no room for it


class PublishResult(msgspec.Struct, frozen=True):
    """The answer for a batch; `stored` messages took consecutive entries from `first` on."""

    ledger: int
    first: int
    stored: int
    no_subscribers: int
    published_ms: int
    duplicates: dict[int, str]
    durability: str
    size: int
    marks_due_ms: int = 0  # when promote is to be called for old marks, if anything was stored
    expires_due_ms: int = 0  # when the first message expires, if any that was stored does
    unmatched: list[int] = []  # places of those without subscribers, where filters have chosen them
    behind: bool = False  # a filtered subscription has to compare what is in the log
    full: list[int] = []  # places of those that the backlog has no room for

    def each(self) -> list[Published]:
        """Return one answer per message, in the order given."""
        if not self.duplicates and not self.no_subscribers and not self.full:
            prefix = f"{self.ledger}-"
            return [Published(prefix + str(entry)) for entry in range(self.first, self.first + self.stored)]
        answers, unmatched = [], set(self.unmatched)
        entry = self.first
        for index in range(self.size):
            if index in self.duplicates:
                answers.append(Published(self.duplicates[index], duplicate=True))
            elif index in self.full:
                answers.append(Published(None, full=True))
            elif index in unmatched or not self.stored:
                answers.append(Published(None, no_subscribers=True))
            else:
                answers.append(Published(f"{self.ledger}-{entry}"))
                entry += 1
        return answers


class DelayResult(msgspec.Struct, frozen=True):
    """The answer for a batch that is kept until it falls due; those that are no duplicates have no id yet."""

    now_ms: int
    kept: int
    duplicates: dict[int, str]  # "0-0" where the first has no id yet either
    next_due_ms: int
    durability: str
    full: list[int] = []  # as in PublishResult


class PromoteResult(msgspec.Struct, frozen=True):
    """What has fallen due: how many the log has now, how many nobody was there for; `next_due_ms` as ever."""

    now_ms: int
    last: int
    appended: int
    dropped: int
    next_due_ms: int
    marks_due_ms: int  # when to call again for old marks; 0 where there are none
    expires_due_ms: int  # as in PublishResult
    behind: int  # 1: as in PublishResult


class MessagesExpired(msgspec.Struct, frozen=True):
    """What has expired: how many went, and when to look again, 0 for never."""

    now_ms: int
    next_due_ms: int
    dropped: int


class TrimResult(msgspec.Struct, frozen=True):
    """What has been retained for long enough: how many went; `next_due_ms` is 0 while the log is empty.

    It is -1 where nothing is to be trimmed ever.
    """

    now_ms: int
    next_due_ms: int
    dropped: int


class Message(msgspec.Struct, frozen=True, gc=False):
    """One entry of a log as it is delivered; `key` is "" for none."""

    id: str
    key: str
    uid: str
    about: str
    retries: int = 0

    @property
    def entry(self) -> int:
        """The entry's number in its partition."""
        return int(self.id.partition("-")[2])


class Receipt(NamedTuple):
    """Proof of a lease on entries first..last; `lane` is "" where there is no order."""

    partition: int
    lane: str
    token: int
    first: int
    last: int


class Delivery(msgspec.Struct, frozen=True):
    """Messages leased to one consumer under one receipt."""

    consumer: str
    receipt: Receipt
    deadline_ms: int
    messages: list[Message]


class Capacity(NamedTuple):
    """A consumer, how many messages it can take now, and the lease it asks for.

    A free key goes to the one with the most `spare` capacity, on all partitions together; None: its permits.
    With `size` it gets messages of about so many bytes.
    """

    consumer: str
    permits: int
    lease_ms: int = 30_000
    spare: int | None = None
    size: int | None = None


class FetchResult(msgspec.Struct, frozen=True):
    """Deliveries, and when to look again: at once if `more`, else at `next_due_ms` (0: never)."""

    deliveries: list[Delivery]
    now_ms: int
    next_due_ms: int
    more: bool
    unknown_consumers: list[str]


class Share(msgspec.Struct, frozen=True):
    """One consumer's part of a fetch: ranges of entries, and key, uid, about of each of them, all flat."""

    consumer: str
    ranges: list[int]
    flat: list[str]


class Fetched(msgspec.Struct, frozen=True):
    """What a fetch leased, in the flat form in which it goes to clients; times as in FetchResult.

    All of it has one token. A lane's deadline is the lease of its consumer from now, unless it is in `kept`.
    """

    mode: str
    token: int
    now_ms: int
    next_due_ms: int
    more: bool
    cursor: int
    ledgers: str
    found: list[int]  # place of the consumer, first, last, ..., in the order in which they were leased
    shares: list[Share]
    kept: list[str | int]  # lane, deadline, ...
    retries: list[int]  # entry, count, ...
    unknown_consumers: list[str]
    left_out: list[str]  # consumers for whom messages wait, and who were not named or had no room
    # Consumers for whom lanes wait though they have room, and when these are due.
    later: list[tuple[str, int]]
    # Receipts (lane, token, first, last, ...) of what was too large, to be given back.
    oversized: list[str | int] = []


class Stale(NamedTuple):
    """A part of a receipt that no longer held: the receipt's place in the call, and the entries."""

    receipt: int
    first: int
    last: int


class SettleResult(msgspec.Struct, frozen=True):
    """What was stale (everything else is settled), and which entries left the log for good."""

    stale: list[Stale]
    forgotten: list[tuple[int, int]] = []
    deadline_ms: int = 0  # of extend, as the next
    now_ms: int = 0
    # Records of bodies that are to be deleted, and of which entries.
    records: list[tuple[str, list[tuple[int, int]]]] = []
    returned: list[tuple[int, int, int]] = []  # token, first, last of all that a nack gave back
    dead: int = 0  # how many of these had no retry left, and have become dead letters

    @classmethod
    def of(cls, steps: "list[SettleResult]") -> "SettleResult":
        """Return the result of several calls; the deadline is that of the first."""
        if len(steps) == 1:
            return steps[0]
        return cls(
            sorted(part for step in steps for part in step.stale),
            [part for step in steps for part in step.forgotten],
            steps[0].deadline_ms,
            steps[0].now_ms,
            [part for step in steps for part in step.records],
            [part for step in steps for part in step.returned],
            sum(step.dead for step in steps),
        )

    def outcomes(self, count: int) -> list[str]:
        """Return settled or stale for each of `count` receipts; stale if any part of it was."""
        answers = ["settled"] * count
        for stale in self.stale:
            answers[stale.receipt] = "stale"
        return answers


class ExpireResult(msgspec.Struct, frozen=True):
    """How many lanes were given back and whose sessions ended; `next_due_ms` is 0 for never.

    Where there is `more`, that is only a part of it. `ended` are the leases whose deadline has passed;
    the last seek ended all with a token up to `void`.
    """

    released: int
    next_due_ms: int
    expired_consumers: list[str]
    now_ms: int
    more: bool = False
    ended: list[tuple[str, int, int, int]] = []  # consumer, token, first, last
    void: int = 0


class Backoff(msgspec.Struct, frozen=True):
    """The wait before redelivery n: initial * factor^(n-1) up to maximum, less a share of jitter."""

    initial: float
    factor: float = 2.0
    maximum: float = 300.0
    jitter: float = 0.2


class SubscriptionSettings(msgspec.Struct, frozen=True):
    """What a subscription is made with."""

    mode: str = "shared"
    delivery: str = "at_least_once"
    lease_ms: int = 30_000
    backoff: Backoff | None = None
    max_retries: int | None = None  # redeliveries that a message has; None: no end of them
    dead_letter: str = ""  # the topic for what has failed too often; "": "<topic>.dead"
    poison: str = "skip"  # or "park": the lane of what has failed too often stops there
    filter: Filter = Filter()  # what is not as this says is not owed to it
    incarnation: int = 0  # tells it from others that had, or will have, its name; given when it is made

    @property
    def delivers_as(self) -> str:
        """The mode of what consumers are served from: in multicast each from a place of its own."""
        return "shared" if self.mode == "multicast" else self.mode


class TopicSettings(msgspec.Struct, frozen=True):
    """What a topic is made with."""

    partitions: int = 1
    dedupe_ms: int = 600_000
    journal: int = 0  # records that each partition's journal keeps; 0 for none
    retention_ms: int = 0  # for which messages stay when all have settled them; FOREVER
    retention_bytes: int = 0  # of these that stay at most, in all partitions together; 0 for no limit
    ttl_ms: int = 0  # after which messages expire that do not say when; 0 for never
    backlog_quota: int = 0  # messages that all partitions may have unsettled; 0 for no limit
    backlog_quota_bytes: int = 0  # and bytes of their bodies
    spread: int = 1  # on how large a part of the workers its partitions are: 1 for all, 8 for every eighth
    inline: int = 0  # bytes of a body up to which clients put it into the message
    incarnation: int = 0  # as that of a subscription


class WorkerReport(msgspec.Struct, frozen=True):
    """What a worker says of itself; `load` is messages/s and script ms/s of its busiest partitions.

    The two last ones are Redis's: when it was heard of last, and how long ago that was, by one clock.
    """

    id: str
    address: str = ""
    release: str = ""
    state: str = "serving"
    started_ms: int = 0
    messages: float = 0.0
    script_ms: float = 0.0
    load: dict[str, tuple[float, float]] = {}
    http: str = ""  # host:port of its HTTP port, "" for none
    heartbeat_ms: int = 0
    age_ms: int = 0


class Owners(msgspec.Struct, frozen=True):
    """Which worker is to own which partition, by topic and number; "" for none."""

    version: int
    topics: dict[str, list[str]]


class Lines(msgspec.Struct):
    """A part of a log or a journal, as Redis has answered, not parsed."""

    answers: list[bytes]  # of XRANGE
    ledgers: str
    next: int  # the position to go on from

    @property
    def ranges(self) -> list[int]:
        """The entries that are there: first, last, …"""
        return read(self.answers)[0]

    @property
    def flat(self) -> list[str]:
        """The values of each of them, one after another."""
        return read(self.answers)[1]


class Claimed(msgspec.Struct, frozen=True):
    """Whether a reader has a subscription; else who, and for how long at least."""

    granted: bool
    holder: str
    remaining_ms: int


class Committed(msgspec.Struct, frozen=True):
    """How many steps a commit has taken, and whether that was all."""

    steps: int = 0
    done: bool = False
