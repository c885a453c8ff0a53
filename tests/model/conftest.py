"""The model's own assertions are to show their values, as those of the tests do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.topology import single_server

pytest.register_assert_rewrite("tests.model.model", "tests.model.pair")


@pytest.fixture(scope="session")
def server_url(server_binary: Path) -> Iterator[str]:
    """The address of a server for this folder: by a Unix socket, since they ask it so often."""
    with single_server(binary=server_binary, config={"unixsocket": "socket"}) as server:
        yield f"unix://{server.data_dir}/socket"


@pytest.fixture(autouse=True)
def small_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have even a few receipts settled in several steps, and keys told in stretches where nothing waits."""
    monkeypatch.setattr("keylane_broker.engine.receipts.AT_ONCE", 2)
    monkeypatch.setattr("keylane_broker.engine.tail._BLOCKED", -1)
    monkeypatch.setattr("keylane_broker.engine.leases._RELEASE", 600.0)  # the machine may be busy
