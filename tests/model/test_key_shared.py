"""Key-shared subscriptions against the model."""

import pytest

from tests.model.machine import FEW, MANY, SECONDS, explore
from tests.model.machines import KeySharedMachine

pytestmark = pytest.mark.timeout(SECONDS)


@pytest.mark.slow
def test_key_shared_keeps_the_contract_in_a_few_runs(server_url: str) -> None:
    """A short exploration, for every change."""
    explore(KeySharedMachine, server_url, FEW)


@pytest.mark.slow
def test_key_shared_keeps_the_contract_in_many_runs(server_url: str) -> None:
    """A longer exploration."""
    explore(KeySharedMachine, server_url, MANY)
