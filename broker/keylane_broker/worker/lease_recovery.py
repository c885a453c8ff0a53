"""Puts right what consumers hold, where answers were lost or leases have ended without a word."""

import asyncio
from collections.abc import Mapping

from keylane import wire
from keylane_broker.engine.values import Delivery
from keylane_broker.worker.consumer import Consumer
from keylane_broker.worker.held_messages import count_messages, held_frames, without
from keylane_broker.worker.leased_partition import LeasedPartition

_AT_ONCE = 50  # consumers whose leases are listed


class LeaseRecovery:
    """What a dispatcher is not sure of, about the leases of its consumers."""

    def __init__(
        self,
        partition: LeasedPartition,
        subscription: str,
        incarnation: int,
        consumers: Mapping[str, Consumer],
        *,
        at_most_once: bool,
    ) -> None:
        self.token = 0  # of the last fetch that was answered
        self.lost: dict[str, Consumer] = {}  # who was in a fetch without an answer, which may have leased
        self.uncertain: dict[str, Consumer] = {}  # whose leases may have ended without our hearing of it
        self._partition = partition
        self._subscription = subscription
        self._incarnation = incarnation
        self._consumers = consumers  # that are served
        self._settles = at_most_once
        self._lost_since = 0  # the token before the fetch without an answer
        self._void: int | None = None  # up to which token a seek has ended leases; not known yet

    def answer_lost(self, takers: Mapping[str, Consumer]) -> None:
        """A fetch has failed, and may have leased to these all the same."""
        if not self.lost:
            self._lost_since = self.token
        self.lost.update(takers)

    def knows_all(self, name: str) -> None:
        """A consumer has been handed all that it holds."""
        self.lost.pop(name, None)
        self.uncertain.pop(name, None)

    def send_held(self, consumer: Consumer, held: list[Delivery]) -> None:
        """Send what a consumer holds already."""
        for data, ranges, texts, retries in held_frames(held, consumer.stream, self._partition.number):
            self.token = max(self.token, data.token)
            consumer.deliver(data, ranges, texts, retries, [])

    async def recover(self) -> None:
        """Hand over what was leased by a fetch whose answer was lost, before anything that comes after it.

        Then give back the permits of leases that have ended.
        """
        for name, consumer in list(self.lost.items()):
            if self._settles:
                await self._return_lost(name)
            else:
                held, _ = await self._recount(consumer)  # nothing of one that came back: it was given all
                # Tokens only grow: what is newer was never sent.
                self.send_held(consumer, [one for one in held if one.receipt.token > self._lost_since])
            self.lost.pop(name, None)  # unless it was attached anew, and so handed all
        uncertain = list(self.uncertain.values())
        recounts = await asyncio.gather(*map(self._recount, uncertain), return_exceptions=True)
        for consumer, counted in zip(uncertain, recounts, strict=True):
            if isinstance(counted, BaseException):
                raise counted
            if self.uncertain.get(consumer.name) is consumer:
                del self.uncertain[consumer.name]

    async def follow_seek(self, void: int) -> None:
        """A seek has ended leases up to a token: find out what is still leased, and tell the consumers."""
        if void == self._void:
            return
        number = self._partition.number
        if self._void is not None or void >= self.token:  # else all was listed to us after it
            holders = [one for one in self._consumers.values() if one.out[number]]
            for first in range(0, len(holders), _AT_ONCE):  # one after the other a thousand take a second
                some = holders[first : first + _AT_ONCE]
                counted = await asyncio.gather(*map(self._recount, some), return_exceptions=True)
                for consumer, count in zip(some, counted, strict=True):
                    if isinstance(count, BaseException):
                        raise count
                    if count[1] > 0:
                        consumer.connection.send(wire.Ended(consumer.stream, number, count[1], void))
        self._void = void

    async def _recount(self, consumer: Consumer) -> tuple[list[Delivery], int]:
        """Return what a consumer holds, and how many more messages had seemed to be out."""
        number, listing = self._partition.number, list[tuple[int, int, int]]()
        if self._consumers.get(consumer.name) is not consumer:
            return [], 0  # it went: what it has is listed where it comes back, perhaps just now
        consumer.listing[number] = listing
        held: list[Delivery] | None = None
        try:
            held = await self._partition.held_by(self._subscription, consumer.name, self._incarnation)
        finally:
            came_back = consumer.listing.get(number) is not listing
            if not came_back:
                del consumer.listing[number]
                if held is None:
                    consumer.take_back(sum(last - first + 1 for _, first, last in listing), number)
        held = without(held, listing)
        if came_back or self._consumers.get(consumer.name) is not consumer:
            return [], 0  # it went meanwhile
        return held, consumer.recount(number, count_messages(held))

    async def _return_lost(self, name: str) -> None:
        """At most once: what was leased and not settled was never sent."""
        held = await self._partition.held_by(self._subscription, name, self._incarnation)
        receipts = [one.receipt for one in held if one.receipt.token > self._lost_since][: wire.MAX_BATCH]
        if receipts:
            await self._partition.call(
                lambda engine, lease: engine.nack(lease, self._subscription, receipts, charged=False),
                self._incarnation,
            )
