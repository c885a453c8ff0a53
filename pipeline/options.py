"""The options of the data source: what .option(…) takes, checked before anything runs."""

import difflib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import NoReturn, TypeVar

import msgspec

from client import AsyncClient
from client.errors import InvalidArgument
from client.seeds import server_or_default, token_or_default
from client.times import typed
from pipeline.offsets import Start, parse_offsets

_CONNECTION = ("server", "token", "payloads")
_BATCH_ONLY = ("endingOffsets", "journal")
_STREAM_ONLY = ("maxOffsetsPerTrigger", "sessionTimeout")
READ_OPTIONS = (
    *_CONNECTION,
    "subscribe",
    "subscription",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "failOnDataLoss",
    "includeValue",
    "columns",
    "sessionTimeout",
    "journal",
)

T = TypeVar("T", int, float)


class Connection(msgspec.Struct, frozen=True):
    """How to reach the cluster and the payload store."""

    server: str
    token: str | None = None
    payloads: str | None = None
    timeout: float = 30.0  # seconds for which a broker that is away is looked for

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> "Connection":
        """From the options server, token and payloads, and the environment of the driver."""
        named = {name.lower(): value for name, value in options.items()}
        server = str(server_or_default(named.get("server") or None))
        if not server.startswith(("keylane://", "keylanes://")):
            refuse("server", server, "keylane://host:port, or several: keylane://a:9999,b:9999")
        return cls(server, token_or_default(named.get("token") or None), named.get("payloads") or None)

    def client(self) -> AsyncClient:
        """A client, to be entered with `async with`."""
        return AsyncClient(self.server, token=self.token, payloads=self.payloads, timeout=self.timeout)


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the options of a reader say."""

    connection: Connection
    topics: list[str]
    subscription: str | None
    start: Start
    end: Start
    since: datetime | None  # where to start instead of `start`
    max_offsets: int | None
    min_partitions: int
    fail_on_data_loss: bool
    include_value: bool
    columns: list[str] | None  # None: all that there are
    session: float  # seconds
    journal: bool

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool | None = False) -> "ReadOptions":
        """From the options as Spark has them; InvalidArgument names the one that cannot be right.

        `streaming` is None where it is not known yet.
        """
        given = known(options, READ_OPTIONS, "reads")
        for name in () if streaming is None else _BATCH_ONLY if streaming else _STREAM_ONLY:
            if name in given:
                raise InvalidArgument(
                    f"option {name!r} is for {'spark.read' if streaming else 'spark.readStream'} only"
                )
        topics = _topics(given)
        journal = _flag(given, "journal", False)
        subscription = given.get("subscription", "").strip() or None
        if streaming and subscription is None:
            raise InvalidArgument(
                "option 'subscription' is missing: a streaming query is a subscription, so give it a name "
                "of its own, such as .option('subscription', 'warehouse')"
            )
        if journal and subscription is not None:
            raise InvalidArgument(
                "option 'subscription' means nothing with journal=true: the journal is of all subscriptions; "
                "use .where(\"subscription = '…'\")"
            )
        if "startingOffsets" in given and "startingTimestamp" in given:
            raise InvalidArgument(
                "give one of the options 'startingOffsets' and 'startingTimestamp', not both"
            )
        if journal and "startingTimestamp" in given:
            raise InvalidArgument(
                "option 'startingTimestamp' means nothing with journal=true: use .where(\"timestamp >= '…'\")"
            )
        return cls(
            connection=Connection.parse(given),
            topics=topics,
            subscription=subscription,
            start=parse_offsets("startingOffsets", given.get("startingOffsets", "earliest"), topics),
            end=parse_offsets("endingOffsets", given.get("endingOffsets", "latest"), topics),
            since=_moment(given, "startingTimestamp"),
            max_offsets=_number(given, "maxOffsetsPerTrigger", int, "a whole number from 1 on"),
            min_partitions=_number(given, "minPartitions", int, "a whole number from 1 on") or 1,
            fail_on_data_loss=_flag(given, "failOnDataLoss", True),
            include_value=_flag(given, "includeValue", True),
            columns=_columns(given),
            session=_number(given, "sessionTimeout", float, "seconds from 1 on") or 10.0,
            journal=journal,
        )


def known(options: Mapping[str, str], names: tuple[str, ...], does: str) -> dict[str, str]:
    """The options under their proper names; one that there is not is refused."""
    proper = {name.lower(): name for name in names}
    given = {}
    for name, value in options.items():
        if name.lower() in proper:
            given[proper[name.lower()]] = value
        elif name.lower() == "path":
            raise InvalidArgument(
                f"keylane has no path {value!r}: name the topic with .option('subscribe', …) to read and "
                ".option('topic', …) to write"
            )
        else:
            close = difflib.get_close_matches(name.lower(), proper, 1)
            hint = f"did you mean {proper[close[0]]!r}?" if close else f"there are {', '.join(names)}"
            raise InvalidArgument(f"keylane has no option {name!r} where it {does}; {hint}")
    return given


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    """An option has a value that it cannot have."""
    raise InvalidArgument(f"option {name!r} is {value!r}: use {allowed}")


def _topics(given: dict[str, str]) -> list[str]:
    text = given.get("subscribe", "")
    topics = [name.strip() for name in text.split(",")]
    if not all(topics):
        raise InvalidArgument(
            f"option 'subscribe' is {text!r}: name the topic to read, or several as 'orders,payments'"
        )
    if len(set(topics)) < len(topics):
        raise InvalidArgument(f"option 'subscribe' is {text!r}: it names a topic twice")
    return topics


def _columns(given: dict[str, str]) -> list[str] | None:
    """The names as they are written; which there are, the columns themselves know."""
    if "columns" not in given:
        return None
    if "includeValue" in given:
        raise InvalidArgument("give one of the options 'columns' and 'includeValue', not both")
    return [name.strip() for name in given["columns"].split(",")]


def _flag(given: dict[str, str], name: str, default: bool) -> bool:
    text = given.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        refuse(name, given[name], "true or false")
    return text == "true"


def _number(given: dict[str, str], name: str, kind: Callable[[str], T], allowed: str) -> T | None:
    """A number from 1 on."""
    if name not in given:
        return None
    try:
        number = kind(given[name])
    except ValueError:
        refuse(name, given[name], allowed)
    if not 1 <= number <= 2**53:
        refuse(name, given[name], allowed)
    return number


def _moment(given: dict[str, str], name: str) -> datetime | None:
    if name not in given:
        return None
    text = given[name].strip()
    try:
        if text.isdecimal():
            return datetime.fromtimestamp(int(text) / 1000, UTC)
        return typed(text)
    except (ValueError, OverflowError, OSError):
        refuse(name, text, "milliseconds since 1970, or a time such as 2026-11-16T13:00:00Z")
