"""The model's own assertions are to show their values, as those of the tests do."""

import pytest

pytest.register_assert_rewrite("tests.model.model", "tests.model.pair")


@pytest.fixture(autouse=True)
def few_receipts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have even a few receipts given back and extended in several steps."""
    monkeypatch.setattr("broker.receipts.AT_ONCE", 2)
