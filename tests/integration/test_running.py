"""The broker of the tests does what tests ask of it."""

import anyio.to_thread
import psutil
import pytest
from redis.asyncio import Redis

from keylane import AsyncClient
from tests.support.running import RunningBroker

pytestmark = pytest.mark.slow  # several processes


async def test_workers_can_be_killed_stopped_paused_and_added() -> None:
    """Each by itself, on a port and under a name that stay."""
    with RunningBroker(workers=2) as broker:
        assert broker.ids == ["worker-0", "worker-1"]
        assert broker.url == f"{broker.urls[0]},{broker.urls[1].removeprefix('keylane://')}"
        before = [broker.pid_of(0), broker.pid_of(1)]
        broker.kill_worker(1)
        broker.start_worker(1)
        assert broker.stop_worker(1) == 0
        broker.start_worker(1)
        assert broker.pid == before[0]
        assert broker.pid_of(1) != before[1]
        added = broker.add_worker()
        broker.pause(added)
        assert psutil.Process(broker.pid_of(added)).status() == psutil.STATUS_STOPPED
        broker.resume(added)
        for name, url in zip(broker.ids, broker.urls, strict=True):
            async with AsyncClient(url) as client:
                assert (await client.info()).worker == name
        broker.pause(0)  # one that is paused is ended, too
        pids = [broker.pid_of(number) for number in range(3)]
    assert not any(map(psutil.pid_exists, pids))


async def test_two_brokers_can_share_a_server(server_url: str) -> None:
    """With names of their own."""
    with RunningBroker(server_url, name="left") as left, RunningBroker(server_url, name="right") as right:
        assert (left.ids, right.ids) == (["left-0"], ["right-0"])
        assert left.redis_url == right.redis_url


async def test_a_worker_that_starts_waits_for_a_redis_that_is_slow() -> None:
    """As on a machine that is busy, or at the end of a long script."""
    with RunningBroker() as broker:
        async with Redis.from_url(broker.redis_url) as redis:
            await redis.client_pause(4_000, all=False)
            await anyio.to_thread.run_sync(broker.add_worker)
        async with AsyncClient(broker.urls[1]) as client:
            assert len((await client.info()).workers) == 2
