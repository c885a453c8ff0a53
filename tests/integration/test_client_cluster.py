"""A client of real workers that come, go, sleep and hand over: the application does not notice."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from keylane import AsyncClient, Consumer, Message
from keylane.types import Mode
from tests.support.running import RunningBroker

pytestmark = pytest.mark.slow  # leases take their time to end

SOON = 30.0  # seconds in which anything that is to happen has happened
PARTITIONS = 8
KEYS = 20


@pytest.fixture(scope="module")
def three() -> Iterator[RunningBroker]:
    """Three workers whose partitions are taken over quickly."""
    with RunningBroker(workers=3, partition_lease=4.0) as broker:
        yield broker


@pytest.fixture(autouse=True)
def all_run(three: RunningBroker) -> Iterator[None]:
    """What a test has stopped runs again for the next."""
    yield
    for number, worker in enumerate(three.workers):
        if worker.paused:
            three.resume(number)
        if worker.process is None:
            three.start_worker(number)


@pytest.fixture
async def client(three: RunningBroker) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(three.url) as client:
        yield client


class Load:
    """Messages with keys, published one after the other for each key, and what consumers got of them."""

    def __init__(self, client: AsyncClient, topic: str) -> None:
        self._client = client
        self._topic = topic
        self._over = False
        self._news = asyncio.Event()  # something was published or consumed
        self._published: list[str] = []
        self._got: list[tuple[str, str]] = []  # subscription, message

    @contextlib.asynccontextmanager
    async def running(self, subscriptions: list[str]) -> AsyncIterator[None]:
        """Publish all the while; at the end everything has been consumed, in the order of each key."""
        producers = [asyncio.create_task(self._produce(f"k{number}")) for number in range(KEYS)]
        try:
            await self.more(KEYS)
            yield
            await self.more(KEYS * 5)
        finally:
            self._over = True
            await asyncio.gather(*producers)
        for name in subscriptions:
            await self._until(
                lambda name=name: {text for where, text in self._got if where == name}.issuperset(  # type: ignore[misc]
                    self._published
                )
            )

    async def consume(self, consumer: Consumer) -> None:
        async for message in consumer:
            async with message:
                self._note(consumer, message)

    def _note(self, consumer: Consumer, message: Message) -> None:
        self._got.append((consumer.subscription, message.attributes["is"]))
        self._news.set()

    def first_deliveries(self, subscription: str) -> dict[str, list[int]]:
        """The numbers of each key in the order in which they came first."""
        seen: dict[str, list[int]] = {}
        for name, text in self._got:
            key, _, number = text.partition(" ")
            if name == subscription and int(number) not in seen.setdefault(key, []):
                seen[key].append(int(number))
        return seen

    def duplicates(self, subscription: str) -> int:
        counts = Counter(text for name, text in self._got if name == subscription)
        return sum(count - 1 for count in counts.values())

    async def _produce(self, key: str) -> None:
        number = 0
        while not self._over:
            text = f"{key} {number}"
            await self._client.publish(self._topic, key=key, attributes={"is": text})
            self._published.append(text)
            self._news.set()
            number += 1

    async def more(self, count: int) -> None:
        """Until so many more are published: whatever has happened, publishing goes on."""
        goal = len(self._published) + count
        await self._until(lambda: len(self._published) >= goal)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON):
            while not condition():
                self._news.clear()
                await self._news.wait()


MODES: list[Mode] = ["shared", "key_shared", "exclusive", "failover"]


@contextlib.asynccontextmanager
async def under_load(three: RunningBroker, client: AsyncClient, topic: str) -> AsyncIterator[Load]:
    """All modes at once, with a consumer each from a client of its own; checked at the end."""
    await client.create_topic(topic, partitions=PARTITIONS)
    load = Load(client, topic)
    async with contextlib.AsyncExitStack() as stack:
        consuming = []
        for mode in MODES:
            other = await stack.enter_async_context(AsyncClient(three.url))
            consumer = await stack.enter_async_context(other.subscribe(topic, mode, mode=mode, permits=50))
            consuming.append(asyncio.create_task(load.consume(consumer)))
        try:
            async with load.running(list(MODES)):
                yield load
        finally:
            for task in consuming:
                task.cancel()
            await asyncio.wait(consuming)
    for mode in MODES[1:]:
        for key, numbers in load.first_deliveries(mode).items():
            assert numbers == sorted(numbers), (mode, key)


async def test_a_rolling_restart_goes_unnoticed(
    three: RunningBroker, client: AsyncClient, topic: str
) -> None:
    async with under_load(three, client, topic) as load:
        for number in range(3):
            three.stop_worker(number)
            three.start_worker(number)
    assert [load.duplicates(mode) for mode in MODES] == [0, 0, 0, 0]


async def test_a_killed_worker_goes_unnoticed(three: RunningBroker, client: AsyncClient, topic: str) -> None:
    async with under_load(three, client, topic):
        three.kill_worker(1)


async def test_a_paused_worker_is_left_for_the_ones_that_take_over(
    three: RunningBroker, client: AsyncClient, topic: str
) -> None:
    async with under_load(three, client, topic) as load:
        three.pause(2)
        async with asyncio.timeout(SOON):
            while any(
                worker.id == three.ids[2] and worker.partitions for worker in (await client.cluster()).workers
            ):
                await load.more(1)
        await load.more(KEYS * 5)
        three.resume(2)


async def test_partitions_that_are_moved_by_hand_and_drained_go_unnoticed(
    three: RunningBroker, client: AsyncClient, topic: str
) -> None:
    async with under_load(three, client, topic) as load:
        for partition in range(PARTITIONS):
            await client.move_partition(topic, partition, three.ids[partition % 2])
        await load.more(KEYS * 2)
        await client.drain_worker(three.ids[0])
        await load.more(KEYS * 2)
        await client.undrain_worker(three.ids[0])
        await client.rebalance()
    assert [load.duplicates(mode) for mode in MODES] == [0, 0, 0, 0]


async def test_a_single_permit_serves_all_workers(
    three: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=PARTITIONS)
    async with client.subscribe(topic, "s", permits=1) as consumer:
        for number in range(40):
            await client.publish(topic, partition=number % PARTITIONS)
        for _ in range(40):
            message = await consumer.receive(timeout=SOON)
            with pytest.raises(TimeoutError):
                await consumer.receive(timeout=0)
            await message.ack()


async def test_a_topic_made_anew_with_another_number_of_partitions_is_published_to(
    client: AsyncClient, topic: str
) -> None:
    for partitions in (8, 2, 5):
        await client.create_topic(topic, partitions=partitions)
        await client.create_subscription(topic, "s")
        async with asyncio.timeout(SOON):
            found = {(await client.publish(topic, key=f"k{n}")).partition for n in range(60)}
        assert max(found) < partitions
        await client.delete_topic(topic)


async def test_the_cluster_tells_about_its_workers(
    three: RunningBroker, client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=PARTITIONS)
    report = await client.cluster()
    assert {worker.id for worker in report.workers} == set(three.ids)
    assert {worker.id for worker in (await client.info()).workers} == set(three.ids)
    partitions = await client.partitions(topic)
    assert [info.partition for info in partitions] == list(range(PARTITIONS))
