"""The model's own assertions are to show their values, as those of the tests do."""

import pytest

pytest.register_assert_rewrite("tests.model.model", "tests.model.pair")


@pytest.fixture(autouse=True)
def small_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have even a few receipts settled in several steps, and keys told in stretches where nothing waits."""
    monkeypatch.setattr("keylane_broker.engine.receipts.AT_ONCE", 2)
    monkeypatch.setattr("keylane_broker.engine.tail._BLOCKED", -1)
