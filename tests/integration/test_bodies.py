"""A body lives exactly as long as its message: nothing is left of it afterwards, whoever crashed."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from keylane import AsyncClient, Consumer, OutgoingMessage
from keylane.connect.connection import Connection
from keylane.payloads.files import FileStore
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.snapshot import scan
from keylane_broker.inspect.topic_checker import check_leftovers
from tests.support.running import RunningBroker

DEADLINE = 150.0

pytestmark = pytest.mark.anyio


@dataclass
class Setting:
    """A broker, and where its clients have their bodies."""

    broker: RunningBroker
    folder: Path | None = None  # else in the broker's Redis
    own: bool = False  # the broker does not know of it

    def client(self) -> AsyncClient:
        """A client that uses the store."""
        payloads = f"file://{self.folder}" if self.own else None
        return AsyncClient(self.broker.url, payloads=payloads)

    async def names(self, topic: str) -> int:
        """How many bodies there are."""
        if self.folder is not None:
            return sum(len(files) for _, _, files in os.walk(self.folder / topic))
        async with Redis.from_url(self.broker.redis_url) as redis:
            keys = [key async for key in redis.scan_iter(match=f"kl:bodies:{topic}:*", count=1_000)]
            return sum([await redis.hlen(key) for key in keys])

    async def has(self, topic: str, count: int) -> None:
        """Wait until there are just so many bodies."""
        found = -1
        try:
            async with asyncio.timeout(DEADLINE):
                while (found := await self.names(topic)) != count:  # noqa: ASYNC110 - no store tells
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{found} bodies are in the store, not {count}") from None


@pytest.fixture(scope="module", params=["redis", "files", "own files"])
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """A broker with each kind of store."""
    folder = tmp_path_factory.mktemp("bodies")
    advertised: dict[str, Any] = {"payloads": f"file://{folder}"} if request.param == "files" else {}
    with RunningBroker(**advertised) as broker:
        yield Setting(broker, None if request.param == "redis" else folder, request.param == "own files")


async def publish(client: AsyncClient, topic: str, count: int) -> None:
    """Messages with a body each."""
    await client.publish_many(topic, [OutgoingMessage(f"body {number}") for number in range(count)])


async def take(consumer: Consumer, count: int) -> None:
    """Read and ack so many messages."""
    async with asyncio.timeout(DEADLINE):
        async for message in consumer:
            assert (await message.data()).startswith(b"body ")
            await message.ack()
            count -= 1
            if not count:
                return


async def test_bodies_go_with_the_last_subscription_that_was_owed_their_messages(
    setting: Setting, topic: str
) -> None:
    async with setting.client() as client:
        await client.create_topic(topic, partitions=2)
        for name in ("a", "b"):
            await client.create_subscription(topic, name)
        await publish(client, topic, 10)
        async with client.subscribe(topic, "a") as consumer:
            await take(consumer, 10)
        assert await setting.names(topic) == 10
        async with client.subscribe(topic, "b") as consumer:
            await take(consumer, 6)
            await setting.has(topic, 4)
            await take(consumer, 4)
    await setting.has(topic, 0)


async def test_a_body_goes_though_nobody_heard_that_its_message_was_acked(
    setting: Setting, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks behind the ack; when it is sent again, it is stale."""
    async with setting.client() as client, setting.client() as other:
        await client.create_topic(topic, partitions=1)
        async with client.subscribe(topic, "s") as consumer, other.subscribe(topic, "s", permits=1):
            await publish(client, topic, 2)
            message = await consumer.receive(timeout=DEADLINE)
            monkeypatch.setattr(Connection, "data_received", lambda self, data: None)
            acking = asyncio.ensure_future(message.ack())
            async with Redis.from_url(setting.broker.redis_url) as redis:
                async with asyncio.timeout(DEADLINE):
                    while await redis.xlen(f"kl:{{{topic}:0}}:log") == 2:  # noqa: ASYNC110 - Redis does not tell
                        await asyncio.sleep(0.01)
            monkeypatch.undo()
            for connection in open_connections(client):
                connection._transport.abort()
            await asyncio.gather(acking, return_exceptions=True)  # stale, or settled when it was heard
        await setting.has(topic, 1)


async def test_a_publish_whose_answer_was_lost_is_one_message_though_the_topic_remembers_no_uids(
    setting: Setting, topic: str
) -> None:
    """Stored twice, both would have the same body, which goes with the first of them."""
    async with setting.client() as client:
        await client.create_topic(topic, partitions=1, dedupe_window=0)
        async with client.subscribe(topic, "s") as consumer:
            await publish(client, topic, 1)
            await take(consumer, 1)
            for connection in open_connections(client):
                connection._transport.pause_reading()
            publishing = asyncio.ensure_future(client.publish(topic, b"body 1"))
            async with Redis.from_url(setting.broker.redis_url) as redis:
                async with asyncio.timeout(DEADLINE):
                    while not await redis.xlen(f"kl:{{{topic}:0}}:log"):  # noqa: ASYNC110 - Redis does not tell
                        await asyncio.sleep(0.01)
            for connection in open_connections(client):
                connection._transport.abort()
            assert (await publishing).duplicate, "it was sent again"
            await take(consumer, 1)
            assert (await client.describe_subscription(topic, "s")).backlog == 0
    await setting.has(topic, 0)


