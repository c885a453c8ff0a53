"""Messages for later against the model: each goes into the log once, in the order of times, or nowhere."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from keylane_broker.engine.values import DelayResult, Outgoing, PromoteResult
from keylane_broker.store.scripts import read_sources
from tests.model.machine import FEW, MANY, SECONDS, UNTIL_FOUND, BrokerMachine, explore
from tests.model.model import NONE_YET, Entry, Partition

pytestmark = pytest.mark.timeout(SECONDS)

KEYS = ("a", "b", "")
DELAYS_MS = (0, 300, 300, 1_000, 5_000, 40_000)

Item = tuple[str | int, int]  # a key, or how far back to look for a uid to publish again; and a delay


class Later:
    """What waits for its time, in the order of the times and then of publishing."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.waiting = partition.waiting

    @property
    def next_due(self) -> int:
        """When the next is due, 0 for never."""
        return min((due for due, _ in self.waiting), default=0)

    def delay(self, now: int, batch: Sequence[Outgoing], dues: Sequence[int], told: DelayResult) -> None:
        """Check what a delay answered, and follow it."""
        marks = self.partition.marks
        for place, (message, due) in enumerate(zip(batch, dues, strict=True)):
            ids = set()
            age = now - marks[message.uid][0] if message.uid in marks else 10**9
            if age < 3 * self.partition.dedupe_ms:
                ids.add(marks[message.uid][1])
            waits = message.uid in {one.uid for _, one in self.waiting}
            if waits:
                ids = {NONE_YET}
            if place in told.duplicates:
                assert told.duplicates[place] in ids, f"{message.uid} is a duplicate of {ids}"
            else:
                assert not waits, f"{message.uid} waits already"
                assert age >= self.partition.dedupe_ms, f"{message.uid} was published {age} ms ago"
                self.waiting.append((due, message))
                marks.pop(message.uid, None)  # while it waits it needs none
        assert told.kept == len(batch) - len(told.duplicates)
        assert told.next_due_ms == self.next_due

    def promote(self, now: int, epoch: int, limit: int, told: PromoteResult) -> None:
        """Check what fell due, and follow it."""
        due = sorted((one for one in self.waiting if one[0] <= now), key=lambda one: one[0])[:limit]
        for one in due:
            self.waiting.remove(one)
        partition = self.partition
        kept = due if partition.subscriptions else []
        for _, (key, uid, about) in kept:
            partition.last += 1
            entry = Entry(partition.last, f"{epoch}-{partition.last}", key, uid, f"{now} {about}")
            partition.log[entry.number] = entry
            partition.marks[uid] = (now, entry.id)
            for subscription in partition.subscriptions.values():
                subscription.owe(entry)
        for _, (_, uid, about) in due if not kept else []:
            partition.doom(Entry(0, "", "", uid, f"{now} {about}"))
        assert (told.appended, told.dropped) == (len(kept), len(due) - len(kept))
        assert told.last == partition.last
        assert told.next_due_ms == self.next_due


