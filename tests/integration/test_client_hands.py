"""Pauses, caps and cancellation with a real broker: what nobody had in hands is not charged."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from keylane import AsyncClient, Client, Message, OutgoingMessage
from keylane.consume.sync_message import SyncMessage
from keylane.types import Mode
from tests.support.running import RunningBroker

PATIENCE = 60.0


@pytest.fixture
async def client(broker: RunningBroker) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(broker.url) as client:
        yield client


@pytest.fixture
def sync_client(broker: RunningBroker) -> Iterator[Client]:
    with Client(broker.url) as client:
        yield client


@pytest.mark.parametrize("mode", ["key_shared", "exclusive", "failover"])
async def test_no_handler_begins_after_a_pause(client: AsyncClient, topic: str, mode: Mode) -> None:
    await client.create_topic(topic, partitions=2)
    await client.create_subscription(topic, "s", mode=mode)
    await client.publish_many(topic, [OutgoingMessage(b"", key=f"k{n % 4}") for n in range(200)])
    begun: list[str] = []
    retried: list[str] = []
    some, gate = asyncio.Event(), asyncio.Event()

    async def handle(message: Message) -> None:
        begun.append(message.id)
        if message.retry_count:
            retried.append(message.id)
        if len(begun) == 5:
            some.set()
        await gate.wait() if len(begun) >= 5 else await asyncio.sleep(0)

    async with client.subscribe(topic, "s", mode=mode, handler=handle) as consumer:
        await asyncio.wait_for(some.wait(), PATIENCE)
        await consumer.pause()
        handled = len(begun)
        gate.set()
        for _ in range(20):  # time enough for what would go on
            await client.info()
        assert len(begun) == handled
        # What has gone back is there for others, and was never charged.
        await consumer.resume()
        async with asyncio.timeout(PATIENCE):
            while len(set(begun)) < 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert len(begun) == 200
    assert not retried


@pytest.mark.slow
def test_an_iterator_is_paused_from_another_thread(sync_client: Client, topic: str) -> None:
    sync_client.create_topic(topic)
    sync_client.create_subscription(topic, "s")
    handed: list[str] = []
    retried: list[str] = []

    def iterate() -> None:
        for message in consumer:
            handed.append(message.id)
            with message:
                retried.extend([message.id] * message.retry_count)

    with sync_client.subscribe(topic, "s") as consumer:
        thread = threading.Thread(target=iterate)
        thread.start()
        for _ in range(10):
            sync_client.publish_many(topic, [OutgoingMessage(b"") for _ in range(500)])
            consumer.pause()
            paused_at = len(handed)
            for _ in range(5):
                sync_client.info()
            # One may have been in the thread's hands, and not counted yet.
            assert len(handed) <= paused_at + 1
            consumer.resume()
        deadline = time.monotonic() + PATIENCE
        while len(set(handed)) < 5_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(set(handed)) == 5_000
    thread.join(PATIENCE)
    assert len(handed) == 5_000
    assert not retried


def test_a_pause_holds_what_is_on_its_way_to_the_thread_that_iterates(
    sync_client: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync_client.create_topic(topic)
    sync_client.create_subscription(topic, "s")
    sync_client.publish_many(topic, [OutgoingMessage(b"") for _ in range(50)])
    handed: list[int] = []
    pulled, go_on = threading.Event(), threading.Event()

    with sync_client.subscribe(topic, "s") as consumer:
        call = consumer._call

        def called(*args: Any) -> Any:
            answer = call(*args)
            if threading.current_thread() is thread and not pulled.is_set():
                pulled.set()
                assert go_on.wait(PATIENCE)
            return answer

        def iterate() -> None:
            for message in consumer:
                with message:
                    handed.append(message.retry_count)
                if len(handed) == 50:
                    break

        monkeypatch.setattr(consumer, "_call", called)
        thread = threading.Thread(target=iterate)
        thread.start()
        assert pulled.wait(PATIENCE)
        consumer.pause()
        go_on.set()
        for _ in range(20):
            sync_client.info()
        assert not handed
        consumer.resume()
        thread.join(PATIENCE)
        assert handed == [0] * 50


def test_batches_and_receive_are_paused_from_another_thread(sync_client: Client, topic: str) -> None:
    sync_client.create_topic(topic)
    sync_client.create_subscription(topic, "s")
    sync_client.publish_many(topic, [OutgoingMessage(b"") for _ in range(50)])
    with sync_client.subscribe(topic, "s") as consumer:
        first = consumer.receive(PATIENCE)
        for message in consumer:  # pulls the rest, and leaves it
            message.ack()
            break
        consumer.pause()
        with pytest.raises(TimeoutError):
            consumer.receive(0.1)
        first.ack()
        consumer.resume()
        seen: list[SyncMessage] = []
        for batch in consumer.batches(max_messages=7):
            seen += batch
            consumer.ack(batch)
            if len(seen) == 48:
                break
        assert len({message.id for message in seen}) == 48
        assert not any(message.retry_count for message in seen)


@pytest.mark.slow
def test_a_slow_loop_has_every_message_once_however_long_they_wait(sync_client: Client, topic: str) -> None:
    """All together take longer than leases are kept for one, and none of them does."""
    sync_client.create_topic(topic)
    sync_client.create_subscription(topic, "s")
    sync_client.publish_many(topic, [OutgoingMessage(b"") for _ in range(10)])
    deliveries = []
    with sync_client.subscribe(topic, "s", lease=4.0, auto_extend=4.0) as consumer:
        for message in consumer:
            with message:
                deliveries.append((message.id, message.retry_count))
                time.sleep(0.6)  # the work
            if len(deliveries) == 10:
                break
    assert sorted(deliveries) == sorted({(id, 0) for id, _ in deliveries})
    assert len(deliveries) == 10


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
async def test_to_be_cancelled_charges_no_retry(client: AsyncClient, topic: str, mode: Mode) -> None:
    await client.create_topic(topic)
    await client.create_subscription(topic, "s", mode=mode, backoff=60)
    await client.publish(topic, b"", key="k")
    async with client.subscribe(topic, "s", mode=mode) as consumer:
        inside = asyncio.Event()

        async def handle() -> None:
            async with await consumer.receive(PATIENCE):
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(handle())
        await asyncio.wait_for(inside.wait(), PATIENCE)
        task.cancel()
        await asyncio.wait({task})
        again = await consumer.receive(PATIENCE)
        assert again.retry_count == 0
        await again.ack()
