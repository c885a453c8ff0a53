"""Requests about subscriptions, and their replies."""

import msgspec

from keylane.wire.frames import Properties, Type


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
