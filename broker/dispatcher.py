"""Hands the messages of one partition to the consumers of one subscription, as soon as there is work.

It sleeps until something happens (a publish, a settle, permits) or until the instant that the last script
named as the next at which something falls due: no polling, no sweep.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from broker.arguments import MAX_BATCH, pack_flat_receipts
from broker.consumer import Consumer
from broker.results import Delivery, Fetched, Lease, Message, Room, Share
from client import wire
from client.errors import BrokerError, SubscriptionNotFound, TopicNotFound

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
        self._cursor = 0  # the last entry that a fetch has passed
        self._expected = 0  # the last entry that was published
        self._fetching = False
        self._token = 0  # of the last fetch that was answered
        self._lost: dict[str, Consumer] = {}  # who was in a fetch without an answer, which may have leased
        self._lost_since = 0  # the token before that fetch
        self._settles = delivery == "at_most_once"
        self._due_ms = 1  # when to look for what has timed out; 0 is never
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False

    def attach(self, consumer: Consumer) -> None:
        """Serve one more consumer."""
        self.consumers[consumer.name] = consumer
        consumer.dispatchers[self.partition.number] = self
        self.feed()

    def detach(self, consumer: Consumer) -> None:
        """Serve it no more."""
        if self.consumers.get(consumer.name) is consumer:
            del self.consumers[consumer.name]
        if not self.consumers:
            self._set_timer(0)
            if self.partition.dispatchers.get(self.subscription) is self:
                del self.partition.dispatchers[self.subscription]

    def feed(self) -> None:
        """There may be something to deliver."""
        self.hungry = True
        self.wake()

    def expect(self, entry: int) -> None:
        """An entry has been published; a fetch that was sent behind it may have got it."""
        self._expected = entry
        if not self._fetching and self._cursor < entry:
            self.feed()

    def wake(self) -> None:
        """Somebody has room, or something has fallen due."""
        if not self._pumping:
            self._pumping = True
            self.partition.worker.start(self._pump)

    async def _pump(self) -> None:
        """Deliver until there is nothing to deliver, or nobody to deliver to."""
        pause = _PATIENCE[0]
        try:
            while self.consumers and not self.partition.worker.stopping:
                try:
                    if not await self._step():
                        break
                    pause = _PATIENCE[0]
                except (TopicNotFound, SubscriptionNotFound) as error:
                    for consumer in list(self.consumers.values()):
                        consumer.end(error.code, str(error))
                except BrokerError as error:
                    log.warning("%s: %s", self, error)
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, _PATIENCE[1])
        finally:
            self._pumping = False
            self._set_timer(self._due_ms if self.consumers else 0)

    def __str__(self) -> str:
        return f"subscription {self.subscription!r} on {self.partition}"

    async def _step(self) -> bool:
        """Do what there is to do now; answers whether there may be more."""
        if 0 < self._due_ms <= self.partition.worker.now_ms():
            await self._expire()
        if self._lost:
            await self._recover()
        rooms = self._rooms() if self.hungry else []
        if rooms:
            await self._fetch(rooms)
        return bool(rooms)

    async def _recover(self) -> None:
        """Hand over what was leased by a fetch whose answer was lost, before anything that comes after it."""
        for name, consumer in list(self._lost.items()):
            held = await self.partition.call(
                lambda engine, lease, name=name: engine.held(lease, self.subscription, name)  # type: ignore[misc]
            )
            # Tokens only grow: what is newer was never sent.
            lost = [delivery for delivery in held if delivery.receipt.token > self._lost_since]
            if lost and self._settles:
                receipts = [delivery.receipt for delivery in lost[:MAX_BATCH]]
                await self.partition.call(
                    lambda engine, lease, receipts=receipts: engine.nack(  # type: ignore[misc]
                        lease, self.subscription, receipts, charged=False
                    )
                )
            elif self.consumers.get(name) is consumer:  # one that came back has been given it already
                self.hand_back(consumer, lost)
            del self._lost[name]

    def hand_back(self, consumer: Consumer, held: list[Delivery]) -> None:
        """Send what a consumer holds already, a frame for each token and deadline."""
        frames: dict[tuple[int, int], list[Message]] = {}
        for delivery in sorted(held, key=lambda delivery: delivery.receipt.first):
            frames.setdefault((delivery.receipt.token, delivery.deadline_ms), []).extend(delivery.messages)
        for (token, deadline_ms), messages in frames.items():
            if not messages:
                continue
            ledgers: dict[str, int] = {}
            for message in messages:
                ledgers.setdefault(message.id.partition("-")[0], message.entry)
            data = wire.Data(
                consumer.stream,
                self.partition.number,
                token,
                deadline_ms,
                " ".join(f"{ledger}:{first}" for ledger, first in ledgers.items()),
                held=True,
            )
            ranges = [message.entry for message in messages for _ in range(2)]
            flat = [text for message in messages for text in (message.key, message.uid, message.about)]
            retries = [
                part for message in messages if message.retries for part in (message.entry, message.retries)
            ]
            self._token = max(self._token, token)
            consumer.credit -= len(messages)
            consumer.deliver(data, ranges, flat, retries, [])

    def _set_timer(self, due_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_ms:
            # At least a millisecond: the clocks of Redis and of this process are not the same.
            delay = max(due_ms - self.partition.worker.now_ms(), 1) / 1_000
            self._timer = asyncio.get_running_loop().call_later(delay, self.wake)

    async def _expire(self) -> None:
        result = await self.partition.call(lambda engine, lease: engine.expire(lease, self.subscription))
        self._due_ms = result.next_due_ms
        self.hungry = True
        for name in result.expired_consumers:
            if name in self.consumers:  # it is here: Redis was away for longer than its session
                await self._join(name)

    def _rooms(self) -> list[Room]:
        rooms = []
        for consumer in self.consumers.values():
            if permits := consumer.reserve():
                rooms.append(Room(consumer.name, permits, consumer.lease_ms))
        return rooms

    async def _fetch(self, rooms: list[Room]) -> None:
        spare = {room.consumer: room.permits for room in rooms}
        takers = {name: self.consumers[name] for name in spare}
        self.hungry = False
        self._fetching = True
        try:
            fetched, settled = await self.partition.call(lambda _, lease: self._lease(lease, rooms))
        except BaseException:
            self.hungry = True
            if not self._lost:
                self._lost_since = self._token
            self._lost.update(takers)
            for name, consumer in takers.items():
                consumer.give(spare[name])
            raise
        finally:
            self._fetching = False
        for share in fetched.shares:
            spare[share.consumer] -= len(share.flat) // 3
            self._send(takers[share.consumer], share, fetched, settled)
        if fetched.shares:
            self._token = max(self._token, fetched.token)
        self._due_ms = fetched.next_due_ms
        self._cursor = fetched.cursor
        behind = fetched.cursor < self._expected
        if behind or fetched.more or fetched.unknown_consumers or not any(spare.values()):
            self.hungry = True
        for name, consumer in takers.items():
            consumer.give(spare[name])
        for name in fetched.unknown_consumers:
            await self._join(name)

    async def _lease(self, lease: Lease, rooms: list[Room]) -> tuple[Fetched, list[int] | None]:
        """Fetch; at most once is settled before anybody sees it."""
        engine = self.partition.worker.engine
        fetched = await engine.fetch_flat(lease, self.subscription, rooms)
        if not self._settles or not fetched.shares:
            return fetched, None
        forgotten: list[int] = []
        for share in fetched.shares:
            receipts = flat_receipts(fetched, share)
            for start in range(0, len(receipts), MAX_BATCH * 4):
                packed = pack_flat_receipts(receipts[start : start + MAX_BATCH * 4])
                result = await engine.ack(lease, self.subscription, packed)
                forgotten += [number for bounds in result.forgotten for number in bounds]
        return fetched, forgotten

    def _send(self, consumer: Consumer, share: Share, fetched: Fetched, settled: list[int] | None) -> None:
        if "" in share.flat[1::3]:
            share = self._without_lost(share, fetched)
        data = wire.Data(
            consumer.stream,
            self.partition.number,
            fetched.token,
            fetched.now_ms + consumer.lease_ms,
            fetched.ledgers,
            settled=settled,
        )
        consumer.deliver(data, share.ranges, share.flat, fetched.retries, fetched.kept)
        consumer.connection.flush()  # before the answers of this turn: somebody waits for it

    def _without_lost(self, share: Share, fetched: Fetched) -> Share:
        """Leave out entries that Redis should have and has not, and settle them where that can be done."""
        entries = [
            entry
            for first, last in zip(share.ranges[::2], share.ranges[1::2], strict=True)
            for entry in range(first, last + 1)
        ]
        lost = [entry for entry, uid in zip(entries, share.flat[1::3], strict=True) if not uid]
        log.error("%s: entries %s are not in the log; somebody deleted them there", self, lost[:20])
        if fetched.mode != "key_shared":  # there the key, and so the lane, went with the entry
            lane = "" if fetched.mode == "shared" else "="
            receipts = [part for entry in lost for part in (lane, fetched.token, entry, entry)]
            packed = pack_flat_receipts(receipts)
            self.partition.worker.start(
                self.partition.call, lambda engine, lease: engine.ack(lease, self.subscription, packed)
            )
        kept = [at for at, uid in enumerate(share.flat[1::3]) if uid]
        return Share(
            share.consumer,
            [number for at in kept for number in (entries[at], entries[at])],
            [text for at in kept for text in share.flat[at * 3 : at * 3 + 3]],
        )

    async def _join(self, name: str) -> None:
        if name in self.consumers:
            worker = self.partition.worker
            await self.partition.call(
                lambda engine, lease: engine.join(lease, self.subscription, name, worker.session_ms)
            )
            self.hungry = True


def flat_receipts(fetched: Fetched, share: Share) -> list[str | int]:
    """The receipts of a share: lane, token, first and last of each, flat."""
    ranges = zip(share.ranges[::2], share.ranges[1::2], strict=True)
    if fetched.mode != "key_shared":
        lane = "" if fetched.mode == "shared" else "="
        return [part for first, last in ranges for part in (lane, fetched.token, first, last)]
    entries = (entry for first, last in ranges for entry in range(first, last + 1))
    return [
        part
        for entry, key in zip(entries, share.flat[::3], strict=True)
        for part in ("=" + key if key else "", fetched.token, entry, entry)
    ]
