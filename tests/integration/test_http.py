"""The HTTP interface, as a program without a client library uses it."""

import re
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import redis

from keylane import Client, Forbidden
from tests.support.running import RunningBroker
from tests.support.waiting import wait_until

PAGE = Path(__file__).resolve().parents[2] / "docs/http.md"
SOON = 30.0


@pytest.fixture(scope="module")
def served() -> Iterator[RunningBroker]:
    """Two workers with HTTP."""
    with RunningBroker(workers=2, http=True) as broker:
        yield broker


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.slow)])
def http(served: RunningBroker, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """Any worker answers any request."""
    with httpx.Client(base_url=served.http_urls[request.param], timeout=SOON) as client:
        yield client


@pytest.fixture
def orders(http: httpx.Client, topic: str) -> str:
    """The path of a topic with a subscription."""
    assert http.post("/v1/topics", json={"name": topic, "partitions": 4}).status_code == 201
    made = http.post(
        f"/v1/topics/{topic}/subscriptions", json={"name": "s", "mode": "key_shared", "lease": 600}
    )
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


@pytest.mark.slow
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


def test_what_became_of_a_message_and_what_is_leased_has_every_field_whatever_it_is(
    http: httpx.Client, orders: str
) -> None:
    """Who asks for one finds it, as in the client."""
    topic = orders.rpartition("/")[2]
    stored, later = publish(http, orders, {"data": "1", "uid": "a"}, {"data": "2", "delay": 3600, "uid": "b"})
    [again] = publish(http, orders, {"data": "1", "uid": "a"})
    said = {"uid": "a", "durability": "memory", "duplicate": False, "no_subscribers": False, "delayed": False}
    where = {"id": stored["id"], "partition": int(stored["id"].partition(":")[0])}
    assert stored == {**said, **where}
    assert again == {**said, **where, "duplicate": True}
    assert later == {**said, "id": None, "partition": later["partition"], "uid": "b", "delayed": True}
    [message] = lease(http, orders, 1)
    assert (message["topic"], message["producer_group"]) == (topic, None)
    assert 0 <= message["age"] < SOON


def test_a_receipt_that_is_none_does_not_hold_back_others(http: httpx.Client, orders: str) -> None:
    publish(http, orders, {"data": "1", "key": "a"})
    [message] = lease(http, orders, 1)
    answer = http.post(
        f"{orders}/subscriptions/s/ack", json={"receipts": ["!", message["receipt"], message["id"]]}
    )
    assert (answer.status_code, answer.json()) == (200, {"results": ["stale", "settled", "stale"]})
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_consumer_whose_leases_were_ended_has_nothing_that_it_has_not_asked_for(
    served: RunningBroker, topic: str
) -> None:
    """Its permits came back with the leases: they are for nobody, until there is another request."""
    ways: dict[str, dict[str, Any]] = {"purge": {}, "seek": {"position": "latest"}, "skip": {}, "nack": {}}
    with httpx.Client(base_url=served.http_urls[0], timeout=SOON) as http:
        path = f"/v1/topics/{topic}"
        http.post("/v1/topics", json={"name": topic, "partitions": 2}).raise_for_status()
        for way in ways:
            said = {"name": way, "mode": "key_shared", "lease": 600}
            http.post(f"{path}/subscriptions", json=said).raise_for_status()
        publish(http, path, *({"data": str(number), "key": "a"} for number in range(4)))
        for way, what in ways.items():
            at = f"{path}/subscriptions/{way}"
            leased: list[dict[str, Any]] = []
            while len(leased) < 4:
                wanted = {"consumer": "c", "max_messages": 4 - len(leased), "wait": SOON}
                leased += http.post(f"{at}/lease", json=wanted).json()["messages"]
            every = [{"id": one["id"]} for one in leased]
            for said in every if way == "skip" else [what]:
                if way == "nack":  # those behind it go back, too
                    said = {"receipts": [leased[0]["receipt"]], "delay": 3600}
                http.post(f"{at}/{way}", json=said).raise_for_status()
        publish(http, path, *({"data": key, "key": key} for key in "bcdefghi"))

        def taken() -> dict[str, int]:
            counts = {way: http.get(f"{path}/subscriptions/{way}").json()["leased"] for way in ways}
            return {way: count for way, count in counts.items() if count}

        wait_until(lambda: not taken())
        for _ in range(30):  # it had some by turns
            assert not taken()
            time.sleep(0.05)


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


@pytest.mark.slow
@pytest.mark.parametrize("consumer", ["app", None])
def test_requests_of_a_consumer_may_go_to_any_worker_all_the_time(
    served: RunningBroker, topic: str, consumer: str | None
) -> None:
    """Nothing waits for the end of a lease, and nobody who waits is sent away."""
    workers = [httpx.Client(base_url=url, timeout=SOON) for url in served.http_urls]
    path, count = f"/v1/topics/{topic}", 60
    assert workers[0].post("/v1/topics", json={"name": topic, "partitions": 4}).status_code == 201
    made = {"name": "s", "mode": "key_shared", "lease": 3600}
    assert workers[0].post(f"{path}/subscriptions", json=made).status_code == 201
    publish(workers[0], path, *({"data": str(number), "key": f"k{number}"} for number in range(count)))
    found: list[str] = []

    def consume(turn: int) -> None:
        while len(found) < count:
            turn += 1
            said = {"max_messages": 3, "wait": 0.2} | ({"consumer": consumer} if consumer else {})
            answer = workers[turn % 2].post(f"{path}/subscriptions/s/lease", json=said)
            assert answer.status_code == 200, answer.text
            messages = answer.json()["messages"]
            for how, more in (("extend", {"seconds": 3600.0}), ("extend", {"seconds": 3600.0}), ("ack", {})):
                turn += 1
                if messages:
                    results = settle(workers[turn % 2], path, how, *messages, **more)
                    assert results == ["settled"] * len(messages)
            found.extend(message["data"] for message in messages)

    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(consume, turn) for turn in range(4)]:
            done.result()
    assert sorted(map(int, found)) == list(range(count))
    assert backlog(workers[0], path) == {"backlog": 0, "leased": 0}
    for worker in workers:
        worker.close()


