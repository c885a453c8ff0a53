"""Where a reader is: the position (the next entry to read) in each partition of each topic."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal

import msgspec

from keylane.errors import InvalidArgument
from keylane.times import moment, typed
from keylane_spark.source.topic_selection import TopicSelection

EARLIEST, LATEST = -2, -1
_FEBRUARY_1970 = 31 * 86_400_000
_IDENTITY = "#identity"  # among names of topics, in which there is no such character

Positions = dict[str, dict[int, int]]  # topic -> partition -> position
Start = Literal["earliest", "latest"] | Positions


class Identity(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the positions in a topic are of: others of these names have other numbers.

    `sought` has the partitions that a seek has moved. `ledgers` are by partition: all before the position was
    given in that one, or before. If the position is at an entry that was given later, the server has lost
    writes.
    """

    topic: int
    subscription: int
    sought: dict[int, int] = {}
    ledgers: dict[int, int] = {}

    def moves(self, partition: int) -> int:
        """A number that each seek makes larger."""
        return self.sought.get(partition, self.subscription)


Identities = dict[str, Identity]  # by topic


class Range(msgspec.Struct, frozen=True):
    """Entries of a partition from `start` up to, but without, `end`."""

    topic: str
    partition: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """How many entries it spans."""
        return max(0, self.end - self.start)


class Times(msgspec.Struct, frozen=True):
    """Positions by time of publishing, ms, as an option has them: of all partitions, or of each."""

    option: str
    everywhere: int | None = None
    each: dict[str, dict[int, int]] = {}

    def of(self, topic: str, partition: int) -> int | None:
        """The time for a partition, None where none was given."""
        return self.each.get(topic, {}).get(partition) if self.everywhere is None else self.everywhere


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


def wanted(start: Start, topic: str, partition: int, default: int) -> int:
    """What was asked for in a partition: a position, EARLIEST or LATEST."""
    if isinstance(start, str):
        return EARLIEST if start == "earliest" else LATEST
    return start.get(topic, {}).get(partition, default)


def dump(positions: Positions, identities: Identities) -> dict[str, Any]:
    """As Spark keeps it in the checkpoint: JSON has no numbers for keys."""
    return {**dump_positions(positions), _IDENTITY: msgspec.to_builtins(identities, str_keys=True)}


def dump_positions(positions: Positions) -> dict[str, Any]:
    """Positions alone, to be shown."""
    return {topic: {str(p): at for p, at in sorted(of.items())} for topic, of in sorted(positions.items())}


def load(offset: Mapping[str, Any]) -> tuple[Positions, Identities]:
    """What dump was given; InvalidArgument if it does not say which topics it is of."""
    named = {topic: of for topic, of in offset.items() if topic != _IDENTITY}
    try:
        positions = msgspec.convert(named, type=Positions, strict=False)
        identities = msgspec.convert(offset.get(_IDENTITY, {}), type=Identities, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidArgument(
            f"the checkpoint has {offset!r}, which is no offset of keylane ({error}): is it of another query?"
        ) from None
    if unknown := positions.keys() - identities.keys():
        raise InvalidArgument(
            f"the checkpoint does not say which topic {min(unknown)!r} it is of: it was written by an older "
            "Keylane. Start the query with a new checkpointLocation"
        )
    return positions, identities


def ranges(start: Positions, end: Positions) -> list[Range]:
    """What lies between, partition by partition, leaving out those where nothing does."""
    return [
        Range(topic, partition, start.get(topic, {}).get(partition, at), at)
        for topic, of in end.items()
        for partition, at in of.items()
        if start.get(topic, {}).get(partition, at) < at
    ]


def common(before: Positions, begin: Positions) -> Positions:
    """The positions that are in both: where a query had to go back, what it reads is not what was there."""
    return {
        topic: {partition: at for partition, at in of.items() if begin.get(topic, {}).get(partition) == at}
        for topic, of in before.items()
    }


def split(whole: Sequence[Range], least: int) -> list[Range]:
    """Cut ranges so that there are about `least`, the larger a range the more pieces."""
    total = sum(range_.size for range_ in whole)
    if len(whole) >= least or not total:
        return list(whole)
    pieces: list[Range] = []
    for range_ in whole:
        count = min(range_.size, max(1, round(range_.size / total * least)))
        cuts = [range_.start + range_.size * at // max(1, count) for at in range(count)] + [range_.end]
        pieces += [Range(range_.topic, range_.partition, first, end) for first, end in pairwise(cuts)]
    return pieces


def admit(start: Positions, end: Positions, rows: int) -> Positions:
    """The end of a batch of at most `rows`, each partition getting its share by what waits in it."""
    backlog = {(range_.topic, range_.partition): range_.size for range_ in ranges(start, end)}
    total = sum(backlog.values())
    if total <= rows:
        return end
    share = {place: waiting * rows // total for place, waiting in backlog.items()}
    # What rounding leaves goes to the partitions that lost most by it, so that none waits for ever.
    rest = sorted(backlog, key=lambda place: (-(backlog[place] * rows % total), place))
    for place in rest[: rows - sum(share.values())]:
        share[place] += 1
    return {
        topic: {
            partition: start[topic][partition] + share[topic, partition]
            if (topic, partition) in share
            else at
            for partition, at in of.items()
        }
        for topic, of in end.items()
    }
