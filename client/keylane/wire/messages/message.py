"""Requests about single messages, and about all that a subscription or a topic has."""

from keylane.wire.frames import Properties, Type


class Skip(Properties, frozen=True):
    """SKIP: settle a message for one subscription, whoever holds it; answered by OK."""

    TYPE = Type.SKIP

    topic: str
    subscription: str
    id: str  # "<partition>:<ledger>-<entry>"


class DeleteMessage(Properties, frozen=True):
    """DELETE_MESSAGE: remove a message for all subscriptions, unless somebody holds it; answered by OK."""

    TYPE = Type.DELETE_MESSAGE

    topic: str
    message: str  # its id, or its uid
    partition: int | None = None  # where to look for a uid; None: everywhere
    group: str = ""  # the producer group of who asks: a message of another one stays


class Explain(Properties, frozen=True):
    """EXPLAIN: ask what becomes of a message for a subscription; answered by OK with ExplainReply."""

    TYPE = Type.EXPLAIN

    topic: str
    subscription: str
    message: str  # as in DELETE_MESSAGE, and so is the partition
    partition: int | None = None


class ExplainReply(Properties, frozen=True):
    """Where a message is for a subscription, and why."""

    state: str
    reason: str  # for people
    id: str = ""
    key: str = ""
    uid: str = ""
    consumer: str = ""  # who has it
    until_ms: int = 0  # of a lease, or from when on it is due
    retries: int = 0
    behind: str = ""  # the id of the message of its lane that it waits for
    dead_letter_topic: str = ""  # that keeps it, or will, if it is a dead letter
    dead_letter_id: str = ""  # its id there, as far as it is known


class Purge(Properties, frozen=True):
    """PURGE: settle all that a subscription is owed, or empty a topic; answered by OK with PurgeReply.

    An answer comes after a second or so. Ask again with its number until it says that all is done.
    """

    TYPE = Type.PURGE

    topic: str
    subscription: str = ""  # "": the topic, with all its subscriptions and the messages for later
    number: int = 0  # of the purge to go on with; 0 begins one


class PurgeReply(Properties, frozen=True):
    """How far a purge is."""

    number: int  # 0: another purge had to be finished first; ask again
    messages: int  # that it has removed so far
    done: bool
