"""A hypothesis state machine that drives the engine and the model side by side."""

import asyncio
import os
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar
from uuid import uuid4

import uvloop
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from broker.checker import check_topic
from broker.engine import Engine
from broker.keys import PartitionKeys
from broker.results import (
    Backoff,
    FetchResult,
    Lease,
    Outgoing,
    Receipt,
    Room,
    SettleResult,
    SubscriptionSettings,
    TopicSettings,
)
from client.errors import Fenced, SubscriptionBusy
from tests.model.model import Owed, Part, Partition, Subscription
from tests.support import ManualTime

MODES = ("shared", "key_shared", "exclusive", "failover")
CONSUMERS = ("c1", "c2", "c3")
KEYS = ("a", "b", "", "=a")
WORKERS = ("w1", "w2")
OPERATIONS = (
    *("ack", "nack", "extend", "fetch", "publish"),
    *("expire", "join", "touch", "leave", "held"),
)
NAMES = ("main", "other")
DEDUPE_MS = 60_000
LIMITS = (1000, 1000, 1000, 3, 1)
LEASES_MS = (5_000, 1_000, 30_000)
SESSIONS_MS = (60_000, 10_000, 2_000)
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"

T = TypeVar("T")


class World:
    """A server, an event loop, and two workers' engines with the scripts under test."""

    def __init__(self, url: str, sources: dict[str, str] | None = None) -> None:
        self.loop = uvloop.new_event_loop()
        self.time = ManualTime(url, sources)
        self.engines = {"w1": self.time.engine, "w2": ManualTime(url, sources).engine}

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        """Carry out one asynchronous step."""
        return self.loop.run_until_complete(step)

    def close(self) -> None:
        """Close the connections and the loop."""
        for engine in self.engines.values():
            self.run(engine.close())
        self.loop.close()


class Pick(NamedTuple):
    """Which receipt to use: how far back, whether of those that still hold, and how much of it."""

    back: int
    live: bool
    skip: int
    drop: int
    mixed: bool


permits = st.sampled_from((3, 1, 6, 2, 12, 0))
rooms = st.lists(
    st.builds(Room, st.sampled_from(CONSUMERS), permits, st.sampled_from(LEASES_MS)),
    min_size=1,
    max_size=3,
    unique_by=lambda room: room.consumer,
)
picks = st.lists(
    st.builds(
        Pick,
        back=st.integers(0, 7),
        live=st.sampled_from((True, True, True, False)),
        skip=st.sampled_from((0, 0, 1, 2)),
        drop=st.sampled_from((0, 0, 1, 2)),
        mixed=st.sampled_from((False,) * 9 + (True,)),
    ),
    min_size=1,
    max_size=4,
)
# A key to publish under, or how far back to look for a uid to publish again.
batches = st.lists(st.sampled_from((*KEYS, *KEYS, 0, 3)), max_size=14)
subscriptions = st.sampled_from(("main", "main", "main", "other"))
consumers = st.sampled_from(CONSUMERS)
sessions = st.sampled_from(SESSIONS_MS)
positions = st.sampled_from(("earliest", 1, 3, 8, 20, "latest"))
delays = st.sampled_from((None, 0, 700, 4_000, -500))


