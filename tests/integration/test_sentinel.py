"""Behind Sentinel the engine finds the master, and finds the new one after a failover."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from keylane.errors import BrokerError, Fenced, InvalidArgument, Unavailable
from keylane.wire import pack_about
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Lease, Outgoing, TopicSettings
from keylane_broker.limits import FOREVER
from keylane_broker.ports import free_port
from keylane_broker.supervise.embedded_server import Server, ask
from loadtest.topology import SentinelPair, sentinel_pair
from tests.support.waiting import PATIENCE, until


@pytest.fixture
def pair(server_binary: Path) -> Iterator[SentinelPair]:
    with sentinel_pair(binary=server_binary) as servers:
        yield servers


@asynccontextmanager
async def engine_behind(url: str) -> AsyncIterator[Engine]:
    """An engine for the length of a test."""
    engine = Engine.connect(url)
    try:
        yield engine
    finally:
        await engine.close()


async def publish(engine: Engine, lease: Lease, *uids: str, durability: str = "memory") -> list[str]:
    """Publish messages; their ids, with a mark on duplicates."""
    batch = [Outgoing("k", uid, pack_about(1)) for uid in uids]
    result = await engine.publish(lease, batch, durability=durability)
    return [f"{answer.id}{' again' if answer.duplicate else ''}" for answer in result.each()]


async def begin(engine: Engine, topic: str) -> Lease:
    """A topic with one message, which the replica has."""
    await engine.create_topic(topic, TopicSettings(retention_ms=FOREVER))
    lease = await engine.acquire(topic, 0, "w1", ttl_ms=60_000)
    assert lease is not None
    assert await publish(engine, lease, "u1", durability="replicated") == [f"{lease.epoch}-1"]
    return lease


async def go_on(engine: Engine, old: Lease, master: Server) -> None:
    """The worker takes the partition again, above the epoch that it knows; all of it on the new master."""
    held = None
    with anyio.fail_after(PATIENCE):
        while held is None:
            try:
                held = await engine.acquire(old.topic, 0, "w1", ttl_ms=60_000, known_epoch=old.epoch)
            except Unavailable:
                await anyio.sleep(0.02)
    assert held.epoch > old.epoch
    with pytest.raises(Fenced):
        await publish(engine, old, "u2")
    assert await publish(engine, held, "u1", "u2") == [f"{old.epoch}-1 again", f"{held.epoch}-2"]
    assert ask(master.port, "XLEN", f"kl:{{{old.topic}:0}}:log") == "2"
    assert await engine.topics() == [old.topic]


@pytest.mark.slow
async def test_the_engine_finds_the_new_master_when_the_old_one_dies(pair: SentinelPair, topic: str) -> None:
    async with engine_behind(pair.url) as engine:
        lease = await begin(engine, topic)
        pair.master.kill()
        with pytest.raises(Unavailable) as caught:
            await publish(engine, lease, "u2")
        assert caught.value.retriable
        pair.fail_over()
        await go_on(engine, lease, pair.replica)


@pytest.mark.slow
async def test_the_engine_leaves_a_master_that_was_made_a_replica(pair: SentinelPair, topic: str) -> None:
    async with engine_behind(pair.url) as engine:
        lease = await begin(engine, topic)
        pair.fail_over()
        await until(lambda: pair.master_port() == pair.replica.port)
        # Sentinel does this too, some ten seconds later; what is written until then is lost.
        ask(pair.master.port, "REPLICAOF", "127.0.0.1", str(pair.replica.port))
        with pytest.raises(Unavailable) as caught:
            await publish(engine, lease, "u2", durability="replicated")
        assert caught.value.retriable
        await go_on(engine, lease, pair.replica)


async def test_no_sentinel_is_a_named_error() -> None:
    async with engine_behind(f"redis+sentinel://127.0.0.1:{free_port()}/mymaster") as engine:
        with pytest.raises(BrokerError) as caught:
            await engine.topics()
    assert caught.value.code == "unavailable"


@pytest.mark.parametrize("servers", ["127.0.0.1:port", ":26379", "a:1,,b:2"])
def test_a_sentinel_url_that_names_no_server_is_an_invalid_argument(servers: str) -> None:
    with pytest.raises(InvalidArgument, match="not a host and a port"):
        Engine.connect(f"redis+sentinel://{servers}/mymaster")


async def test_the_credentials_of_a_sentinel_url_are_for_the_master() -> None:
    engine = Engine.connect("redis+sentinel://bob:s%40fe@127.0.0.1:1,127.0.0.1:2/mymaster")
    options = engine.store.redis.connection_pool.connection_kwargs
    assert (options["username"], options["password"]) == ("bob", "s@fe")
    await engine.close()
