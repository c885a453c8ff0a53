"""A machine with a topic, the topic that keeps its dead letters, and all that goes between the two.

Whoever carries messages may die before he has noted that they have arrived, and does so again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from keylane.wire import About, unpack_about
from keylane_broker.engine.bodies import read_body_records, remove_body_records
from keylane_broker.engine.held_bodies import let_go
from keylane_broker.engine.values import Capacity, Outgoing, Receipt, TopicSettings
from keylane_broker.inspect.topic_checker import check_topic
from keylane_broker.limits import FOREVER
from tests.model.machine import Machine
from tests.model.model import Claim, Entry
from tests.model.pair import DEDUPE_MS, Pair

MODES = ("shared", "key_shared", "failover")
LEASE_MS, SESSION_MS = 60_000, 600_000
KEEPING = TopicSettings(dedupe_ms=DEDUPE_MS, retention_ms=FOREVER)
names = st.sampled_from(("main", "main", "other"))
chosen = st.integers(0, 9)


class Letter(NamedTuple):
    """A message on its way between the topics: the subscription that it failed in, its key and uid."""

    subscription: str
    key: str
    uid: str


class RedriveMachine(Machine):
    """Two subscriptions in which messages fail, and one to the topic that keeps these."""

    source: Pair | None = None

    @initialize(modes=st.tuples(*[st.sampled_from(MODES)] * 3))
    def start(self, modes: tuple[str, str, str]) -> None:
        """Make both topics."""
        self.source = Pair(self.world, {"main": modes[0], "other": modes[1]}, None, max_retries=0)
        self.keeper = Pair(
            self.world, {"main": modes[2]}, None, settings=KEEPING, topic=f"{self.source.topic}.dead"
        )
        for name in ("main", "other"):
            self.source.create_subscription(name, "latest")
        self.letters: list[Letter] = []  # on their way to those that are kept,
        self.redriven: list[Letter] = []  # and back
        self.holding: dict[str, tuple[int, str]] = {}  # body of a dead letter -> the entry that it holds
        self.bodies: set[str] = set()  # those that there are
        self.published = 0

    @property
    def topics(self) -> tuple[Pair, Pair]:
        """The topic, and that which keeps its dead letters."""
        assert self.source
        return self.source, self.keeper

    # Messages fail

    @rule(keys=st.lists(st.sampled_from(("a", "b", "")), min_size=1, max_size=5))
    def publish(self, keys: list[str]) -> None:
        """Publish messages, each with a body that has its uid as its name."""
        source, _ = self.topics
        uids = [f"u{self.published + place}" for place in range(len(keys))]
        self.published += len(keys)
        source.publish([Outgoing(key, uid, "1  7 ") for key, uid in zip(keys, uids, strict=True)])
        if source.partition.subscriptions:
            self.bodies.update(uids)

    @rule(name=names)
    def fetch(self, name: str) -> None:
        """Lease all that is there; what is meant for another subscription is passed over."""
        self._fetch(self.topics[0], name)

    @rule(name=names, which=chosen)
    def ack(self, name: str, which: int) -> None:
        """Settle a message."""
        source, _ = self.topics
        for receipt in self._one_of(source, name, which):
            source.ack(name, [receipt])

    @rule(name=names, which=chosen)
    def fail(self, name: str, which: int) -> None:
        """A message is a dead letter."""
        self._fail(name, which)

    @rule(name=names)
    def fail_all(self, name: str) -> None:
        """So is all that is there."""
        self._fetch(self.topics[0], name)
        while self._fail(name, 0):
            self._fetch(self.topics[0], name)

    def _fail(self, name: str, which: int) -> bool:
        source, _ = self.topics
        for receipt in self._one_of(source, name, which):
            entry = source.partition.log[receipt.first]
            source.nack(name, [receipt], 0, True)
            self.letters.append(Letter(name, entry.key, entry.uid))
            return True
        return False

    @rule(name=names)
    def remake(self, name: str) -> None:
        """A subscription goes; its dead letters stay."""
        source, _ = self.topics
        source.delete_subscription(name)

    def _fetch(self, pair: Pair, name: str) -> None:
        model = pair.sub(name)
        if not model.is_open("c1", pair.now):
            pair.join(name, "c1", SESSION_MS)
        for number, owed in list(model.owed.items()):
            if owed.claim is None and _meant_for(owed.entry) not in (None, name):
                model._look(Claim("c1", LEASE_MS, pair.now + LEASE_MS))  # it is leased, and settled
                del model.owed[number]
        pair.fetch(name, [Capacity("c1", 1_000, LEASE_MS)], 1_000)
        pair.partition.forget()  # what was passed over may have left the log

    def _one_of(self, pair: Pair, name: str, which: int) -> list[Receipt]:
        """The receipt of one leased message, none if nothing is leased."""
        leased = pair.sub(name).leased()
        if not leased:
            return []
        owed = leased[which % len(leased)]
        number = owed.entry.number
        return [Receipt(0, owed.lane, owed.token, number, number)]

    # Messages are carried from one topic to the other

    @rule(dies=st.booleans())
    def send_letters(self, dies: bool) -> None:
        """What has failed comes to those that are kept."""
        source, keeper = self.topics
        source.partition.bury()
        for entry, about in self._carry(source, keeper, dies):
            assert self.letters, "it has come before"
            letter = self.letters.pop(0)
            told = about.attributes
            assert (told["dead.subscription"], entry.key, told["dead.uid"]) == letter
            self._append(keeper, entry)
            place = about.body[1:].partition("/")[0].split(":")
            if len(place) == 5:
                self.holding[about.body] = int(place[3]), letter.subscription
        assert not self.letters, "none is left behind"

    @rule(dies=st.booleans())
    def send_back(self, dies: bool) -> None:
        """What is redriven comes back, in the order in which it was sent."""
        source, keeper = self.topics
        arrived = self._carry(keeper, source, dies)
        if not source.partition.subscriptions:
            assert not arrived, "nobody is there for it"
            self.redriven.clear()
        for entry, about in arrived:
            assert self.redriven, "it has come before"
            letter = self.redriven.pop(0)
            assert (about.attributes["redriven.for"], entry.key, entry.uid) == letter
            assert not any(name.startswith("dead.") for name in about.attributes)
            self._append(source, entry)
        assert not self.redriven, "none is left behind"

    def _carry(self, here: Pair, there: Pair, dies: bool) -> list[tuple[Entry, About]]:
        """Empty an outbox; who dies is followed by another one, who does it again."""
        store, copy = here.operator.store, f"{here.keys.outbox}:copy"
        if dies:
            self.world.run(here.operator.bury(here.topic, 0))
            self.world.run(store.read_all([("COPY", here.keys.outbox, copy)]))
        here.do("empty the outbox", here.operator.empty_outbox(here.topic, 0))
        if dies and self.world.run(store.read_all([("EXISTS", copy)])) == [1]:
            self.world.run(store.read_all([("RENAME", copy, here.keys.outbox)]))
            here.do("and again", here.operator.empty_outbox(here.topic, 0))
        after = f"({there.lease.epoch}-{there.partition.last}"
        [found] = self.world.run(there.engine.store.entries(there.keys.log, [(after, "+")]))
        return [
            (Entry(int(id.partition("-")[2]), id, key, uid, about), unpack_about(about, uid))
            for id, (_, key, _, uid, _, about) in found
        ]

    def _append(self, pair: Pair, entry: Entry) -> None:
        partition = pair.partition
        partition.last += 1
        assert entry.number == partition.last, "ids are dense"
        partition.log[entry.number] = entry
        for subscription in partition.subscriptions.values():
            subscription.owe(entry)

    # Operators

    @rule(places=st.lists(chosen, min_size=1, max_size=6), purge=st.booleans())
    def withdraw(self, places: list[int], purge: bool) -> None:
        """Redrive or purge some: those that a consumer has stay, and what nobody would get."""
        _, keeper = self.topics
        there = list(keeper.partition.log) or [1]
        numbers = sorted({there[place % len(there)] for place in places} | {keeper.partition.last + 1})
        self._withdraw(numbers, purge)

    @rule(purge=st.sampled_from((False, False, True)))
    def withdraw_all(self, purge: bool) -> None:
        """The same with all that there are."""
        _, keeper = self.topics
        self._withdraw(list(keeper.partition.log), purge)

    def _withdraw(self, numbers: Sequence[int], purge: bool) -> None:
        source, keeper = self.topics
        step = keeper.operator.withdraw(keeper.topic, 0, numbers, purge=purge)
        taken = keeper.do("purge" if purge else "redrive", step, numbers)
        leased, log = keeper.partition.leased(), keeper.partition.log
        failed_in = {number: _attributes(entry)["dead.subscription"] for number, entry in log.items()}
        assert taken == [
            number
            for number in numbers
            if number in log
            and number not in leased
            and (purge or failed_in[number] in source.partition.subscriptions)
        ]
        for model in keeper.partition.subscriptions.values():
            model.skip(keeper.now, taken)
            model.sparse = keeper.partition.last
        for number in taken:
            entry = log.pop(number)
            if not purge:
                uid = _attributes(entry)["dead.uid"]
                self.redriven.append(Letter(failed_in[number], entry.key, uid))

    # Somebody looks at those that are kept

    @rule(which=chosen, how=st.sampled_from(("fetch", "ack", "nack", "leave")))
    def look(self, which: int, how: str) -> None:
        """Lease them, settle one, which stays, or give it back."""
        _, keeper = self.topics
        if how == "fetch" or "main" not in keeper.partition.subscriptions:
            self._fetch(keeper, "main")
        elif how == "leave" and keeper.sub("main").is_open("c1", keeper.now):
            keeper.leave("main", "c1")
        for receipt in self._one_of(keeper, "main", which):
            if how == "ack":
                keeper.ack("main", [receipt])
            elif how == "nack":
                keeper.nack("main", [receipt], 0, True)

    # Bodies

    @precondition(lambda self: self.source is not None)
    @rule()
    def delete_bodies(self) -> None:
        """A worker deletes what is written down: never a body that a message has, wherever it is."""
        deleted, work = True, 0
        while deleted:
            deleted = False
            for pair in self.topics:
                deleted = self._work_off(pair) or deleted
            work += 1
            assert work < 100
        for pair in self.topics:
            pair.partition.forget()
        needed = self._needed()
        assert needed <= self.bodies, f"deleted too early: {needed - self.bodies}"
        assert self.bodies <= needed, f"left behind: {self.bodies - needed}"

    def _work_off(self, pair: Pair) -> bool:
        store, place = pair.operator.store, (pair.topic, 0)
        [records] = self.world.run(read_body_records(store, [place], 1_000))
        for record in records:
            doomed = pair.do("let go", let_go(store, pair.topic, record.names, lambda *_: None), record.names)
            for uids in doomed.values():
                self.bodies -= set(uids)
            for name in record.names:
                self._released(name)
        self.world.run(remove_body_records(store, place, [record.id for record in records] or ["0-1"]))
        return bool(records)

    def _released(self, name: str) -> None:
        """A dead letter is gone, or what was redriven of it: it holds no entry any more."""
        source, _ = self.topics
        name = name.removeprefix(f"@{source.topic}/")  # it has failed again
        held = self.holding.pop(name, None)
        if held is not None:
            source.partition.held.remove(held)

    def _needed(self) -> set[str]:
        """The bodies of all messages, wherever they are."""
        source, keeper = self.topics
        kept = {_attributes(entry)["dead.uid"] for entry in keeper.partition.log.values()}
        going = {letter.uid for letter in (*self.letters, *self.redriven)}
        return {entry.uid for entry in source.partition.log.values()} | kept | going

    # After every step, and in the end

    @invariant()
    def both_topics_have_what_they_should(self) -> None:
        """Each message is in one place."""
        if self.source is None:
            return
        for pair in self.topics:
            pair.partition.forget()
            [log] = self.world.run(pair.engine.store.entries(pair.keys.log, [("-", "+")]))
            assert [id for id, _ in log] == [entry.id for entry in pair.partition.log.values()], pair.topic

    def teardown(self) -> None:
        """Settle everything, and see that nothing is left of any message."""
        if self.source is None:
            return
        try:
            self._settle_all()
            for pair in self.topics:
                assert not self.world.run(check_topic(pair.engine, pair.topic))
        finally:
            for pair in reversed(self.topics):
                keys: list[Any] = [("DEL", pair.keys.dead), ("DEL", pair.keys.outbox)]
                self.world.run(pair.operator.store.read_all(keys))
                self.world.run(pair.operator.delete_topic(pair.topic))

    def _settle_all(self) -> None:
        source, keeper = self.topics
        self.send_letters(False)
        self.send_back(False)
        for pair in self.topics:
            for name in list(pair.partition.subscriptions):
                self._fetch(pair, name)
                for receipt in pair.live(name):
                    pair.ack(name, [receipt])
        self._withdraw(list(keeper.partition.log), True)
        self.delete_bodies()
        self.both_topics_have_what_they_should()
        assert not self.bodies
        assert not source.partition.log


def _attributes(entry: Entry) -> dict[str, str]:
    return unpack_about(entry.about, entry.uid).attributes


def _meant_for(entry: Entry) -> str | None:
    """The one subscription that a message is for, None where it is for all."""
    return _attributes(entry).get("redriven.for")
