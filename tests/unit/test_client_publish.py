"""Publishing against a worker that loses answers and says no."""

import asyncio
import gc
import pickle
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pytest

from keylane import AsyncClient, OutgoingMessage, wire
from keylane.errors import (
    BrokerError,
    ConnectionClosed,
    DurabilityNotReached,
    InvalidArgument,
    InvalidName,
    MessageTooLarge,
    Overloaded,
    TopicNotFound,
    Unavailable,
)
from keylane.produce.publish_frame import PublishFrame, PublishWaiter
from keylane.wire import unpack_about
from tests.support.scripted_client import Shelf, client_is_quiet
from tests.support.scripted_worker import PATIENCE, Link, Request, ScriptedWorker
from tests.support.waiting import until


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker() as worker:
        yield worker


@pytest.fixture
async def client(worker: ScriptedWorker, shelf: Shelf) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(worker.url, payloads=shelf) as client:
        await know_topic(worker, client)
        yield client


async def know_topic(worker: ScriptedWorker, client: AsyncClient, partitions: int = 1) -> None:
    """Have the client ask for the number of partitions, and publish its first message."""
    worker.partitions = partitions
    published = asyncio.create_task(client.publish("orders", uid="first"))
    accept(await worker.expect(wire.Publish), 1)
    await published


def accept(request: Request, first: int, **more: object) -> None:
    request.ok(wire.PublishReply(7, first, 1, **more))  # type: ignore[arg-type]


def uids(request: Request) -> list[str]:
    return request.body[1::3]


async def test_publishes_of_many_tasks_share_a_frame(worker: ScriptedWorker, client: AsyncClient) -> None:
    published = asyncio.gather(*(client.publish("orders", uid=f"u{n}", partition=0) for n in range(100)))
    request = await worker.expect(wire.Publish)
    assert uids(request) == [f"u{n}" for n in range(100)]
    accept(request, 2)
    assert [answer.id for answer in await published] == [f"0:7-{entry}" for entry in range(2, 102)]


