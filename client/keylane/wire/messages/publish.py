"""PUBLISH and its reply."""

from typing import Annotated

from msgspec import Meta

from keylane.wire.frames import Properties, Type
from keylane.wire.limits import MAX_BATCH

_Numbers = Annotated[list[int], Meta(max_length=MAX_BATCH)]


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
    # Place of a message -> when it expires, by the cluster's clock, or 0: as the topic says; its priority.
    extras: dict[int, tuple[int, int]] | None = None
    # A producer may number what it sends to a partition: then numbers, not uids, tell what is sent again.
    producer: str = ""  # a name that no other ever has; "": by uid
    number: int = 0  # of the first message; the others have those that follow
    oldest: int = 0  # number of the oldest message whose answer it still waits for
    named: bool = False  # somebody chose the uids: they are known as well, as are those of who has no numbers


class Publishes(Properties, frozen=True):
    """PUBLISHES: as many PUBLISH frames to partitions of a topic, in one.

    The lists have an item for each. Their sequences are that of this frame and those that follow, and each is
    answered by itself; the body has the messages of the first, then those of the second, and so on. All of
    them are numbered.
    """

    TYPE = Type.PUBLISHES

    topic: str
    partitions: _Numbers
    sizes: _Numbers  # messages of each, one at least
    producers: Annotated[list[str], Meta(max_length=MAX_BATCH)]  # as in PUBLISH, and so what follows
    numbers: _Numbers
    oldest: _Numbers
    named: _Numbers = []  # places of those that are, from 0
    again: _Numbers = []
    durability: str = "memory"
    timeout_ms: int = 5_000
    incarnation: int = 0


class PublishReply(Properties, frozen=True):
    """Messages that are in no list took consecutive entries, or none if `unowed`."""

    ledger: int
    first: int
    published_ms: int
    unowed: bool = False  # there is no subscription: nothing was stored
    duplicates: dict[int, str] = {}  # place in the frame, from 0 -> id "<ledger>-<entry>" of the first
    delayed: bool = False  # the others wait and have no entries yet
    unmatched: list[int] = []  # places of messages that no subscription's filter lets through: not stored
    full: list[int] = []  # places of messages that the topic's backlog has no room for: not stored
