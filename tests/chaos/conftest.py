"""Fixtures of the tests that kill: they run with the scripts for the ordinary case forced on and off."""

import pytest


@pytest.fixture(params=["always", "never"], ids=["in turns", "one by one"])
def turns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether workers that are started from now on try to store, lease and settle in one call."""
    monkeypatch.setenv("TURNS", request.param)
    return str(request.param)
