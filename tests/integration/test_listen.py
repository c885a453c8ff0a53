"""Announcements on servers that die, hang and come back: what may have been missed is said."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from keylane.errors import Unavailable
from keylane_broker.store.store import Store
from keylane_broker.supervise.embedded_server import Server, ask
from loadtest.topology import Cluster, sentinel_pair, single_server, three_node_cluster
from tests.support.faults import stopped

CHANNEL = "kl:events"


class Ear:
    """What a store hears on the channel."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.heard: asyncio.Queue[str] = asyncio.Queue()
        self.task = asyncio.create_task(store.listen(CHANNEL, self.heard.put_nowait))

    async def subscribed(self) -> None:
        """Wait until it listens, or does so again."""
        while await self.heard.get() != "":
            pass

    async def hears(self, url: str) -> None:
        """Say something on a server, again and again, until it is heard: a reconnect may be under way."""
        async with speaking(url) as other:
            while True:
                with anyio.move_on_after(0.2):
                    await other.command("PUBLISH", CHANNEL, "hello")
                    while await self.heard.get() != "hello":
                        pass
                    return


@asynccontextmanager
async def speaking(url: str) -> AsyncIterator[Store]:
    """Another store."""
    store = Store.connect(url)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def listening(url: str, patience: float = 10.0) -> AsyncIterator[Ear]:
    """An ear that listens already, for the length of a test."""
    store = Store.connect(url, patience=patience)
    ear = Ear(store)
    try:
        with anyio.fail_after(120):
            await ear.subscribed()
            yield ear
    finally:
        ear.task.cancel()
        await asyncio.wait([ear.task])
        assert ear.task.cancelled()
        await store.close()


def listeners(server: Server) -> int:
    """How many connections listen to a server."""
    return ask(server.port, "CLIENT", "LIST", "TYPE", "pubsub").count(" addr=")


@pytest.fixture
def server(server_binary: Path) -> Iterator[Server]:
    """A server that a test may break."""
    with single_server(binary=server_binary) as server:
        yield server


async def test_a_listener_takes_one_connection_and_gives_it_back(server: Server) -> None:
    async with listening(server.url) as ear:
        assert listeners(server) == 1
        await ear.hears(server.url)
    with anyio.fail_after(60):
        while listeners(server):  # noqa: ASYNC110
            await anyio.sleep(0.01)


@pytest.mark.slow
async def test_announcements_are_heard_over_a_unix_socket(server_binary: Path, tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with single_server(binary=server_binary, config={"unixsocket": str(path)}) as server:
        async with listening(f"unix://{path}") as ear:
            await ear.hears(server.url)


@pytest.mark.slow
async def test_a_server_that_dies_and_comes_back_is_heard_again_without_noise(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with listening(server.url) as ear:
            server.kill()
            await anyio.sleep(0.3)  # time for some attempts in vain
            server.start()
            await ear.subscribed()
            await ear.hears(server.url)
    assert caplog.records == []


@pytest.mark.slow
async def test_a_connection_that_is_cut_is_made_anew(server: Server) -> None:
    async with listening(server.url) as ear:
        for _ in range(3):
            ask(server.port, "CLIENT", "KILL", "TYPE", "pubsub")
            await ear.subscribed()
            await ear.hears(server.url)


@pytest.mark.slow
async def test_a_server_that_hangs_is_left_and_found_again(server: Server) -> None:
    async with listening(server.url, patience=0.3) as ear:
        with stopped(server):
            await anyio.sleep(4)
        await ear.subscribed()
        await ear.hears(server.url)


@pytest.mark.slow
async def test_a_store_that_may_not_listen_says_so_once(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    ask(server.port, "ACL", "SETUSER", "deaf", "on", ">secret", "~*", "+@all", "resetchannels")
    store = Store.connect(server.url.replace("redis://", "redis://deaf:secret@"))
    ear = Ear(store)
    with anyio.fail_after(60):
        while not caplog.records:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        await anyio.sleep(0.5)
        assert ["channel" in record.getMessage() for record in caplog.records] == [True]
        ask(server.port, "ACL", "SETUSER", "deaf", "allchannels")
        await ear.subscribed()
    ear.task.cancel()
    await asyncio.wait([ear.task])
    await store.close()


@pytest.fixture
def cluster(server_binary: Path) -> Iterator[Cluster]:
    """A cluster that a test may break."""
    config = {"cluster-require-full-coverage": "no"}
    with three_node_cluster(binary=server_binary, config=config) as cluster:
        yield cluster


@pytest.mark.slow
async def test_on_a_cluster_the_loss_of_the_node_that_is_listened_to_is_healed(cluster: Cluster) -> None:
    url = cluster.url.replace("redis://", "redis+cluster://")
    async with listening(url) as ear:
        for node in cluster.nodes:
            await ear.hears(node.url)
        heard_on = next(node for node in cluster.nodes if listeners(node))
        heard_on.kill()
        await ear.subscribed()
        for node in cluster.nodes:
            if node is not heard_on:
                await ear.hears(node.url)


@pytest.mark.slow
async def test_a_node_that_has_left_the_cluster_is_not_listened_to_any_more(cluster: Cluster) -> None:
    url = cluster.url.replace("redis://", "redis+cluster://")
    async with listening(url) as ear:
        heard_on = next(node for node in cluster.nodes if listeners(node))
        name = ask(heard_on.port, "CLUSTER", "MYID").strip()
        others = [node for node in cluster.nodes if node is not heard_on]
        for node in others:
            ask(node.port, "CLUSTER", "FORGET", name)
        ask(heard_on.port, "CLUSTER", "RESET", "SOFT")
        for node in others:
            await ear.hears(node.url)


@pytest.mark.slow
async def test_what_is_said_is_heard_though_a_node_is_down(cluster: Cluster) -> None:
    url = cluster.url.replace("redis://", "redis+cluster://")
    async with listening(url) as ear, speaking(url) as store:
        await store.say(CHANNEL, "first")
        heard_on = next(node for node in cluster.nodes if listeners(node))
        next(node for node in cluster.nodes if node is not heard_on).kill()
        while True:
            try:
                await store.say(CHANNEL, "last")
                break
            except Unavailable:
                pass  # once, over the connection that has just ended
        while await ear.heard.get() != "last":
            pass


@pytest.mark.slow
async def test_a_connection_that_goes_deaf_is_left(server: Server) -> None:
    """As behind a firewall that has forgotten it: both ends think that it is alive."""
    deaf: list[asyncio.StreamWriter] = []

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if writer not in deaf:
                writer.write(data)
        writer.close()

    writers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server, from_server = await asyncio.open_connection("127.0.0.1", server.port)
        writers.append(writer)
        await asyncio.gather(forward(reader, from_server), forward(to_server, writer))

    async with (
        await asyncio.start_server(serve, "127.0.0.1") as proxy,
        listening(f"redis://127.0.0.1:{proxy.sockets[0].getsockname()[1]}") as ear,
    ):
        await ear.hears(server.url)
        deaf += writers
        await ear.subscribed()
        await ear.hears(server.url)


@pytest.mark.slow
async def test_behind_sentinel_the_new_master_is_listened_to(server_binary: Path) -> None:
    with sentinel_pair(binary=server_binary) as pair:
        async with listening(pair.url) as ear:
            pair.master.kill()
            pair.fail_over()
            await ear.subscribed()
            await ear.hears(pair.replica.url)
