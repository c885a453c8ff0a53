"""Who publishes waits in line, and may go: room, order and bodies are those of what is queued."""

import asyncio
import pickle
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest

from keylane import (
    AsyncClient,
    Columns,
    ConnectionClosed,
    InvalidArgument,
    MessageTooLarge,
    OutgoingMessage,
    PayloadStore,
    Published,
    PublishFailed,
    Unavailable,
    wire,
)
from keylane.produce.queue_limit import QueueLimit
from tests.support.scripted_worker import PATIENCE, Request, ScriptedWorker
from tests.support.waiting import until


class Shelf(PayloadStore):
    """Bodies in a dict; it can be made to wait, and refuses what is too long."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.open = asyncio.Event()
        self.open.set()
        self.under_way = 0
        self.asked = asyncio.Event()

    async def put(self, topic: str, bodies: Sequence[tuple[str, bytes]]) -> None:
        self.under_way += 1
        self.asked.set()
        try:
            await self.open.wait()
        finally:
            self.under_way -= 1
        if any(len(body) > 1_000_000 for _, body in bodies):
            raise MessageTooLarge("a body is too large")
        self.bodies.update(bodies)

    async def get(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
        return [self.bodies.get(name) for name in names]

    async def delete(self, topic: str, names: Sequence[str]) -> None:
        for name in names:
            self.bodies.pop(name, None)

    async def close(self) -> None:
        pass


@pytest.fixture
async def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker() as worker:
        worker.maps_wait = True
        yield worker


@pytest.fixture
async def client(worker: ScriptedWorker, shelf: Shelf) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(worker.url, payloads=shelf) as client:
        yield client


@pytest.fixture
async def known(worker: ScriptedWorker, client: AsyncClient) -> AsyncClient:
    """A client that knows the topic, of one partition."""
    published = asyncio.create_task(client.publish("orders", uid="first"))
    await worker.tell_partitions()
    worker.maps_wait = False
    accept(await worker.expect(wire.Publish), 1)
    await published
    return client


def accept(request: Request, first: int, **more: Any) -> None:
    if not request.link.transport.is_closing():
        request.ok(wire.PublishReply(7, first, 1, **more))


def uids(request: Request) -> list[str]:
    return request.body[1::3]


def room(client: AsyncClient) -> tuple[int, int]:
    """Messages and bytes that may be queued."""
    found: QueueLimit = client._producer._limit
    return found._messages, found._length


def messages(count: int, first: int = 0) -> list[OutgoingMessage]:
    return [OutgoingMessage(key="k", uid=f"u{n}") for n in range(first, first + count)]


async def ended(*tasks: asyncio.Task[Any]) -> list[Any]:
    """What became of tasks."""
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def accept_all(worker: ScriptedWorker, count: int) -> list[str]:
    """Accept what comes until there are so many messages; their uids."""
    found: list[str] = []
    while len(found) < count:
        request = await worker.expect(wire.Publish)
        accept(request, 2 + len(found))
        found += uids(request)
    return found


async def turns(count: int = 20) -> None:
    """Let everything run that can."""
    for _ in range(count):
        await asyncio.sleep(0)


# Room


@pytest.mark.slow
async def test_cancelled_calls_leave_all_of_their_room(worker: ScriptedWorker, known: AsyncClient) -> None:
    """Many parts of long calls, cancelled at each of their steps, before the first one too."""
    whole = room(known)
    for steps in range(8):
        calls: list[asyncio.Task[Any]] = [
            asyncio.create_task(known.publish_many("orders", messages(15_000))),
            asyncio.create_task(known.publish_many("orders", messages(1))),
            asyncio.create_task(known.publish("orders", b"body", key="k")),
        ]
        for _ in range(steps):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await ended(*calls)
        worker.link.drop()  # what was sent is not answered: it is sent again
        while room(known) != whole:
            accept(await worker.expect(wire.Publish), 2)
            await turns()
    one = asyncio.create_task(known.publish("orders", key="k", uid="last"))
    while not one.done():
        accept(await worker.expect(wire.Publish), 2)
        await turns()


async def test_columns_whose_task_is_cancelled_keep_room_until_they_are_answered(
    worker: ScriptedWorker, known: AsyncClient
) -> None:
    whole = room(known)
    for _ in range(14):
        task = await known.publish_columns("orders", Columns(keys=["k"] * 7_000))
        task.cancel()
        await ended(task)
    assert room(known)[0] == whole[0] - 98_000
    await accept_all(worker, 98_000)
    await turns()
    assert room(known) == whole
    assert not known._producer._under_way, "nothing is remembered of what has ended"


async def test_room_is_given_in_turn_and_nobody_comes_in_between() -> None:
    room = QueueLimit(1, 100)
    order: list[int] = []

    def enter(number: int) -> Callable[[], None]:
        def go_in() -> None:
            room.take(1, 1)
            order.append(number)

        return go_in

    room.take(1, 1)
    for number in range(3):
        room.wait(enter(number))
    room.give(1, 1)
    assert not room.free, "somebody waits, though there is room by now"
    await asyncio.sleep(0)
    assert order == [0]
    room.give(2, 2)
    await asyncio.sleep(0)
    assert order == [0, 1, 2]


# Order


async def test_later_calls_do_not_overtake_those_that_wait_for_the_partitions(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    calls = [asyncio.create_task(client.publish("orders", key="k", uid="u0"))]
    await worker.tell_partitions()
    for number in range(1, 200):  # one more at each step of the answer's way to the first
        calls.append(asyncio.create_task(client.publish("orders", key="k", uid=f"u{number}")))
        await asyncio.sleep(0)
        if number == 100:
            await asyncio.sleep(0.01)
    found = await accept_all(worker, 200)
    assert found == [f"u{number}" for number in range(200)]
    await ended(*calls)


@pytest.mark.slow
async def test_a_long_list_is_published_before_what_comes_after_it(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    long = asyncio.create_task(client.publish_many("orders", messages(25_000)))
    await asyncio.sleep(0)
    short = asyncio.create_task(client.publish("orders", key="k", uid="behind"))
    longer = asyncio.create_task(client.publish_many("orders", messages(120_000, first=25_000)))
    last = asyncio.create_task(client.publish("orders", key="k", uid="last"))
    await worker.tell_partitions()
    found = await accept_all(worker, 145_002)
    expected = [f"u{n}" for n in range(145_000)]
    assert found == [*expected[:25_000], "behind", *expected[25_000:], "last"]
    await ended(long, short, longer, last)


@pytest.mark.slow
async def test_a_long_list_that_is_cancelled_lets_the_others_in(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    long = asyncio.create_task(client.publish_many("orders", messages(150_000)))
    await asyncio.sleep(0)
    short = asyncio.create_task(client.publish("orders", key="k", uid="behind"))
    await worker.tell_partitions()
    first = await worker.expect(wire.Publish)
    assert not short.done()
    long.cancel()
    accept(first, 2)
    while not short.done():
        accept(await worker.expect(wire.Publish), 2)
        await turns()
    await ended(long)


@pytest.mark.slow
async def test_an_iterable_that_has_no_end_keeps_nobody_out(
    worker: ScriptedWorker, known: AsyncClient
) -> None:
    def endless() -> Iterator[OutgoingMessage]:
        while True:
            yield OutgoingMessage(key="k")

    many = asyncio.create_task(known.publish_many("orders", endless()))
    await asyncio.sleep(0)
    one = asyncio.create_task(known.publish("orders", key="k", uid="one"))
    while not one.done():
        request = await worker.expect(wire.Publish)
        accept(request, 2)
    many.cancel()
    await ended(many)


@pytest.mark.slow
async def test_the_order_holds_while_room_is_short(worker: ScriptedWorker, known: AsyncClient) -> None:
    """New ones come at each step, while those who wait are let in, and some of these go."""
    choice = random.Random(11)
    first = asyncio.create_task(known.publish_many("orders", messages(100_000)))
    await asyncio.sleep(0)
    calls: list[asyncio.Task[Published]] = []
    found: list[str] = []

    async def come() -> None:
        for number in range(3_000):
            call = known.publish("orders", key="k", uid=f"v{number:05}")
            calls.append(asyncio.create_task(call))
            await asyncio.sleep(0)
            if choice.random() < 0.2:
                choice.choice(calls[-5:]).cancel()

    coming = asyncio.create_task(come())
    while not (first.done() and coming.done() and all(call.done() for call in calls)):
        while worker.seen(wire.Publish):
            request = await worker.expect(wire.Publish)
            accept(request, 2)
            found += uids(request)
        await asyncio.sleep(0)
    later = [uid for uid in found if uid[0] == "v"]
    assert later == sorted(later)
    answers = await ended(*calls)
    told = [answer.uid for answer in answers if isinstance(answer, Published)]
    assert set(told) <= set(later)


async def test_those_who_wait_in_line_are_told_what_is_wrong(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    good = asyncio.create_task(client.publish("orders", key="k", uid="first"))
    bad = asyncio.create_task(client.publish("orders", partition=7))
    many = asyncio.create_task(client.publish_many("orders", messages(3)))
    await worker.tell_partitions()
    accept(await worker.expect(wire.Publish), 2)
    answers = await ended(good, bad, many)
    assert isinstance(answers[1], InvalidArgument)
    assert (answers[0].entry, [answer.entry for answer in answers[2]]) == (2, [3, 4, 5])


async def test_who_waits_for_a_topic_that_is_not_there_hears_so_each_with_an_error_of_their_own(
    worker: ScriptedWorker, client: AsyncClient
) -> None:
    calls = [asyncio.create_task(client.publish("nowhere")) for _ in range(3)]
    (await worker.expect_map()).error("topic_not_found", "no topic")
    answers = await ended(*calls)
    assert [answer.code for answer in answers] == ["topic_not_found"] * 3
    assert len(set(map(id, answers))) == 3


# What was cancelled


async def test_what_was_not_sent_is_withdrawn(worker: ScriptedWorker, known: AsyncClient) -> None:
    sent = asyncio.create_task(known.publish("orders", key="k", uid="sent"))
    request = await worker.expect(wire.Publish)
    others = [asyncio.create_task(known.publish("orders", key="k", uid=f"u{n}")) for n in range(10)]
    many = asyncio.create_task(known.publish_many("orders", messages(20, first=10)))
    await turns()
    whole = room(known)[0]
    for call in (sent, *others[::2], many):
        call.cancel()
    await turns()
    assert room(known)[0] == whole + 25
    accept(request, 2)
    behind = await worker.expect(wire.Publish)
    assert uids(behind) == ["u1", "u3", "u5", "u7", "u9"]
    accept(behind, 3)
    answers = await ended(*others[1::2])
    assert [(answer.uid, answer.entry) for answer in answers] == [
        ("u1", 3),
        ("u3", 4),
        ("u5", 5),
        ("u7", 6),
        ("u9", 7),
    ]
    assert room(known)[0] == 100_000


async def test_later_messages_that_are_withdrawn_take_their_times_along(
    worker: ScriptedWorker, known: AsyncClient
) -> None:
    sent = asyncio.create_task(known.publish("orders", key="k", uid="sent"))
    request = await worker.expect(wire.Publish)
    later = [
        asyncio.create_task(known.publish("orders", key="k", uid=f"u{n}", delay=10.0 * (n + 1)))
        for n in range(4)
    ]
    await turns()
    later[1].cancel()
    await turns()
    accept(request, 2)
    behind = await worker.expect(wire.Publish)
    assert uids(behind) == ["u0", "u2", "u3"]
    first, second, third = behind.properties.due_ms
    assert (round((second - first) / 1000), round((third - first) / 1000)) == (20, 30)
    behind.ok(wire.PublishReply(0, 0, 1, delayed=True))
    assert [answer.delayed for answer in await ended(sent, *later[2:])] == [False, True, True]


async def test_what_was_sent_and_cancelled_is_sent_again_and_has_room_until_it_is_answered(
    worker: ScriptedWorker, known: AsyncClient, shelf: Shelf
) -> None:
    call = asyncio.create_task(known.publish("orders", b"x" * 500, key="k", uid="sent"))
    await worker.expect(wire.Publish)
    call.cancel()
    await ended(call)
    assert room(known)[0] == 99_999
    assert room(known)[1] < 64 * 1024 * 1024 - 500
    worker.link.drop()
    again = await worker.expect(wire.Publish)
    assert uids(again) == ["sent"]
    accept(again, 2)
    await until(lambda: room(known) == (100_000, 64 * 1024 * 1024))
    assert list(shelf.bodies.values()) == [b"x" * 500]


async def test_bodies_of_what_is_withdrawn_while_they_are_stored_do_not_stay(
    worker: ScriptedWorker, known: AsyncClient, shelf: Shelf
) -> None:
    shelf.open.clear()
    calls = [
        asyncio.create_task(known.publish("orders", f"{n}".encode() * 1_000, key="k", uid=f"u{n}"))
        for n in range(4)
    ]
    await shelf.asked.wait()
    taken = room(known)
    calls[1].cancel()
    await turns()
    assert room(known) == taken, "the store has the body in its hands"
    shelf.open.set()
    request = await worker.expect(wire.Publish)
    assert uids(request) == ["u0", "u2", "u3"]
    assert room(known)[0] == taken[0] + 1
    accept(request, 2)
    await ended(calls[0], *calls[2:])
    await until(lambda: len(shelf.bodies) == 3)
    assert room(known) == (100_000, 64 * 1024 * 1024)


@pytest.mark.slow
async def test_nothing_is_stored_for_those_who_have_all_gone(
    worker: ScriptedWorker, known: AsyncClient, shelf: Shelf
) -> None:
    shelf.open.clear()
    calls = [asyncio.create_task(known.publish("orders", b"x" * 1_000_000, key="k")) for _ in range(200)]
    await shelf.asked.wait()
    await turns()
    for call in calls:
        call.cancel()
    await ended(*calls)
    await until(lambda: shelf.under_way == 0)
    await turns()
    assert room(known) == (100_000, 64 * 1024 * 1024)
    shelf.open.set()
    one = asyncio.create_task(known.publish("orders", b"body", key="k", uid="one"))
    request = await worker.expect(wire.Publish)
    assert uids(request) == ["one"]
    accept(request, 2)
    await ended(one)
    await until(lambda: list(shelf.bodies.values()) == [b"body"])


async def test_what_nobody_is_owed_leaves_no_body_though_who_published_it_has_gone(
    worker: ScriptedWorker, known: AsyncClient, shelf: Shelf
) -> None:
    call = asyncio.create_task(known.publish("orders", b"body", key="k"))
    request = await worker.expect(wire.Publish)
    call.cancel()
    await ended(call)
    accept(request, 0, unowed=True)
    await until(lambda: not shelf.bodies)


@pytest.mark.slow
async def test_bodies_of_what_was_never_sent_go_when_the_time_is_up(
    worker: ScriptedWorker, shelf: Shelf
) -> None:
    async with AsyncClient(worker.url, payloads=shelf, timeout=2.0) as client:
        first = asyncio.create_task(client.publish("orders", b"first", key="k"))
        await worker.tell_partitions()
        await worker.expect(wire.Publish)
        shelf.open.clear()
        shelf.asked.clear()
        more = [OutgoingMessage(b"more", key="k") for _ in range(1_000)]
        second = asyncio.create_task(client.publish_many("orders", more))
        await shelf.asked.wait()
        answers = await ended(first, second)
        assert [type(answer) for answer in answers] == [Unavailable, Unavailable]
        shelf.open.set()
        await until(lambda: list(shelf.bodies.values()) == [b"first"])


@pytest.mark.slow
async def test_a_client_that_closes_leaves_no_body_of_what_was_not_sent(
    worker: ScriptedWorker, known: AsyncClient, shelf: Shelf
) -> None:
    sent = asyncio.create_task(known.publish("orders", b"sent", key="k"))
    await worker.expect(wire.Publish)
    shelf.open.clear()
    shelf.asked.clear()
    more = [OutgoingMessage(b"not", key="k") for _ in range(1_000)]
    not_sent = asyncio.create_task(known.publish_many("orders", more))
    await shelf.asked.wait()
    await known.close()
    assert [type(answer) for answer in await ended(sent, not_sent)] == [ConnectionClosed] * 2
    assert list(shelf.bodies.values()) == [b"sent"], "nobody knows whether its message is stored"
    assert shelf.under_way == 0


# What became of each


async def test_one_that_fails_does_not_hide_the_answers_of_the_others(
    worker: ScriptedWorker, known: AsyncClient
) -> None:
    published = asyncio.create_task(known.publish_many("orders", messages(2_500)))
    requests = [await worker.expect(wire.Publish), await worker.expect(wire.Publish)]
    accept(requests[0], 2)
    requests[1].error("invalid_argument", "not like this")
    accept(await worker.expect(wire.Publish), 1_002)
    with pytest.raises(
        PublishFailed, match="1000 of 2500 messages were not published: not like this"
    ) as caught:
        await published
    found = caught.value.published
    assert [answer.entry for answer in found[:1_000]] == list(range(2, 1_002))  # type: ignore[union-attr]
    assert {type(answer) for answer in found[1_000:2_000]} == {InvalidArgument}
    assert [answer.entry for answer in found[2_000:]] == list(range(1_002, 1_502))  # type: ignore[union-attr]
    assert [type(error) for error in caught.value.exceptions] == [InvalidArgument]
    assert (caught.value.code, caught.value.retriable) == ("publish_failed", False)


async def test_what_is_wrong_with_a_late_part_of_a_call_does_not_hide_what_was_published_before(
    worker: ScriptedWorker, known: AsyncClient
) -> None:
    bad = [*messages(10_000), OutgoingMessage(key="")]
    published = asyncio.create_task(known.publish_many("orders", bad))
    assert len(await accept_all(worker, 10_000)) == 10_000
    with pytest.raises(PublishFailed) as caught:
        await published
    assert [isinstance(answer, Published) for answer in caught.value.published] == [True] * 10_000 + [False]
    with pytest.raises(InvalidArgument):
        await known.publish_many("orders", bad[10_000:])


@pytest.mark.slow
@pytest.mark.parametrize("given", [list, iter])
async def test_each_message_that_cannot_be_sent_has_an_error_of_its_own_and_all_others_are_published(
    worker: ScriptedWorker, known: AsyncClient, given: Callable[[Any], Any]
) -> None:
    wrong = {
        3: (OutgoingMessage(key=""), InvalidArgument),
        10_005: (OutgoingMessage(key="k", partition=99), InvalidArgument),
        10_007: (OutgoingMessage(key="x" * 2_000), MessageTooLarge),
        10_008: ("text", InvalidArgument),
        20_004: (OutgoingMessage(key="k", uid=5), InvalidArgument),  # type: ignore[arg-type]
    }
    many: list[Any] = messages(20_010)
    for place, (message, _) in wrong.items():
        many[place] = message
    published = asyncio.create_task(known.publish_many("orders", given(many)))
    assert await accept_all(worker, 20_005) == [f"u{n}" for n in range(20_010) if n not in wrong]
    with pytest.raises(PublishFailed, match="5 of 20010 messages were not published") as caught:
        await published
    found = caught.value.published
    assert [answer.uid for answer in found if isinstance(answer, Published)] == [
        f"u{n}" for n in range(20_010) if n not in wrong
    ]
    assert {n: type(answer) for n, answer in enumerate(found) if isinstance(answer, Exception)} == {
        place: kind for place, (_, kind) in wrong.items()
    }
    assert room(known)[0] == 100_000


@pytest.mark.slow
@pytest.mark.parametrize("given", [list, iter])
async def test_a_call_that_ends_early_says_what_became_of_each_that_was_taken(
    worker: ScriptedWorker, known: AsyncClient, given: Callable[[Any], Any]
) -> None:
    """The client closes while there is no room for more, and a part of the call is still to come."""
    many = given(messages(150_000))
    published = asyncio.create_task(known.publish_many("orders", many))
    accept(await worker.expect(wire.Publish), 2)
    for _ in range(8):  # the last of them goes out when the first one's answer is there
        await worker.expect(wire.Publish)
    await known.close()
    with pytest.raises(PublishFailed) as caught:
        await published
    left = 0 if given is list else len(list(many))
    found = caught.value.published
    assert len(found) + left == 150_000
    assert {type(answer) for answer in found[:1_000]} == {Published}
    assert {type(answer) for answer in found[1_000:]} == {ConnectionClosed}


async def test_an_error_of_the_iterable_comes_out_when_the_rest_is_done(
    worker: ScriptedWorker, known: AsyncClient
) -> None:
    def some() -> Iterator[OutgoingMessage]:
        yield from messages(10_000)
        raise ValueError("no more")

    published = asyncio.create_task(known.publish_many("orders", some()))
    await accept_all(worker, 10_000)
    with pytest.raises(ValueError, match="no more"):
        await published
    assert room(known)[0] == 100_000


async def test_bodies_that_the_store_refuses_fail_one_by_one(
    worker: ScriptedWorker, known: AsyncClient, shelf: Shelf
) -> None:
    large = {3, 4, 77, 99}
    many = [
        OutgoingMessage(b"x" * (1_000_001 if n in large else 10), key="k", uid=f"u{n}") for n in range(100)
    ]
    alone = asyncio.create_task(known.publish("orders", many[3].data, key="k"))
    beside = asyncio.create_task(known.publish("orders", b"fits", key="k", uid="beside"))
    published = asyncio.create_task(known.publish_many("orders", many))
    request = await worker.expect(wire.Publish)
    assert uids(request) == ["beside", *(f"u{n}" for n in range(100) if n not in large)]
    accept(request, 2)
    answers = await ended(alone, beside)
    assert [type(answer) for answer in answers] == [MessageTooLarge, Published]
    with pytest.raises(PublishFailed) as caught:
        await published
    found = caught.value.published
    assert {n for n, answer in enumerate(found) if isinstance(answer, MessageTooLarge)} == large
    stored = [answer for answer in found if isinstance(answer, Published)]
    assert [(answer.uid, answer.entry) for answer in stored] == [
        (uid, entry) for entry, uid in enumerate(uids(request)[1:], 3)
    ]
    assert len(shelf.bodies) == 97
    assert room(known) == (100_000, 64 * 1024 * 1024)


async def test_what_fails_beside_a_refused_body_has_its_own_error(
    worker: ScriptedWorker, known: AsyncClient, shelf: Shelf
) -> None:
    many = [OutgoingMessage(b"x" * (1_000_001 if n == 1 else 10), key="k", uid=f"u{n}") for n in range(4)]
    published = asyncio.create_task(known.publish_many("orders", many))
    request = await worker.expect(wire.Publish)
    assert uids(request) == ["u0", "u2", "u3"]
    await known.close()
    with pytest.raises(PublishFailed) as caught:
        await published
    kinds = [type(answer) for answer in caught.value.published]
    assert kinds == [ConnectionClosed, MessageTooLarge, ConnectionClosed, ConnectionClosed]


async def test_what_fails_alike_for_all_is_raised_itself(
    worker: ScriptedWorker, known: AsyncClient, shelf: Shelf
) -> None:
    with pytest.raises(MessageTooLarge):
        await known.publish_many("orders", [OutgoingMessage(b"x" * 1_000_001)] * 3)
    await turns()
    assert room(known) == (100_000, 64 * 1024 * 1024)


def test_a_failed_call_travels_between_processes() -> None:
    away = Unavailable("away")
    error = PublishFailed("2 of 3", [Published(0, "u", 1, 1), away, away])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.published[0], copy.retriable) == ("2 of 3", error.published[0], True)
    assert [str(found) for found in copy.exceptions] == ["away"]
    assert not PublishFailed("2 of 3", [away, InvalidArgument("no")]).retriable
