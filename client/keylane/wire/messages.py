"""What frames say: the properties of each type, requests beside their replies."""

import msgspec

from keylane.wire.frames import Properties, Type

MAX_BATCH = 1_000  # messages in a PUBLISH, receipts in a settling frame: a script blocks the server
MAX_KEY = 1_024  # bytes, as the next
MAX_UID = 256

# Connection


class Info(Properties, frozen=True):
    """INFO: the first frame of a connection, and later whenever the client wants to know."""

    TYPE = Type.INFO

    versions: tuple[int, int] = (1, 1)  # oldest and newest; the default is for ever, whatever VERSION is
    token: str = ""
    client: str = ""  # who this is, for logs
    topic: str = ""  # whose partition map is wanted too; MOVED tells from then on when it has changed
    store: str = ""  # the payload store that it can delete from when it is asked: "advertised" or its "own"


class WorkerAddress(msgspec.Struct, frozen=True):
    """Where a worker listens."""

    id: str
    address: str  # host:port


class InfoReply(Properties, frozen=True):
    """The worker's answer: the version spoken from now on, and what to know of the cluster."""

    version: int
    worker: str
    release: str
    workers: list[WorkerAddress]
    time_ms: int  # the cluster's clock, which is that of Redis
    payloads: str  # URL of the payload store that clients use unless told otherwise, "" for none
    payload_lifetime_ms: int
    heartbeat_ms: int
    session_ms: int
    max_frame: int
    owners: list[int] = []  # of the topic asked for: for each partition the owner's place in `workers`, or -1
    # The store is the server that has the messages: bodies are as safe as these.
    payloads_beside: bool = False
    incarnation: int = 0  # of the topic asked for: another one of that name has another


class Moved(Properties, frozen=True):
    """MOVED: some partitions of a topic have new owners; INFO tells which. Not answered."""

    TYPE = Type.MOVED

    topic: str


class DeleteBodies(Properties, frozen=True):
    """DELETE_BODIES: nobody needs the bodies any more whose names are the body of this frame.

    The client deletes them and then answers with OK, under the same sequence, as it does HEARTBEAT.
    """

    TYPE = Type.DELETE_BODIES

    topic: str


class Heartbeat(Properties, frozen=True):
    """HEARTBEAT; answered by OK with no properties, whose timestamp is the other side's clock."""

    TYPE = Type.HEARTBEAT


class Error(Properties, frozen=True):
    """ERROR: `code` is one of keylane.errors. With sequence 0 and a stream, that consumer has ended."""

    TYPE = Type.ERROR

    code: str
    message: str
    stored: bool = False  # of durability_not_reached
    stream: int | None = None


class Redirect(Properties, frozen=True):
    """REDIRECT: the partition is served elsewhere; in answer to a request, which has changed nothing.

    With sequence 0 and a stream: this worker serves the partition to that consumer no more. What it holds
    stays leased, to be settled with the new owner once it has subscribed there, and `permits` of its limit
    here have gone with that.
    """

    TYPE = Type.REDIRECT

    topic: str
    partition: int
    address: str = ""  # "" where the worker does not know
    stream: int | None = None
    permits: int = 0


# Topics and subscriptions


class CreateTopic(Properties, frozen=True):
    """CREATE_TOPIC; answered by OK with TopicReply."""

    TYPE = Type.CREATE_TOPIC

    topic: str
    partitions: int | None = None  # None: the broker's default
    dedupe_ms: int | None = None
    exist_ok: bool = False
    journal: int | None = None  # records to keep of what happens in each partition; None or 0: no journal


class ChangeTopic(Properties, frozen=True):
    """CHANGE_TOPIC; answered by OK with TopicReply, without counts."""

    TYPE = Type.CHANGE_TOPIC

    topic: str
    journal: int  # as in CREATE_TOPIC


class DeleteTopic(Properties, frozen=True):
    """DELETE_TOPIC; answered by OK."""

    TYPE = Type.DELETE_TOPIC

    topic: str