@pytest.mark.slow
def test_a_consumer_whose_worker_dies_goes_on_at_another(topic: str) -> None:
    with (
        RunningBroker(workers=2, http=True, partition_lease=1.0, session=1.0) as broker,
        httpx.Client(base_url=broker.http_urls[0], timeout=SOON) as http,
    ):
        path, names = f"/v1/topics/{topic}", [f"c{number}" for number in range(8)]
        assert http.post("/v1/topics", json={"name": topic, "partitions": 2}).status_code == 201
        assert http.post(f"{path}/subscriptions", json={"name": "s"}).status_code == 201
        for name in names:  # some of them are at the second worker
            publish(http, path, {"data": name})
            settle(http, path, "ack", *lease(http, path, 1, name))
        broker.kill_worker(1)

        def works(name: str) -> bool:
            try:
                answer = http.post(f"{path}/messages", json={"messages": [{"data": name}]})
                assert answer.status_code == 200, answer.text
                return settle(http, path, "ack", *lease(http, path, 1, name)) == ["settled"]
            except AssertionError:  # while its partitions have no owner, or its lease is a dead one's
                return False

        for name in names:
            wait_until(lambda name=name: works(name))  # type: ignore[misc]


def test_a_request_that_is_repeated_publishes_once(http: httpx.Client, orders: str) -> None:
    said = {"messages": [{"data": "1", "key": "a"}, {"data": "2", "key": "a"}]}
    answers = [
        http.post(f"{orders}/messages", json=said, headers={"Idempotency-Key": "order-7"}).json()["published"]
        for _ in range(2)
    ]
    assert [one["id"] for one in answers[0]] == [one["id"] for one in answers[1]]
    assert [one.get("duplicate", False) for one in answers[1]] == [True, True]
    assert backlog(http, orders)["backlog"] == 2


