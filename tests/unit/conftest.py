"""Fixtures of the unit tests."""

import socket

import pytest


@pytest.fixture
def unused_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
