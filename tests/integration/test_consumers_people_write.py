"""What consumers that people write run into: closing amid work, lost leases, settings that differ."""

import asyncio
import logging
import threading
from typing import Any

import pytest

from keylane import (
    AsyncClient,
    Client,
    InvalidArgument,
    Message,
    OutgoingMessage,
    SubscriptionExists,
    SyncMessage,
    TopicExists,
)
from tests.support.running import RunningBroker

PATIENCE = 60.0


async def test_closing_waits_for_handlers_that_await_and_settles_what_they_did(
    broker: RunningBroker, topic: str
) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic)
        await client.create_subscription(topic, "s")
        await client.publish(topic, b"1")
        began, may_end, done = asyncio.Event(), asyncio.Event(), []

        async def handle(message: Message) -> None:
            began.set()
            await may_end.wait()
            done.append(message.id)

        consumer = client.subscribe(topic, "s", handler=handle)
        async with consumer:
            await asyncio.wait_for(began.wait(), PATIENCE)
            closing = asyncio.create_task(consumer.close())
            await asyncio.sleep(0)
            assert not closing.done()
            may_end.set()
            await closing
        assert len(done) == 1
        assert (await client.describe_subscription(topic, "s")).backlog == 0


def test_closing_waits_for_handlers_that_do_not_await(broker: RunningBroker, topic: str) -> None:
    with Client(broker.url) as client:
        client.create_topic(topic)
        client.create_subscription(topic, "s")
        client.publish(topic, b"1")
        began, may_end, done = threading.Event(), threading.Event(), []

        def handle(message: SyncMessage) -> None:
            began.set()
            may_end.wait(PATIENCE)
            done.append(message.id)

        with client.subscribe(topic, "s", handler=handle) as consumer:
            assert began.wait(PATIENCE)
            threading.Timer(0.05, may_end.set).start()
            consumer.close()
            assert len(done) == 1
        assert client.describe_subscription(topic, "s").backlog == 0


async def test_closing_waits_for_the_blocks_of_other_tasks(broker: RunningBroker, topic: str) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s")
        await client.publish_many(topic, [OutgoingMessage(b"1"), OutgoingMessage(b"2")])
        began, may_end, done = asyncio.Event(), asyncio.Event(), []

        async with client.subscribe(topic, "s") as consumer:

            async def work() -> None:
                async for message in consumer:
                    async with message:
                        began.set()
                        await may_end.wait()
                        done.append(message.id)

            working = asyncio.create_task(work())
            await asyncio.wait_for(began.wait(), PATIENCE)
            closing = asyncio.create_task(consumer.close(timeout=PATIENCE))
            await asyncio.sleep(0.05)
            assert not closing.done()
            may_end.set()
            await closing
            await asyncio.wait_for(working, PATIENCE)
        assert len(done) == 1, "no other is begun"
        left = await client.peek(topic, "s")
        assert [one.retry_count for one in left] == [0]


async def test_closing_waits_no_longer_for_a_block_than_it_was_told_to(
    broker: RunningBroker, topic: str
) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s")
        await client.publish(topic, b"1")
        consumer = client.subscribe(topic, "s")
        await consumer.__aenter__()
        message = await consumer.receive(PATIENCE)
        working = asyncio.create_task(_never_ends(message))
        await asyncio.sleep(0)
        await consumer.close(timeout=0.05)
        [left] = await client.peek(topic, "s")
        assert left.retry_count == 0
        assert left.consumer == ""
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def _never_ends(message: Message) -> None:
    async with message:
        await asyncio.Event().wait()


async def test_who_closes_in_a_block_is_not_waited_for(broker: RunningBroker, topic: str) -> None:
    """Nor are blocks around it, nor one that waits for a task which closes."""
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s")
        await client.publish_many(topic, [OutgoingMessage(b"1"), OutgoingMessage(b"2")])
        async with (
            client.subscribe(topic, "s") as consumer,
            await consumer.receive(PATIENCE),
            await consumer.receive(PATIENCE),
            asyncio.timeout(PATIENCE / 4),
        ):
            await asyncio.create_task(consumer.close(timeout=PATIENCE))


