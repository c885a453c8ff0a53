"""Bodies that are in the messages themselves, through the client, the commands and HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from keylane import (
    AsyncClient,
    Backoff,
    InvalidArgument,
    OutgoingMessage,
    PayloadMissing,
    TopicExists,
    wire,
)
from keylane.consume.consumer import Consumer
from keylane.produce.outbox import Outbox
from keylane.produce.outgoing import Slice
from keylane.wire.about import WITHHELD, without_inline
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from loadtest.topology import three_node_cluster
from tests.support.clock import bodies_are_gone
from tests.support.commands import ask_keylane
from tests.support.running import RunningBroker
from tests.support.waiting import until

SOON = 60.0
SMALL, LARGE = bytes(range(200)), b"x" * 201


@pytest.fixture(scope="module", params=["server", pytest.param("cluster", marks=pytest.mark.slow)])
def broker(request: pytest.FixtureRequest) -> Iterator[RunningBroker]:
    with contextlib.ExitStack() as stack:
        url = None
        if request.param == "cluster":
            url = stack.enter_context(three_node_cluster()).broker_url
        yield stack.enter_context(RunningBroker(url, workers=2, http=True))


@pytest.fixture
async def client(broker: RunningBroker) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(broker.url) as client:
        yield client


@pytest.fixture
async def stored(broker: RunningBroker, topic: str) -> AsyncIterator[Callable[[], Any]]:
    """How many keys the payload store has for the topic; in the end it has none, and no rule is broken."""
    engine = Engine.connect(broker.redis_url)

    async def count() -> int:
        return len(await engine.store.keys_like(f"kl:bodies:{topic}:*"))

    try:
        yield count
        await bodies_are_gone(broker.redis_url, topic, 2)
        assert await check_topic(engine, topic) == []
    finally:
        await engine.close()


async def made(client: AsyncClient, topic: str, **settings: Any) -> None:
    about = await client.create_topic(topic, partitions=2, inline=len(SMALL))
    assert about.inline == (await client.describe_topic(topic)).inline == len(SMALL)
    await client.create_subscription(topic, "s", **settings)


async def taken(consumer: Consumer, count: int) -> list[bytes]:
    """Messages' bodies; they are acked."""
    found = []
    for _ in range(count):
        message = await consumer.receive(SOON)
        found.append(await message.data())
        assert message.size == len(found[-1])
        await message.ack()
    return found


async def test_small_bodies_are_in_the_messages_and_large_ones_in_the_store(
    client: AsyncClient, topic: str, stored: Callable[[], Any]
) -> None:
    await made(client, topic, mode="key_shared")
    bodies = [SMALL, b"", b"text", SMALL[:1]]
    await client.publish_many(topic, [OutgoingMessage(body, key="k") for body in bodies])
    assert await stored() == 0
    await client.publish_many(topic, [OutgoingMessage(body, key="k") for body in (LARGE, SMALL)])
    assert await stored() == 1
    assert [one.data for one in await client.peek(topic, "s", bodies=True)] == [*bodies, LARGE, SMALL]
    async with client.subscribe(topic, "s", mode="key_shared") as consumer:
        assert await taken(consumer, 6) == [*bodies, LARGE, SMALL]


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
async def test_one_by_one_delayed_and_together(
    client: AsyncClient, topic: str, stored: Callable[[], Any], delivery: Any
) -> None:
    await made(client, topic, delivery=delivery)
    first = await client.publish(topic, SMALL, uid="chosen")
    assert (await client.publish(topic, SMALL, uid="chosen")).id == first.id
    await client.publish(topic, b"later", delay=0.2)
    async with client.subscribe(topic, "s") as consumer:
        found = []
        async for batch in consumer.batches(max_messages=2):
            found += await batch.data()
            await consumer.ack(batch)
            if len(found) == 2:
                break
    assert sorted(found) == [SMALL, b"later"]
    assert await stored() == 0


@pytest.mark.slow
async def test_a_dead_letter_keeps_its_body_and_goes_back_with_it(
    client: AsyncClient, broker: RunningBroker, topic: str, stored: Callable[[], Any]
) -> None:
    await made(client, topic, max_retries=0, backoff=Backoff(0, 1, 0, 0))
    await client.publish(topic, b"small", key="k")
    async with client.subscribe(topic, "s") as consumer:
        await (await consumer.receive(SOON)).nack(reason="ValueError")
        await until(lambda: _letters(client, topic))
        [letter] = await _letters(client, topic)
        shown = await asyncio.to_thread(ask_keylane, broker, "dlq", "show", topic, letter.id, "--json")
        assert shown["data"] == "small"
        assert await client.redrive(topic) == 1
        assert await taken(consumer, 1) == [b"small"]
    assert await stored() == 0


