"""The scripts for the ordinary case against the model: what they do not do is left to the others."""

import pytest

from tests.model.machine import FEW, MANY, SECONDS, explore
from tests.model.ordinary import FailoverOrdinary, KeySharedOrdinary, OrdinaryMachine, SharedOrdinary

pytestmark = pytest.mark.timeout(SECONDS)

MACHINES = (SharedOrdinary, KeySharedOrdinary, FailoverOrdinary)


def explore_turns(machine: type[OrdinaryMachine], url: str, rounds: range) -> None:
    """Explore, and see that the ordinary case came up."""
    machine.counted.clear()
    explore(machine, url, rounds)
    assert machine.counted["ack"]
    assert machine.counted["turn"] or machine is FailoverOrdinary
    assert machine.counted["lease"] or machine is FailoverOrdinary or rounds is FEW


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_turns_keep_the_contract_in_a_few_runs(machine: type[OrdinaryMachine], server_url: str) -> None:
    """A short exploration, for every change."""
    explore_turns(machine, server_url, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_turns_keep_the_contract_in_many_runs(machine: type[OrdinaryMachine], server_url: str) -> None:
    """A longer exploration."""
    explore_turns(machine, server_url, MANY)
