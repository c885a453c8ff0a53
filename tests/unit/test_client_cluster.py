"""A client of several workers: who is asked, what moves, and what a worker that says nothing holds up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from keylane import AsyncClient, Columns, Consumer, Message, OutgoingMessage, wire
from keylane.connect.pool import unused
from keylane.errors import (
    InvalidArgument,
    StaleReceipt,
    SubscriptionBusy,
    SubscriptionNotFound,
    TopicNotFound,
    TopicReplaced,
)
from tests.support.scripted_worker import PATIENCE, Link, Request, ScriptedCluster, ScriptedWorker
from tests.support.waiting import until


def accept(request: Request, first: int = 1, **more: Any) -> None:
    request.ok(wire.PublishReply(7, first, 1, **more))


def uids(request: Request) -> list[str]:
    return request.body[1::3]


async def until_told(worker: ScriptedWorker) -> None:
    """Until the client has seen all that a worker has sent: it answers a heartbeat behind it."""
    worker.link.send(wire.Heartbeat(), sequence=99)
    await worker.expect(wire.Properties)


async def publish_to(client: AsyncClient, partition: int, *names: str) -> Any:
    messages = [OutgoingMessage(uid=name, partition=partition) for name in names]
    return await client.publish_many("orders", messages)


# Publishing


async def test_a_publish_goes_to_the_owner_of_its_partition() -> None:
    async with ScriptedCluster(3, "orders", [0, 1, 2, 1]) as workers, AsyncClient(workers[0].url) as client:
        published = asyncio.gather(*(publish_to(client, number, f"u{number}") for number in range(4)))
        seen = {}
        for number in (0, 1, 2, 1):
            request = await workers[number].expect(wire.Publish)
            seen[request.properties.partition] = number
            accept(request)
        await published
        assert seen == {0: 0, 1: 1, 2: 2, 3: 1}
        assert [len(worker.links) for worker in workers] == [1, 1, 1]


async def test_a_first_publish_outlives_a_connection_that_is_lost_while_the_map_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ScriptedCluster(1, "orders", [0]) as (worker,), AsyncClient(worker.url) as client:
        as_it_is, lost = worker.received, 0

        def lose_twice(link: Link, frame: wire.Frame) -> None:
            nonlocal lost
            if lost < 2 and frame.type == wire.Type.INFO and wire.properties_of(frame, wire.Info).topic:
                lost += 1
                link.drop()
            else:
                as_it_is(link, frame)

        monkeypatch.setattr(worker, "received", lose_twice)
        published = asyncio.create_task(client.publish("orders", key="a"))
        accept(await worker.expect(wire.Publish))
        await published
        assert lost == 2


async def test_the_map_is_asked_for_once_and_tells_the_number_of_partitions() -> None:
    cluster = ScriptedCluster(1, "orders", [0] * 8)
    async with cluster as (worker,), AsyncClient(worker.url) as client:
        published = asyncio.gather(*(client.publish("orders", key="a") for _ in range(10)))
        request = await worker.expect(wire.Publish)
        assert request.properties.partition == wire.partition_of("a", 8)
        accept(request)
        await published
        assert cluster.asked == 1


async def test_after_a_redirect_all_that_is_not_answered_goes_to_the_new_owner_in_order() -> None:
    cluster = ScriptedCluster(2, "orders", [0])
    async with cluster as (old, new), AsyncClient(old.url) as client:
        names = [f"u{number}" for number in range(3_000)]
        published = asyncio.create_task(publish_to(client, 0, *names))
        requests = [await old.expect(wire.Publish) for _ in range(3)]
        accept(requests[0])
        cluster.owners = [1]
        for request in requests[1:]:
            request.redirect("orders", 0, new)
        again = [await new.expect(wire.Publish) for _ in range(2)]
        assert [name for request in again for name in uids(request)] == names[1_000:]
        assert [request.properties.again for request in again] == [True, False]
        for number, request in enumerate(again):
            accept(request, 1_001 + number * 1_000)
        assert [item.entry for item in await published] == list(range(1, 3_001))


async def test_a_redirect_without_an_address_has_the_map_asked_for() -> None:
    cluster = ScriptedCluster(2, "orders", [0])
    async with cluster as (old, new), AsyncClient(old.url) as client:
        published = asyncio.create_task(publish_to(client, 0, "u"))
        request = await old.expect(wire.Publish)
        cluster.owners = [1]
        request.redirect("orders", 0, None)
        accept(await new.expect(wire.Publish))
        await published


@pytest.mark.slow
async def test_what_a_paused_worker_has_not_answered_goes_to_the_new_owner_once_that_is_known() -> None:
    """It keeps its sockets open and says nothing; when it wakes up, what it says is not heard."""
    cluster = ScriptedCluster(2, "orders", [0, 1])
    async with cluster as (paused, other), AsyncClient(other.url) as client:
        published = asyncio.create_task(publish_to(client, 1, "there"))
        accept(await other.expect(wire.Publish))
        await published
        published = asyncio.create_task(publish_to(client, 0, *(f"u{number}" for number in range(2_000))))
        late = [await paused.expect(wire.Publish) for _ in range(2)]
        paused.silent = True
        cluster.move(0, 1)
        again = [await other.expect(wire.Publish) for _ in range(2)]
        assert [uids(request) for request in again] == [uids(request) for request in late]
        late[0].ok(wire.PublishReply(3, 99, 1))
        late[1].error("invalid_argument", "no")
        paused.silent = False
        await until_told(paused)
        accept(again[0], 0, duplicates={place: f"7-{place + 1}" for place in range(1_000)})
        accept(again[1], 1_001)
        assert [item.entry for item in await published] == list(range(1, 2_001))
        assert not paused.link.closed.done()


@pytest.mark.slow
async def test_a_client_notices_by_itself_that_its_only_worker_says_nothing() -> None:
    cluster = ScriptedCluster(2, "orders", [0])
    async with cluster as (paused, other), AsyncClient(paused.url) as client:
        published = asyncio.create_task(publish_to(client, 0, "u"))
        await paused.expect(wire.Publish)
        paused.silent = True
        cluster.owners = [1]
        assert not other.links
        accept(await other.expect(wire.Publish))
        await published
        assert not paused.link.closed.done()
        asked = asyncio.create_task(client.topics())
        (await other.expect(wire.Topics)).ok(body=[])
        assert await asked == []


@pytest.mark.slow
async def test_a_question_that_a_paused_worker_does_not_answer_is_asked_elsewhere() -> None:
    async with ScriptedCluster(2, "orders", [0]) as (paused, other), AsyncClient(paused.url) as client:
        asked = asyncio.create_task(client.topics())
        await paused.expect(wire.Topics)
        paused.silent = True
        (await other.expect(wire.Topics)).ok(body=["orders"])
        assert await asked == ["orders"]


@pytest.mark.slow
async def test_a_worker_that_is_only_slow_is_not_suspected() -> None:
    cluster = ScriptedCluster(2, "orders", [0])
    async with cluster as (slow, other), AsyncClient(slow.url) as client:
        published = asyncio.create_task(publish_to(client, 0, "u"))
        request = await slow.expect(wire.Publish)
        asked = cluster.asked
        await asyncio.sleep(2.5)  # longer than it takes to suspect a worker that answers no heartbeat
        accept(request)
        await published
        assert (cluster.asked, other.links) == (asked, [])


async def test_a_partition_that_nobody_has_is_asked_for_until_somebody_does() -> None:
    cluster = ScriptedCluster(2, "orders", [-1])
    async with cluster as workers, AsyncClient(workers[0].url) as client:
        published = asyncio.create_task(publish_to(client, 0, "u"))
        for _ in range(4):
            await workers[0].expect(wire.Info)
        assert cluster.asked < 30
        cluster.owners = [1]
        accept(await workers[1].expect(wire.Publish))
        await published


async def test_a_worker_that_stops_answering_connections_is_left_for_the_one_that_takes_over() -> None:
    cluster = ScriptedCluster(2, "orders", [0])
    async with cluster as (old, new), AsyncClient([old.url, new.url]) as client:
        published = asyncio.create_task(publish_to(client, 0, "u"))
        await old.expect(wire.Publish)
        await old.stop()
        await asyncio.sleep(0.2)
        cluster.owners = [1]
        accept(await new.expect(wire.Publish))
        await published
        await old.listen()


async def test_another_connection_takes_over_at_once_when_home_is_lost() -> None:
    cluster = ScriptedCluster(2, "orders", [0, 1])
    async with cluster as (home, other), AsyncClient(home.url) as client:
        published = asyncio.create_task(publish_to(client, 1, "u"))
        accept(await other.expect(wire.Publish))
        await published
        await home.stop()
        asked = asyncio.create_task(client.topics())
        (await other.expect(wire.Topics)).ok(body=[])
        await asked
        assert len(other.links) == 1
        await home.listen()


async def test_workers_that_were_learnt_are_tried_when_no_seed_answers() -> None:
    async with ScriptedCluster(2, "orders", []) as (seed, other), AsyncClient(seed.url) as client:
        await seed.stop()
        asked = asyncio.create_task(client.topics())
        (await other.expect(wire.Topics)).ok(body=["orders"])
        assert await asked == ["orders"]
        await seed.listen()


async def test_a_seed_under_another_name_is_the_same_worker() -> None:
    cluster = ScriptedCluster(1, "orders", [0])
    async with cluster as (worker,), AsyncClient(f"keylane://localhost:{worker.port}") as client:
        for name in ("one", "two"):
            published = asyncio.create_task(publish_to(client, 0, name))
            accept(await worker.expect(wire.Publish))
            await published
            assert len(worker.links) == (1 if name == "one" else 2)
            worker.link.drop()
            await asyncio.wait_for(worker.link.closed, PATIENCE)


async def test_what_is_refused_by_another_topic_of_that_name_is_placed_by_its_number_of_partitions() -> None:
    cluster = ScriptedCluster(2, "orders", [0, 1, 0, 1, 0, 1, 0, 1])
    cluster.incarnation = 5
    async with cluster as workers, AsyncClient(workers[0].url) as client:
        key = next(f"k{n}" for n in range(99) if wire.partition_of(f"k{n}", 8) == 7)
        published = asyncio.create_task(client.publish("orders", key=key))
        request = await workers[1].expect(wire.Publish)
        assert (request.properties.partition, request.properties.incarnation) == (7, 5)
        cluster.owners, cluster.incarnation = [0], 6
        request.error("topic_replaced")
        request = await workers[0].expect(wire.Publish)
        assert request.properties.incarnation == 6
        accept(request)
        assert (await published).partition == 0
        with pytest.raises(InvalidArgument):
            await client.publish("orders", key=key, partition=7)
        cluster.change([0] * 8, 7)
        await until_told(workers[0])
        await until_told(workers[0])
        published = asyncio.create_task(client.publish("orders", key=key))
        request = await workers[0].expect(wire.Publish)
        assert (request.properties.partition, request.properties.incarnation) == (7, 7)
        accept(request)
        await published


async def test_what_comes_later_waits_until_all_that_another_topic_has_refused_is_placed_anew() -> None:
    """Also what has waited for room, and parts of a call some of which were stored before."""
    keys = [f"k{number}" for number in range(8)]
    cluster = ScriptedCluster(1, "orders", [0, 0])
    cluster.incarnation = 5
    async with cluster as (worker,), AsyncClient(worker.url) as client:

        def begin(name: str) -> asyncio.Task[Any]:
            some = [OutgoingMessage(key=key, uid=f"{name} {key}") for key in keys]
            return asyncio.create_task(client.publish_many("orders", some))

        first = begin("a")
        sent = {}
        for _ in range(2):
            request = await worker.expect(wire.Publish)
            sent[request.properties.partition] = request
        second = begin("b")  # waits for the answers to the first
        cluster.change([0, 0, 0], 6)
        await worker.expect(wire.Info)
        await until_told(worker)
        third = begin("c")
        await until_told(worker)
        accept(sent[0])  # it was in the log, and is gone with it
        await until_told(worker)
        assert not worker.seen(wire.Publish)
        sent[1].error("topic_replaced")
        got: dict[int, list[str]] = {0: [], 1: [], 2: []}
        stored = len(sent[0].body) // 3
        while sum(map(len, got.values())) < 3 * len(keys) - stored:
            request = await worker.expect(wire.Publish)
            assert request.properties.incarnation == 6
            found = got[request.properties.partition]
            accept(request, len(found) + 1)
            found += uids(request)
        for partition, names in got.items():
            assert [name[0] for name in names] == sorted(name[0] for name in names)
            assert {wire.partition_of(name[2:], 3) for name in names} <= {partition}
        for call in (first, second, third):
            assert [published.uid[2:] for published in await call] == keys


async def test_who_goes_while_it_is_placed_anew_takes_its_messages_along() -> None:
    cluster = ScriptedCluster(1, "orders", [0])
    cluster.incarnation = 5
    async with cluster as (worker,), AsyncClient(worker.url) as client:
        calls = [asyncio.create_task(client.publish("orders", key="k", uid=name)) for name in "abc"]
        request = await worker.expect(wire.Publish)
        late = asyncio.create_task(client.publish("orders", key="k", uid="d"))
        cluster.change([0, 0], 6)
        await until_told(worker)
        await until_told(worker)
        for gone in (calls[1], late):
            gone.cancel()
        await asyncio.wait([calls[1], late])
        request.error("topic_replaced")
        request = await worker.expect(wire.Publish)
        accept(request)
        assert uids(request) == ["a", "c"]
        assert [(await call).uid for call in (calls[0], calls[2])] == ["a", "c"]


async def test_what_is_strict_does_not_go_on_in_another_topic_of_that_name() -> None:
    """Who publishes by columns publishes all of it again, in order, and not the end before the beginning."""
    cluster = ScriptedCluster(1, "orders", [0])
    cluster.incarnation = 5
    async with cluster as (worker,), AsyncClient(worker.url) as client:
        columns = Columns(["", ""], [b"", b""])
        first = await client.publish_columns("orders", columns)
        request = await worker.expect(wire.Publish)
        cluster.change([0, 0], 6)
        request.error("topic_replaced")
        with pytest.raises(TopicReplaced):
            await first
        await until_told(worker)
        await until_told(worker)
        with pytest.raises(TopicReplaced):
            await (await client.publish_columns("orders", columns))
        assert not worker.seen(wire.Publish)


async def test_a_topic_that_is_deleted_fails_what_waits_for_it() -> None:
    cluster = ScriptedCluster(1, "orders", [0])
    async with cluster as (worker,), AsyncClient(worker.url) as client:
        published = asyncio.create_task(publish_to(client, 0, "u"))
        request = await worker.expect(wire.Publish)
        worker.maps_wait = True
        request.redirect("orders", 0, None)
        (await worker.expect_map()).error("topic_not_found", "no topic 'orders'")
        with pytest.raises(TopicNotFound):
            await published


async def test_a_map_that_nobody_uses_goes_with_its_topic_also_while_the_connection_is_away() -> None:
    async with ScriptedCluster(1, "orders", [0]) as (worker,), AsyncClient(worker.url) as client:
        known = await client._cluster.map("orders")
        worker.maps_wait = True
        worker.link.drop()
        (await worker.expect_map()).error("topic_not_found", "no topic 'orders'")
        await until(lambda: not client._cluster.maps)
        assert not known.known


async def test_a_map_is_told_of_changes_though_its_topic_was_not_there_when_it_was_asked_for_first() -> None:
    cluster = ScriptedCluster(1, "orders", [0])
    async with cluster as (worker,), AsyncClient(worker.url) as client:
        worker.maps_wait = True
        first = asyncio.create_task(client._cluster.map("orders"))
        asked = await worker.expect_map()
        second = asyncio.create_task(client._cluster.map("orders"))
        await asyncio.sleep(0)  # it waits for the answer, too, and wants to know what is so from now on
        asked.error("topic_not_found", "no topic 'orders'")
        asked = await worker.expect_map()
        asked.ok(worker._info("orders"))
        one, other = await first, await second
        assert one is other
        worker.maps_wait = False
        cluster.change([0, 0], 2)
        await until(lambda: len(one.owners) == 2)


async def test_connections_that_nobody_uses_are_found() -> None:
    cluster = ScriptedCluster(2, "orders", [0, 1])
    async with cluster as (home, other), AsyncClient(home.url) as client:
        published = asyncio.create_task(publish_to(client, 1, "u"))
        request = await other.expect(wire.Publish)
        pool, now = client._cluster._pool, asyncio.get_running_loop().time()
        peers = [pool.peer(worker.address) for worker in (home, other)]
        assert unused(peers, pool.home, now + 100) == [], "somebody waits for an answer"
        accept(request)
        await published
        assert unused(peers, pool.home, now) == []
        assert unused(peers, pool.home, now + 100) == [peers[1]]


# Consuming


@asynccontextmanager
async def consuming(cluster: ScriptedCluster, **options: Any) -> AsyncIterator[Consumer]:
    """A consumer; its workers are let go when it closes."""
    mode = options.pop("mode", "shared")
    async with AsyncClient(cluster.workers[0].url, timeout=PATIENCE) as client:
        consumer = client.subscribe("orders", "billing", mode=None, **options)
        opening = asyncio.create_task(consumer.__aenter__())
        first = cluster.owners[0]
        for number in dict.fromkeys([first, *cluster.owners]):
            await let_in(cluster.workers[number], mode=mode)
        await opening
        leaving = [asyncio.create_task(let_all_go(worker)) for worker in cluster.workers]
        try:
            yield consumer
        finally:
            await consumer.close()
            for task in leaving:
                task.cancel()
            await asyncio.wait(leaving)


async def let_in(worker: ScriptedWorker, held: int | None = None, mode: str = "shared") -> Request:
    request = await worker.expect(wire.Subscribe)
    request.ok(wire.SubscribeReply(mode, "at_least_once", 30_000, 4, held))
    return request


async def let_all_go(worker: ScriptedWorker) -> None:
    while True:
        await worker.expect_leaving()
        worker.left = getattr(worker, "left", 0) + 1  # type: ignore[attr-defined]


async def take(consumer: Consumer, count: int) -> list[Message]:
    return [await consumer.receive(timeout=PATIENCE) for _ in range(count)]


def ids(messages: list[Message]) -> list[str]:
    return sorted(f"{message.partition}-{message.id.partition('-')[2]}" for message in messages)


async def test_a_consumer_has_one_stream_at_each_worker_the_lowest_partition_first() -> None:
    async with ScriptedCluster(3, "orders", [2, 0, 1, 0]) as workers, AsyncClient(workers[0].url) as client:
        consumer = client.subscribe("orders", "billing", permits=100)
        opening = asyncio.create_task(consumer.__aenter__())
        first = await workers[2].expect(wire.Subscribe)
        assert (first.properties.partitions, first.properties.permits) == ([0], 25)
        await until_told(workers[0])
        assert [worker.seen(wire.Subscribe) for worker in workers] == [0, 0, 0]
        first.ok(wire.SubscribeReply("shared", "at_least_once", 30_000, 4))
        second, third = await let_in(workers[0]), await let_in(workers[1])
        assert (second.properties.partitions, second.properties.permits) == ([1, 3], 50)
        assert (third.properties.partitions, third.properties.permits) == ([2], 25)
        assert {item.properties.stream for item in (first, second, third)} == {1}
        await opening
        for partition, number in enumerate((2, 0, 1, 0)):
            workers[number].link.data(1, partition=partition)
        messages = await take(consumer, 4)
        assert ids(messages) == ["0-1", "1-1", "2-1", "3-1"]
        acking = asyncio.create_task(consumer.ack(messages))
        for number in (2, 0, 1, 0):
            (await workers[number].expect(wire.Ack)).ok()
        assert await acking == ["settled"] * 4
        closing = asyncio.create_task(consumer.close())
        for worker in workers:
            await worker.expect_leaving()
        await closing


async def test_who_is_not_let_in_at_the_first_worker_does_not_ask_the_others() -> None:
    async with ScriptedCluster(2, "orders", [1, 0]) as workers, AsyncClient(workers[0].url) as client:
        opening = asyncio.create_task(client.subscribe("orders", "billing", mode="exclusive").__aenter__())
        (await workers[1].expect(wire.Subscribe)).error("subscription_busy", "c1 has it")
        with pytest.raises(SubscriptionBusy):
            await opening
        await until_told(workers[0])
        assert workers[0].seen(wire.Subscribe) == 0


async def test_who_is_let_in_at_some_workers_only_leaves_them() -> None:
    async with ScriptedCluster(2, "orders", [0, 1]) as workers, AsyncClient(workers[0].url) as client:
        opening = asyncio.create_task(client.subscribe("orders", "billing").__aenter__())
        await let_in(workers[0])
        (await workers[1].expect(wire.Subscribe)).error("subscription_exists", "in another mode")
        with pytest.raises(Exception, match="in another mode"):
            await opening
        await workers[0].expect_leaving()


async def test_who_is_let_in_by_a_worker_while_it_leaves_the_others_leaves_that_one_too() -> None:
    async with ScriptedCluster(2, "orders", [0, 1]) as workers, AsyncClient(workers[0].url) as client:
        consumer = client.subscribe("orders", "billing")
        opening = asyncio.create_task(consumer.__aenter__())
        for worker in workers:
            await let_in(worker)
        await opening
        workers[1].link.drop()
        again = await workers[1].expect(wire.Subscribe)
        closing = asyncio.create_task(consumer.close())
        leaving = await workers[0].expect(wire.Unsubscribe)
        again.ok(wire.SubscribeReply("shared", "at_least_once", 30_000, 4))
        await until_told(workers[1])
        leaving.ok()
        await workers[1].expect_leaving()
        await closing


async def test_a_partition_that_moves_joins_the_stream_of_its_new_owner_and_what_is_held_stays_so() -> None:
    cluster = ScriptedCluster(2, "orders", [0, 0, 1])
    async with cluster as (old, new), consuming(cluster) as consumer:
        old.link.data(3, partition=0, token=5)
        old.link.data(2, partition=1, token=5)
        messages = await take(consumer, 5)
        kept = [message for message in messages if message.partition == 0]
        acking = asyncio.create_task(kept[0].ack())
        asked = await old.expect(wire.Ack)
        cluster.owners = [1, 0, 1]
        old.link.send(wire.Redirect("orders", 0, new.address, stream=1))
        asked.redirect("orders", 0, new)
        added = await let_in(new, held=2)
        assert (added.properties.partitions, added.properties.stream) == ([0], 1)
        assert len(new.links) == 1
        again = await new.expect(wire.Ack)
        assert (again.properties.partition, again.body) == (0, ["", 5, 1, 1])
        again.ok()
        await acking
        # The third has gone to another consumer; of the other partition everything is as it was.
        new.link.data([(1, ""), (2, "")], partition=0, token=5, held=True)
        new.link.data([(4, "")], partition=0, token=6)
        assert ids(await take(consumer, 1)) == ["0-4"]
        with pytest.raises(StaleReceipt):
            await kept[2].ack()
        rest = [message for message in messages if message.partition == 1]
        settling = asyncio.create_task(consumer.ack([kept[1], *rest]))
        (await new.expect(wire.Ack)).ok()
        (await old.expect(wire.Ack)).ok()
        assert await settling == ["settled"] * 3


async def test_data_of_a_partition_that_has_moved_is_not_taken_from_its_old_owner() -> None:
    cluster = ScriptedCluster(2, "orders", [0, 0])
    async with cluster as (old, new), consuming(cluster) as consumer:
        cluster.move(0, 1)
        await let_in(new)
        await until_told(new)
        old.link.data([(1, "")], partition=0, token=5)
        new.link.data([(1, "")], partition=0, token=5, held=True)
        old.link.data([(2, "")], partition=1, token=5)
        messages = await take(consumer, 2)
        assert ids(messages) == ["0-1", "1-2"]
        with pytest.raises(TimeoutError):
            await consumer.receive(timeout=0.05)


@pytest.mark.parametrize("before", [True, False], ids=["before it is let in", "after it"])
async def test_data_that_was_on_its_way_when_a_partition_came_back_is_handed_out_once(before: bool) -> None:
    """A worker that stood still has sent it before it was asked again, and lists it now."""
    cluster = ScriptedCluster(2, "orders", [0, 0])
    async with cluster as (old, new), consuming(cluster) as consumer:
        cluster.move(0, 1)
        await let_in(new)
        await until_told(new)
        cluster.owners = [0, 0]
        new.link.send(wire.Redirect("orders", 0, old.address, stream=1))
        asked = await old.expect(wire.Subscribe)
        if before:
            old.link.data(2, partition=0, token=5)
        asked.ok(wire.SubscribeReply("shared", "at_least_once", 30_000, 2, held=2))
        old.link.data(
            2, partition=0, token=5, held=before
        )  # what came before counts no more: the list has it
        messages = await take(consumer, 2)
        acking = asyncio.create_task(consumer.ack(messages))
        (await old.expect(wire.Ack)).ok()
        assert await acking == ["settled", "settled"]
        if not before:
            old.link.data(2, partition=0, token=5, held=True)
        old.link.data([(3, "")], partition=0, token=6)
        assert ids(await take(consumer, 1)) == ["0-3"]


async def test_what_comes_and_is_settled_while_another_worker_is_asked_is_handed_out_once() -> None:
    cluster = ScriptedCluster(2, "orders", [0, 0])
    async with cluster as (old, new), consuming(cluster) as consumer:
        cluster.move(0, 1)
        asked = await new.expect(wire.Subscribe)
        old.link.data(2, partition=0, token=5)
        messages = await take(consumer, 2)
        acking = asyncio.create_task(consumer.ack(messages))
        (await old.expect(wire.Ack)).ok()
        assert await acking == ["settled", "settled"]
        asked.ok(wire.SubscribeReply("shared", "at_least_once", 30_000, 2, held=2))
        new.link.data(2, partition=0, token=5, held=True)
        new.link.data([(3, "")], partition=0, token=6)
        assert ids(await take(consumer, 1)) == ["0-3"]


async def test_a_worker_without_partitions_is_left_and_may_come_back() -> None:
    cluster = ScriptedCluster(2, "orders", [0, 1])
    async with cluster as (first, second), AsyncClient(first.url) as client:
        consumer = client.subscribe("orders", "billing")
        opening = asyncio.create_task(consumer.__aenter__())
        await let_in(first)
        await let_in(second)
        await opening
        cluster.move(1, 0)
        second.link.send(wire.Redirect("orders", 1, first.address, stream=1))
        assert (await let_in(first)).properties.partitions == [1]
        await second.expect_leaving()
        cluster.move(0, 1)
        assert (await let_in(second)).properties.partitions == [0]
        second.link.data(1, partition=0)
        assert ids(await take(consumer, 1)) == ["0-1"]
        closing = asyncio.create_task(consumer.close())
        await first.expect_leaving()
        await second.expect_leaving()
        await closing


@pytest.mark.slow
async def test_a_settle_that_a_paused_worker_does_not_answer_goes_to_the_new_owner() -> None:
    cluster = ScriptedCluster(2, "orders", [0, 1])
    async with cluster as (paused, other), consuming(cluster) as consumer:
        paused.link.data(2, partition=0, token=5)
        messages = await take(consumer, 2)
        acking = asyncio.create_task(consumer.ack(messages))
        late = await paused.expect(wire.Ack)
        paused.silent = True
        cluster.move(0, 1)
        await let_in(other, held=2)
        other.link.data(2, partition=0, token=5, held=True)
        again = await other.expect(wire.Ack)
        late.ok(wire.SettleReply(stale=[0, 1, 2]))
        paused.silent = False
        await until_told(paused)
        again.ok()
        assert await acking == ["settled"] * 2
        assert not paused.link.closed.done()


async def test_what_the_old_worker_settles_while_the_new_one_lists_it_is_not_handed_out_again() -> None:
    cluster = ScriptedCluster(2, "orders", [0])
    async with cluster as (old, new), consuming(cluster) as consumer:
        old.link.data(1, partition=0, token=5)
        (message,) = await take(consumer, 1)
        acking = asyncio.create_task(message.ack())
        ack = await old.expect(wire.Ack)
        cluster.owners = [1]
        old.link.send(wire.Redirect("orders", 0, new.address, stream=1))
        subscribe = await new.expect(wire.Subscribe)
        ack.ok()
        await acking
        subscribe.ok(wire.SubscribeReply("shared", "at_least_once", 30_000, 1, held=1))
        new.link.data(1, partition=0, token=5, held=True)
        new.link.data([(2, "")], partition=0, token=6)
        assert ids(await take(consumer, 1)) == ["0-2"]


@pytest.mark.slow
async def test_a_consumer_notices_that_a_worker_says_nothing_without_asking_it_anything() -> None:
    cluster = ScriptedCluster(2, "orders", [0, 0], heartbeat_ms=1_000)
    async with cluster as (paused, other), consuming(cluster) as consumer:
        paused.silent = True
        cluster.owners = [1, 1]
        assert (await let_in(other)).properties.partitions == [0, 1]
        other.link.data(1, partition=1)
        assert ids(await take(consumer, 1)) == ["1-1"]


async def test_all_partitions_of_a_lost_worker_are_served_by_others() -> None:
    cluster = ScriptedCluster(3, "orders", [0, 1, 0, 2])
    async with cluster as (first, second, third), consuming(cluster) as consumer:
        first.link.data(1, partition=0, token=5)
        first.link.data(1, partition=2, token=5)
        messages = await take(consumer, 2)
        await first.stop()
        cluster.owners = [1, 1, 2, 2]
        assert (await let_in(second, held=1)).properties.partitions == [0]
        assert (await let_in(third, held=1)).properties.partitions == [2]
        second.link.data(1, partition=0, token=5, held=True)
        third.link.data(1, partition=2, token=5, held=True)
        acking = asyncio.create_task(consumer.ack(messages))
        (await second.expect(wire.Ack)).ok()
        (await third.expect(wire.Ack)).ok()
        assert await acking == ["settled"] * 2
        await first.listen()


async def test_an_end_of_the_stream_voids_only_what_that_worker_had() -> None:
    cluster = ScriptedCluster(2, "orders", [0, 1])
    async with cluster as (first, second), consuming(cluster) as consumer:
        first.link.data(1, partition=0)
        second.link.data(1, partition=1)
        messages = sorted(await take(consumer, 2), key=lambda message: message.partition)
        first.link.send(wire.Error("unavailable", "its session has ended", stream=1))
        await let_in(first)
        with pytest.raises(StaleReceipt):
            await messages[0].ack()
        acking = asyncio.create_task(messages[1].ack())
        (await second.expect(wire.Ack)).ok()
        await acking
        second.link.send(wire.Error("subscription_not_found", "'billing' was deleted", stream=1))
        with pytest.raises(SubscriptionNotFound):
            await consumer.receive(timeout=PATIENCE)


async def test_chosen_partitions_are_subscribed_where_they_are() -> None:
    cluster = ScriptedCluster(3, "orders", [0, 1, 2, 1])
    async with cluster as workers, AsyncClient(workers[0].url) as client:
        consumer = client.subscribe("orders", "billing", partitions=[3, 2])
        opening = asyncio.create_task(consumer.__aenter__())
        assert (await let_in(workers[2])).properties.partitions == [2]
        assert (await let_in(workers[1])).properties.partitions == [3]
        await opening
        closing = asyncio.create_task(consumer.close())
        await workers[2].expect_leaving()
        await workers[1].expect_leaving()
        await closing
        opening = asyncio.create_task(client.subscribe("orders", "billing", partitions=[9]).__aenter__())
        (await workers[0].expect(wire.Subscribe)).error("invalid_argument", "no partition 9")
        with pytest.raises(InvalidArgument, match="no partition 9"):
            await opening


async def test_a_redirect_while_it_opens_is_followed() -> None:
    cluster = ScriptedCluster(2, "orders", [0, 0])
    async with cluster as (old, new), AsyncClient(old.url) as client:
        consumer = client.subscribe("orders", "billing")
        opening = asyncio.create_task(consumer.__aenter__())
        request = await old.expect(wire.Subscribe)
        cluster.owners = [0, 1]
        request.redirect("orders", 1, new)
        assert (await let_in(old)).properties.partitions == [0]
        assert (await let_in(new)).properties.partitions == [1]
        await opening
        closing = asyncio.create_task(consumer.close())
        await old.expect_leaving()
        await new.expect_leaving()
        await closing


async def test_permits_follow_the_partitions_and_are_lowered_before_others_are_raised() -> None:
    cluster = ScriptedCluster(2, "orders", [0, 0, 0, 1])
    async with cluster as (first, second), consuming(cluster, permits=8):
        cluster.move(2, 1)
        added = await let_in(second)
        assert added.properties.partitions == [2]
        lowered = await first.expect(wire.Flow)
        assert lowered.properties.limit == 4
        await until_told(second)
        assert second.seen(wire.Flow) == 0
        lowered.ok()
        raised = await second.expect(wire.Flow)
        assert raised.properties.limit == 4
        raised.ok()


async def test_a_single_permit_goes_round_the_workers_that_want_it() -> None:
    cluster = ScriptedCluster(4, "orders", [0, 1, 2, 3])
    async with cluster as workers, consuming(cluster, permits=1) as consumer:
        for worker in workers[1:]:
            worker.link.send(wire.Flow(1, wanted=True))
        holder = 0
        served = []
        for turn in range(12):
            workers[holder].link.data([(turn + 1, "")], partition=holder, token=turn + 1)
            (message,) = await take(consumer, 1)
            served.append(message.partition)
            lowered = await workers[holder].expect(wire.Flow)
            assert lowered.properties.limit == 0
            acking = asyncio.create_task(message.ack())
            (await workers[holder].expect(wire.Ack)).ok()
            await acking
            assert sum(worker.seen(wire.Flow) for worker in workers) == 0, "it is still with the other"
            lowered.ok()
            workers[holder].link.send(wire.Flow(1, wanted=True))
            holder = (holder + 1) % 4
            raised = await workers[holder].expect(wire.Flow)
            assert raised.properties.limit == 1
            raised.ok()
        assert served == [0, 1, 2, 3] * 3


# Operating


async def test_an_operator_asks_any_worker_about_the_cluster_and_tells_it_what_to_do() -> None:
    async with ScriptedWorker() as worker, AsyncClient(worker.url) as client:
        asked = asyncio.create_task(client.cluster())
        report = wire.WorkerReport("w1", "a:1", "0.4", "serving", 1_000, 2_500, 7, 12.5, 250.0)
        (await worker.expect(wire.Cluster)).ok(wire.ClusterReply("w1", 3, [report]))
        said = await asked
        assert (said.controller, said.version) == ("w1", 3)
        (info,) = said.workers
        assert (info.id, info.address, info.release, info.state) == ("w1", "a:1", "0.4", "serving")
        assert (info.started_at.timestamp(), info.heartbeat_at.timestamp()) == (1.0, 2.5)
        assert (info.partitions, info.messages_per_second, info.script_time) == (7, 12.5, 0.25)

        listed = asyncio.create_task(client.partitions("orders"))
        request = await worker.expect(wire.Cluster)
        assert request.properties.topic == "orders"
        part = wire.PartitionReport(0, "w1", "", 4, 1_500, [wire.Ledger(4, 10, 2)], 1.0, 5.0)
        request.ok(wire.ClusterReply("w1", 3, []), [part])
        (partition,) = await listed
        assert (partition.partition, partition.worker, partition.holder) == (0, "w1", "")
        assert (partition.epoch, partition.lease, partition.script_time) == (4, 1.5, 0.005)
        assert [(item.ledger, item.first, item.remaining) for item in partition.ledgers] == [(4, 10, 2)]

        moving = asyncio.create_task(client.rebalance(dry_run=True))
        request = await worker.expect(wire.Rebalance)
        assert request.properties.dry_run
        request.ok(body=[wire.Move("orders", 1, "", "w1", "nobody has it")])
        (move,) = await moving
        assert (move.topic, move.partition, move.source, move.target) == ("orders", 1, "", "w1")
        assert move.reason == "nobody has it"

        telling = asyncio.create_task(client.move_partition("orders", 2, "w1"))
        request = await worker.expect(wire.MovePartition)
        assert request.properties == wire.MovePartition("orders", 2, "w1")
        request.ok()
        await telling
        for ask, draining in ((client.drain_worker, True), (client.undrain_worker, False)):
            telling = asyncio.create_task(ask("w1"))
            request = await worker.expect(wire.Drain)
            assert request.properties == wire.Drain("w1", draining)
            request.ok()
            await telling
