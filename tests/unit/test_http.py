"""The HTTP interface says what the client says: no option is forgotten, and every operation has its place."""

import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from keylane import AsyncClient, OutgoingMessage
from keylane_broker.http import openapi, values
from keylane_broker.http.app import OPERATIONS


def options(method: Callable[..., Any], *but: str) -> set[str]:
    return set(inspect.signature(method).parameters) - {"self", *but}


def fields(kind: type) -> set[str]:
    return {field.name for field in msgspec.structs.fields(kind)}


@pytest.mark.parametrize(
    ("kind", "method", "in_path"),
    [
        (values.NewTopic, AsyncClient.create_topic, []),
        (values.TopicChange, AsyncClient.change_topic, ["name"]),
        (values.NewSubscription, AsyncClient.create_subscription, ["topic"]),
    ],
)
def test_every_option_of_the_client_can_be_said(
    kind: type, method: Callable[..., Any], in_path: list[str]
) -> None:
    assert fields(kind) == options(method, *in_path)


def test_every_option_of_a_message_can_be_said() -> None:
    assert fields(values.NewMessage) - {"data_base64"} == fields(OutgoingMessage)


def test_every_operation_is_in_the_document_and_has_a_permission() -> None:
    said = openapi.document("1")
    described = {one["operationId"]: one for path in said["paths"].values() for one in path.values()}
    assert described.keys() == {one.name for one in OPERATIONS}
    for one in OPERATIONS:
        assert described[one.name]["x-keylane-action"] == one.action
        assert one.summary


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
