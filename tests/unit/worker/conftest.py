"""Fixtures of the tests of a worker's parts."""

import pytest
from fakeredis import FakeServer

from tests.support.fake import TurningServer


@pytest.fixture(params=[FakeServer, TurningServer], ids=["one by one", "in turns"])
def server(request: pytest.FixtureRequest) -> FakeServer:
    """A Redis that is none, empty; its workers do what they can one by one, or in turns."""
    made: FakeServer = request.param()
    return made
