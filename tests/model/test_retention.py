"""What stays when everybody has settled it, against the model: for just so long after the last settlement."""

from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from keylane_broker.engine.values import Capacity, TopicSettings
from keylane_broker.store.scripts import read_sources
from tests.model.machine import (
    FEW,
    MANY,
    SECONDS,
    UNTIL_FOUND,
    BrokerMachine,
    Item,
    batches,
    explore,
    names,
)
from tests.model.pair import DEDUPE_MS

pytestmark = pytest.mark.timeout(SECONDS)

KEPT_MS = 6_000


class RetentionMachine(BrokerMachine):
    """Everything that may happen where messages stay for a while, replays among it."""

    mode = "key_shared"
    settings = TopicSettings(dedupe_ms=DEDUPE_MS, retention_ms=KEPT_MS)

    @rule(
        limit=st.sampled_from((500, 3, 1)),
        ms=st.sampled_from((0, 0, 1_000, KEPT_MS)),
        early_ms=st.sampled_from((0, 1, None)),
        settled=st.booleans(),
    )
    def trim(self, limit: int, ms: int, early_ms: int | None, settled: bool) -> None:
        """Drop what is due, perhaps at the very instant at which the next one is, or just before."""
        if settled:
            self.settle(self.both.latest)
        self.both.partition.forget()
        due = min(self.both.partition.settled.values(), default=0) + KEPT_MS
        if early_ms is not None and due - early_ms > self.both.now:
            self.both.advance(due - early_ms - self.both.now)
        elif ms:
            self.both.advance(ms)
        self.both.trim(limit)

    @rule(
        name=names,
        how=st.sampled_from(("seek", "delete")),
        position=st.sampled_from(("earliest", 2, "latest")),
        ms=st.sampled_from((1_000, 5_000)),
        again=st.booleans(),
    )
    def replay(self, name: str, how: str, position: str | int, ms: int, again: bool) -> None:
        """Settle what there is, go back to it, settle it again, and trim when it would have gone before."""
        self.see_to_leases(name)
        self.settle(name)
        self.both.advance(ms)
        if how == "seek":
            self.both.seek(name, position)
        else:
            self.both.delete_subscription(name)
            self.both.create_subscription(name, position)
        if again:
            self.fetch(name, [], [Capacity("c1", 1_000, 30_000)], 1_000, joined=True, settled=False)
            self.settle(name)
        self.both.advance(KEPT_MS - ms)
        self.both.trim(500)

    @rule(batch=batches, limit=st.sampled_from((500, 2)))
    def desert(self, batch: list[Item], limit: int) -> None:
        """Publish while nobody is there."""
        for name in list(self.both.partition.subscriptions):
            self.both.delete_subscription(name)
        self.publish(batch)
        self.both.partition.forget()
        self.both.advance(KEPT_MS)
        self.both.trim(limit)

    def settle(self, name: str) -> None:
        """Ack all that is leased."""
        if receipts := self.both.live(name):
            self.both.ack(name, receipts)


@pytest.mark.slow
def test_what_stays_keeps_the_contract_in_a_few_runs(server_url: str) -> None:
    """A short exploration, for every change."""
    explore(RetentionMachine, server_url, FEW)


@pytest.mark.slow
def test_what_stays_keeps_the_contract_in_many_runs(server_url: str) -> None:
    """A longer exploration."""
    explore(RetentionMachine, server_url, MANY)


class Defect(NamedTuple):
    """A change that breaks the contract: in which file, and what becomes of a text that is there once."""

    file: str
    text: str
    becomes: str


DEFECTS = {
    "what is trimmed leaves its body": Defect("partition/trim", "doom_bodies(gone", "flat(gone"),
    "something is trimmed too early": Defect("partition/trim", "at + ms or END", "at + ms - 1 or END"),
    "something is trimmed too late": Defect("partition/trim", "at + ms or END", "at + ms + 1 or END"),
    "what a call has no room for is left for ever": Defect(
        "partition/trim", "return left > 0 or from > last", "return true"
    ),
    "the next call begins the oldest record anew, and trims what is owed again": Defect(
        "partition/trim", "from, left = 0, left - 1", "left = left - 1"
    ),
    "a replay does not hold what it has read": Defect(
        "partition/trim", "void = math.min(", "local _ = math.min("
    ),
    "a replay is remembered for ever": Defect(
        "partition/trim", "replays[#replays][4] ~= item[1]", "replays[#replays][4] == item[1]"
    ),
    "a seek does not begin a replay": Defect("subscription/seek", "if limited and", "if false and"),
    "a new subscription does not begin a replay": Defect(
        "subscription/create", "if limited and", "if false and"
    ),
    "what is published without a subscription stays for ever": Defect(
        "partition/publish", "if limited and", "if false and"
    ),
    "a deleted subscription leaves what it was owed for ever": Defect(
        "subscription/drop_unowed", "ranges = { { from, reached } }", "ranges = {}"
    ),
    "an ack drops what should stay": Defect("lib/forget", "  if limited then", "  if false then"),
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
        explore(RetentionMachine, server_url, UNTIL_FOUND, sources=sources, planted=True)
