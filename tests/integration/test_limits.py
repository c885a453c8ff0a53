"""Limits: who asks for too much hears when to come again, and no client makes a worker's memory grow."""

import asyncio
import socket
from collections.abc import Iterator

import httpx
import psutil
import pytest

from keylane import AsyncClient, Client, wire
from keylane.wire import FrameReader, Type
from tests.support.running import RunningBroker
from tests.support.waiting import until, wait_until

ADMIN = "the token of an administrator"
SOON = 60.0
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def limited() -> Iterator[RunningBroker]:
    """A worker by which a token may publish twenty messages a second."""
    with RunningBroker(http=True, auth=True, admin_token=ADMIN, publish_rate=20) as broker:
        yield broker


def token(broker: RunningBroker, topic: str) -> str:
    with Client(broker.url, token=ADMIN) as admin:
        admin.create_topic(topic, partitions=1)
        admin.create_subscription(topic, "s")
        return admin.create_token("shop", [f"admin:{topic}"]).token


@pytest.mark.slow
async def test_clients_wait_as_they_are_asked_to_and_keep_their_order(
    limited: RunningBroker, topic: str
) -> None:
    own = token(limited, topic)
    expected = [str(number).encode() for number in range(35)]
    async with AsyncClient(limited.url, token=own) as client:
        await asyncio.gather(*(client.publish(topic, body, key="k") for body in expected[:30]))
        with Client(limited.url, token=own) as sync_client:
            for body in expected[30:]:
                await asyncio.to_thread(sync_client.publish, topic, body, key="k")
        found = []
        async with client.subscribe(topic, "s") as consumer:
            for _ in expected:
                message = await consumer.receive(timeout=SOON)
                found.append(await message.data())
                await message.ack()
    assert found == expected


def test_http_says_when_to_come_again(limited: RunningBroker, topic: str) -> None:
    headers = {"Authorization": f"Bearer {token(limited, topic)}"}
    path = f"{limited.http_urls[0]}/v1/topics/{topic}/messages"
    many = {"messages": [{"data": "1"}] * 100}
    assert httpx.post(path, json=many, headers=headers).status_code == 200
    refused = httpx.post(path, json=many, headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (429, "overloaded")
    assert int(refused.headers["retry-after"]) >= 1
    raw = httpx.post(path, content=b"1", headers={**headers, "Content-Type": "text/plain"})
    assert raw.status_code == 429
    admin = {"Authorization": f"Bearer {ADMIN}"}  # another token
    assert httpx.post(path, json={"messages": [{"data": "1"}]}, headers=admin).status_code == 200


async def test_who_is_refused_is_told_when_to_come_again(topic: str) -> None:
    with RunningBroker(max_connections=1) as broker:
        async with AsyncClient(broker.url):
            reader, writer = await asyncio.open_connection("127.0.0.1", broker.settings.port)
            frames = FrameReader(MIB)
            found = []
            while data := await reader.read(65_536):
                found += list(frames.feed(data))
            writer.close()
    [error] = [wire.properties_of(frame, wire.Error) for frame in found if frame.type == Type.ERROR]
    assert (error.code, error.retry_ms) == ("overloaded", 1_000)


def test_what_requests_say_they_have_counts_against_the_memory_of_the_worker(topic: str) -> None:
    with RunningBroker(http=True, max_inflight_bytes=MIB) as broker:
        url = httpx.URL(broker.http_urls[0])
        head = (
            f"POST /v1/topics HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nContent-Length: {MIB - 1000}\r\n\r\n"
        )
        with socket.create_connection((url.host, url.port)) as slow:
            slow.sendall(head.encode() + b"{")
            [said] = wait_until(lambda: refused(url, "y" * 2_000))  # until the worker has read the first
            assert said.headers["retry-after"] == "1"
        wait_until(lambda: not refused(url, topic))
        large = httpx.post(url.join("/v1/topics"), content=b"x" * 17 * MIB)
        assert (large.status_code, large.json()["code"]) == (413, "message_too_large")


def refused(url: httpx.URL, name: str) -> list[httpx.Response]:
    """The answer to a request, if there was no room for that."""
    answer = httpx.post(url.join("/v1/topics"), json={"name": name})
    return [answer] if answer.status_code == 429 else []


@pytest.mark.slow
async def test_memory_stays_with_a_producer_that_never_reads_and_a_consumer_that_never_acks(
    topic: str,
) -> None:
    with RunningBroker(heartbeat=60.0) as broker:
        worker = psutil.Process(broker.pid)
        async with (
            AsyncClient(broker.url) as client,
            AsyncClient(broker.url) as idle,
        ):
            await client.create_topic(topic, partitions=1)
            async with idle.subscribe(topic, "s", permits=100) as consumer:
                await client.publish(topic, b"1")
                assert await consumer.receive(timeout=SOON)  # and never acks
                before = worker.memory_info().rss
                with socket.create_connection(("127.0.0.1", broker.settings.port)) as deaf:
                    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    deaf.setblocking(False)
                    sent, highest = await send_without_reading(deaf, topic, worker)
                assert sent > 10 * MIB
                assert highest - before < 64 * MIB, (sent // MIB, (highest - before) // MIB)
                await until(lambda: can_publish(client, topic))


async def send_without_reading(own: socket.socket, topic: str, worker: psutil.Process) -> tuple[int, int]:
    """Publish until the worker listens no more, or it is enough; returns bytes, and its memory at most."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(own, wire.frame(wire.Info(), 1))
    about = wire.pack_about(1, attributes={"x": "x" * 30_000})
    sent = highest = 0
    for number in range(100):
        texts = [text for place in range(50) for text in ("", f"{number}-{place}", about)]
        frame = wire.frame(wire.Publish(topic, 0), number + 2, 0, wire.pack(texts))
        try:
            async with asyncio.timeout(2.0):
                await loop.sock_sendall(own, frame)
        except TimeoutError:
            break
        sent += len(frame)
        highest = max(highest, worker.memory_info().rss)
    return sent, max(highest, worker.memory_info().rss)


async def can_publish(client: AsyncClient, topic: str) -> bool:
    return bool((await client.publish(topic, b"2")).id)
