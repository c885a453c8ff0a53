"""A subscription that is read by position, beside others of all modes, against the model."""

import pytest

from tests.model.cursor import CursorMachine
from tests.model.machine import FEW, MANY, SECONDS, explore

pytestmark = pytest.mark.timeout(SECONDS)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have even small commits take several steps."""
    monkeypatch.setattr("keylane_broker.engine.cursor_reader.MAX_BATCH", 3)


@pytest.mark.slow
def test_a_reader_and_consumers_keep_the_contract_in_a_few_runs(server_url: str) -> None:
    """A short exploration, for every change."""
    explore(CursorMachine, server_url, FEW)


@pytest.mark.slow
def test_a_reader_and_consumers_keep_the_contract_in_many_runs(server_url: str) -> None:
    """A longer exploration."""
    explore(CursorMachine, server_url, MANY)
