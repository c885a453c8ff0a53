"""Sessions of consumers, in virtual time."""

import asyncio

import pytest
from fakeredis import FakeServer

from keylane_broker.engine.values import SubscriptionSettings
from tests.support.peer import Stream, publish
from tests.support.small_worker import SmallWorker
from tests.support.virtual_time import in_virtual_time


@pytest.mark.slow
@in_virtual_time
async def test_a_lost_consumers_messages_come_to_others_when_its_session_ends_and_theirs_are_renewed(
    server: FakeServer,
) -> None:
    async with SmallWorker(server, topic=("t", 1), session=10.0) as worker:
        renewing = asyncio.create_task(worker.background.repeat(10.0 / 3, worker.sessions.renew_sessions))
        lost, stays = (
            Stream(await worker.connect(), "t", "s", "lost"),
            Stream(await worker.connect(), "t", "s", "stays"),
        )
        await worker.engine.create_subscription("t", "s", SubscriptionSettings(lease_ms=3_600_000))
        await lost.open(permits=1)
        await publish(lost.peer, "t", 0, "a")
        await lost.receive(1)
        await stays.open()
        await asyncio.sleep(25)  # more than two sessions: they are renewed
        assert await stays.waiting() == []
        began = asyncio.get_running_loop().time()
        await lost.peer.close()
        [item] = await stays.receive(1)
        assert item.uid == "a"
        waited = asyncio.get_running_loop().time() - began
        assert 10 - 10 / 3 <= waited <= 10.05  # since its last renewal
        renewing.cancel()


@in_virtual_time
async def test_those_who_stay_are_renewed_soon_after_somebody_is_lost(server: FakeServer) -> None:
    async with SmallWorker(server, topic=("t", 1), session=3_600.0) as worker:
        lost, stays = (
            Stream(await worker.connect(), "t", "s", "lost"),
            Stream(await worker.connect(), "t", "s", "stays"),
        )
        await lost.open()
        await stays.open()
        renewed: list[tuple[float, list[str]]] = []
        renew_all_sessions, loop = worker.engine.renew_all_sessions, asyncio.get_running_loop()

        async def noted(lease, subscription, consumers, session_ms):  # type: ignore[no-untyped-def]
            renewed.append((loop.time(), list(consumers)))
            return await renew_all_sessions(lease, subscription, consumers, session_ms)

        worker.engine.renew_all_sessions = noted  # type: ignore[method-assign, assignment]
        began = loop.time()
        await lost.peer.close()
        await asyncio.sleep(5)
        assert [(round(at - began, 1), names) for at, names in renewed] == [(0.2, ["stays"])]
