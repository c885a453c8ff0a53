"""Delivering: leasing messages to consumers that have room, and taking back what has timed out."""

from collections.abc import Sequence
from typing import Any

from keylane.wire import MAX_BATCH
from keylane_broker.engine.base import EngineBase
from keylane_broker.engine.checks import check_int, check_room
from keylane_broker.engine.codec import pack, rows, without_lost
from keylane_broker.engine.entries import as_messages, read_entries, settle_missing, warn_of_missing
from keylane_broker.engine.lanes import split_by_lane
from keylane_broker.engine.portions import Portions
from keylane_broker.engine.values import (
    Delivery,
    ExpireResult,
    Fetched,
    FetchResult,
    Lease,
    Receipt,
    Room,
    Share,
)
from keylane_broker.store.keys import partition_keys

_BACK = 150  # lanes that one call gives back when they are due: others wait meanwhile
_AMID = 2  # what expire answers when its limit has ended it amid a lane


class Deliveries(EngineBase):
    """Leasing messages, and ending leases whose time is over."""

    async def fetch(
        self, lease: Lease, subscription: str, consumers: Sequence[Room], limit: int = MAX_BATCH
    ) -> FetchResult:
        """Lease messages to consumers that have room, at most `limit`."""
        fetched = await self.fetch_flat(lease, subscription, consumers, limit)
        deadlines = dict(rows(fetched.kept, 2))
        messages = {}
        for share in fetched.shares:
            messages.update(
                as_messages(fetched.ledgers, rows(share.ranges, 2), [share.flat], fetched.retries)
            )
        deliveries = []
        for index, first, last in rows(fetched.found, 3):
            consumer, lease_ms = consumers[index].consumer, consumers[index].lease_ms
            for lane, start, end, part in split_by_lane(fetched.mode, first, last, messages):
                deadline = deadlines.get(lane) or fetched.now_ms + lease_ms
                receipt = Receipt(lease.partition, lane, fetched.token, start, end)
                deliveries.append(Delivery(consumer, receipt, deadline, part))
        return FetchResult(
            deliveries, fetched.now_ms, fetched.next_due_ms, fetched.more, fetched.unknown_consumers
        )

    async def fetch_flat(
        self,
        lease: Lease,
        subscription: str,
        consumers: Sequence[Room],
        limit: int = MAX_BATCH,
        *,
        others: int = 0,
        at_ms: int | None = None,
    ) -> Fetched:
        """Lease messages as fetch() does, and return them flat, for those who only pass them on.

        Besides those named, `others` have room, for the calls to come. The caller's clock
        shows `at_ms`: times are answered by it instead of the partition's.
        """
        check_int("limit", limit, 1, MAX_BATCH)
        permits = check_room(consumers)
        tail = self._tails.of(lease)
        known = tail.keys_after(subscription, min(limit, permits))
        answer = await self.run(
            "fetch",
            lease,
            subscription,
            limit,
            *((known[0], pack(known[1])) if known else ("", "")),
            pack(
                [
                    part
                    for name, permits, lease_ms, spare, _ in consumers
                    for part in (name, permits, permits if spare is None else spare, lease_ms)
                ]
            ),
            others,
        )
        _, now_ms, next_due_ms, more, mode, token, cursor, ledgers, unknown, found, *rest = answer
        kept, retries, lost, left_out, later = rest[:5]
        if at_ms is not None:
            shift, now_ms = now_ms - at_ms, at_ms
            next_due_ms = next_due_ms and next_due_ms - shift
            kept[1::2] = [deadline - shift for deadline in kept[1::2]]
            later[1::2] = [due_ms - shift for due_ms in later[1::2]]
        if lost:
            warn_of_missing(lease, subscription, rows(lost, 2))
        if mode == "key_shared":
            tail.passed(subscription, cursor, found)
        if found:
            delivered = sum(found[2::3]) - sum(found[1::3]) + len(found) // 3
            self._messages[partition_keys(lease.topic, lease.partition).lease] += delivered
        portions = Portions(mode, token, list(rows(found, 3)), [room.size for room in consumers])
        missing: list[int] = []
        while ranges := portions.next_ranges(tail.stride):
            parts, lost = await read_entries(self.store, tail, lease, ledgers, ranges)
            missing += lost
            portions.take(parts)
        found = portions.found
        if portions.over:
            more = 1
        shares: dict[int, Share] = {}
        for (index, first, last), part in zip(rows(found, 3), portions.parts, strict=True):
            share = shares.get(index)
            if share is None:
                shares[index] = Share(consumers[index].consumer, [first, last], part)
            else:
                share.ranges.extend((first, last))
                share.flat.extend(part)
        if missing:
            more = 1  # there is room again
            await settle_missing(self, lease, subscription, missing)
            shares = {index: without_lost(share) for index, share in shares.items()}
            found = [
                number
                for index, share in shares.items()
                for first, last in rows(share.ranges, 2)
                for number in (index, first, last)
            ]
        return Fetched(
            mode,
            token,
            now_ms,
            next_due_ms,
            bool(more),
            cursor,
            ledgers,
            found,
            list(shares.values()),
            kept,
            retries,
            unknown,
            left_out,
            [(consumers[index].consumer, due_ms) for index, due_ms in rows(later, 2)],
            portions.over,
        )

    async def expire(self, lease: Lease, subscription: str) -> ExpireResult:
        """Give back what has timed out, and what consumers held whose sessions have ended."""
        released, expired, ended = 0, dict[str, None](), list[tuple[str, int, int, int]]()
        while True:
            step = await self.expire_some(lease, subscription)
            released += step.released
            expired.update(dict.fromkeys(step.expired_consumers))
            ended += step.ended
            if not step.more:
                return ExpireResult(
                    released, step.next_due_ms, list(expired), step.now_ms, ended=ended, void=step.void
                )

    async def expire_some(self, lease: Lease, subscription: str) -> ExpireResult:
        """Do one step of expire(), for those who have other things to do in between."""
        more, released, expired, ended = _AMID, 0, dict[str, None](), list[Any]()
        while more == _AMID:  # nobody is told before a lane is back: it would be asked for meanwhile
            _, more, next_due_ms, lanes, gone, now_ms, over, void = await self.run(
                "expire", lease, subscription, _BACK
            )
            released += lanes
            expired.update(dict.fromkeys(gone))
            ended += over
        return ExpireResult(
            released, next_due_ms, list(expired), now_ms, bool(more), list(rows(ended, 4)), void
        )