async def _letters(client: AsyncClient, topic: str) -> list[Any]:
    return [letter async for letter in client.dead_letters(topic)]


async def test_a_program_with_http_alone_reads_and_writes_them(
    client: AsyncClient, broker: RunningBroker, topic: str, stored: Callable[[], Any]
) -> None:
    async with httpx.AsyncClient(base_url=broker.http_urls[0], timeout=SOON) as http:
        said = {"name": topic, "partitions": 2, "inline": 300}
        assert (await http.post("/v1/topics", json=said)).json()["inline"] == 300
        path = f"/v1/topics/{topic}"
        assert (await http.post(f"{path}/subscriptions", json={"name": "s"})).status_code == 201
        await http.post(f"{path}/messages", json={"messages": [{"data": "one", "key": "k"}]})
        assert await stored() == 0
        leased = await http.post(f"{path}/subscriptions/s/lease", json={"wait": SOON, "consumer": "c"})
        [message] = leased.json()["messages"]
        assert (message["data"], message["size"]) == ("one", 3)
        settled = await http.post(f"{path}/subscriptions/s/ack", json={"receipts": [message["receipt"]]})
        assert settled.json()["results"] == ["settled"]


@pytest.mark.slow
async def test_the_command_makes_such_topics_and_asks_for_nothing_that_differs(
    client: AsyncClient, broker: RunningBroker, topic: str
) -> None:
    def asked(*arguments: str, **more: Any) -> Any:
        return ask_keylane(broker, "topic", *arguments, **more)

    told = await asyncio.to_thread(asked, "create", topic, "--inline", "1000", "--json")
    assert told["inline"] == 1000
    assert "inline" in await asyncio.to_thread(asked, "describe", topic)
    with pytest.raises(TopicExists, match="inline 1000"):
        await client.create_topic(topic, inline=2000, exist_ok=True)
    with pytest.raises(InvalidArgument, match="inline is 16385: use a number of bytes from 0 to 16384"):
        await client.create_topic(f"{topic}-2", inline=16_385)


async def test_what_cannot_be_read_is_missing_and_harms_no_other(
    client: AsyncClient, topic: str, stored: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another kind of client has written: no base64, and a uid that looks like a body."""
    await made(client, topic)
    add = Outbox.add

    def garbled(outbox: Outbox, item: Slice, *, strict: bool = False) -> Any:
        item.flat[2] = item.flat[2].replace(":=", ":=*")
        return add(outbox, item, strict=strict)

    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "add", garbled)
        await client.publish(topic, b"garbled", key="k")
    await client.publish(topic, LARGE, key="k", uid="=uid")
    await client.publish(topic, b"good", key="k")
    async with client.subscribe(topic, "s") as consumer:
        message = await consumer.receive(SOON)
        with pytest.raises(PayloadMissing):
            await message.data()
        await message.ack()
        assert await taken(consumer, 2) == [LARGE, b"good"]


def test_a_uid_that_begins_like_an_inline_body_names_a_stored_one() -> None:
    about = wire.unpack_about("1 1 web 5 ", "=uid")
    assert wire.about.home_of("orders", about.body) == ("orders", "=uid")
    assert wire.body_name("=uid", "1 1 web 5 ") == about.body
    assert wire.body_name("uid", "1 1 web 2:=NDI= ") == ""


def test_a_body_that_leaves_no_room_for_attributes_stays_in_the_store() -> None:
    about = wire.pack_about(1, "web", {"text": "é" * 14_000})
    assert wire.with_body(about, b"x" * 16_000) is None
    assert wire.with_body(wire.pack_about(1, "web", {"text": "é" * 9_000}), b"x" * 16_000) is not None


def test_a_body_that_is_withheld_leaves_all_else_and_no_producer_can_say_so() -> None:
    about = wire.pack_about(1, "web", {"text": "1 1  5:=NDI= "}, size=5, body="3MJ3iAUUP8pyxOH4OFaAweF3O11")
    for plain in (about, wire.pack_about(1, "", {"a": "b"}, size=5), wire.pack_about(1)):
        assert without_inline(f"2 {plain}") == f"2 {plain}"
    for body in (b"", b"secret", SMALL):
        inline = wire.with_body(about, body)
        assert inline is not None
        shown = without_inline(f"2 {inline}")
        assert wire.about_faults([shown], stored=True) == {}
        told, meant = wire.unpack_about(shown, "uid"), wire.unpack_about(f"2 {inline}", "uid")
        assert told == msgspec.structs.replace(meant, body=WITHHELD)
        assert 0 in wire.about_faults([shown.partition(" ")[2]])
