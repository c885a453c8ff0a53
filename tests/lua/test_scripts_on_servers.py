"""Scripts and the servers they are on: forgotten scripts, full memory, durability, a server that is away."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from redis.exceptions import ResponseError

from keylane.errors import DurabilityNotReached, InvalidArgument, Overloaded, Unavailable
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Lease, PublishResult, TopicSettings
from keylane_broker.store.store import Store
from keylane_broker.supervise.embedded_server import Server, ask
from loadtest.topology import ReplicaPair, replica_pair, single_server
from tests.support.clock import ManualTime
from tests.support.story import Story, message, must_acquire, part, receipts


@asynccontextmanager
async def engine_on(server: Server) -> AsyncIterator[Engine]:
    """An engine for the length of a test."""
    engine = Engine.connect(server.url)
    try:
        yield engine
    finally:
        await engine.close()


async def publish(engine: Engine, topic: str, durability: str, timeout_ms: int = 5_000) -> PublishResult:
    """Publish one message to a topic of its own."""
    story = await Story.begin(engine, topic)
    await story.subscribe()
    return await engine.publish(story.lease, [message()], durability=durability, timeout_ms=timeout_ms)


async def flush_scripts(engine: Engine) -> None:
    """Make every server forget its scripts, as a restart or a failover does."""
    await engine.store.redis.script_flush()


async def test_scripts_that_the_server_has_forgotten_are_loaded_again(engine: Engine, topic: str) -> None:
    await engine.create_topic(topic, TopicSettings(partitions=6))
    await flush_scripts(engine)
    leases = [await must_acquire(engine, topic, partition) for partition in range(6)]
    await flush_scripts(engine)
    assert await engine.renew(leases, 60_000) == [True] * 6
    await flush_scripts(engine)
    await engine.create_subscription(topic, "s")
    for lease in leases:
        await flush_scripts(engine)
        assert (await engine.publish(lease, [message()])).stored == 1


async def test_a_script_that_was_forgotten_is_loaded_for_a_durable_publish_too(topic: str) -> None:
    with single_server(appendonly=True) as server:
        async with engine_on(server) as engine:
            story = await Story.begin(engine, topic)
            await story.subscribe()
            for _ in range(2):
                await flush_scripts(engine)
                result = await engine.publish(story.lease, [message()], durability="fsync")
                assert (result.stored, result.durability) == (1, "fsync")
            assert await story.log() == [1, 2]


@pytest.fixture
def pair(server_binary: Path) -> Iterator[ReplicaPair]:
    """A server with a replica."""
    with replica_pair(binary=server_binary) as servers:
        yield servers


async def test_memory_is_reached_everywhere(server_url: str, topic: str) -> None:
    engine = Engine.connect(server_url)
    assert (await publish(engine, topic, "memory")).durability == "memory"
    await engine.close()


async def has_waitaof(engine: Engine) -> bool:
    """Whether the server knows WAITAOF: Valkey, or Redis from 7.2 on."""
    try:
        return bool(await engine.store.command("WAITAOF", 0, 0, 1))
    except ResponseError:
        return False


async def test_fsync_is_reached_with_an_append_only_file_or_refused_before_anything_is_stored(
    server_binary: Path, topic: str
) -> None:
    with single_server(appendonly=True, binary=server_binary) as server:
        async with engine_on(server) as engine:
            if await has_waitaof(engine):
                assert (await publish(engine, topic, "fsync")).durability == "fsync"
            else:
                with pytest.raises(DurabilityNotReached) as caught:
                    await publish(engine, topic, "fsync")
                assert not caught.value.stored


async def test_a_server_that_always_syncs_confirms_fsync_without_waiting(
    server_binary: Path, topic: str
) -> None:
    with Server(binary=server_binary, appendfsync="always") as server:
        async with engine_on(server) as engine:
            assert (await publish(engine, topic, "fsync")).durability == "fsync"


async def test_fsync_is_refused_without_an_append_only_file_and_nothing_is_stored(
    server_url: str, topic: str
) -> None:
    engine = Engine.connect(server_url)
    story = await Story.begin(engine, topic)
    await story.subscribe()
    with pytest.raises(DurabilityNotReached, match="appendonly") as caught:
        await engine.publish(story.lease, [message()], durability="fsync")
    assert not caught.value.stored
    assert await story.log() == []
    await engine.close()


async def test_replicated_is_reached_when_a_replica_has_it(pair: ReplicaPair, topic: str) -> None:
    async with engine_on(pair.master) as engine, engine_on(pair.replica) as replica:
        assert (await publish(engine, topic, "replicated")).durability == "replicated"
        copied = await replica.store.command("XLEN", f"kl:{{{topic}:0}}:log")
        assert copied == 1


async def test_more_replicas_than_there_are_is_refused_before_anything_is_stored(
    pair: ReplicaPair, topic: str
) -> None:
    async with engine_on(pair.master) as engine:
        story = await Story.begin(engine, topic)
        await story.subscribe()
        for attempt in (
            lambda: engine.publish(story.lease, [message()], durability="replicated:2"),
            lambda: engine.delay(story.lease, [message()], [1], durability="replicated:2"),
        ):
            with pytest.raises(DurabilityNotReached, match=r"needs 2 .* 1 are; nothing") as caught:
                await attempt()
            assert not caught.value.stored
        assert await story.log() == []
        assert not await story.exists(story.keys.delayed, story.keys.delayed_data)


@pytest.mark.slow
async def test_a_replica_that_comes_or_goes_is_noticed(pair: ReplicaPair, topic: str) -> None:
    async with engine_on(pair.master) as engine:
        story = await Story.begin(engine, topic)
        await story.subscribe()
        ask(pair.replica.port, "REPLICAOF", "NO", "ONE")
        await until(engine, "connected_slaves", 0)
        with pytest.raises(DurabilityNotReached) as caught:
            await engine.publish(story.lease, [message()], durability="replicated")
        assert not caught.value.stored
        ask(pair.replica.port, "REPLICAOF", "127.0.0.1", str(pair.master.port))
        await until(engine, "slave0", {"state": "online"})
        assert (await engine.publish(story.lease, [message()], durability="replicated")).stored == 1


async def until(engine: Engine, name: str, expected: object) -> None:
    """Wait until INFO replication says so."""
    with anyio.fail_after(30):
        while True:
            found = (await engine.store.command("INFO", "replication")).get(name)
            if found == expected or (isinstance(found, dict) and expected.items() <= found.items()):  # type: ignore[attr-defined]
                return
            await anyio.sleep(0.02)


@pytest.fixture
def hung(pair: ReplicaPair) -> Iterator[ReplicaPair]:
    """A server whose replica hangs: it counts as connected, and confirms nothing."""
    pid = int(ask(pair.replica.port, "INFO", "server").partition("process_id:")[2].split()[0])
    os.kill(pid, signal.SIGSTOP)
    yield pair
    os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
async def test_no_retry_is_called_replicated_that_is_not(hung: ReplicaPair, topic: str) -> None:
    """The clock stands still, so that nothing but the retry itself could write."""
    timed = ManualTime(hung.master.url)
    await timed.start()
    story = await Story.begin(timed.engine, topic)
    await story.subscribe()
    for step in (
        lambda: timed.engine.publish(
            story.lease, [message("a", "u1")], durability="replicated", timeout_ms=30
        ),
        lambda: timed.engine.delay(
            story.lease, [message("a", "u2")], [9_000_000], durability="replicated", timeout_ms=30
        ),
    ):
        for _ in range(20):
            with pytest.raises(DurabilityNotReached, match="0 of 1") as caught:
                await step()
            assert caught.value.stored
    assert await story.log() == [1]
    await timed.engine.close()


@pytest.mark.slow
async def test_no_retry_is_called_fsync_that_is_not(topic: str) -> None:
    with Server(appendonly=True, config={"appendfsync": "no"}) as server:
        timed = ManualTime(server.url)
        await timed.start()
        if not await has_waitaof(timed.engine):
            pytest.skip("this server has no WAITAOF")
        story = await Story.begin(timed.engine, topic)
        await story.subscribe()
        for _ in range(20):
            with pytest.raises(DurabilityNotReached, match="0 of 1") as caught:
                await timed.engine.publish(
                    story.lease, [message("a", "u1")], durability="fsync", timeout_ms=30
                )
            assert caught.value.stored
        await timed.engine.close()


async def test_what_nobody_owes_needs_no_replica_to_say_so(hung: ReplicaPair, topic: str) -> None:
    async with engine_on(hung.master) as engine:
        story = await Story.begin(engine, topic)
        result = await engine.publish(story.lease, [message()], durability="replicated", timeout_ms=30)
        assert (result.stored, result.no_subscribers) == (0, 1)


async def test_without_a_replica_nothing_is_stored(server_url: str, topic: str) -> None:
    engine = Engine.connect(server_url)
    story = await Story.begin(engine, topic)
    await story.subscribe()
    with pytest.raises(DurabilityNotReached, match="nothing was stored") as caught:
        await engine.publish(story.lease, [message("a", "u1")], durability="replicated")
    assert not caught.value.stored
    assert await story.log() == []
    await engine.close()


async def test_a_replica_that_is_written_to_answers_that_it_is_unavailable(
    pair: ReplicaPair, topic: str
) -> None:
    async with engine_on(pair.replica) as engine:
        with pytest.raises(Unavailable):
            await engine.create_topic(topic)


@pytest.mark.slow
async def test_with_full_memory_publishing_is_overloaded_while_consuming_goes_on(
    server_binary: Path, topic: str
) -> None:
    with single_server(binary=server_binary) as server:
        async with engine_on(server) as engine:
            story = await Story.begin(engine, topic)
            await story.subscribe()
            await story.subscribe("k", "key_shared")
            await story.publish(*["a", "b", ""] * 100)
            held = receipts(await story.fetch(permits=50))
            await engine.store.command("CONFIG", "SET", "maxmemory", "1")
            with pytest.raises(Overloaded, match="maxmemory"):
                await story.publish("a")
            with pytest.raises(Overloaded):
                await engine.create_topic(topic + "-2")
            with pytest.raises(Overloaded):
                await engine.create_subscription(topic, "new")
            assert await story.ack(part(held[0], 1, 10)) == ["settled"]
            assert await story.nack(part(held[0], 11, 20)) == ["settled"]
            assert (await engine.extend(story.lease, "s", [part(held[0], 21)], lease_ms=1)).stale == []
            assert len(await story.take()) == 100
            assert len(await story.take(name="k")) == 100
            assert not await engine.join(story.lease, "s", "d")
            assert await engine.renew_sessions(story.lease, "s", ["c", "d"]) == []
            await engine.expire(story.lease, "s")
            await engine.leave(story.lease, "s", "c")
            assert await engine.renew([story.lease], 60_000) == [True]
            assert (await must_acquire(engine, topic)).epoch > story.lease.epoch
            await engine.delete_topic(topic)
            await engine.store.command("CONFIG", "SET", "maxmemory", "0")
            assert await engine.store.keys_like(f"*{topic}*") == set()


@pytest.mark.parametrize("url", ["", "redis", "http://localhost", "keylane://localhost", "localhost:6379"])
def test_a_url_of_an_unknown_kind_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="redis://"):
        Store.connect(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:1",
        "redis+cluster://127.0.0.1:1",
        pytest.param("redis+sentinel://127.0.0.1:1/mymaster", marks=pytest.mark.slow),
        "unix:///nowhere/redis.sock",
    ],
)
async def test_a_server_that_is_not_there_is_unavailable(url: str, topic: str) -> None:
    engine = Engine.connect(url)
    lease = Lease(topic, 0, "w1", 1)
    for call in (
        lambda: engine.topics(),
        lambda: engine.create_topic(topic),
        lambda: engine.acquire(topic, 0, "w1", 1_000),
        lambda: engine.renew([lease], 1_000),
        lambda: engine.publish(lease, [message()]),
        lambda: engine.publish(lease, [message()], durability="replicated", timeout_ms=10),
        lambda: engine.publish(lease, [message()], durability="fsync", timeout_ms=10),
    ):
        with pytest.raises(Unavailable) as caught:
            await call()
        assert caught.value.retriable
    await engine.close()


@pytest.mark.slow
async def test_a_server_that_goes_away_is_unavailable_until_it_is_back(
    server_binary: Path, topic: str
) -> None:
    with Server(binary=server_binary, appendfsync="always") as server:
        async with engine_on(server) as engine:
            story = await Story.begin(engine, topic)
            await story.subscribe()
            await story.publish("a", "b")
            server.kill()
            for _ in range(3):
                with pytest.raises(Unavailable):
                    await story.publish("c")
                with pytest.raises(Unavailable):
                    await story.take()
            server.start()
            with pytest.raises(Unavailable):  # it may have lost writes: the lease is to be taken anew
                await story.publish("c")
            story.lease = await must_acquire(engine, topic)
            await story.publish("c")
            assert await story.take() == [1, 2, 3]
