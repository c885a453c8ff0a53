"""Messages on their way from a partition to other topics: dead letters, and what is redriven.

A script writes them into the partition's outbox in the step in which they leave it. Whoever empties the
outbox appends them where they belong, and only then removes them here. The other partition knows up to which
number it has taken them in, so whatever crashes in between, or is done twice at the same time, nothing is
lost or doubled.

moved = await engine.empty_outbox("orders", 3)      # {("orders.dead", 3)}: who serves these is to look
"""

import logging
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

from keylane.errors import TopicNotFound, Unavailable
from keylane_broker.engine.answers import checked
from keylane_broker.engine.topics import TopicOperations
from keylane_broker.engine.values import Place, TopicSettings
from keylane_broker.limits import FOREVER
from keylane_broker.store.keys import partition_keys

log = logging.getLogger("keylane.broker")

_RECORDS = 100  # of an outbox in one round, of dead letters, each of which has one;
_LARGE = 4  # of what is redriven: a record has as many as were withdrawn in one call
_TEXT = 500_000  # characters in one call, unless a record has more


class _Record(NamedTuple):
    number: str
    kind: str  # "dead" or "redriven"
    to: str  # the topic
    partition: int
    messages: str  # JSON


class OutboxOperations(TopicOperations):
    """What anybody may do who knows a partition; this needs no lease."""

    async def empty_outbox(self, topic: str, partition: int) -> set[Place]:
        """Send all that a partition has for others; returns the partitions that have got something.

        Raises Unavailable where one of these has no owner yet: what is left is sent by the next call.
        """
        keys, moved, limit = partition_keys(topic, partition), set[Place](), _LARGE
        await self.bury(topic, partition)
        while True:
            [found] = await self.store.read_all([("XRANGE", keys.outbox, "-", "+", "COUNT", str(limit))])
            records = [
                _Record(number, fields[1], fields[3], int(fields[5]), fields[7]) for number, fields in found
            ]
            for group in _together(records):
                moved |= await self._send((topic, partition), group)
                await self.store.read_all([("XDEL", keys.outbox, *(record.number for record in group))])
            if len(records) < limit:
                return moved
            limit = _RECORDS if all(record.kind == "dead" for record in records) else _LARGE

    async def _send(self, source: Place, records: list[_Record]) -> set[Place]:
        """Append records, all for one partition, where they belong."""
        _, kind, topic, number, _ = records[0]
        try:
            about = (
                await self._receiver(topic, source[0]) if kind == "dead" else await self.describe_topic(topic)
            )
        except TopicNotFound:
            log.warning("messages that were redriven to %r go with it: the topic was deleted", topic)
            return set()
        [incarnation] = await self.store.read_all([("HGET", partition_keys(*source).meta, "incarnation")])
        place = topic, number % about.partitions
        keys = partition_keys(*place)
        answer = await self.store.run(
            "partition/receive",
            [keys.meta, keys.log, keys.subs, keys.journal, keys.bodies, keys.received],
            f"{source[0]}:{source[1]}:{incarnation}",
            "1" if kind == "dead" else "",
            *(text for record in records for text in (record.number, record.messages)),
        )
        if answer[0] == "UNOWNED":
            raise Unavailable(f"partition {place[1]} of {topic!r} has no owner yet; try again")
        checked(answer, topic, partition=place[1])
        return {place} if answer[2] else set()

    async def _receiver(self, topic: str, source: str) -> TopicSettings:
        """Return the topic that dead letters are for, which keeps them; made when it is first needed."""
        try:
            about = await self.describe_topic(topic)
        except TopicNotFound:
            partitions = (await self.describe_topic(source)).partitions
            keeping = TopicSettings(partitions, retention_ms=FOREVER)
            about = await self.create_topic(topic, keeping, exist_ok=True)
            await self.topic_made()
        if about.retention_ms != FOREVER or about.retention_bytes:  # somebody else has made it
            about = await self.change_topic(topic, retention_ms=FOREVER, retention_bytes=0)
        return about

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic with all that is in it, once what it has for others is on its way."""
        try:
            count = (await self.describe_topic(topic)).partitions
        except TopicNotFound:  # or half-deleted
            count = 0
        every = [partition_keys(topic, partition) for partition in range(count)]
        lengths = await self.store.read_all(
            [("XLEN", key) for keys in every for key in (keys.dead, keys.outbox)]
        )
        for partition in sorted({at // 2 for at, length in enumerate(lengths) if length}):
            with suppress(Unavailable):
                await self.empty_outbox(topic, partition)
        await super().delete_topic(topic)


def _together(records: list[_Record]) -> Iterator[list[_Record]]:
    """Return those that one call takes in: all for one partition, and no more than it does in some ms."""
    for (kind, *_), group in groupby(records, lambda record: record[1:4]):
        some, length, most = list[_Record](), 0, _RECORDS if kind == "dead" else _LARGE
        for record in group:
            if len(some) == most or (some and length + len(record.messages) > _TEXT):
                yield some
                some, length = [], 0
            some.append(record)
            length += len(record.messages)
        yield some
