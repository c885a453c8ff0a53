"""Reading by position: what a subscription of mode `cursor` is for. No partition lease is needed.

page = await engine.read("orders", 3, start=1, end=5_001)
await engine.claim("orders", "spark", "query-1", session_ms=10_000)
await engine.commit("orders", "spark", "query-1", 3, 5_001)
"""

from collections.abc import Iterable
from itertools import chain
from operator import itemgetter
from typing import Any

from broker.administration import STEP, Administration, checked, partition_keys, subscription_keys
from broker.arguments import MAX_MS, check_int, id_maker, rows
from broker.keys import check_name
from broker.results import Claimed, Committed, Lines
from client.errors import InvalidArgument, SubscriptionBusy, TopicNotFound
from client.wire import MAX_BATCH, PartitionOffsets

MAX_LINES = 10_000  # of a log or a journal in one answer
_TEXTS = 500_000  # characters in one answer, about
_ENTRIES = 10**14

_fields = itemgetter(1)
_message = itemgetter(1, 3, 5)  # the values of key, uid, about
_record = itemgetter(1, 3, 5, 7, 9)  # and of at, what, sub, by, entries


class Reading(Administration):
    """Logs and journals as they are, and the subscription whose reader says how far it is."""

    async def read(
        self, topic: str, partition: int, start: int, end: int, *, limit: int = 5_000, journal: bool = False
    ) -> Lines:
        """The entries from position `start` up to, not including, `end`, as far as one answer takes them."""
        check_name("topic", topic)
        check_int("limit", limit, 1, MAX_LINES)
        check_int("partition", partition, 0, _ENTRIES)
        _check_range(start, end)
        keys = partition_keys(topic, partition)
        if journal:
            return await self._read_lines(keys.journal, "0:1", start, end, limit, _record)
        ledgers, last = await self._ledgers_of(topic, partition)
        if end > last + 1:
            raise InvalidArgument(
                f"the range {start} to {end} goes beyond the log of partition {partition} of {topic!r}, "
                f"whose next entry is {last + 1}"
            )
        return await self._read_lines(keys.log, ledgers, start, end, limit, _message)

    async def _ledgers_of(self, topic: str, partition: int) -> tuple[str, int]:
        [found] = await self.store.read_all(
            [("HMGET", partition_keys(topic, partition).meta, "ledgers", "last")]
        )
        if found[1] is None:
            await self._no_partition(topic, partition)
        return found[0], int(found[1])

    async def _no_partition(self, topic: str, partition: int) -> None:
        count = (await self.describe_topic(topic)).partitions
        raise TopicNotFound(f"no partition {partition} in topic {topic!r}: it has 0 to {count - 1}")

    async def _read_lines(
        self, stream: str, ledgers: str, start: int, end: int, limit: int, values: "itemgetter[Any]"
    ) -> Lines:
        lines = Lines([], [], ledgers, start)
        id_of = id_maker(ledgers or "0:1")
        size = 0
        while lines.next < end and limit > 0 and size < _TEXTS:
            count = min(limit, MAX_BATCH, end - lines.next)
            bounds = (id_of(lines.next), id_of(end - 1), "COUNT", str(count))
            [found] = await self.store.read_all([("XRANGE", stream, *bounds)])
            flat = list(chain.from_iterable(map(values, map(_fields, found))))
            size += sum(map(len, flat))
            limit -= len(found)
            lines.flat.extend(flat)
            _extend_ranges(lines.ranges, found)
            lines.next = lines.ranges[-1] + 1 if len(found) == count else end
        return lines

    async def offsets(self, topic: str, subscription: str = "") -> list[PartitionOffsets]:
        """Where each partition's log and journal begin and end, and how far the subscription is."""
        if subscription:
            check_name("subscription", subscription)
        count = (await self.describe_topic(topic)).partitions
        answers = await self._in_partitions(
            topic,
            count,
            lambda keys: (
                "partition/offsets",
                [keys.meta, keys.log, keys.subs, keys.subscription(subscription).sub, keys.journal],
                [subscription],
            ),
        )
        found = []
        for answer in answers:
            _, earliest, latest, position, *others = checked(answer, topic, subscription)
            found.append(PartitionOffsets(earliest, latest, position or None, *others))
        return found

    async def claim(self, topic: str, subscription: str, reader: str, session_ms: int) -> Claimed:
        """Open or renew the session of a subscription's one reader on every partition."""
        check_name("subscription", subscription)
        check_name("reader", reader)
        check_int("session_ms", session_ms, 1, MAX_MS)
        count = (await self.describe_topic(topic)).partitions
        keys = subscription_keys(topic, 0, subscription)
        first = await self.store.run("subscription/claim", keys, "", subscription, reader, session_ms, "")
        others = []
        if checked(first, topic, subscription)[0] == "OK":
            others = await self._in_partitions(
                topic,
                count,
                lambda keys: (
                    "subscription/claim",
                    keys.subscription(subscription),
                    ["", subscription, reader, session_ms, first[1]],
                ),
            )
        for answer in (first, *others):
            if checked(answer, topic, subscription)[0] == "BUSY":
                return Claimed(False, answer[1], answer[2])
        return Claimed(True, reader, session_ms)

    async def release_claim(self, topic: str, subscription: str, reader: str) -> None:
        """End a reader's session, if it has one; what it read last it may still commit."""
        check_name("subscription", subscription)
        check_name("reader", reader)
        answers = await self._in_partitions(
            topic,
            (await self.describe_topic(topic)).partitions,
            lambda keys: (
                "subscription/claim",
                keys.subscription(subscription),
                ["", subscription, reader, "", ""],
            ),
        )
        for answer in answers:
            checked(answer, topic, subscription)

    async def commit(
        self, topic: str, subscription: str, reader: str, partition: int, position: int, *, steps: int = 0
    ) -> Committed:
        """All before a position is done with: what nobody else owes leaves the log, and its bodies are named.

        In so many steps at most, of a thousand entries each; 0 is no limit.
        """
        check_name("reader", reader)
        check_int("position", position, 1, _ENTRIES)
        keys = subscription_keys(check_name("topic", topic), partition, subscription)
        result = Committed()
        while not result.done and not (steps and result.steps >= steps):
            [(ledgers, last), cursors] = await self.store.read_all(
                [("HMGET", keys.meta, "ledgers", "last"), ("HGETALL", keys.subs)]
            )
            if last is None:
                await self._no_partition(topic, partition)
            others = dict(rows(cursors, 2))
            cursor = int(others.pop(subscription, 0))
            upto = min(position - 1, int(last), *map(int, others.values()))
            found = []
            if cursor < upto:
                # Read before they go: by a plain command, which is a fraction of what a script needs.
                id_of = id_maker(ledgers)
                bounds = (id_of(cursor + 1), id_of(upto), "COUNT", str(STEP))
                [found] = await self.store.read_all([("XRANGE", keys.log, *bounds)])
            answer = checked(
                await self.store.run(
                    "subscription/commit", keys, "", subscription, reader, position - 1, STEP
                ),
                topic,
                subscription,
            )
            if answer[0] == "BUSY":
                raise SubscriptionBusy(_whose(topic, subscription, reader, answer[1]))
            if answer[0] == "BEYOND":
                raise InvalidArgument(
                    f"position {position} is beyond the log of partition {partition} of {topic!r}, "
                    f"whose next entry is {answer[1] + 1}"
                )
            _, cursor, dropped = answer
            result.names += _names_of(found, dropped)
            result.steps += 1
            result.done = cursor >= position - 1
        return result


