"""Shared subscriptions against the model."""

import pytest

from tests.model.machine import FEW, MANY, SECONDS, explore
from tests.model.machines import SharedMachine

pytestmark = pytest.mark.timeout(SECONDS)


@pytest.mark.slow
def test_shared_keeps_the_contract_in_a_few_runs(server_url: str) -> None:
    """A short exploration, for every change."""
    explore(SharedMachine, server_url, FEW)


@pytest.mark.slow
def test_shared_keeps_the_contract_in_many_runs(server_url: str) -> None:
    """A longer exploration."""
    explore(SharedMachine, server_url, MANY)