class Topics(Properties, frozen=True):
    """TOPICS; answered by OK with the names in the body."""

    TYPE = Type.TOPICS


class DescribeTopic(Properties, frozen=True):
    """DESCRIBE_TOPIC; answered by OK with TopicReply. Counts are taken only on request."""

    TYPE = Type.DESCRIBE_TOPIC

    topic: str
    counts: bool = False


class TopicReply(Properties, frozen=True):
    """What there is to know of a topic."""

    partitions: int
    dedupe_ms: int
    retain: bool = False
    subscriptions: list[str] = []
    messages: int = 0  # in the logs, not settled by every subscription
    published: int = 0  # ever
    journal: int = 0  # as in CREATE_TOPIC
    delayed: int = 0  # not due yet; counted like messages
    incarnation: int = 0  # a topic of the same name that is made later has a larger one


class CreateSubscription(Properties, frozen=True):
    """CREATE_SUBSCRIPTION; answered by OK.

    `start` is "latest", "earliest", "time:<ms>" or an id "<partition>:<ledger>-<entry>". `backoff` is
    initial, factor, maximum, jitter, times in seconds.
    """

    TYPE = Type.CREATE_SUBSCRIPTION

    topic: str
    subscription: str
    mode: str = "shared"
    delivery: str = "at_least_once"
    lease_ms: int = 30_000
    backoff: tuple[float, float, float, float] | None = None
    start: str = "latest"
    exist_ok: bool = False


class DeleteSubscription(Properties, frozen=True):
    """DELETE_SUBSCRIPTION; answered by OK."""

    TYPE = Type.DELETE_SUBSCRIPTION

    topic: str
    subscription: str


class DescribeSubscription(Properties, frozen=True):
    """DESCRIBE_SUBSCRIPTION; answered by OK with SubscriptionReply."""

    TYPE = Type.DESCRIBE_SUBSCRIPTION

    topic: str
    subscription: str


class SubscriptionReply(Properties, frozen=True):
    """What there is to know of a subscription, all partitions together."""

    mode: str
    delivery: str
    lease_ms: int
    backoff: tuple[float, float, float, float] | None
    paused: bool
    backlog: int  # messages not settled: the three below together
    fresh: int  # never delivered
    leased: int
    waiting: int  # to be delivered again, or behind others of their key
    consumers: list[str] = []


class ChangeSubscription(Properties, frozen=True):
    """CHANGE_SUBSCRIPTION; answered by OK. Paused, it delivers to nobody; what is leased stays leased."""

    TYPE = Type.CHANGE_SUBSCRIPTION

    topic: str
    subscription: str
    paused: bool


class Seek(Properties, frozen=True):
    """SEEK; answered by OK. `position` as `start` in CREATE_SUBSCRIPTION; an id moves its partition only."""

    TYPE = Type.SEEK

    topic: str
    subscription: str
    position: str


class Peek(Properties, frozen=True):
    """PEEK: look at unsettled messages; answered by OK with an array of PeekedMessage in the body."""

    TYPE = Type.PEEK

    topic: str
    subscription: str
    partition: int | None = None
    limit: int = 10


class PeekedMessage(msgspec.Struct, frozen=True):
    """A message as PEEK shows it; `state` is fresh, leased or waiting, `consumer` who has it."""

    id: str
    key: str
    uid: str
    about: str
    state: str
    consumer: str = ""
    retries: int = 0
    due_ms: int = 0  # the lease's deadline, or when it falls due again


# Publishing


class Publish(Properties, frozen=True):
    """PUBLISH; the body is flat: key ("" for none), uid, about, key, uid, about, …

    Answered by OK with PublishReply. After a retriable error (but for what is `stored`) or a REDIRECT the
    worker refuses what else this connection publishes to the partition, at any durability, until a frame
    comes that says `again`: so messages sent without waiting for answers keep their order.
    """

    TYPE = Type.PUBLISH

    topic: str
    partition: int
    durability: str = "memory"
    timeout_ms: int = 5_000  # to wait for the durability
    again: bool = False
    due_ms: list[int] | None = None  # of each message: when it is to be published, by the cluster's clock
    incarnation: int = 0  # of the topic that is meant; topic_replaced if it is another by now. 0: any


