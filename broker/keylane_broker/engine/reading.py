"""Reading partitions by position, which is the next entry to read; for this no partition lease is needed.

lines = await engine.read("orders", 3, start=1, end=5_001)     # go on from lines.next
"""

import re
from collections.abc import Mapping
from operator import itemgetter

from keylane.errors import InvalidArgument
from keylane.wire import MAX_BATCH, PartitionOffsets
from keylane.wire import lines as as_sent
from keylane.wire.about import body_name
from keylane.wire.ledgers import id_maker, ledgers_between
from keylane_broker.engine.answers import check_incarnation, checked
from keylane_broker.engine.base import STEP, EngineBase
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.values import Lines
from keylane_broker.limits import MAX_PARTITIONS, MAX_TIME_MS
from keylane_broker.store.keys import PartitionKeys, check_name, partition_keys
from keylane_broker.store.store import Call

MAX_LINES = 10_000  # of a log or a journal in one answer
_BYTES = 500_000  # in one answer, about
_FIRST = 100  # lines to read before it is known how large they are

_POSITION = re.compile(r"-|\d{1,14}-\d{1,14}")  # in a log, of owed()

_fields = itemgetter(1)
_message = itemgetter(1, 3, 5)  # the values of key, uid, about


class ReadOperations(EngineBase):
    """Logs and journals as they are."""

    async def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        limit: int = 5_000,
        journal: bool = False,
        incarnation: int = 0,
    ) -> Lines:
        """Return the entries from position `start` up to, not including, `end`, as far as one answer goes.

        TopicReplaced if the topic has another `incarnation`; 0 is any.
        """
        check_name("topic", topic)
        check_int("partition", partition, 0, MAX_PARTITIONS)
        check_int("limit", limit, 1, MAX_LINES)
        keys = partition_keys(topic, partition)
        ledgers, latest, there = await (self._journal_end if journal else self._log_end)(topic, partition)
        check_incarnation(topic, incarnation, there)
        if not (type(start) is int and type(end) is int and 1 <= start <= end <= latest):
            raise InvalidArgument(
                f"positions {start!r:.30} to {end!r:.30} of the {'journal' if journal else 'log'} of "
                f"partition {partition} of {topic!r}: use whole numbers from 1 to {latest}, the lower first"
            )
        stream, id_of = keys.journal if journal else keys.log, id_maker(ledgers or "0:1")
        lines = Lines([], ledgers, start)
        read, size, count, dense = 0, 0, _FIRST, True
        while lines.next < end and read < limit and size < _BYTES:
            count = min(count, limit - read)
            # Without holes it is known where as many lines end, and nobody has to look into the answer.
            stop = min(lines.next + count, end) if dense else end
            answer = await self.store.read_raw(
                "XRANGE", stream, id_of(lines.next), id_of(stop - 1), "COUNT", str(count)
            )
            found = as_sent.count(answer)
            if size + len(answer) > _BYTES:  # perhaps too large for a frame
                if lines.answers:
                    break
                if found > 1:
                    count = max(1, min(found // 2, _BYTES * found // len(answer)))
                    continue
            lines.answers.append(answer)
            lines.next = stop if dense or found < count else as_sent.entry_of(as_sent.parse(answer)[-1]) + 1
            read, size, dense = read + found, size + len(answer), dense and found == count
            count = min(MAX_BATCH, (_BYTES - size) * read // size + 1)  # as many as should fit
        # Numbers only grow: if it is the same behind the lines, they are of that topic.
        [still] = await self.store.read_all([("HGET", keys.meta, "incarnation")])
        check_incarnation(topic, there, int(still or 0))
        lines.ledgers = ledgers_between(ledgers, start, max(lines.next - 1, start))
        return lines

    async def owed(
        self, topic: str, partition: int, position: str = "", until_ms: int = MAX_TIME_MS
    ) -> tuple[list[str], str]:
        """Return some names of bodies that are still needed, and where to go on: "" at first, and at last.

        Those of messages for later come first, so that none is missed that falls due meanwhile; of the log
        those that were published before `until_ms`, of Redis time.
        """
        check_int("partition", partition, 0, MAX_PARTITIONS)
        keys = partition_keys(check_name("topic", topic), partition)
        kind, _, place = (position or "later 0").partition(" ")
        if kind == "later" and place.isdecimal():
            command = ("HSCAN", keys.delayed_data, place, "COUNT", str(STEP))
            [(cursor, found)] = await self.store.read_all([command])
            texts = zip(found[::2], (text.partition("\0")[2] for text in found[1::2]), strict=True)
            names = [body_name(uid, f"0 {about}") for uid, about in texts]
            return list(filter(None, names)), "log -" if cursor == "0" else f"later {cursor}"
        if kind != "log" or not _POSITION.fullmatch(place):
            raise InvalidArgument(
                f"position {position[:60]!r}: use the one that the previous answer returned"
            )
        after = place if place == "-" else f"({place}"
        page = ("XRANGE", keys.log, after, "+", "COUNT", str(MAX_BATCH))
        lines, lead = await self.store.read_all([page, ("HGET", keys.meta, "lead")])
        until_ms += int(lead or 0)  # what was published has the partition's time
        names = []
        for _, uid, about in map(_message, map(_fields, lines)):
            published_ms = about.partition(" ")[0]
            if published_ms.isdecimal() and int(published_ms) >= until_ms:
                return list(filter(None, names)), ""
            names.append(body_name(uid, about))
        return list(filter(None, names)), f"log {lines[-1][0]}" if len(lines) == MAX_BATCH else ""

    async def _log_end(self, topic: str, partition: int) -> tuple[str, int, int]:
        """Return a log's ledgers and the position behind it, of one instant, and its topic's incarnation."""
        meta = partition_keys(topic, partition).meta
        [found] = await self.store.read_all([("HMGET", meta, "ledgers", "last", "incarnation")])
        ledgers, last, incarnation = found
        if last is None:
            await self.no_partition(topic, partition)
        return ledgers, int(last) + 1, int(incarnation or 0)

    async def _journal_end(self, topic: str, partition: int) -> tuple[str, int, int]:
        script, keys, arguments = _offsets(partition_keys(topic, partition), "")
        answer = await self.store.run(script, keys, *arguments)
        if answer[0] == "NO_TOPIC":
            await self.no_partition(topic, partition)
        return "0:1", answer[6], answer[8]

    async def offsets(
        self, topic: str, subscription: str = "", ledgers: Mapping[int, int] | None = None
    ) -> list[PartitionOffsets]:
        """Return where each partition's log and journal begin and end, and how far the subscription is.

        And which entries were given since the `ledgers`, by partition, that are known.
        """
        for ledger in (known := ledgers or {}).values():
            check_int("ledger", ledger, 0, 10**14)
        if subscription:
            check_name("subscription", subscription)
        about = await self.describe_topic(topic)
        answers = await self.in_partitions(
            topic, about.partitions, lambda number, keys: _offsets(keys, subscription, known.get(number, 0))
        )
        found = []
        for answer in answers:
            _, earliest, latest, position, *others = checked(answer, topic, subscription)
            check_incarnation(topic, about.incarnation, others[4])
            found.append(PartitionOffsets(earliest, latest, position or None, *others))
        return found


def _offsets(keys: PartitionKeys, subscription: str, ledger: int = 0) -> Call:
    sub = keys.subscription(subscription).sub
    return "partition/offsets", [keys.meta, keys.log, keys.subs, sub, keys.journal], [subscription, ledger]
