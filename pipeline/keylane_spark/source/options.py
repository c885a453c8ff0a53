"""The options of the data source: what .option(…) takes, checked before anything runs."""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from keylane.errors import InvalidArgument
from keylane_spark.connection import Connection
from keylane_spark.options import known, refuse
from keylane_spark.source.parse_positions import parse_offsets, parse_time, parse_times
from keylane_spark.source.positions import Start, Times
from keylane_spark.source.topic_selection import TopicSelection

_CONNECTION = ("server", "token", "payloads")
_STARTS = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
_ENDS = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
_LIMITS = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
_BATCH_ONLY = _ENDS
_STREAM_ONLY = (*_LIMITS, "sessionTimeout")
READ_OPTIONS = (
    *_CONNECTION,
    "subscribe",
    "subscribePattern",
    "assign",
    "subscription",
    *_STARTS,
    *_ENDS,
    *_LIMITS,
    "minPartitions",
    "failOnDataLoss",
    "includeValue",
    "columns",
    "sessionTimeout",
    "journal",
)

_DELAY = 900.0  # seconds
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
_DURATION = re.compile(rf"(\d{{1,12}})\s*({'|'.join(_UNITS)})")

T = TypeVar("T", int, float)


class BatchLimits(msgspec.Struct, frozen=True):
    """How much a batch of a stream takes; None is no limit."""

    max_offsets: int | None = None
    max_bytes: int | None = None  # of bodies
    min_offsets: int | None = None  # with less than that waiting there is no batch yet
    delay: float = _DELAY  # seconds, unless the last batch was so long ago

    @classmethod
    def parse(cls, given: dict[str, str]) -> "BatchLimits":
        """From options under their proper names."""
        most, least = (
            _number(given, name, int, "a whole number from 1 on")
            for name in ("maxOffsetsPerTrigger", "minOffsetsPerTrigger")
        )
        if most is not None and least is not None and least > most:
            raise InvalidArgument(
                f"option 'minOffsetsPerTrigger' is {least}, more than 'maxOffsetsPerTrigger', {most}"
            )
        if least is None and "maxTriggerDelay" in given:
            raise InvalidArgument("option 'maxTriggerDelay' has no effect without 'minOffsetsPerTrigger'")
        return cls(
            most,
            _number(given, "maxBytesPerTrigger", int, "a number of bytes from 1 on"),
            least,
            _duration(given, "maxTriggerDelay", _DELAY),
        )


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the options of a reader say."""

    connection: Connection
    selection: TopicSelection
    subscription: str | None
    start: Start
    end: Start
    since: Times | None  # where to start instead of `start`
    until: Times | None  # where to end instead of `end`
    limits: BatchLimits
    min_partitions: int
    fail_on_data_loss: bool
    include_value: bool
    columns: list[str] | None  # None: all that there are
    session: float  # seconds
    journal: bool

    @property
    def topics(self) -> list[str]:
        """The topics that were named; with a pattern they are known only when the broker was asked."""
        return self.selection.topics

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool | None = False) -> "ReadOptions":
        """From the options as Spark has them; InvalidArgument names the one that cannot be right.

        `streaming` is None where it is not known yet.
        """
        given = known(options, READ_OPTIONS, "reading")
        for name in () if streaming is None else _BATCH_ONLY if streaming else _STREAM_ONLY:
            if name in given:
                raise InvalidArgument(
                    f"option {name!r} is for {'spark.read' if streaming else 'spark.readStream'} only"
                )
        selection = TopicSelection.parse(given)
        journal = _flag(given, "journal", False)
        subscription = given.get("subscription", "").strip() or None
        if streaming and subscription is None and not journal:
            raise InvalidArgument(
                "option 'subscription' is missing: a streaming query is a subscription, so give it a name "
                "of its own, such as .option('subscription', 'warehouse')"
            )
        if journal:
            _check_journal(given, subscription)
        for names in (_STARTS, _ENDS):
            if len(both := [name for name in names if name in given]) > 1:
                raise InvalidArgument(f"give one of the options {' and '.join(map(repr, both))}, not both")
        return cls(
            connection=Connection.parse(given),
            selection=selection,
            subscription=subscription,
            start=parse_offsets("startingOffsets", given.get("startingOffsets", "earliest"), selection),
            end=parse_offsets("endingOffsets", given.get("endingOffsets", "latest"), selection),
            since=_times(given, "startingTimestamp", "startingOffsetsByTimestamp", selection),
            until=_times(given, "endingTimestamp", "endingOffsetsByTimestamp", selection),
            limits=BatchLimits.parse(given),
            min_partitions=_number(given, "minPartitions", int, "a whole number from 1 on") or 1,
            fail_on_data_loss=_flag(given, "failOnDataLoss", True),
            include_value=_flag(given, "includeValue", True),
            columns=_columns(given),
            session=_number(given, "sessionTimeout", float, "seconds from 1 on") or 10.0,
            journal=journal,
        )


def _check_journal(given: dict[str, str], subscription: str | None) -> None:
    """Refuse what means nothing for a journal."""
    if subscription is not None:
        raise InvalidArgument(
            "option 'subscription' does not apply to journal=true: the journal is of all subscriptions; "
            "use .where(\"subscription = '…'\")"
        )
    for name in (*_STARTS[1:], *_ENDS[1:], "maxBytesPerTrigger", "sessionTimeout"):
        if name in given:
            hint = ": use .where(\"timestamp >= '…'\")" if "Timestamp" in name else ""
            raise InvalidArgument(f"option {name!r} does not apply to journal=true{hint}")


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


def _duration(given: dict[str, str], name: str, default: float) -> float:
    if name not in given:
        return default
    found = _DURATION.fullmatch(given[name].strip().lower())
    if found is None:
        refuse(name, given[name], "a duration with its unit, such as 500ms, 30s, 15m or 1h")
    return int(found[1]) * _UNITS[found[2]]


def _times(given: dict[str, str], everywhere: str, each: str, selection: TopicSelection) -> Times | None:
    """Positions by time: one time for all partitions, or one for each."""
    if everywhere in given:
        return Times(everywhere, parse_time(everywhere, given[everywhere]))
    return Times(each, None, parse_times(each, given[each], selection)) if each in given else None
