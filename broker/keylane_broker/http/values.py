"""What requests say and answers tell, as JSON; the OpenAPI document is made of these types."""

from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from keylane.types import Backoff, Delivery, Mode, Outcome, Poison
from keylane.wire import MAX_INLINE
from keylane_broker.store.keys import check_name

MOST_MESSAGES = 1_000  # of one request
MOST_WAIT = 60.0  # seconds of a long poll

# As the broker checks names; said here so that the document says it. What says one has it in `_names`, too.
NAME, LONGEST_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$", 200
Name = Annotated[str, Meta(extra_json_schema={"pattern": NAME, "maxLength": LONGEST_NAME})]
MOST_BODIES = 10_000  # of one request
BODY_NAME = r"^[0-9A-Za-z]{27}$"  # a KSUID
BodyName = Annotated[str, Meta(pattern=BODY_NAME)]
Count = Annotated[int, Meta(ge=1)]
Duration = Annotated[float, Meta(ge=0)]


class Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a request says: a name that is not known is an error, which may be a word misspelt."""

    _names: ClassVar[dict[str, str]] = {}  # the fields that are names, and of what

    def __post_init__(self) -> None:
        """Raise InvalidName for a name that cannot be one."""
        for field, kind in self._names.items():
            if isinstance(name := getattr(self, field), str):
                check_name(kind, name)

    def options(self, *but: str) -> dict[str, Any]:
        """Return what was said, as arguments of the client; what was not has its default there."""
        fields = msgspec.structs.asdict(self)
        return {name: value for name, value in fields.items() if value is not UNSET and name not in but}


class NewTopic(Said, frozen=True):
    """A topic to create."""

    _names = {"name": "topic"}

    name: Name
    partitions: Count | UnsetType | None = UNSET
    dedupe_window: Duration | UnsetType | None = UNSET
    journal: bool | int | UnsetType = UNSET
    retention: Duration | Literal["forever"] | UnsetType | None = UNSET
    retention_bytes: Count | UnsetType | None = UNSET
    ttl: Duration | UnsetType | None = UNSET
    backlog_quota: Count | UnsetType | None = UNSET
    backlog_quota_bytes: Count | UnsetType | None = UNSET
    spread: Annotated[int, Meta(ge=1, le=8)] | UnsetType = UNSET
    inline: Annotated[int, Meta(ge=0, le=MAX_INLINE)] | UnsetType = UNSET
    exist_ok: bool = False


class TopicChange(Said, frozen=True):
    """Settings of a topic that change."""

    journal: bool | int | UnsetType = UNSET
    retention: Duration | Literal["forever"] | UnsetType | None = UNSET
    retention_bytes: Count | UnsetType | None = UNSET
    ttl: Duration | UnsetType | None = UNSET
    backlog_quota: Count | UnsetType | None = UNSET
    backlog_quota_bytes: Count | UnsetType | None = UNSET
    spread: Annotated[int, Meta(ge=1, le=8)] | UnsetType = UNSET
    dedupe_window: Duration | UnsetType = UNSET


class NewSubscription(Said, frozen=True):
    """A subscription to create; `backoff` in seconds, or by its parts."""

    _names = {"name": "subscription", "dead_letter": "topic"}

    name: Name
    mode: Mode | UnsetType = UNSET
    start: str = "latest"
    lease: Duration | UnsetType = UNSET
    max_retries: Annotated[int, Meta(ge=0)] | UnsetType | None = UNSET
    backoff: float | Backoff | UnsetType | None = UNSET
    dead_letter: Name | UnsetType | None = UNSET
    poison: Poison | UnsetType = UNSET
    delivery: Delivery | UnsetType = UNSET
    keys: str | UnsetType | None = UNSET
    filter: dict[str, str | None] | UnsetType | None = UNSET
    exist_ok: bool = False


class SubscriptionChange(Said, frozen=True):
    """Settings of a subscription that change; without any, nothing does."""

    _names = {"dead_letter": "topic"}

    paused: bool | UnsetType = UNSET
    lease: Duration | UnsetType = UNSET
    max_retries: Annotated[int, Meta(ge=0)] | UnsetType | None = UNSET
    backoff: float | Backoff | UnsetType | None = UNSET
    dead_letter: Name | UnsetType | None = UNSET
    poison: Poison | UnsetType = UNSET


class DeadLetterQuery(Said, frozen=True):
    """Which dead letters to list; `reason` is a part of it."""

    _names = {"subscription": "subscription"}

    subscription: Name | None = None
    reason: str | None = None
    key: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MOST_MESSAGES)] = 100


class DeadLetterChoice(Said, frozen=True):
    """Which dead letters are meant: all that fit what is said, by default all."""

    _names = {"subscription": "subscription"}

    subscription: Name | UnsetType = UNSET
    ids: Annotated[list[str], Meta(max_length=MOST_MESSAGES)] | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    key: str | UnsetType = UNSET


class Redriven(msgspec.Struct, frozen=True):
    """How many messages were sent back."""

    messages: int


class Unpark(Said, frozen=True):
    """Which lane is to go on, and how; without a key those that have none."""

    key: str | None = None
    action: Literal["resume", "skip", "redrive"] | UnsetType = UNSET
    id: str | UnsetType = UNSET


class KeyMove(Said, frozen=True):
    """Which key, and which consumer is to get it next."""

    _names = {"consumer": "consumer"}

    key: str
    consumer: Name
    partition: int | UnsetType = UNSET


class Moved(msgspec.Struct, frozen=True):
    """How many messages of a key wait for the consumer that it was moved to."""

    waiting: int


class Position(Said, frozen=True):
    """Where to go on: "earliest", "latest", an id or a time such as 2026-11-18T09:00:00Z."""

    position: str


class NewMessage(Said, frozen=True):
    """A message to publish, its body as text or in base64."""

    data: str | None = None
    data_base64: bytes | None = None
    key: str | None = None
    attributes: dict[str, str] | None = None
    partition: int | None = None
    uid: str | None = None
    durability: str | None = None
    delay: Duration | None = None
    deliver_at: datetime | None = None
    ttl: Duration | None = None
    expires_at: datetime | None = None
    priority: Annotated[int, Meta(ge=0, le=9)] | None = None
    producer_group: str | None = None


class NewMessages(Said, frozen=True):
    """Messages to publish, those of a partition in this order."""

    messages: Annotated[list[NewMessage], Meta(min_length=1, max_length=MOST_MESSAGES)]


class Result(msgspec.Struct, frozen=True):
    """What became of a message: it was published, or there are `code` and `detail` of an error."""

    id: str | None = None
    partition: int | None = None
    uid: str | None = None
    durability: str | None = None
    duplicate: bool = False
    no_subscribers: bool = False
    delayed: bool = False
    code: str | UnsetType = UNSET
    detail: str | UnsetType = UNSET


class Results(msgspec.Struct, frozen=True):
    """What became of messages, in the order of the request."""

    published: list[Result]


class Failure(msgspec.Struct, frozen=True):
    """A line of a stream that was not published."""

    line: int
    code: str
    detail: str


class Streamed(msgspec.Struct, frozen=True):
    """What became of a stream of messages; of those that failed the first hundred."""

    published: int
    failed: int
    failures: list[Failure]


class LeaseRequest(Said, frozen=True):
    """How many messages to lease, and how many seconds to wait for the first."""

    _names = {"consumer": "consumer"}

    max_messages: Annotated[int, Meta(ge=1, le=MOST_MESSAGES)] = 10
    wait: Annotated[float, Meta(ge=0, le=MOST_WAIT)] = 0.0
    consumer: Name | None = None
    lease: Duration | None = None


class LeasedMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message on lease; its body is text where it can be, else in base64."""

    receipt: str
    topic: str
    id: str
    key: str | None
    attributes: dict[str, str]
    retry_count: int
    token: int
    uid: str
    partition: int
    age: float  # seconds since it was published
    produced_at: datetime
    published_at: datetime
    deadline: datetime
    producer_group: str | None
    data: str | None = None
    data_base64: bytes | None = None
    missing: bool = False  # its body is not in the payload store
    size: int = 0  # bytes of its body
    body: str | None = None  # where to get it, if it is too large to be in here