@pytest.mark.slow
async def test_nothing_of_a_publish_is_left_to_the_garbage_collector(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    gc.collect()
    gc.disable()
    try:
        published = asyncio.gather(*(client.publish("orders", uid=f"u{n}") for n in range(3)))
        accept(await worker.expect(wire.Publish), 2)
        await published
        left = [kept for kept in gc.get_objects() if isinstance(kept, PublishFrame | PublishWaiter)]
    finally:
        gc.enable()
    assert left == []


async def test_a_thousand_callers_ask_once_for_the_partitions(worker: ScriptedWorker, shelf: Shelf) -> None:
    async with AsyncClient(worker.url) as client:
        worker.maps_wait = True
        published = asyncio.gather(*(client.publish("other", uid=f"u{n}") for n in range(1000)))
        await worker.tell_partitions()
        accept(await worker.expect(wire.Publish), 1)
        assert len(await published) == 1000
        assert worker.seen(wire.Info) == 2, "hello, and the one question"


async def test_what_is_for_later_goes_in_frames_of_its_own_and_has_no_id(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    due = datetime.fromtimestamp(2_000_000_000, UTC)
    delays = [None, 5.0, None, due, timedelta(seconds=7)]
    messages = [
        OutgoingMessage(
            uid=f"u{n}",
            partition=0,
            delay=None if isinstance(delay, datetime) else delay,
            deliver_at=delay if isinstance(delay, datetime) else None,
        )
        for n, delay in enumerate(delays)
    ]
    before_ms = round(time.time() * 1_000)
    published = asyncio.create_task(client.publish_many("orders", messages))
    now = await worker.expect(wire.Publish)
    assert (uids(now), now.properties.due_ms) == (["u0", "u2"], None)
    accept(now, 2)
    later = await worker.expect(wire.Publish)
    assert uids(later) == ["u1", "u3", "u4"]
    [in_five, at, in_seven] = later.properties.due_ms
    assert in_five >= before_ms + 5_000 - 2
    assert at == 2_000_000_000_000
    assert in_seven == in_five + 2_000
    later.ok(wire.PublishReply(0, 0, 1, duplicates={1: "0-0"}, delayed=True))
    answers = await published
    assert [answer.id for answer in answers] == ["0:7-2", None, "0:7-3", None, None]
    assert [answer.delayed for answer in answers] == [False, True, False, False, True]
    assert [answer.duplicate for answer in answers] == [False, False, False, True, False]


async def test_later_frames_that_fail_go_out_again_with_their_times(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    published = asyncio.create_task(client.publish("orders", uid="u", partition=0, delay=5))
    first = await worker.expect(wire.Publish)
    first.error("unavailable")
    second = await worker.expect(wire.Publish)
    assert second.properties.again
    assert second.properties.due_ms == first.properties.due_ms
    second.ok(wire.PublishReply(0, 0, 1, delayed=True))
    assert (await published).delayed


async def test_large_batches_go_in_frames_of_a_thousand_with_answers_in_order(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    messages = [OutgoingMessage(uid=f"u{n}", partition=0) for n in range(2_500)]
    published = asyncio.create_task(client.publish_many("orders", messages))
    requests = [await worker.expect(wire.Publish) for _ in range(2)]
    accept(requests[1], 1_002)
    accept(requests[0], 2)
    requests.append(await worker.expect(wire.Publish))
    accept(requests[2], 2_002)
    assert [len(uids(request)) for request in requests] == [1_000, 1_000, 500]
    answers = await published
    assert [answer.entry for answer in answers] == list(range(2, 2_502))
    assert [answer.uid for answer in answers] == [message.uid for message in messages]


async def test_after_a_retriable_error_all_is_sent_again_in_order(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    published = asyncio.create_task(
        client.publish_many("orders", [OutgoingMessage(uid=f"u{n}", partition=0) for n in range(3_000)])
    )
    requests = [await worker.expect(wire.Publish) for _ in range(3)]
    requests[0].error("unavailable")
    requests[1].error("unavailable")
    await client_is_quiet(worker)
    assert worker.seen(wire.Publish) == 0, "nothing is sent while a frame is unanswered"
    requests[2].error("unavailable")
    again = [await worker.expect(wire.Publish) for _ in range(3)]
    assert [request.properties.again for request in again] == [True, False, False]
    assert [uids(request) for request in again] == [uids(request) for request in requests]
    for number, request in enumerate(again):
        accept(request, 2 + number * 1_000)
    assert [answer.entry for answer in await published] == list(range(2, 3_002))


async def test_a_lost_connection_loses_no_message_and_no_order(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    messages = [OutgoingMessage(partition=0) for _ in range(2_000)]
    published = asyncio.ensure_future(client.publish_many("orders", messages))
    requests = [await worker.expect(wire.Publish) for _ in range(2)]
    worker.link.drop()
    again = [await worker.expect(wire.Publish) for _ in range(2)]
    assert [uids(request) for request in again] == [uids(request) for request in requests]
    # The first had arrived before the connection broke.
    accept(again[0], 0, duplicates={place: f"7-{place + 2}" for place in range(1_000)})
    accept(again[1], 1_002)
    answers = await published
    assert [answer.entry for answer in answers] == list(range(2, 2_002))
    assert [answer.duplicate for answer in answers] == [True] * 1_000 + [False] * 1_000


async def test_what_cannot_be_retried_fails_its_own_frame_only(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    bad = asyncio.create_task(client.publish("orders", uid="bad", partition=0))
    request = await worker.expect(wire.Publish)
    good = asyncio.create_task(client.publish("orders", uid="good", partition=0))
    await asyncio.sleep(0)
    request.error("invalid_argument", "no")
    accept(await worker.expect(wire.Publish), 2)
    with pytest.raises(InvalidArgument, match="no"):
        await bad
    assert (await good).id == "0:7-2"


async def test_durability_that_is_not_reached_is_told_at_once(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    safe = asyncio.create_task(client.publish("orders", uid="safe", partition=0, durability="replicated"))
    first = await worker.expect(wire.Publish)
    assert first.properties.durability == "replicated"
    more = [OutgoingMessage(partition=0, durability="replicated")] * 1_000
    behind = asyncio.create_task(client.publish_many("orders", more))
    second = await worker.expect(wire.Publish)
    first.error("durability_not_reached", "no replica")
    second.error("durability_not_reached", "no replica")
    with pytest.raises(DurabilityNotReached, match="no replica") as caught:
        await safe
    assert not caught.value.stored
    again = await worker.expect(wire.Publish)
    assert again.properties.again
    accept(again, 3)
    assert len(await behind) == 1_000


async def test_what_is_stored_and_less_safe_than_asked_is_told_and_the_rest_goes_on(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    safe = asyncio.create_task(client.publish("orders", uid="safe", partition=0, durability="replicated"))
    first = await worker.expect(wire.Publish)
    behind = asyncio.create_task(client.publish_many("orders", [OutgoingMessage(partition=0)] * 1_000))
    second = await worker.expect(wire.Publish)
    assert (second.properties.durability, second.properties.again) == ("memory", False)
    first.error("durability_not_reached", "no replica", stored=True)
    accept(second, 3)
    with pytest.raises(DurabilityNotReached) as caught:
        await safe
    assert caught.value.stored
    assert len(await behind) == 1_000


async def test_messages_of_several_durabilities_leave_in_the_order_of_the_call(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    levels = ["memory", "fsync", "fsync", "replicated", None, "memory", "fsync"]
    messages = [OutgoingMessage(key="k", uid=f"u{n}", durability=level) for n, level in enumerate(levels)]
    published = asyncio.create_task(client.publish_many("orders", messages))
    sent = []
    for _ in range(5):
        request = await worker.expect(wire.Publish)
        uids = request.body[1::3]
        sent.append((request.properties.durability, uids))
        request.ok(wire.PublishReply(7, int(uids[0][1:]) + 1, 1))
    assert sent == [
        ("memory", ["u0"]),
        ("fsync", ["u1", "u2"]),
        ("replicated", ["u3"]),
        ("memory", ["u4", "u5"]),
        ("fsync", ["u6"]),
    ]
    answers = await published
    assert [(answer.entry, answer.durability) for answer in answers] == [
        (n + 1, level or "memory") for n, level in enumerate(levels)
    ]


async def test_a_redirect_is_tried_again(worker: ScriptedWorker, client: AsyncClient) -> None:
    published = asyncio.create_task(client.publish("orders"))
    request = await worker.expect(wire.Publish)
    request.link.send(wire.Redirect("orders", 0, "elsewhere:1"), request.frame.sequence)
    accept(await worker.expect(wire.Publish), 2)
    assert (await published).id == "0:7-2"


@pytest.mark.slow
async def test_when_the_time_is_up_the_last_error_is_raised(worker: ScriptedWorker) -> None:
    async with AsyncClient(worker.url, timeout=2.0) as client:
        await know_topic(worker, client)
        published = asyncio.create_task(client.publish("orders"))
        refusing = asyncio.create_task(refuse_all(worker, "overloaded"))
        with pytest.raises(Overloaded):
            await published
        refusing.cancel()
        await asyncio.wait({refusing})

        published = asyncio.create_task(client.publish("orders"))
        await worker.expect(wire.Publish)
        with pytest.raises((Overloaded, Unavailable)):
            await published


async def refuse_all(worker: ScriptedWorker, code: str) -> None:
    while True:
        (await worker.expect(wire.Publish)).error(code)


async def test_a_topic_made_anew_is_asked_for_its_partitions_again(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    published = asyncio.create_task(client.publish("orders"))
    (await worker.expect(wire.Publish)).error("topic_not_found", "no topic 'orders'")
    with pytest.raises(TopicNotFound, match="no topic 'orders'"):
        await published
    worker.partitions = 8
    worker.link.send(wire.Moved("orders"))
    async with asyncio.timeout(PATIENCE):
        while len(client._cluster.maps["orders"].owners) != 8:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)
    published = asyncio.create_task(client.publish("orders", key="a"))
    request = await worker.expect(wire.Publish)
    assert request.properties.partition == wire.partition_of("a", 8)
    accept(request, 1)
    await published


async def test_a_topic_that_is_there_again_is_found_by_those_who_asked_while_others_heard_that_it_is_gone(
    worker: ScriptedWorker,
) -> None:
    async with AsyncClient(worker.url) as client:
        await know_topic(worker, client, 2)
        worker.maps_wait = True
        gone = [asyncio.create_task(client.publish("orders", partition=number)) for number in range(2)]
        requests = [await worker.expect(wire.Publish) for _ in gone]
        requests[0].error("topic_not_found", "no topic 'orders'")
        await asyncio.wait(gone, return_when=asyncio.FIRST_COMPLETED)
        published = asyncio.create_task(client.publish("orders", partition=1))
        asked = await worker.expect_map()
        requests[1].error("topic_not_found", "no topic 'orders'")
        answers = await asyncio.gather(*gone, return_exceptions=True)
        assert {type(answer) for answer in answers} == {TopicNotFound}
        asked.ok(worker._info("orders"))
        accept(await worker.expect(wire.Publish), 1)
        await published


async def test_the_key_decides_the_partition_then_the_uid_then_chance(worker: ScriptedWorker) -> None:
    worker.partitions = 8
    async with AsyncClient(worker.url) as client:
        published = asyncio.create_task(
            client.publish_many(
                "many",
                [
                    OutgoingMessage(key="customer-7"),
                    OutgoingMessage(uid="u1"),
                    OutgoingMessage(key="customer-7", partition=5),
                ],
            )
        )
        places = []
        for _ in range(3):
            request = await worker.expect(wire.Publish)
            places.append(request.properties.partition)
            accept(request, 1)
        assert sorted(places) == sorted([wire.partition_of("customer-7", 8), wire.partition_of("u1", 8), 5])
        await published


async def test_a_body_is_stored_before_its_message_is_published(
    worker: ScriptedWorker, client: AsyncClient, shelf: Shelf
) -> None:
    published = asyncio.create_task(client.publish("orders", "Zürich", attributes={"a": "b"}))
    request = await worker.expect(wire.Publish)
    _, uid, text = request.body
    about = unpack_about("1 " + text, uid)
    assert shelf.bodies == {("orders", uid): "Zürich".encode()}
    assert (about.body, about.size, about.attributes) == (uid, 7, {"a": "b"})
    accept(request, 2)
    assert (await published).uid == uid


async def test_the_bodies_of_a_frame_are_stored_together(
    worker: ScriptedWorker, client: AsyncClient, shelf: Shelf
) -> None:
    published = asyncio.create_task(
        client.publish_many("orders", [OutgoingMessage(b"x" * n, partition=0) for n in range(1, 501)])
    )
    accept(await worker.expect(wire.Publish), 2)
    assert len(await published) == 500
    assert shelf.puts == 1


async def publish_to_all(client: AsyncClient, partitions: int) -> list[asyncio.Task[Any]]:
    """Publish a body to each partition, all in one turn of the event loop."""
    return [
        asyncio.create_task(client.publish("orders", b"%d" % number, uid=f"u{number}", partition=number))
        for number in range(partitions)
    ]


async def test_the_bodies_of_many_partitions_are_stored_together(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with AsyncClient(worker.url, payloads=shelf) as client:
        await know_topic(worker, client, partitions=20)
        calls = await publish_to_all(client, 20)
        for _ in calls:
            accept(await worker.expect(wire.Publish), 2)
        await asyncio.gather(*calls)
        assert shelf.puts == 1
        assert sorted(shelf.bodies.values()) == sorted(b"%d" % number for number in range(20))


class Held(Shelf):
    """Stores nothing before it may, and never what it is to refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.may = asyncio.Event()
        self.asked = asyncio.Event()
        self.refuses = b"never"
        self.cancelled = 0

    async def put(self, topic: str, bodies: Sequence[tuple[str, bytes]]) -> None:
        self.asked.set()
        try:
            await self.may.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.refuses in dict(bodies).values():
            raise MessageTooLarge("that one")
        await super().put(topic, bodies)


async def test_a_body_that_is_refused_harms_none_that_were_stored_along_with_it(
    worker: ScriptedWorker,
) -> None:
    shelf = Held()
    shelf.refuses = b"3"
    shelf.may.set()
    async with AsyncClient(worker.url, payloads=shelf) as client:
        await know_topic(worker, client, partitions=6)
        calls = await publish_to_all(client, 6)
        for _ in range(5):
            accept(await worker.expect(wire.Publish), 2)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [number for number, answer in enumerate(answers) if isinstance(answer, MessageTooLarge)] == [3]
        assert sorted(shelf.bodies.values()) == [b"0", b"1", b"2", b"4", b"5"]


async def publish_three_and_cancel_the_second(
    worker: ScriptedWorker, shelf: Held, client: AsyncClient
) -> None:
    """While all three bodies are being stored together; the other two are accepted."""
    await know_topic(worker, client, partitions=3)
    calls = await publish_to_all(client, 3)
    await shelf.asked.wait()
    calls[1].cancel()
    await asyncio.wait({calls[1]})
    shelf.may.set()
    for _ in range(2):
        accept(await worker.expect(wire.Publish), 2)
    await asyncio.gather(calls[0], calls[2])


@pytest.mark.slow
async def test_who_waits_no_longer_takes_no_body_along_that_others_want(worker: ScriptedWorker) -> None:
    shelf = Held()
    async with AsyncClient(worker.url, payloads=shelf) as client:
        await publish_three_and_cancel_the_second(worker, shelf, client)
        await until(lambda: sorted(shelf.bodies.values()) == [b"0", b"2"])
        assert shelf.cancelled == 0


@pytest.mark.slow
async def test_a_body_that_nobody_waits_for_is_not_tried_again_by_itself(worker: ScriptedWorker) -> None:
    class Noted(Held):
        tried: ClassVar[list[list[bytes]]] = []

        async def put(self, topic: str, bodies: Sequence[tuple[str, bytes]]) -> None:
            self.tried.append(list(dict(bodies).values()))
            await super().put(topic, bodies)

    shelf = Noted()
    shelf.refuses = b"1"
    async with AsyncClient(worker.url, payloads=shelf) as client:
        await publish_three_and_cancel_the_second(worker, shelf, client)
        assert sorted(shelf.tried) == [[b"0"], [b"0", b"1", b"2"], [b"2"]]


@pytest.mark.slow
async def test_when_all_have_gone_the_store_is_told_to_stop(worker: ScriptedWorker) -> None:
    shelf = Held()
    async with AsyncClient(worker.url, payloads=shelf) as client:
        await know_topic(worker, client, partitions=3)
        calls = await publish_to_all(client, 3)
        await shelf.asked.wait()
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await until(lambda: shelf.cancelled == 1)
        shelf.may.set()
        last = asyncio.create_task(client.publish("orders", b"x", partition=1))
        accept(await worker.expect(wire.Publish), 2)
        await last
        assert worker.seen(wire.Publish) == 0
        assert list(shelf.bodies.values()) == [b"x"]


@pytest.mark.slow
async def test_a_publish_that_comes_when_all_others_have_just_gone_is_published_with_its_body(
    worker: ScriptedWorker,
) -> None:
    shelf = Held()
    shelf.may.set()
    async with AsyncClient(worker.url, payloads=shelf) as client:
        await know_topic(worker, client, partitions=3)
        for turns in range(6):
            calls = await publish_to_all(client, 2)
            for _ in range(turns):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            kept = asyncio.create_task(client.publish("orders", b"kept %d" % turns, partition=2))
            request = await worker.expect(wire.Publish)
            while uids(request) in (["u0"], ["u1"]):
                accept(request, 2)
                request = await worker.expect(wire.Publish)
            assert b"kept %d" % turns in shelf.bodies.values(), "before its message is published"
            accept(request, 2)
            await kept
            await asyncio.wait(calls)


async def test_the_body_of_a_duplicate_is_deleted(
    worker: ScriptedWorker, client: AsyncClient, shelf: Shelf
) -> None:
    published = asyncio.create_task(client.publish("orders", b"again", uid="order-1"))
    request = await worker.expect(wire.Publish)
    assert request.body[1] == "order-1"
    assert len(shelf.bodies) == 1
    accept(request, 2, duplicates={0: "7-1"})
    answer = await published
    assert (answer.id, answer.duplicate) == ("0:7-1", True)
    await client.close()
    assert shelf.bodies == {}


async def test_the_body_of_a_duplicate_that_may_be_our_own_stays(
    worker: ScriptedWorker, client: AsyncClient, shelf: Shelf
) -> None:
    published = asyncio.create_task(client.publish("orders", b"again", uid="order-1"))
    await worker.expect(wire.Publish)
    worker.link.drop()
    accept(await worker.expect(wire.Publish), 2, duplicates={0: "7-2"})
    assert (await published).duplicate
    await client.close()
    assert len(shelf.bodies) == 1


async def test_what_nobody_subscribes_to_leaves_no_body(
    worker: ScriptedWorker, client: AsyncClient, shelf: Shelf
) -> None:
    published = asyncio.create_task(client.publish("orders", b"hello"))
    accept(await worker.expect(wire.Publish), 0, unowed=True)
    answer = await published
    assert (answer.id, answer.no_subscribers) == (None, True)
    await client.close()
    assert shelf.bodies == {}


async def test_a_store_in_trouble_is_waited_for(
    worker: ScriptedWorker, client: AsyncClient, shelf: Shelf
) -> None:
    shelf.trouble = [Unavailable("the store is away"), Overloaded("the store is full")]
    published = asyncio.create_task(client.publish("orders", b"hello"))
    accept(await worker.expect(wire.Publish), 2)
    assert (await published).entry == 2
    shelf.trouble = [InvalidArgument("no such bucket")]
    with pytest.raises(InvalidArgument, match="no such bucket"):
        await client.publish("orders", b"hello")


async def test_without_a_store_a_body_is_refused_and_says_what_to_do(worker: ScriptedWorker) -> None:
    async with AsyncClient(worker.url) as client:
        await know_topic(worker, client)
        with pytest.raises(InvalidArgument, match="pass payloads="):
            await client.publish("orders", b"hello")


async def test_what_the_broker_would_refuse_does_not_harm_the_messages_beside_it(client: AsyncClient) -> None:
    with pytest.raises(MessageTooLarge, match="2000 bytes in a message's key"):
        await client.publish("orders", key="x" * 2_000)
    with pytest.raises(MessageTooLarge, match="attributes"):
        await client.publish("orders", attributes={"a": "x" * 70_000})
    with pytest.raises(InvalidArgument, match="NUL"):
        await client.publish("orders", key="a\0b")
    with pytest.raises(InvalidArgument, match="not valid Unicode"):
        await client.publish("orders", key="\ud800")
    with pytest.raises(InvalidArgument, match="not text"):
        await client.publish("orders", key="a", uid=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="key is 5"):
        await client.publish("orders", key=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="key is '': use None"):
        await client.publish("orders", key="")
    with pytest.raises(InvalidArgument, match="key is '': use None"):
        await client.publish_many("orders", [OutgoingMessage(key=""), OutgoingMessage(b"1", key="")])
    with pytest.raises(InvalidArgument, match="uid is '': omit it"):
        await client.publish("orders", key="a", uid="")
    with pytest.raises(InvalidArgument, match="uid is '': omit it"):
        await client.publish_many("orders", [OutgoingMessage(uid=""), OutgoingMessage(b"2", uid="")])
    with pytest.raises(InvalidArgument, match="key is 0: use None"):
        await client.publish("orders", key=0)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="use OutgoingMessage"):
        await client.publish_many("orders", ["text"])  # type: ignore[list-item]
    with pytest.raises(InvalidArgument, match="topic has 0 to 0"):
        await client.publish("orders", partition=1)
    with pytest.raises(InvalidArgument, match="use bytes or str"):
        await client.publish("orders", 42)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="attribute 'a'"):
        await client.publish("orders", attributes={"a": 1})  # type: ignore[dict-item]
    with pytest.raises(InvalidName, match="has a space"):
        AsyncClient(producer_group="two words")


@pytest.mark.parametrize("delay", [0, 0.0, timedelta(0)])
async def test_what_is_delayed_by_nothing_has_its_id_at_once(
    worker: ScriptedWorker, client: AsyncClient, delay: float | timedelta
) -> None:
    one = asyncio.create_task(client.publish("orders", partition=0, delay=delay))
    accept(await worker.expect(wire.Publish), 5)
    assert ((await one).id, (await one).delayed) == ("0:7-5", False)
    many = asyncio.create_task(
        client.publish_many(
            "orders", [OutgoingMessage(partition=0), OutgoingMessage(partition=0, delay=delay)]
        )
    )
    accept(await worker.expect(wire.Publish), 6)
    assert [answer.id for answer in await many] == ["0:7-6", "0:7-7"]
    with pytest.raises(InvalidArgument, match="both delay and deliver_at"):
        await client.publish("orders", delay=delay, deliver_at=datetime.now(UTC))


async def test_fan_out_publishes_to_each_topic_and_stores_a_body_for_each(
    worker: ScriptedWorker, client: AsyncClient, shelf: Shelf
) -> None:
    published = asyncio.create_task(client.fan_out(["a", "b", "a"], b"news"))
    requests = [await worker.expect(wire.Publish) for _ in range(2)]
    accept(requests[0], 5)
    requests[1].error("forbidden", "not there")
    with pytest.raises(BrokerError, match="not there"):
        await published
    published = asyncio.create_task(client.fan_out(["a", "b"], b"news"))
    for _ in range(2):
        accept(await worker.expect(wire.Publish), 6)
    assert {topic: answer.id for topic, answer in (await published).items()} == {"a": "0:7-6", "b": "0:7-6"}
    assert {topic for topic, _ in shelf.bodies} == {"a", "b"}


async def test_publishes_that_are_not_answered_when_the_client_closes_are_told(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    published = asyncio.create_task(client.publish("orders"))
    await worker.expect(wire.Publish)
    await client.close()
    with pytest.raises(ConnectionClosed, match="closed"):
        await published


async def test_a_publish_that_is_cancelled_leaves_the_others_alone(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    first, second = (asyncio.create_task(client.publish("orders", partition=0)) for _ in range(2))
    request = await worker.expect(wire.Publish)
    first.cancel()
    accept(request, 2)
    assert (await second).entry == 3
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_when_too_much_waits_publishing_waits(worker: ScriptedWorker, client: AsyncClient) -> None:
    taken = 0

    def messages() -> Iterator[OutgoingMessage]:
        nonlocal taken
        for _ in range(150_000):
            taken += 1
            yield OutgoingMessage(partition=0)

    published = asyncio.create_task(client.publish_many("orders", messages()))
    requests = [await worker.expect(wire.Publish) for _ in range(8)]
    await client_is_quiet(worker)
    assert taken < 150_000
    assert worker.seen(wire.Publish) == 0
    first = 2
    while not published.done():
        for request in requests:
            accept(request, first)
            first += len(uids(request))
        requests = []
        while worker.seen(wire.Publish):
            requests.append(await worker.expect(wire.Publish))
        await client_is_quiet(worker)
    assert [answer.entry for answer in await published] == list(range(2, 150_002))


async def test_a_body_stays_when_its_message_is_stored_but_not_as_safely_as_asked(
    worker: ScriptedWorker, client: AsyncClient, shelf: Shelf
) -> None:
    for stored in (False, True):
        published = asyncio.create_task(client.publish("orders", b"body", durability="replicated"))
        request = await worker.expect(wire.Publish)
        request.error("durability_not_reached", "no replica", stored=stored)
        with pytest.raises(DurabilityNotReached):
            await published
    await client.close()
    assert list(shelf.bodies.values()) == [b"body"]


async def test_a_body_stays_when_nobody_can_be_asked_any_more_whether_its_message_was_stored(
    worker: ScriptedWorker, client: AsyncClient, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is lost, and the next worker fails when it is asked for the topic."""
    published = asyncio.create_task(client.publish("orders", b"body"))
    await worker.expect(wire.Publish)
    received = worker.received

    def fail(link: Link, frame: wire.Frame) -> None:
        if frame.type == wire.Type.INFO and wire.properties_of(frame, wire.Info).topic:
            link.send(wire.Error("broker_error", "the broker failed"), frame.sequence)
        else:
            received(link, frame)

    monkeypatch.setattr(worker, "received", fail)
    worker.link.drop()
    with pytest.raises(BrokerError, match="the broker failed"):
        await published
    await client.close()
    assert list(shelf.bodies.values()) == [b"body"]


async def test_a_body_stays_when_the_worker_failed_behind_its_message(
    worker: ScriptedWorker, client: AsyncClient, shelf: Shelf
) -> None:
    published = asyncio.create_task(client.publish("orders", b"body"))
    (await worker.expect(wire.Publish)).error("broker_error", "the broker failed; its log says how")
    with pytest.raises(BrokerError):
        await published
    await client.close()
    assert list(shelf.bodies.values()) == [b"body"]


async def test_the_body_of_what_was_refused_by_name_is_deleted(
    worker: ScriptedWorker, client: AsyncClient, shelf: Shelf
) -> None:
    published = asyncio.create_task(client.publish("orders", b"body"))
    (await worker.expect(wire.Publish)).error("invalid_argument", "not like this")
    with pytest.raises(InvalidArgument):
        await published
    await client.close()
    assert shelf.bodies == {}


async def test_messages_with_much_to_say_go_in_frames_that_the_worker_takes(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    much = {"note": "é" * 30_000}
    messages = [OutgoingMessage(uid=f"u{n}", partition=0, attributes=much) for n in range(300)]
    published = asyncio.create_task(client.publish_many("orders", messages))
    alone = [asyncio.create_task(client.publish("orders", uid=f"v{n}", partition=0)) for n in range(3)]
    seen: list[str] = []
    while len(seen) < 303:
        request = await worker.expect(wire.Publish)
        accept(request, len(seen) + 2)
        seen += uids(request)
    assert seen == [f"u{n}" for n in range(300)] + ["v0", "v1", "v2"]
    assert [answer.entry for answer in await published] == list(range(2, 302))
    assert [(await task).entry for task in alone] == [302, 303, 304]


async def test_publishing_with_a_closed_client_is_refused_at_once(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    await client.close()
    with pytest.raises(ConnectionClosed, match="the client was closed"):
        await client.publish("orders")
    with pytest.raises(ConnectionClosed, match="the client was closed"):
        await client.publish_many("orders", [OutgoingMessage()])


async def test_everybody_who_publishes_when_the_client_closes_is_told(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    body = b"x" * 1_000_000
    worker.maps_wait = True
    asking = asyncio.create_task(client.publish("unknown"))
    many = asyncio.create_task(client.publish_many("orders", [OutgoingMessage(partition=0)] * 20_000))
    waiting = [asyncio.create_task(client.publish("orders", body, partition=0)) for _ in range(100)]
    await worker.expect_map()
    await worker.expect(wire.Publish)
    await client.close()
    for task in (asking, many, *waiting):
        with pytest.raises(ConnectionClosed, match="closed"):
            await asyncio.wait_for(task, PATIENCE)


async def test_data_that_is_no_body_is_refused_even_if_it_is_empty(client: AsyncClient) -> None:
    empty: list[Any] = [0, {}, [], False]
    for data in empty:
        with pytest.raises(InvalidArgument, match="use bytes or str"):
            await client.publish("orders", data)


async def test_what_is_not_of_the_right_type_is_named(client: AsyncClient) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("key is 7", {"key": 7}),
        ("key is 7", {"key": 7, "data": b"x"}),
        ("uid is b'u'", {"uid": b"u"}),
        ("attributes is ", {"attributes": ["a"]}),
    ]
    for words, options in wrong:
        with pytest.raises(InvalidArgument, match=words):
            await client.publish("orders", **options)
    with pytest.raises(InvalidArgument, match="a message is b'x'"):
        await client.publish_many("orders", [b"x"])  # type: ignore[list-item]
    with pytest.raises(InvalidArgument, match="topics is 'orders'"):
        await client.fan_out("orders", b"x")
    with pytest.raises(InvalidArgument, match="handler is 5"):
        client.subscribe("orders", "s", handler=5)  # type: ignore[arg-type]


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(DurabilityNotReached("no replica", stored=True)))
    assert (str(error), error.stored) == ("no replica", True)
