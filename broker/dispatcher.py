"""Hands the messages of one partition to the consumers of one subscription, as soon as there is work.

It acts when something happens (a publish, a settle, permits) and at the instant that the last script named
as the next at which something falls due: no polling, no sweep.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from broker.arguments import pack_flat_receipts
from broker.consumer import Consumer
from broker.handover import count_messages, flat_receipts, held_frames
from broker.instants import NEVER, instant
from broker.member import NotOwner
from broker.results import Delivery, Fetched, Lease, Room, Share
from client import wire
from client.errors import BrokerError, Fenced, SubscriptionNotFound, TopicNotFound, Unavailable

if TYPE_CHECKING:
    from broker.partition import Partition

log = logging.getLogger(__name__)

_PATIENCE = (0.05, 1.0)  # seconds between attempts while Redis is away, shortest and longest


class Dispatcher:
    """One partition and one subscription; lives as long as it has consumers."""

    def __init__(self, partition: "Partition", subscription: str, mode: str, delivery: str) -> None:
        self.partition = partition
        self.subscription = subscription
        self.ordered = mode != "shared"  # settling one message can set others free
        self.consumers: dict[str, Consumer] = {}
        self.hungry = True  # there may be something to deliver
        self._news = 0  # how often something has happened that can bring messages
        self._asked: dict[str, int] = {}  # consumer -> the news after which it was left with room to spare
        self._settles = delivery == "at_most_once"
        self._cursor = 0  # the last entry that a fetch has passed
        self._expected = 0  # the last entry that was published while a fetch was under way
        self._token = 0  # of the last fetch that was answered
        self._lost: dict[str, Consumer] = {}  # who was in a fetch without an answer, which may have leased
        self._lost_since = 0  # the token before that fetch
        self._due = 0.0  # when to look for what has timed out, by the event loop's clock
        self._sooner = NEVER  # what due() was told while a call was under way that may not know of it
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False
        self._quiet = asyncio.Event()  # no fetch is under way
        self._quiet.set()

    def __str__(self) -> str:
        return f"subscription {self.subscription!r} on {self.partition}"

    # Who is served

    def attach(self, consumer: Consumer) -> None:
        """Serve one more consumer."""
        self.consumers[consumer.name] = consumer
        self._lost.pop(consumer.name, None)  # it has just been handed all that it holds
        consumer.dispatchers[self.partition.number] = self
        self.feed()

    def detach(self, consumer: Consumer) -> None:
        """Serve it no more."""
        if self.consumers.get(consumer.name) is consumer:
            del self.consumers[consumer.name]
            self._asked.pop(consumer.name, None)
        if not self.consumers:
            self._set_timer(NEVER)
            if self.partition.dispatchers.get(self.subscription) is self:
                del self.partition.dispatchers[self.subscription]

    def end_all(self, error: BrokerError) -> None:
        """Tell every consumer that there is nothing more to come, and why."""
        for consumer in list(self.consumers.values()):
            consumer.end(error.code, str(error))

    def part(self) -> None:
        """Another worker serves the partition: the consumers go on there, with all that they hold."""
        gone = self.partition.worker.member.not_owner(self.partition.topic, self.partition.number)
        for consumer in list(self.consumers.values()):
            consumer.part(self.partition.number, gone.address)

    def hand_back(self, consumer: Consumer, held: list[Delivery]) -> None:
        """Send what a consumer holds already."""
        for data, ranges, texts, retries in held_frames(held, consumer.stream, self.partition.number):
            self._token = max(self._token, data.token)
            consumer.deliver(data, ranges, texts, retries, [])

    # What happens

    def feed(self) -> None:
        """There may be something to deliver."""
        self._news += 1
        self.nudge()

    def nudge(self) -> None:
        """Somebody has room who had none."""
        self.hungry = True
        self.wake()

    def starves(self, consumer: str) -> bool:
        """Whether there may be something for a consumer that it had no room for."""
        return self.hungry or self._asked.get(consumer) != self._news

    def expect(self, entry: int) -> None:
        """An entry has been published; a fetch that was sent behind it may have got it."""
        if not self._quiet.is_set():
            self._expected = max(self._expected, entry)
        elif self._cursor < entry:
            self.feed()

    def due(self, due: float) -> None:
        """Something falls due then, by the event loop's clock, perhaps before all else."""
        self._sooner = min(self._sooner, due)
        if due < self._due:
            self._due = due
            if not self._pumping:
                self._set_timer(due)

    async def fetched(self) -> None:
        """Wait until what a fetch under way leases has been sent."""
        await self._quiet.wait()

    def wake(self) -> None:
        """Somebody has room, or something has fallen due."""
        if not self._pumping and not self.partition.worker.stopping:
            self._pumping = True
            self.partition.worker.start(self._pump)

    # Delivering

    async def _pump(self) -> None:
        """Deliver until there is nothing to deliver, or nobody to deliver to."""
        pause = _PATIENCE[0]
        try:
            while self.consumers and not self.partition.worker.stopping:
                try:
                    if not await self._step():
                        break
                    pause = _PATIENCE[0]
                    continue
                except (TopicNotFound, SubscriptionNotFound) as error:
                    self.end_all(error)
                    break
                except NotOwner:
                    if not self.partition.leaving:  # else it goes when the lease has gone
                        self.part()
                    break
                except BrokerError as error:
                    log.warning("%s: %s", self, error)
                except Exception:
                    log.exception("%s: a bug; trying again", self)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _PATIENCE[1])
        finally:
            self._pumping = False
            self._set_timer(self._due if self.consumers else NEVER)

    async def _step(self) -> bool:
        """Do what there is to do now; answers whether there may be more."""
        late = self._due <= asyncio.get_running_loop().time()
        more = late and await self._expire()
        if self._lost:
            await self._recover()
        rooms = self._rooms() if self.hungry else []
        if rooms:
            await self._fetch(rooms)
        if more:
            self._due = 0.0
        return more or bool(rooms)

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due < NEVER and not self.partition.worker.stopping:
            loop = asyncio.get_running_loop()
            # At least a millisecond: what falls due then is not due before.
            self._timer = loop.call_at(max(due, loop.time() + 0.001), self.wake)

    async def _expire(self) -> bool:
        """Give back what is due, but not all at once: others are waiting. Answers whether there is more."""
        self._sooner = NEVER
        result = await self.partition.call(lambda engine, lease: engine.expire_some(lease, self.subscription))
        self._due = min(instant(result.next_due_ms, result.now_ms), self._sooner)
        self._news += 1
        self.hungry = True
        self._part_with(result.expired_consumers)
        return result.more

    def _part_with(self, names: list[str]) -> None:
        """Let go of consumers without a session: what they held is with others, and they must know."""
        for name in names:
            if name in self.consumers:
                self.consumers[name].end("unavailable", "its session ended while Redis was away")

    async def _recover(self) -> None:
        """Hand over what was leased by a fetch whose answer was lost, before anything that comes after it."""
        for name, consumer in list(self._lost.items()):
            held = await self.partition.held_by(self.subscription, name)
            # Tokens only grow: what is newer was never sent.
            lost = [delivery for delivery in held if delivery.receipt.token > self._lost_since]
            if lost and self._settles:
                receipts = [delivery.receipt for delivery in lost[: wire.MAX_BATCH]]
                await self.partition.call(
                    lambda engine, lease, receipts=receipts: engine.nack(  # type: ignore[misc]
                        lease, self.subscription, receipts, charged=False
                    )
                )
            elif self.consumers.get(name) is consumer:  # one that came back has been given it already
                consumer.count(self.partition.number, count_messages(lost))
                self.hand_back(consumer, lost)
            del self._lost[name]

    def _rooms(self) -> list[Room]:
        rooms = []
        for consumer in self.consumers.values():
            if permits := consumer.reserve():
                rooms.append(Room(consumer.name, permits, consumer.lease_ms))
        return rooms

    async def _fetch(self, rooms: list[Room]) -> None:
        spare = {room.consumer: room.permits for room in rooms}
        takers = {name: self.consumers[name] for name in spare}
        self.hungry, news = False, self._news
        self._expected, self._sooner = 0, NEVER
        self._quiet.clear()
        try:
            fetched, settled = await self.partition.call(lambda _, lease: self._lease(lease, rooms, takers))
            if self.partition.lapsed and not self._settles:
                # Another worker may have the partition by now, and has handed over what this fetch leased.
                raise Unavailable("the lease of the partition may have ended meanwhile")
        except BaseException:
            self.hungry = True
            if not self._lost:
                self._lost_since = self._token
            self._lost.update(takers)
            for name, consumer in takers.items():
                consumer.give(spare[name])
            raise
        finally:
            self._quiet.set()  # those who wait go on when this is sent: nothing is awaited in between
        for share in fetched.shares:
            if self.consumers.get(share.consumer) is not takers[share.consumer] and not self._settles:
                continue  # it went meanwhile: what it has is listed where it comes back
            spare[share.consumer] -= len(share.flat) // 3
            self._send(takers[share.consumer], share, fetched, settled)
        if fetched.shares:
            self._token = max(self._token, fetched.token)
        self._due = min(instant(fetched.next_due_ms, fetched.now_ms), self._sooner)
        self._cursor = fetched.cursor
        behind = fetched.cursor < self._expected
        if behind or fetched.more or (settled is not None and fetched.shares):
            self._news += 1
            self.hungry = True
        self._part_with(fetched.unknown_consumers)
        self._asked.update((name, news) for name, left in spare.items() if left and name in self.consumers)
        for name, consumer in takers.items():
            consumer.give(spare[name])

    async def _lease(
        self, lease: Lease, rooms: list[Room], takers: dict[str, Consumer]
    ) -> tuple[Fetched, list[int] | None]:
        """Fetch; at most once is settled before anybody sees it."""
        engine = self.partition.worker.engine
        # Who went, or began anew, while we waited for the lease has been told what it holds: nothing more.
        rooms = [room for room in rooms if self.consumers.get(room.consumer) is takers[room.consumer]]
        if not rooms:
            raise Unavailable("those who had room have gone meanwhile")
        at_ms = self.partition.worker.now_ms()
        fetched = await engine.fetch_flat(lease, self.subscription, rooms, at_ms=at_ms)
        if not self._settles:
            return fetched, None
        forgotten: list[int] = []
        for share in fetched.shares:
            receipts = flat_receipts(fetched, share)
            for start in range(0, len(receipts), wire.MAX_BATCH * 4):
                packed = pack_flat_receipts(receipts[start : start + wire.MAX_BATCH * 4])
                try:
                    result = await engine.ack(lease, self.subscription, packed)
                except Fenced as error:
                    # Not to be fetched once more at once: what is leased now comes first.
                    self.partition.lose(lease)
                    raise Unavailable(str(error)) from error
                forgotten += [number for bounds in result.forgotten for number in bounds]
        return fetched, forgotten

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
        consumer.out[self.partition.number] += len(share.flat) // 3
        consumer.deliver(data, share.ranges, share.flat, fetched.retries, fetched.kept)
        consumer.connection.flush()  # before the answers of this turn: somebody waits for it