def _check_range(start: int, end: int) -> None:
    if not (type(start) is int and type(end) is int and 1 <= start <= end <= _ENTRIES):
        raise InvalidArgument(
            f"the range {start!r:.30} to {end!r:.30}: positions are whole numbers from 1, and the start is "
            "not after the end"
        )


def _whose(topic: str, subscription: str, reader: str, holder: str) -> str:
    if not holder:
        return f"subscription {subscription!r} of {topic!r} has no reader: {reader!r} must claim it first"
    return f"subscription {subscription!r} of {topic!r} is {holder!r}'s now, who claimed it after {reader!r}"


def _entry(found: list[Any]) -> int:
    id: str = found[0]
    return int(id[id.index("-") + 1 :])


def _extend_ranges(ranges: list[int], found: list[Any]) -> None:
    """Add the entries that were found; nothing is done for each of them unless there are holes between."""
    if not found:
        return
    first, last = _entry(found[0]), _entry(found[-1])
    entries: Iterable[int] = map(_entry, found)
    if last - first == len(found) - 1:
        entries = (first,)
    for entry in entries:
        if ranges and ranges[-1] == entry - 1:
            ranges[-1] = entry
        else:
            ranges += (entry, entry)
    ranges[-1] = last


def _names_of(found: list[Any], dropped: list[int]) -> list[str]:
    """The names of the bodies of those entries that were dropped."""
    names = []
    ranges = list(rows(dropped, 2))
    at = 0
    for line in found:
        entry = _entry(line)
        while at < len(ranges) and ranges[at][1] < entry:
            at += 1
        if at < len(ranges) and ranges[at][0] <= entry:
            _, (_, _, _, uid, _, about) = line
            size, _, name = about.split(" ", 4)[3].partition(":")
            if size:
                names.append(name or uid)
    return names
