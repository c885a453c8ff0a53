"""What consumers and workers say: opening, deliveries, permits, settling."""

from typing import Annotated

from msgspec import Meta

from keylane.wire.frames import Properties, Type
from keylane.wire.limits import MAX_BATCH

_Numbers = Annotated[list[int], Meta(max_length=MAX_BATCH)]
_Bodies = Annotated[list[int | str], Meta(max_length=20_000)]


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
    keys: str | None = None  # as in CREATE_SUBSCRIPTION, as the next; both None: as it is
    filter: dict[str, str | None] | None = None


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


class Acks(Properties, frozen=True):
    """ACKS: as many ACK frames in one; the lists have an item for each.

    Their sequences are that of this frame and those that follow, and each is answered by itself; the body has
    the receipts of the first, then those of the second, and so on.
    """

    TYPE = Type.ACKS

    streams: _Numbers
    partitions: _Numbers
    sizes: _Numbers  # receipts of each, one at least
    bodies: Annotated[list[_Bodies | None], Meta(max_length=MAX_BATCH)]


class Answers(Properties, frozen=True):
    """ANSWERS: OK to several requests, for who has said in INFO that it understands this."""

    TYPE = Type.ANSWERS

    stored: list[int] = []  # sequence, ledger, first, published_ms, … of publishes that are stored as a whole
    settled: list[int] = []  # sequences of acks of which nothing was stale


class Nack(Properties, frozen=True):
    """NACK; body and answer as for ACK. Without a time the subscription's backoff counts."""

    TYPE = Type.NACK

    stream: int
    partition: int
    delay_ms: int | None = None
    until_ms: int | None = None
    charged: bool = True
    reason: str = ""  # for the history of those that have no retry left


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
