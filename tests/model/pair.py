"""The engine and the model side by side: each method does one thing on both and compares."""

import asyncio
import selectors
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar
from uuid import uuid4

from hypothesis import note

from keylane.errors import Fenced, SubscriptionBusy
from keylane_broker.engine.bodies import BodyRecord, read_body_records
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import (
    Backoff,
    Capacity,
    Delivery,
    FetchResult,
    Lease,
    Outgoing,
    Receipt,
    SettleResult,
    SubscriptionSettings,
    TopicSettings,
)
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.store.keys import PartitionKeys
from keylane_broker.store.store import Store
from tests.model.model import Owed, Part, Partition, Subscription
from tests.support.clock import ManualTime
from tests.support.story import fetch_settled

CONSUMERS = ("c1", "c2", "c3")
WORKERS = ("w1", "w2")
NAMES = ("main", "other")
DEDUPE_MS = 12_000
LEASE_TTL_MS = 600_000  # of real time: the tests let leases run out by hand

T = TypeVar("T")


class Impatient(selectors.DefaultSelector):
    """Asks the system for what is new only when there is nothing else to do: it takes as long as a step."""

    def select(self, timeout: float | None = None) -> Any:
        return [] if timeout == 0 else super().select(timeout)


class World:
    """A server, an event loop, and the engines of two workers with the scripts under test."""

    def __init__(self, url: str, sources: dict[str, str] | None = None) -> None:
        self.loop = asyncio.SelectorEventLoop(Impatient())
        self.time = ManualTime(url, sources)
        other = Engine(Store.connect(url, self.time.engine.store.scripts))
        self.engines = {"w1": self.time.engine, "w2": other}

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        """Carry out one asynchronous step."""
        return self.loop.run_until_complete(step)

    def run_together(self, *steps: Coroutine[Any, Any, Any]) -> list[Any]:
        """Carry out steps that only read, at once."""

        async def together() -> list[Any]:
            return await asyncio.gather(*steps)

        return self.loop.run_until_complete(together()) if steps else []

    def close(self) -> None:
        """Close the connections and the loop."""
        for engine in self.engines.values():
            self.run(engine.close())
        self.loop.close()


class Line:
    """A line to note, which is written only where an example fails: that takes longer than most steps."""

    def __init__(self, *parts: object) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        return " ".join(map(str, self.parts))


