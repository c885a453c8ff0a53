"""Every operation on topics, partitions and subscriptions: one typed method per script.

engine = Engine.connect("redis://localhost")
await engine.create_topic("orders", TopicSettings(partitions=8))
await engine.create_subscription("orders", "billing", SubscriptionSettings(mode="key_shared"))

lease = await engine.acquire("orders", 3, worker="w1", ttl_ms=5000)
await engine.publish(lease, [Outgoing("customer-7", uid, pack_about(now_ms))])
await engine.join(lease, "billing", "c1")
result = await engine.fetch(lease, "billing", [Room("c1", 100)])
await engine.ack(lease, "billing", [delivery.receipt for delivery in result.deliveries])
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec

from keylane.errors import BrokerError, Fenced, InvalidArgument, SubscriptionBusy, Unavailable
from keylane.wire import MAX_BATCH
from keylane_broker.engine.checks import (
    LOST,
    body_names,
    check_int,
    check_optional_ms,
    check_room,
    covering_ranges,
    entries_of,
    id_maker,
    merge_ledgers,
    pack,
    rows,
    split_by_lane,
)
from keylane_broker.engine.codec import without_lost
from keylane_broker.engine.cursor_reader import Claims
from keylane_broker.engine.portions import Portions
from keylane_broker.engine.publishing import Publishing
from keylane_broker.engine.receipts import Receipts, checked_receipts
from keylane_broker.engine.tail import TailCache
from keylane_broker.engine.topics import STEP, checked, partition_keys, subscription_keys
from keylane_broker.engine.values import (
    Delivery,
    ExpireResult,
    Fetched,
    FetchResult,
    Lease,
    Message,
    Receipt,
    Room,
    SettleResult,
    Share,
)
from keylane_broker.engine.workers import Registry
from keylane_broker.limits import MAX_MS, MAX_PARTITIONS, MAX_TIME_MS
from keylane_broker.store.keys import check_name, partition_of
from keylane_broker.store.store import Call, Store

log = logging.getLogger(__name__)

_LEASES = 250  # that one call renews or releases
_HOLES = 100  # entries that one call looks for in every lane
_BACK = 150  # lanes that one call gives back when they are due: others wait meanwhile
_AMID = 2  # what expire answers when its limit has ended it amid a lane
_RELEASE = 2.0  # seconds that a release may take before those who wait for it go on

Told = Callable[[Receipts, SettleResult], None]  # what a step has dealt with, and what has come of it


def _nobody(_: Receipts, __: SettleResult) -> None:
    pass


class Engine(Claims, Registry, Publishing):
    """The broker's operations on Redis; holds nothing that it cannot lose."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._tails = TailCache()
        self._said = {}
        self._messages: dict[str, int] = defaultdict(int)  # published and delivered, by the lease's key

    @classmethod
    def connect(cls, url: str) -> "Engine":
        """Open a connection; see Store.connect for the kinds of URL."""
        return cls(Store.connect(url))

    async def close(self) -> None:
        """Close all connections."""
        await self.store.close()

    def forget(self, topic: str, partition: int) -> None:
        """Let go of what is remembered of a partition that is no more."""
        self._tails.forget(topic, partition)

    def take_loads(self) -> dict[tuple[str, int], tuple[int, int]]:
        """What each partition had to do since the last call: messages published and delivered, and the
        microseconds that its scripts took in Redis."""
        messages, self._messages = self._messages, defaultdict(int)
        spent = self.store.take_spent()
        return {
            partition_of(key): (messages.get(key, 0), spent.get(key, 0))
            for key in messages.keys() | spent.keys()
        }

    # Partition leases

    async def acquire(
        self, topic: str, partition: int, worker: str, ttl_ms: int, known_epoch: int = 0
    ) -> Lease | None:
        """Take a partition and open its next ledger; None while another worker holds it.

        `known_epoch` is the newest epoch the caller has heard of, or its time: after a failover that lost
        writes the new epoch still has to be larger. Where it says `sweep`, a reclaim is to be finished.
        """
        check_name("worker", worker)
        check_int("ttl_ms", ttl_ms, 1, MAX_MS)
        check_int("known_epoch", known_epoch, 0, MAX_TIME_MS)
        check_int("partition", partition, 0, MAX_PARTITIONS)
        keys = partition_keys(check_name("topic", topic), partition)
        known_epoch = max(known_epoch, self._tails.newest_epoch(topic, partition))
        answer = await self.store.run(
            "partition/acquire",
            [
                keys.lease,
                keys.meta,
                keys.log,
                keys.journal,
                keys.delayed,
                keys.marks_0,
                keys.marks_1,
                keys.subs,
            ],
            worker,
            ttl_ms,
            known_epoch,
        )
        if answer[0] == "HELD":
            return None
        checked(answer, topic, partition=partition)
        _, epoch, sweep, now_ms, due_ms, marks_due_ms, in_use, incarnation = answer
        lease = Lease(
            topic,
            partition,
            worker,
            epoch,
            bool(sweep),
            now_ms,
            due_ms,
            marks_due_ms,
            tuple(in_use),
            incarnation,
        )
        self._tails.begin(lease)
        return lease

    async def renew(self, leases: Sequence[Lease], ttl_ms: int) -> list[bool | None]:
        """Extend leases, many with one call; False for each that is lost, None where its node was away."""
        check_int("ttl_ms", ttl_ms, 1, MAX_MS)
        return await self._for_leases("partition/renew", leases, ttl_ms, patience=max(ttl_ms / 3_000, 1.0))

    async def release(self, lease: Lease) -> bool:
        """Give a partition up; False if it was lost before."""
        [released] = await self.release_all([lease])
        return bool(released)

    async def release_all(self, leases: Sequence[Lease]) -> list[bool | None]:
        """Give partitions up, many with one call; False for each that was lost before, None as in renew."""
        return await self._for_leases("partition/release", leases, patience=_RELEASE)

    async def _for_leases(
        self, script: str, leases: Sequence[Lease], *arguments: int, patience: float
    ) -> list[bool | None]:
        keys = [partition_keys(held.topic, held.partition).lease for held in leases]
        groups = self.store.groups(keys, _LEASES)
        calls: list[Call] = [
            (script, [keys[index] for index in group], [*arguments, *(leases[index].text for index in group)])
            for group in groups
        ]
        kept: list[bool | None] = [True] * len(leases)
        # What comes late does no harm, and those on another node must not wait for it.
        for group, answer in zip(groups, await self.store.try_all(calls, patience), strict=True):
            if isinstance(answer, BrokerError):  # one node of a cluster, perhaps
                for place in group:
                    kept[place] = None
            else:
                for index in answer[1]:
                    kept[group[index]] = False
        return kept

    # Consumers

    async def join(self, lease: Lease, subscription: str, consumer: str, session_ms: int = 10_000) -> bool:
        """Open a consumer's session; True if one of that name was open, so that it may hold leases."""
        check_name("consumer", consumer)
        check_int("session_ms", session_ms, 1, MAX_MS)
        while True:
            answer = await self._run("join", lease, subscription, consumer, session_ms)
            if answer[0] == "BUSY":
                raise SubscriptionBusy(
                    f"subscription {subscription!r} of {lease.topic!r} is exclusive and has "
                    f"consumer {answer[1]!r}"
                )
            if answer[0] == "OK":
                return bool(answer[1])
            await self._leave(lease, subscription, answer[1], "ended")

    async def touch(
        self, lease: Lease, subscription: str, consumers: Sequence[str], session_ms: int = 10_000
    ) -> list[str]:
        """Renew sessions; answers the consumers that have none any more."""
        for consumer in consumers:
            check_name("consumer", consumer)
        check_int("session_ms", session_ms, 1, MAX_MS)
        answer = await self._run("touch", lease, subscription, session_ms, "more", *consumers)
        return list(answer[1])

    async def touch_all(
        self, lease: Lease, subscription: str, consumers: Sequence[str], session_ms: int = 10_000
    ) -> list[str]:
        """The same for all consumers that are there: who is not among them is spared by no new owner."""
        check_int("session_ms", session_ms, 1, MAX_MS)
        unknown, until = list[str](), ""
        for start in range(0, len(consumers) or 1, STEP):
            part = consumers[start : start + STEP]
            more = start + STEP < len(consumers)
            answer = await self._run(
                "touch", lease, subscription, session_ms, "more" if more else until, *part
            )
            unknown += answer[1]
            until = until or str(answer[2])
        return unknown

    async def spare(self, lease: Lease, subscription: str, session_ms: int = 10_000) -> None:
        """Let no session end within `session_ms` whose consumer may look for the partition's new owner."""
        check_int("session_ms", session_ms, 1, MAX_MS)
        done, until = 0, ""
        while not done:
            _, done, until = await self._run("prolong_sessions", lease, subscription, session_ms, STEP, until)

    async def leave(self, lease: Lease, subscription: str, consumer: str, *, crashed: bool = False) -> int:
        """Give back all that a consumer holds, uncharged unless it crashed; answers how many lanes."""
        return await self._leave(lease, subscription, consumer, "crashed" if crashed else "left")

    async def _leave(self, lease: Lease, subscription: str, consumer: str, how: str) -> int:
        check_name("consumer", consumer)
        released, done = 0, 0
        while not done:
            _, done, lanes = await self._run("leave", lease, subscription, consumer, how, STEP)
            released += lanes
            how = "ended"  # unless it has come back meanwhile
        return released

    async def held(
        self, lease: Lease, subscription: str, consumer: str, *, at_ms: int | None = None
    ) -> list[Delivery]:
        """What a consumer holds, as it was delivered; for one that comes back under its name.

        The caller's clock shows `at_ms`: deadlines are answered by it instead of the partition's.
        """
        check_name("consumer", consumer)
        found: list[Any] = []
        retries: list[int] = []
        ledgers = ""
        to_do: list[tuple[str, str, str | int]] = [("0", "", "")]
        while to_do:
            position, lane, entry = to_do.pop()
            answer = await self._run(
                "list_leases", lease, subscription, consumer, STEP, position, lane, entry
            )
            _, position, named, part, charged, now_ms, rest = answer
            if position != "0":
                to_do.append((position, "", ""))
            to_do += [("", lane, entry) for lane, entry in rows(rest, 2)]
            ledgers = merge_ledgers((ledgers, named))
            shift = now_ms - at_ms if at_ms is not None else 0
            part[4::5] = [deadline - shift for deadline in part[4::5]]
            found += part
            retries += charged
        # A scan may name a lane twice while others leave.
        held = list({row[:3]: row for row in rows(found, 5)}.values())
        ranges = [(row[2], row[3]) for row in held]
        parts, missing = await self._read(lease, ledgers, ranges)
        if missing:
            await self._settle_lost(lease, subscription, missing)
        messages = self._as_messages(ledgers, ranges, parts, retries)
        return [
            Delivery(
                consumer,
                Receipt(lease.partition, lane, token, first, last),
                deadline,
                [messages[entry] for entry in range(first, last + 1) if entry in messages],
            )
            for lane, token, first, last, deadline in held
        ]

    # Delivery

    async def fetch(
        self, lease: Lease, subscription: str, consumers: Sequence[Room], limit: int = MAX_BATCH
    ) -> FetchResult:
        """Lease messages to consumers that have room; bounded by `limit`."""
        fetched = await self.fetch_flat(lease, subscription, consumers, limit)
        deadlines = dict(rows(fetched.kept, 2))
        messages = {}
        for share in fetched.shares:
            messages.update(
                self._as_messages(fetched.ledgers, rows(share.ranges, 2), [share.flat], fetched.retries)
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
        """The same with nothing made of each message, for those who only pass it on.

        Besides those named, `others` have room, for the calls to come. The caller's clock
        shows `at_ms`: times are answered by it instead of the partition's.
        """
        check_int("limit", limit, 1, MAX_BATCH)
        permits = check_room(consumers)
        tail = self._tails.of(lease)
        known = tail.keys_after(subscription, min(limit, permits))
        answer = await self._run(
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
            self._tell_lost(lease, subscription, rows(lost, 2))
        if mode == "key_shared":
            tail.passed(subscription, cursor, found)
        if found:
            delivered = sum(found[2::3]) - sum(found[1::3]) + len(found) // 3
            self._messages[partition_keys(lease.topic, lease.partition).lease] += delivered
        portions = Portions(mode, token, list(rows(found, 3)), [room.size for room in consumers])
        missing: list[int] = []
        while ranges := portions.next_ranges(tail.stride):
            parts, lost = await self._read(lease, ledgers, ranges)
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
            await self._settle_lost(lease, subscription, missing)
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

    async def fetch_settled(
        self, lease: Lease, subscription: str, consumers: Sequence[Room], limit: int = MAX_BATCH
    ) -> FetchResult:
        """At-most-once: fetch, and settle before anybody sees the messages."""
        result = await self.fetch(lease, subscription, consumers, limit)
        receipts = [delivery.receipt for delivery in result.deliveries]
        if not receipts:
            return result
        outcomes = (await self.ack(lease, subscription, receipts)).outcomes(len(receipts))
        kept = [
            delivery
            for delivery, outcome in zip(result.deliveries, outcomes, strict=True)
            if outcome == "settled"
        ]
        return msgspec.structs.replace(result, deliveries=kept)

    async def ack(
        self,
        lease: Lease,
        subscription: str,
        receipts: Sequence[Receipt] | Receipts,
        names: str | None = None,
        *,
        consumer: str = "",
        told: Told = _nobody,
    ) -> SettleResult:
        """Settle leased messages for good.

        As the next two, it settles what `consumer` holds and nobody else, unless that is "", and takes
        several calls for many receipts; what each has done is `told`. `names` are those of the bodies, as
        body_names makes them; None: they are looked for here.
        """
        rest = _checked(lease, receipts)
        if names is None:
            names = await self._names_of_bodies(lease, rest.ranges)
        steps = list[SettleResult]()
        while rest:
            some = "some" if steps else "all"
            answer = await self._step("ack", lease, subscription, rest, consumer, names, some, steps=steps)
            _, stale, left, record, receipt, entry = answer
            done, rest = rest.split(receipt, entry)
            gone: list[Any] = list(rows(left, 2))
            steps.append(
                SettleResult(done.stale_parts(stale), gone, records=[(record, gone)] if record else [])
            )
            told(done, steps[-1])
        return SettleResult.of(steps)

    async def nack(
        self,
        lease: Lease,
        subscription: str,
        receipts: Sequence[Receipt] | Receipts,
        *,
        delay_ms: int | None = None,
        until_ms: int | None = None,
        charged: bool = True,
        consumer: str = "",
        told: Told = _nobody,
    ) -> SettleResult:
        """Give messages back, after a delay, at a time, or by default after the backoff.

        Uncharged, it is how a consumer hands back what it has not looked at. A lane goes back as a whole.
        """
        if delay_ms is not None and until_ms is not None:
            raise InvalidArgument("nack takes delay_ms or until_ms, not both")
        if not charged and delay_ms is None and until_ms is None:
            delay_ms = 0
        until = check_optional_ms("until_ms", until_ms, 1, MAX_TIME_MS)
        delay = check_optional_ms("delay_ms", delay_ms, 0, MAX_MS)
        whom = "all" if charged else "none"
        rest = _checked(lease, receipts).by_lane()
        steps = list[SettleResult]()

        async def step(some: Receipts) -> list[Any]:
            return await self._step(
                "nack", lease, subscription, some, consumer, until, delay, whom, steps=steps
            )

        while rest:
            _, stale, returned, receipt, entry, going_back = await step(rest.first(lanes=True))
            done, rest = rest.split(receipt, entry)
            steps.append(SettleResult(done.stale_parts(stale)))
            while going_back:  # nobody is told before a lane is back: it would be asked for meanwhile
                _, _, more, _, _, going_back = await step(Receipts(going_back))
                returned += more
            back = [(token, first, last) for _, token, first, last in rows(returned, 4)]
            steps[-1] = msgspec.structs.replace(steps[-1], returned=back)
            told(done, steps[-1])
        return SettleResult.of(steps)

    async def extend(
        self,
        lease: Lease,
        subscription: str,
        receipts: Sequence[Receipt] | Receipts,
        *,
        lease_ms: int | None = None,
        until_ms: int | None = None,
        at_ms: int | None = None,
        consumer: str = "",
    ) -> SettleResult:
        """Move deadlines to `lease_ms` from now, or to a time; answered by the clock that shows `at_ms`.

        Where it takes several calls, the first deadline is answered.
        """
        if (lease_ms is None) == (until_ms is None):
            raise InvalidArgument("extend takes lease_ms or until_ms")
        until = check_optional_ms("until_ms", until_ms, 1, MAX_TIME_MS)
        span = check_optional_ms("lease_ms", lease_ms, 0, MAX_MS)
        rest = _checked(lease, receipts)
        steps = list[SettleResult]()
        while rest:
            some = rest.first()
            answer = await self._step("extend", lease, subscription, some, consumer, until, span, steps=steps)
            _, stale, deadline_ms, now_ms, receipt, entry = answer
            done, rest = rest.split(receipt, entry)
            shift = 0 if at_ms is None else now_ms - at_ms
            steps.append(SettleResult(done.stale_parts(stale), [], deadline_ms - shift, now_ms - shift))
        return SettleResult.of(steps)

    async def _step(
        self,
        script: str,
        lease: Lease,
        subscription: str,
        receipts: Receipts,
        *arguments: str | int,
        steps: list[SettleResult],
    ) -> list[Any]:
        """One of several calls: once the first is done, nobody may simply do all of it once more."""
        try:
            return await self._run(script, lease, subscription, receipts.pack(), *arguments)
        except Fenced as error:
            if not steps:
                raise
            raise Unavailable(f"a part was settled before the lease ended: {error}") from error

    async def expire(self, lease: Lease, subscription: str) -> ExpireResult:
        """Give back what has timed out and what consumers whose sessions ended held."""
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
        """The same in one step, for those who have other things to do in between."""
        more, released, expired, ended = _AMID, 0, dict[str, None](), list[Any]()
        while more == _AMID:  # nobody is told before a lane is back: it would be asked for meanwhile
            _, more, next_due_ms, lanes, gone, now_ms, over, void = await self._run(
                "expire", lease, subscription, _BACK
            )
            released += lanes
            expired.update(dict.fromkeys(gone))
            ended += over
        return ExpireResult(
            released, next_due_ms, list(expired), now_ms, bool(more), list(rows(ended, 4)), void
        )

    # Below: how the methods above reach Redis.

    async def _run(
        self, script: str, lease: Lease, subscription: str, *arguments: str | bytes | int
    ) -> list[Any]:
        answer = await self.store.run(
            f"subscription/{script}",
            subscription_keys(lease.topic, lease.partition, subscription),
            lease.text,
            subscription,
            *arguments,
        )
        return checked(answer, lease.topic, subscription, lease=lease)

    async def _names_of_bodies(self, lease: Lease, ranges: list[tuple[int, int]]) -> str:
        """The names of the bodies of entries, as the scripts write them down."""
        tail, ledgers = self._tails.of(lease), ""
        if not all(first in tail and last in tail for first, last in ranges):
            meta = partition_keys(lease.topic, lease.partition).meta
            [ledgers] = await self.store.read_all([("HGET", meta, "ledgers")])
            if not ledgers:
                return ""  # there is no such topic, as the script will say
        parts, _ = await self._read(lease, ledgers, ranges)
        entries = chain.from_iterable(range(first, last + 1) for first, last in ranges)
        return body_names(zip(entries, rows(list(chain.from_iterable(parts)), 3), strict=True))

    async def _settle_lost(self, lease: Lease, subscription: str, missing: list[int]) -> None:
        """Settle entries that were leased and that the log has not, unless they were settled meanwhile."""
        told: list[int] = []
        for start in range(0, len(missing), _HOLES):
            position, packed = "", pack(missing[start : start + _HOLES])
            while True:
                _, position, settled = await self._run(
                    "settle_missing", lease, subscription, packed, STEP, position
                )
                told += settled
                if not position:
                    break
        if told:
            self._tell_lost(lease, subscription, rows(told, 2))

    def _tell_lost(self, lease: Lease, subscription: str, ranges: Iterable[tuple[int, ...]]) -> None:
        told = " ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
        log.warning(
            "partition %d of %r: entries %s are owed to %r and not in the log; somebody deleted them there",
            lease.partition,
            lease.topic,
            told,
            subscription,
        )

    async def _read(
        self, lease: Lease, ledgers: str, ranges: list[tuple[int, int]]
    ) -> tuple[list[list[str]], list[int]]:
        """Key, uid and about of each entry, flat, for each range; from the log where they are not at hand.

        And the entries that the log should have and has not, which are LOST in what is flat.
        """
        tail = self._tails.of(lease)
        found = [tail.read(first, last) for first, last in ranges]
        missing = [bounds for bounds, part in zip(ranges, found, strict=True) if part is None]
        if not missing:
            return found, []  # type: ignore[return-value]
        id_of = id_maker(ledgers)
        covering = covering_ranges(missing)
        read = await self.store.entries(
            partition_keys(lease.topic, lease.partition).log,
            [(id_of(first), id_of(last)) for first, last in covering],
        )
        texts = {
            entry: fields[1::2]
            for (first, last), part in zip(covering, read, strict=True)
            for entry, fields in entries_of(first, last, part)
        }
        if texts:
            tail.measured(len(texts), sum(map(len, chain.from_iterable(texts.values()))))
        parts = [
            [text for entry in range(first, last + 1) for text in texts.get(entry, LOST)]
            if part is None
            else part
            for (first, last), part in zip(ranges, found, strict=True)
        ]
        lost: list[int] = []
        if any(len(part) <= last - first for (first, last), part in zip(covering, read, strict=True)):
            lost = [
                entry for first, last in missing for entry in range(first, last + 1) if entry not in texts
            ]
        return parts, lost

    def _as_messages(
        self, ledgers: str, ranges: Iterable[tuple[int, ...]], parts: Iterable[list[str]], retries: list[int]
    ) -> dict[int, Message]:
        """Messages by their entries, without those that are not in the log any more."""
        counts = dict(rows(retries, 2))
        entries = chain.from_iterable(range(first, last + 1) for first, last in ranges)
        texts = rows(list(chain.from_iterable(parts)), 3)
        id_of = id_maker(ledgers) if " " in ledgers else f"{ledgers.partition(':')[0]}-{{}}".format
        return {
            entry: Message(id_of(entry), key, uid, about, counts.get(entry, 0))
            for entry, (key, uid, about) in zip(entries, texts, strict=True)
            if uid
        }


def _checked(lease: Lease, receipts: Sequence[Receipt] | Receipts) -> Receipts:
    return receipts if isinstance(receipts, Receipts) else checked_receipts(lease, receipts)
