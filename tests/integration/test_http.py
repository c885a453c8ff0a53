"""The HTTP interface, as a program without a client library uses it."""

import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from keylane import Client
from tests.support.running import RunningBroker

PAGE = Path(__file__).resolve().parents[2] / "docs/http.md"
SOON = 30.0


@pytest.fixture(scope="module")
def served() -> Iterator[RunningBroker]:
    """Two workers with HTTP."""
    with RunningBroker(workers=2, http=True) as broker:
        yield broker


@pytest.fixture(params=[0, 1])
def http(served: RunningBroker, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """Any worker answers any request."""
    with httpx.Client(base_url=served.http_urls[request.param], timeout=SOON) as client:
        yield client


@pytest.fixture
def orders(http: httpx.Client, topic: str) -> str:
    """The path of a topic with a subscription."""
    assert http.post("/v1/topics", json={"name": topic, "partitions": 4}).status_code == 201
    made = http.post(f"/v1/topics/{topic}/subscriptions", json={"name": "s", "mode": "key_shared"})
    assert (made.status_code, made.json()["mode"]) == (201, "key_shared")
    return f"/v1/topics/{topic}"


def publish(http: httpx.Client, path: str, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    answer = http.post(f"{path}/messages", json={"messages": messages})
    assert answer.status_code == 200, answer.text
    return answer.json()["published"]  # type: ignore[no-any-return]


def lease(
    http: httpx.Client, path: str, count: int, consumer: str = "c", **more: Any
) -> list[dict[str, Any]]:
    """Lease so many messages, by as many requests as it takes."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        said = {"max_messages": count - len(found), "wait": SOON, "consumer": consumer, **more}
        answer = http.post(f"{path}/subscriptions/s/lease", json=said)
        assert answer.status_code == 200, answer.text
        found += answer.json()["messages"]
    return found


def settle(http: httpx.Client, path: str, how: str, *messages: dict[str, Any], **more: Any) -> list[str]:
    receipts = [message["receipt"] for message in messages]
    answer = http.post(f"{path}/subscriptions/s/{how}", json={"receipts": receipts, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["results"]  # type: ignore[no-any-return]


def backlog(http: httpx.Client, path: str) -> dict[str, int]:
    said = http.get(f"{path}/subscriptions/s").json()
    return {name: said[name] for name in ("backlog", "leased")}


def test_topics_and_subscriptions_are_made_described_changed_and_deleted(
    http: httpx.Client, orders: str
) -> None:
    assert http.get(orders).json()["subscriptions"] == ["s"]
    assert http.get(f"{orders}/subscriptions").json() == {"subscriptions": ["s"]}
    assert http.patch(f"{orders}/subscriptions/s", json={"paused": True}).json()["paused"]
    assert http.patch(orders, json={"journal": True}).json()["journal"] > 0
    assert [one["partition"] for one in http.get(f"{orders}/partitions").json()] == [0, 1, 2, 3]
    assert http.delete(f"{orders}/subscriptions/s").status_code == 204
    assert http.delete(orders).status_code == 204
    assert http.get(orders).status_code == 404


def test_messages_are_leased_with_their_bodies_and_settled(http: httpx.Client, orders: str) -> None:
    sent: list[dict[str, Any]] = [
        {"data": "42 äpfel", "key": "a", "attributes": {"region": "eu"}},
        {"data_base64": "/wA=", "key": "b"},
        {"key": "c"},
    ]
    ids = {one["id"] for one in publish(http, orders, *sent)}
    got = {message["key"]: message for message in lease(http, orders, 3)}
    assert {message["id"] for message in got.values()} == ids
    assert (got["a"]["data"], got["a"]["attributes"], got["a"]["retry_count"]) == (
        "42 äpfel",
        {"region": "eu"},
        0,
    )
    assert got["b"]["data_base64"] == "/wA="
    assert got["c"]["data"] == ""
    assert settle(http, orders, "ack", *got.values()) == ["settled"] * 3
    assert settle(http, orders, "ack", *got.values()) == ["stale"] * 3
    assert backlog(http, orders) == {"backlog": 0, "leased": 0}


def test_messages_say_which_trace_their_request_was_of(http: httpx.Client, orders: str) -> None:
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    said = {"messages": [{"data": "1", "key": "a"}, {"key": "b", "attributes": {"traceparent": "own"}}]}
    assert http.post(f"{orders}/messages", json=said, headers=trace).status_code == 200
    plain = {**trace, "Content-Type": "text/plain", "Keylane-Key": "c"}
    assert http.post(f"{orders}/messages", content="3", headers=plain).status_code == 200
    got = {message["key"]: message["attributes"]["traceparent"] for message in lease(http, orders, 3)}
    assert got == {"a": trace["traceparent"], "b": "own", "c": trace["traceparent"]}


def test_a_nack_comes_back_and_an_extension_lasts(http: httpx.Client, orders: str) -> None:
    publish(http, orders, {"data": "1", "key": "a"})
    [first] = lease(http, orders, 1)
    assert settle(http, orders, "nack", first, delay=0) == ["settled"]
    [again] = lease(http, orders, 1)
    assert (again["id"], again["retry_count"]) == (first["id"], 1)
    assert settle(http, orders, "extend", again, seconds=600) == ["settled"]
    assert settle(http, orders, "ack", again) == ["settled"]


def test_a_long_poll_waits_for_the_message(http: httpx.Client, orders: str) -> None:
    later = threading.Timer(0.5, publish, (http, orders, {"data": "1", "key": "a"}))
    later.start()
    [message] = lease(http, orders, 1)
    later.join()
    assert message["data"] == "1"
    assert http.post(f"{orders}/subscriptions/s/lease", json={"consumer": "c"}).json() == {"messages": []}


def test_a_consumer_has_no_more_than_it_has_asked_for(
    http: httpx.Client, served: RunningBroker, orders: str
) -> None:
    """What nobody has asked for stays free for others."""
    publish(http, orders, *({"data": str(number), "key": f"k{number}"} for number in range(50)))
    mine = lease(http, orders, 5)
    assert settle(http, orders, "ack", *mine) == ["settled"] * 5
    with (
        Client(served.url) as client,
        client.subscribe(orders.rpartition("/")[2], "s", mode="key_shared") as consumer,
    ):
        theirs = [consumer.receive(timeout=SOON) for _ in range(45)]
        assert {message.key for message in theirs} == {f"k{n}" for n in range(50)} - {
            one["key"] for one in mine
        }


def test_what_one_worker_has_leased_another_settles(served: RunningBroker, orders: str) -> None:
    with (
        httpx.Client(base_url=served.http_urls[0], timeout=SOON) as one,
        httpx.Client(base_url=served.http_urls[1], timeout=SOON) as other,
    ):
        publish(one, orders, *({"data": str(number), "key": f"k{number}"} for number in range(4)))
        messages = lease(one, orders, 4)
        assert settle(other, orders, "extend", messages[0], seconds=60) == ["settled"]
        assert settle(other, orders, "ack", *messages[:2]) == ["settled"] * 2
        assert settle(one, orders, "ack", *messages[2:]) == ["settled"] * 2
        assert backlog(one, orders)["backlog"] == 0
        publish(one, orders, {"data": "next", "key": "k0"})
        assert [message["data"] for message in lease(other, orders, 1)] == ["next"]


def test_a_request_that_is_repeated_publishes_once(http: httpx.Client, orders: str) -> None:
    said = {"messages": [{"data": "1", "key": "a"}, {"data": "2", "key": "a"}]}
    answers = [
        http.post(f"{orders}/messages", json=said, headers={"Idempotency-Key": "order-7"}).json()["published"]
        for _ in range(2)
    ]
    assert [one["id"] for one in answers[0]] == [one["id"] for one in answers[1]]
    assert [one.get("duplicate", False) for one in answers[1]] == [True, True]
    assert backlog(http, orders)["backlog"] == 2


def test_a_body_as_it_is_and_a_cloud_event(http: httpx.Client, orders: str) -> None:
    headers = {"Content-Type": "image/png", "Keylane-Key": "a", "Keylane-Attribute-Color": "red"}
    assert http.post(f"{orders}/messages", content=b"\x89PNG", headers=headers).status_code == 200
    event = {
        "Content-Type": "application/cloudevents",
        "ce-id": "1",
        "ce-source": "/shop",
        "ce-type": "order",
        "ce-partitionkey": "b",
    }
    for _ in range(2):  # a CloudEvent is the same if source and id are
        assert http.post(f"{orders}/messages", content=b"{}", headers=event).status_code == 200
    got = {message["key"]: message for message in lease(http, orders, 2)}
    assert got["a"]["data_base64"] == "iVBORw=="
    assert got["a"]["attributes"] == {"color": "red", "content-type": "image/png"}
    assert got["b"]["attributes"]["ce-type"] == "order"
    assert backlog(http, orders)["backlog"] == 2


def test_headers_of_a_body_as_it_is(http: httpx.Client, orders: str) -> None:
    def post(body: str, **headers: str) -> httpx.Response:
        said = {"Content-Type": "text/plain"} | {f"Keylane-{name}": value for name, value in headers.items()}
        return http.post(f"{orders}/messages", content=body, headers=said)

    for headers, detail in (
        ({"Tll": "5"}, "no header 'keylane-tll'"),
        ({"Delay": "soon"}, "keylane-delay is 'soon'"),
        ({"Ttl": "5m"}, "keylane-ttl is '5m'"),
        ({"Priority": "1.5"}, "keylane-priority is '1.5'"),
        ({"Priority": "10"}, "0 to 9"),
    ):
        answer = post("no", **headers)
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")
        assert detail in answer.json()["detail"]
    assert post("gone", Ttl="0").status_code == post("urgent", Priority="7").status_code == 200
    assert [message["data"] for message in lease(http, orders, 1)] == ["urgent"]


def test_a_stream_of_lines_is_published_and_says_which_were_not(http: httpx.Client, orders: str) -> None:
    lines = [f'{{"data": "{number}", "key": "k{number % 7}"}}\n'.encode() for number in range(1_200)]
    lines[3] = b'{"date": "x"}\n'

    def parts() -> Iterator[bytes]:
        text = b"".join(lines)
        for at in range(0, len(text), 7_001):  # lines do not come whole
            yield text[at : at + 7_001]

    headers = {"Content-Type": "application/x-ndjson"}
    said = http.post(f"{orders}/messages", content=parts(), headers=headers).json()
    assert (said["published"], said["failed"]) == (1_199, 1)
    assert (said["failures"][0]["line"], said["failures"][0]["code"]) == (4, "invalid_argument")
    assert backlog(http, orders)["backlog"] == 1_199


def test_messages_are_skipped_deleted_and_purged(http: httpx.Client, orders: str) -> None:
    sent = publish(http, orders, *({"data": str(number), "key": f"k{number}"} for number in range(4)))
    assert http.post(f"{orders}/subscriptions/s/skip", json={"id": sent[0]["id"]}).status_code == 204
    assert http.delete(f"{orders}/messages/{sent[1]['id']}").status_code == 204
    again = http.delete(f"{orders}/messages/{sent[1]['id']}")
    assert (again.status_code, again.json()["code"]) == (404, "message_not_found")
    assert backlog(http, orders)["backlog"] == 2
    assert http.post(f"{orders}/subscriptions/s/purge").json() == {"messages": 2}
    publish(http, orders, {"data": "4"})
    assert http.post(f"{orders}/purge").json() == {"messages": 1}
    assert backlog(http, orders)["backlog"] == 0


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The messages of a stream of events, and the id of each."""
    found: dict[str, str] = {}
    for line in response.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            found[name] = value
        elif "data" in found:
            yield httpx.Response(200, text=found["data"]).json()
            found = {}


def test_events_are_pushed_within_permits_and_sent_again_after_the_last_one(
    http: httpx.Client, orders: str
) -> None:
    publish(http, orders, *({"data": str(number), "key": f"k{number}"} for number in range(6)))
    path = f"{orders}/subscriptions/s/events?consumer=sse&permits=3"
    with http.stream("GET", path) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = events(response)
        first = [next(stream) for _ in range(3)]
        while backlog(http, orders)["leased"] > 3:
            pass  # what has come from another worker meanwhile goes back
        assert settle(http, orders, "ack", first[0]) == ["settled"]
        fourth = next(stream)
    with http.stream("GET", path, headers={"Last-Event-ID": first[1]["receipt"]}) as response:
        stream = events(response)
        assert {next(stream)["id"], next(stream)["id"]} == {first[2]["id"], fourth["id"]}
        assert settle(http, orders, "ack", *first[1:], fourth) == ["settled"] * 3
        assert {next(stream)["id"] for _ in range(2)}.isdisjoint({one["id"] for one in (*first, fourth)})


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/topics/nope", None, 404, "topic_not_found"),
        ("GET", "/nope", None, 404, "not_found"),
        ("PUT", "/v1/topics", {}, 405, "method_not_allowed"),
        ("POST", "/v1/topics", {"name": "a b"}, 400, "invalid_argument"),
        ("POST", "/v1/topics", {"name": "x", "partition": 3}, 400, "invalid_argument"),
        ("POST", "/v1/topics", b"{", 400, "invalid_argument"),
        ("POST", "/v1/topics/nope/messages", {"messages": [{"data": "1"}]}, 404, "topic_not_found"),
        ("POST", "/v1/topics/nope/subscriptions/s/lease", {}, 404, "topic_not_found"),
        ("POST", "/v1/topics/nope/subscriptions/s/ack", {"receipts": ["!"]}, 400, "invalid_argument"),
        ("POST", "/v1/cluster/workers/nobody/drain", {}, 400, "invalid_argument"),
    ],
)
def test_what_is_wrong_is_said_as_a_problem(
    http: httpx.Client, method: str, path: str, body: Any, status: int, code: str
) -> None:
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"Content-Type": "application/json"}
    answer = http.request(method, path, headers=headers, **sent)
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.json()["detail"]


