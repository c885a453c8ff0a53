"""Reading by position, and committing how far a reader is."""

import msgspec

from keylane.wire.frames import Properties, Type


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
