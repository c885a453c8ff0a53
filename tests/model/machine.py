"""Hypothesis state machines: everything that may happen to a subscription, in any order.

A failing example prints every call with its answer. `HYPOTHESIS_PROFILE=deep` runs twenty times as many
examples, and new ones each time.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Any, ClassVar, NamedTuple, TypeVar

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from keylane_broker.engine.filters import Filter
from keylane_broker.engine.values import Backoff, Capacity, Outgoing, Receipt, TopicSettings
from tests.model.pair import CONSUMERS, NAMES, PLAIN, WORKERS, Pair, World

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
ROUND = 9  # examples that one seed makes; of ten and more Hypothesis keeps the first ones small
FEW = range(3)  # rounds
MANY = range(3, 17)  # which go on where the few end
ENOUGH = 20.0  # seconds in which rounds begin, unless a defect is to be found
ALL = range(15)
UNTIL_FOUND = range(220)
SECONDS = 3_600 if DEEP else 600
MODES = ("shared", "key_shared", "exclusive", "failover")
KEYS = ("a", "b", "", "=a")
ATTRIBUTES = ("", '{"region":"eu"}', '{"region":"us","urgent":""}')
LEASES_MS = (5_000, 1_000, 30_000)
SESSIONS_MS = (60_000, 10_000, 2_000)

LITTLE = {
    "lib/lanes": ("local RECORD_LIMIT = 640", "local RECORD_LIMIT = 1"),
    "lib/beyond": ("local LISTED = 32", "local LISTED = 1"),
    "subscription/nack": ("local STRETCHES = 400", "local STRETCHES = 1"),
    "lib/owed_runs": ("local APART = 12", "local APART = 1"),
    "lib/fetch/fresh": ("local RUN_STRETCHES = 100", "local RUN_STRETCHES = 2"),
}

T = TypeVar("T")
Item = str | int  # a key to publish under, or how far back to look for a uid to publish again


class Pick(NamedTuple):
    """Which receipt: how far back, of those that still hold or of all, which part, with which token."""

    back: int
    live: bool
    skip: int
    drop: int
    forged: bool


Choose = Callable[[Sequence[Any]], Any]


def in_one_draw(most: int, build: Callable[[Choose], T]) -> st.SearchStrategy[T]:
    """What is built of at most so many choices, all in one draw.

    To Hypothesis a draw costs about as much as a step of a machine costs us.
    """

    def decode(drawn: bytes) -> T:
        rest = iter(drawn)
        return build(lambda values: values[next(rest) % len(values)])

    return st.binary(min_size=most, max_size=most).map(decode)


ORDERS = [order for size in (1, 2, 3) for order in permutations(CONSUMERS, size)]
SIZES = (0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 10, 14)

rooms = in_one_draw(
    10,
    lambda choose: [
        Capacity(
            consumer,
            choose((3, 1, 6, 2, 12, 0)),
            choose(LEASES_MS),
            choose((None, None, 12, 13, 14)),
            None,  # the model knows nothing of bytes
        )
        for consumer in choose(ORDERS)
    ],
)
picks = in_one_draw(
    21,
    lambda choose: [
        Pick(
            back=choose(range(8)),
            live=choose((True, True, True, False)),
            skip=choose((0, 0, 1, 2)),
            drop=choose((0, 0, 1, 2)),
            forged=choose((False,) * 9 + (True,)),
        )
        for _ in range(choose((1, 2, 3, 4)))
    ],
)
batches = in_one_draw(15, lambda choose: [choose((*KEYS, *KEYS, 0, 9)) for _ in range(choose(SIZES))])
names = st.runner().flatmap(lambda machine: machine.names_in_use())
both_names, first_name = st.sampled_from(("main", "main", "main", "other")), st.just("main")
consumers = st.sampled_from(CONSUMERS)


# How many retries a message has, and what becomes of it then.
POLICIES: list[tuple[int | None, str]] = [(None, "skip"), (0, "skip"), (1, "skip"), (1, "park")]


class Machine(RuleBasedStateMachine):
    """What has a world to act in."""

    world: ClassVar[World]


class BrokerMachine(Machine):
    """A subscription of one mode beside another one of any mode, on the same partition."""

    mode: ClassVar[str]
    journal: ClassVar[int] = 0  # records to keep
    settings: ClassVar[TopicSettings] = PLAIN  # of the topic
    ordinary: ClassVar[bool] = False  # the scripts for the ordinary case come first
    filters: ClassVar[Mapping[str, Filter]] = {}
    pair: Pair | None = None

    @initialize(
        backoff=st.booleans(),
        other=st.sampled_from(MODES),
        alone=st.booleans(),
        policy=st.sampled_from(POLICIES),
    )
    def start(self, backoff: bool, other: str, alone: bool, policy: tuple[int | None, str]) -> None:
        """Make the topic, and the other subscription too unless the first is to be alone."""
        waits = Backoff(initial=1.0, factor=2.0, maximum=4.0, jitter=0.0) if backoff else None
        modes = {"main": self.mode, "other": other}
        self.pair = Pair(
            self.world,
            modes,
            waits,
            self.journal,
            self.settings,
            self.filters,
            ordinary=self.ordinary,
            max_retries=policy[0],
            poison=policy[1],
        )
        for name in NAMES[:1] if alone else NAMES:
            self.pair.create_subscription(name, "latest")
        self.uids: list[str] = []

    @property
    def both(self) -> Pair:
        """The engine and the model."""
        assert self.pair
        return self.pair

    def names_in_use(self) -> st.SearchStrategy[str]:
        """Where things happen: mostly the first subscription, also the other one while it is there."""
        return both_names if "other" in self.both.partition.subscriptions else first_name

    @rule(batch=batches)
    def publish(self, batch: list[Item]) -> None:
        """Publish messages, some of them a second time."""
        messages = []
        for item in batch:
            if isinstance(item, str):
                self.uids.append(f"u{len(self.uids)}")
                attributes = ATTRIBUTES[len(self.uids) % len(ATTRIBUTES)]
                messages.append(Outgoing(item, self.uids[-1], "1  7 " + attributes))  # it has a body
            elif item < len(self.uids):
                messages.append(Outgoing("a", self.uids[-1 - item], "again"))
        if messages:
            self.both.publish(messages)

    # Consumers come and go

    @rule(name=names, consumer=consumers, session_ms=st.sampled_from(SESSIONS_MS))
    def join(self, name: str, consumer: str, session_ms: int) -> None:
        """Open a session, or come back under the same name."""
        self.both.join(name, consumer, session_ms)

    @rule(name=names, consumer=consumers)
    def leave(self, name: str, consumer: str) -> None:
        """Give everything back and go."""
        self.see_to_leases(name)
        self.both.leave(name, consumer)

    @rule(name=names, consumer=consumers)
    def crash(self, name: str, consumer: str) -> None:
        """Fall silent until the session is over, while the others and all leases go on."""
        self.see_to_leases(name)
        model = self.both.sub(name)
        if model.is_open(consumer, self.both.now):
            left = model.sessions[consumer] - self.both.now
            others = [other for other in CONSUMERS if other != consumer]
            self.both.renew_sessions(name, others, left + 30_000)
            if receipts := self.both.live(name):
                self.both.extend(name, receipts, left + 10_000)
            self.both.advance(left)
            self.both.expire(name)

    @rule(ms=st.sampled_from((1, 700, 9_000, 100_000)))
    def set_the_clock_back(self, ms: int) -> None:
        """Time goes on at its own speed."""
        self.both.set_back(ms)

    @rule(
        name=names,
        ms=st.sampled_from((0, 1_000, 1, 300, 5_000, 8_000, 70_000)),
        touched=st.booleans(),
        expired=st.sampled_from((True, True, False)),
    )
    def let_time_pass(self, name: str, ms: int, touched: bool, expired: bool) -> None:
        """Move the clock, by 0 to the very instant at which the next lease or session ends."""
        end = self.both.sub(name).next_end()
        if touched:
            self.both.renew_sessions(name, CONSUMERS, SESSIONS_MS[0])
        if ms or end > self.both.now:
            self.both.advance(ms or end - self.both.now)
        if expired:
            self.both.expire(name)

    # Messages are delivered and settled

    @rule(
        name=names,
        batch=batches,
        asked=rooms,
        limit=st.sampled_from((1_000, 1_000, 1_000, 3, 1)),
        joined=st.sampled_from((True, True, True, False)),
        settled=st.sampled_from((False,) * 7 + (True,)),
    )
    def fetch(
        self,
        name: str,
        batch: list[Item],
        asked: list[Capacity],
        limit: int,
        joined: bool,
        settled: bool,
    ) -> None:
        """Publish, and lease all that is to be had."""
        model = self.both.sub(name)
        self.publish(batch)
        for room in asked if joined else []:
            closed = not model.is_open(room.consumer, self.both.now)
            if closed and (model.mode != "exclusive" or not model.sessions):
                self.both.join(name, room.consumer, SESSIONS_MS[0])
        if settled:
            self.both.fetch_settled(name, asked)
        else:
            self.both.fetch(name, asked, limit)

    @rule(name=names, chosen=picks, everything=st.sampled_from((False, False, False, True)))
    def ack(self, name: str, chosen: list[Pick], everything: bool) -> None:
        """Settle some messages, with receipts new and old, or all that is leased."""
        receipts = self.choose(name, chosen)
        if everything:
            receipts = self.both.live(name)
        if receipts:
            self.both.ack(name, receipts)

    @rule(
        name=names,
        chosen=picks,
        delay_ms=st.sampled_from((None, 0, 700, 4_000, -500)),
        charged=st.sampled_from((True, True, False)),
        newest=st.booleans(),
    )
    def nack(self, name: str, chosen: list[Pick], delay_ms: int | None, charged: bool, newest: bool) -> None:
        """Give some messages back, with receipts new and old, or only the newest that is leased."""
        receipts = self.choose(name, chosen)
        if newest and (live := self.both.live(name)):
            receipts = [live[-1]._replace(first=live[-1].last)]
        if receipts:
            self.both.nack(name, receipts, delay_ms, charged)

    @precondition(lambda self: self.both.max_retries is not None)
    @rule(which=st.integers(0, 3), buries=st.booleans())
    def send_dead_letters(self, which: int, buries: bool) -> None:
        """Dead letters go on their way; or one goes for good that has the body of an entry."""
        if buries:
            self.both.bury()
            self.both.check_outbox()
        else:
            self.both.let_go(which)

    @precondition(lambda self: self.both.poison == "park")
    @rule(name=names, which=st.integers(0, 3), action=st.sampled_from(("resume", "skip")))
    def unpark(self, name: str, which: int, action: str) -> None:
        """An operator lets a lane go on that has stopped."""
        self.both.unpark(name, which, action)

    @rule(name=names, chosen=picks, lease_ms=st.sampled_from(LEASES_MS))
    def extend(self, name: str, chosen: list[Pick], lease_ms: int) -> None:
        """Move some deadlines, with receipts new and old."""
        if receipts := self.choose(name, chosen):
            self.both.extend(name, receipts, lease_ms)

    def see_to_leases(self, name: str) -> None:
        """Publish and fetch something where nothing is leased, so that few steps are in vain."""
        if not self.both.sub(name).leased():
            batch: list[Item] = [12, "a", "b", "a", "", "", "b", "a", "", "a"]
            asked = [Capacity("c1", 4, 5_000), Capacity("c2", 3, 5_000), Capacity("c3", 1, 1_000)]
            self.fetch(name, batch, asked, 1_000, joined=True, settled=False)

    def choose(self, name: str, chosen: list[Pick]) -> list[Receipt]:
        """The receipts, or parts of them, that were picked."""
        self.see_to_leases(name)
        every, live = self.both.receipts[name], self.both.live(name)
        receipts = []
        for pick in chosen if every else []:
            known = live if pick.live and live else every
            receipt = known[-1 - pick.back % len(known)]
            first = min(receipt.first + pick.skip, receipt.last)
            last = max(receipt.last - pick.drop, first)
            token = every[0].token if pick.forged else receipt.token
            receipts.append(receipt._replace(first=first, last=last, token=token))
        return receipts

    # Single messages

    @rule(
        how=st.sampled_from(("skip", "skip", "skip", "skip", "delete", "delete", "purge", "empty")),
        name=names,
        back=st.sampled_from((0, 0, 1, 2, 3, 5, 9, 14)),
        first=st.booleans(),
    )
    def remove(self, how: str, name: str, back: int, first: bool) -> None:
        """Settle a message for one subscription or for all, whether it is leased, waits or is fresh."""
        if how == "purge":
            self.both.purge(name)
        elif how == "empty":
            self.both.purge("")
        else:
            owed = list(self.both.sub(name).owed)
            number = max(self.both.partition.last - back, 1)
            if first and owed:
                number = owed[back % len(owed)]
            self.both.skip(name, number) if how == "skip" else self.both.delete_message(number)

    # Workers and operators

    @rule(
        how=st.sampled_from(("released", "ran out", "again", "seek", "delete", "remake")),
        worker=st.sampled_from(WORKERS),
        name=st.sampled_from(NAMES),
        consumer=consumers,
        position=st.sampled_from(("earliest", 1, 3, 8, 20, "latest")),
    )
    def disturb(self, how: str, worker: str, name: str, consumer: str, position: str | int) -> None:
        """Move the partition to a worker, or let an operator change a subscription."""
        if how == "seek":
            self.both.seek(name, position)
        elif how in ("delete", "remake"):
            self.both.delete_subscription(name)
            if how == "remake":
                self.both.create_subscription(name, position)
        else:
            self.see_to_leases(name)
            old = self.both.lease
            if how == "again":
                self.both.keep()
                worker = old.worker
            elif how == "released":
                self.both.give_up()
            else:
                self.both.run_out()
            self.both.acquire(worker)
            self.both.act_without_the_lease(old, name, consumer)

    # After every step, and in the end

    @invariant()
    def the_log_has_what_is_owed_and_consumers_hold_what_they_were_given(self) -> None:
        """Engine and model agree on the log, and on the leases of the subscription that was last in use."""
        self.both.check(self.both.latest)

    def teardown(self) -> None:
        """Walk the keyspace, and clean up."""
        if self.pair:
            self.pair.finish()


def with_little_room(sources: dict[str, str]) -> dict[str, str]:
    """The scripts with room for one range in a lane's record: what is leased is beyond it in no time."""
    changed = dict(sources)
    for file, (text, becomes) in LITTLE.items():
        assert sources[file].count(text) == 1, f"{text!r} is there once in {file}.lua"
        changed[file] = sources[file].replace(text, becomes)
    return changed


def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let leave, held and expire look at a few stretches in each call."""
    for module in ("consumers", "entries"):
        monkeypatch.setattr(f"keylane_broker.engine.{module}.STEP", 2)
    monkeypatch.setattr("keylane_broker.engine.delivery._BACK", 3)


def explore(
    machine: type[Machine],
    url: str,
    rounds: range,
    *,
    sources: dict[str, str] | None = None,
    planted: bool = False,
) -> None:
    """Run random examples of a machine; where a defect is planted, only until it is found.

    Those of a round are the same in every run, unless it is a deep one.
    """
    deep = DEEP and not planted
    each = settings(
        max_examples=ROUND,
        stateful_step_count=40,
        deadline=None,
        derandomize=not deep,
        database=None,
        phases=[Phase.generate] if planted else [Phase.generate, Phase.shrink],
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    machine.world = World(url, sources)
    began = time.monotonic()
    try:
        for number in [*rounds] * (20 if deep else 1):
            if not (deep or planted) and time.monotonic() - began > ENOUGH:
                break  # the suite must end on a slow machine, too
            if not deep:
                hypothesis.seed(number)(machine)
            run_state_machine_as_test(machine, settings=each)
    finally:
        machine.world.close()
