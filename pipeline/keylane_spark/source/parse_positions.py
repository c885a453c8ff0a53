"""Positions and times as options have them: startingOffsets, endingTimestamp and the like."""

from collections.abc import Mapping
from datetime import timedelta

import msgspec

from keylane.errors import InvalidArgument
from keylane.times import moment, typed
from keylane_spark.source.positions import EARLIEST, Start
from keylane_spark.source.topic_selection import TopicSelection

_FEBRUARY_1970 = 31 * 86_400_000


def parse_time(option: str, value: int | str) -> int:
    """A time as users write it, in ms; one in January 1970 was meant in seconds, unless it is the first."""
    text = str(value).strip()
    try:
        ms = int(text) if text.isdecimal() else -((moment(0) - typed(text)) // timedelta(milliseconds=1))
        when = moment(ms)
    except (ValueError, OverflowError, OSError):
        raise InvalidArgument(
            f"option {option!r} is {text!r}: use milliseconds since 1970, or a time such as "
            "2026-11-16T13:00:00Z"
        ) from None
    if ms and ms < _FEBRUARY_1970:
        hint = f" (perhaps {text}000?)" if text.isdecimal() else ""
        raise InvalidArgument(
            f"option {option!r} is {text!r}, which is {when:%Y-%m-%d}: use milliseconds since 1970, and not "
            f"seconds{hint}"
        )
    return ms


def parse_times(option: str, text: str, selection: TopicSelection) -> dict[str, dict[int, int]]:
    """What startingOffsetsByTimestamp and endingOffsetsByTimestamp take."""
    try:
        found = msgspec.json.decode(text, type=dict[str, dict[int, int | str]])
    except msgspec.MsgspecError as error:
        raise InvalidArgument(
            f"option {option!r} is {text!r}: use times as JSON, milliseconds since 1970, such as "
            f'{{"orders":{{"0":1794803456000}}}} ({error})'
        ) from None
    _check_covered(option, found, selection)
    return {topic: {p: parse_time(option, value) for p, value in of.items()} for topic, of in found.items()}


def parse_offsets(option: str, text: str, selection: TopicSelection) -> Start:
    """What startingOffsets and endingOffsets take; InvalidArgument says what is wrong with it."""
    text = text.strip()
    if text.lower() in ("earliest", "latest"):
        if (option, text.lower()) == ("endingOffsets", "earliest"):
            raise InvalidArgument(f"option {option!r} is 'earliest': nothing would be read")
        return "earliest" if text.lower() == "earliest" else "latest"
    try:
        positions = msgspec.json.decode(text, type=dict[str, dict[int, int]])
    except msgspec.MsgspecError as error:
        topic = (selection.topics or ["orders"])[0]
        raise InvalidArgument(
            f"option {option!r} is {text!r}: use earliest, latest, or positions as JSON, "
            f'such as {{"{topic}":{{"0":17,"1":-2}}}} where -2 is earliest and -1 latest ({error})'
        ) from None
    _check_covered(option, positions, selection)
    for topic, of in positions.items():
        for partition, position in of.items():
            if position < EARLIEST or position == 0:
                raise InvalidArgument(
                    f"option {option!r} has position {position} in partition {partition} of {topic!r}: use "
                    "1 for the first entry and so on, -2 for earliest, -1 for latest"
                )
    return positions


def _check_covered(option: str, found: Mapping[str, Mapping[int, object]], selection: TopicSelection) -> None:
    """Refuse positions in what is not read."""
    way = (
        "subscribePattern"
        if selection.pattern is not None
        else "assign"
        if selection.partitions
        else "subscribe"
    )
    for topic, of in found.items():
        if not selection.covers(topic):
            raise InvalidArgument(f"option {option!r} names topic {topic!r}, which {way!r} does not")
        for partition in of:
            if partition < 0 or (selection.partitions and partition not in selection.partitions[topic]):
                raise InvalidArgument(
                    f"option {option!r} names partition {partition} of {topic!r}, which {way!r} does not"
                )