class PublishReply(Properties, frozen=True):
    """The messages that are not listed as duplicates took consecutive entries, or none if `unowed`."""

    ledger: int
    first: int
    published_ms: int
    unowed: bool = False  # there is no subscription: nothing was stored
    duplicates: dict[int, str] = {}  # place in the frame, from 0 -> id "<ledger>-<entry>" of the first
    delayed: bool = False  # the others wait and have no entries yet


# Consuming


class Subscribe(Properties, frozen=True):
    """SUBSCRIBE: open a consumer; answered by OK with SubscribeReply, then DATA comes.

    `stream` is the client's number for the consumer on this connection. The subscription is made if it is
    not there, with `mode`, `start` and `lease_ms`. A consumer of the same name that is connected elsewhere
    ends. What the name still holds comes first, marked `held`. A worker opens the partitions that it owns; a
    partition named here that another one owns is answered by REDIRECT, and nothing is opened. On a stream
    that is open, with the same topic, subscription and consumer, it adds partitions to the consumer, whose
    limit of permits stays what it is.

    Who comes back says what it was subscribed to: another topic of that name is answered by topic_replaced,
    another subscription or none by subscription_not_found, and nothing is made.
    """

    TYPE = Type.SUBSCRIBE

    stream: int
    topic: str
    subscription: str
    consumer: str
    mode: str | None = None  # None: as it is; "shared" if there is none
    start: str = "latest"
    lease_ms: int | None = None  # None: that of the subscription
    permits: int = 1_000
    partitions: list[int] | None = None  # None: all, if this worker owns all
    incarnation: int = 0  # of the topic that is meant, 0: any
    subscription_incarnation: int = 0  # as the answer before has said; 0: any, or one that is made now


class SubscribeReply(Properties, frozen=True):
    """The consumer is open."""

    mode: str
    delivery: str
    lease_ms: int
    partitions: int
    held: int | None = None  # so many messages follow that are marked `held`; what else the name had is void
    epochs: dict[int, int] = {}  # partition -> epoch in which this worker serves it: the larger is the newer
    subscription_incarnation: int = 0  # another subscription of that name has another


class Unsubscribe(Properties, frozen=True):
    """UNSUBSCRIBE: close a consumer; what it holds goes back uncharged. Answered by OK.

    With `partitions` only what it holds of these goes back: the consumer may have others at another worker.
    """

    TYPE = Type.UNSUBSCRIBE

    stream: int
    partitions: list[int] | None = None


class Data(Properties, frozen=True):
    """DATA: messages leased to a consumer under one token.

    The body is an array of four flat arrays: ranges of entries (first, last, …); key, uid, about of each
    entry in that order; entry, retry count of those delivered before; lane, deadline_ms of lanes whose
    deadline is not `deadline_ms`.
    """

    TYPE = Type.DATA

    stream: int
    partition: int
    token: int
    deadline_ms: int  # by the cluster's clock, as the frame's timestamp is
    ledgers: str  # "<ledger>:<first entry> …", oldest first
    held: bool = False  # delivered before, to this name
    settled: list[int] | None = None  # at most once: settled already; the ranges of entries that left the log


class Flow(Properties, frozen=True):
    """FLOW: more permits, another limit to them, or pause and go on.

    Settling gives permits back by itself. Permits never exceed those of SUBSCRIBE or the last `limit`. Not
    answered, but for one with a `limit`: by OK, once no more than that is out.

    From a worker, with `wanted`: it may have messages for the consumer, whose limit here is 0. Said once
    until the limit is another.
    """

    TYPE = Type.FLOW

    stream: int
    permits: int = 0
    partition: int | None = None  # of the messages that the permits stood for
    paused: bool | None = None
    limit: int | None = None
    gone: int = 0  # with a limit: the permits of all REDIRECTs on this stream that the client has seen
    wanted: bool = False


