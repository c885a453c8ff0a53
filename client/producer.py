"""Publishing: into which partitions, a limit to what waits, and the answers in the order of the call."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from client import wire
from client.bodies import Bodies
from client.cluster import Cluster
from client.columns import Columns, Tally, sort_columns
from client.entrance import Entrance, Entry
from client.errors import BrokerError, ConnectionClosed, InvalidArgument, TopicNotFound
from client.map import TopicMap
from client.outbox import Added, Outbox, Ticket
from client.outgoing import Slice, check_texts, sort, sort_one
from client.room import Room
from client.tasks import Tasks
from client.types import OutgoingMessage, Published
from client.wire import pack_about

_QUEUED_MESSAGES = 100_000
_QUEUED_BYTES = 64 * 1024 * 1024
_SLICE = 10_000  # messages of a publish_many that are prepared at once


class Producer:
    """Publishes for one client, to any topic."""

    def __init__(self, cluster: Cluster, bodies: Bodies, group: str | None) -> None:
        self._cluster = cluster
        self._bodies = bodies
        self._group = group or ""
        pack_about(0, self._group)  # raises InvalidName for a group that cannot be
        self._partitions: dict[str, int] = {}
        self._maps: dict[str, tuple[TopicMap, Callable[[], None]]] = {}  # and what hears of their changes
        self._outboxes: dict[tuple[str, int], Outbox] = {}
        self._room = Room(_QUEUED_MESSAGES, _QUEUED_BYTES)
        self._entrance = Entrance(self._room, self._partitions.get, self._look_up)
        self._tasks = Tasks()
        self._collecting = Tasks()
        self._closed: ConnectionClosed | None = None

    async def publish(
        self, topic: str, messages: Iterable[OutgoingMessage]
    ) -> Sequence[Published | Exception]:
        """Publish messages, those of a partition in the order given; the answer or the error of each.

        It raises what is wrong with the arguments, if nothing was queued before.
        """
        answers: list[Published | Exception] = []
        rest = iter(messages)
        under_way: deque[tuple[Entry, int]] = deque()
        # Of a list all is published before what comes after it; whether an iterable ends nobody knows.
        long = object() if isinstance(messages, Sequence) and len(messages) > _SLICE else None
        try:
            while some := list(islice(rest, _SLICE)):
                try:
                    entry = await self._enter(topic, partial(self._sort, some), long)
                    under_way.append((entry, len(some)))
                except BrokerError as error:
                    if not (under_way or answers):
                        raise
                    while under_way:
                        answers += await self._collect(topic, *under_way.popleft())
                    return answers + [error] * len(some)
                if len(under_way) > _QUEUED_MESSAGES // _SLICE:
                    answers += await self._collect(topic, *under_way.popleft())
            self._entrance.through(topic, long)
            while under_way:
                answers += await self._collect(topic, *under_way.popleft())
        except Exception:  # of an iterable
            while under_way:
                await self._collect(topic, *under_way.popleft())
            raise
        finally:
            self._entrance.through(topic, long)
            for entry, _ in under_way:
                _withdraw(entry)
        return answers

    async def publish_columns(self, topic: str, columns: Columns) -> asyncio.Task[Tally]:
        """Queue messages given by columns, behind what was queued before; the task counts the answers."""
        entry = await self._enter(topic, partial(self._sort_columns, columns), strict=True)
        return self._collecting.start(self._count(topic, entry))

    async def publish_one(self, topic: str, message: OutgoingMessage) -> Published:
        """Publish a message."""
        while True:
            entry = await self._enter(topic, partial(self._sort_one, message))
            (answer,) = await self._collect(topic, entry, 1)
            if not isinstance(answer, Exception):
                return answer
            # Perhaps the topic was made anew, with fewer partitions: then nothing was stored.
            first = not entry.added[0].outbox.partition or message.partition is not None
            if first or not isinstance(answer, InvalidArgument):
                raise answer
            if await self._entrance.ask(topic) == entry.count:
                raise answer

    async def close(self) -> None:
        """Give up what is not answered."""
        self._closed = ConnectionClosed("the client was closed")
        await self._entrance.close(self._closed)
        error = ConnectionClosed("the client was closed before the broker answered")
        for outbox in self._outboxes.values():
            outbox.close(error)
        await self._collecting.finish()  # by now everything has an answer
        await self._tasks.cancel()

    def _sort_one(self, message: OutgoingMessage, count: int) -> list[Slice]:
        return _measured([sort_one(message, count, self._group, self._cluster.drift)])

    def _sort(self, messages: Sequence[OutgoingMessage], count: int) -> list[Slice]:
        return _measured(sort(messages, count, self._group, self._cluster.drift))

    def _sort_columns(self, columns: Columns, count: int) -> list[Slice]:
        if not len(columns):
            return []
        return _measured(sort_columns(columns, count, self._group, self._cluster.drift))

    async def _enter(
        self, topic: str, sort: Callable[[int], list[Slice]], long: object = None, *, strict: bool = False
    ) -> Entry:
        """Queue messages behind those of the calls before."""
        if self._closed is not None:
            raise self._closed.again()
        entry = Entry(sort, partial(self._add, topic, strict=strict))
        try:
            await self._entrance.enter(topic, entry, long)
        except BaseException:
            if not strict:  # which leaves no gaps
                _withdraw(entry)
            raise
        return entry

    async def _look_up(self, topic: str) -> int:
        known = await self._cluster.map(topic)
        if topic not in self._maps:
            recount = partial(self._recount, known)
            self._maps[topic] = known, recount
            known.watchers[recount] = None
        elif topic not in self._partitions:
            await known.refresh()
        if not (count := len(known.owners)):  # a worker that does not tell, or there is no topic
            answer = await self._cluster.request(wire.DescribeTopic(topic))
            count = wire.properties_of(answer, wire.TopicReply).partitions
        self._partitions[topic] = count
        return count

    def _recount(self, known: TopicMap) -> None:
        """The map has changed: a topic that was made anew may have another number of partitions."""
        if known.owners:
            self._partitions[known.topic] = len(known.owners)
        else:
            self._forget(known.topic)

    def _forget(self, topic: str) -> None:
        """There is no such topic, as far as is known: keep nothing of it but what is under way."""
        self._partitions.pop(topic, None)
        for place in [place for place in self._outboxes if place[0] == topic]:
            if self._outboxes[place].idle:
                self._outboxes.pop(place).close(ConnectionClosed("the topic was deleted"))
        if topic in self._maps and not any(place[0] == topic for place in self._outboxes):
            known, recount = self._maps.pop(topic)
            known.watchers.pop(recount, None)
            self._cluster.forget(known)

    def _add(self, topic: str, slices: Sequence[Slice], *, strict: bool) -> list[Added]:
        if self._closed is not None:
            raise self._closed.again()
        if topic not in self._maps:
            raise TopicNotFound(f"no topic {topic!r}: it was deleted")
        added = []
        for item in slices:
            outbox = self._outboxes.get((topic, item.partition))
            if outbox is None:
                where, limit = self._maps[topic][0], self._cluster.timeout
                outbox = Outbox(where, item.partition, limit, self._bodies, self._room, self._tasks)
                self._outboxes[topic, item.partition] = outbox
            added.append(Added(outbox, item.durability, item.places, outbox.add(item, strict=strict)))
        return added

    async def _collect(self, topic: str, entry: Entry, size: int) -> list[Published | Exception]:
        """Wait for the answers and put them into the order of the call; who goes takes along what it can."""
        answers: list[Any] = [None] * size
        try:
            for outbox, durability, places, tickets in entry.added:
                at = 0
                for ticket in tickets:
                    try:
                        reply = await ticket.answer
                    except Exception as error:
                        self._doubt(topic, outbox.partition, error)
                        found: list[Published | Exception] = [error] * ticket.count
                    else:
                        found = _read(outbox.partition, durability, ticket, reply)
                    for offset, refusal in ticket.refused.items():  # in their order
                        found.insert(offset, refusal)
                    for place, answer in zip(places[at : at + len(found)], found, strict=True):
                        answers[place] = answer
                    at += len(found)
        except BaseException:
            _withdraw(entry)
            raise
        return answers

    async def _count(self, topic: str, entry: Entry) -> Tally:
        """Wait for the answers and count them."""
        tally = Tally()
        failure: Exception | None = None
        for item in entry.added:
            for ticket in item.tickets:
                try:
                    reply = await ticket.answer
                    assert reply is not None, "bodies that are refused fail all"
                    tally += _sum_up(ticket, reply)
                except Exception as error:
                    self._doubt(topic, item.outbox.partition, error)
                    failure = failure or error
        if failure is not None:
            raise failure
        return tally

    def _doubt(self, topic: str, partition: int, error: Exception) -> None:
        """Ask for the number of partitions again where the topic may be another one by now, with fewer."""
        if isinstance(error, InvalidArgument) and partition:
            self._partitions.pop(topic, None)
        elif isinstance(error, TopicNotFound):
            self._forget(topic)


def _withdraw(entry: Entry) -> None:
    """Nobody waits any more: what was never sent is not going to be."""
    for item in entry.added:
        item.withdraw()


def _measured(slices: list[Slice]) -> list[Slice]:
    """Slices whose texts are right, and counted."""
    for item in slices:
        check_texts(item.flat)
        item.text = sum(map(len, item.flat))
    return slices


def _sum_up(ticket: Ticket, reply: wire.PublishReply) -> Tally:
    """Count the answers for the messages of one call in one frame."""
    start, count = ticket.start, ticket.count
    duplicates = sum(start <= place < start + count for place in reply.duplicates)
    rest = count - duplicates
    return Tally(0 if reply.unowed else rest, duplicates, rest if reply.unowed else 0)


def _read(
    partition: int, durability: str, ticket: Ticket, reply: wire.PublishReply | None
) -> list[Published | Exception]:
    """The answers for the messages of one call in one frame; of none if they were refused."""
    if reply is None:
        return []
    start, count = ticket.start, ticket.count
    uids = ticket.parcel.flat[start * 3 + 1 : (start + count) * 3 : 3]
    if not reply.duplicates and not reply.unowed and not reply.delayed:
        first = reply.first + start
        return [
            Published(partition, uid, reply.ledger, entry, durability)
            for entry, uid in enumerate(uids, first)
        ]
    entry = reply.first + start - sum(place < start for place in reply.duplicates)
    found: list[Published | Exception] = []
    for place, uid in enumerate(uids, start):
        if (first_id := reply.duplicates.get(place)) is not None:
            ledger, _, number = first_id.partition("-")
            found.append(Published(partition, uid, int(ledger), int(number), durability, duplicate=True))
        elif reply.unowed:
            found.append(Published(partition, uid, 0, 0, durability, no_subscribers=True))
        elif reply.delayed:
            found.append(Published(partition, uid, 0, 0, durability, delayed=True))
        else:
            found.append(Published(partition, uid, reply.ledger, entry, durability))
            entry += 1
    return found
