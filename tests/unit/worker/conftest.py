"""Fixtures of the tests of a worker's parts."""

import pytest
from fakeredis import FakeServer


@pytest.fixture
def server() -> FakeServer:
    """A Redis that is none, empty."""
    return FakeServer()