def test_an_idempotency_key_that_is_empty_is_refused(http: httpx.Client, orders: str) -> None:
    said = {"messages": [{"data": "1"}, {"data": "2"}]}
    answer = http.post(f"{orders}/messages", json=said, headers={"Idempotency-Key": ""})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")
    assert http.get(orders).json()["messages"] == 0


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


@pytest.mark.parametrize("data", ['{"total": 42}', '{"messages": [{"data": "1"}]}'])
@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "application/x-ndjson"]
)
def test_the_data_of_a_cloud_event_are_its_own_whatever_their_type(
    http: httpx.Client, orders: str, kind: str, data: str
) -> None:
    event = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/shop", "ce-type": "order"}
    answer = http.post(f"{orders}/messages", content=data, headers={"Content-Type": kind, **event})
    assert answer.status_code == 200, answer.text
    [got] = lease(http, orders, 1)
    assert got["data"] == data
    assert got["attributes"] == {"content-type": kind, **event}


def test_cloud_events_of_two_sources_are_two_whatever_their_ids(http: httpx.Client, orders: str) -> None:
    sources = ["/shop", "/other", "/long" * 100]
    for source in sources * 2:
        event = {"Content-Type": "text/plain", "ce-id": "1", "ce-source": source, "ce-type": "order"}
        assert http.post(f"{orders}/messages", content=b"{}", headers=event).status_code == 200
    assert backlog(http, orders)["backlog"] == 3
    assert sorted(one["attributes"]["ce-source"] for one in lease(http, orders, 3)) == sorted(sources)


def test_a_key_is_the_same_in_a_header_and_in_json(http: httpx.Client, orders: str) -> None:
    headers = [(b"Content-Type", b"text/plain"), (b"Keylane-Key", "müller".encode())]
    headers += [(b"Keylane-Attribute-City", "Köln".encode()), (b"ce-subject", b"K%C3%B6ln")]
    assert http.post(f"{orders}/messages", content=b"1", headers=headers).status_code == 200
    publish(http, orders, {"data": "2", "key": "müller"})
    got = lease(http, orders, 2)
    assert [(one["key"], one["data"]) for one in got] == [("müller", "1"), ("müller", "2")]
    assert (got[0]["attributes"]["city"], got[0]["attributes"]["ce-subject"]) == ("Köln", "Köln")
    headers[1] = (b"Keylane-Key", b"m\xfcller")
    refused = http.post(f"{orders}/messages", content=b"1", headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_argument")


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
        ({"Deliver-At": "soon"}, "keylane-deliver-at is 'soon'"),
        ({"Expires-At": "2026-11-18T09:00:00"}, "expires_at"),
    ):
        answer = post("no", **headers)
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")
        assert detail in answer.json()["detail"]
    assert post("gone", Ttl="0").status_code == post("urgent", Priority="7").status_code == 200
    assert post("gone", **{"Expires-At": "2020-01-01T00:00:00Z"}).status_code == 200
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert post("later", **{"Deliver-At": later}).json()["published"][0]["delayed"]
    assert [message["data"] for message in lease(http, orders, 1)] == ["urgent"]


def test_a_stream_of_lines_is_published_and_says_which_were_not(http: httpx.Client, orders: str) -> None:
    lines = [f'{{"data": "{number}", "key": "k{number % 7}"}}\n'.encode() for number in range(1_200)]
    lines[3] = b'{"date": "x"}\n'
    lines[700] = b'{"data": "\xff"}\n'

    def parts() -> Iterator[bytes]:
        text = b"".join(lines)
        for at in range(0, len(text), 7_001):  # lines do not come whole
            yield text[at : at + 7_001]

    headers = {"Content-Type": "application/x-ndjson"}
    said = http.post(f"{orders}/messages", content=parts(), headers=headers).json()
    assert (said["published"], said["failed"]) == (1_198, 2)
    assert [(one["line"], one["code"]) for one in said["failures"]] == [
        (4, "invalid_argument"),
        (701, "invalid_argument"),
    ]
    assert backlog(http, orders)["backlog"] == 1_198


