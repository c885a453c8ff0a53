"""The HTTP interface says what the client says: no option is forgotten, and every operation has its place."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from keylane import AsyncClient, Consumer, InvalidArgument, Message, PeekedMessage, Unavailable
from keylane.produce.outgoing import GroupedMessage
from keylane.types import Outcome
from keylane_broker.engine.values import WorkerReport
from keylane_broker.http import openapi, publishing, values
from keylane_broker.http.app import OPERATIONS
from keylane_broker.http.homes import Homes
from keylane_broker.http.leasing import HttpConsumer


def options(method: Callable[..., Any], *but: str) -> set[str]:
    return set(inspect.signature(method).parameters) - {"self", *but}


def fields(kind: type) -> set[str]:
    return {field.name for field in msgspec.structs.fields(kind)}


MORE: dict[type, set[str]] = {
    values.DeadLetterQuery: {"limit"},  # what an iterator does not need
    values.DeletionQuery: {"producer_group"},  # which a client says once, as below
}


@pytest.mark.parametrize(
    ("kind", "method", "in_path"),
    [
        (values.NewTopic, AsyncClient.create_topic, []),
        (values.TopicChange, AsyncClient.change_topic, ["name"]),
        (values.NewSubscription, AsyncClient.create_subscription, ["topic"]),
        (values.SubscriptionChange, AsyncClient.change_subscription, ["topic", "name"]),
        (values.Nacks, Consumer.nack, ["messages"]),
        (values.Extensions, Consumer.extend, ["messages"]),
        (values.PeekQuery, AsyncClient.peek, ["topic", "subscription"]),
        (values.ExplainQuery, AsyncClient.explain, ["topic", "subscription"]),
        (values.DeletionQuery, AsyncClient.delete_message, ["topic", "id"]),
        (values.HotKeysQuery, AsyncClient.hot_keys, ["name"]),
        (values.DeadLetterQuery, AsyncClient.dead_letters, ["topic", "ids"]),  # ids are for what follows
        (values.DeadLetterChoice, AsyncClient.redrive, ["topic", "progress"]),
        (values.DeadLetterChoice, AsyncClient.purge_dead_letters, ["topic", "progress"]),
        (values.Unpark, AsyncClient.unpark, ["topic", "subscription"]),
        (values.KeyMove, AsyncClient.move_key, ["topic", "subscription"]),
        (values.Move, AsyncClient.move_partition, ["topic", "partition"]),
        (values.NewTokenRequest, AsyncClient.create_token, []),
        (values.Rebalance, AsyncClient.rebalance, []),
    ],
)
def test_every_option_of_the_client_can_be_said(
    kind: type, method: Callable[..., Any], in_path: list[str]
) -> None:
    assert fields(kind) - {"receipts", "paused"} - MORE.get(kind, set()) == options(method, *in_path)


def test_every_option_of_a_message_can_be_said() -> None:
    assert fields(values.NewMessage) - {"data_base64"} == fields(GroupedMessage)
    elsewhere = {"data", "attributes", "uid"}  # the content, other headers, Idempotency-Key
    headers = {name.removeprefix("keylane-").replace("-", "_") for name in publishing._SETTINGS}
    assert headers == fields(GroupedMessage) - elsewhere


def test_peek_tells_what_the_client_does_with_the_body_as_lease_has_it() -> None:
    body = {"data", "data_base64", "missing", "body"}
    assert fields(values.PeekedMessage) - body == fields(PeekedMessage) - {"data"}
    assert fields(values.LeasedMessage) >= body <= fields(values.PeekedMessage)


def test_every_operation_is_in_the_document_and_has_a_permission() -> None:
    said = openapi.document("1")
    described = {one["operationId"]: one for path in said["paths"].values() for one in path.values()}
    assert described.keys() == {one.name for one in OPERATIONS}
    for one in OPERATIONS:
        assert described[one.name]["x-keylane-action"] == one.action
        assert one.summary


@pytest.mark.parametrize("within", [b"{},", b'{"data":"\\"{"},'])
def test_too_many_messages_are_refused_before_memory_is_set_aside(within: bytes) -> None:
    with pytest.raises(InvalidArgument, match="more than 1000"):
        publishing.decoded(b'{"messages":[' + within * 2_001 + b"{}]}")
    with pytest.raises(InvalidArgument, match="more than 1000"):
        publishing.decoded(within * 2_002 + b'"' + b'\\"' * 1_000_000)


def test_braces_within_texts_are_no_messages() -> None:
    text = '{"a": [{}, "{\\"", {}]}' * 10_000
    content = json.dumps({"messages": [{"data": text}] * 3}).encode()
    assert [one.data for one in publishing.decoded(content).messages] == [text] * 3
    many = json.dumps({"messages": [{"data": "{{{", "attributes": {"{": "}"}}] * 1_000}).encode()
    assert len(publishing.decoded(many).messages) == 1_000


def test_every_header_that_the_page_names_is_in_the_document() -> None:
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    named = set(re.findall(r"`((?:Keylane|Idempotency|Last)-[A-Za-z-]+)`", page))
    paths = openapi.document("1")["paths"].values()
    said = [part for path in paths for one in path.values() for part in one["parameters"]]
    assert named == {part["name"] for part in said if part["in"] == "header"} >= {"Keylane-Key"}


ELSEWHERE = {
    "publish": "publish_many",
    "publish_many": "publish",
    "fan_out": "publish, to each topic",
    "subscribe": "lease, events, ack, nack, extend",
    "pause_subscription": "change_subscription",
    "resume_subscription": "change_subscription",
    "undrain_worker": "drain_worker",
    "purge": "purge_topic, purge_subscription",
    "close": "the client itself",
}
# Many rows at once and by position, with bodies apart: for Spark, which has the client.
BY_POSITION = {
    "bodies",
    "claim",
    "commit",
    "has_bodies",
    "offsets",
    "publish_columns",
    "read",
    "read_raw",
    "release",
}


def test_whatever_the_client_can_do_http_can() -> None:
    names = {
        name for name, _ in inspect.getmembers(AsyncClient, inspect.isfunction) if not name.startswith("_")
    }
    assert names - {one.name for one in OPERATIONS} - BY_POSITION - ELSEWHERE.keys() == set()


class Known:
    """Workers that are there, as one of them knows it."""

    def __init__(self, id: str, *others: str) -> None:
        self.id = id
        self._all = sorted({id, *others})

    def alive(self) -> list[WorkerReport]:
        return [WorkerReport(worker, http=worker) for worker in self._all]


def test_every_worker_finds_a_consumer_at_the_same_one() -> None:
    workers = [f"w{number}" for number in range(5)]
    seen = {worker: Homes(Known(worker, *workers), None) for worker in workers}
    homes = {}
    for number in range(200):
        place = ("orders", "billing", f"app-{number}")
        said = {worker: homes_of.order(*place)[0] or worker for worker, homes_of in seen.items()}
        assert len(set(said.values())) == 1
        homes[place] = said["w0"]
    assert set(homes.values()) == set(workers)
    fewer = Homes(Known("w0", "w1", "w2", "w3"), None)
    for place, home in homes.items():
        if home != "w4":  # only what was at the one that is gone is elsewhere
            assert (fewer.order(*place)[0] or "w0") == home
    assert seen["w1"].order("orders", "billing", "http-w3")[0] == "w3"
    assert seen["w3"].order("orders", "billing", "http-w3") == [""]


def test_no_two_idempotency_keys_make_the_same_uid() -> None:
    keys = ["a", "a.", "a.0", "a.1", "a.1.0", "a.1.1", "a.b", "1", ".1"]
    assert [publishing._uid(key, 0) for key in ("a", "a.b", "1")] == ["a", "a.b", "1"]
    made = [publishing._uid(key, place) for key in keys for place in range(12)]
    assert len(set(made)) == len(made)


class _Consumer:
    """What an HTTP consumer asks of its client's."""

    name = "c"

    def offer_permits(self, held: Mapping[int, int], more: int) -> None:
        self.held = dict(held)


async def test_what_could_not_be_settled_can_be_settled_once_more() -> None:
    consumer = _Consumer()
    one = HttpConsumer(cast(Consumer, consumer))
    messages = [
        cast(Message, SimpleNamespace(id=f"0:1-{entry}", token=7, partition=0)) for entry in (1, 2, 3)
    ]
    receipts = list(one._keep(messages))

    async def fail(messages: list[Message]) -> list[Outcome]:
        assert consumer.held == {0: 1}
        raise Unavailable("Redis is away")

    async def settle(messages: list[Message]) -> list[Outcome]:
        return ["settled"] * len(messages)

    with pytest.raises(Unavailable):
        await one.settle(receipts[:2], fail, ends=True)
    assert consumer.held == {0: 3}
    assert [message.id for _, message in one.taken_after(receipts[0])] == ["0:1-2", "0:1-3"]
    assert await one.settle(receipts[:2], settle, ends=True) == ["settled", "settled"]
    assert await one.settle(receipts[:2], settle, ends=True) == ["stale", "stale"]
