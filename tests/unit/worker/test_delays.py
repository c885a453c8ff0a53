"""Messages for later, in virtual time: each at its instant, whoever serves the partition then."""

import asyncio

from fakeredis import FakeServer

from keylane import wire
from tests.support.peer import Peer, Stream, messages
from tests.support.small_worker import SmallWorker
from tests.support.virtual_time import in_virtual_time


async def publish_in(peer: Peer, worker: SmallWorker, **seconds: float) -> None:
    """Publish messages for later, by uid."""
    due_ms = [worker.clock.now_ms() + round(later * 1_000) for later in seconds.values()]
    request = wire.Publish("t", 0, due_ms=due_ms)
    reply = await peer.ask(request, wire.PublishReply, messages(*seconds))
    assert reply.delayed


@in_virtual_time
async def test_a_message_comes_at_its_instant_and_an_earlier_one_published_later_before_it(
    server: FakeServer,
) -> None:
    async with SmallWorker(server, topic=("t", 1)) as worker:
        peer, loop = await worker.connect(), asyncio.get_running_loop()
        stream = Stream(peer, "t", "s", "c")
        await stream.open()
        began = loop.time()
        await publish_in(peer, worker, late=20.0)
        await publish_in(peer, worker, soon=5.0, sooner=2.0)
        came = [(item.uid, loop.time() - began) for _ in range(3) for item in await stream.receive(1)]
        assert [uid for uid, _ in came] == ["sooner", "soon", "late"]
        for (_, at), due in zip(came, (2.0, 5.0, 20.0), strict=True):
            assert due <= at < due + 0.05


@in_virtual_time
async def test_the_next_owner_delivers_at_the_same_instant_and_the_old_one_does_nothing(
    server: FakeServer,
) -> None:
    async with SmallWorker(server, "w0", topic=("t", 1)) as old, SmallWorker(server, "w1") as new:
        peer, loop = await old.connect(), asyncio.get_running_loop()
        await Stream(peer, "t", "s", "c").open()
        began = loop.time()
        await publish_in(peer, old, later=30.0)
        promoted: list[str] = []
        for worker in (old, new):
            promote = worker.engine.promote

            async def noted(*arguments, promote=promote, name=worker.name):  # type: ignore[no-untyped-def]
                promoted.append(name)
                return await promote(*arguments)

            worker.engine.promote = noted  # type: ignore[method-assign]
        version = (await old.engine.owners()).version
        assert await old.engine.assign(version, {"t": ["w1"]})
        await old.membership.refresh()
        await asyncio.sleep(1)
        await new.membership.refresh()
        stream = Stream(await new.connect(), "t", "s", "c")
        await stream.open()
        await stream.receive(1)
        assert 30.0 <= loop.time() - began < 30.05
        assert set(promoted) == {"w1"}