class DelayMachine(BrokerMachine):
    """Everything that may happen, and messages for later besides."""

    mode = "key_shared"
    later: Later | None = None

    @property
    def waiting(self) -> Later:
        """The model of what waits."""
        if self.later is None:
            self.later = Later(self.both.partition)
        return self.later

    @rule(
        items=st.lists(
            st.tuples(st.sampled_from((*KEYS, *KEYS, 0, 4)), st.sampled_from(DELAYS_MS)),
            min_size=1,
            max_size=8,
        )
    )
    def delay(self, items: list[Item]) -> None:
        """Publish messages for later, some of them a second time."""
        batch, dues = [], []
        for what, delay in items:
            if isinstance(what, str):
                self.uids.append(f"u{9_999 - len(self.uids)}")  # they sort the other way round
                batch.append(Outgoing(what, self.uids[-1], "1  7 "))  # it has a body
            elif what < len(self.uids):
                batch.append(Outgoing("a", self.uids[-1 - what], "again"))
            else:
                continue
            dues.append(self.both.now + delay)
        if batch:
            by_clock = [due - self.both.world.time.back_ms for due in dues]
            step = self.both.engine.delay(self.both.lease, batch, by_clock)
            told = self.both.do("delay", step, batch, "until", dues)
            self.waiting.delay(self.both.now, batch, dues, told)

    @rule(
        limit=st.sampled_from((500, 500, 2)),
        awaited=st.booleans(),
        deserted=st.sampled_from((False,) * 9 + (True,)),
    )
    def promote(self, limit: int, awaited: bool, deserted: bool) -> None:
        """Append what is due, perhaps at the very instant at which the next one is, and nobody is there."""
        for name in list(self.both.partition.subscriptions) if deserted else []:
            self.both.delete_subscription(name)
        due = self.waiting.next_due
        if awaited and due > self.both.now:
            self.both.advance(due - self.both.now)
        before = list(self.waiting.waiting)
        told = self.both.do("promote", self.both.engine.promote(self.both.lease, limit))
        self.waiting.promote(self.both.now, self.both.lease.epoch, limit, told)
        gone = [one for one in before if one not in self.waiting.waiting]
        if told.dropped and gone:
            self.both.publish([Outgoing("a", gone[0][1].uid, "again")])  # nothing is left of it

    @invariant()
    def what_waits_is_there(self) -> None:
        """No more and no less, and a lease that was just taken tells when the next is due."""
        [count] = self.both.world.run(self.both.engine.store.read_all([("ZCARD", self.both.keys.delayed)]))
        assert count == len(self.waiting.waiting)


@pytest.mark.slow
def test_messages_for_later_keep_the_contract_in_a_few_runs(server_url: str) -> None:
    """A short exploration, for every change."""
    explore(DelayMachine, server_url, FEW)


@pytest.mark.slow
def test_messages_for_later_keep_the_contract_in_many_runs(server_url: str) -> None:
    """A longer exploration."""
    explore(DelayMachine, server_url, MANY)


class Defect(NamedTuple):
    """A change that breaks the contract: in which file, and what becomes of a text that is there once."""

    file: str
    text: str
    becomes: str


DEFECTS = {
    "what waits is kept twice": Defect(
        "partition/delay", "look_up(marks, delayed_data, batch)", "look_up(marks, 'none', batch)"
    ),
    "what waits is published besides": Defect(
        "partition/publish",
        "look_up(marks, delayed_data, batch, tags)",
        "look_up(marks, 'none', batch, tags)",
    ),
    "what nobody was there for leaves a mark": Defect(
        "partition/promote",
        "  if at and (owed or wanted) then",
        "  mark(marks, { uid, '0-0' }, {})\n  if at and (owed or wanted) then",
    ),
    "what is due does not know how far the clock went back": Defect(
        "partition/delay", "dues[index] + lead", "dues[index]"
    ),
    "what is due together is sorted by uid": Defect(
        "partition/delay", "string.format('%015.0f ', number)", "string.format('%015.0f ', 1)"
    ),
    "what is due leaves no mark": Defect(
        "partition/promote", "    ids[#ids + 1] = id\n", "    ids[#ids + 1] = '0-0'\n"
    ),
    "a message is appended and stays": Defect(
        "partition/promote", "call_with('ZREM', delayed, members)\n", ""
    ),
    "what is due too late is appended": Defect("partition/promote", "'-inf', now,", "'-inf', now + 1000,"),
    "what nobody is there for is kept": Defect(
        "partition/promote", "if at and (owed or wanted) then", "if at then"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_the_machine_finds_out_that(name: str, server_url: str) -> None:
    """Plant the defect, and expect a failure."""
    file, text, becomes = DEFECTS[name]
    sources = read_sources()
    assert sources[file].count(text) == 1, f"{text!r} is there once in {file}.lua"
    sources[file] = sources[file].replace(text, becomes)
    with pytest.raises((AssertionError, ValueError)):
        explore(DelayMachine, server_url, UNTIL_FOUND, sources=sources, planted=True)
