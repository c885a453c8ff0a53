"""The engine and the model side by side: each method does one thing on both and compares."""

import asyncio
import selectors
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
from hypothesis import note
from msgspec import structs

from keylane.errors import Fenced, InvalidArgument, MessageLeased, MessageNotFound, SubscriptionBusy
from keylane.wire import unpack_about
from keylane_broker.engine.bodies import BodyRecord, read_body_records
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.filters import Filter
from keylane_broker.engine.held_bodies import let_go
from keylane_broker.engine.values import (
    Backoff,
    Capacity,
    Delivery,
    Fetched,
    FetchResult,
    Lease,
    NumberedFrame,
    Outgoing,
    PublishResult,
    Receipt,
    SettleResult,
    SubscriptionSettings,
    TopicSettings,
)
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.store.keys import PartitionKeys
from keylane_broker.store.store import Store
from tests.model.model import Entry, Owed, Part, Partition, Subscription
from tests.support.clock import ManualTime
from tests.support.story import fetch_settled
from tests.support.turns import ack_whole, lease_fresh, turn

CONSUMERS = ("c1", "c2", "c3")
WORKERS = ("w1", "w2")
NAMES = ("main", "other")
DEDUPE_MS = 12_000
LONG_DEDUPE_MS = 60_000  # from which on it is the ordinary case
LEASE_TTL_MS = 600_000  # of real time: the tests let leases run out by hand
PLAIN = TopicSettings(dedupe_ms=DEDUPE_MS)

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
        self,
        world: World,
        modes: dict[str, str],
        backoff: Backoff | None,
        journal: int = 0,
        settings: TopicSettings = PLAIN,
        filters: Mapping[str, Filter] | None = None,
        *,
        ordinary: bool = False,
        max_retries: int | None = None,
        poison: str = "skip",
        topic: str = "",
    ) -> None:
        self.world = world
        self.ordinary = ordinary  # the scripts for the ordinary case come first
        dedupe_ms = LONG_DEDUPE_MS if ordinary else DEDUPE_MS
        self.modes = modes
        self.filters = filters or {}
        self.backoff = backoff
        self.max_retries, self.poison = max_retries, poison
        self.topic = topic or f"topic-{uuid4().hex[:12]}"
        self.keys = PartitionKeys.of(self.topic, 0)
        self.partition = Partition(
            dedupe_ms,
            retention_ms=settings.retention_ms,
            quota=settings.backlog_quota,
            quota_bytes=settings.backlog_quota_bytes,
            clock=lambda: world.time.now_ms,
        )
        self.receipts: dict[str, list[Receipt]] = {name: [] for name in NAMES}
        self.tokens = dict.fromkeys(NAMES, 0)
        self.latest = NAMES[0]
        self.counted: Counter[str] = Counter()  # ordinary cases
        self.gone: set[str] = set()  # bodies of dead letters that have gone for good
        self.begun: list[set[int]] = []  # what the log had where subscriptions began or were moved
        self.uids: dict[str, str] = {}  # of all that was published, by id
        self.lease = Lease(self.topic, 0, "w1", 0)

        world.time.now_ms, world.time.back_ms = 100_000_000, 0
        world.run(world.time.start())
        settings = structs.replace(settings, dedupe_ms=dedupe_ms)
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
        filter = self.filters.get(name, Filter())
        settings = SubscriptionSettings(
            mode=self.modes[name],
            backoff=self.backoff,
            max_retries=self.max_retries,
            poison=self.poison if self.modes[name] != "shared" else "skip",
            filter=filter,
        )
        step = self.operator.create_subscription(self.topic, name, settings, start=position)
        self.do(f"create {settings.mode} subscription {name} at {position}", step)
        self.begun.append(set(self.partition.log))
        made = Subscription(
            settings.mode, self.backoff, self.max_retries, settings.poison == "park", filter=filter
        )
        made.seek(self.partition.entries_from(position))
        made.begins = self.partition.first_from(position)
        made.sparse = self.partition.last
        self.partition.subscriptions[name] = made
        self.partition.forget()

    def seek(self, name: str, position: str | int) -> None:
        """Move a subscription."""
        model = self.sub(name)
        partition = 0 if isinstance(position, int) else None
        step = self.operator.seek(self.topic, name, position, partition)
        self.do(f"seek {name} to {position}", step)
        self.begun.append(set(self.partition.log))
        model.seek(self.partition.entries_from(position))
        model.begins = self.partition.first_from(position)
        model.sparse = self.partition.last
        self.partition.forget()

    def delete_subscription(self, name: str) -> None:
        """Remove a subscription."""
        self.sub(name)
        self.do(f"delete {name}", self.operator.delete_subscription(self.topic, name))
        del self.partition.subscriptions[name]
        self.partition.forget()

    # Single messages

    def skip(self, name: str, number: int) -> None:
        """Settle a message for one subscription."""
        model = self.sub(name)
        step = self.operator.skip(self.topic, name, self.message_id(number))
        held = _leases(model)
        model.sparse = self.partition.last
        if model.skip(self.now, [number]):
            _, ended = self.do(f"skip {number} in {name}", step)
            told = {(lease.consumer, lease.token, lease.first) for lease in ended}
            assert told == held - _leases(model), "the lease that has ended"
            self.partition.forget()
        else:
            self.refuse(MessageNotFound, f"skip {number} in {name}", step)

    def delete_message(self, number: int) -> None:
        """Remove a message, unless somebody holds it."""
        step = self.operator.delete_message(self.topic, self.message_id(number))
        what = f"delete message {number}"
        models = self.partition.subscriptions.values()
        leased = number in self.partition.leased()
        if not leased:
            self.partition.bury_before([number])
        if number not in self.partition.log:
            self.refuse(MessageNotFound, what, step)
        elif leased:
            self.refuse(MessageLeased, what, step)
        else:
            self.do(what, step)
            for model in models:
                model.skip(self.now, [number])
                model.sparse = self.partition.last
            self.partition.drop([number])

    def purge(self, name: str) -> None:
        """Settle all that a subscription is owed, or remove all that there is."""
        later = [] if name else list(self.partition.waiting)
        if not name:
            self.partition.bury_before(self.partition.log)
        count = len(self.sub(name).owed if name else self.partition.log) + len(later)
        told = self.do(f"purge {name or 'the topic'}", self.operator.purge(self.topic, name, seconds=60))
        assert (told.messages, told.done) == (count, True)
        for model in [self.sub(name)] if name else list(self.partition.subscriptions.values()):
            model.skip(self.now, list(model.owed))
            model.sparse = self.partition.last
        if not name:
            self.partition.drop(list(self.partition.log))
        for one in later:
            self.partition.waiting.remove(one)
            self.partition.doom(Entry(0, "", "", one[1].uid, f"{self.now} {one[1].about}"))
        self.partition.forget()

    def message_id(self, number: int) -> str:
        """The id of a message, also of one that is not there."""
        entry = self.partition.log.get(number)
        return f"0:{entry.id if entry else f'{self.lease.epoch}-{number}'}"

    def explain(self, name: str, number: int) -> None:
        """Ask what becomes of a message for a subscription."""
        model = self.sub(name)
        self.partition.forget()
        step = self.operator.explain(self.topic, name, self.message_id(number))
        _, told = self.do(f"explain {number} to {name}", step)
        assert told.state in self._states_of(name, model, number), f"{number} in {name}"
        owed = model.owed.get(number)
        if owed:
            assert told.retries == owed.retries
            assert told.consumer == (owed.claim.consumer if owed.claim else "")
        if told.state == "waiting" and owed and owed.lane:
            lane = sorted(at for at, one in model.owed.items() if one.lane == owed.lane)
            served = [at for at in lane if at not in self.partition.expired()]
            heads = {at for at in (lane[0], served[0]) if at != number}
            assert told.ahead in {self.message_id(at).partition(":")[2] for at in heads} or not heads
        if told.state == "parked":
            head = model.parked[owed.lane or f"#{number}"] if owed else 0
            assert told.ahead == ("" if head == number else self.message_id(head).partition(":")[2])

    def _states_of(self, name: str, model: Subscription, number: int) -> set[str]:
        """What may be said of a message; of what nobody is owed any more not all is known."""
        owed, entry = model.owed.get(number), self.partition.log.get(number)
        if number > self.partition.last:
            return {"never_existed"}
        if owed and owed.claim:
            return {"leased"}
        if owed:
            if (owed.lane or f"#{number}") in model.parked:
                return {"parked"}
            return {"expired"} if number in self.partition.expired() else {"fresh", "waiting"}
        if entry and number >= model.begins and not model.wants(entry.key, entry.about):
            return {"filtered"}
        over = {"settled", "deleted"}
        if (name, number) in {one[:2] for one in self.partition.sent}:
            over |= {"dead_lettered"}
        if number in self.partition.expiries:  # which may be gone already, or not yet
            if number in model.expired and number >= model.begins:
                return {"expired"}
            known = {"expired"} if (name, number) in self.partition.expired_for else set()
            return {"filtered", "not_subscribed"} | over | known
        if number < model.begins:
            return {"not_subscribed", *over} - {"settled", "deleted"}
        return {"dead_lettered"} if number in model.letters else over

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
        if self.ordinary:  # where the others then say why
            room = [Capacity(consumer, 5)]
            late = turn(engine, old, name, [Outgoing("a", "late", "x")], room)
            settled = ack_whole(engine, old, name, receipts)
            assert self.world.run_together(late, settled) == [None, False], "no turn in an old epoch"

    # Producers

    def publish(
        self,
        messages: Sequence[Outgoing],
        expire: dict[int, int] | None = None,
        priorities: dict[int, int] | None = None,
    ) -> None:
        """Publish a batch, of which some expire, place -> in how many ms, or have a priority."""
        back_ms = self.world.time.back_ms
        extras = {place: (self.now - back_ms + ms, 0) for place, ms in (expire or {}).items()}
        extras |= {place: (0, priority) for place, priority in (priorities or {}).items()}
        step = self.engine.publish(self.lease, messages, extras=extras)
        told = self.do("publish", step, messages, extras).each()
        self.uids.update({str(one.id): m.uid for one, m in zip(told, messages, strict=True)})
        self.partition.publish(self.now, self.lease.epoch, messages, told)
        for place, ms in (expire or {}).items():
            if (stored := told[place]).id and not stored.duplicate:
                self.partition.expiries[int(stored.id.partition("-")[2])] = self.now + ms
        for place, priority in (priorities or {}).items():
            if (stored := told[place]).id and not stored.duplicate:
                self.partition.priorities[int(stored.id.partition("-")[2])] = priority

    # What expires and what stays

    def expire_messages(self, limit: int) -> None:
        """Drop what has expired, in as many calls as it takes: all but what somebody has leased."""
        due = 1
        while 0 < due <= self.now:
            due = self.do("expire messages", self.engine.expire_messages(self.lease, limit)).next_due_ms
        self.partition.expire_messages()
        self.partition.forget()
        expired, leased = self.partition.expired(), self.partition.leased()
        [log], [remains] = self.world.run_together(
            self.engine.store.entries(self.keys.log, [("-", "+")]),
            read_body_records(self.engine.store, [(self.topic, 0)], 10_000),
        )
        assert {int(id.partition("-")[2]) for id, _ in log} & expired == expired & leased, "what has expired"
        names = {name for record in remains for name in record.names}
        assert names == set(self.partition.doomed), "the bodies of what has expired"
        ahead = [at for number, at in self.partition.expiries.items() if number in self.partition.log]
        first = min((at for at in ahead if at > self.now), default=None)
        assert first is None or self.now < due <= first, "when to look again"

    def trim(self, limit: int) -> None:
        """Drop what has stayed for long enough, in as many calls as it takes."""
        self.partition.forget()
        dropped, due = 0, self.now
        while due == self.now:
            told = self.do("trim", self.engine.trim(self.lease, limit))
            dropped, due = dropped + told.dropped, told.next_due_ms
        assert dropped == len(self.partition.trim()), "what has stayed for long enough"
        first = min(self.partition.settled.values(), default=None)
        assert first is None or self.now < due <= first + self.partition.retention_ms, "when to look again"

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
            self.partition.note_dead(name)

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
        self.partition.note_dead(name)
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
                    name,
                    permits - taken[name],
                    lease_ms,
                    None if spare is None else max(0, spare - taken[name]),
                )
                for name, permits, lease_ms, spare, _ in asked
            ]
        raise AssertionError("a fetch that always asks for another one")

    def fetch_once(self, name: str, asked: list[Capacity], limit: int) -> FetchResult:
        """Lease what one call gives."""
        model = self.sub(name)
        step = self.engine.fetch(self.lease, name, asked, limit)
        self.partition.expire_messages()
        result = self.do(f"fetch {name}, at most {limit}, for", step, asked)
        self._follow(name, model, asked, limit, result)
        return result

    def fetch_settled(self, name: str, asked: list[Capacity]) -> None:
        """Deliver at most once."""
        model = self.sub(name)
        step = fetch_settled(self.engine, self.lease, name, asked)
        self.partition.expire_messages()
        result = self.do(f"fetch and settle {name} for", step, asked)
        self._follow(name, model, asked, 1_000, result)
        assert not model.ack(self.now, [delivery.receipt for delivery in result.deliveries])

    def _follow(
        self, name: str, model: Subscription, asked: list[Capacity], limit: int, result: FetchResult
    ) -> None:
        given = [number for one in result.deliveries for number in _between(*one.receipt[3:])]
        first = [number for number in given if number in model.owed and not model.owed[number].token]
        model.fetch(self.now, asked, limit, result, self.tokens[name])
        if model.mode == "shared" and first and self.partition.priorities:
            self._check_priorities(model, first)
        for delivery in result.deliveries:
            self.receipts[name].append(delivery.receipt)
            self.tokens[name] = delivery.receipt.token

    def _check_priorities(self, model: Subscription, given: list[int]) -> None:
        """Of what was never delivered, nothing has a larger priority than what was given now."""
        left = [number for number, owed in model.owed.items() if not owed.token]
        if min([*given, *left]) > model.sparse:
            ranks = self.partition.priorities
            least = min(ranks.get(number, 0) for number in given)
            assert least >= max([ranks.get(number, 0) for number in left], default=0), "larger goes first"

    def ack(self, name: str, receipts: Sequence[Receipt]) -> None:
        """Settle messages for good."""
        model = self.sub(name)
        if self.ordinary and self.ack_whole(name, model, receipts):
            return
        result = self.do(f"ack {name}:", self.engine.ack(self.lease, name, receipts), receipts)
        assert _stale_parts(result) == model.ack(self.now, receipts)
        left = {number for first, last in result.forgotten for number in range(first, last + 1)}
        # What has expired may go now, or when it is looked at again.
        assert not (left ^ self.partition.forget()) - self.partition.expired(), "what left the log"

    def ack_whole(self, name: str, model: Subscription, receipts: Sequence[Receipt]) -> bool:
        """Settle messages as they were leased; returns whether that was an ordinary case."""
        step = ack_whole(self.engine, self.lease, name, receipts)
        if not self.do(f"ack {name} whole:", step, receipts):
            return False
        self.counted["ack"] += 1
        self._all_settled(model, receipts)
        return True

    def _all_settled(self, model: Subscription, receipts: Sequence[Receipt]) -> None:
        assert not model.ack(self.now, receipts), "none was stale"
        settled = {entry for _, _, _, first, last in receipts for entry in range(first, last + 1)}
        assert self.partition.forget() <= settled, "of these some have left the log, or all"

    def turn(
        self,
        name: str,
        messages: Sequence[Outgoing],
        asked: list[Capacity],
        receipts: Sequence[Receipt],
        frames: Sequence[NumberedFrame] = (),
    ) -> PublishResult | None:
        """Settle, publish and lease in one call; returns what was published if that was an ordinary case."""
        model = self.sub(name)
        step = turn(self.engine, self.lease, name, messages, asked, receipts, frames=frames)
        told = self.do(f"turn of {name}:", step, receipts, messages, asked, frames)
        if told is None:
            return None
        self.counted["turn"] += 1
        if receipts:
            self._all_settled(model, receipts)
        self.partition.publish(self.now, self.lease.epoch, messages, told.published.each())
        self._follow_turn(name, asked, told.fetched)
        return told.published

    def lease_behind(
        self, name: str, messages: Sequence[Outgoing], published: PublishResult, asked: list[Capacity]
    ) -> None:
        """Lease what a turn of another subscription has published, if that is an ordinary case."""
        step = lease_fresh(self.engine, self.lease, name, messages, published, asked)
        if (fetched := self.do(f"lease behind the turn, {name}:", step, asked)) is not None:
            self.counted["lease"] += 1
            self._follow_turn(name, asked, fetched)

    def _follow_turn(self, name: str, asked: list[Capacity], fetched: Fetched) -> None:
        # What is left is for the fetch that comes next, which tells when something is due.
        result = self.engine.as_result(self.lease, asked, fetched)
        self._follow(name, self.sub(name), asked, 1_000, structs.replace(result, more=True))
        taken = Counter({room.consumer: 0 for room in asked})
        for delivery in result.deliveries:
            taken[delivery.consumer] += len(delivery.messages)
        rest = [
            room._replace(
                permits=room.permits - taken[room.consumer],
                spare=None if room.spare is None else max(0, room.spare - taken[room.consumer]),
            )
            for room in asked
        ]
        assert not self.fetch_once(name, rest, 1_000).deliveries, (
            "a turn leaves nothing that there is room for"
        )

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
        self.partition.note_dead(name)
        returned = [(token, entry) for token, *bounds in told.returned for entry in _between(*bounds)]
        assert sorted(returned) == sorted((lease[1:]) for lease in held - _leases(model)), "what went back"

    def extend(self, name: str, receipts: Sequence[Receipt], lease_ms: int) -> None:
        """Move deadlines."""
        model = self.sub(name)
        step = self.engine.extend(self.lease, name, receipts, lease_ms=lease_ms)
        result = self.do(f"extend {name} by {lease_ms}:", step, receipts)
        assert result.deadline_ms == self.now + lease_ms
        assert _stale_parts(result) == model.extend(receipts, self.now + lease_ms)

    # Dead letters and parked lanes

    def bury(self) -> None:
        """Send dead letters on their way."""
        self.do("bury", self.operator.bury(self.topic, 0))
        self.partition.bury()

    def let_go(self, which: int) -> None:
        """A dead letter goes that has the body of an entry which others were owed."""
        held = sorted(self.partition.held)
        if held:
            number, name = held[which % len(held)]
            bodies = [body for (sub, entry, _), body in self._outbox() if (entry, sub) == (number, name)]
            bodies = [body for body in bodies if body.count(":") == 4 and body not in self.gone]
            assert len(bodies) == held.count((number, name)), "each holds it by itself"
            body = bodies[which % len(bodies)]
            step = let_go(self.operator.store, f"{self.topic}.dead", [body], lambda *_: None)
            self.gone.add(body)
            self.partition.held.remove((number, name))
            others = {entry for entry, _ in self.partition.held} | self.partition.log.keys()
            mine = {} if number in others else {self.topic: [body.rpartition("/")[2]]}
            assert self.do(f"let go of {body}", step) == mine
            self.partition.forget()

    def move_key(self, name: str, key: str, consumer: str) -> None:
        """Move a key to a consumer, if nobody has any of it."""
        model, lane = self.sub(name), f"={key}"
        step = self.operator.move_key(self.topic, name, 0, key, consumer)
        what = f"move {key} of {name} to {consumer}"
        if model.mode != "key_shared" or not model.is_open(consumer, self.now):
            self.refuse(InvalidArgument, what, step)
        elif model.leased_of(lane):
            self.refuse(MessageLeased, what, step)
        else:
            self.do(what, step)
            model.wishes[lane] = consumer

    def unpark(self, name: str, which: int, action: str) -> None:
        """Let one of the parked lanes go on; all of them are listed."""
        model = self.sub(name)
        lanes = self.do(f"list what is parked in {name}", self.operator.parked(self.topic, name, 1))
        assert {lane.lane: int(lane.id.rpartition("-")[2]) for lane in lanes} == model.parked
        for lane in lanes:
            queued = [o for o in model.owed.values() if o.lane == lane.lane and not o.claim]
            assert 1 <= lane.waiting <= max(1, len(queued))  # what lies after the cursor is not counted
            assert lane.retries == model.owed[model.parked[lane.lane]].retries - 1
        if lanes:
            lane = lanes[which % len(lanes)]
            assert self.do(f"{action} {lane.lane}", self.operator.unpark(self.topic, name, lane, action))
            assert not self.do("again", self.operator.unpark(self.topic, name, lane, action))
            model.unpark(self.now, lane.lane, action)
            self.partition.note_dead(name)

    def _outbox(self) -> list[tuple[tuple[str, int, int], str]]:
        """Subscription, entry, retries and body of the dead letters that are on their way."""
        [found] = self.world.run(self.engine.store.read_all([("XRANGE", self.keys.outbox, "-", "+")]))
        letters = [msgspec.json.decode(fields[7], type=list[str]) for _, fields in found]
        abouts = [unpack_about(f"0 {about}", uid) for _, uid, about in letters]
        return [
            (
                (
                    about.attributes["dead.subscription"],
                    int(about.attributes["dead.id"].rpartition("-")[2]),
                    int(about.attributes["dead.retries"]),
                ),
                about.body,
            )
            for about in abouts
        ]

    def check_outbox(self) -> None:
        """What has failed too often is on its way once, in the order in which it failed."""
        count = len(self.partition.noted)
        sent = self.partition.sent[: len(self.partition.sent) - count]
        assert sorted(letter for letter, _ in self._outbox()) == sorted(sent)

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
        expired = self.partition.expired()
        there = [id for id, _ in log if int(id.partition("-")[2]) not in expired]
        assert there == [entry.id for entry in self.partition.log.values() if entry.number not in expired]
        names = {name for record in remains for name in record.names}  # twice where two receipts named it
        late = {
            uid
            for id, uid in self.uids.items()
            if (number := id.partition("-")[2]) and int(number) in expired
        }
        assert names - late == set(self.partition.doomed) - late, "the bodies of what left the log"

    def finish(self) -> None:
        """Walk the keyspace, and clean up."""
        self.check(*NAMES)
        self.check_outbox()
        problems = self.world.run(check_topic(self.engine, self.topic))
        assert not problems
        self.world.run(self.operator.store.read_all([("DEL", self.keys.dead), ("DEL", self.keys.outbox)]))
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
