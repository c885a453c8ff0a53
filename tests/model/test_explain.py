"""Explain, against the model: of every message and both subscriptions it says what is so."""

from typing import NamedTuple

import pytest
from hypothesis.stateful import rule

from keylane_broker.store.scripts import read_sources
from tests.model.expiring import Expiring
from tests.model.machine import FEW, MANY, SECONDS, UNTIL_FOUND, BrokerMachine, explore, names
from tests.model.machines import (
    FailoverMachine,
    FilteredKeyShared,
    FilteredShared,
    KeySharedMachine,
    SharedMachine,
)

pytestmark = pytest.mark.timeout(SECONDS)


class Explained(BrokerMachine):
    """Everything that may happen, and somebody who asks."""

    @rule(name=names)
    def explain(self, name: str) -> None:
        """Ask what becomes of the newest and the oldest messages."""
        last = self.both.partition.last
        for number in sorted({*range(1, 7), *range(last - 8, last + 2)}):
            if number > 0:
                self.both.explain(name, number)


class SharedExplained(Explained, SharedMachine):
    """With a shared subscription."""


class KeySharedExplained(Explained, Expiring, KeySharedMachine):
    """With a key-shared subscription, and messages that expire."""


class FailoverExplained(Explained, FailoverMachine):
    """With a failover subscription."""


class FilteredExplained(Explained, FilteredKeyShared):
    """With filters."""


class HoledExplained(Explained, FilteredShared):
    """With runs that have holes."""


MACHINES = [SharedExplained, KeySharedExplained, FailoverExplained, FilteredExplained, HoledExplained]


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_what_it_says_is_so_in_a_few_runs(machine: type[BrokerMachine], server_url: str) -> None:
    """A short exploration, for every change."""
    explore(machine, server_url, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_what_it_says_is_so_in_many_runs(machine: type[BrokerMachine], server_url: str) -> None:
    """A longer exploration."""
    explore(machine, server_url, MANY)


class Defect(NamedTuple):
    """A change that makes it lie: in which file, and what becomes of a text that is there once."""

    machine: type[BrokerMachine]
    file: str
    text: str
    becomes: str


DEFECTS = {
    "a parked lane only waits": Defect(
        KeySharedExplained, "message/explain", "record.due == PARKED and", "false and"
    ),
    "what comes behind a parked partition is fresh": Defect(
        FailoverExplained, "lib/fate", "return get_lane(WHOLE)", "return nil"
    ),
    "each message of a parked lane is its head": Defect(
        KeySharedExplained, "message/explain", "head ~= entry and id_of(head) or ''", "''"
    ),
    "a dead letter of another subscription is taken for its own": Defect(
        SharedExplained, "lib/fate", "== text and item[2][6] == incarnation then", "== text then"
    ),
    "a dead letter in the outbox is settled": Defect(
        SharedExplained, "lib/fate", "handing, to = 1, item[2][4]", "handing, to = 0, item[2][4]"
    ),
    "what has expired for one has expired for all": Defect(
        KeySharedExplained, "lib/fate", "if item[2][at] == name then", "if true then"
    ),
    "what has expired is not remembered": Defect(
        KeySharedExplained, "partition/expire_messages", "if #remembered > 0 then", "if false then"
    ),
    "what has expired and is not gone yet is to come": Defect(
        KeySharedExplained, "message/explain", "or END) <= now", "or END) <= 0"
    ),
    "what does not match is settled": Defect(
        FilteredExplained, "message/explain", "entry >= begins and is_filtered()", "false"
    ),
    "what is filtered was never for it to see": Defect(
        FilteredExplained, "message/explain", "entry >= begins and is_filtered()", "is_filtered()"
    ),
    "one is subscribed from the first message on": Defect(
        SharedExplained, "lib/fate", "if entry < begins then", "if false then"
    ),
    "what comes next has been": Defect(SharedExplained, "lib/fate", "entry > last_entry or", "false or"),
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