def open_connections(client: AsyncClient) -> list[Connection]:
    """The connections of a client."""
    return [peer.current for peer in client._cluster._pool._peers.values() if peer.current is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    "leave",
    [
        lambda client, topic: client.delete_subscription(topic, "s"),
        lambda client, topic: client.seek(topic, "s", "latest"),
        lambda client, topic: client.delete_topic(topic),
    ],
    ids=["delete the subscription", "seek past", "delete the topic"],
)
async def test_bodies_go_with_messages_that_nobody_will_ever_read(
    setting: Setting, topic: str, leave: Callable[..., asyncio.Future[None]]
) -> None:
    async with setting.client() as client:
        await client.create_topic(topic, partitions=3)
        await client.create_subscription(topic, "s")
        await publish(client, topic, 2_000)
        await client.publish(topic, b"body for later", delay=3_600)
        assert await setting.names(topic) == 2_001
        await leave(client, topic)
        await setting.has(topic, 1 if topic in await client.topics() else 0)


async def test_the_body_of_a_delayed_message_goes_that_nobody_was_owed_when_it_was_due(
    setting: Setting, topic: str
) -> None:
    async with setting.client() as client:
        await client.create_topic(topic, partitions=1)
        await client.publish(topic, b"body for later", delay=0.1)
        await setting.has(topic, 0)


@pytest.mark.slow
async def test_bodies_go_when_a_reader_commits(setting: Setting, topic: str) -> None:
    async with setting.client() as client:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "spark", mode="cursor")
        await publish(client, topic, 1_500)
        assert (await client.claim(topic, "spark", "r1")).granted
        await client.commit(topic, "spark", "r1", {0: 1_200})
        await setting.has(topic, 301)


@pytest.mark.slow
async def test_what_a_worker_has_not_done_its_successor_does(setting: Setting, topic: str) -> None:
    """Records are there that nobody has worked off: the partition's next owner finds them."""
    async with setting.client() as client:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s")
        await publish(client, topic, 3)
        async with Redis.from_url(setting.broker.redis_url, decode_responses=True) as redis:
            entries: Any = await redis.xrange(f"kl:{{{topic}:0}}:log")
            own = "1" if setting.own else ""
            for id, fields in entries[:2]:
                name = f'[{id.partition("-")[2]},"{fields["uid"]}"]'
                await redis.xadd(f"kl:{{{topic}:0}}:bodies", {"left": "1-2", "names": name, "own": own})
        setting.broker.kill_worker()
        setting.broker.start_worker()
        async with client.subscribe(topic, "s"):
            await setting.has(topic, 1)


async def test_what_nobody_could_delete_when_its_topic_went_goes_when_somebody_can(
    setting: Setting, topic: str
) -> None:
    async with setting.client() as client:
        await client.create_topic(topic, partitions=2)
        await client.create_subscription(topic, "s")
        await publish(client, topic, 20)
        await client.publish(topic, b"body for later", delay=3_600)
    stranger = AsyncClient(setting.broker.url, payloads=None if setting.own else "memory://elsewhere")
    async with stranger:
        await stranger.delete_topic(topic)
        assert topic not in await stranger.topics()
        if setting.folder is not None:
            assert await setting.names(topic) == 21
        engine = Engine.connect(setting.broker.redis_url)
        try:
            assert await check_leftovers(engine, await scan(engine.store, topic)) == []
        finally:
            await engine.close()
    async with setting.client() as client:
        await client.topics()
        await setting.has(topic, 0)


# However long a message is owed


@pytest.fixture
def short(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    """The same with a lifetime that tests can wait for: for files it is the clock that runs ahead."""
    if setting.folder is not None:
        month, tend = 30 * 86_400, FileStore.tend
        monkeypatch.setattr("keylane.payloads.files._now", lambda: time.time() + month)
        monkeypatch.setattr(
            FileStore, "tend", lambda self, topic, owed, now: tend(self, topic, owed, now + month)
        )
        yield setting
        return
    with RunningBroker(payload_lifetime=1.0) as broker:
        yield Setting(broker)


@pytest.mark.slow
async def test_a_body_lives_as_long_as_its_message_is_owed_and_an_orphan_does_not(
    short: Setting, topic: str
) -> None:
    """Several lifetimes, in the log and before the message is due; what no log knows goes."""
    async with short.client() as client:
        await client.create_topic(topic, partitions=2)
        await client.create_subscription(topic, "s")
        await publish(client, topic, 10)
        await client._bodies.finish()  # by this clock a body that is being published seems to be old
        await client.publish(topic, b"body for later", key="k", delay=4.0)
        for count in range(3):
            async with short.client() as other:  # a client looks after files when it begins to use a topic
                await other._bodies.put(topic, [(f"0ujtsYcgvSTl8PAuAdqWYSMnL{count:02}", b"never published")])
                await short.has(topic, 11)
        async with client.subscribe(topic, "s") as consumer:
            await take(consumer, 11)
    await short.has(topic, 0)
