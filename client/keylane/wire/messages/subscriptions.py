"""Requests about subscriptions, and their replies."""

import msgspec

from keylane.wire.frames import Properties, Type

BACKOFF = (1.0, 2.0, 300.0, 0.2)  # of a subscription that is made without saying


class CreateSubscription(Properties, frozen=True):
    """CREATE_SUBSCRIPTION; answered by OK.

    `start` is "latest", "earliest", "time:<ms>" or an id "<partition>:<ledger>-<entry>". `backoff` is
    initial, factor, maximum, jitter, times in seconds; None is none.
    """

    TYPE = Type.CREATE_SUBSCRIPTION

    topic: str
    subscription: str
    mode: str = "shared"
    delivery: str = "at_least_once"
    lease_ms: int = 30_000
    backoff: tuple[float, float, float, float] | None = BACKOFF
    start: str = "latest"
    exist_ok: bool = False
    keys: str | None = None  # a glob that keys must fit
    filter: dict[str, str | None] | None = None  # attributes that must be equal, or, with None, there
    max_retries: int | None = None
    dead_letter: str = ""  # a topic; "": "<topic>.dead"
    poison: str = "skip"


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
    keys: str | None = None
    filter: dict[str, str | None] | None = None
    max_retries: int | None = None
    dead_letter: str = ""  # the topic
    poison: str = "skip"


class ChangeSubscription(Properties, frozen=True):
    """CHANGE_SUBSCRIPTION; answered by OK. Paused, it delivers to nobody; what is leased stays leased.

    Of the settings those are changed that `changes` names.
    """

    TYPE = Type.CHANGE_SUBSCRIPTION

    topic: str
    subscription: str
    paused: bool | None = None  # None: as it is
    changes: list[str] = []  # names of what follows
    lease_ms: int = 30_000
    backoff: tuple[float, float, float, float] | None = BACKOFF
    max_retries: int | None = None
    dead_letter: str = ""
    poison: str = "skip"


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


class MoveKey(Properties, frozen=True):
    """MOVE_KEY: have a consumer be the next one that gets a free key; answered by OK with MoveKeyReply."""

    TYPE = Type.MOVE_KEY

    topic: str
    subscription: str
    key: str
    consumer: str
    partition: int | None = None  # None: that of the key


class MoveKeyReply(Properties, frozen=True):
    """How many messages of the key wait for the consumer now."""

    waiting: int