class BrokerMachine(RuleBasedStateMachine):
    """Everything that producers, consumers, workers, operators and the clock may do, in any order."""

    mode: ClassVar[str]

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.topic = f"topic-{uuid4().hex[:12]}"
        self.keys = PartitionKeys.of(self.topic, 0)
        self.partition = Partition(DEDUPE_MS)
        self.receipts: dict[str, list[Receipt]] = {name: [] for name in NAMES}
        self.tokens = dict.fromkeys(NAMES, 0)
        self.uids: list[str] = []
        self.lease = Lease(self.topic, 0, "w1", 0)

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

    def do(self, what: str, step: Coroutine[Any, Any, T]) -> T:
        """Carry out a step and tell of it where the example fails."""
        note(f"    {self.now}: {what}")
        answer = self.world.run(step)
        if answer is not None:
            note(f"        -> {answer}")
        return answer

    def refuse(self, error: type[Exception], what: str, step: Coroutine[Any, Any, Any]) -> None:
        """Carry out a step that has to be refused with this error."""
        try:
            self.do(what, step)
        except error:
            return
        raise AssertionError(f"{what}: was not refused with {error.__name__}")

    # The set-up

    @initialize(backoff=st.booleans(), other=st.sampled_from(MODES))
    def start(self, backoff: bool, other: str) -> None:
        """Make a topic with two subscriptions, and take its partition."""
        self.backoff = Backoff(initial=1.0, factor=2.0, maximum=4.0) if backoff else None
        self.modes = {"main": self.mode, "other": other}
        self.world.time.now_ms = 1_000_000
        self.world.run(self.world.time.start())
        settings = TopicSettings(dedupe_ms=DEDUPE_MS)
        self.do("create topic", self.operator.create_topic(self.topic, settings))
        for name in NAMES:
            self.create_subscription(name, "latest")
        self.take_partition("w1")

    def create_subscription(self, name: str, position: str | int) -> None:
        """Make a subscription on both sides."""
        if self.tokens[name]:
            self.advance(1_000)  # WORKAROUND
        mode = self.modes[name]
        self.do(
            f"create {mode} subscription {name} at {position}",
            self.operator.create_subscription(
                self.topic,
                name,
                SubscriptionSettings(mode=mode, backoff=self.backoff),
                start=position,
            ),
        )
        made = Subscription(mode, self.backoff)
        made.seek(self.partition.entries_from(position))
        self.partition.subscriptions[name] = made

    def take_partition(self, worker: str) -> None:
        """Acquire the lease, in an epoch that is larger than any before."""
        step = self.world.engines[worker].acquire(self.topic, 0, worker, 60_000)
        lease = self.do(f"acquire as {worker}", step)
        assert lease is not None
        assert lease.epoch > self.lease.epoch
        self.lease = lease

    def sub(self, name: str) -> Subscription:
        """The model of a subscription, made again if it was deleted."""
        if name not in self.partition.subscriptions:
            self.create_subscription(name, "earliest")
        return self.partition.subscriptions[name]

    def holding_sub(self, name: str) -> str:
        """The subscription of that name, after a fetch if nothing of it is leased."""
        if not self.sub(name).leased():
            batch = ["a", "b", "a", "", "", "b", "a", "", "a"]
            asked = [Room("c1", 4, 5_000), Room("c2", 3, 5_000), Room("c3", 1, 1_000)]
            self.fetch(name, [*batch], asked, 1_000, joined=True, settled=False)
        return name

    # Producers

    @rule(batch=batches)
    def publish(self, batch: list[str | int]) -> None:
        """Publish messages, some of them a second time."""
        messages = []
        for item in batch:
            if isinstance(item, str):
                self.uids.append(f"u{len(self.uids)}")
                messages.append(Outgoing(item, self.uids[-1], "x"))
            elif item < len(self.uids):
                messages.append(Outgoing("a", self.uids[-1 - item], "again"))
        if messages:
            told = self.do(f"publish {messages}", self.engine.publish(self.lease, messages))
            self.partition.publish(self.now, self.lease.epoch, messages, told.each())

    # Consumers

    @rule(name=subscriptions, consumer=consumers, session_ms=sessions)
    def join(self, name: str, consumer: str, session_ms: int) -> None:
        """Open a session, or come back under the same name."""
        model = self.sub(name)
        others = model.sessions.keys() - {consumer}
        step = self.engine.join(self.lease, name, consumer, session_ms)
        if model.mode == "exclusive" and others:
            self.refuse(SubscriptionBusy, f"{consumer} joins {name}", step)
        else:
            was_open = self.do(f"{consumer} joins {name} for {session_ms}", step)
            assert was_open == model.join(self.now, consumer, session_ms)

    def touch(self, name: str, whose: Sequence[str], session_ms: int) -> None:
        """Renew the sessions of those who still have one."""
        model = self.sub(name)
        step = self.engine.touch(self.lease, name, whose, session_ms)
        unknown = self.do(f"touch {whose} of {name} for {session_ms}", step)
        assert unknown == [who for who in whose if not model.is_open(who, self.now)]
        for consumer in set(whose) - set(unknown):
            model.sessions[consumer] = self.now + session_ms

    @rule(name=subscriptions, consumer=consumers)
    def leave(self, name: str, consumer: str) -> None:
        """Give everything back and go."""
        name = self.holding_sub(name)
        model = self.sub(name)
        step = self.engine.leave(self.lease, name, consumer)
        released = self.do(f"{consumer} leaves {name}", step)
        assert bool(released) == bool(model.leased_to(consumer))
        model.leave(self.now, consumer)

    @rule(name=subscriptions, consumer=consumers)
    def crash(self, name: str, consumer: str) -> None:
        """Fall silent until the session is over, while the others go on."""
        name = self.holding_sub(name)
        model = self.sub(name)
        if model.is_open(consumer, self.now):
            left = model.sessions[consumer] - self.now
            self.touch(name, [other for other in CONSUMERS if other != consumer], left + 30_000)
            if receipts := [r for r in self.receipts[name] if model.holding(r)]:
                self.extend_to(name, receipts, left + 10_000)
            self.advance(left)
            self.expire(name)

    # The clock

    def advance(self, ms: int) -> None:
        """Move the clock."""
        self.do(f"{ms} ms pass", self.world.time.advance(ms))

    def expire(self, name: str) -> None:
        """Let deadlines and ends of sessions take effect."""
        model = self.sub(name)
        told = self.do(f"expire {name}", self.engine.expire(self.lease, name))
        late = [o for o in model.owed.values() if o.claim and o.claim.deadline <= self.now]
        assert set(told.expired_consumers) == model.expire(self.now)
        assert told.released or not late
        assert told.next_due_ms == model.next_end()

    @rule(
        name=subscriptions,
        ms=st.sampled_from((0, 1_000, 1, 300, 5_000, 30_000, 70_000)),
        touched=st.booleans(),
        expired=st.sampled_from((True, True, False)),
    )
    def let_time_pass(self, name: str, ms: int, touched: bool, expired: bool) -> None:
        """Move the clock, by 0 to the very instant at which the next lease or session ends."""
        end = self.sub(name).next_end()
        if touched:
            self.touch(name, CONSUMERS, SESSIONS_MS[0])
        if ms or end > self.now:
            self.advance(ms or end - self.now)
        if expired:
            self.expire(name)

    # Deliveries

    @rule(
        name=subscriptions,
        batch=batches,
        asked=rooms,
        limit=st.sampled_from(LIMITS),
        joined=st.sampled_from((True, True, True, False)),
        settled=st.sampled_from((False,) * 7 + (True,)),
    )
    def fetch(
        self,
        name: str,
        batch: list[str | int],
        asked: list[Room],
        limit: int,
        joined: bool,
        settled: bool,
    ) -> None:
        """Publish, and lease all that is to be had."""
        self.sub(name)
        self.publish(batch)
        if joined:
            self.join_all(name, asked)
        if settled:
            return self.fetch_settled(name, asked)
        for _ in range(100):
            result = self.fetch_once(name, asked, limit)
            if not result.more:
                return None
            taken = {room.consumer: 0 for room in asked}
            for delivery in result.deliveries:
                taken[delivery.consumer] += len(delivery.messages)
            asked = [room._replace(permits=room.permits - taken[room.consumer]) for room in asked]
        raise AssertionError("a fetch that always asks for another one")

    def fetch_once(self, name: str, asked: list[Room], limit: int) -> FetchResult:
        """Fetch, and hold the answer against the model."""
        model = self.sub(name)
        step = self.engine.fetch(self.lease, name, asked, limit)
        result = self.do(f"fetch {name} for {asked}, at most {limit}", step)
        model.fetch(self.now, asked, limit, result, self.tokens[name])
        for delivery in result.deliveries:
            self.receipts[name].append(delivery.receipt)
            self.tokens[name] = delivery.receipt.token
        return result

    def join_all(self, name: str, asked: list[Room]) -> None:
        """See to it that consumers who ask have sessions, where the mode lets them."""
        model = self.sub(name)
        for room in asked:
            if not model.is_open(room.consumer, self.now) and (
                model.mode != "exclusive" or not model.sessions
            ):
                self.join(name, room.consumer, SESSIONS_MS[0])

    def fetch_settled(self, name: str, asked: list[Room]) -> None:
        """Deliver at most once."""
        model = self.sub(name)
        step = self.engine.fetch_settled(self.lease, name, asked)
        result = self.do(f"fetch and settle {name} for {asked}", step)
        model.fetch(self.now, asked, 1000, result, self.tokens[name])
        receipts = [delivery.receipt for delivery in result.deliveries]
        assert not model.ack(self.now, receipts)
        self.receipts[name] += receipts
        self.tokens[name] = max([self.tokens[name], *(receipt.token for receipt in receipts)])

    # Settling

    @rule(name=subscriptions, chosen=picks, everything=st.sampled_from((False, False, False, True)))
    def ack(self, name: str, chosen: list[Pick], everything: bool) -> None:
        """Settle some messages, with receipts new and old, or all that is leased."""
        name = self.holding_sub(name)
        model = self.sub(name)
        receipts = self.choose(name, chosen)
        if everything:
            receipts = [receipt for receipt in self.receipts[name] if model.holding(receipt)]
        if not receipts:
            return
        step = self.engine.ack(self.lease, name, receipts)
        result = self.do(f"ack {name}: {receipts}", step)
        assert _stale_parts(result) == model.ack(self.now, receipts)
        left = {number for first, last in result.forgotten for number in range(first, last + 1)}
        assert left == self.partition.forget(), "what left the log"

    @rule(
        name=subscriptions,
        chosen=picks,
        delay_ms=delays,
        charged=st.sampled_from((True, True, False)),
    )
    def nack(self, name: str, chosen: list[Pick], delay_ms: int | None, charged: bool) -> None:
        """Give some messages back, with receipts new and old."""
        name = self.holding_sub(name)
        receipts = self.choose(name, chosen)
        if not receipts:
            return
        due = None if delay_ms is None else self.now + delay_ms
        when = {"until_ms": due} if delay_ms and delay_ms % 1_000 else {"delay_ms": delay_ms}
        step = self.engine.nack(self.lease, name, receipts, charged=charged, **when)
        told = _stale_parts(self.do(f"nack {name}, {when}, charged {charged}: {receipts}", step))
        assert told == self.sub(name).nack(self.now, receipts, due, charged)

    @rule(name=subscriptions, chosen=picks, lease_ms=st.sampled_from(LEASES_MS))
    def extend(self, name: str, chosen: list[Pick], lease_ms: int) -> None:
        """Move some deadlines, with receipts new and old."""
        name = self.holding_sub(name)
        if receipts := self.choose(name, chosen):
            self.extend_to(name, receipts, lease_ms)

    def extend_to(self, name: str, receipts: list[Receipt], lease_ms: int) -> None:
        """Extend on both sides."""
        step = self.engine.extend(self.lease, name, receipts, lease_ms=lease_ms)
        result = self.do(f"extend {name} by {lease_ms}: {receipts}", step)
        assert result.deadline_ms == self.now + lease_ms
        assert _stale_parts(result) == self.sub(name).extend(receipts, self.now + lease_ms)

    def choose(self, name: str, chosen: list[Pick]) -> list[Receipt]:
        """The receipts, or parts of them, that were picked."""
        every = self.receipts[name]
        live = [receipt for receipt in every if self.sub(name).holding(receipt)]
        receipts = []
        for pick in chosen if every else []:
            known = live if pick.live and live else every
            receipt = known[-1 - pick.back % len(known)]
            size = receipt.last - receipt.first + 1
            first = receipt.first + min(pick.skip, size - 1)
            last = max(first, receipt.last - pick.drop)
            token = every[0].token if pick.mixed else receipt.token
            receipts.append(receipt._replace(first=first, last=last, token=token))
        return receipts

    # Workers

    @rule(
        how=st.sampled_from(("released", "ran out", "again", "seek", "delete", "remake")),
        worker=st.sampled_from(WORKERS),
        what=st.sampled_from(OPERATIONS),
        name=subscriptions,
        consumer=consumers,
        position=positions,
    )
    def disturb(
        self, how: str, worker: str, what: str, name: str, consumer: str, position: str | int
    ) -> None:
        """Move the partition to another worker, or let an operator change a subscription."""
        if how in ("released", "ran out", "again"):
            self.take_over(worker, how, what, name, consumer)
        else:
            self.operate(name, position, how)

    def take_over(self, worker: str, how: str, what: str, name: str, consumer: str) -> None:
        """Let a worker take the partition; the one that had it tries to go on, and cannot."""
        if how == "again":
            assert self.do("renew", self.engine.renew([self.lease], 60_000)) == [True]
            refused = self.operator.acquire(self.topic, 0, "w3", 60_000)
            assert self.do("w3 acquires", refused) is None
            worker = self.lease.worker
        elif how == "released":
            assert self.do("release", self.engine.release(self.lease))
        else:
            self.do("the lease runs out", self.engine.store.command("DEL", self.keys.lease))
        old, engine = self.lease, self.engine
        self.take_partition(worker)
        name = self.holding_sub(name)
        receipts = [r for r in self.receipts[name] if self.sub(name).holding(r)]
        receipts = receipts or [Receipt(0, "", 1, 1, 1)]
        steps: dict[str, Any] = {
            "ack": lambda: engine.ack(old, name, receipts),
            "nack": lambda: engine.nack(old, name, receipts),
            "extend": lambda: engine.extend(old, name, receipts, lease_ms=90_000),
            "fetch": lambda: engine.fetch(old, name, [Room(consumer, 5)]),
            "publish": lambda: engine.publish(old, [Outgoing("a", "late", "x")]),
            "expire": lambda: engine.expire(old, name),
            "join": lambda: engine.join(old, name, consumer),
            "touch": lambda: engine.touch(old, name, [consumer], 90_000),
            "leave": lambda: engine.leave(old, name, consumer),
            "held": lambda: engine.held(old, name, consumer),
        }
        self.refuse(Fenced, f"{what} {name} in epoch {old.epoch}: {receipts}", steps[what]())
        assert self.world.run(engine.renew([old], 60_000)) == [False]
        assert not self.world.run(engine.release(old))

    # Operators

    def operate(self, name: str, position: str | int, what: str) -> None:
        """Move a subscription, or remove it, or make it anew."""
        model = self.sub(name)
        if what == "seek":
            partition = 0 if isinstance(position, int) else None
            step = self.operator.seek(self.topic, name, position, partition)
            self.do(f"seek {name} to {position}", step)
            model.seek(self.partition.entries_from(position))
            return
        self.do(f"delete {name}", self.operator.delete_subscription(self.topic, name))
        del self.partition.subscriptions[name]
        self.partition.forget()
        if what == "remake":
            self.create_subscription(name, position)

    # What has to be so after every step

    @invariant()
    def the_log_has_what_is_owed(self) -> None:
        """An entry stays in the log for just as long as somebody owes it."""
        self.partition.forget()
        ((found),) = self.world.run(self.engine.store.entries(self.keys.log, [("-", "+")]))
        assert [id for id, _ in found] == [entry.id for entry in self.partition.log.values()]

    @invariant()
    def consumers_hold_what_they_were_given(self) -> None:
        """The engine and the model agree on every lease: who, until when, by which receipt."""
        for name, model in self.partition.subscriptions.items():
            for consumer in CONSUMERS:
                mine = model.leased_to(consumer)
                if not mine and consumer not in model.sessions:
                    continue
                held = self.world.run(self.engine.held(self.lease, name, consumer))
                told = [
                    (message.entry, one.receipt.lane, one.receipt.token, one.deadline_ms, message.retries)
                    for one in held
                    for message in one.messages
                ]
                assert sorted(told) == [_lease_of(owed) for owed in mine], f"{consumer} of {name}"

    def teardown(self) -> None:
        """Walk the keyspace, and clean up."""
        if self.lease.epoch:
            problems = self.world.run(check_topic(self.engine, self.topic))
            assert not problems
            self.world.run(self.operator.delete_topic(self.topic))


def _lease_of(owed: Owed) -> tuple[int, str, int, int, int]:
    assert owed.claim
    return owed.entry.number, owed.lane, owed.token, owed.claim.deadline, owed.retries


def _stale_parts(result: SettleResult) -> set[Part]:
    stale = [tuple(part) for part in result.stale]
    parts = [(place, entry) for place, first, last in stale for entry in range(first, last + 1)]
    assert len(parts) == len(set(parts)), "each stale part is told once"
    return set(parts)


def explore(
    machine: type[BrokerMachine],
    url: str,
    *,
    examples: int,
    sources: dict[str, str] | None = None,
    shrink: bool = True,
) -> None:
    """Run random examples of a machine; with the profile "deep", twenty times as many and new ones."""
    phases = [Phase.explicit, Phase.generate] + ([Phase.shrink] if shrink else [])
    world = World(url, sources)
    try:
        run_state_machine_as_test(
            lambda: machine(world),
            settings=settings(
                max_examples=examples * (20 if DEEP and shrink else 1),
                stateful_step_count=40,
                deadline=None,
                derandomize=not DEEP,
                database=None,
                phases=phases,
                print_blob=True,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        world.close()
