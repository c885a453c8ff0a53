"""Taking messages in: at once into the log, or for later."""

from collections.abc import Sequence
from typing import Any

import msgspec

from keylane_broker.engine.answers import checked
from keylane_broker.engine.base import STEP, EngineBase
from keylane_broker.engine.checks import check_dues, check_extras, check_flat, check_int, flat_messages
from keylane_broker.engine.codec import pack, pack_frames, rows
from keylane_broker.engine.tail import MANY
from keylane_broker.engine.values import (
    DelayResult,
    Extras,
    Lease,
    NumberedFrame,
    Outgoing,
    PromoteResult,
    PublishResult,
)
from keylane_broker.store.keys import partition_keys
from keylane_broker.store.store import Call

MADE = 27  # characters of a uid that a client has made, which is a KSUID


class PublishOperations(EngineBase):
    """What a partition's owner does for producers."""

    async def publish(
        self,
        lease: Lease,
        messages: Sequence[Outgoing],
        *,
        durability: str = "memory",
        timeout_ms: int = 5_000,
        extras: Extras | None = None,
        frames: Sequence[NumberedFrame] = (),
    ) -> PublishResult:
        """Append a batch to the partition, each uid, or number of a frame, once within the dedupe window."""
        flat = flat_messages(messages)
        check_flat(flat)
        check_extras(flat, extras)
        await self.require(lease, durability)
        result = await self.publish_flat(lease, flat, extras, frames)
        if result.stored or result.duplicates:
            await self.confirm(lease, durability, timeout_ms)
        return msgspec.structs.replace(result, durability=durability)

    async def publish_flat(
        self,
        lease: Lease,
        flat: list[str],
        extras: Extras | None = None,
        frames: Sequence[NumberedFrame] = (),
    ) -> PublishResult:
        """Append key, uid and about of each message, flat, that check_flat has accepted; into memory."""
        script, keys, arguments = self.publish_call(lease, flat, extras, frames)
        tail, many = self._tails.of(lease), len(flat) > MANY * 3
        tail.appending += many
        try:
            answer = await self.store.run(script, keys, *arguments)
        finally:
            tail.appending -= many
        return self.take_published(lease, flat, checked(answer, lease.topic, lease=lease))

    def publish_call(
        self,
        lease: Lease,
        flat: list[str],
        extras: Extras | None = None,
        frames: Sequence[NumberedFrame] = (),
    ) -> Call:
        """Return the call that appends."""
        keys = partition_keys(lease.topic, lease.partition)
        return (
            "partition/publish",
            (*keys, keys.delayed, keys.delayed_data),
            (
                lease.text,
                pack(flat),
                pack_frames(frames),
                _pack_extras(extras),
            ),
        )

    def take_published(self, lease: Lease, flat: list[str], answer: list[Any]) -> PublishResult:
        """Return what the answer to it means, and learn from it."""
        _, now_ms, first, stored, no_subscribers, pairs, marks_due_ms, expires_due_ms, full, *filtered = (
            answer
        )
        unmatched, behind = filtered or ([], 0)
        self._messages[partition_keys(lease.topic, lease.partition).lease] += stored
        result = PublishResult(
            lease.epoch,
            first,
            stored,
            no_subscribers,
            now_ms,
            dict(rows(pairs, 2)),
            "memory",
            len(flat) // 3,
            marks_due_ms,
            expires_due_ms,
            unmatched,
            bool(behind),
            full or [],
        )
        self._tails.add(lease, flat, result, sum(map(len, flat)))
        return result

    async def delay(
        self,
        lease: Lease,
        messages: Sequence[Outgoing],
        dues: Sequence[int],
        *,
        durability: str = "memory",
        timeout_ms: int = 5_000,
        extras: Extras | None = None,
    ) -> DelayResult:
        """Keep each message of a batch until its time, in ms, has come; then promote() appends it."""
        flat = flat_messages(messages)
        check_flat(flat)
        check_dues(flat, dues)
        check_extras(flat, extras)
        await self.require(lease, durability)
        result = await self.delay_flat(lease, flat, dues, extras)
        await self.confirm(lease, durability, timeout_ms)
        return msgspec.structs.replace(result, durability=durability)

    async def delay_flat(
        self, lease: Lease, flat: list[str], dues: Sequence[int], extras: Extras | None = None
    ) -> DelayResult:
        """Delay what check_flat and check_dues have accepted; into memory."""
        keys = partition_keys(lease.topic, lease.partition)
        answer = await self.store.run(
            "partition/delay",
            [*keys, keys.delayed, keys.delayed_data],
            lease.text,
            pack(flat),
            pack(dues),
            _pack_extras(extras),
        )
        _, now_ms, kept, pairs, next_due_ms, full = checked(answer, lease.topic, lease=lease)
        return DelayResult(now_ms, kept, dict(rows(pairs, 2)), next_due_ms, "memory", full)

    async def require(self, lease: Lease, durability: str) -> None:
        """Raise DurabilityNotReached where a level is out of reach right now, before anything is stored."""
        await self.store.require(durability, partition_keys(lease.topic, lease.partition).lease)

    async def confirm(self, lease: Lease, durability: str, timeout_ms: int = 5_000) -> None:
        """Wait until all that was stored under a lease so far, duplicates too, is as safe as asked."""
        check_int("timeout_ms", timeout_ms, 1, 60_000)
        if durability == "memory":
            return
        keys = partition_keys(lease.topic, lease.partition)
        answer = await self.store.run_durably(
            durability, timeout_ms, "partition/confirm", [keys.lease, keys.meta], lease.text
        )
        checked(answer, lease.topic, lease=lease)

    async def note_own_store(self, lease: Lease) -> None:
        """Record that bodies of the partition may be in stores that clients have brought along."""
        keys = partition_keys(lease.topic, lease.partition)
        answer = await self.store.run("partition/note_own_store", [keys.lease, keys.meta], lease.text)
        checked(answer, lease.topic, lease=lease)

    def stored_before(self, lease: Lease, flat: list[str]) -> list[str | int]:
        """Return uid, entry and time, flat, of messages that were stored before, as far as we remember."""
        uids = [uid for uid in flat[1::3] if len(uid) == MADE]
        found, tail = list[str | int](), self._tails.of(lease)
        for uid, entry in tail.places(uids).items() if uids else ():
            _, _, about = tail.read(entry, entry) or ("", "", "0")
            found += (uid, entry, int(about.partition(" ")[0]))
        return found

    async def mark(self, lease: Lease, found: list[str | int]) -> tuple[int, int]:
        """Have what stored_before() has found known by uid; returns the time, and when marks go, in ms."""
        keys = partition_keys(lease.topic, lease.partition)
        answer = await self.store.run(
            "partition/mark", [*keys, keys.delayed, keys.delayed_data], lease.text, pack(found)
        )
        _, now_ms, marks_due_ms = checked(answer, lease.topic, lease=lease)
        return now_ms, marks_due_ms

    async def promote(self, lease: Lease, limit: int = STEP) -> PromoteResult:
        """Append delayed messages that are due to the log; bounded, so more may be due already."""
        keys = partition_keys(lease.topic, lease.partition)
        answer = await self.store.run(
            "partition/promote", [*keys, keys.delayed, keys.delayed_data, keys.bodies], lease.text, limit
        )
        result = PromoteResult(*checked(answer, lease.topic, lease=lease)[1:])
        self._messages[keys.lease] += result.appended
        if result.dropped:
            self.on_bodies_to_delete(lease.topic, lease.partition)
        return result


def _pack_extras(extras: Extras | None) -> bytes | str:
    """Return what some messages have besides, as scripts read it; "" for nothing."""
    return pack([part for place, its in extras.items() for part in (place, *its)]) if extras else ""
