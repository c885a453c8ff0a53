"""PUBLISH and its reply."""

from keylane.wire.frames import Properties, Type


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
