"""Publishing: into which partitions, a limit to what waits, and the answers in the order of the call."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from keylane import wire
from keylane.connect.cluster import Cluster
from keylane.connect.partition_map import TopicMap
from keylane.errors import BrokerError, ConnectionClosed, InvalidArgument, TopicNotFound, TopicReplaced
from keylane.payloads.bodies import Bodies
from keylane.produce.answers import count_answers, read_answers
from keylane.produce.call_queue import CallQueue, PublishCall, Sort, TopicReplacement
from keylane.produce.columns import Columns, Tally
from keylane.produce.outbox import Added, Outbox
from keylane.produce.outgoing import Slice
from keylane.produce.partitioner import Partitioner
from keylane.produce.queue_limit import QueueLimit
from keylane.produce.uploads import Uploads
from keylane.tasks import Tasks
from keylane.types import OutgoingMessage, Published

_QUEUED_MESSAGES = 100_000
_QUEUED_BYTES = 64 * 1024 * 1024
_SLICE = 10_000  # messages of a publish_many that are prepared at once


class Producer:
    """Publishes for one client, to any topic."""

    def __init__(self, cluster: Cluster, bodies: Bodies, group: str | None) -> None:
        self._cluster = cluster
        self._bodies = bodies
        self._partitioner = Partitioner(group or "", lambda: cluster.drift, self._incarnation, self._inline)
        self._partitions: dict[str, int] = {}
        self._maps: dict[str, tuple[TopicMap, Callable[[], None]]] = {}  # and what hears of their changes
        self._outboxes: dict[tuple[str, int], Outbox] = {}
        self._retired: list[Outbox] = []  # of topics that were replaced, with answers to come
        self._under_way: dict[str, dict[PublishCall, None]] = {}  # by topic, in order
        self._replacements: dict[str, TopicReplacement] = {}  # by topic
        self._broken: dict[str, TopicReplaced] = {}  # topics to which nothing strict goes any more
        self._limit = QueueLimit(_QUEUED_MESSAGES, _QUEUED_BYTES)
        self._calls = CallQueue(self._limit, self._partitions.get, self._look_up)
        self._tasks = Tasks()
        self._uploads = Uploads(bodies, self._tasks)
        self._collecting = Tasks()
        self._closed: ConnectionClosed | None = None

    async def publish(
        self, topic: str, messages: Iterable[OutgoingMessage]
    ) -> Sequence[Published | Exception]:
        """Publish messages, those of a partition in the order given; the answer or the error of each.

        What is wrong with a message is its answer. Of an iterable there are as many answers as were taken.
        """
        if not isinstance(messages, Iterable):
            raise InvalidArgument(f"messages is {messages!r:.60}: use a list of OutgoingMessage")
        answers: list[Published | Exception] = []
        failed: list[Exception] = []
        rest = iter(messages)
        under_way: deque[tuple[PublishCall, int]] = deque()
        # Of a list all is published before what comes after it; whether an iterable ends nobody knows.
        long = object() if isinstance(messages, Sequence) and len(messages) > _SLICE else None
        try:
            while some := list(islice(rest, _SLICE)):
                try:
                    call = await self._enter(topic, partial(self._partitioner.many, topic, some), some, long)
                    under_way.append((call, len(some)))
                except BrokerError as error:
                    if not (under_way or answers):
                        raise
                    some += rest if isinstance(messages, Sequence) else ()
                    failed = [error] * len(some)
                    break
                if len(under_way) > _QUEUED_MESSAGES // _SLICE:
                    answers += await self._collect(topic, *under_way.popleft())
            self._calls.through(topic, long)
            while under_way:
                answers += await self._collect(topic, *under_way.popleft())
        except Exception:  # of an iterable
            while under_way:
                await self._collect(topic, *under_way.popleft())
            raise
        finally:
            self._calls.through(topic, long)
            for call, _ in under_way:
                _withdraw(call)
                self._end(topic, call)
        return answers + failed

    async def publish_columns(self, topic: str, columns: Columns) -> asyncio.Task[Tally]:
        """Queue messages given by columns, behind what was queued before; the task counts the answers."""
        call = await self._enter(topic, partial(self._partitioner.columns, topic, columns), strict=True)
        counting = self._collecting.start(self._count(topic, call))
        # Not by itself: cancelled before its first step it would never get there.
        counting.add_done_callback(lambda _: self._end(topic, call))
        return counting

    async def publish_one(self, topic: str, message: OutgoingMessage) -> Published:
        """Publish a message."""
        call = await self._enter(topic, partial(self._partitioner.one, topic, message), [message])
        (item,) = call.added
        (waiter,) = item.waiters
        try:
            reply = await waiter.answer
        except Exception:
            reply = None
        except BaseException:
            _withdraw(call)
            self._end(topic, call)
            raise
        if reply is not None and not (  # as mostly
            reply.duplicates or reply.unowed or reply.delayed or reply.unmatched or reply.full
        ):
            self._end(topic, call)
            uid, number = waiter.frame.flat[waiter.start * 3 + 1], reply.first + waiter.start
            return Published(item.outbox.partition, uid, reply.ledger, number, item.durability)
        (answer,) = await self._collect(topic, call, 1)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        """Give up what is not answered."""
        self._closed = ConnectionClosed("the client was closed")
        await self._calls.close(self._closed)
        error = ConnectionClosed("the client was closed before the broker answered")
        for outbox in (*self._outboxes.values(), *self._retired):
            outbox.close(error)
        await self._collecting.finish()  # by now everything has an answer
        await self._tasks.cancel()

    def _incarnation(self, topic: str) -> int:
        return self._maps[topic][0].incarnation if topic in self._maps else 0

    def _inline(self, topic: str) -> int:
        return self._maps[topic][0].inline if topic in self._maps else 0

    async def _enter(
        self,
        topic: str,
        sort: Sort,
        messages: Sequence[OutgoingMessage] = (),
        long: object = None,
        *,
        strict: bool = False,
    ) -> PublishCall:
        """Queue messages behind those of the calls before."""
        if self._closed is not None:
            raise self._closed.again()
        self._cluster.check_open()
        call = PublishCall(sort, partial(self._add, topic, strict=strict), messages)
        count = self._partitions.get(topic)
        if count and long is None and self._calls.clear(topic):  # as for most
            call.sort(count)
            call.add()
            return call
        try:
            await self._calls.enter(topic, call, long)
        except BaseException:
            if not strict:  # which leaves no gaps
                _withdraw(call)
            self._end(topic, call)
            raise
        return call

    async def _look_up(self, topic: str) -> int:
        known = await self._cluster.map(topic)
        if topic not in self._maps:
            recount = partial(self._recount, known)
            self._maps[topic] = known, recount
            known.watchers[recount] = None
        elif topic not in self._partitions:
            await known.refresh()
        while not (count := len(known.owners)):  # it was deleted a moment ago
            await known.refresh()
        if topic not in self._maps:  # others have heard so meanwhile, and it is there again
            return await self._look_up(topic)
        self._partitions[topic] = count
        return count

    def _recount(self, known: TopicMap) -> None:
        """The map has changed: the topic may be another one, which may have another number of partitions."""
        if known.owners:
            self._partitions[known.topic] = len(known.owners)
            self._follow(known)
        else:
            self._forget(known.topic)

    def _follow(self, known: TopicMap) -> None:
        """Place what is under way anew, if the topic is another one, before anything else goes in."""
        topic = known.topic
        old = [
            place
            for place, outbox in self._outboxes.items()
            if place[0] == topic and outbox.incarnation != known.incarnation
        ]
        if not old:
            return
        error = TopicReplaced(f"topic {topic!r} was deleted and recreated")
        for place in old:
            outbox = self._outboxes.pop(place)
            outbox.retire(error)
            self._retired.append(outbox)
            if outbox.strict:
                self._broken[topic] = error
        if topic not in self._replacements:
            self._replacements[topic] = replacement = TopicReplacement(self._under_way.get(topic, ()), error)
            self._tasks.start(self._place_all_anew(topic, replacement))

    async def _place_all_anew(self, topic: str, replacement: TopicReplacement) -> None:
        """When all is answered that was sent to the topic before: place anew what was refused."""
        try:
            for call in replacement.calls:  # some join meanwhile
                if waiting := [waiter.answer for item in call.added for waiter in item.waiters]:
                    await asyncio.wait(waiting)
            del self._replacements[topic]
            replacement.again = {
                call: self._place_anew(topic, call) for call in replacement.calls if call.messages
            }
        finally:
            self._replacements.pop(topic, None)
            self._retired = [outbox for outbox in self._retired if not outbox.idle]
            replacement.done.set_result(None)

    def _place_anew(self, topic: str, call: PublishCall) -> PublishCall | Exception:
        places = sorted(place for item in call.added for place in _replaced(item))
        messages = [call.messages[place] for place in places]
        again = PublishCall(
            partial(self._partitioner.many, topic, messages),
            partial(self._add, topic, strict=False),
            messages,
        )
        try:
            if messages:
                again.sort(self._count_of(topic))
                again.add()
        except Exception as error:
            return error
        return again

    def _count_of(self, topic: str) -> int:
        if topic not in self._partitions:
            raise TopicNotFound(f"no topic {topic!r}: it was deleted")
        return self._partitions[topic]

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

    def _add(self, topic: str, call: PublishCall, slices: Sequence[Slice], *, strict: bool) -> list[Added]:
        if self._closed is not None:
            raise self._closed.again()
        if topic not in self._maps:
            raise TopicNotFound(f"no topic {topic!r}: it was deleted")
        if strict and topic in self._broken:
            raise self._broken[topic].again()
        replacement = self._replacements.get(topic)
        if replacement is not None:
            replacement.add(call)
        elif slices and slices[0].incarnation != self._incarnation(topic):  # it has waited for room meanwhile
            slices = call.sort(self._count_of(topic))
        self._under_way.setdefault(topic, {})[call] = None
        added = []
        for item in slices:
            outbox = self._outbox(topic, item.partition, replacement)
            added.append(Added(outbox, item.durability, item.places, outbox.add(item, strict=strict)))
        if len(call.messages) > 1:
            waiters = [waiter for item in added for waiter in item.waiters]
            call.left = len(waiters)
            for waiter in waiters:
                waiter.answer.add_done_callback(partial(_answered, call))
        return added

    def _outbox(self, topic: str, partition: int, replacement: TopicReplacement | None) -> Outbox:
        """Return the outbox of a partition; while the topic is replaced, one that refuses everything."""
        outbox = self._outboxes.get((topic, partition)) if replacement is None else None
        if outbox is None:
            where, limit = self._maps[topic][0], self._cluster.timeout
            outbox = Outbox(where, partition, limit, self._bodies, self._uploads, self._limit, self._tasks)
            if replacement is None:
                self._outboxes[topic, partition] = outbox
            else:
                outbox.retire(replacement.error)
        return outbox

    async def _collect(self, topic: str, call: PublishCall, size: int) -> list[Published | Exception]:
        """Wait for the answers and put them into the order of the call; who goes takes along what it can."""
        try:
            answers, failed = await self._answers(topic, call, size)
            if failed and (replaced := [at for at in range(size) if isinstance(answers[at], TopicReplaced)]):
                found = await self._again(topic, call, len(replaced))
                for place, answer in zip(replaced, found, strict=True):
                    answers[place] = answer
        except BaseException:
            _withdraw(call)
            raise
        finally:
            self._end(topic, call)
        return answers

    async def _again(self, topic: str, call: PublishCall, size: int) -> Sequence[Published | Exception]:
        """Return the answers to the messages of a call that were refused since the topic was replaced."""
        if call.replacement is None and topic in self._maps:  # the map is still that of the topic before
            try:
                await self._cluster.learn(self._maps[topic][0])
            except BrokerError as error:
                return [error] * size
        again: PublishCall | Exception | None = None
        if call.replacement is not None:
            await asyncio.shield(call.replacement.done)
            again = call.replacement.again.get(call)
        if isinstance(again, PublishCall):
            return await self._collect(topic, again, size)
        return [again or self._closed or TopicReplaced(f"topic {topic!r} was deleted")] * size

    def _end(self, topic: str, call: PublishCall) -> None:
        """All that there is to know of a call is known."""
        call.messages = ()
        if under_way := self._under_way.get(topic):
            under_way.pop(call, None)
            if not under_way:
                del self._under_way[topic]

    async def _answers(
        self, topic: str, call: PublishCall, size: int
    ) -> tuple[list[Published | Exception], bool]:
        """Return the answers, and whether any is an error, without a second attempt."""
        answers: list[Any] = [None] * size
        for place, refusal in call.refused.items():
            answers[place] = refusal
        failed = False
        for outbox, durability, places, waiters in call.added:
            at = 0
            for waiter in waiters:
                try:
                    reply = await waiter.answer
                except Exception as error:
                    failed = True
                    self._doubt(topic, error)
                    found: list[Published | Exception] = [error] * waiter.count
                else:
                    found = read_answers(outbox.partition, durability, waiter, reply)
                for offset, refusal in waiter.refused.items():  # in their order
                    found.insert(offset, refusal)
                some = places if len(waiters) == 1 else places[at : at + len(found)]
                for place, answer in zip(some, found, strict=True):
                    answers[place] = answer
                at += len(found)
        return answers, failed

    async def _count(self, topic: str, call: PublishCall) -> Tally:
        """Wait for the answers and count them."""
        tally = Tally()
        failure: Exception | None = None
        for item in call.added:
            for waiter in item.waiters:
                try:
                    reply = await waiter.answer
                    assert reply is not None, "bodies that are refused fail all"
                    tally += count_answers(waiter, reply)
                except Exception as error:
                    self._doubt(topic, error)
                    failure = failure or error
        if failure is not None:
            raise failure
        return tally

    def _doubt(self, topic: str, error: Exception) -> None:
        """Keep nothing of a topic that is gone."""
        if isinstance(error, TopicNotFound) and not isinstance(error, TopicReplaced):
            self._forget(topic)


def _withdraw(call: PublishCall) -> None:
    """Nobody waits any more: what was never sent is not going to be."""
    for item in call.added:
        item.withdraw()
    if call.replacement is not None and isinstance(again := call.replacement.again.get(call), PublishCall):
        _withdraw(again)


def _answered(call: PublishCall, answer: "asyncio.Future[wire.PublishReply | None]") -> None:
    """Let go of messages that will not have to be placed anew."""
    if answer.cancelled() or not isinstance(answer.exception(), TopicReplaced):
        call.left -= 1
        if not call.left:
            call.messages = ()


def _replaced(item: Added) -> Iterator[int]:
    """Yield the places in the call of messages that were refused since their topic was replaced."""
    at = 0
    for waiter in item.waiters:
        size = waiter.count + len(waiter.refused)
        if not waiter.answer.cancelled() and isinstance(waiter.answer.exception(), TopicReplaced):
            places = item.places[at : at + size]
            yield from (place for offset, place in enumerate(places) if offset not in waiter.refused)
        at += size