class Leased(msgspec.Struct, frozen=True):
    """Messages on lease, none if there were none in time."""

    messages: list[LeasedMessage]


class BodyNames(Said, frozen=True):
    """Bodies, by their names in the payload store."""

    names: Annotated[list[BodyName], Meta(min_length=1, max_length=MOST_BODIES)]


class BodiesFound(msgspec.Struct, frozen=True):
    """Which bodies there are, in the order asked for."""

    found: list[bool]


class StoredBody(msgspec.Struct, frozen=True):
    """A body that is stored."""

    name: str
    size: int


class EventsQuery(Said, frozen=True):
    """Who gets events, and how many of them unsettled."""

    _names = {"consumer": "consumer"}

    consumer: Name | None = None
    permits: Annotated[int, Meta(ge=1, le=MOST_MESSAGES)] = 100


class Acks(Said, frozen=True):
    """What is done with."""

    receipts: Annotated[list[str], Meta(min_length=1, max_length=MOST_MESSAGES)]


class Nacks(Said, frozen=True):
    """What is to be delivered again, after so many seconds, at an instant, or after the backoff; and why."""

    receipts: Annotated[list[str], Meta(min_length=1, max_length=MOST_MESSAGES)]
    delay: Duration | None = None
    until: datetime | None = None
    reason: str | None = None