class Ack(Properties, frozen=True):
    """ACK; the body is flat: lane, token, first, last of each receipt. Answered by OK with SettleReply.

    The lane is "" in shared mode and for messages without a key, "=" in exclusive and failover, and "=" and
    the key in key_shared.
    """

    TYPE = Type.ACK

    stream: int
    partition: int
    # Entry, name, … of those that have a body; None: the worker finds out.
    bodies: list[int | str] | None = None


class Nack(Properties, frozen=True):
    """NACK; body and answer as for ACK. Without a time the subscription's backoff counts."""

    TYPE = Type.NACK

    stream: int
    partition: int
    delay_ms: int | None = None
    until_ms: int | None = None
    charged: bool = True


class Extend(Properties, frozen=True):
    """EXTEND; body and answer as for ACK. One of the two times is given."""

    TYPE = Type.EXTEND

    stream: int
    partition: int
    lease_ms: int | None = None
    until_ms: int | None = None


class SettleReply(Properties, frozen=True):
    """What was not stale is done."""

    stale: list[int] = []  # place of the receipt, first, last, …
    deadline_ms: int = 0  # of EXTEND
    returned: list[int] = []  # of NACK: token, first, last, … of all that went back


class Ended(Properties, frozen=True):
    """ENDED: leases of a consumer are over: their deadline has passed, or the subscription was moved.

    The body is flat: token, first, last, …; or empty, and all with a token up to `up_to` have ended. So many
    `permits` have come back. Not answered.
    """

    TYPE = Type.ENDED

    stream: int
    partition: int
    permits: int
    up_to: int = 0


# Reading by position


class Read(Properties, frozen=True):
    """READ: the entries from position `start` up to, not including, `end`; answered by OK with ReadReply.

    The body of the answer is an array of two flat arrays: ranges of the entries that are there (first, last,
    …), and key, uid, about of each of them. Of the journal: at, what, sub, by, entries of each record. With
    `raw` it is an array of what Redis has answered to XRANGE, which the client reads itself.
    """

    TYPE = Type.READ

    topic: str
    partition: int
    start: int
    end: int
    limit: int = 5_000
    journal: bool = False
    incarnation: int = 0  # of the topic that is meant, as in PartitionOffsets; 0: any
    raw: bool = False


class ReadReply(Properties, frozen=True):
    """What was read ends before position `next`: `end`, or less where limit or frame were full."""

    next: int
    ledgers: str = ""  # as in DATA; "" for the journal


class Offsets(Properties, frozen=True):
    """OFFSETS: where the logs of a topic begin and end; answered by OK with an array of PartitionOffsets."""

    TYPE = Type.OFFSETS

    topic: str
    subscription: str = ""  # "" for none
    ledgers: dict[int, int] = {}  # by partition, as PartitionOffsets had it before; answered by `anew`


class PartitionOffsets(msgspec.Struct, frozen=True):
    """Positions of one partition: each the next entry to read."""

    earliest: int  # the oldest entry in the log; `latest` where there is none
    latest: int  # the next entry that will be given
    position: int | None  # the next entry that is owed to the subscription
    sparse: int  # from here on all that is owed to the subscription is in the log; before there may be holes
    journal_earliest: int
    journal_latest: int
    sought: int = 0  # grows with each seek, another when it was made anew; a commit repeats it
    incarnation: int = 0  # of the topic
    subscription_incarnation: int = 0
    ledger: int = 0  # the newest; all before `latest` was given in it, or before
    anew: int = 0  # the first entry that was given after the ledger that was asked about, 0 for none


class Owed(Properties, frozen=True):
    """OWED: which bodies a partition needs still; answered by OK with OwedReply and names in the body."""

    TYPE = Type.OWED

    topic: str
    partition: int
    position: str = ""  # "" at first, then as the answer before has said
    before: str = ""  # only names that sort before this one; "" for all


