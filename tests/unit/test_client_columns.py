"""Messages by columns: the same as one by one, on the way out and in the answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane import (
    AsyncClient,
    Columns,
    ConnectionClosed,
    InvalidArgument,
    MessageTooLarge,
    OutgoingMessage,
    PayloadStore,
    Tally,
    TopicNotFound,
    TopicReplaced,
    Unavailable,
    wire,
)
from keylane.produce.columns import sort_columns
from keylane.produce.outbox import Outbox
from keylane.produce.outgoing import Slice, sort
from keylane.wire import unpack_about
from tests.support.scripted_worker import PATIENCE, ScriptedWorker

MESSAGES = st.lists(
    st.builds(
        OutgoingMessage,
        data=st.none() | st.binary(max_size=5),
        key=st.none() | st.sampled_from(["a", "b", "Zürich"]),
        attributes=st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
        partition=st.none() | st.integers(0, 3),
        uid=st.none() | st.text("xyz", min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=20,
)


def columns_of(messages: Sequence[OutgoingMessage]) -> Columns:
    """The same messages by columns; one of which no row has a value is not given."""

    def column(name: str) -> list[Any] | None:
        values = [getattr(message, name) for message in messages]
        return None if all(value is None for value in values) else values

    return Columns(
        column("key") or [None] * len(messages),
        column("data"),
        column("uid"),
        column("attributes"),
        column("partition"),
    )


def told(slices: list[Slice]) -> dict[int, list[Any]]:
    """What would be sent, with names and times that differ from call to call taken out."""
    found: dict[int, list[Any]] = {}
    for item in slices:  # those of a partition are in the order of the call
        found.setdefault(item.partition, []).extend(row(item, place) for place in range(len(item.flat) // 3))
    return found


def row(item: Slice, place: int) -> tuple[object, ...]:
    key, uid, text = item.flat[place * 3 : place * 3 + 3]
    about = unpack_about(f"0 {text}", uid)
    name, body = item.bodies.get(place, ("", b""))
    assert about.body == name, "the body is where the message says"
    given = len(uid) <= 3
    assert not (given and body and name == uid), "a duplicate's body would replace that of the first"
    return key, uid if given else None, about.attributes, about.size, body, about.producer_group


@pytest.mark.slow
@given(messages=MESSAGES, count=st.integers(4, 6), first=st.integers(0, 9))
def test_columns_say_the_same_as_messages(messages: list[OutgoingMessage], count: int, first: int) -> None:
    """The uid that is made for the first decides where those without a key or uid go."""
    with patch("keylane.ksuid.take", lambda count, _: [f"{first + at:027}" for at in range(count)]):
        ours = told(sort_columns(columns_of(messages), count, "group"))
        assert ours == told(sort(messages, count, "group"))


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        (Columns(keys=["a", "b"], bodies=[b"1"]), "of equal length"),
        (Columns(keys=["a"], partitions=[9]), "partition 9 is out of range: the topic has 0 to 3"),
        (Columns(keys=["\ud800"]), "not valid Unicode"),
        (Columns(keys=[7]), "wrong type"),  # type: ignore[list-item]
        (Columns(attributes=[{"a": 1}]), "names and values must be str"),  # type: ignore[dict-item]
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(columns: Columns, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        sort_columns(columns, 4, "")


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker() as worker:
        yield worker


async def test_calls_are_queued_in_order_and_several_are_under_way(worker: ScriptedWorker) -> None:
    async with AsyncClient(worker.url) as client:
        first = asyncio.create_task(client.publish_columns("orders", Columns(keys=["a"] * 1_000)))
        await first
        uids = [f"u{row}" for row in range(1_000)]
        second = await client.publish_columns("orders", Columns(keys=["b"] * 1_000, uids=uids))
        requests = [await worker.expect(wire.Publish), await worker.expect(wire.Publish)]
        assert [request.body[0] for request in requests] == ["a", "b"]
        requests[0].ok(wire.PublishReply(7, 1, 1, duplicates={3: "6-1"}))
        requests[1].ok(wire.PublishReply(7, 0, 1, unowed=True, duplicates={0: "6-2", 1: "6-3"}))
        uid = requests[0].body[3 * 3 + 1]
        assert await first.result() == Tally(stored=999, duplicates=1, repeated=(uid,))
        assert await second == Tally(duplicates=2, no_subscribers=998, repeated=("u0", "u1"))


class Shelf(PayloadStore):
    """Takes bodies, but for its second call."""

    def __init__(self) -> None:
        self.puts = 0

    async def put(self, topic: str, bodies: Sequence[tuple[str, bytes]]) -> None:
        self.puts += 1
        if self.puts == 2:
            raise OSError("no space")

    async def get(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
        return []

    async def delete(self, topic: str, names: Sequence[str]) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.mark.slow
async def test_nothing_goes_out_behind_a_part_that_was_given_up(worker: ScriptedWorker) -> None:
    async with AsyncClient(worker.url, payloads=Shelf()) as client:
        columns = [Columns(keys=[key] * 1_000, bodies=[b"x"] * 1_000) for key in "abcd"]
        first = asyncio.create_task(client.publish_columns("orders", columns[0]))
        others = [await first, *[await client.publish_columns("orders", some) for some in columns[1:3]]]
        accept = await worker.expect(wire.Publish)
        accept.ok(wire.PublishReply(7, 1, 1))
        assert await others[0] == Tally(stored=1_000)
        others.append(await client.publish_columns("orders", columns[3]))
        for given_up in others[1:]:
            with pytest.raises(OSError, match="no space"):
                await given_up
        one = asyncio.create_task(client.publish("orders", key="z"))  # that is a call of its own
        request = await worker.expect(wire.Publish)
        assert request.body[0] == "z"
        request.ok(wire.PublishReply(7, 1_001, 1))
        await one


def test_delays_count_from_now_on_and_times_are_as_they_are() -> None:
    [item] = sort_columns(Columns(delays=[5.0, None], dues=[None, 7_000]), 1, "", drift=60.0)
    assert item.dues[1] == 7_000
    assert 64_000 < item.dues[0] - time.time() * 1000 < 66_000
    with pytest.raises(InvalidArgument, match="both a due time and a delay"):
        sort_columns(Columns(delays=[5.0], dues=[7_000]), 1, "")
    with pytest.raises(InvalidArgument, match="a delay of nan s"):
        sort_columns(Columns(delays=[float("nan")]), 1, "")


async def test_what_is_too_large_is_refused_before_anything_is_sent(worker: ScriptedWorker) -> None:
    async with AsyncClient(worker.url) as client:
        call = asyncio.create_task(client.publish_columns("orders", Columns(keys=["a", "b" * 2_000])))
        with pytest.raises(MessageTooLarge, match="2000 bytes in a message's key"):
            await call


async def test_no_rows_are_nothing_to_publish(worker: ScriptedWorker) -> None:
    async with AsyncClient(worker.url) as client:
        call = asyncio.create_task(client.publish_columns("orders", Columns(keys=[])))
        assert await (await call) == Tally()


async def hold_frames(worker: ScriptedWorker, client: AsyncClient) -> tuple[asyncio.Task[Tally], Outbox]:
    """Columns of ten frames, of which eight are sent and not answered and two wait; and where they are."""
    counting = await client.publish_columns("orders", Columns(keys=["a"] * (10 * wire.MAX_BATCH)))
    for _ in range(8):
        await worker.expect(wire.Publish)
    outbox = client._producer._outboxes["orders", 0]
    assert (len(outbox._started), len(outbox._waiting)) == (8, 2)
    return counting, outbox


def all_room(client: AsyncClient) -> bool:
    return client._producer._limit._messages == 100_000


async def test_columns_whose_time_is_up_end_once_and_what_is_behind_them_goes_out(
    worker: ScriptedWorker,
) -> None:
    async with AsyncClient(worker.url) as client:
        counting, outbox = await hold_frames(worker, client)
        behind = asyncio.create_task(client.publish("orders", key="z"))
        async with asyncio.timeout(PATIENCE):
            while len(outbox._waiting) < 3:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0)
        for frame in [*outbox._started, *outbox._waiting][:10]:
            frame.created -= outbox._timeout
        outbox._expire()
        with pytest.raises(Unavailable, match="has not answered"):
            await counting
        assert outbox._expiry is not None
        assert outbox._expiry.when() > outbox._loop.time()
        request = await worker.expect(wire.Publish)
        assert request.body[0] == "z"
        request.ok(wire.PublishReply(7, 1, 1))
        await behind
        assert all_room(client)


async def test_a_client_that_closes_gives_up_columns_once(worker: ScriptedWorker) -> None:
    async with AsyncClient(worker.url) as client:
        counting, outbox = await hold_frames(worker, client)
        await client.close()
        with pytest.raises(ConnectionClosed):
            await counting
        assert [*outbox._started, *outbox._waiting] == []
        assert all_room(client)


async def test_columns_of_a_topic_that_was_replaced_end_once_and_the_rest_goes_to_the_new_one(
    worker: ScriptedWorker,
) -> None:
    worker.info["incarnation"] = 5
    async with AsyncClient(worker.url) as client:
        counting = await client.publish_columns("orders", Columns(keys=["a"] * (10 * wire.MAX_BATCH)))
        sent = [await worker.expect(wire.Publish) for _ in range(8)]
        behind = asyncio.create_task(client.publish("orders", key="z"))
        worker.info["incarnation"] = 6
        worker.link.send(wire.Moved("orders"))
        outbox = client._producer._outboxes["orders", 0]
        async with asyncio.timeout(PATIENCE):
            while outbox._retired is None:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.005)
        for request in sent:
            request.ok(wire.PublishReply(7, 1, 1))
        with pytest.raises(TopicReplaced):
            await counting
        request = await worker.expect(wire.Publish)
        assert (request.body[0], request.properties.incarnation) == ("z", 6)
        request.ok(wire.PublishReply(7, 1, 1))
        await behind
        assert all_room(client)


async def test_columns_of_a_topic_that_is_gone_end_once(worker: ScriptedWorker) -> None:
    async with AsyncClient(worker.url) as client:
        counting = await client.publish_columns("orders", Columns(keys=["a"] * (10 * wire.MAX_BATCH)))
        sent = [await worker.expect(wire.Publish) for _ in range(8)]
        behind = asyncio.create_task(client.publish("orders", key="z"))
        expiry = client._producer._outboxes["orders", 0]._expiry
        assert expiry is not None
        expiry.cancel()  # which would tell as well, much later
        worker.maps_wait = True
        for request in sent:
            request.error("unavailable", "not now")
        (await worker.expect_map()).error("topic_not_found", "no topic 'orders'")
        for call in (counting, behind):
            with pytest.raises(TopicNotFound):
                await asyncio.wait_for(call, PATIENCE)
        assert all_room(client)
