"""Hands the messages of one partition to the consumers of one subscription, as soon as there is work.

It acts when something happens (a publish, a settle, permits) and at the instant that the last script named
as the next at which something falls due: no polling, no sweep.
"""

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from operator import attrgetter

from keylane import wire
from keylane.errors import BrokerError, SubscriptionNotFound, TopicNotFound, Unavailable
from keylane_broker.engine.values import Capacity, Fetched, Share
from keylane_broker.errors import NotOwner
from keylane_broker.limits import MAX_PERMITS
from keylane_broker.store.keys import PLACE
from keylane_broker.worker.acks import Ack, Acks
from keylane_broker.worker.clock import NEVER, instant
from keylane_broker.worker.consumer import FETCH_BYTES, Consumer, Consumers
from keylane_broker.worker.due_timer import DueTimer
from keylane_broker.worker.fetching import Fetching
from keylane_broker.worker.gathering import Gathering
from keylane_broker.worker.lease_recovery import LeaseRecovery
from keylane_broker.worker.leased_partition import LeasedPartition
from keylane_broker.worker.slow_cases import SlowCases

# Consumers with the most room that a fetch names; many while there is more to give than to few.
FEW, MANY = 8, 64
OWN = 64  # and at most so many of those to whom something may come that is theirs alone; twice
_IN_TURNS = ("shared", "key_shared")  # modes whose messages are leased as they are published
_BY_ROOM = attrgetter("rank")