class OwedReply(Properties, frozen=True):
    """A part of the names; there are more unless the position is ""."""

    position: str


class Claim(Properties, frozen=True):
    """CLAIM: open or renew the session of a subscription's one reader, or end it; answered by ClaimReply."""

    TYPE = Type.CLAIM

    topic: str
    subscription: str
    reader: str
    session_ms: int = 10_000
    release: bool = False
    incarnation: int = 0  # of the topic that is meant, as in PartitionOffsets; 0: any
    subscription_incarnation: int = 0  # likewise


class ClaimReply(Properties, frozen=True):
    """Whether the subscription is the reader's; else whose it is, and for how long at least."""

    granted: bool
    holder: str = ""
    remaining_ms: int = 0


class Commit(Properties, frozen=True):
    """COMMIT: all before these positions is done with; answered by OK with CommitReply."""

    TYPE = Type.COMMIT

    topic: str
    subscription: str
    reader: str
    positions: dict[int, int]  # by partition
    # By partition, as PartitionOffsets had it when reading began; 0: before any seek.
    sought: dict[int, int] = {}
    incarnation: int = 0  # of the topic that is meant, as in PartitionOffsets; 0: any
    subscription_incarnation: int = 0  # likewise
    # By partition, as PartitionOffsets had it when the position was read; 0: any.
    ledgers: dict[int, int] = {}


class CommitReply(Properties, frozen=True):
    """How far it came: one frame commits so much at most. Ask again for the partitions that are not done."""

    done: list[int] = []


# The cluster


class Cluster(Properties, frozen=True):
    """CLUSTER; answered by OK with ClusterReply and, for a topic, an array of PartitionReport in the body."""

    TYPE = Type.CLUSTER

    topic: str = ""


class WorkerReport(msgspec.Struct, frozen=True):
    """A worker as the cluster sees it; `state` is serving, draining, stopping or lost."""

    id: str
    address: str
    release: str
    state: str
    started_ms: int
    heartbeat_ms: int  # when it was last heard of
    partitions: int  # that it is to serve
    messages: float  # published and delivered, a second
    script_ms: float  # time that its scripts took in Redis, a second


class ClusterReply(Properties, frozen=True):
    """The workers, and who places the partitions; `version` counts the changes of placement."""

    controller: str
    version: int
    workers: list[WorkerReport]


class Ledger(msgspec.Struct, frozen=True):
    """What was published in one epoch of a partition: from entry `first` on, of which some remain."""

    ledger: int
    first: int
    remaining: int


class PartitionReport(msgspec.Struct, frozen=True):
    """A partition: who is to serve it, who holds its lease in which epoch, and its ledgers, oldest first."""

    partition: int
    worker: str
    holder: str  # "" while nobody has the lease
    epoch: int
    lease_ms: int  # until the lease ends, unless it is renewed
    ledgers: list[Ledger]
    messages: float  # as in WorkerReport
    script_ms: float


class Rebalance(Properties, frozen=True):
    """REBALANCE: place partitions by counts and load now; answered by OK with Moves in the body."""

    TYPE = Type.REBALANCE

    dry_run: bool = False


class Move(msgspec.Struct, frozen=True):
    """A partition that gets another owner; `source` is "" where it had none."""

    topic: str
    partition: int
    source: str
    target: str
    reason: str  # why, for people


class MovePartition(Properties, frozen=True):
    """MOVE_PARTITION: give a partition to a worker; answered by OK when that is decided.

    If another must come back for it, so that counts stay even, then none of `keep`, if there is a choice.
    """

    TYPE = Type.MOVE_PARTITION

    topic: str
    partition: int
    worker: str
    keep: list[tuple[str, int]] = []  # topic, partition


class Drain(Properties, frozen=True):
    """DRAIN: take all partitions from a worker until it is started again, or undo that; answered by OK."""

    TYPE = Type.DRAIN

    worker: str
    draining: bool = True