class Extensions(Said, frozen=True):
    """Whose lease is to last so many seconds from now on, or until an instant."""

    receipts: Annotated[list[str], Meta(min_length=1, max_length=MOST_MESSAGES)]
    seconds: Annotated[float, Meta(gt=0)] | None = None
    until: datetime | None = None


class Outcomes(msgspec.Struct, frozen=True):
    """What became of each receipt."""

    results: list[Outcome]


class Skip(Said, frozen=True):
    """The id of a message."""

    id: str


class ExplainQuery(Said, frozen=True):
    """The id or uid of a message, and where to look for a uid."""

    id: str
    partition: int | None = None


class Purged(msgspec.Struct, frozen=True):
    """How many messages are gone."""

    messages: int


class Move(Said, frozen=True):
    """The worker that is to serve a partition, and partitions that are not to move in its place."""

    _names = {"worker": "worker"}

    worker: Name
    keep: list[tuple[Name, int]] | UnsetType = UNSET


class DeletionQuery(Said, frozen=True):
    """Where to look for a uid, and the producer group of who asks: a message of another one stays."""

    partition: int | None = None
    producer_group: str = ""


class NewTokenRequest(Said, frozen=True):
    """A token to create: for whom, what it allows ("produce:orders.*"), and for how many seconds."""

    _names = {"name": "token"}

    name: Name
    allow: Annotated[list[str], Meta(min_length=1)]
    lifetime: Annotated[float, Meta(gt=0)] | None = None


class Drain(Said, frozen=True):
    """Whether a worker is to give up its partitions."""

    draining: bool = True


class Rebalance(Said, frozen=True):
    """Whether to say only what would be done."""

    dry_run: bool = False


class Info(msgspec.Struct, frozen=True):
    """The broker."""

    version: str
    worker: str
    workers: list[str]
    time: datetime


class Topics(msgspec.Struct, frozen=True):
    """The names of all topics."""

    topics: list[str]


class Subscriptions(msgspec.Struct, frozen=True):
    """The names of a topic's subscriptions."""

    subscriptions: list[str]


class HotKeysQuery(Said, frozen=True):
    """How many keys to name."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 10


class PeekQuery(Said, frozen=True):
    """What to peek at."""

    partition: int | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 10
    bodies: bool = False


class PeekedMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """An unsettled message, `state` fresh, leased or waiting; if asked for its body is as in one on lease."""

    id: str
    key: str | None
    uid: str
    attributes: dict[str, str]
    size: int  # of its body
    producer_group: str
    produced_at: datetime
    published_at: datetime
    state: str
    consumer: str  # who has it leased
    retry_count: int
    due: datetime | None  # the lease's deadline, or when it falls due again
    data: str | None = None
    data_base64: bytes | None = None
    missing: bool = False  # its body is not in the payload store
    body: str | None = None  # where to get it, if it is too large to be in here


class Health(msgspec.Struct, frozen=True):
    """That a worker is well."""

    status: str
