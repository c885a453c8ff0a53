"""Publishing: into which partitions, a limit to what waits, and the answers in the order of the call."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from client import wire
from client.bodies import Bodies
from client.cluster import Cluster
from client.columns import Columns, Tally, sort_columns
from client.errors import ConnectionClosed, InvalidArgument, TopicNotFound
from client.map import TopicMap
from client.outbox import Answer, Outbox
from client.outgoing import Slice, check_texts, sort, sort_one
from client.room import Room
from client.tasks import Tasks, shared
from client.types import OutgoingMessage, Published
from client.wire import pack_about

_QUEUED_MESSAGES = 100_000
_QUEUED_BYTES = 64 * 1024 * 1024
_SLICE = 10_000  # messages of a publish_many that are prepared at once


class _Added(NamedTuple):
    """What went into one outbox for a call, and who will answer."""

    partition: int
    durability: str
    places: list[int]
    answers: list[asyncio.Future[Answer]]


class Producer:
    """Publishes for one client, to any topic."""

    def __init__(self, cluster: Cluster, bodies: Bodies, group: str | None) -> None:
        self._cluster = cluster
        self._bodies = bodies
        self._group = group or ""
        pack_about(0, self._group)  # raises InvalidName for a group that cannot be
        self._partitions: dict[str, int] = {}
        self._maps: dict[str, tuple[TopicMap, Callable[[], None]]] = {}  # and what hears of their changes
        self._lookups: dict[str, asyncio.Task[int]] = {}
        self._outboxes: dict[tuple[str, int], Outbox] = {}
        self._room = Room(_QUEUED_MESSAGES, _QUEUED_BYTES)
        self._tasks = Tasks()
        self._collecting = Tasks()
        self._closed: ConnectionClosed | None = None

    async def publish(self, topic: str, messages: Iterable[OutgoingMessage]) -> list[Published]:
        """Publish messages, those of a partition in the order given; the first error when all have ended."""
        published: list[Published] = []
        rest = iter(messages)
        running: deque[asyncio.Task[list[Published]]] = deque()
        try:
            while some := list(islice(rest, _SLICE)):
                slices, length = await self._prepare(topic, some)
                await self._room.take(len(some), length)
                collecting = self._collect(topic, self._add(topic, slices), len(some), length)
                if len(some) < _SLICE and not running:
                    return await collecting
                running.append(self._collecting.start(collecting))
                if len(running) > _QUEUED_MESSAGES // _SLICE:
                    published += await running.popleft()
            while running:
                published += await running.popleft()
        except asyncio.CancelledError:
            for task in running:
                task.cancel()
            raise
        except Exception:
            if running:
                await asyncio.wait(running)
            raise
        return published

    async def publish_columns(self, topic: str, columns: Columns) -> asyncio.Task[Tally]:
        """Queue messages given by columns, behind what was queued before; the task counts the answers."""
        size = len(columns)
        count = self._partitions.get(topic) or await self._partition_count(topic)
        slices = sort_columns(columns, count, self._group, self._cluster.drift)
        length = sum(map(self._measure, slices))
        await self._room.take(size, length)
        return self._collecting.start(self._count(topic, self._add(topic, slices, strict=True), size, length))

    async def publish_one(self, topic: str, message: OutgoingMessage) -> Published:
        """Publish a message."""
        while True:
            count = self._partitions.get(topic) or await self._partition_count(topic)
            item = sort_one(message, count, self._group, self._cluster.drift)
            length = self._measure(item)
            await self._room.take(1, length)
            added = self._add(topic, [item])
            try:
                return (await self._collect(topic, added, 1, length))[0]
            except InvalidArgument:
                # Perhaps the topic was made anew, with fewer partitions: then nothing was stored.
                if not item.partition or message.partition is not None:
                    raise
                if await self._partition_count(topic) == count:
                    raise

    async def close(self) -> None:
        """Give up what is not answered."""
        self._closed = ConnectionClosed("the client was closed")
        self._room.close(self._closed)
        error = ConnectionClosed("the client was closed before the broker answered")
        for outbox in self._outboxes.values():
            outbox.close(error)
        await self._collecting.finish()  # by now everything has an answer
        await self._tasks.cancel()

    async def _prepare(self, topic: str, messages: Sequence[OutgoingMessage]) -> tuple[list[Slice], int]:
        """Messages by partition and durability, and the bytes that they take."""
        count = self._partitions.get(topic) or await self._partition_count(topic)
        slices = sort(messages, count, self._group, self._cluster.drift)
        length = 0
        for item in slices:
            length += self._measure(item)
        return slices, length

    def _measure(self, item: Slice) -> int:
        check_texts(item.flat)
        item.text = sum(map(len, item.flat))
        return item.text + sum(len(body) for _, body in item.bodies.values())

    async def _partition_count(self, topic: str) -> int:
        """Ask how many partitions there are: once, for all who want to know."""
        lookup = self._lookups.get(topic)
        if lookup is None:
            lookup = self._lookups[topic] = self._tasks.start(self._look_up(topic))
        return await shared(lookup, "the client was closed")

    async def _look_up(self, topic: str) -> int:
        try:
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
        finally:
            del self._lookups[topic]

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

    def _add(self, topic: str, slices: Sequence[Slice], strict: bool = False) -> list[_Added]:
        if self._closed is not None:
            raise self._closed.again()
        added = []
        for item in slices:
            partition = item.partition
            outbox = self._outboxes.get((topic, partition))
            if outbox is None:
                limit = self._cluster.timeout
                if topic not in self._maps:
                    raise TopicNotFound(f"no topic {topic!r}: it was deleted")
                outbox = Outbox(self._maps[topic][0], partition, limit, self._bodies, self._tasks)
                self._outboxes[topic, partition] = outbox
            answers = outbox.add(item, strict=strict)
            added.append(_Added(partition, item.durability, item.places, answers))
        return added

    async def _collect(self, topic: str, added: list[_Added], size: int, length: int) -> list[Published]:
        """Wait for the answers and put them into the order of the call."""
        results: list[Any] = [None] * size
        error: Exception | None = None
        try:
            for partition, durability, places, answers in added:
                found: list[Published] = []
                for answer in answers:
                    try:
                        found += self._read(topic, partition, durability, await answer)
                    except Exception as problem:
                        error = error or problem
                for place, result in zip(places, found, strict=False):
                    results[place] = result
        finally:
            self._room.give(size, length)
        if error is not None:
            self._doubt(topic, added, error)
            raise error
        return results

    async def _count(self, topic: str, added: list[_Added], size: int, length: int) -> Tally:
        """Wait for the answers and count them."""
        tally = Tally()
        error: Exception | None = None
        try:
            for item in added:
                for answer in item.answers:
                    try:
                        tally += self._sum_up(topic, await answer)
                    except Exception as problem:
                        error = error or problem
        finally:
            self._room.give(size, length)
        if error is not None:
            self._doubt(topic, added, error)
            raise error
        return tally

    def _doubt(self, topic: str, added: list[_Added], error: Exception) -> None:
        """Ask for the number of partitions again where the topic may be another one by now, with fewer."""
        beyond = isinstance(error, InvalidArgument) and any(item.partition for item in added)
        if beyond:
            self._partitions.pop(topic, None)
        elif isinstance(error, TopicNotFound):
            self._forget(topic)

    def _sum_up(self, topic: str, answer: Answer) -> Tally:
        """Count the answers for the messages of one call in one frame; bodies that nobody needs go."""
        parcel, reply, start, count = answer
        places = [place for place in reply.duplicates if start <= place < start + count]
        # Sent twice, a duplicate may be this very message, and the body in use.
        unused = [] if parcel.resent else list(places)
        if reply.unowed:
            unused += set(range(start, start + count)) - set(places)
        self._bodies.forget(topic, [parcel.bodies[place][0] for place in unused if place in parcel.bodies])
        rest = count - len(places)
        return Tally(0 if reply.unowed else rest, len(places), rest if reply.unowed else 0)

    def _read(self, topic: str, partition: int, durability: str, answer: Answer) -> list[Published]:
        """The answers for the messages of one call in one frame."""
        parcel, reply, start, count = answer
        uids = parcel.flat[start * 3 + 1 : (start + count) * 3 : 3]
        if not reply.duplicates and not reply.unowed and not reply.delayed:
            first = reply.first + start
            return [
                Published(partition, uid, reply.ledger, entry, durability)
                for entry, uid in enumerate(uids, first)
            ]
        entry = reply.first + start - sum(place < start for place in reply.duplicates)
        found = []
        lost = []
        for place, uid in enumerate(uids, start):
            if (first_id := reply.duplicates.get(place)) is not None:
                ledger, _, number = first_id.partition("-")
                found.append(Published(partition, uid, int(ledger), int(number), durability, duplicate=True))
                # Sent twice, the duplicate may be this very message, and the body in use.
                unused = not parcel.resent
            elif reply.unowed:
                found.append(Published(partition, uid, 0, 0, durability, no_subscribers=True))
                unused = True
            elif reply.delayed:
                found.append(Published(partition, uid, 0, 0, durability, delayed=True))
                unused = False
            else:
                found.append(Published(partition, uid, reply.ledger, entry, durability))
                entry += 1
                unused = False
            if unused and place in parcel.bodies:
                lost.append(parcel.bodies[place][0])
        self._bodies.forget(topic, lost)
        return found