class Dispatcher:
    """One partition and one subscription; lives as long as it has consumers, or sessions are to be ended."""

    def __init__(
        self,
        partition: LeasedPartition,
        subscription: str,
        mode: str,
        delivery: str,
        *,
        consumers: Consumers,
        gathering: Gathering,
        on_idle: Callable[["Dispatcher"], None],
    ) -> None:
        self.partition = partition
        self.subscription = subscription
        self.incarnation = partition.incarnation  # of the topic: what is done here is not for another one
        self.mode = mode
        self.ordered = mode != "shared"  # settling one message can set others free
        self.consumers: dict[str, Consumer] = {}
        self.has_work = True  # there may be something that any consumer could take,
        self._more = True  # and more than what is offered
        self._known = consumers  # all that there are, also those that are just coming back
        self._on_idle = on_idle
        self._holders: dict[str, Consumer] = {}  # those with unsettled messages of this partition
        self._asking: dict[str, Consumer] = {}  # those for whom something may wait that is theirs alone
        self._thirsty: dict[str, Consumer] = {}  # and those among them who wait for room
        self._tellers: dict[str, Consumer] = {}  # who have told of room, and whom no fetch has named since
        self._told: list[Consumer] = []  # who have told that they have room, and may tell others next
        self._takers: dict[str, Consumer] = {}  # those whom a turn under way names
        self._later: dict[str, float] = {}  # consumer -> when something of its own falls due
        self._all_full = False  # nobody has room, and whoever gets some will tell us
        self._width = FEW  # how many of the roomiest the next fetch names,
        self._offered = 0  # or as many as there are messages, about, that nobody has fetched
        self._others = 0  # who has room besides those that the fetch names
        self._settles = delivery == "at_most_once"
        self._fetching = Fetching(partition, subscription, self.consumers, at_most_once=self._settles)
        self._counters = partition.engine.store.counters
        self.counts = self._counters.subscription(partition.topic, subscription)
        self._cursor = 0  # the last entry that a fetch has passed
        self._expected = 0  # the last entry that was published while a fetch was under way
        self.recovery = LeaseRecovery(
            partition, subscription, self.incarnation, self.consumers, at_most_once=self._settles
        )
        self._looking = False  # leases have ended, which a fetch does not find out
        self._seeking: list[asyncio.Future[None]] = []  # who waits until that was told
        self._timer = DueTimer(partition.background, self._step, self, due=0.0)  # what may have timed out
        self.wake = self._timer.wake  # somebody has room, or something has fallen due
        self.expect = self._timer.expect  # something falls due then, by the event loop's clock
        self.acks = Acks(
            partition,
            subscription,
            self.incarnation,
            gathering,
            settled=self._settled,
            uncertain=self._recount_present,
        )
        self._slow = SlowCases()  # fetches that are not the ordinary case
        self._quiet = asyncio.Event()  # no fetch is under way
        self._quiet.set()

    def __str__(self) -> str:
        return f"subscription {self.subscription!r} on {self.partition}"

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return self._timer.running

    @property
    def failing(self) -> bool:
        """Whether the last attempt at anything has failed."""
        return self._timer.failing

    # Who is served

    def attach(self, consumer: Consumer) -> None:
        """Serve one more consumer."""
        self.consumers[consumer.name] = consumer
        self.recovery.knows_all(consumer.name)  # it has just been handed all that it holds
        consumer.dispatchers[self.partition.number] = self
        if consumer.out[self.partition.number]:
            self._holders[consumer.name] = consumer
        self.may_have_work_for(consumer)

    def detach(self, consumer: Consumer) -> None:
        """Serve it no more."""
        if self.consumers.get(consumer.name) is consumer:
            for known in (
                self.consumers,
                self._holders,
                self._asking,
                self._thirsty,
                self._tellers,
                self._later,
            ):
                known.pop(consumer.name, None)
            self.recovery.uncertain.pop(consumer.name, None)
        consumer.waiting.pop(self.partition.number, None)
        if not self.consumers:
            self.expect(0.0)  # are there sessions left to be ended?

    def holds_nothing(self, consumer: Consumer) -> None:
        """A consumer has no unsettled messages of this partition any more."""
        self._holders.pop(consumer.name, None)

    def end_consumers(self, error: BrokerError) -> None:
        """Tell every consumer that there is nothing more to come, and why."""
        for consumer in list(self.consumers.values()):
            consumer.end(error.code, str(error))
        self._finish()

    def _finish(self) -> None:
        """There is nothing more to do, unless somebody comes."""
        self._timer.clear()
        if not self.consumers:
            self._on_idle(self)

    def redirect_consumers(self) -> None:
        """Another worker serves the partition: the consumers go on there, with all that they hold."""
        gone = self.partition.not_owner()
        for consumer in list(self.consumers.values()):
            consumer.redirect(self.partition.number, gone.address)
        self._finish()

    # What happens

    def notify(self) -> None:
        """There may be something that any consumer could take."""
        self.has_work = self._more = True
        self.wake()

    def offer(self, count: int = 1) -> None:
        """Messages are published: for now, if anybody has room; who has none tells when that has changed."""
        self.has_work = True
        self._offered += count
        if not self._all_full:
            self.wake()

    def may_have_work_for(self, consumer: Consumer) -> None:
        """There may be something for a consumer; if it has no room, for when it has."""
        if self.consumers.get(consumer.name) is consumer:
            self._asking[consumer.name] = consumer
            self.wake()

    def take_room(self, consumer: Consumer) -> bool:
        """A consumer that waited for it has room; returns whether there may be something for it.

        Then it hears of it when that has been seen to, and can let others know what room is left.
        """
        if self._thirsty.pop(consumer.name, None) is consumer:
            self._asking[consumer.name] = consumer
        if not (self.has_work or self._asking):
            self._all_full = False
            return False
        self._tellers[consumer.name] = consumer
        self._told.append(consumer)
        self.wake()
        return True

    def _let_others_know(self) -> None:
        told, self._told = self._told, []
        for consumer in told:
            consumer.give(0)

    def look_again(self) -> None:
        """Anything may have happened, and leases have ended with it."""
        self._looking = True
        self.expect(0.0)
        self._asking.update(self.consumers)
        self.notify()

    async def sought(self) -> None:
        """Look again, and wait until consumers have been told which of their leases a seek has ended."""
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._seeking.append(told)
        self.look_again()
        await told

    def recount(self, consumers: Iterable[Consumer]) -> None:
        """Something was asked of Redis that ends or moves leases, and not answered: it may have been done."""
        if not self._settles:  # else what is out is not leased
            found = {one.name: one for one in consumers if one is self.consumers.get(one.name)}
            self.recovery.uncertain.update(found)
            self._asking.update(found)
            self.expect(0.0)
            self.notify()

    def appended(self, entry: int) -> None:
        """The log goes up to an entry now; a fetch that was sent behind it may have got it."""
        if not self._quiet.is_set():
            self._expected = max(self._expected, entry)
        elif self._cursor < entry:
            self._offered = 0
            self.offer(entry - self._cursor)

    async def wait_for_fetch(self) -> None:
        """Wait until what a fetch under way leases has been sent."""
        await self._quiet.wait()

    # Delivering

    async def _step(self) -> bool:
        """Do what there is to do now; return whether there may be more."""
        try:
            more = await self._do()
        finally:
            self._let_others_know()
        return more or bool(self._told)  # by those who came while they were told

    async def _do(self) -> bool:
        more = False
        try:
            overdue = self._timer.is_due and await self._expire()
            if self.recovery.lost or self.recovery.uncertain:
                await self.recovery.recover()
            rooms = self._rooms() if self.has_work or self._asking else []
            if rooms:
                await self._fetch(rooms)
            if overdue:
                self._timer.due = 0.0
            more = overdue or bool(rooms)
        except (TopicNotFound, SubscriptionNotFound) as error:
            if PLACE in self.subscription and isinstance(error, SubscriptionNotFound):
                self.end_sessions(list(self.consumers))
                self._finish()
            else:
                self.end_consumers(error)
        except NotOwner:
            if not self.partition.leaving:  # else they go when the lease has gone
                self.redirect_consumers()
        if not more and not self.consumers and self._timer.due == NEVER:
            self._finish()
        return more

    async def _expire(self) -> bool:
        """Give back what is due, but not all at once: others are waiting. Returns whether there is more."""
        await self.partition.prolong_sessions(self.subscription)
        self._timer.begin_call()
        self._looking = False
        seeking, self._seeking = self._seeking, []
        try:
            return await self._expire_some()
        finally:
            for told in seeking:
                if not told.done():
                    told.set_result(None)

    async def _expire_some(self) -> bool:
        try:
            result = await self.partition.call(
                lambda engine, lease: engine.expire_some(lease, self.subscription), self.incarnation
            )
        except Unavailable:
            self.recount([one for one in self.consumers.values() if one.out[self.partition.number]])
            raise
        self._set_due(instant(result.next_due_ms, result.now_ms))
        self.has_work = self._more = True
        self.counts.timed_out += sum(last - first + 1 for _, _, first, last in result.ended)
        self.end_sessions(result.expired_consumers)
        self.tell_ended(result.ended)
        await self.recovery.follow_seek(result.void)
        return result.more

    def tell_ended(self, ended: list[tuple[str, int, int, int]]) -> None:
        """Tell consumers, also one that is just coming back, which of their leases are over."""
        parts: dict[str, list[tuple[int, int, int]]] = {}
        for name, token, first, last in ended:
            parts.setdefault(name, []).append((token, first, last))
        for name, its in parts.items():
            if (consumer := self._known.get(self.partition.topic, self.subscription, name)) is not None:
                consumer.ended(self.partition.number, its)

    async def renew_sessions(self, session_ms: int) -> None:
        """Tell Redis that the consumers are still here."""
        try:
            lost = await self.partition.call(
                lambda engine, lease: engine.renew_all_sessions(
                    lease, self.subscription, list(self.consumers), session_ms
                ),
                self.incarnation,
            )
        except SubscriptionNotFound:
            if PLACE not in self.subscription:
                raise
            lost = list(self.consumers)  # a multicast consumer's place has gone with its session
        self.end_sessions(lost)

    def end_sessions(self, names: list[str]) -> None:
        """Let go of consumers without a session: what they held is with others, and they must know."""
        for name in names:
            if name in self.consumers:
                self.consumers[name].end("unavailable", "its session ended while Redis was away")

    def _set_due(self, due: float) -> None:
        """When to look again: by a script's answer, by what came meanwhile, and for those it did not name."""
        now = asyncio.get_running_loop().time()
        for name in [name for name, own in self._later.items() if own <= now]:
            del self._later[name]
            self._asking[name] = self.consumers[name]
        if self._looking:
            due = now
        self._timer.end_call(min(due, *self._later.values()) if self._later else due)

    # Whom a fetch names

    def _rooms(self) -> list[Capacity]:
        """Return the room for the next fetch; none if there is nothing to ask for, or nobody has any."""
        for consumer in [one for one in self._asking.values() if not one.has_room]:
            self._wait_for(consumer)
        if not (self.has_work or self._asking):
            return []
        for consumer in [one for one in self._tellers.values() if not one.has_room]:  # others were faster
            del self._tellers[consumer.name]
            self._wait_for(consumer)
        named = []
        for consumer in self._candidates():
            if consumer.has_room:
                named.append(consumer)
            else:
                consumer.want()
        named.sort(key=_BY_ROOM)
        for connection in {one.connection for one in named}:
            connection.begin_fetch()
        # One more than is offered shows whether that was all: the rest of the room is for other partitions.
        most = MAX_PERMITS if self._more or self._asking else self._offered + 1
        rooms = [
            Capacity(one.name, one.reserve(most), one.lease_ms, one.headroom, FETCH_BYTES) for one in named
        ]
        for consumer in named[1:] + named[:1]:  # of those with the same room another is first next time
            consumer.crowd.place(consumer)
        for consumer in named:
            self._tellers.pop(consumer.name, None)
        if not rooms and not self._all_full:
            self._all_full = True
            self._tellers.clear()
            for consumer in self.consumers.values():
                self._wait_for(consumer)
        return rooms

    def _wait_for(self, consumer: Consumer) -> None:
        """Have a consumer tell when it has room."""
        if self._asking.pop(consumer.name, None):
            self._thirsty[consumer.name] = consumer
        consumer.waiting[self.partition.number] = self
        consumer.want()

    def _candidates(self) -> Iterable[Consumer]:
        """Return those for whom something may wait or to whom more may come, and the roomiest."""
        self._others = 0
        width = max(self._width, min(self._offered, MANY))
        if len(self.consumers) <= width:
            return self.consumers.values()
        found = dict(islice(self._asking.items(), OWN))
        if self.ordered:
            found.update(islice(self._holders.items(), OWN))
            if len(self._holders) > OWN:
                for name in found.keys() & self._holders.keys():  # others next time
                    self._holders[name] = self._holders.pop(name)
        crowd = next(iter(self.consumers.values())).crowd
        roomiest = crowd.roomiest(width, self.consumers)
        found.update((one.name, one) for one in roomiest)
        if len(roomiest) == width:
            self._others = max(0, min(len(self.consumers), crowd.size) - len(found))
        return found.values()

    async def _fetch(self, rooms: list[Capacity]) -> None:
        left = {room.consumer: room.permits for room in rooms}
        takers = {name: self.consumers[name] for name in left}
        for name in takers:
            self._asking.pop(name, None)
            self._later.pop(name, None)
        self.has_work = self._more = False
        self._expected = self._offered = 0
        self._timer.begin_call()
        self._quiet.clear()
        try:
            fetched, settled = await self.partition.call(
                lambda engine, lease: self._fetching.fetch(engine, lease, rooms, takers, self._others),
                self.incarnation,
            )
            if self.partition.lapsed and not self._settles:
                # Another worker may have the partition by now, and has handed over what this fetch leased.
                raise Unavailable("the lease of the partition may have ended meanwhile")
        except BaseException:
            self.recovery.answer_lost(takers)
            self.has_work, self._more, self._all_full = True, True, False
            self._asking.update(self.consumers)  # whoever may have been left out
            self._give_back(rooms, takers, left)
            raise
        finally:
            self._quiet.set()  # those who wait go on when this is sent: nothing is awaited in between
        there = left.keys() - fetched.unknown_consumers
        for share in fetched.shares:
            taker = takers[share.consumer]
            if self.consumers.get(share.consumer) is not taker and not self._settles:
                there.discard(share.consumer)
                continue  # it went meanwhile: what it has is listed where it comes back
            left[share.consumer] -= len(share.flat) // 3
            self._send(taker, share, fetched, settled)
            taker.connection.flush()  # before the answers of this turn: somebody waits for it
        if fetched.shares:
            self.recovery.token = max(self.recovery.token, fetched.token)
            self._count(fetched)
        self._cursor = fetched.cursor
        behind = fetched.cursor < self._expected
        if behind:
            self._offered = self._expected - fetched.cursor
        full = not any(left[name] for name in there)  # others may have room
        self._all_full = self._all_full and full
        if not self._all_full:
            self._tellers.clear()  # all are asked to tell when nobody has room
        self._width = min(self._width * 2, MANY) if fetched.more or full else FEW
        self._more |= fetched.more or full or (settled is not None and bool(fetched.shares))
        self.has_work |= behind or self._more
        self._ask_next(fetched, left)
        self._set_due(instant(fetched.next_due_ms, fetched.now_ms))
        self.end_sessions(fetched.unknown_consumers)
        self._give_back(rooms, takers, left)

    # Fetching in the same call as a publish

    def join_turn(self, count: int) -> list[Capacity]:
        """Return the room for so many messages, to be leased as they are published; none if that cannot be.

        All that came before has been passed, and nothing waits. Then turn_taken(), turn_refused() or
        turn_lost() is due.
        """
        idle = not (self.has_work or self._asking or self._later or self._timer.running or self._timer.is_due)
        certain = not (self.recovery.lost or self.recovery.uncertain)
        if not idle or not certain or self._settles or self.mode not in _IN_TURNS or self._slow.is_likely():
            return []
        self._offered = count
        named = [one for one in self._candidates() if one.takes_turns]
        if len(named) > 1:
            named.sort(key=_BY_ROOM)
        rooms = [Capacity(one.name, one.reserve_some(count), one.lease_ms, one.headroom) for one in named]
        if len(self.consumers) > 1:
            for consumer in named[1:] + named[:1]:  # of those with the same room another is first next time
                consumer.crowd.place(consumer)
        if rooms:
            self._takers = {one.name: one for one in named}
            self._expected = self._offered = 0
            self._timer.hold()
            self._quiet.clear()
        return rooms

    @property
    def next_entry(self) -> int:
        """The entry that comes next, where all before has been passed."""
        return self._cursor + 1

    @property
    def others(self) -> int:
        """How many have room besides those that the last fetch, or turn, names."""
        return self._others

    def deliver_turn(
        self, rooms: list[Capacity], fetched: Fetched, *, at_once: bool
    ) -> dict[str, int] | None:
        """Send messages that were leased as they were published; turn_taken() is to follow.

        Returns how many permits of each consumer are left; None where it was too late to send anything.
        """
        if self.partition.lapsed:  # another worker may have handed them over
            return None
        left = {room.consumer: room.permits for room in rooms}
        for share in fetched.shares:
            taker = self._takers[share.consumer]
            if self.consumers.get(share.consumer) is taker:  # else it is listed where it comes back
                left[share.consumer] -= len(share.flat) // 3
                self._send(taker, share, fetched, None)
                if at_once:
                    taker.connection.flush()
        return left

    def turn_taken(self, rooms: list[Capacity], fetched: Fetched, left: dict[str, int] | None) -> None:
        """Messages were leased as they were published, and have been sent."""
        if left is None:
            self.turn_lost(rooms)
            return
        self._slow.passed()
        if fetched.shares:
            self.recovery.token = max(self.recovery.token, fetched.token)
            self._timer.expect_in(min(self._takers[share.consumer].lease_ms for share in fetched.shares))
            self._counters.delivery_batch.add(_messages_of(fetched))
        self._cursor = fetched.cursor
        self._more |= fetched.more
        if fetched.cursor < self._expected:
            self._offered = self._expected - fetched.cursor
            self.has_work = True
        self.has_work |= self._more
        self._end_turn(rooms, left)

    def turn_refused(self, rooms: list[Capacity], *, by_acks: bool) -> None:
        """It was not an ordinary case, perhaps because of the acks that it took along; nothing was done."""
        if not by_acks:
            self._slow.met()
        self.has_work = self._more = True
        self._end_turn(rooms, {room.consumer: room.permits for room in rooms})

    def turn_lost(self, rooms: list[Capacity]) -> None:
        """There was no answer, and messages may have been leased all the same."""
        self.recovery.answer_lost(self._takers)
        self.has_work, self._more, self._all_full = True, True, False
        self._asking.update(self.consumers)
        self._end_turn(rooms, {room.consumer: room.permits for room in rooms})

    def _end_turn(self, rooms: list[Capacity], left: dict[str, int]) -> None:
        takers, self._takers = self._takers, {}
        self._quiet.set()
        for room in rooms:
            takers[room.consumer].unreserve(room.permits, left[room.consumer])
        for consumer in takers.values():
            consumer.give(0)
        self._let_others_know()
        self._timer.go_on(more=self.has_work or bool(self._asking))

    # Acks

    def _settled(self, ack: Ack) -> None:
        """An ack has settled all that it names: there is room for others, and nothing of its lanes waits."""
        consumer, number = self._present(ack.consumer), self.partition.number
        messages = ack.receipts.messages
        self.counts.acked += messages
        self._counters.ack_batch.add(messages)
        if number in consumer.listing:
            consumer.listing[number] += ack.receipts.settled_parts([])
        else:
            consumer.take_back(messages, number)
        if self.ordered and self.mode != "key_shared":  # the lane of the partition may go to another
            self.may_have_work_for(consumer)
            self.notify()

    def _present(self, consumer: Consumer) -> Consumer:
        """Return who has the consumer's name, and what it holds, by now."""
        return self._known.get(*consumer.identity) or consumer

    def _recount_present(self, consumers: list[Consumer]) -> None:
        self.recount(map(self._present, consumers))

    def _give_back(self, rooms: list[Capacity], takers: dict[str, Consumer], left: dict[str, int]) -> None:
        """Let the other partitions have the permits that are left: all of them, before the first is told."""
        for room in rooms:
            takers[room.consumer].unreserve(room.permits, left[room.consumer])
        connections = {consumer.connection for consumer in takers.values()}
        for connection in connections:
            connection.end_fetch()
        for consumer in takers.values():
            consumer.give(0)
        for connection in connections:
            connection.allow_fetches()

    def _ask_next(self, fetched: Fetched, left: dict[str, int]) -> None:
        """Note for whom there may be more than this fetch has given."""
        more = [name for name in fetched.left_out if name not in left]
        more += [name for name, permits in left.items() if not permits]
        for name, due_ms in fetched.later:
            if due_ms <= fetched.now_ms:
                more.append(name)
            elif name in self.consumers:
                self._later[name] = instant(due_ms, fetched.now_ms)
        for name in more:
            if name in self.consumers:
                self._asking[name] = self.consumers[name]

    def _count(self, fetched: Fetched) -> None:
        """Count a fetch: the messages in it, and how old the first of them is unless it comes once more."""
        self._counters.delivery_batch.add(_messages_of(fetched))
        if fetched.retries:
            self.counts.redelivered += len(fetched.retries) // 2
        elif first := fetched.shares[0].flat:
            published_ms = int(first[2].partition(" ")[0])
            self._counters.delivery_seconds.add((self.partition.clock.now_ms() - published_ms) / 1_000)

    def _send(self, consumer: Consumer, share: Share, fetched: Fetched, settled: list[int] | None) -> None:
        if not share.flat:
            return
        data = wire.Data(
            consumer.stream,
            self.partition.number,
            fetched.token,
            fetched.now_ms + consumer.lease_ms,
            fetched.ledgers,
            settled=settled,
        )
        count = len(share.flat) // 3
        self.counts.delivered += count
        consumer.out[self.partition.number] += count
        if self.ordered and consumer.out[self.partition.number]:
            self._holders[consumer.name] = consumer
        consumer.deliver(data, share.ranges, share.flat, fetched.retries, fetched.kept)


def _messages_of(fetched: Fetched) -> int:
    return sum(len(share.flat) for share in fetched.shares) // 3
