"""Every operation there is, by HTTP alone: what it answers, as documented, and what it has changed."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis

from keylane import ksuid
from keylane_broker.http.app import OPERATIONS
from tests.support.running import RunningBroker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow  # each operation, by two workers

ADMIN = "the token of an administrator"
SOON = 60.0


class Caller:
    """Calls operations by their names, now of this worker and now of that one."""

    def __init__(self, broker: RunningBroker) -> None:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        self._workers = [
            httpx.Client(base_url=url, headers=headers, timeout=SOON) for url in broker.http_urls
        ]
        self._document = schemathesis.openapi.from_dict(self._workers[0].get("/openapi.json").json())
        self._operations = {one.name: one for one in OPERATIONS}
        self.called: set[str] = set()

    def __call__(self, name: str, /, *, said: Any = None, status: int | None = None, **where: Any) -> Any:
        """Return the JSON of an answer, or its content; `where` is in the path, else in the query."""
        one = self._operations[name]
        path = one.path.replace(":int", "")
        in_path = {key: where.pop(key) for key in list(where) if "{" + key + "}" in path}
        path = path.format(**in_path)
        worker = self._workers[0]
        self._workers.reverse()
        body = {"content": said} if isinstance(said, bytes) else {"json": said} if said is not None else {}
        answer = worker.request(one.method, path, params=where, **body)
        assert answer.status_code == (status or one.status), (name, answer.text)
        self._document[one.path.replace(":int", "")][one.method].validate_response(answer)
        if status is None:
            self.called.add(name)
        is_json = answer.headers.get("content-type", "").startswith("application/")
        return answer.json() if answer.content and is_json and one.gives.endswith("json") else answer.content

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with RunningBroker(workers=2, http=True, auth=True, admin_token=ADMIN, partition_lease=2.0) as broker:
        yield broker


@pytest.fixture
def call(broker: RunningBroker) -> Iterator[Caller]:
    caller = Caller(broker)
    yield caller
    caller.close()


def publish(call: Caller, topic: str, *messages: dict[str, Any]) -> list[str]:
    said = call("publish", topic=topic, said={"messages": messages})
    return [one.get("id", "") for one in said["published"]]


def lease(call: Caller, topic: str, count: int, subscription: str = "s") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < count:
        said = {"max_messages": count - len(found), "wait": SOON, "consumer": "c"}
        found += call("lease", topic=topic, subscription=subscription, said=said)["messages"]
    return found


def test_what_narrows_a_call_that_knows_nothing_of_it_is_refused_and_nothing_is_done(
    broker: RunningBroker, call: Caller, topic: str
) -> None:
    call("create_topic", said={"name": topic})
    for name in ("a", "b"):
        call("create_subscription", topic=topic, said={"name": name})
    publish(call, topic, {"data": "1"}, {"data": "2"})
    headers = {"Authorization": f"Bearer {ADMIN}"}
    with httpx.Client(base_url=broker.http_urls[0], headers=headers, timeout=SOON) as http:
        path = f"/v1/topics/{topic}"
        wrong = [
            ("POST", f"{path}/purge", {"json": {"subscription": "a"}}),
            ("POST", f"{path}/purge?subscription=a", {}),
            ("POST", f"{path}/dead-letters/purge?reason=x", {}),
            ("POST", f"{path}/dead-letters/redrive?key=k", {}),
            ("DELETE", f"{path}?dry_run=true", {}),
            ("POST", f"{path}/messages?key=k", {"json": {"messages": [{"data": "3"}]}}),
            (
                "POST",
                f"{path}/messages",
                {"json": {"messages": [{"data": "3"}]}, "headers": {"Keylane-Key": "k"}},
            ),
            (
                "POST",
                f"{path}/messages",
                {
                    "content": b'{"data": "3"}',
                    "headers": {"Keylane-Key": "k", "Content-Type": "application/x-ndjson"},
                },
            ),
        ]
        for method, where, more in wrong:
            answer = http.request(method, where, **more)  # type: ignore[arg-type]
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument"), where
        for name in ("a", "b"):
            assert call("describe_subscription", topic=topic, subscription=name)["backlog"] == 2
        assert http.post(f"{path}/purge", json={}).status_code == 200


@pytest.mark.slow
def test_every_operation_does_what_it_says(broker: RunningBroker, call: Caller, topic: str) -> None:
    """One that is new has to take part."""
    of_topics(call, topic)
    of_messages(call, topic)
    of_failures(call, f"{topic}-f")
    of_bodies(call, topic)
    of_the_cluster(call, broker, topic)
    of_tokens(call)
    call("delete_subscription", topic=topic, subscription="s")
    assert call("subscriptions", topic=topic) == {"subscriptions": []}
    call("delete_topic", topic=topic)
    assert topic not in call("topics")["topics"]
    streams = {"events"}  # which have tests of their own
    assert call.called == {one.name for one in OPERATIONS} - streams


def of_topics(call: Caller, topic: str) -> None:
    assert call("info")["workers"] == ["worker-0", "worker-1"]
    assert call("create_topic", said={"name": topic, "partitions": 2})["partitions"] == 2
    assert topic in call("topics")["topics"]
    assert call("change_topic", topic=topic, said={"retention": 600})["retention"] == 600
    assert call("describe_topic", topic=topic)["retention"] == 600
    made = call("create_subscription", topic=topic, said={"name": "s", "mode": "key_shared", "lease": 600})
    assert (made["mode"], made["lease"]) == ("key_shared", 600)
    changed = call("change_subscription", topic=topic, subscription="s", said={"max_retries": 3})
    assert changed["max_retries"] == 3
    assert call("describe_subscription", topic=topic, subscription="s") == changed
    assert call("subscriptions", topic=topic) == {"subscriptions": ["s"]}
    assert [one["partition"] for one in call("partitions", topic=topic)] == [0, 1]


def of_messages(call: Caller, topic: str) -> None:
    def backlog() -> int:
        return int(call("describe_subscription", topic=topic, subscription="s")["backlog"])

    where: dict[str, Any] = {"topic": topic, "subscription": "s"}
    ids = publish(call, topic, *({"data": str(number), "key": f"k{number}"} for number in range(6)))
    assert {one["id"] for one in call("peek", **where, limit=100)} == set(ids)
    assert {one["data"] for one in call("peek", **where, bodies=True)} == set("012345")
    assert call("explain", **where, id=ids[0])["state"]
    call("skip", **where, said={"id": ids[0]})
    call("delete_message", topic=topic, id=ids[1])
    [own] = publish(call, topic, {"key": "k8", "producer_group": "shop"})
    call("delete_message", topic=topic, id=own, status=403)
    call("delete_message", topic=topic, id=own, producer_group="shop")
    publish(call, topic, {"data": "later", "key": "k9", "delay": 3600, "uid": "a delayed one"})
    wrong = call("delete_message", topic=topic, id="a delayed one", partition=7, status=400)
    assert "partition" in wrong["detail"]
    call("delete_message", topic=topic, id="a delayed one")
    assert {one["key"] for one in call("hot_keys", topic=topic, limit=10)} <= {f"k{n}" for n in range(10)}
    first, second, *rest = lease(call, topic, 4)
    settled = {"results": ["settled"]}
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert call("extend", **where, said={"receipts": [first["receipt"]], "until": later}) == settled
    assert call("extend", **where, said={"receipts": [first["receipt"]], "seconds": 60}) == settled
    call("extend", **where, said={"receipts": [first["receipt"]]}, status=400)
    assert call("ack", **where, said={"receipts": [first["receipt"]]}) == settled
    nack = {"receipts": [second["receipt"]], "until": later, "reason": "a card was refused"}
    assert call("nack", **where, said=nack) == settled
    waiting = call("explain", **where, id=second["id"])
    assert waiting["state"] == "waiting", waiting
    assert backlog() == 3
    assert call("purge_subscription", **where)["messages"] == 3
    assert backlog() == 0
    call("ack", **where, said={"receipts": [one["receipt"] for one in rest]})
    call("seek", **where, said={"position": "earliest"})
    assert backlog() == 5  # what is retained is owed once more, but for what was deleted
    call("purge_topic", topic=topic)
    assert backlog() == 0


def of_failures(call: Caller, topic: str) -> None:
    call("create_topic", said={"name": topic, "partitions": 1})
    skips = {"name": "s", "max_retries": 0, "backoff": None}
    parks = {"name": "p", "mode": "key_shared", "max_retries": 0, "backoff": None, "poison": "park"}
    for said in (skips, parks):
        call("create_subscription", topic=topic, said=said)
    publish(call, topic, {"data": "1", "key": "k"}, {"data": "2", "key": "k"})
    failed = lease(call, topic, 2)
    receipts = [one["receipt"] for one in failed]
    call("nack", topic=topic, subscription="s", said={"receipts": receipts, "reason": "ConnectionError"})

    def letters(**chosen: Any) -> list[dict[str, Any]]:
        return call("dead_letters", topic=topic, **chosen) or []

    wait_until(lambda: len(letters(reason="Connection")) == 2)
    assert letters(reason="other") == []
    [letter] = [one for one in letters() if one["source_id"] == failed[0]["id"]]
    assert call("redrive", topic=topic, said={"ids": [letter["id"]]}) == {"messages": 1}
    assert lease(call, topic, 1)[0]["data"] == "1"
    assert call("purge_dead_letters", topic=topic, said={}) == {"messages": 1}
    assert letters() == []
    where: dict[str, Any] = {"topic": topic, "subscription": "p"}
    head, *_ = lease(call, topic, 1, "p")
    call("nack", **where, said={"receipts": [head["receipt"]], "reason": "poison"})
    [lane] = wait_until(lambda: call("parked", **where))
    assert (lane["key"], lane["reason"]) == ("k", "poison")
    call("unpark", **where, said={"key": "k", "action": "skip"})
    assert call("parked", **where) == []
    [last] = lease(call, topic, 1, "p")
    assert last["data"] == "2"
    leased = call("move_key", **where, said={"key": "k", "consumer": "c"}, status=409)
    assert leased["code"] == "message_leased"
    call("ack", **where, said={"receipts": [last["receipt"]]})
    assert call("move_key", **where, said={"key": "k", "consumer": "c"}) == {"waiting": 0}


def of_bodies(call: Caller, topic: str) -> None:
    one, two, three = ksuid.take(3)
    assert call("put_body", topic=topic, name=one, said=b"one") == {"name": one, "size": 3}
    call("store_bodies", topic=topic, said=msgspec.msgpack.encode([[two, b"two"], [three, b"three"]]))
    assert call("get_body", topic=topic, name=two) == b"two"
    names = {"names": [one, two, three]}
    read = call("read_bodies", topic=topic, said=names)
    assert msgspec.msgpack.decode(read) == [b"one", b"two", b"three"]
    call("sync_bodies", topic=topic, said=names)
    call("delete_body", topic=topic, name=one)
    assert call("has_bodies", topic=topic, said=names) == {"found": [False, True, True]}
    call("delete_bodies", topic=topic, said=names)
    assert call("has_bodies", topic=topic, said=names) == {"found": [False, False, False]}


def of_the_cluster(call: Caller, broker: RunningBroker, topic: str) -> None:
    def owners() -> list[str]:
        return [one["worker"] for one in call("partitions", topic=topic)]

    assert {one["id"] for one in call("cluster")["workers"]} == set(broker.ids)
    wait_until(lambda: all(owners()))
    [other] = {*broker.ids} - {owners()[0]}
    call("move_partition", topic=topic, partition=0, said={"worker": other, "keep": []})
    wait_until(lambda: owners()[0] == other)
    call("drain_worker", worker=other, said={})
    wait_until(lambda: other not in owners())
    call("drain_worker", worker=other, said={"draining": False})
    assert isinstance(call("rebalance", said={"dry_run": True}), list)
    call("rebalance", said={})
    wait_until(lambda: all(worker["partitions"] for worker in call("cluster")["workers"]))
    assert b"keylane_worker_info" in call("metrics")


def of_tokens(call: Caller) -> None:
    made = call("create_token", said={"name": "app", "allow": ["observe:*"], "lifetime": 60})
    assert made["token"].startswith(f"kl_{made['id']}_")
    assert made["id"] in {one["id"] for one in call("tokens")}
    call("revoke_token", token=made["id"])
    assert made["id"] not in {one["id"] for one in call("tokens")}
