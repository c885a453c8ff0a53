"""Priorities, against the model: larger goes first where no order is promised, and all else holds."""

from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from keylane_broker.engine.values import Capacity, Outgoing
from keylane_broker.store.scripts import read_sources
from tests.model.machine import FEW, MANY, SECONDS, UNTIL_FOUND, BrokerMachine, Item, explore, names
from tests.model.machines import FailoverMachine, FilteredShared, SharedMachine

pytestmark = pytest.mark.timeout(SECONDS)


class Ranked(BrokerMachine):
    """Everything that may happen, and messages with priorities."""

    @rule(
        ranks=st.lists(st.sampled_from((0, 0, 0, 1, 1, 5, 9)), min_size=1, max_size=9),
        name=names,
        permits=st.sampled_from((0, 1, 3)),
    )
    def publish_ranked(self, ranks: list[int], name: str, permits: int) -> None:
        """Publish messages of which some have a priority, and perhaps lease a few."""
        messages = []
        for _ in ranks:
            self.uids.append(f"u{len(self.uids)}")
            messages.append(Outgoing("aab"[len(self.uids) % 3], self.uids[-1], "1  7 "))
        self.both.publish(messages, priorities={place: rank for place, rank in enumerate(ranks) if rank})
        if permits:
            self.fetch(
                name, list[Item](), [Capacity("c1", permits, 5_000)], 1_000, joined=True, settled=False
            )


class SharedRanked(Ranked, SharedMachine):
    """With a shared subscription."""


class FilteredRanked(Ranked, FilteredShared):
    """With a shared subscription to some of them."""


class FailoverRanked(Ranked, FailoverMachine):
    """With a failover subscription, which ignores them."""


MACHINES = [SharedRanked, FilteredRanked, FailoverRanked]


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_larger_goes_first_in_a_few_runs(machine: type[BrokerMachine], server_url: str) -> None:
    """A short exploration, for every change."""
    explore(machine, server_url, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_larger_goes_first_in_many_runs(machine: type[BrokerMachine], server_url: str) -> None:
    """A longer exploration."""
    explore(machine, server_url, MANY)


class Defect(NamedTuple):
    """A change that breaks a promise: in which file, and what becomes of a text that is there once."""

    machine: type[BrokerMachine]
    file: str
    text: str
    becomes: str


DEFECTS = {
    "nothing is set aside": Defect(
        SharedRanked, "subscription/fetch", "if ranked and mode", "if false and mode"
    ),
    "smaller goes first": Defect(SharedRanked, "lib/fetch/urgent", "10 - run[3]", "run[3]"),
    "fresh messages go before those that were set aside": Defect(
        SharedRanked, "subscription/fetch", "  turn = '0' -- what waits comes first\n", ""
    ),
    "what lies between is lost": Defect(
        SharedRanked, "lib/fetch/urgent", "        add(call.cursor + 1, entry - 1, 0)\n", ""
    ),
    "what was skipped comes back": Defect(
        SharedRanked,
        "lib/fetch/urgent",
        "elseif newest and call.cursor < call.sparse then",
        "elseif false then",
    ),
    "what was set aside matches still": Defect(
        FilteredRanked,
        "lib/fetch/urgent",
        "redis.call('ZREMRANGEBYSCORE', call.matches, number, number) == 1",
        "true",
    ),
    "a run goes on behind what has a priority": Defect(
        FilteredRanked, "lib/fetch/fresh", "redis.call('ZCOUNT', runs, '(' .. first, last) > 0", "false"
    ),
    "a failover follows priorities": Defect(
        FailoverRanked, "subscription/fetch", "if ranked and mode == 'shared' then", "if ranked then"
    ),
    "what has left the log keeps its priority": Defect(
        SharedRanked, "lib/forget", "    drop_priorities(ranges)\n", ""
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_the_machine_finds_out_that(name: str, server_url: str) -> None:
    """Plant the defect, and expect a failure."""
    machine, file, text, becomes = DEFECTS[name]
    sources = read_sources()
    assert sources[file].count(text) == 1, f"{text!r} is there once in {file}.lua"
    sources[file] = sources[file].replace(text, becomes)
    with pytest.raises((AssertionError, ValueError)):
        explore(machine, server_url, UNTIL_FOUND, sources=sources, planted=True)
