"""Arguments of the wrong type are refused where they are given, by name, with what to use instead."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime
from typing import Any

import pytest

from keylane import AsyncClient
from keylane.errors import InvalidArgument, InvalidName
from keylane.produce.outgoing import check_partition
from keylane.produce.partitioner import Partitioner
from keylane.types import Backoff, OutgoingMessage
from tests.support.scripted_worker import ScriptedWorker

text: Any = "1"
BAD_BACKOFF = Backoff(text)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"seeds": 9999}, "seeds is 9999: use keylane://host:port"),
        ({"seeds": b"keylane://a"}, "seeds is b'keylane://a': use keylane://host:port"),
        ({"token": 3}, "token is 3: use str | None"),
        ({"producer_group": 3}, "producer_group is 3: use str | None"),
        ({"payloads": 3}, "payloads is 3: use the URL of a payload store"),
        ({"on_time_drift": 3}, "on_time_drift is 3: use a function"),
    ],
)
def test_of_a_client(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(complaint)):
        AsyncClient(**arguments)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda client: client.create_topic(None), "the topic is None: use letters"),
        (lambda client: client.create_topic("t", partitions="8"), "partitions is '8': use int | None"),
        (lambda client: client.create_topic("t", partitions=2**70), "partitions is 1180591620717411303424"),
        (lambda client: client.describe_topic(object()), "the topic is <object object"),
        (lambda client: client.delete_topic(3), "the topic is 3: use letters"),
        (lambda client: client.create_subscription("t", 3), "subscription is 3: use str"),
        (lambda client: client.create_subscription("t", "s", backoff="5s"), "a Backoff or None"),
        (lambda client: client.peek("t", "s", limit=True), "limit is True: use int"),
        (lambda client: client.create_subscription("t", "s", backoff=BAD_BACKOFF), "backoff is ('1', 2.0"),
        (lambda client: client.explain("t", "s", None), "id is None: use str"),
        (lambda client: client.create_subscription("t", "s", lease=0), "lease is 0: use seconds above 0"),
        (lambda client: client.change_subscription("t", "s", lease=0.0), "lease is 0.0: use seconds above 0"),
        (lambda client: client.publish_many("t", OutgoingMessage(b"a")), "use a list of OutgoingMessage"),
    ],
)
async def test_of_a_request(call: Callable[[Any], Awaitable[None]], complaint: str) -> None:
    """And nothing is asked of a worker."""
    async with ScriptedWorker() as worker, AsyncClient(worker.url) as client:
        with pytest.raises((InvalidArgument, InvalidName), match=re.escape(complaint)):
            await call(client)


async def test_a_client_is_used_in_the_event_loop_that_opened_it() -> None:
    async with ScriptedWorker() as worker, AsyncClient(worker.url) as client:
        calls: list[Coroutine[Any, Any, object]] = [client.topics(), client.publish("t", b"x")]
        for call in calls:
            with pytest.raises(InvalidArgument, match="belongs to another event loop: open one in each"):
                await asyncio.to_thread(asyncio.run, call)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"start": 5}, "start is 5: use 'earliest', 'latest', an id like '3:1-42' or a datetime with a time"),
        ({"start": "begin"}, "start is 'begin': use 'earliest', 'latest', an id like '3:1-42' or a datetime"),
        ({"start": datetime(2026, 1, 1)}, "or a datetime with a time zone"),
        ({"mode": 3}, "mode is 3: use str | None"),
        ({"mode": "queue"}, "mode 'queue': use one of shared, key_shared, exclusive, failover, multicast"),
        ({"name": 3}, "consumer is 3: use str"),
        ({"partitions": 3}, "partitions is 3: use a list of numbers"),
        ({"partitions": ["1"]}, "partitions is ['1']: use list[int] | None"),
        ({"on_stale": 3}, "on_stale is 3: use a function"),
        ({"subscription": None}, "subscription is None: use str"),
    ],
)
async def test_of_a_consumer(arguments: dict[str, Any], complaint: str) -> None:
    client = AsyncClient("keylane://nowhere.invalid")
    with pytest.raises(InvalidArgument, match=re.escape(complaint)):
        client.subscribe("t", **{"subscription": "s", **arguments})


def test_of_a_message() -> None:
    partitioner = Partitioner("", lambda: 0.0, lambda topic: 0, lambda topic: 0)
    wrong: Any = True
    refused: dict[int, Exception] = {}
    slices = partitioner.many("t", [OutgoingMessage(durability=wrong), OutgoingMessage()], 1, refused)
    assert [item.places for item in slices] == [[1]]
    assert str(refused[0]) == "durability is True: use memory, replicated or fsync"
    empty = partitioner.many("t", [OutgoingMessage(durability="")], 1, refused)
    assert (empty, str(refused[0])) == ([], "durability is '': use memory, replicated or fsync")
    wrong = "1"
    with pytest.raises(InvalidArgument, match="partition is '1': use a number from 0 to 7"):
        check_partition(wrong, 8)
