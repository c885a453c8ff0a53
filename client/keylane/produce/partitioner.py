"""Splits the messages of a call into slices, one for each partition, checked and counted."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from keylane.errors import InvalidArgument
from keylane.produce.columns import Columns, sort_columns
from keylane.produce.outgoing import Slice, check_texts, put_inline, sort, sort_one
from keylane.types import OutgoingMessage
from keylane.wire import pack_about


class Partitioner:
    """Places the messages of one producer by the number of partitions that a topic has now."""

    def __init__(
        self,
        group: str,
        drift: Callable[[], float],
        incarnation: Callable[[str], int],
        inline: Callable[[str], int],
    ) -> None:
        pack_about(0, group)  # raises InvalidName for a group that cannot be
        self._group = group
        self._drift = drift  # seconds that the cluster's clock is ahead of ours
        self._incarnation = incarnation  # of a topic
        self._inline = inline  # bytes of a body that a topic has inline

    def one(self, topic: str, message: OutgoingMessage, count: int, _: dict[int, Exception]) -> list[Slice]:
        """Place the only message of a call."""
        return self._measured(topic, [sort_one(message, count, self._group, self._drift())])

    def many(
        self, topic: str, messages: Sequence[OutgoingMessage], count: int, refused: dict[int, Exception]
    ) -> list[Slice]:
        """Place messages; those that cannot be sent are `refused`, by place, and hold back no others."""

        def sorted_by_partition(some: Sequence[OutgoingMessage]) -> list[Slice]:
            return self._measured(topic, sort(some, count, self._group, self._drift()))

        with suppress(Exception):  # of one of them, or more: the others go without these
            return sorted_by_partition(messages)
        good = []
        for place, message in enumerate(messages):
            try:
                sorted_by_partition([message])
                good.append(place)
            except Exception as error:
                refused[place] = error.with_traceback(None)  # which would keep all the messages
        slices = sorted_by_partition([messages[place] for place in good])
        for item in slices:
            item.places = [good[place] for place in item.places]
        return slices

    def columns(self, topic: str, columns: Columns, count: int, _: dict[int, Exception]) -> list[Slice]:
        """Place messages given as columns."""
        if not len(columns):
            return []
        return self._measured(topic, sort_columns(columns, count, self._group, self._drift()))

    def _measured(self, topic: str, slices: list[Slice]) -> list[Slice]:
        """Check the texts of slices, and count them."""
        incarnation, inline = self._incarnation(topic), self._inline(topic)
        for item in slices:
            if inline and item.bodies:
                put_inline(item, inline)
            if not isinstance(item.durability, str) or not item.durability:
                raise InvalidArgument(
                    f"durability is {item.durability!r:.60}: use memory, replicated or fsync"
                )
            check_texts(item.flat)
            item.text = sum(map(len, item.flat))
            item.incarnation = incarnation
        return slices