def test_a_line_is_published_when_it_has_come_however_long_the_next_one_takes(
    http: httpx.Client, orders: str
) -> None:
    got: list[str] = []

    def parts() -> Iterator[bytes]:
        for number in range(3):
            yield b'{"data": "%d", "key": "a"}\n{"data":' % number
            got.extend(message["data"] for message in lease(http, orders, 1))
            yield b' "half", "key": "b"}\n'
            got.extend(message["data"] for message in lease(http, orders, 1))

    with httpx.Client(base_url=http.base_url, timeout=SOON) as producer:
        headers = {"Content-Type": "application/x-ndjson"}
        said = producer.post(f"{orders}/messages", content=parts(), headers=headers).json()
    assert (said["published"], said["failed"]) == (6, 0)
    assert got == ["0", "half", "1", "half", "2", "half"]


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


@pytest.mark.parametrize("uid", ["/shop 1", "a/../b", "https://shop.example/1?x#y", "äpfel"])
def test_a_delayed_message_is_deleted_by_its_uid_whatever_that_is(
    http: httpx.Client, orders: str, uid: str
) -> None:
    for _ in range(2):
        [sent] = publish(http, orders, {"data": "1", "key": "a", "uid": uid, "delay": 3_600})
        assert (sent["delayed"], sent.get("duplicate", False)) == (True, False)
        assert http.delete(f"{orders}/messages/{quote(uid, safe='')}").status_code == 204
    assert http.get(orders).json()["delayed"] == 0


def test_a_message_of_a_producer_group_says_so_and_only_that_group_deletes_it(
    served: RunningBroker, http: httpx.Client, orders: str
) -> None:
    topic = orders.rpartition("/")[2]
    shop = {b"Keylane-Producer-Group": "shöp".encode(), b"Content-Type": b"text/plain"}
    line = {"Content-Type": "application/x-ndjson"}
    sent = publish(
        http,
        orders,
        {"key": "json", "producer_group": "shöp"},
        {"key": "other", "producer_group": "other"},  # of the same request
        {"key": "nobody's"},
    )
    for key, body in ((b"header", b"1"), (b"large", b"x" * 3_000_000)):
        answer = http.post(f"{orders}/messages", content=body, headers={**shop, b"Keylane-Key": key})
        sent += answer.json()["published"]
    said = '{"key": "line", "producer_group": "shöp"}'
    assert http.post(f"{orders}/messages", content=said, headers=line).json()["published"] == 1
    groups = dict.fromkeys(("json", "header", "large", "line"), "shöp") | {"other": "other"}
    peeked = http.get(f"{orders}/subscriptions/s/peek").json()
    assert {one["key"]: one["producer_group"] for one in peeked} == {**groups, "nobody's": ""}
    got = lease(http, orders, 6)
    assert {one["key"]: one.get("producer_group") for one in got} == {**groups, "nobody's": None}
    settle(http, orders, "nack", *got, delay=3600)

    publish(http, orders, {"data": "later", "delay": 3600, "uid": "later", "producer_group": "shöp"})
    with Client(served.url) as stranger, Client(served.url, producer_group="shöp") as client:
        for handle in (sent[0]["id"], sent[3]["id"], sent[4]["id"], "later"):
            with pytest.raises(Forbidden, match="producer group 'shöp'") as refused:
                stranger.delete_message(topic, handle)
            for query in ({}, {"producer_group": "other"}, {"producer_group": ""}):
                answer = http.delete(f"{orders}/messages/{handle}", params=query)
                assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
                assert answer.json()["detail"] == str(refused.value)
        client.delete_message(topic, sent[0]["id"])  # a group is the same however it comes
        mine = client.publish(topic, b"mine", key="k").id
    assert mine is not None
    for handle in (mine, sent[3]["id"], sent[4]["id"], "later"):
        answer = http.delete(f"{orders}/messages/{handle}", params={"producer_group": "shöp"})
        assert answer.status_code == 204, answer.text
    other = {"producer_group": "other"}
    assert http.delete(f"{orders}/messages/{sent[1]['id']}", params=other).status_code == 204
    assert http.delete(f"{orders}/messages/{sent[2]['id']}", params=other).status_code == 204  # nobody's
    assert [one["key"] for one in http.get(f"{orders}/subscriptions/s/peek").json()] == ["line"]


