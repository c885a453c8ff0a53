"""Exclusive and failover subscriptions, where the whole partition is one lane, against the model."""

import pytest

from tests.model.machine import FEW, MANY, SECONDS, BrokerMachine, explore
from tests.model.machines import ExclusiveMachine, FailoverMachine

pytestmark = pytest.mark.timeout(SECONDS)


MACHINES = (ExclusiveMachine, FailoverMachine)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_partition_order_keeps_the_contract_in_a_few_runs(
    machine: type[BrokerMachine], server_url: str
) -> None:
    """A short exploration, for every change."""
    explore(machine, server_url, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_partition_order_keeps_the_contract_in_many_runs(
    machine: type[BrokerMachine], server_url: str
) -> None:
    """A longer exploration."""
    explore(machine, server_url, MANY)
