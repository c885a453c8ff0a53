"""Taking messages in: at once into the log, or for later."""

from collections.abc import Callable, Sequence

from broker.administration import STEP, checked, partition_keys
from broker.arguments import check_dues, check_flat, check_int, flat_messages, pack, rows
from broker.results import DelayResult, Lease, Outgoing, PromoteResult, PublishResult
from broker.store import Store
from broker.tail import TailCache


class Publishing:
    """What a partition's owner does for producers."""

    store: Store
    on_doomed: Callable[[str, int], None]
    _tails: TailCache
    _messages: dict[str, int]  # published and delivered, by the lease's key

    async def publish(
        self,
        lease: Lease,
        messages: Sequence[Outgoing],
        *,
        durability: str = "memory",
        timeout_ms: int = 5_000,
    ) -> PublishResult:
        """Append a batch to the partition, each uid once within the topic's dedupe window."""
        flat = flat_messages(messages)
        check_flat(flat)
        return await self.publish_flat(lease, flat, durability=durability, timeout_ms=timeout_ms)

    async def publish_flat(
        self, lease: Lease, flat: list[str], *, durability: str = "memory", timeout_ms: int = 5_000
    ) -> PublishResult:
        """The same for key, uid and about of each message, flat, that check_flat has let pass."""
        packed = pack(flat)
        check_int("timeout_ms", timeout_ms, 1, 60_000)
        keys = partition_keys(lease.topic, lease.partition)
        answer = await self.store.run_durably(
            durability,
            timeout_ms,
            "partition/publish",
            [*keys, keys.delayed, keys.delayed_data],
            lease.text,
            packed,
        )
        checked(answer, lease.topic, lease=lease)
        _, now_ms, first, stored, unowed, pairs, marks_due_ms = answer
        self._messages[keys.lease] += stored
        result = PublishResult(
            lease.epoch,
            first,
            stored,
            unowed,
            now_ms,
            dict(rows(pairs, 2)),
            durability,
            len(flat) // 3,
            marks_due_ms,
        )
        self._tails.add(lease, flat, result, len(packed))
        return result

    async def delay(
        self,
        lease: Lease,
        messages: Sequence[Outgoing],
        dues: Sequence[int],
        *,
        durability: str = "memory",
        timeout_ms: int = 5_000,
    ) -> DelayResult:
        """Keep a batch, each message until its time, in ms, has come: then promote() appends it."""
        flat = flat_messages(messages)
        check_flat(flat)
        check_dues(flat, dues)
        return await self.delay_flat(lease, flat, dues, durability=durability, timeout_ms=timeout_ms)

    async def delay_flat(
        self,
        lease: Lease,
        flat: list[str],
        dues: Sequence[int],
        *,
        durability: str = "memory",
        timeout_ms: int = 5_000,
    ) -> DelayResult:
        """The same for what check_flat and check_dues have let pass."""
        check_int("timeout_ms", timeout_ms, 1, 60_000)
        keys = partition_keys(lease.topic, lease.partition)
        answer = await self.store.run_durably(
            durability,
            timeout_ms,
            "partition/delay",
            [*keys, keys.delayed, keys.delayed_data],
            lease.text,
            pack(flat),
            pack(dues),
        )
        _, now_ms, kept, pairs, next_due_ms = checked(answer, lease.topic, lease=lease)
        return DelayResult(now_ms, kept, dict(rows(pairs, 2)), next_due_ms, durability)

    async def own(self, lease: Lease) -> None:
        """Know that bodies of the partition may be in stores that clients have brought along."""
        keys = partition_keys(lease.topic, lease.partition)
        answer = await self.store.run("partition/own", [keys.lease, keys.meta], lease.text)
        checked(answer, lease.topic, lease=lease)

    async def promote(self, lease: Lease, limit: int = STEP) -> PromoteResult:
        """Append delayed messages that are due to the log; bounded, so that the next may be due already."""
        keys = partition_keys(lease.topic, lease.partition)
        answer = await self.store.run(
            "partition/promote", [*keys, keys.delayed, keys.delayed_data, keys.bodies], lease.text, limit
        )
        result = PromoteResult(*checked(answer, lease.topic, lease=lease)[1:])
        self._messages[keys.lease] += result.appended
        if result.dropped:
            self.on_doomed(lease.topic, lease.partition)
        return result
