"""The callback consumer and the client without await, with a real broker."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from keylane import (
    AsyncClient,
    BrokerError,
    Client,
    ConnectionClosed,
    ConnectionFailed,
    InvalidArgument,
    Message,
    OutgoingMessage,
    StaleReceipt,
    SubscriptionNotFound,
    SyncMessage,
    TopicNotFound,
)
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


async def until_settled(client: AsyncClient, topic: str, subscription: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await client.describe_subscription(topic, subscription)).backlog:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_handler_keeps_the_order_of_keys_while_keys_run_side_by_side(
    client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic, partitions=2)
    await client.create_subscription(topic, "s", mode="key_shared")
    await client.publish_many(topic, [OutgoingMessage(str(n), key=f"k{n % 5}") for n in range(500)])
    seen: dict[str, list[int]] = defaultdict(list)
    running: set[str] = set()
    together = 0

    async def handle(message: Message) -> None:
        nonlocal together
        key = message.key or ""
        assert key not in running
        running.add(key)
        together = max(together, len(running))
        seen[key].append(int(await message.data()))
        await asyncio.sleep(0)
        running.remove(key)

    async with client.subscribe(topic, "s", mode="key_shared", handler=handle, concurrency=4):
        await until_settled(client, topic, "s")
    assert seen == {f"k{k}": list(range(k, 500, 5)) for k in range(5)}
    assert 1 < together <= 4


@pytest.mark.slow
async def test_a_handler_that_raises_gets_its_lane_again_from_there(
    client: AsyncClient, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    await client.create_topic(topic, partitions=1)
    await client.create_subscription(topic, "s", mode="key_shared")
    published = await client.publish_many(topic, [OutgoingMessage(str(n), key="k") for n in range(10)])
    seen: list[tuple[int, int]] = []

    async def handle(message: Message) -> None:
        seen.append((int(await message.data()), message.retry_count))
        if seen[-1] == (4, 0):
            raise ValueError("not yet")

    with caplog.at_level(logging.ERROR, "keylane.client"):
        async with client.subscribe(topic, "s", mode="key_shared", handler=handle):
            await until_settled(client, topic, "s")
    assert seen == [(n, 0) for n in range(5)] + [(4, 1)] + [(n, 0) for n in range(5, 10)]
    assert f"the handler failed for message {published[4].id}" in caplog.text
    assert "not yet" in caplog.text


async def test_handlers_without_order_run_concurrently_up_to_the_limit(
    client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic)
    await client.create_subscription(topic, "s")
    await client.publish_many(topic, [OutgoingMessage(key="same") for _ in range(20)])
    running = 0
    full = asyncio.Event()

    async def handle(message: Message) -> None:
        nonlocal running
        running += 1
        assert running <= 7
        if running == 7:
            full.set()
        await full.wait()
        running -= 1

    async with client.subscribe(topic, "s", handler=handle, concurrency=7):
        await asyncio.wait_for(full.wait(), PATIENCE)
        await until_settled(client, topic, "s")


async def test_a_handler_without_await_runs_in_threads(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    await client.create_subscription(topic, "s")
    await client.publish_many(topic, [OutgoingMessage(str(n)) for n in range(20)])
    seen: set[bytes] = set()
    threads: set[int] = set()

    def handle(message: SyncMessage) -> None:
        seen.add(message.data())
        threads.add(threading.get_ident())
        message.extend(20)

    async with client.subscribe(topic, "s", handler=handle, concurrency=3):
        await until_settled(client, topic, "s")
    assert seen == {b"%d" % n for n in range(20)}
    assert threading.get_ident() not in threads


async def test_closing_cancels_handlers_and_their_messages_go_back(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    await client.create_subscription(topic, "s", lease=3600)
    await client.publish(topic, b"1")
    began = asyncio.Event()

    async def handle(message: Message) -> None:
        began.set()
        await asyncio.Event().wait()

    async with client.subscribe(topic, "s", handler=handle) as handling:
        await asyncio.wait_for(began.wait(), PATIENCE)
        await handling.close(timeout=0)
    async with client.subscribe(topic, "s") as consumer:
        message = await consumer.receive(timeout=PATIENCE)
        assert message.retry_count == 0
        await message.ack()


async def test_closing_waits_for_handlers_in_threads_and_settles_their_messages(
    client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic)
    await client.create_subscription(topic, "s", lease=3600)
    await client.publish(topic, b"1")
    began, go_on = threading.Event(), threading.Event()

    def handle(message: SyncMessage) -> None:
        began.set()
        assert go_on.wait(PATIENCE)

    consumer = client.subscribe(topic, "s", handler=handle)
    async with consumer:
        assert await asyncio.to_thread(began.wait, PATIENCE)
        closing = asyncio.ensure_future(consumer.close())
        await asyncio.sleep(0)
        assert not closing.done()
        go_on.set()
        await closing
    assert (await client.describe_subscription(topic, "s")).backlog == 0


async def test_a_handler_may_close_its_consumer(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic)
    await client.create_subscription(topic, "s")
    await client.publish(topic, b"stop")

    async def handle(message: Message) -> None:
        await message.ack()
        await consumer.close()

    async with client.subscribe(topic, "s", handler=handle) as consumer:
        await asyncio.wait_for(consumer.wait(), PATIENCE)
    assert (await client.describe_subscription(topic, "s")).backlog == 0


@pytest.mark.slow
async def test_a_handler_that_does_not_end_well_gets_its_message_again(
    client: AsyncClient, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "keylane.client")
    await client.create_topic(topic)
    await client.create_subscription(topic, "s", mode="key_shared")
    await client.publish(topic, b"x", key="k")
    again = asyncio.Event()

    async def cancelled(message: Message) -> None:
        if message.retry_count:
            again.set()
        raise asyncio.CancelledError

    def exits(message: SyncMessage) -> None:
        loop.call_soon_threadsafe(again.set)
        sys.exit("enough")

    def not_awaited(message: SyncMessage) -> Any:
        if message.retry_count > before:
            loop.call_soon_threadsafe(again.set)
        return cancelled(message)  # type: ignore[arg-type]

    loop = asyncio.get_running_loop()
    for handler in (cancelled, exits, not_awaited):
        before = (await client.peek(topic, "s"))[0].retry_count
        again.clear()
        async with client.subscribe(topic, "s", mode="key_shared", handler=handler):
            await asyncio.wait_for(again.wait(), PATIENCE)
        assert (await client.describe_subscription(topic, "s")).backlog == 1


async def test_whoever_waits_for_a_callback_consumer_hears_why_it_ended(
    client: AsyncClient, topic: str
) -> None:
    await client.create_topic(topic)

    async def handle(message: Message) -> None:
        raise AssertionError("there is no message")

    async with client.subscribe(topic, "s", handler=handle) as consumer:
        waiting = asyncio.ensure_future(consumer.wait())
        await client.delete_subscription(topic, "s")
        with pytest.raises(SubscriptionNotFound):
            await asyncio.wait_for(waiting, PATIENCE)
    async with client.subscribe(topic, "other", handler=handle) as consumer:
        waiting = asyncio.ensure_future(consumer.wait())
        await asyncio.sleep(0)
        await consumer.close()
        await asyncio.wait_for(waiting, PATIENCE)
    with pytest.raises(InvalidArgument, match="concurrency"):
        client.subscribe(topic, "s", handler=handle, concurrency=0)


# Without await


def test_the_same_words_without_await(sync_client: Client, topic: str) -> None:
    client = sync_client
    client.create_topic(topic, partitions=2)
    client.create_subscription(topic, "s", mode="key_shared")
    first = client.publish(topic, b"first", key="a")
    published = client.publish_many(topic, (OutgoingMessage(str(n), key="b") for n in range(250)))
    assert topic in client.topics()
    assert client.describe_topic(topic).published == 251
    assert len(client.peek(topic, "s", limit=3)) == 3
    with client.subscribe(topic, "s", mode="key_shared") as consumer:
        assert consumer.mode == "key_shared"
        seen = {}
        for message in consumer:
            with message:
                seen[message.id] = message.data()
                assert message.topic == topic
            if len(seen) == 251:
                break
        with pytest.raises(TimeoutError):
            consumer.receive(timeout=0.05)
    assert seen == {first.id: b"first"} | {answer.id: b"%d" % n for n, answer in enumerate(published)}
    assert client.describe_subscription(topic, "s").backlog == 0
    client.seek(topic, "s", "earliest")
    client.delete_subscription(topic, "s")
    client.delete_topic(topic)
    with pytest.raises(BrokerError):
        client.publish(topic, b"x")


def test_settling_without_await(sync_client: Client, topic: str) -> None:
    client = sync_client
    client.create_topic(topic, partitions=1)
    client.create_subscription(topic, "s", backoff=0.01)
    client.publish_many(topic, [OutgoingMessage(str(n)) for n in range(10)])
    with client.subscribe(topic, "s") as consumer:
        (first, *rest) = next(consumer.batches(max_messages=10, max_wait=PATIENCE))
        first.extend(60)
        first.nack(delay=0)
        with pytest.raises(StaleReceipt):
            first.ack()
        again = consumer.receive(timeout=PATIENCE)
        assert (again.id, again.retry_count, again == first) == (first.id, 1, False)
        with pytest.raises(ValueError, match="no good"), again:
            raise ValueError("no good")
        again = consumer.receive(timeout=PATIENCE)
        again.ack()
        assert consumer.extend(rest[:1], 60) == ["settled"]
        assert consumer.nack(rest[:1], delay=0) == ["settled"]
        assert consumer.ack([first, *rest[1:]]) == ["stale"] + ["settled"] * 8
        consumer.receive(timeout=PATIENCE).ack()
    assert client.describe_subscription(topic, "s").backlog == 0


def test_pause_without_await_gives_back_what_the_loop_has_not_reached(
    sync_client: Client, topic: str
) -> None:
    client = sync_client
    client.create_topic(topic, partitions=1)
    client.create_subscription(topic, "s")
    client.publish_many(topic, [OutgoingMessage()] * 50)
    with client.subscribe(topic, "s") as consumer:
        message = next(iter(consumer))
        consumer.pause()
        assert client.describe_subscription(topic, "s").leased == 1
        message.ack()
        consumer.resume()
        assert consumer.receive(timeout=PATIENCE).retry_count == 0


def test_a_handler_of_the_client_without_await(sync_client: Client, topic: str) -> None:
    client = sync_client
    client.create_topic(topic)
    client.create_subscription(topic, "s")
    client.publish_many(topic, [OutgoingMessage(str(n)) for n in range(30)])
    done = threading.Event()
    seen: set[bytes] = set()

    def handle(message: SyncMessage) -> None:
        seen.add(message.data())
        if len(seen) == 30:
            done.set()

    with client.subscribe(topic, "s", handler=handle):
        assert done.wait(PATIENCE)
    assert client.describe_subscription(topic, "s").backlog == 0


def test_fan_out_and_info_without_await(sync_client: Client, topic: str) -> None:
    for name in (topic, topic + "-2"):
        sync_client.create_topic(name)
        sync_client.create_subscription(name, "s")
    assert list(sync_client.fan_out([topic, topic + "-2"], b"x")) == [topic, topic + "-2"]
    sync_client.pause_subscription(topic, "s")
    assert sync_client.describe_subscription(topic, "s").paused
    sync_client.resume_subscription(topic, "s")
    assert sync_client.info().worker


@pytest.mark.slow
def test_no_broker_without_await_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(ConnectionFailed, match="keylane serve"), Client("keylane://127.0.0.1:1"):
        pass
    assert threading.active_count() == before


def test_control_c_ends_a_loop_that_waits(broker: RunningBroker, sync_client: Client, topic: str) -> None:
    sync_client.create_topic(topic)
    script = (
        "import signal, sys\nfrom keylane import Client\n"
        # Whoever runs the tests in the background of a shell has it ignored, and so would this program.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with Client(sys.argv[1]) as client, client.subscribe(sys.argv[2], 's', name='c') as consumer:\n"
        "    for message in consumer: pass\n"
    )
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", script, broker.url, topic], cwd=root, stderr=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                if sync_client.describe_subscription(topic, "s").consumers == ["c"]:
                    break
            except SubscriptionNotFound:
                pass
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert process.returncode != 0
        assert sync_client.describe_subscription(topic, "s").consumers == []
    finally:
        process.kill()
        process.wait()


def test_a_handler_without_await_may_close_its_consumer(sync_client: Client, topic: str) -> None:
    sync_client.create_topic(topic)
    sync_client.create_subscription(topic, "s")
    sync_client.publish(topic, b"stop")

    def handle(message: SyncMessage) -> None:
        message.ack()
        consumer.close()

    with sync_client.subscribe(topic, "s", handler=handle) as consumer:
        consumer.wait()
    assert sync_client.describe_subscription(topic, "s").backlog == 0


def test_what_is_not_open_or_was_closed_says_so(broker: RunningBroker, topic: str) -> None:
    stale: list[Message] = []
    client = Client(broker.url)
    with pytest.raises(InvalidArgument, match="not open"):
        client.topics()
    with client:
        client.create_topic(topic)
        client.create_subscription(topic, "s")
        client.publish(topic, b"x")
        with pytest.raises(InvalidArgument, match="permits"):
            client.subscribe(topic, "s", permits=0)
        with pytest.raises(InvalidArgument, match="the consumer is not open"):
            next(iter(client.subscribe(topic, "s")))
        with client.subscribe(topic, "s", on_stale=stale.append) as consumer:
            message = consumer.receive(PATIENCE)
        client.close()
        with pytest.raises(ConnectionClosed, match="was closed"):
            client.topics()
        with pytest.raises(ConnectionClosed, match="was closed"):
            message.ack()
        with message:
            pass
        assert [item.id for item in stale] == [message.id]


def test_a_fork_of_a_client_says_so_instead_of_waiting_for_ever(broker: RunningBroker) -> None:
    script = (
        "import os, sys\nfrom keylane import Client, ConnectionClosed\n"
        "with Client(sys.argv[1]) as client:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        try: client.topics()\n"
        "        except ConnectionClosed as error: print(error, flush=True)\n"
        "        os._exit(0)  # as multiprocessing does\n"
        "    os.waitpid(child, 0)\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, broker.url],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert "create another" in done.stdout


def test_threads_share_a_consumer(sync_client: Client, topic: str) -> None:
    sync_client.create_topic(topic)
    sync_client.create_subscription(topic, "s")
    sync_client.publish_many(topic, [OutgoingMessage() for _ in range(1_000)])
    seen: list[str] = []

    def work() -> None:
        for message in consumer:
            with message:
                seen.append(message.id)
                if len(seen) == 1_000:
                    done.set()

    done = threading.Event()
    with sync_client.subscribe(topic, "s") as consumer:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert done.wait(PATIENCE)
        consumer.close()
        for thread in threads:
            thread.join(PATIENCE)
    assert len(set(seen)) == 1_000


def test_a_handler_without_await_begins_with_the_call(sync_client: Client, topic: str) -> None:
    """It needs no `with`, and may have one: then it begins but once."""
    client = sync_client
    client.create_topic(topic, partitions=1)
    client.create_subscription(topic, "s")
    seen, came = [], threading.Semaphore(0)

    def handle(message: SyncMessage) -> None:
        seen.append(message.data())
        came.release()

    consumer = client.subscribe(topic, "s", handler=handle)
    client.publish(topic, b"1")
    assert came.acquire(timeout=PATIENCE)
    consumer.close()
    with client.subscribe(topic, "s", handler=handle):
        client.publish(topic, b"2")
        assert came.acquire(timeout=PATIENCE)
    assert seen == [b"1", b"2"]
    assert client.describe_subscription(topic, "s").backlog == 0
    with pytest.raises(TopicNotFound):
        client.subscribe(f"{topic}-none", "s", handler=handle)
