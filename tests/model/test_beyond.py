"""Lanes with more in flight than their records have room for, against the model.

There is room for one range, in runs with holes for two, and whatever goes step by step takes the smallest of
steps.
"""

import pytest

from keylane_broker.store.scripts import read_sources
from tests.model.machine import ALL, FEW, MANY, SECONDS, BrokerMachine, explore, small_steps, with_little_room
from tests.model.machines import (
    ExclusiveMachine,
    FailoverJournal,
    FailoverMachine,
    FilteredShared,
    KeySharedJournal,
    KeySharedMachine,
)

pytestmark = pytest.mark.timeout(SECONDS)

MACHINES = (ExclusiveMachine, FailoverMachine, KeySharedMachine, FilteredShared)


def explore_long_lanes(
    machine: type[BrokerMachine], url: str, rounds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Explore with little room and small steps."""
    small_steps(monkeypatch)
    explore(machine, url, rounds, sources=with_little_room(read_sources()))


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_long_lanes_keep_the_contract_in_a_few_runs(
    machine: type[BrokerMachine], server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short exploration, for every change."""
    explore_long_lanes(machine, server_url, FEW, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_long_lanes_keep_the_contract_in_many_runs(
    machine: type[BrokerMachine], server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer exploration."""
    explore_long_lanes(machine, server_url, MANY, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [KeySharedJournal, FailoverJournal])
def test_the_journal_tells_all_of_long_lanes(
    machine: type[BrokerMachine], server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    explore_long_lanes(machine, server_url, ALL, monkeypatch)
