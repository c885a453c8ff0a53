"""The engine on every server that the scripts must run on; each test ends with a look at what it left."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from keylane_broker.engine.engine import Engine
from tests.support.clock import ManualTime
from tests.support.fake import FakeTime, fake_engine
from tests.support.servers import CLUSTERS, SERVERS, Backends, look_and_leave

# Most of the time of this folder goes into these: `make test-fast` leaves them out.
ELSEWHERE = [pytest.param(name, marks=pytest.mark.slow) for name in ("fake", *CLUSTERS)]


@pytest.fixture(scope="session")
def backends() -> Iterator[Backends]:
    """All servers of this test process; they go when it does."""
    with contextlib.ExitStack() as stack:
        yield Backends(stack)


@pytest.fixture(params=[*SERVERS, *ELSEWHERE])
async def engine(request: pytest.FixtureRequest, backends: Backends, topic: str) -> AsyncIterator[Engine]:
    """An engine on fakeredis, on each server and on a cluster of each."""
    name: Any = request.param
    engine = fake_engine() if name == "fake" else backends.engine(name)
    yield engine
    await look_and_leave(engine, topic)


@pytest.fixture(params=[*SERVERS, ELSEWHERE[0]])
async def timed(request: pytest.FixtureRequest, backends: Backends, topic: str) -> AsyncIterator[ManualTime]:
    """An engine whose clock the test moves; on a cluster no script could reach the clock's key."""
    name: Any = request.param
    time = FakeTime() if name == "fake" else ManualTime(backends.url(name))
    await time.start()
    yield time
    await look_and_leave(time.engine, topic)
