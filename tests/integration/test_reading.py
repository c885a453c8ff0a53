"""Reading by position with the real clients: logs, offsets, and a reader that says how far it is."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator

import pytest

from keylane import (
    AsyncClient,
    Client,
    ConsumerReplaced,
    InvalidArgument,
    InvalidName,
    OutgoingMessage,
    Page,
    SubscriptionNotFound,
    TopicNotFound,
)
from keylane.types import Mode
from keylane.wire import lines
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from tests.support.clock import bodies_are_gone
from tests.support.running import RunningBroker


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    """Two workers on one server, for the tests of this module that kill none."""
    with RunningBroker(workers=2) as broker:
        yield broker


@pytest.fixture
async def client(broker: RunningBroker) -> AsyncIterator[AsyncClient]:
    """A client that knows one worker only, as many users do."""
    async with AsyncClient(broker.urls[0]) as client:
        yield client


async def problems(url: str, topic: str) -> list[str]:
    """What the checker says of a topic."""
    engine = Engine.connect(url)
    try:
        return await check_topic(engine, topic)
    finally:
        await engine.close()


def some(count: int, partitions: int = 1) -> list[OutgoingMessage]:
    """Messages with bodies, in turn for each of some partitions."""
    return [OutgoingMessage(b"%d" % number, partition=number % partitions) for number in range(count)]


async def begin(client: AsyncClient, topic: str, count: int, partitions: int = 1) -> None:
    """A topic with messages, all owed to a subscription that reader r1 has claimed."""
    await client.create_topic(topic, partitions=partitions)
    await client.create_subscription(topic, "spark", mode="cursor", start="earliest")
    assert (await client.claim(topic, "spark", "r1")).granted
    await client.publish_many(topic, some(count, partitions))


async def read_all(client: AsyncClient, topic: str, partition: int, start: int, end: int) -> list[str]:
    """The uids of a range, page by page."""
    uids: list[str] = []
    while start < end:
        page = await client.read(topic, partition, start, end, limit=500)
        uids += page.flat[1::3]
        start = page.next
    return uids


async def test_what_is_committed_leaves_the_log_and_the_payload_store(
    broker: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await begin(client, topic, 10)
    [here] = await client.offsets(topic, "spark")
    assert (here.earliest, here.latest, here.position) == (1, 11, 1)
    page = await client.read(topic, 0, 1, 11)
    assert page == Page([1, 10], page.flat, page.ledgers, 11)
    assert re.fullmatch(r"\d+:1", page.ledgers)
    raw = await client.read_raw(topic, 0, 1, 11)
    assert lines.read(raw.answers) == (page.ranges, page.flat)
    assert (raw.ledgers, raw.next) == (page.ledgers, page.next)
    names = page.flat[1::3]
    assert await client.bodies(topic, names) == [b"%d" % number for number in range(10)]

    await client.commit(topic, "spark", "r1", {0: 5})
    await bodies_are_gone(broker.redis_url, topic)
    assert await client.bodies(topic, names) == [None] * 4 + [b"%d" % number for number in range(4, 10)]
    [here] = await client.offsets(topic, "spark")
    assert (here.earliest, here.latest, here.position) == (5, 11, 5)
    assert (await client.describe_subscription(topic, "spark")).backlog == 6
    assert [message.state for message in await client.peek(topic, "spark")] == ["fresh"] * 6
    await client.release(topic, "spark", "r1")
    assert await problems(broker.redis_url, topic) == []


async def test_a_body_stays_while_another_subscription_is_owed_its_message(
    broker: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "billing")
    await begin_again(client, topic)
    await client.publish_many(topic, some(3))
    names = (await client.read(topic, 0, 1, 4)).flat[1::3]
    async with AsyncClient(broker.url) as committer:
        await committer.commit(topic, "spark", "r1", {0: 4})
    assert await client.bodies(topic, names) == [b"0", b"1", b"2"]
    async with client.subscribe(topic, "billing") as consumer:
        async for message in consumer:
            async with message:
                last = await message.data()
            if last == b"2":
                break
    [here] = await client.offsets(topic, "spark")
    assert (here.earliest, here.position) == (4, 4)


async def begin_again(client: AsyncClient, topic: str) -> None:
    """Make and claim the subscription."""
    await client.create_subscription(topic, "spark", mode="cursor", start="earliest")
    assert (await client.claim(topic, "spark", "r1")).granted


async def test_of_two_readers_the_one_that_claimed_last_commits(client: AsyncClient, topic: str) -> None:
    await begin(client, topic, 4, partitions=2)
    await client.release(topic, "spark", "r1")
    assert (await client.claim(topic, "spark", "r1", session=60)).granted
    refused = await client.claim(topic, "spark", "r2")
    assert (refused.granted, refused.holder) == (False, "r1")
    assert 50 < refused.remaining <= 60
    assert (await client.describe_subscription(topic, "spark")).consumers == ["r1"]

    await client.release(topic, "spark", "r1")
    assert (await client.describe_subscription(topic, "spark")).consumers == []
    await client.commit(topic, "spark", "r1", {0: 2})  # nobody has taken it over yet
    assert (await client.claim(topic, "spark", "r2")).granted
    async with asyncio.timeout(client._cluster.timeout / 2):  # told at once, not after many attempts
        with pytest.raises(ConsumerReplaced, match="'r2'"):
            await client.commit(topic, "spark", "r1", {0: 3, 1: 3})
    assert [here.position for here in await client.offsets(topic, "spark")] == [2, 1]
    await client.commit(topic, "spark", "r2", {0: 3, 1: 3})


def test_the_sync_client_has_the_same_words(broker: RunningBroker, topic: str) -> None:
    with Client(broker.url) as client:
        client.create_topic(topic, partitions=1)
        client.create_subscription(topic, "spark", mode="cursor", start="earliest")
        client.publish_many(topic, some(3))
        assert client.claim(topic, "spark", "r1", session=5).granted
        page = client.read(topic, 0, 2, 4, limit=1)
        raw = client.read_raw(topic, 0, 2, 4, limit=1)
        assert (*lines.read(raw.answers), raw.next) == (page.ranges, page.flat, page.next)
        assert (page.ranges, page.next) == ([2, 2], 3)
        assert client.bodies(topic, page.flat[1::3]) == [b"1"]
        client.commit(topic, "spark", "r1", {0: 4})
        client.release(topic, "spark", "r1")
        [here] = client.offsets(topic)
        assert (here.earliest, here.latest, here.position) == (4, 4, None)


async def test_nobody_consumes_what_is_read_by_position(client: AsyncClient, topic: str) -> None:
    await begin(client, topic, 1)
    modes: list[Mode | None] = [None, "cursor"]
    for mode in modes:
        consumer = client.subscribe(topic, "spark", mode=mode)
        with pytest.raises(InvalidArgument, match="read by position"):
            await consumer.__aenter__()
    with pytest.raises(InvalidArgument, match="no deliveries to pause"):
        await client.pause_subscription(topic, "spark")
    await client.create_subscription(topic, "billing")
    with pytest.raises(InvalidArgument, match="only one of mode cursor"):
        await client.claim(topic, "billing", "r1")


async def test_what_cannot_be_is_refused_by_name(client: AsyncClient, topic: str) -> None:
    await begin(client, topic, 3, partitions=2)
    with pytest.raises(InvalidArgument, match="positions 3 to 9 of the log of partition 0"):
        await client.read(topic, 0, 3, 9)
    with pytest.raises(InvalidArgument, match="limit is 10001"):
        await client.read(topic, 0, 1, 2, limit=10_001)
    with pytest.raises(InvalidArgument, match="position 4 in partition 1"):
        await client.commit(topic, "spark", "r1", {1: 4})
    with pytest.raises(TopicNotFound, match="no partition 2 in topic"):
        await client.commit(topic, "spark", "r1", {2: 1})
    with pytest.raises(TopicNotFound, match="no partition 2 in topic"):
        await client.read(topic, 2, 1, 2)
    for step in (client.read("no-such", 0, 1, 2), client.offsets("no-such")):
        with pytest.raises(TopicNotFound, match="no-such"):
            await step
    with pytest.raises(SubscriptionNotFound, match="did you mean 'spark'"):
        await client.offsets(topic, "sparc")
    with pytest.raises(InvalidName, match="reader name"):
        await client.claim(topic, "spark", "a reader")


async def test_a_subscription_that_is_deleted_is_missed_by_its_reader(
    client: AsyncClient, topic: str
) -> None:
    await begin(client, topic, 3)
    await client.delete_subscription(topic, "spark")
    with pytest.raises(SubscriptionNotFound, match="'spark'"):
        await client.commit(topic, "spark", "r1", {0: 2})
    with pytest.raises(SubscriptionNotFound, match="'spark'"):
        await client.claim(topic, "spark", "r1")
    with pytest.raises(SubscriptionNotFound, match="'spark'"):
        await client.release(topic, "spark", "r1")


@pytest.mark.slow
async def test_a_commit_of_many_thousand_takes_as_many_frames_as_it_needs(
    broker: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=2)
    await begin_again(client, topic)
    published = await client.publish_many(topic, some(24_000, partitions=2))
    async with AsyncClient(broker.url) as committer:
        await committer.commit(topic, "spark", "r1", {0: 11_001, 1: 12_001})
    offsets = await client.offsets(topic, "spark")
    assert [(here.earliest, here.position) for here in offsets] == [(11_001, 11_001), (12_001, 12_001)]
    await bodies_are_gone(broker.redis_url, topic, partitions=2)
    bodies = await client.bodies(topic, [message.uid for message in published])
    assert [place for place, body in enumerate(bodies) if body is not None] == list(range(22_000, 24_000, 2))
    assert await problems(broker.redis_url, topic) == []


async def test_partitions_are_read_from_the_workers_that_serve_them(client: AsyncClient, topic: str) -> None:
    await begin(client, topic, 40, partitions=4)
    pages = await asyncio.gather(*(client.read(topic, number, 1, 11) for number in range(4)))
    assert [page.ranges for page in pages] == [[1, 10]] * 4
    serving = {report.holder for report in await client.partitions(topic)}
    open_connections = [peer for peer in client._cluster._pool._peers.values() if peer.current]
    assert len(open_connections) == len(serving) == 2


# When things break


@pytest.mark.slow
async def test_readers_do_not_notice_that_partitions_move_and_workers_die(topic: str) -> None:
    with RunningBroker(workers=3, partition_lease=2.0) as broker:
        async with AsyncClient(broker.url) as client:
            await begin(client, topic, 8_000, partitions=4)
            wanted = [await read_all(client, topic, number, 1, 2_001) for number in range(4)]
            assert sum(map(len, wanted)) == 8_000
            rounds: asyncio.Queue[None] = asyncio.Queue()

            async def read_on() -> None:
                while True:
                    for number in range(4):
                        assert await read_all(client, topic, number, 1, 2_001) == wanted[number]
                    rounds.put_nowait(None)

            async def two_more_rounds() -> None:
                while not rounds.empty():
                    rounds.get_nowait()
                async with asyncio.timeout(60):
                    await rounds.get()
                    await rounds.get()

            async with asyncio.TaskGroup() as group:
                reading = group.create_task(read_on())
                await two_more_rounds()
                for number, worker in enumerate(broker.ids):
                    await client.move_partition(topic, number, worker)
                await two_more_rounds()
                broker.kill_worker(0)
                await two_more_rounds()
                broker.pause(1)
                await two_more_rounds()
                broker.resume(1)
                broker.start_worker(0)
                await two_more_rounds()
                reading.cancel()


@pytest.mark.slow
async def test_a_commit_survives_the_death_of_the_worker_that_does_it(topic: str) -> None:
    with RunningBroker(workers=2, partition_lease=2.0) as broker:
        async with AsyncClient(broker.url) as client:
            await client.create_topic(topic, partitions=1)
            await begin_again(client, topic)
            await client.publish_many(topic, [OutgoingMessage(partition=0) for _ in range(60_000)])
            committing = asyncio.create_task(client.commit(topic, "spark", "r1", {0: 60_001}))
            async with AsyncClient(broker.urls[1]) as witness:
                home = client._cluster._pool.home
                assert home is not None
                number = next(at for at, url in enumerate(broker.urls) if url.endswith(home.address))
                while (await witness.offsets(topic, "spark"))[0].position == 1:
                    pass
                broker.kill_worker(number)
            await committing
            [here] = await client.offsets(topic, "spark")
            assert (here.earliest, here.position) == (60_001, 60_001)
        assert await problems(broker.redis_url, topic) == []


@pytest.mark.slow
async def test_on_a_cluster_of_three_nodes_all_partitions_are_read_and_drained(
    cluster_url: str, topic: str
) -> None:
    url = cluster_url.replace("redis://", "redis+cluster://")
    with RunningBroker(url, workers=2, name="reading") as broker:
        async with AsyncClient(broker.url) as client:
            await begin(client, topic, 1_200, partitions=12)
            for number in range(12):
                assert len(await read_all(client, topic, number, 1, 101)) == 100
            await client.commit(topic, "spark", "r1", dict.fromkeys(range(12), 51))
            offsets = await client.offsets(topic, "spark")
            assert [(here.earliest, here.latest, here.position) for here in offsets] == [(51, 101, 51)] * 12
            assert (await client.describe_subscription(topic, "spark")).consumers == ["r1"]
            await client.release(topic, "spark", "r1")
            assert await problems(url, topic) == []
            await client.delete_topic(topic)
