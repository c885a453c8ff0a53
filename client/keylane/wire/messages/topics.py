"""Requests about topics, and their replies."""

from keylane.wire.frames import Properties, Type


class CreateTopic(Properties, frozen=True):
    """CREATE_TOPIC; answered by OK with TopicReply."""

    TYPE = Type.CREATE_TOPIC

    topic: str
    partitions: int | None = None  # None: the broker's default
    dedupe_ms: int | None = None
    exist_ok: bool = False
    journal: int | None = None  # records to keep of what happens in each partition; None or 0: no journal
    # What stays of messages that every subscription has settled: for so long, and so many bytes of bodies in
    # all partitions together. Nothing, if both are 0; -1 is for ever; else 0 is no limit.
    retention_ms: int | None = None  # None: the broker's default, unless there are bytes
    retention_bytes: int = 0
    ttl_ms: int = 0  # after which messages expire that do not say when; 0 for never
    backlog_quota: int = 0  # messages that all partitions together may have unsettled; 0 for no limit
    backlog_quota_bytes: int = 0  # and bytes of their bodies
    spread: int = 1  # its partitions are on every so-manieth worker: 1, on all, to 8
    inline: int = 0  # bodies of up to so many bytes are in the messages themselves, not in a payload store


class ChangeTopic(Properties, frozen=True):
    """CHANGE_TOPIC; answered by OK with TopicReply."""

    TYPE = Type.CHANGE_TOPIC

    topic: str
    journal: int | None = None  # as in CREATE_TOPIC, as the next ones; None: as it is
    retention_ms: int | None = None
    retention_bytes: int | None = None
    ttl_ms: int | None = None
    backlog_quota: int | None = None
    backlog_quota_bytes: int | None = None
    spread: int | None = None
    dedupe_ms: int | None = None


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
    retention_ms: int = 0
    retention_bytes: int = 0
    ttl_ms: int = 0
    backlog_quota: int = 0
    subscriptions: list[str] = []
    messages: int = 0  # in the logs: not settled by every subscription, or retained
    published: int = 0  # ever
    journal: int = 0  # as in CREATE_TOPIC
    delayed: int = 0  # not due yet; counted like messages
    incarnation: int = 0  # a topic of the same name that is made later has a larger one
    backlog_quota_bytes: int = 0
    spread: int = 1
    inline: int = 0


class HotKeys(Properties, frozen=True):
    """HOT_KEYS: ask under which keys most is published; answered by OK with HotKeysReply.

    A worker knows of the partitions that it serves. The body is an array: key, messages that had it, and by
    how many that may be wrong, of each of the hottest keys.
    """

    TYPE = Type.HOT_KEYS

    topic: str


class HotKeysReply(Properties, frozen=True):
    """How many messages of its partitions a worker has seen, of late."""

    messages: int
