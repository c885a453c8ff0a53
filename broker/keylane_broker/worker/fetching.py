"""A fetch for consumers of a subscription: gives back what is too much, settles what comes at most once."""

from collections.abc import Mapping

from keylane import wire
from keylane.errors import Fenced, Unavailable
from keylane_broker.engine.codec import flat_receipts
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.receipts import receipts_of
from keylane_broker.engine.values import Capacity, Fetched, Lease
from keylane_broker.worker.consumer import Consumer
from keylane_broker.worker.leased_partition import LeasedPartition

_LEAST = 16  # messages that a fetch may lease, however large they are


class Fetching:
    """The fetches of one dispatcher, and how many messages the next may lease."""

    def __init__(
        self,
        partition: LeasedPartition,
        subscription: str,
        consumers: Mapping[str, Consumer],
        *,
        at_most_once: bool,
    ) -> None:
        self._partition = partition
        self._subscription = subscription
        self._consumers = consumers  # that are served
        self._settles = at_most_once
        self._limit = wire.MAX_BATCH  # messages that the next fetch may lease

    async def fetch(
        self,
        engine: Engine,
        lease: Lease,
        rooms: list[Capacity],
        takers: Mapping[str, Consumer],
        others: int,
    ) -> tuple[Fetched, list[int] | None]:
        """Fetch, and settle what is delivered at most once before anybody sees it."""
        # Who went, or began anew, while we waited for the lease has been told what it holds: nothing more.
        rooms = [room for room in rooms if self._consumers.get(room.consumer) is takers[room.consumer]]
        if not rooms:
            raise Unavailable("the consumers that had room have gone; trying again")
        at_ms = self._partition.clock.now_ms()
        fetched = await engine.fetch_flat(
            lease, self._subscription, rooms, self._limit, others=others, at_ms=at_ms
        )
        try:
            await self._return_unread(engine, lease, fetched)
            return fetched, await self._settle(engine, lease, fetched) if self._settles else None
        except Fenced as error:
            # Not to be fetched once more at once: what is leased now comes first.
            self._partition.fenced(lease)
            raise Unavailable(str(error)) from error

    async def _settle(self, engine: Engine, lease: Lease, fetched: Fetched) -> list[int]:
        """Ack all of a fetch; return first and last of the entries that nobody else is owed."""
        forgotten: list[int] = []
        counts = engine.store.counters.subscription(lease.topic, self._subscription)
        for share in fetched.shares:
            receipts = flat_receipts(fetched, share)
            for start in range(0, len(receipts), wire.MAX_BATCH * 4):
                some = receipts_of(receipts[start : start + wire.MAX_BATCH * 4])
                result = await engine.ack(lease, self._subscription, some, "")  # who reads bodies deletes
                counts.acked += some.messages - sum(part.last - part.first + 1 for part in result.stale)
                forgotten += [number for bounds in result.forgotten for number in bounds]
        return forgotten

    async def _return_unread(self, engine: Engine, lease: Lease, fetched: Fetched) -> None:
        """Give back at once what is more than a fetch may send, and lease as much as fits the next time."""
        if not fetched.oversized:
            self._limit = min(self._limit * 2, wire.MAX_BATCH)
            return
        self._limit = max(_LEAST, sum(len(share.flat) for share in fetched.shares) // 3)
        await engine.nack(lease, self._subscription, receipts_of(fetched.oversized), charged=False)