def test_closing_waits_for_the_blocks_of_other_threads(broker: RunningBroker, topic: str) -> None:
    with Client(broker.url) as client:
        client.create_topic(topic)
        client.create_subscription(topic, "s")
        client.publish(topic, b"1")
        began, may_end, done = threading.Event(), threading.Event(), []

        with client.subscribe(topic, "s") as consumer:

            def work() -> None:
                for message in consumer:
                    with message:
                        began.set()
                        may_end.wait(PATIENCE)
                        done.append(message.id)

            working = threading.Thread(target=work)
            working.start()
            assert began.wait(PATIENCE)
            threading.Timer(0.05, may_end.set).start()
            consumer.close(timeout=PATIENCE)
            assert len(done) == 1
            working.join(PATIENCE)
        assert client.describe_subscription(topic, "s").backlog == 0


def test_a_thread_that_closes_in_its_block_does_not_wait_for_itself(
    broker: RunningBroker, topic: str
) -> None:
    with Client(broker.url) as client:
        client.create_topic(topic)
        client.create_subscription(topic, "s")
        client.publish(topic, b"1")
        closed = threading.Event()
        with client.subscribe(topic, "s") as consumer:

            def work() -> None:
                with consumer.receive(PATIENCE):
                    consumer.close(timeout=PATIENCE)
                    closed.set()

            threading.Thread(target=work).start()
            assert closed.wait(PATIENCE / 4)


async def test_a_block_whose_lease_was_lost_is_logged_and_told(
    broker: RunningBroker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic)
        await client.create_subscription(topic, "s")
        published = await client.publish(topic, b"1")
        assert published.id is not None
        stale: list[str] = []
        with caplog.at_level(logging.WARNING, "keylane.client"):
            async with client.subscribe(
                topic, "s", on_stale=lambda message: stale.append(message.id)
            ) as consumer:
                message = await consumer.receive(timeout=PATIENCE)
                async with message:
                    await client.skip(topic, "s", published.id)  # whatever takes the lease away
        assert stale == [published.id]
        [line] = [record.getMessage() for record in caplog.records if "settled after" in record.getMessage()]
        assert "1 messages were settled after their leases had ended" in line
        assert line.endswith(published.id)


async def test_no_partitions_at_all_are_an_error(broker: RunningBroker, topic: str) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic)
        with pytest.raises(InvalidArgument, match="partitions is empty"):
            client.subscribe(topic, "s", partitions=[])


def test_a_client_goes_to_the_server_of_the_environment(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYLANE_SERVER", broker.url)
    with Client() as client:
        assert client.info().workers


async def test_what_exists_with_other_settings_says_which(broker: RunningBroker, topic: str) -> None:
    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=2)
        await client.create_topic(topic, partitions=2, exist_ok=True)
        with pytest.raises(TopicExists, match="exists with partitions 2, not 8, journal 0, not 5"):
            await client.create_topic(topic, partitions=8, journal=5, exist_ok=True)
        with pytest.raises(TopicExists, match=r"dedupe_window 600 s, not 5 s, retention none, not 0\.5 s"):
            await client.create_topic(topic, dedupe_window=5, retention=0.5, exist_ok=True)
        wanted: dict[str, Any] = {
            "ttl": 5,
            "backlog_quota": 3,
            "backlog_quota_bytes": 9,
            "spread": 2,
            "dedupe_window": 7,
        }
        for name, value in wanted.items():
            with pytest.raises(TopicExists, match=f"exists with {name}.*, not {value}"):
                await client.create_topic(topic, exist_ok=True, **{name: value})
            await client.change_topic(topic, **{name: value})
        await client.create_topic(topic, exist_ok=True, **wanted)
        await client.create_topic(topic, exist_ok=True)
        await client.create_subscription(topic, "s", lease=60)
        await client.create_subscription(topic, "s", exist_ok=True)
        with pytest.raises(SubscriptionExists, match="exists with lease 60 s, not 90 s"):
            await client.create_subscription(topic, "s", lease=90, exist_ok=True)
        with pytest.raises(SubscriptionExists, match="delivery at_least_once, not at_most_once"):
            await client.create_subscription(topic, "s", delivery="at_most_once", exist_ok=True)
        with pytest.raises(SubscriptionExists, match=f"exists with dead_letter {topic}.dead, not other"):
            await client.create_subscription(topic, "s", dead_letter="other", exist_ok=True)
        await client.create_subscription(topic, "s", dead_letter=f"{topic}.dead", exist_ok=True)
        async with client.subscribe(topic, "s", lease=5):
            pass  # that is about this consumer alone
