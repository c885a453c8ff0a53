"""Shared subscriptions against the model."""

import pytest

from tests.model.machine import FEW, MANY, SECONDS, BrokerMachine, explore

pytestmark = pytest.mark.timeout(SECONDS)


class SharedMachine(BrokerMachine):
    """A shared subscription beside another one."""

    mode = "shared"


def test_shared_keeps_the_contract_in_a_few_runs(server_url: str) -> None:
    """A short exploration, for every change."""
    explore(SharedMachine, server_url, examples=FEW)


@pytest.mark.slow
def test_shared_keeps_the_contract_in_many_runs(server_url: str) -> None:
    """A longer exploration."""
    explore(SharedMachine, server_url, examples=MANY)
