"""Clusters of real workers for the tests of this folder."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from keylane_broker.engine.engine import Engine
from tests.support.peer import Peer, connect
from tests.support.running import RunningBroker


@pytest.fixture(scope="module")
def three() -> Iterator[RunningBroker]:
    """Three workers that the tests of a module share; whoever kills one makes their own."""
    with RunningBroker(workers=3) as broker:
        yield broker


@pytest.fixture
async def engine(three: RunningBroker) -> AsyncIterator[Engine]:
    """An eye on the Redis of the three."""
    engine = Engine.connect(three.redis_url)
    yield engine
    await engine.close()


@pytest.fixture
async def peers(three: RunningBroker) -> AsyncIterator[dict[str, Peer]]:
    """A connection to each of the three, by worker."""
    async with AsyncExitStack() as stack:
        yield {
            worker: await stack.enter_async_context(connect(url))
            for worker, url in zip(three.ids, three.urls, strict=True)
        }
