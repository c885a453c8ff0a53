"""Filtered subscriptions against the model: what does not match is never owed, whatever else happens."""

import pytest

from tests.model.machine import FEW, MANY, SECONDS, explore
from tests.model.machines import (
    BesideFiltered,
    FilteredFailover,
    FilteredKeyShared,
    FilteredShared,
    JournalMachine,
)

pytestmark = [pytest.mark.timeout(SECONDS), pytest.mark.slow]

MACHINES = (FilteredShared, FilteredKeyShared, FilteredFailover, BesideFiltered)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two entries are compared in each call."""
    monkeypatch.setattr("keylane_broker.engine.base.STEP", 2)


@pytest.mark.parametrize("machine", MACHINES)
def test_filters_keep_the_contract_in_a_few_runs(machine: type[JournalMachine], server_url: str) -> None:
    """A short exploration, for every change."""
    explore(machine, server_url, FEW)


@pytest.mark.parametrize("machine", MACHINES)
def test_filters_keep_the_contract_in_many_runs(machine: type[JournalMachine], server_url: str) -> None:
    """A longer exploration."""
    explore(machine, server_url, MANY)
