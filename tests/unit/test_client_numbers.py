"""A client numbers what it publishes, so that the broker knows what is sent again."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from keylane import AsyncClient, OutgoingMessage, wire
from keylane.errors import BacklogFull
from keylane.produce.columns import Columns
from tests.support.scripted_client import Shelf
from tests.support.scripted_worker import Request, ScriptedWorker


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker() as worker:
        yield worker


@pytest.fixture
async def client(worker: ScriptedWorker) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(worker.url, payloads=Shelf()) as client:
        yield client


def numbers(request: Request) -> tuple[int, int]:
    return request.properties.number, request.properties.oldest


def accept(request: Request, first: int = 1) -> None:
    request.ok(wire.PublishReply(7, first, 1))


def start(client: AsyncClient, count: int) -> "asyncio.Task[object]":
    messages = [OutgoingMessage(partition=0) for _ in range(count)]
    return asyncio.create_task(client.publish_many("orders", messages))


async def test_numbers_go_on_from_frame_to_frame_and_name_what_is_not_answered(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    many = start(client, 3_000)
    first, second, third = [await worker.expect(wire.Publish) for _ in range(3)]
    assert [numbers(request) for request in (first, second, third)] == [(1, 1), (1_001, 1), (2_001, 1)]
    accept(first)
    behind = start(client, 1_000)
    fourth = await worker.expect(wire.Publish)
    assert numbers(fourth) == (3_001, 1_001), "the first was answered"
    for request in (second, third, fourth):
        accept(request)
    await asyncio.gather(many, behind)
    last = start(client, 1)
    request = await worker.expect(wire.Publish)
    assert numbers(request) == (4_001, 4_001), "it waits for nothing else"
    assert request.properties.producer == first.properties.producer
    accept(request)
    await last


async def test_what_is_sent_again_keeps_its_number(worker: ScriptedWorker, client: AsyncClient) -> None:
    many = start(client, 2_000)
    sent = [await worker.expect(wire.Publish) for _ in range(2)]
    worker.link.drop()
    again = [await worker.expect(wire.Publish) for _ in range(2)]
    assert [numbers(request) for request in again] == [(1, 1), (1_001, 1)]
    assert {request.properties.producer for request in (*sent, *again)} == {sent[0].properties.producer}
    for request in again:
        accept(request)
    await many


async def test_a_publish_that_its_caller_has_abandoned_is_sent_again_under_its_number(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    abandoned = start(client, 2)
    first = await worker.expect(wire.Publish)
    abandoned.cancel()
    first.error("unavailable")
    again = await worker.expect(wire.Publish)
    assert numbers(again) == (1, 1), "it may be stored: no other may have its number"
    behind = start(client, 1)
    accept(again)
    request = await worker.expect(wire.Publish)
    assert numbers(request) == (3, 3)
    accept(request)
    await behind


async def test_uids_that_somebody_chose_go_in_frames_that_say_so_in_the_order_of_the_call(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    messages = [OutgoingMessage(partition=0, uid=uid) for uid in (None, None, "a", None)]
    published = asyncio.create_task(client.publish_many("orders", messages))
    first, second = [await worker.expect(wire.Publish) for _ in range(2)]
    assert (numbers(first), numbers(second)) == ((1, 1), (3, 1))
    assert second.body[1] == "a"
    assert (first.properties.named, second.properties.named) == (False, True)
    accept(first, 1)
    accept(second, 3)
    third = await worker.expect(wire.Publish)
    assert numbers(third) == (4, 4)
    assert not third.properties.named
    accept(third, 4)
    assert [answer.entry for answer in await published] == [1, 2, 3, 4]


async def test_columns_are_not_sent_behind_some_for_which_there_was_no_room(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    def rows(start: int) -> Columns:
        return Columns(uids=[f"u{number}" for number in range(start, start + 1_000)], partitions=[0] * 1_000)

    under_way = [await client.publish_columns("orders", rows(start)) for start in range(0, 9_000, 1_000)]
    sent = [await worker.expect(wire.Publish) for _ in range(8)]
    sent[0].ok(wire.PublishReply(7, 1, 1, full=[998, 999]))
    with pytest.raises(BacklogFull):
        await under_way[0]
    with pytest.raises(BacklogFull):
        await asyncio.wait_for(under_way[8], 5)
    for request in sent[1:]:
        request.ok(wire.PublishReply(7, 1, 1, full=list(range(1_000))))
    assert [type(told) for told in await asyncio.gather(*under_way, return_exceptions=True)] == [
        BacklogFull
    ] * 9
    assert worker.seen(wire.Publish) == 0, "nothing was sent behind it"


async def test_what_is_for_later_has_no_numbers(worker: ScriptedWorker, client: AsyncClient) -> None:
    published = asyncio.create_task(client.publish("orders", partition=0, delay=5))
    request = await worker.expect(wire.Publish)
    assert not request.properties.producer
    request.ok(wire.PublishReply(0, 0, 1, delayed=True))
    await published
