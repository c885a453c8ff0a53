"""Dead letters and what is redriven against a model: each message is in one place, and its body as well."""

import pytest

from tests.model.machine import FEW, MANY, SECONDS, explore
from tests.model.redriving import RedriveMachine

pytestmark = pytest.mark.timeout(SECONDS)


@pytest.mark.slow
def test_what_is_redriven_comes_back_once_and_in_order(server_url: str) -> None:
    """A short exploration."""
    explore(RedriveMachine, server_url, FEW)


@pytest.mark.slow
def test_what_is_redriven_comes_back_once_and_in_order_in_many_runs(server_url: str) -> None:
    """A longer exploration."""
    explore(RedriveMachine, server_url, MANY)