class Pair:
    """A topic of one partition with up to two subscriptions, and its model."""

    def __init__(
        self, world: World, modes: dict[str, str], backoff: Backoff | None, journal: int = 0
    ) -> None:
        self.world = world
        self.modes = modes
        self.backoff = backoff
        self.topic = f"topic-{uuid4().hex[:12]}"
        self.keys = PartitionKeys.of(self.topic, 0)
        self.partition = Partition(DEDUPE_MS)
        self.receipts: dict[str, list[Receipt]] = {name: [] for name in NAMES}
        self.tokens = dict.fromkeys(NAMES, 0)
        self.latest = NAMES[0]
        self.lease = Lease(self.topic, 0, "w1", 0)

        world.time.now_ms, world.time.back_ms = 100_000_000, 0
        world.run(world.time.start())
        settings = TopicSettings(dedupe_ms=DEDUPE_MS)
        self.do("create topic", self.operator.create_topic(self.topic, settings))
        if journal:
            self.do("switch the journal on", self.operator.change_topic(self.topic, journal=journal))
        self.acquire("w1")

    @property
    def engine(self) -> Engine:
        """The engine of the worker that owns the partition."""
        return self.world.engines[self.lease.worker]

    @property
    def operator(self) -> Engine:
        """The engine of the worker that does not: operators may come to any."""
        return self.world.engines["w2" if self.lease.worker == "w1" else "w1"]

    @property
    def now(self) -> int:
        """The time by which both sides go."""
        return self.world.time.now_ms

    def do(self, what: str, step: Coroutine[Any, Any, T], *details: object) -> T:
        """Carry out a step, and tell of it where the example fails."""
        note(Line("   ", f"{self.now}:", what, *details))
        answer = self.world.run(step)
        if answer is not None:
            note(Line("        ->", answer))
        return answer

    def refuse(self, error: type[Exception], what: str, step: Coroutine[Any, Any, Any]) -> None:
        """Carry out a step that has to be refused with this error."""
        try:
            self.do(what, step)
        except error:
            return
        raise AssertionError(f"{what}: was not refused with {error.__name__}")

    def sub(self, name: str) -> Subscription:
        """The model of a subscription, which is made again if it was deleted."""
        self.latest = name
        if name not in self.partition.subscriptions:
            self.create_subscription(name, "earliest")
        return self.partition.subscriptions[name]

    def live(self, name: str) -> list[Receipt]:
        """The receipts that still hold something."""
        return [receipt for receipt in self.receipts[name] if self.sub(name).holding(receipt)]

    # Operators

    def create_subscription(self, name: str, position: str | int) -> None:
        """Make a subscription that starts at a position."""
        settings = SubscriptionSettings(mode=self.modes[name], backoff=self.backoff)
        step = self.operator.create_subscription(self.topic, name, settings, start=position)
        self.do(f"create {settings.mode} subscription {name} at {position}", step)
        made = Subscription(settings.mode, self.backoff)
        made.seek(self.partition.entries_from(position))
        self.partition.subscriptions[name] = made

    def seek(self, name: str, position: str | int) -> None:
        """Move a subscription."""
        model = self.sub(name)
        partition = 0 if isinstance(position, int) else None
        step = self.operator.seek(self.topic, name, position, partition)
        self.do(f"seek {name} to {position}", step)
        model.seek(self.partition.entries_from(position))

    def delete_subscription(self, name: str) -> None:
        """Remove a subscription."""
        self.sub(name)
        self.do(f"delete {name}", self.operator.delete_subscription(self.topic, name))
        del self.partition.subscriptions[name]
        self.partition.forget()

    # Workers

    def acquire(self, worker: str) -> None:
        """Take the partition, in an epoch that is larger than any before."""
        step = self.world.engines[worker].acquire(self.topic, 0, worker, LEASE_TTL_MS)
        lease = self.do(f"{worker} acquires", step)
        assert lease is not None
        assert lease.epoch > self.lease.epoch
        self.lease = lease

    def give_up(self) -> None:
        """Release the partition."""
        assert self.do("release", self.engine.release(self.lease))

    def run_out(self) -> None:
        """Let the time of the lease run out."""
        self.do("the lease runs out", self.engine.store.read_all([("DEL", self.keys.lease)]))

    def keep(self) -> None:
        """Renew the lease; nobody else can have it."""
        assert self.do("renew", self.engine.renew([self.lease], LEASE_TTL_MS)) == [True]
        step = self.operator.acquire(self.topic, 0, "w3", LEASE_TTL_MS)
        assert self.do("w3 acquires", step) is None

    def act_without_the_lease(self, old: Lease, name: str, consumer: str) -> None:
        """Try everything as the owner that one is not any more; nothing may come of it."""
        engine = self.world.engines[old.worker]
        receipts = self.live(name) or [Receipt(0, "", 1, 1, 1)]
        steps: dict[str, Coroutine[Any, Any, Any]] = {
            "ack": engine.ack(old, name, receipts),
            "nack": engine.nack(old, name, receipts),
            "extend": engine.extend(old, name, receipts, lease_ms=90_000),
            "fetch": engine.fetch(old, name, [Capacity(consumer, 5)]),
            "publish": engine.publish(old, [Outgoing("a", "late", "x")]),
            "expire": engine.expire(old, name),
            "join": engine.join(old, name, consumer),
            "renew_sessions": engine.renew_sessions(old, name, [consumer], 90_000),
            "leave": engine.leave(old, name, consumer),
            "held": engine.list_leases(old, name, consumer),
        }
        note(Line(f"    {self.now}: all of {name} in epoch {old.epoch}:", *steps))
        *refused, renewed, released = self.world.run_together(
            *map(_refused, steps.values()), engine.renew([old], LEASE_TTL_MS), engine.release(old)
        )
        assert (renewed, released) == ([False], False)
        assert all(refused), f"not refused: {dict(zip(steps, refused, strict=True))}"

    # Producers

    def publish(self, messages: Sequence[Outgoing]) -> None:
        """Publish a batch."""
        told = self.do("publish", self.engine.publish(self.lease, messages), messages)
        self.partition.publish(self.now, self.lease.epoch, messages, told.each())

    # Consumers

    def join(self, name: str, consumer: str, session_ms: int) -> None:
        """Open a session, or come back under the same name."""
        model = self.sub(name)
        step = self.engine.join(self.lease, name, consumer, session_ms)
        others = [name for name in model.sessions if name != consumer and model.is_open(name, self.now)]
        if model.mode == "exclusive" and others:
            self.refuse(SubscriptionBusy, f"{consumer} joins {name}", step)
        else:
            was_open = self.do(f"{consumer} joins {name} for {session_ms}", step)
            assert was_open == model.join(self.now, consumer, session_ms)

    def renew_sessions(self, name: str, whose: Sequence[str], session_ms: int) -> None:
        """Renew the sessions of those who still have one."""
        model = self.sub(name)
        step = self.engine.renew_sessions(self.lease, name, whose, session_ms)
        unknown = self.do(f"renew sessions for {session_ms} in {name}", step, whose)
        assert unknown == [who for who in whose if not model.is_open(who, self.now)]
        for consumer in set(whose) - set(unknown):
            model.sessions[consumer] = self.now + session_ms

    def leave(self, name: str, consumer: str) -> None:
        """Give everything back and go."""
        model = self.sub(name)
        step = self.engine.leave(self.lease, name, consumer)
        released = self.do(f"{consumer} leaves {name}", step)
        assert bool(released) == bool(model.leased_to(consumer))
        model.leave(self.now, consumer)

    # The clock

    def set_back(self, ms: int) -> None:
        """The clock of Redis is set back between two calls: that is no reason for anything to change."""
        self.do("look at the clock", self.engine.promote(self.lease, 0))
        self.do(f"the clock goes back by {ms} ms", self.world.time.set_back(ms))
        self.do("look at the clock", self.engine.promote(self.lease, 0))

    def advance(self, ms: int) -> None:
        """Let time pass."""
        self.do(f"{ms} ms pass", self.world.time.advance(ms))

    def expire(self, name: str) -> None:
        """Let deadlines and ends of sessions take effect."""
        model = self.sub(name)
        told = self.do(f"expire {name}", self.engine.expire(self.lease, name))
        late = [o for o in model.leased() if o.claim and o.claim.deadline <= self.now]
        held = _leases(model)
        assert set(told.expired_consumers) == model.expire(self.now, self.tokens.get(name, 0))
        assert told.released or not late
        ended = [(name, token, entry) for name, token, *bounds in told.ended for entry in _between(*bounds)]
        assert sorted(ended) == sorted(held - _leases(model)), "which leases have ended"
        assert told.next_due_ms == model.next_end()

    # Deliveries

    def fetch(self, name: str, asked: list[Capacity], limit: int) -> None:
        """Lease all that is to be had, in as many calls as it takes."""
        for _ in range(100):
            result = self.fetch_once(name, asked, limit)
            if not result.more:
                return
            taken = {room.consumer: 0 for room in asked}
            for delivery in result.deliveries:
                taken[delivery.consumer] += len(delivery.messages)
            asked = [
                Capacity(
                    name, permits - taken[name], lease_ms, None if spare is None else spare - taken[name]
                )
                for name, permits, lease_ms, spare, _ in asked
            ]
        raise AssertionError("a fetch that always asks for another one")

    def fetch_once(self, name: str, asked: list[Capacity], limit: int) -> FetchResult:
        """Lease what one call gives."""
        model = self.sub(name)
        step = self.engine.fetch(self.lease, name, asked, limit)
        result = self.do(f"fetch {name}, at most {limit}, for", step, asked)
        self._follow(name, model, asked, limit, result)
        return result

    def fetch_settled(self, name: str, asked: list[Capacity]) -> None:
        """Deliver at most once."""
        model = self.sub(name)
        step = fetch_settled(self.engine, self.lease, name, asked)
        result = self.do(f"fetch and settle {name} for", step, asked)
        self._follow(name, model, asked, 1_000, result)
        assert not model.ack(self.now, [delivery.receipt for delivery in result.deliveries])

    def _follow(
        self, name: str, model: Subscription, asked: list[Capacity], limit: int, result: FetchResult
    ) -> None:
        model.fetch(self.now, asked, limit, result, self.tokens[name])
        for delivery in result.deliveries:
            self.receipts[name].append(delivery.receipt)
            self.tokens[name] = delivery.receipt.token

    def ack(self, name: str, receipts: Sequence[Receipt]) -> None:
        """Settle messages for good."""
        model = self.sub(name)
        result = self.do(f"ack {name}:", self.engine.ack(self.lease, name, receipts), receipts)
        assert _stale_parts(result) == model.ack(self.now, receipts)
        left = {number for first, last in result.forgotten for number in range(first, last + 1)}
        assert left == self.partition.forget(), "what left the log"

    def nack(self, name: str, receipts: Sequence[Receipt], delay_ms: int | None, charged: bool) -> None:
        """Give messages back after a delay, at a time if that has passed, or after the backoff."""
        model = self.sub(name)
        due = None if delay_ms is None else self.now + delay_ms
        when = {"delay_ms": delay_ms}
        if due is not None and due < self.now:
            when = {"until_ms": due - self.world.time.back_ms}
        step = self.engine.nack(self.lease, name, receipts, charged=charged, **when)  # type: ignore[arg-type]
        held = _leases(model)
        told = self.do(f"nack {name}, {when}, charged {charged}:", step, receipts)
        assert _stale_parts(told) == model.nack(self.now, receipts, due, charged)
        returned = [(token, entry) for token, *bounds in told.returned for entry in _between(*bounds)]
        assert sorted(returned) == sorted((lease[1:]) for lease in held - _leases(model)), "what went back"

    def extend(self, name: str, receipts: Sequence[Receipt], lease_ms: int) -> None:
        """Move deadlines."""
        model = self.sub(name)
        step = self.engine.extend(self.lease, name, receipts, lease_ms=lease_ms)
        result = self.do(f"extend {name} by {lease_ms}:", step, receipts)
        assert result.deadline_ms == self.now + lease_ms
        assert _stale_parts(result) == model.extend(receipts, self.now + lease_ms)

    # What has to be so at any time

    def check(self, *names: str) -> None:
        """The log and the leases of subscriptions are as in the model; all is read at once."""
        self.partition.forget()
        models = {name: self.partition.subscriptions.get(name, Subscription("deleted")) for name in names}
        owed = {(name, who): models[name].leased_to(who) for name in names for who in CONSUMERS}
        known = [(name, who) for name, who in owed if owed[name, who] or who in models[name].sessions]
        [log], [remains], *held = self.world.run_together(
            self.engine.store.entries(self.keys.log, [("-", "+")]),
            read_body_records(self.engine.store, [(self.topic, 0)], 10_000),
            *[self.engine.list_leases(self.lease, name, who) for name, who in known],
        )
        self._check_log(log, remains)
        for (name, who), leases in zip(known, held, strict=True):
            assert _leased(leases) == [_lease_of(one) for one in owed[name, who]], f"{who} of {name}"

    def _check_log(self, log: list[Any], remains: list[BodyRecord]) -> None:
        """An entry stays in the log for just as long as somebody owes it."""
        assert [id for id, _ in log] == [entry.id for entry in self.partition.log.values()]
        names = {name for record in remains for name in record.names}  # twice where two receipts named it
        assert names == set(self.partition.doomed), "the bodies of what left the log"

    def finish(self) -> None:
        """Walk the keyspace, and clean up."""
        self.check(*NAMES)
        problems = self.world.run(check_topic(self.engine, self.topic))
        assert not problems
        self.world.run(self.operator.delete_topic(self.topic))


async def _refused(step: Coroutine[Any, Any, Any]) -> bool:
    try:
        await step
    except Fenced:
        return True
    return False


def _leased(leases: list[Delivery]) -> list[tuple[int, str, int, int, int]]:
    """Who holds what, until when, by which receipt, charged how often."""
    return sorted(
        (message.entry, lane, token, one.deadline_ms, message.retries)
        for one in leases
        for _, lane, token, _, _ in [one.receipt]
        for message in one.messages
    )


def _lease_of(owed: Owed) -> tuple[int, str, int, int, int]:
    assert owed.claim
    return owed.entry.number, owed.lane, owed.token, owed.claim.deadline, owed.retries


def _leases(model: Subscription) -> set[tuple[str, int, int]]:
    """Consumer, token and entry of each lease."""
    return {(o.claim.consumer, o.token, o.entry.number) for o in model.leased() if o.claim}


def _between(first: int, last: int) -> range:
    return range(first, last + 1)


def _stale_parts(result: SettleResult) -> set[Part]:
    parts = [(place, entry) for place, first, last in result.stale for entry in range(first, last + 1)]
    assert len(parts) == len(set(parts)), "each stale part is told once"
    return set(parts)
