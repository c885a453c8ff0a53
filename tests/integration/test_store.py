"""The store on servers that die, hang, move, refuse and come back; scripts of its own stand in for ours."""

import asyncio
import os
import signal
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from redis.crc import key_slot

from broker.scripts import Scripts
from broker.server import Server, ServerError, ask
from broker.store import Store, fsync_confirmation
from broker.topology import Cluster, replica_pair, single_server, three_node_cluster
from client.errors import BrokerError, DurabilityNotReached, InvalidArgument, Unavailable

SCRIPTS = Scripts(
    {
        "lib/prelude": "",
        "test/echo": "return ARGV",
        "test/write": "redis.call('SET', KEYS[1], ARGV[1]) return {'OK'}",
        "test/loop": "while true do end",
    }
)
PATIENCE = 0.3


@asynccontextmanager
async def store_on(url: str, patience: float = 10.0) -> AsyncIterator[Store]:
    """A store for the length of a test."""
    store = Store.connect(url, SCRIPTS, patience=patience)
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """A server that holds its connections and answers nothing."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def until_it_works(call: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat a call while it answers that Redis is away."""
    with anyio.fail_after(15):
        while True:
            try:
                return await call()
            except Unavailable as error:
                assert error.retriable
                await anyio.sleep(0.02)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that gives no sign of itself."""
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.02)


def connections(server: Server) -> int:
    """How many connections a server has, but for the one that asks."""
    return ask(server.port, "CLIENT", "LIST").count("id=") - 1


# Arguments


@pytest.mark.parametrize("bad", ["\ud800", None, True], ids=["lone surrogate", "None", "True"])
async def test_an_argument_that_cannot_be_sent_is_named_and_no_other_call_gets_its_answer(
    server_url: str, bad: Any
) -> None:
    async with store_on(server_url) as store:
        assert await store.run("test/echo", ["k"], "before") == ["before"]
        with pytest.raises(InvalidArgument, match="EVALSHA"):
            await store.run("test/echo", ["k"], bad)
        with pytest.raises(InvalidArgument, match="EVALSHA"):
            await store.run_durably("replicated", 10, "test/echo", ["k"], bad)
        for number in range(3):
            assert await store.run("test/echo", ["k"], number) == [str(number)]


async def test_a_key_that_cannot_be_sent_is_named(cluster_url: str, server_url: str) -> None:
    for url in (server_url, cluster_url.replace("redis://", "redis+cluster://")):
        async with store_on(url) as store:
            with pytest.raises(InvalidArgument):
                await store.run("test/echo", ["\ud800"])
            with pytest.raises(InvalidArgument):
                await store.command("GET", "\ud800")


# Clusters


@pytest.fixture
def cluster(server_binary: Path) -> Iterator[Cluster]:
    """A cluster that a test may break."""
    config = {"cluster-require-full-coverage": "no", "appendonly": "yes"}
    with three_node_cluster(binary=server_binary, config=config) as cluster:
        yield cluster


def key_in(first: int, last: int) -> str:
    """A key whose slot is in a range."""
    return next(f"key-{number}" for number in range(10**6) if first <= key_slot(b"key-%d" % number) <= last)


def cluster_store(cluster: Cluster, patience: float = 10.0) -> Any:
    """A store that knows only the first node at the start."""
    return store_on(cluster.url.replace("redis://", "redis+cluster://"), patience)


async def test_a_node_that_dies_and_comes_back_serves_the_same_store_again(cluster: Cluster) -> None:
    key, other = key_in(10923, 16383), key_in(0, 5460)
    async with cluster_store(cluster) as store:
        await store.run("test/write", [key], 1)
        cluster.nodes[2].kill()
        for _ in range(3):
            with pytest.raises(Unavailable):
                await store.run("test/write", [key], 2)
            assert await store.run("test/write", [other], 2) == ["OK"]
        cluster.nodes[2].start()
        assert await until_it_works(lambda: store.run("test/write", [key], 3)) == ["OK"]
        assert await until_it_works(lambda: store.command("GET", key)) == "3"


async def test_the_slots_of_a_node_that_died_are_found_where_they_are_now(cluster: Cluster) -> None:
    heir, other, dead = cluster.nodes
    key = key_in(10923, 16383)
    async with cluster_store(cluster) as store:
        await store.run("test/write", [key], 1)
        await store.run_durably("memory", 10, "test/write", [key], 1)
        name = ask(dead.port, "CLUSTER", "MYID")
        dead.kill()
        for node in (heir, other):
            with pytest.raises(ServerError) if node is other and forgotten(other, name) else anyio.Path():
                ask(node.port, "CLUSTER", "FORGET", name)
        ask(heir.port, "CLUSTER", "ADDSLOTSRANGE", "10923", "16383")
        assert await until_it_works(lambda: store.run("test/write", [key], 2)) == ["OK"]
        with pytest.raises(DurabilityNotReached, match="0 of 1"):
            await store.run_durably("replicated", 10, "test/write", [key], 3)
        assert ask(heir.port, "GET", key) == "3"
