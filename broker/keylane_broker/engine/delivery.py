"""Delivering: leasing messages to consumers that have room, and taking back what has timed out."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from keylane.wire import MAX_BATCH
from keylane_broker.engine.addressing import addressed_to_others
from keylane_broker.engine.checks import check_capacities, check_int
from keylane_broker.engine.codec import entries_of, lanes_of, pack, pack_capacities, rows, without_lost
from keylane_broker.engine.entries import LOST, as_messages, read_entries, settle_missing, warn_of_missing
from keylane_broker.engine.expiry import ExpiryOperations
from keylane_broker.engine.lanes import split_by_lane
from keylane_broker.engine.portions import Portions
from keylane_broker.engine.receipts import receipts_of
from keylane_broker.engine.settling import SettleOperations
from keylane_broker.engine.tail import Tail
from keylane_broker.engine.values import (
    Capacity,
    Delivery,
    ExpireResult,
    Fetched,
    FetchResult,
    Lease,
    Receipt,
    Share,
)
from keylane_broker.store.keys import PLACE, partition_keys

_BACK = 150  # lanes that one call gives back when they are due: others wait meanwhile
_AMID = 2  # what expire answers when its limit has ended it amid a lane
_BEHIND = 2  # what fetch answers where a filtered subscription has to compare what lies after its cursor


class FetchOperations(ExpiryOperations, SettleOperations):
    """Leasing messages, and ending leases whose time is over."""

    async def fetch(
        self, lease: Lease, subscription: str, consumers: Sequence[Capacity], limit: int = MAX_BATCH
    ) -> FetchResult:
        """Lease messages to consumers that have room, at most `limit`."""
        return self.as_result(lease, consumers, await self.fetch_flat(lease, subscription, consumers, limit))

    def as_result(self, lease: Lease, consumers: Sequence[Capacity], fetched: Fetched) -> FetchResult:
        """Return what was fetched, with a receipt for each part of a lane."""
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
        consumers: Sequence[Capacity],
        limit: int = MAX_BATCH,
        *,
        others: int = 0,
        at_ms: int | None = None,
    ) -> Fetched:
        """Lease messages as fetch() does, and return them flat, for those who only pass them on.

        Besides those named, `others` have room, for the calls to come. The caller's clock shows `at_ms`:
        times are by it instead of the partition's.
        """
        check_int("limit", limit, 1, MAX_BATCH)
        permits = check_capacities(consumers)
        tail = self._tails.of(lease)
        known, upto = tail.lanes_after(subscription, min(limit, permits)), tail.known_upto(subscription)
        lanes = (known[0], pack(known[1])) if known else ("", "")
        named = pack_capacities(consumers)
        arguments = (limit, *lanes, named, others, "" if upto is None else upto)
        answer = await self.run("fetch", lease, subscription, *arguments)
        while answer[0] == "EXPIRED":
            await self.expire_messages(lease)
            answer = await self.run("fetch", lease, subscription, *arguments)
        leased = _Leased(*answer[1:16])
        if answer[16]:
            leased.add_matched(answer[16])
        if at_ms is not None:
            leased = leased.by_clock(at_ms)
        self._note_leased(lease, subscription, tail, leased)
        behind = leased.filtered == _BEHIND
        if behind:
            await self.compare_some(lease.topic, lease.partition, subscription)
        portions = Portions(leased.mode, leased.token, leased.found, [room.size for room in consumers])
        missing: list[int] = []
        portions.take_known(tail)
        while ranges := portions.next_ranges(tail.stride):
            parts, lost = await read_entries(self.store, tail, lease, leased.ledgers, ranges)
            missing += lost
            portions.take(parts)
        found = portions.found
        shares = {index: Share(consumers[index].consumer, *its) for index, its in portions.shares.items()}
        passed = await self._pass_over(lease, subscription, leased, list(shares.values()))
        if missing or passed:
            if missing:
                await settle_missing(self, lease, subscription, missing)
            shares = {index: without_lost(share) for index, share in shares.items()}
            found = _flat_ranges(shares)
        return Fetched(
            leased.mode,
            leased.token,
            leased.now_ms,
            leased.next_due_ms,
            bool(leased.more or portions.oversized or missing or passed or behind),  # it leaves room
            leased.cursor,
            leased.ledgers,
            found,
            list(shares.values()),
            leased.kept,
            leased.retries,
            leased.unknown,
            leased.left_out,
            [(consumers[index].consumer, due_ms) for index, due_ms in rows(leased.later, 2)],
            portions.oversized,
        )

    async def _pass_over(
        self, lease: Lease, subscription: str, leased: "_Leased", shares: list[Share]
    ) -> bool:
        """Settle what is meant for another subscription, before anybody sees it; returns whether it did.

        In the shares it counts as lost from then on.
        """
        flat: list[str | int] = []
        for share in shares:
            places = addressed_to_others(subscription, share.flat[2::3])
            entries = entries_of(share) if places else []
            for place in places:
                [lane] = lanes_of(leased.mode, share.flat[place * 3 : place * 3 + 1])
                flat += (lane, leased.token, entries[place], entries[place])
                share.flat[place * 3 : place * 3 + 3] = LOST
        if flat:
            await self.ack(lease, subscription, receipts_of(flat))
        return bool(flat)

    def _note_leased(self, lease: Lease, subscription: str, tail: Tail, leased: "_Leased") -> None:
        """Learn what a fetch has done, for the next one and for the load."""
        found = leased.found
        if leased.lost:
            warn_of_missing(lease, subscription, rows(leased.lost, 2))
        if leased.mode == "key_shared" and not leased.filtered:
            tail.passed(subscription, leased.cursor, found)
        if found:
            delivered = sum(found[2::3]) - sum(found[1::3]) + len(found) // 3
            self._messages[partition_keys(lease.topic, lease.partition).lease] += delivered

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
            _, more, next_due_ms, lanes, gone, now_ms, over, void, dead = await self.run(
                "expire", lease, subscription, _BACK
            )
            self.note_dead(lease, subscription, dead)
            released += lanes
            expired.update(dict.fromkeys(gone))
            ended += over
        if expired and PLACE in subscription:  # which has gone with the session
            await self.drop_unowed(lease.topic, lease.partition, subscription)
        return ExpireResult(
            released, next_due_ms, list(expired), now_ms, bool(more), list(rows(ended, 4)), void
        )


class _Leased(NamedTuple):
    """What the script `fetch` answers; times are the partition's. The lists are those of Fetched."""

    now_ms: int
    next_due_ms: int
    more: int
    mode: str
    token: int
    cursor: int
    ledgers: str
    unknown: list[str]
    found: list[int]
    kept: list[Any]
    retries: list[int]
    lost: list[int]  # first, last, … of entries that the log should have and has not
    left_out: list[str]
    later: list[int]  # place of a consumer, due_ms, …
    filtered: int  # 1: it has a filter; _BEHIND: and has to compare what lies after its cursor with it

    def add_matched(self, matched: list[Any]) -> None:
        """Add what matches a filter: place in what is leased, place of a consumer, ranges as text, …"""
        found: list[int] = []
        for _, index, text in rows(matched, 3):
            found += _deliveries(index, text)
        self.found[matched[0] : matched[0]] = found

    def by_clock(self, now_ms: int) -> "_Leased":
        """Return it with times by a clock that shows `now_ms`."""
        shift, kept, later = self.now_ms - now_ms, self.kept, self.later
        kept[1::2] = [deadline - shift for deadline in kept[1::2]]
        later[1::2] = [due_ms - shift for due_ms in later[1::2]]
        return self._replace(now_ms=now_ms, next_due_ms=self.next_due_ms and self.next_due_ms - shift)


def _deliveries(index: int, text: str) -> list[int]:
    """Return the place of a consumer, first and last of each range in a text: "5 7-9"."""
    spans = text.split(" ")
    if "-" in text:
        firsts = [int(span.partition("-")[0]) for span in spans]
        lasts = [int(span.rpartition("-")[2]) for span in spans]
    else:
        firsts = lasts = list(map(int, spans))
    found = [index] * (len(spans) * 3)
    found[1::3], found[2::3] = firsts, lasts
    return found


def _flat_ranges(shares: dict[int, Share]) -> list[int]:
    """Return the place of the consumer, first and last of each range of shares."""
    return [
        number
        for index, share in shares.items()
        for first, last in rows(share.ranges, 2)
        for number in (index, first, last)
    ]
