"""Which topics are read, and which of their partitions: options subscribe, subscribePattern, assign."""

import re
from collections.abc import Mapping, Sequence

import msgspec

from keylane.errors import InvalidArgument

_WAYS = ("subscribe", "subscribePattern", "assign")
_EXAMPLE = '{"orders":[0,2]}'


class TopicSelection(msgspec.Struct, frozen=True):
    """Topics by name, with all partitions or some; or whatever topics match a pattern, now and later."""

    topics: list[str]  # none with a pattern
    pattern: str | None = None
    partitions: dict[str, list[int]] | None = None  # None: all

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> "TopicSelection":
        """From options under their proper names; InvalidArgument says what is wrong with them."""
        ways = [name for name in _WAYS if name in given]
        if len(ways) > 1:
            raise InvalidArgument(f"give one of the options {' and '.join(map(repr, ways))}, not both")
        if "subscribePattern" in given:
            return cls([], _pattern(given["subscribePattern"]))
        if "assign" in given:
            partitions = _assigned(given["assign"])
            return cls(list(partitions), partitions=partitions)
        return cls(_topics(given.get("subscribe", "")))

    def covers(self, topic: str) -> bool:
        """Whether a topic of that name is read."""
        if self.pattern is not None:
            return re.fullmatch(self.pattern, topic) is not None
        return topic in self.topics

    def of(self, topic: str, count: int) -> Sequence[int]:
        """The partitions of a topic with so many that are read; those that there are not are refused."""
        if self.partitions is None:
            return range(count)
        chosen = self.partitions[topic]
        if beyond := [partition for partition in chosen if partition >= count]:
            raise InvalidArgument(
                f"option 'assign' names partition {beyond[0]} of {topic!r}, which has {count}: "
                f"0 to {count - 1}"
            )
        return chosen


def _topics(text: str) -> list[str]:
    topics = [name.strip() for name in text.split(",")]
    if not all(topics):
        raise InvalidArgument(
            f"option 'subscribe' is {text!r}: name the topic to read, or several as 'orders,payments'"
        )
    if len(set(topics)) < len(topics):
        raise InvalidArgument(f"option 'subscribe' is {text!r}: it names a topic twice")
    return topics


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise InvalidArgument(
            f"option 'subscribePattern' is {text!r}: it is not a regular expression ({error})"
        ) from None
    if not text:
        raise InvalidArgument("option 'subscribePattern' is '': use a regular expression such as 'orders-.*'")
    return text


def _assigned(text: str) -> dict[str, list[int]]:
    try:
        found = msgspec.json.decode(text, type=dict[str, list[int]])
    except msgspec.MsgspecError as error:
        raise InvalidArgument(
            f"option 'assign' is {text!r}: use the partitions of each topic as JSON, such as {_EXAMPLE} "
            f"({error})"
        ) from None
    if not found or not all(found.values()):
        raise InvalidArgument(f"option 'assign' is {text!r}: it leaves nothing to read; use {_EXAMPLE}")
    for topic, partitions in found.items():
        if min(partitions) < 0 or len(set(partitions)) < len(partitions):
            raise InvalidArgument(
                f"option 'assign' has {partitions} for {topic!r}: name each partition once, from 0 on"
            )
    return {topic: sorted(partitions) for topic, partitions in found.items()}