def test_a_missing_subscription_is_not_made_by_a_lease(http: httpx.Client, orders: str) -> None:
    answer = http.post(f"{orders}/subscriptions/other/lease", json={})
    assert (answer.status_code, answer.json()["code"]) == (404, "subscription_not_found")


def test_some_messages_that_cannot_be_published_do_not_hold_back_others(
    http: httpx.Client, orders: str
) -> None:
    said = {"messages": [{"data": "1", "key": "a"}, {"data": "2", "partition": 99}]}
    answer = http.post(f"{orders}/messages", json=said)
    assert answer.status_code == 207
    good, bad = answer.json()["published"]
    assert good["id"]
    assert bad["code"] == "invalid_argument"


def test_the_lines_of_the_page_run_as_they_are(served: RunningBroker) -> None:
    """A shell is for $'…' of bash."""
    lines = [line.strip() for line in PAGE.read_text("utf-8").splitlines() if line.startswith("    curl")]
    for line in lines:
        command = line.replace("http://127.0.0.1:8080", served.http_urls[0])
        done = subprocess.run(
            ["bash", "-c", command.replace("curl ", "curl -sS -w '\\n%{http_code}' ", 1)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        status = done.stdout.rpartition("\n")[2]
        assert re.fullmatch("20[0-4]", status), (line, done.stdout, done.stderr)
    assert len(lines) > 10
    assert shlex.split(lines[0])[0] == "curl"
