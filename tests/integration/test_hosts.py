"""Hosts: IPv6, names with several addresses, slow name servers, a worker's limits, those who only connect."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from keylane import AsyncClient, ConnectionFailed, OutgoingMessage
from keylane_broker.ports import free_port
from tests.support.running import RunningBroker

PATIENCE = 60.0
NAME = "broker.test"


@pytest.fixture(params=["uvloop", "asyncio"], scope="module")
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Both event loops: their ways to look up names differ."""
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


@contextmanager
def black_hole(port: int) -> Iterator[str]:
    """An address that lets nobody in and refuses nobody: its backlog is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.2", port))
        listener.listen(0)
        for _ in range(4):
            stuck = stack.enter_context(socket.socket())
            stuck.setblocking(False)
            stuck.connect_ex(("127.0.0.2", port))
        yield "127.0.0.2"


def answers(*hosts: str, before: Callable[[], object] = lambda: None) -> Callable[..., Any]:
    """A name server that knows one name."""
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host not in (NAME, NAME.encode()):
            return real(host, port, *args, **options)
        before()
        return [item for known in hosts for item in real(known, port, type=socket.SOCK_STREAM)]

    return getaddrinfo


@pytest.mark.slow
async def test_ipv6_addresses_are_told_in_brackets(topic: str) -> None:
    with RunningBroker(workers=2, host="::1") as broker:
        ports = [worker.settings.port for worker in broker.workers]
        async with AsyncClient(f"keylane://[::1]:{ports[0]}", timeout=30) as client:
            await client.create_topic(topic, partitions=4)
            await client.create_subscription(topic, "s")
            for partition in range(4):
                await client.publish(topic, b"x", partition=partition)
            told = {worker.address for worker in (await client.info()).workers}
        assert told == {f"[::1]:{port}" for port in ports}


async def test_a_name_whose_first_address_is_dead_leads_to_the_next(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = broker.workers[0].settings.port
    with black_hole(port) as dead:
        monkeypatch.setattr(socket, "getaddrinfo", answers(dead, "127.0.0.1"))
        async with AsyncClient(f"keylane://{NAME}:{port}") as client:
            assert await client.topics() is not None


@pytest.mark.slow
async def test_a_name_of_dead_addresses_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", answers("127.0.0.1", "127.0.0.3"))
    with pytest.raises(ConnectionFailed, match="connection refused"):
        async with AsyncClient(f"keylane://{NAME}:{free_port()}"):
            pass


@pytest.mark.slow
async def test_a_slow_name_server_is_asked_once_and_costs_the_application_no_thread(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    begun = asyncio.Event()
    go_on = threading.Event()

    def wait() -> None:
        asked.append(threading.current_thread().name)
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(PATIENCE)

    loop = asyncio.get_running_loop()
    port = broker.workers[0].settings.port
    monkeypatch.setattr(socket, "getaddrinfo", answers("127.0.0.1", before=wait))
    client = AsyncClient(f"keylane://{NAME}:{port}")
    with ThreadPoolExecutor(1) as executor:
        loop.set_default_executor(executor)
        try:
            opening = asyncio.create_task(client.__aenter__())
            async with asyncio.timeout(PATIENCE):
                await begun.wait()
                await loop.run_in_executor(None, lambda: None)  # the application's threads are free
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(opening), 3.0)  # longer than one attempt may take
            assert len(asked) == 1
            go_on.set()
            await asyncio.wait_for(opening, PATIENCE)
        finally:
            go_on.set()
            await client.close()


@pytest.mark.slow
async def test_who_trickles_bytes_before_info_does_not_keep_a_place(topic: str) -> None:
    with RunningBroker(max_connections=2, heartbeat=0.3) as broker:
        port = broker.workers[0].settings.port

        async def trickle() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\0\0\1\0")
            ended = asyncio.ensure_future(reader.read())
            while not ended.done():
                writer.write(b"\0")
                await asyncio.wait({ended}, timeout=0.1)
            writer.close()

        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(trickle(), trickle())


@pytest.mark.slow
async def test_a_client_keeps_to_the_largest_frame_of_the_worker(topic: str) -> None:
    with RunningBroker(max_frame=256 * 1024) as broker:
        async with AsyncClient(broker.url, timeout=30) as client:
            await client.create_topic(topic, partitions=1)
            await client.create_subscription(topic, "s")
            large = {"note": "\N{MUSICAL SYMBOL G CLEF}" * 10_000}  # four bytes each
            sent = await client.publish_many(topic, [OutgoingMessage(None, attributes=large)] * 100)
            assert len({item.id for item in sent}) == 100
            small = await client.publish_many(topic, [OutgoingMessage(None, key="k" * 1_000)] * 3_000)
            assert [item.entry for item in small] == list(range(small[0].entry, small[0].entry + 3_000))
