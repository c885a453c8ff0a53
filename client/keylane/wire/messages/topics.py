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


class ChangeTopic(Properties, frozen=True):
    """CHANGE_TOPIC; answered by OK with TopicReply."""

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
