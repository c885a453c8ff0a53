"""What is not meant well: oversize, ambiguous or misplaced bytes harm nobody else, and leave nothing."""

import asyncio
import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import httpx
import pytest

from keylane import Client, wire
from tests.support.running import RunningBroker

SOON = 60.0


@pytest.fixture(scope="module")
def target() -> Iterator[RunningBroker]:
    """A worker that lets in everybody."""
    with RunningBroker(http=True) as broker:
        yield broker


def address(broker: RunningBroker) -> tuple[str, int]:
    url = httpx.URL(broker.http_urls[0])
    assert url.port is not None
    return url.host, url.port


def still_works(broker: RunningBroker, topic: str) -> None:
    """Others publish and lease as ever, by either port."""
    with Client(broker.url) as client, httpx.Client(base_url=broker.http_urls[0], timeout=SOON) as http:
        client.create_topic(topic, partitions=1, exist_ok=True)
        with client.subscribe(topic, "s", start="latest") as consumer:
            assert (
                http.post(f"/v1/topics/{topic}/messages", json={"messages": [{"data": "1"}]}).status_code
                == 200
            )
            message = consumer.receive(timeout=SOON)
            assert message.data() == b"1"
            message.ack()


def answer_to(broker: RunningBroker, request: bytes, *, waits: bool = False) -> bytes:
    """All that a worker says to bytes, until it hangs up."""
    host = b"Host: %s:%d" % (address(broker)[0].encode(), address(broker)[1])
    with socket.create_connection(address(broker), timeout=SOON) as own:
        own.sendall(request.replace(b"Host: x", host))
        if not waits:
            own.shutdown(socket.SHUT_WR)
        found = b""
        while data := own.recv(65_536):
            found += data
        return found


@pytest.mark.slow
async def test_thousands_of_connections_that_do_nothing_keep_nobody_from_working(topic: str) -> None:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(1_000, (most - 500) // 2)  # of each kind
    with RunningBroker(http=True) as broker, ExitStack() as stack:
        for port in (broker.settings.port, address(broker)[1]):
            for _ in range(count):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=SOON))
        await asyncio.to_thread(still_works, broker, topic)


def test_headers_without_end_are_refused(target: RunningBroker, topic: str) -> None:
    for request in (
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 200_000,
        b"GET /" + b"x" * 200_000,
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
        + b"".join(b"X%d: 1\r\n" % number for number in range(20_000)),
    ):
        with suppress(OSError):  # hung up on while it was sending
            answer = answer_to(target, request)
            assert b" 400 " in answer.partition(b"\r\n")[0]
            assert b"application/problem+json" in answer
            assert b"more than 65536 bytes" in answer
    still_works(target, topic)


@pytest.mark.parametrize(
    "what", [b"\x16\x03\x01\x02\x00\x01", b"GET /healthz HTTP/1.1\r\n\r\n", b"a b c d\r\n\r\n"]
)
def test_what_is_no_request_is_answered_with_a_problem(target: RunningBroker, what: bytes) -> None:
    head, _, said = answer_to(target, what + b"\x00" * 600).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(said)["code"] == "invalid_argument"


def test_garbage_after_an_answer_is_hung_up_on_without_a_traceback(target: RunningBroker) -> None:
    head = b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(address(target), timeout=SOON) as own:
        own.sendall(head)
        said = b""
        while not said.endswith(b"}"):
            said += own.recv(65_536)
        assert said.startswith(b"HTTP/1.1 404 ")
        own.sendall(b"no chunk\r\n" * 10)
        with suppress(ConnectionError):
            assert own.recv(65_536) == b""
    assert "Traceback" not in target.log()


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 6\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 6",
        b"Content-Length: 6\r\nContent-Length: 60",
        b"Content-Length: 6, 60",
        b"Content-Length: +6",
        b"Content-Length: 0x6",
        b"Content-Length: -1",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"Transfer-Encoding : chunked",
        b"Content-Length : 6",
        b"X: y\r\n Transfer-Encoding: chunked",
    ],
)
def test_a_request_whose_length_is_ambiguous_smuggles_nothing(
    target: RunningBroker, topic: str, headers: bytes
) -> None:
    """What follows is never taken for a request of its own, whatever a proxy in front takes it for."""
    with Client(target.url) as client:
        client.create_topic(topic, partitions=1)
        hidden = f"DELETE /v1/topics/{topic} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        body = b"0\r\n\r\n" + hidden
        answer = answer_to(target, b"POST /v1/topics HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n\r\n" + body)
        assert b"HTTP/1.1 2" not in answer, answer
        assert topic in client.topics()


def test_chunks_that_are_none_publish_nothing(target: RunningBroker, topic: str) -> None:
    with Client(target.url) as client:
        client.create_topic(topic, partitions=1)
        client.create_subscription(topic, "s")
        head = (
            f"POST /v1/topics/{topic}/messages HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"
            "Transfer-Encoding: chunked\r\n\r\n"
        ).encode()
        for chunks in (
            b"-1\r\nx\r\n0\r\n\r\n",
            b"zz\r\nx\r\n",
            b"5\r\nabc",
            b"2\r\nabcdef\r\n0\r\n\r\n",
            b"ffffffffffffffffffff\r\nx",
        ):
            answer_to(target, head + chunks)
        assert client.describe_subscription(topic, "s").backlog == 0
    still_works(target, topic)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/topics/..%2f..%2fetc",
        "/v1/topics/%2e%2e/subscriptions",
        "/v1/../v1/topics/a%00b",
        "/v1/topics/a%3a0",
        "/v1/topics/kl%3atokens",
        "/v1/topics/%7bx%7d/messages",
        "/v1/topics/*",
        "/v1/topics/a%0d%0aX-Injected:%201",
        "//v1//topics",
        "/v1/bodies/..%2f..%2fetc/passwd",
        "/v1/topics/%ff%fe",
    ],
)
def test_names_that_are_paths_or_keys_are_only_refused(target: RunningBroker, path: str) -> None:
    for method in ("GET", "PUT", "POST", "DELETE"):
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n"
        answer = answer_to(target, head.encode() + b"{}", waits=True)
        status = int(answer.split(b" ", 2)[1])
        assert 400 <= status < 500, (method, path, answer)
        assert b"\r\nX-Injected" not in answer.partition(b"\r\n\r\n")[0]


def test_http_on_the_binary_port_and_frames_on_that_of_http(target: RunningBroker, topic: str) -> None:
    with socket.create_connection(("127.0.0.1", target.settings.port), timeout=SOON) as own:
        own.sendall(b"GET /v1/topics HTTP/1.1\r\nHost: x\r\n\r\n")
        said = b""
        while data := own.recv(65_536):
            said += data
        assert b"protocol_error" in said
    assert b"frames go to another port (--port)" in answer_to(target, wire.frame(wire.Info(), 1))
    still_works(target, topic)
