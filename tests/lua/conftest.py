"""The engine on every server that the scripts must run on; each test ends with a look at what it left."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from loadtest.topology import single_server, three_node_cluster
from tests.conftest import BINARIES
from tests.support.clock import ManualTime
from tests.support.fake import FakeTime, fake_engine

SERVERS = [name for name, path in BINARIES.items() if path]
CLUSTERS = [f"{name} cluster" for name in SERVERS]


class Backends:
    """Servers and clusters by name, each started when it is first asked for."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._urls: dict[str, str] = {}

    def url(self, name: str) -> str:
        """The address of a server or a cluster, for Engine.connect."""
        if name not in self._urls:
            binary = BINARIES[name.removesuffix(" cluster")]
            if name in CLUSTERS:
                cluster = self._stack.enter_context(three_node_cluster(binary=binary))
                self._urls[name] = cluster.url.replace("redis://", "redis+cluster://")
            else:
                self._urls[name] = self._stack.enter_context(single_server(binary=binary)).url
        return self._urls[name]


@pytest.fixture(scope="session")
def backends() -> Iterator[Backends]:
    """All servers of this test process; they go when it does."""
    with contextlib.ExitStack() as stack:
        yield Backends(stack)


@pytest.fixture(params=["fake", *SERVERS, *CLUSTERS])
async def engine(request: pytest.FixtureRequest, backends: Backends, topic: str) -> AsyncIterator[Engine]:
    """An engine on fakeredis, on each server and on a cluster of each."""
    name: Any = request.param
    engine = fake_engine() if name == "fake" else Engine.connect(backends.url(name))
    yield engine
    await look_and_leave(engine, topic)


@pytest.fixture(params=["fake", *SERVERS])
async def timed(request: pytest.FixtureRequest, backends: Backends, topic: str) -> AsyncIterator[ManualTime]:
    """An engine whose clock the test moves; on a cluster no script could reach the clock's key."""
    name: Any = request.param
    time = FakeTime() if name == "fake" else ManualTime(backends.url(name))
    await time.start()
    yield time
    await look_and_leave(time.engine, topic)


async def look_and_leave(engine: Engine, topic: str) -> None:
    """Check the keyspace's invariants, delete the topic, and see that nothing of it stays."""
    try:
        if topic in await engine.topics():
            assert await check_topic(engine, topic) == []
            await engine.delete_topic(topic)
        assert await engine.store.keys_like(f"*{topic}*") == set()
    finally:
        await engine.close()
