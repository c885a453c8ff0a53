"""Limits: who asks for too much hears when to come again, and no client makes a worker's memory grow."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_http_has_a_bound_of_connections_and_says_so() -> None:
    with RunningBroker(http=True, max_connections=2) as broker, contextlib.ExitStack() as stack:
        url = httpx.URL(broker.http_urls[0])
        inside = [stack.enter_context(httpx.Client(base_url=url, timeout=SOON)) for _ in range(2)]
        assert [http.get("/healthz").status_code for http in inside] == [200, 200]
        with httpx.Client(base_url=url, timeout=SOON) as late:
            refused = late.get("/v1/topics")
        assert (refused.status_code, refused.json()["code"]) == (429, "overloaded")
        assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
        assert [http.get("/healthz").status_code for http in inside] == [200, 200]
        inside[0].close()
        wait_until(lambda: httpx.get(url.join("/healthz")).status_code == 200)


@pytest.mark.slow
def test_what_has_come_of_requests_counts_against_the_memory_of_the_worker(topic: str) -> None:
    with RunningBroker(http=True, max_inflight_bytes=MIB) as broker:
        url = httpx.URL(broker.http_urls[0])
        head = (
            f"POST /v1/topics HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nContent-Length: {MIB - 1000}\r\n\r\n"
        )
        with socket.create_connection((url.host, url.port)) as slow:
            slow.sendall(head.encode() + b"{" * (MIB - 1001))
            [said] = wait_until(lambda: refused(url, "y" * 2_000))  # until the worker has read the first
            assert said.headers["retry-after"] == "1"
        wait_until(lambda: not refused(url, topic))
        large = httpx.post(url.join("/v1/topics"), content=b"x" * 17 * MIB)
        assert (large.status_code, large.json()["code"]) == (413, "message_too_large")


@pytest.mark.slow
def test_a_request_that_does_not_get_on_loses_its_place(topic: str) -> None:
    with RunningBroker(http=True, max_inflight_bytes=MIB, heartbeat=0.3) as broker:
        url = httpx.URL(broker.http_urls[0])
        with socket.create_connection((url.host, url.port)) as slow:
            slow.sendall(request(url, "/v1/topics", MIB - 1000) + b"{" * (MIB - 1001))
            wait_until(lambda: refused(url, "y" * 2_000))
            wait_until(lambda: not refused(url, topic))
            assert slow.recv(100).startswith(b"HTTP/1.1 503 ")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_bodies_that_trickle_hold_no_memory_and_lose_their_place(topic: str, kind: str) -> None:
    with RunningBroker(http=True, max_inflight_bytes=MIB, heartbeat=0.3) as broker:
        url = httpx.URL(broker.http_urls[0])
        assert httpx.post(url.join("/v1/topics"), json={"name": topic}).status_code == 201
        path = f"/v1/topics/{topic}/messages"
        head = request(url, path, MIB - 1000, f"Content-Type: {kind}")
        with contextlib.ExitStack() as stack:
            slow = [stack.enter_context(socket.create_connection((url.host, url.port))) for _ in range(8)]
            for one in slow:
                one.settimeout(0.1)
                one.sendall(head)
            answers = dict.fromkeys(slow, b"")
            while not all(answers.values()):
                for one in slow:
                    with contextlib.suppress(OSError):
                        one.sendall(b" ")
                    with contextlib.suppress(OSError):
                        answers[one] = answers[one] or one.recv(100)
                said = httpx.post(url.join(path), json={"messages": [{"data": "x" * 2_000}]})
                assert said.status_code == 200, said.text
            assert {answer[:13] for answer in answers.values()} == {b"HTTP/1.1 503 "}


@pytest.mark.slow
def test_lines_that_have_not_come_as_a_whole_count_and_lose_their_place(topic: str) -> None:
    with RunningBroker(http=True, max_inflight_bytes=2 * MIB, heartbeat=1.0) as broker:
        url = httpx.URL(broker.http_urls[0])
        assert httpx.post(url.join("/v1/topics"), json={"name": topic}).status_code == 201
        path = f"/v1/topics/{topic}/messages"
        head = request(url, path, 100 * MIB, "Content-Type: application/x-ndjson")
        line = b'{"data": ""}\n'
        with contextlib.ExitStack() as stack:
            connect = partial(socket.create_connection, (url.host, url.port))
            held = list[socket.socket]()
            for _ in range(8):
                one = stack.enter_context(connect())
                if not said_no(one, head + line + b"x" * (MIB - 1000)):
                    held.append(one)
            assert 1 <= len(held) <= 2
            for one in held:
                one.settimeout(SOON)
                assert one.recv(100).startswith(b"HTTP/1.1 503 ")
            patient = stack.enter_context(connect())
            patient.sendall(head)
            patient.settimeout(2.0)
            for _ in range(4):  # longer than others may take: a line now and then is fine
                patient.sendall(line)
                with pytest.raises(TimeoutError):
                    patient.recv(100)


@pytest.mark.slow
def test_bodies_that_have_not_come_as_a_whole_count_against_the_memory_of_the_worker(topic: str) -> None:
    with RunningBroker(http=True, max_inflight_bytes=8 * MIB) as broker, Client(broker.url) as client:
        client.create_topic(topic, partitions=1)
        url = httpx.URL(broker.http_urls[0])
        path = f"/v1/topics/{topic}/messages"
        head = request(url, path, 3 * MIB, "Content-Type: text/plain")
        with contextlib.ExitStack() as stack:
            slow = [stack.enter_context(socket.create_connection((url.host, url.port))) for _ in range(12)]
            answered = [one for one in slow if said_no(one, head + b"x" * (MIB + MIB // 2))]
            assert len(answered) >= 6
        text = {"Content-Type": "text/plain"}
        wait_until(lambda: httpx.post(url.join(path), content=b"1", headers=text).status_code == 200)


def said_no(one: socket.socket, data: bytes) -> bool:
    """Whether what is sent is answered with 429 before it is all there."""
    one.settimeout(2.0)
    with contextlib.suppress(ConnectionError):
        one.sendall(data)
    try:
        return one.recv(100).startswith(b"HTTP/1.1 429 ")
    except TimeoutError:
        return False


def request(url: httpx.URL, path: str, length: int, *headers: str) -> bytes:
    """The first lines of a request."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {url.host}:{url.port}", f"Content-Length: {length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.slow
def test_long_lines_are_not_gathered(topic: str) -> None:
    with RunningBroker(http=True) as broker, Client(broker.url) as client:
        client.create_topic(topic, partitions=1)
        client.create_subscription(topic, "s")
        worker = psutil.Process(broker.pid)
        before = highest = worker.memory_info().rss

        def lines() -> Iterator[bytes]:
            nonlocal highest
            for _ in range(200):
                yield b'{"data": "' + b"x" * 1_000_000 + b'"}\n'
                highest = max(highest, worker.memory_info().rss)

        kind = {"Content-Type": "application/x-ndjson"}
        path = f"{broker.http_urls[0]}/v1/topics/{topic}/messages"
        said = httpx.post(path, content=lines(), headers=kind, timeout=SOON).json()
        assert said["published"] + said["failed"] == 200
        assert highest - before < 80 * MIB, (highest - before) // MIB


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