def test_a_producer_group_that_cannot_be_refuses_its_message_only(http: httpx.Client, orders: str) -> None:
    said = {"messages": [{"key": "a", "producer_group": "two words"}, {"key": "b"}]}
    answer = http.post(f"{orders}/messages", json=said)
    assert answer.status_code == 207
    assert [one.get("code") for one in answer.json()["published"]] == ["invalid_name", None]
    shop = {"Keylane-Producer-Group": "two words", "Content-Type": "text/plain"}
    for body in (b"1", b"x" * 3_000_000):
        refused = http.post(f"{orders}/messages", content=body, headers=shop)
        assert (refused.status_code, refused.json()["code"]) == (400, "invalid_name")
        assert "'two words' has a space" in refused.json()["detail"]
    assert backlog(http, orders)["backlog"] == 1


def test_a_peek_shows_bodies_as_a_lease_does_and_takes_nothing(
    served: RunningBroker, http: httpx.Client, orders: str
) -> None:
    publish(
        http,
        orders,
        {"data": "42 äpfel", "key": "text"},
        {"data_base64": "/wA=", "key": "bytes"},
        {"key": "none"},
        {"data": "lost", "key": "lost", "uid": "lost"},
    )
    path = f"{orders}/subscriptions/s/peek"
    plain = {one["key"]: one for one in http.get(path).json()}
    assert not any({"data", "data_base64", "missing", "body"} & one.keys() for one in plain.values())
    assert (plain["text"]["size"], plain["text"]["state"]) == (9, "fresh")
    topic = orders.rpartition("/")[2]
    with redis.Redis.from_url(served.redis_url) as connection:
        for key in connection.scan_iter(f"kl:bodies:{topic}:*"):
            for name, body in connection.hgetall(key).items():
                if body == b"lost":
                    connection.hdel(key, name)

    def shown(messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        fields = ("data", "data_base64", "missing", "body")
        return {one["key"]: {name: one[name] for name in fields if name in one} for one in messages}

    peeked = shown(http.get(path, params={"bodies": True}).json())
    assert peeked == {
        "text": {"data": "42 äpfel"},
        "bytes": {"data_base64": "/wA="},
        "none": {"data": ""},
        "lost": {"missing": True},
    }
    assert backlog(http, orders) == {"backlog": 4, "leased": 0}
    assert shown(lease(http, orders, 4)) == peeked
    assert shown(http.get(path, params={"bodies": True}).json()) == peeked  # also while they are leased


def test_a_peek_shows_bodies_that_are_with_their_messages(http: httpx.Client, topic: str) -> None:
    assert http.post("/v1/topics", json={"name": topic, "inline": 100}).status_code == 201
    path = f"/v1/topics/{topic}"
    assert http.post(f"{path}/subscriptions", json={"name": "s"}).status_code == 201
    publish(http, path, {"data": "small"}, {"data_base64": "/wA="}, {"data": "large" * 100})
    shown = http.get(f"{path}/subscriptions/s/peek", params={"bodies": "true"}).json()
    assert {one.get("data", one.get("data_base64")) for one in shown} == {"small", "/wA=", "large" * 100}


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


@pytest.mark.slow
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


def test_events_that_one_worker_has_sent_another_sends_again(served: RunningBroker, orders: str) -> None:
    path = f"{orders}/subscriptions/s/events?consumer=sse&permits=10"
    with httpx.Client(base_url=served.http_urls[0], timeout=SOON) as one:
        publish(one, orders, *({"data": str(number), "key": "a"} for number in range(3)))
        with one.stream("GET", path) as response:
            stream = events(response)
            sent = [next(stream)["receipt"] for _ in range(3)]
    with (
        httpx.Client(base_url=served.http_urls[1], timeout=SOON) as other,
        other.stream("GET", path, headers={"Last-Event-ID": sent[0]}) as response,
    ):
        stream = events(response)
        assert [next(stream)["receipt"] for _ in range(2)] == sent[1:]


def test_a_stream_of_events_says_why_it_ends(served: RunningBroker, http: httpx.Client, orders: str) -> None:
    with http.stream("GET", f"{orders}/subscriptions/s/events?consumer=sse") as response:
        lines = response.iter_lines()
        assert next(lines) == ": connected"
        assert http.delete(f"{orders}/subscriptions/s").status_code == 204
        *_, name, data, _ = lines
    assert name == "event: error"
    assert httpx.Response(200, text=data.removeprefix("data: ")).json()["code"] == "subscription_not_found"
    assert "Traceback" not in served.log()


@pytest.mark.slow
def test_who_has_hung_up_gets_no_messages(http: httpx.Client, orders: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        http.post(f"{orders}/subscriptions/s/lease", json={"wait": 60, "consumer": "c"}, timeout=1)
    with http.stream("GET", f"{orders}/subscriptions/s/events?consumer=d") as response:
        next(response.iter_lines())
    publish(http, orders, {"data": "1", "key": "a"})
    [message] = lease(http, orders, 1)
    assert (message["data"], message["retry_count"]) == ("1", 0)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/topics/nope", None, 404, "topic_not_found"),
        ("GET", "/nope", None, 404, "not_found"),
        ("PUT", "/v1/topics", {}, 405, "method_not_allowed"),
        ("POST", "/v1/topics", {"name": "a b"}, 400, "invalid_name"),
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


@pytest.mark.parametrize("name", ["", "a b", "../x", "a:b", "x" * 201, "a\n", "é"])
def test_a_name_that_cannot_be_one_is_said_to_be_invalid_wherever_it_is(
    http: httpx.Client, orders: str, name: str
) -> None:
    quoted = quote(name, safe="")
    subscription = f"{orders}/subscriptions/s"
    answers = [
        http.post("/v1/topics", json={"name": name}),
        http.post(f"{orders}/subscriptions", json={"name": name}),
        http.post(f"{orders}/subscriptions", json={"name": "other", "dead_letter": name}),
        http.patch(subscription, json={"dead_letter": name}),
        http.post(f"{subscription}/lease", json={"consumer": name}),
        http.get(f"{subscription}/events?consumer={quoted}"),
        http.post(f"{subscription}/lanes/move", json={"key": "a", "consumer": name}),
        http.get(f"{orders}/dead-letters?subscription={quoted}"),
        http.post(f"{orders}/dead-letters/redrive", json={"subscription": name}),
        http.post(f"{orders}/partitions/0/move", json={"worker": name}),
        *([http.get(f"/v1/topics/{quoted}")] if name and "/" not in name else []),
    ]
    assert {(one.status_code, one.json()["code"]) for one in answers} == {(400, "invalid_name")}


@pytest.mark.parametrize("path", ["/v1/topics/", "/v1/info/", "//v1/info", "/v1/topics/x/subscriptions/"])
def test_a_path_that_is_almost_one_of_ours_is_not_sent_elsewhere(http: httpx.Client, path: str) -> None:
    answer = http.get(f"{http.base_url}".rstrip("/") + path, headers={"Host": "evil.example"})
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert "location" not in answer.headers


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


@pytest.mark.slow
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
