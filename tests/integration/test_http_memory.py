"""Those who come by HTTP and never read, or never settle, do not make a worker's memory grow."""

import contextlib
import socket
from collections.abc import Iterator

import httpx
import psutil
import pytest

from keylane import Client, OutgoingMessage, ksuid
from tests.support.running import RunningBroker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SOON = 60.0
MIB = 1024 * 1024
BODY = b"x" * (MIB // 2)
MESSAGES = 300  # of this size: more than a worker may have in memory by far
MOST = 16 * MIB  # max_inflight_bytes


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    with RunningBroker(http=True, max_inflight_bytes=MOST) as broker:
        yield broker


def address(broker: RunningBroker) -> tuple[str, int]:
    return "127.0.0.1", broker.workers[0].settings.http_port


def connect(broker: RunningBroker, stack: contextlib.ExitStack) -> socket.socket:
    own = stack.enter_context(socket.socket())
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    own.settimeout(SOON)
    own.connect(address(broker))
    return own


def test_consumers_that_never_read_or_never_settle(broker: RunningBroker, topic: str) -> None:
    path = f"/v1/topics/{topic}/subscriptions"
    with (
        Client(broker.url) as client,
        httpx.Client(base_url=broker.http_urls[0], timeout=SOON) as http,
        contextlib.ExitStack() as stack,
    ):
        client.create_topic(topic, partitions=2)
        for name in ("deaf", "hoarder"):
            client.create_subscription(topic, name, lease=3600)
        for _ in range(MESSAGES // 20):
            client.publish_many(topic, [OutgoingMessage(BODY)] * 20)
        worker = psutil.Process(broker.pid)
        before = worker.memory_info().rss
        for number in range(8):
            target = f"{path}/deaf/events?consumer=c{number}&permits=1000"
            deaf = connect(broker, stack)
            deaf.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        wait_until(lambda: client.describe_subscription(topic, "deaf").leased > 0)
        held = highest = 0
        while held < MESSAGES:
            answer = http.post(f"{path}/hoarder/lease", json={"max_messages": 50, "wait": SOON})
            if answer.status_code != 429:
                held += len(answer.json()["messages"])  # and none of them is ever settled
            highest = max(highest, worker.memory_info().rss)
        assert highest - before < 4 * MOST, (highest - before) // MIB
        assert client.publish(topic, b"still").id


def test_a_peek_has_bodies_up_to_a_limit_and_says_where_the_others_are(
    broker: RunningBroker, topic: str
) -> None:
    path = f"/v1/topics/{topic}/subscriptions/s/peek?bodies=true&limit=100"
    with (
        Client(broker.url) as client,
        httpx.Client(base_url=broker.http_urls[0], timeout=SOON) as http,
        contextlib.ExitStack() as stack,
    ):
        client.create_topic(topic, partitions=1)
        client.create_subscription(topic, "s")
        for _ in range(3):
            client.publish_many(topic, [OutgoingMessage(BODY)] * 20)
        worker = psutil.Process(broker.pid)
        before = worker.memory_info().rss
        shown = http.get(path).json()
        assert [message.get("data") for message in shown] == [BODY.decode()] * 32 + [None] * 28
        assert http.get(shown[-1]["body"]).content == BODY
        for _ in range(8):  # what they do not read counts, until they are cut off
            deaf = connect(broker, stack)
            deaf.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        wait_until(lambda: sum("data" in message for message in http.get(path).json()) < 32)
        assert worker.memory_info().rss - before < 4 * MOST


def test_a_producer_that_never_reads(broker: RunningBroker, topic: str) -> None:
    """Requests one behind the other on a connection, and no answer is taken."""
    with Client(broker.url) as client, contextlib.ExitStack() as stack:
        client.create_topic(topic, partitions=1)
        client.create_subscription(topic, "s")
        worker = psutil.Process(broker.pid)
        before = highest = worker.memory_info().rss
        said = b'{"messages": [' + b",".join([b'{"data": ""}'] * 1_000) + b"]}"
        head = f"POST /v1/topics/{topic}/messages HTTP/1.1\r\nHost: localhost\r\n".encode()
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(said)
        deaf = connect(broker, stack)
        deaf.settimeout(2.0)
        with contextlib.suppress(TimeoutError):  # it is not listened to any more
            for _ in range(2_000):
                deaf.sendall(head + said)
                highest = max(highest, worker.memory_info().rss)
        assert highest - before < 3 * MOST, (highest - before) // MIB
        assert client.publish(topic, b"still").id


def test_who_does_not_read_an_answer_is_cut_off_and_no_bug_is_logged(topic: str) -> None:
    with (
        RunningBroker(http=True, heartbeat=0.2) as broker,
        httpx.Client(base_url=broker.http_urls[0], timeout=SOON) as http,
        contextlib.ExitStack() as stack,
    ):
        [name] = ksuid.take(1)
        path = f"/v1/bodies/{topic}/{name}"
        assert http.put(path, content=BODY * 40).status_code == 200
        deaf = connect(broker, stack)
        deaf.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        wait_until(lambda: f"the answer to GET {path} is cut off" in broker.log())
        assert len(http.get(path).content) == 40 * len(BODY)
        client = stack.enter_context(Client(broker.url))
        client.create_topic(topic, partitions=1)
        client.create_subscription(topic, "s")
        client.publish(topic, BODY * 20)
        paths = [f"/v1/topics/{topic}/subscriptions/s/{how}" for how in ("lease", "events?consumer=c")]
        deaf = connect(broker, stack)
        head = f"POST {paths[0]} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n"
        deaf.sendall(head.encode() + b"{}")
        wait_until(lambda: f"the answer to POST {paths[0]} is cut off" in broker.log())
        client.publish(topic, BODY * 20)
        deaf = connect(broker, stack)
        deaf.sendall(f"GET {paths[1]} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        wait_until(lambda: f"the answer to GET {paths[1].partition('?')[0]} is cut off" in broker.log())
        assert "Traceback" not in broker.log()
