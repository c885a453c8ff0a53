"""The client without await in programs that end in every way but the expected one: none may hang."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keylane import (
    AsyncClient,
    BrokerError,
    Client,
    ConnectionClosed,
    InvalidArgument,
    Message,
    OutgoingMessage,
    Published,
    PublishFailed,
    SyncMessage,
)
from keylane.bridge import Call
from keylane.consume.block import Block
from keylane.sync.consumer import SyncConsumer
from tests.support.running import RunningBroker

PATIENCE = 60.0
ROOT = Path(__file__).resolve().parents[2]
BEGIN = """
import os, signal, sys, threading, time
from keylane import Client, ConnectionClosed, OutgoingMessage
url, topic = sys.argv[1:]
def say(*what): print(*what, flush=True)
"""


@pytest.fixture
def client(broker: RunningBroker, topic: str) -> Iterator[Client]:
    """A client, with a topic that has one partition and one subscription."""
    with Client(broker.url) as client:
        client.create_topic(topic, partitions=1)
        client.create_subscription(topic, "s", lease=3_600)
        yield client


@contextmanager
def program(broker: RunningBroker, topic: str, text: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program of its own, which is killed if it has not ended."""
    command = [sys.executable, "-c", BEGIN + text, broker.url, topic]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def run(broker: RunningBroker, topic: str, text: str) -> list[str]:
    """What a program has printed, when it has ended well and in time."""
    with program(broker, topic, text) as process:
        return end_of(process)


def end_of(process: subprocess.Popen[str]) -> list[str]:
    try:
        printed, errors = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        raise AssertionError(f"it hangs, after {process.communicate()}") from None
    assert (process.returncode, errors) == (0, "")
    return printed.split()


@pytest.mark.slow
def test_a_signal_handler_may_close_the_client_of_a_loop_that_waits(
    broker: RunningBroker, client: Client, topic: str
) -> None:
    text = """
with Client(url) as client, client.subscribe(topic, "s") as consumer:
    signal.signal(signal.SIGTERM, lambda *_: client.close())
    say("ready")
    for message in consumer:
        with message:
            data = message.data().decode()
        say(data)
    say("ended")
say("left")
"""
    with program(broker, topic, text) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        client.publish(topic, b"x")
        assert process.stdout.readline() == "x\n"
        process.send_signal(signal.SIGTERM)
        assert end_of(process) == ["ended", "left"]
    info = client.describe_subscription(topic, "s")
    assert (info.consumers, info.backlog) == ([], 0)


@pytest.mark.slow
def test_a_signal_handler_may_close_a_client_that_closes(
    broker: RunningBroker, client: Client, topic: str
) -> None:
    text = """
began, go_on = threading.Event(), threading.Event()
def handle(message):
    began.set()
    go_on.wait()
def stop(*_):
    go_on.set()
    client.close()
    say("closed")
signal.signal(signal.SIGTERM, stop)
client = Client(url).__enter__()
client.subscribe(topic, "s", handler=handle).__enter__()
began.wait()
say("ready")
client.close()
say("left")
"""
    client.publish(topic, b"x")
    with program(broker, topic, text) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert end_of(process) == ["closed", "left"]
    assert client.describe_subscription(topic, "s").backlog == 0


@pytest.mark.slow
def test_a_consumer_that_was_closed_need_not_be_left(
    broker: RunningBroker, client: Client, topic: str
) -> None:
    text = """
with Client(url) as client:
    for how in ("closed", "forgotten"):
        consumer = client.subscribe(topic, "s", name=how)
        consumer.__enter__()
        if how == "closed":
            consumer.close()
say("left")
"""
    assert run(broker, topic, text) == ["left"]
    assert client.describe_subscription(topic, "s").consumers == []


@pytest.mark.slow
def test_a_forked_child_leaves_all_blocks_and_the_parent_goes_on(
    broker: RunningBroker, client: Client, topic: str
) -> None:
    text = """
child = None
with Client(url) as client, client.subscribe(topic, "s") as consumer:
    with consumer.receive(10) as message:
        child = os.fork()
        if child == 0:
            try:
                with message:
                    pass
            except ConnectionClosed as error:
                say("fork" if "fork" in str(error) else error)
            consumer.close()
            sys.exit(0)  # through every block
        assert os.waitpid(child, 0)[1] == 0
    assert client.topics()
    say("parent")
"""
    client.publish(topic, b"x")
    assert run(broker, topic, text) == ["fork", "parent"]
    assert client.describe_subscription(topic, "s").backlog == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["", "raise SystemExit(0)", "threading.Thread(target=time.sleep, args=(.1,)).start()"]
)
def test_a_program_that_ends_without_close_ends_and_settles_what_it_did(
    broker: RunningBroker, client: Client, topic: str, how: str
) -> None:
    text = """
client = Client(url)
client.__enter__()
consumer = client.subscribe(topic, "s")
consumer.__enter__()
done = 0
for message in consumer:
    with message:
        done += 1
    if done == 3:
        break
say("end")
"""
    client.publish_many(topic, [OutgoingMessage(b"x")] * 5)
    assert run(broker, topic, text + how) == ["end"]
    info = client.describe_subscription(topic, "s")
    assert (info.consumers, info.backlog, info.leased) == ([], 2, 0)


@pytest.mark.slow
def test_a_program_with_handlers_ends_without_close(
    broker: RunningBroker, client: Client, topic: str
) -> None:
    text = """
done = threading.Event()
client = Client(url).__enter__()
def handle(message):
    message.data()
    done.set()
consumer = client.subscribe(topic, "s", handler=handle).__enter__()
done.wait()
say("end")
"""
    client.publish(topic, b"x")
    assert run(broker, topic, text) == ["end"]
    info = client.describe_subscription(topic, "s")
    assert (info.consumers, info.backlog) == ([], 0)


GEVENT = """
from gevent import monkey
monkey.patch_all()
import gevent
from keylane import Client, OutgoingMessage
import sys
url, topic = sys.argv[1:]
beats = []
def beat():
    while True:
        beats.append(1)
        gevent.sleep(0.01)
gevent.spawn(beat)
with Client(url) as client:
    def publish(n):
        for _ in range(20):
            client.publish(topic, b"%d" % n, key=str(n))
    seen = []
    def consume(consumer):
        for message in consumer:
            with message:
                seen.append(message.data())
            if len(seen) == 100:
                return
    with client.subscribe(topic, "s") as consumer:
        greenlets = [gevent.spawn(publish, n) for n in range(5)]
        consume(consumer)
        gevent.joinall(greenlets, raise_error=True)
        before = len(beats)
        try: consumer.receive(timeout=0.2)
        except TimeoutError: pass
        assert len(beats) - before > 3, "other greenlets go on while one waits"
    pool = [gevent.spawn(client.topics) for _ in range(20)]
    gevent.joinall(pool, raise_error=True)
print(len(seen), flush=True)
"""


@pytest.mark.slow
def test_greenlets_share_a_client(broker: RunningBroker, client: Client, topic: str) -> None:
    command = [sys.executable, "-c", GEVENT, broker.url, topic]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.stdout, done.returncode, done.stderr) == ("100\n", 0, "")
    assert client.describe_subscription(topic, "s").backlog == 0


@pytest.mark.slow
def test_handlers_and_files_work_where_threads_are_greenlets(
    broker: RunningBroker, client: Client, topic: str, tmp_path: Path
) -> None:
    text = """
from gevent import monkey
monkey.patch_all()
import sys, time
from keylane import Client
url, topic, folder = sys.argv[1:]
seen = []
def handle(message):
    time.sleep(0.01)
    seen.append(message.data())
with Client(url, payloads="file://" + folder) as client:
    with client.subscribe(topic, "s", handler=handle):
        for _ in range(20):
            client.publish(topic, b"x" * 10_000)
        while len(seen) < 20:
            time.sleep(0.01)
print(len(seen), flush=True)
"""
    command = [sys.executable, "-c", text, broker.url, topic, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.stdout, done.returncode, done.stderr) == ("20\n", 0, "")
    assert client.describe_subscription(topic, "s").backlog == 0


@pytest.mark.slow
def test_a_handler_may_publish_while_close_waits_for_it(
    broker: RunningBroker, client: Client, topic: str
) -> None:
    text = """
began, closing = threading.Event(), threading.Event()
def handle(message):
    began.set()
    closing.wait()
    time.sleep(0.2)
    say(client.publish(topic + "-2", message.data()).no_subscribers)
    message.ack()
client = Client(url).__enter__()
client.create_topic(topic + "-2", partitions=1)
client.subscribe(topic, "s", handler=handle).__enter__()
began.wait()
closing.set()
client.close()
say("left")
"""
    client.publish(topic, b"x")
    assert run(broker, topic, text) == ["True", "left"]
    assert client.describe_subscription(topic, "s").backlog == 0


@pytest.mark.slow
def test_a_handler_may_close_the_client(broker: RunningBroker, client: Client, topic: str) -> None:
    text = """
closed = threading.Event()
with Client(url) as client:
    def handle(message):
        message.ack()
        client.close()
        closed.set()
    with client.subscribe(topic, "s", handler=handle) as consumer:
        try:
            consumer.wait()
        except ConnectionClosed:
            pass
assert closed.wait(10)
say("left")
"""
    client.publish(topic, b"x")
    assert run(broker, topic, text) == ["left"]
    assert client.describe_subscription(topic, "s").backlog == 0


@pytest.mark.slow
def test_close_waits_no_longer_for_a_handler_than_it_may(
    broker: RunningBroker, client: Client, topic: str
) -> None:
    text = """
began, ended = threading.Event(), threading.Event()
def handle(message):
    began.set()
    try:
        while True:
            message.extend(10)
            time.sleep(0.01)
    except Exception as error:
        say(type(error).__name__)
        ended.set()
with Client(url) as client:
    consumer = client.subscribe(topic, "s", handler=handle).__enter__()
    began.wait()
    {close}
    assert ended.wait(10)
say("left")
"""
    client.publish(topic, b"x")
    for close in ("consumer.close(timeout=0.1)", "client.close(timeout=0.1)"):
        assert run(broker, topic, text.format(close=close)) == ["ConnectionClosed", "left"]
        info = client.describe_subscription(topic, "s")
        assert (info.consumers, info.backlog, info.leased) == ([], 1, 0)
    assert client.peek(topic, "s")[0].retry_count == 0


@pytest.mark.slow
def test_close_without_a_broker_ends_in_time(topic: str) -> None:
    with RunningBroker() as broker:
        with Client(broker.url) as client:
            client.create_topic(topic, partitions=1)
            client.create_subscription(topic, "s")
        text = """
client = Client(url).__enter__()
consumer = client.subscribe(topic, "s").__enter__()
say("ready")
sys.stdin.read()
client.close(timeout=1)
say("left")
"""
        command = [sys.executable, "-c", BEGIN + text, broker.url, topic]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                broker.pause()
                process.stdin.close()
                assert process.stdout.readline() == "left\n"
                assert process.wait(PATIENCE) == 0
            finally:
                process.kill()
                broker.resume()


def test_calls_that_wait_when_the_client_closes_are_told(
    client: Client, broker: RunningBroker, topic: str
) -> None:
    other = Client(broker.url).__enter__()
    consumer = other.subscribe(topic, "s").__enter__()
    ended: list[BaseException] = []

    def receive() -> None:
        try:
            consumer.receive()
        except BrokerError as error:
            ended.append(error)

    threads = [threading.Thread(target=receive, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    other.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert [type(error) for error in ended] == [ConnectionClosed] * 3
    with pytest.raises(ConnectionClosed, match="was closed"):
        other.topics()
    other.close()


def test_a_callback_that_waits_for_the_client_is_told_not_to(broker: RunningBroker) -> None:
    said: list[Exception] = []

    def ask(drift: float) -> None:
        try:
            opened.topics()
        except Exception as error:
            said.append(error)

    with Client(broker.url) as opened:
        opened._call(_run_it, ask)
    assert "must not block" in str(said[0])


async def _run_it(ask: object) -> None:
    assert callable(ask)
    ask(0.0)


TAKE: dict[str, Callable[[SyncConsumer], SyncMessage]] = {
    "receive": lambda consumer: consumer.receive(timeout=PATIENCE),
    "iterate": lambda consumer: next(iter(consumer)),
    "batches": lambda consumer: next(iter(consumer.batches()))[0],
}


@pytest.mark.parametrize("way", TAKE)
def test_what_was_taken_for_a_thread_that_is_interrupted_is_there_for_the_next_call(
    client: Client, topic: str, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A signal's handler raises when the loop has taken the message and the thread has not."""
    as_it_is = Call.wait

    def interrupted(call: Call[None], timeout: float = -1.0) -> None:
        as_it_is(call, timeout)
        raise KeyboardInterrupt

    client.publish(topic, b"1")
    with client.subscribe(topic, "s") as consumer:
        with monkeypatch.context() as patch:
            patch.setattr(Call, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                TAKE[way](consumer)
        message = consumer.receive(timeout=PATIENCE)
        assert message.data() == b"1"
        message.ack()


@pytest.mark.parametrize("late", [False, True])
def test_who_is_interrupted_while_a_message_is_handed_over_goes_on_with_what_there_is(
    client: Client, topic: str, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    client.publish_many(topic, [OutgoingMessage(b"1"), OutgoingMessage(b"2")])
    with client.subscribe(topic, "s") as consumer:
        held = consumer._consumer.leases
        as_it_is = held.hand

        def interrupted(block: Block, index: int) -> bool:
            if late:
                as_it_is(block, index)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(held, "hand", interrupted)
            with pytest.raises(KeyboardInterrupt):
                consumer.receive(timeout=PATIENCE)
        message = consumer.receive(timeout=PATIENCE)
        assert message.data() == (b"2" if late else b"1"), "what it may have in its hands is not handed twice"
        message.ack()


def test_break_and_then_batches_sees_every_message(client: Client, topic: str) -> None:
    client.publish_many(topic, [OutgoingMessage(str(n)) for n in range(50)])
    with client.subscribe(topic, "s") as consumer:
        for message in consumer:
            message.ack()
            break
        seen = 0
        for batch in consumer.batches(max_messages=20, max_wait=0.05):
            assert len(batch) <= 20
            assert batch.data() == [message.data() for message in batch]
            consumer.ack(batch)
            seen += len(batch)
            if seen == 49:
                break
    assert client.describe_subscription(topic, "s").backlog == 0


# With await: how long close waits for handlers


async def test_close_waits_for_handlers_that_await_as_long_as_it_may(
    broker: RunningBroker, topic: str
) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    async def handle(message: Message) -> None:
        began.set()
        await go_on.wait()

    async with AsyncClient(broker.url) as client:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s", lease=3_600)
        for patience in (0.05, 30.0):
            await client.publish(topic, b"x")
            began.clear()
            consumer = await client.subscribe(topic, "s", handler=handle).__aenter__()
            await asyncio.wait_for(began.wait(), PATIENCE)
            closing = asyncio.ensure_future(consumer.close(timeout=patience))
            if patience == 30.0:
                await asyncio.sleep(0)
                assert not closing.done()
                go_on.set()
            await asyncio.wait_for(closing, PATIENCE)
            left = await client.peek(topic, "s")
            assert [item.retry_count for item in left] == ([0] if patience < 1 else [])


async def test_a_handler_that_awaits_may_close_the_client(broker: RunningBroker, topic: str) -> None:
    async def handle(message: Message) -> None:
        await message.ack()
        await client.close()
        closed.set()

    closed = asyncio.Event()
    client = AsyncClient(broker.url)
    async with client:
        await client.create_topic(topic, partitions=1)
        await client.create_subscription(topic, "s", lease=3_600)
        await client.publish(topic, b"x")
        async with client.subscribe(topic, "s", handler=handle) as consumer:
            await asyncio.wait_for(consumer.wait(), PATIENCE)
        await asyncio.wait_for(closed.wait(), PATIENCE)
    async with AsyncClient(broker.url) as other:
        assert (await other.describe_subscription(topic, "s")).backlog == 0


async def test_a_cancelled_close_still_gives_back(broker: RunningBroker, topic: str) -> None:
    began = threading.Event()
    go_on = threading.Event()

    def handle(message: SyncMessage) -> None:
        began.set()
        go_on.wait(PATIENCE)

    try:
        async with AsyncClient(broker.url) as client:
            await client.create_topic(topic, partitions=1)
            await client.create_subscription(topic, "s", lease=3_600)
            await client.publish(topic, b"x")
            consumer = await client.subscribe(topic, "s", handler=handle).__aenter__()
            assert await asyncio.to_thread(began.wait, PATIENCE)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await consumer.close()
            info = await client.describe_subscription(topic, "s")
            assert (info.consumers, info.leased, info.backlog) == ([], 0, 1)
    finally:
        go_on.set()


def test_a_call_that_ends_early_says_what_became_of_each_message(client: Client, topic: str) -> None:
    class Closing(list[OutgoingMessage]):
        """The client is closed when the second part of it is asked for."""

        def __iter__(self) -> Iterator[OutgoingMessage]:
            for place, message in enumerate(super().__iter__()):
                if place == 10_000:
                    client.close()
                yield message

    many = Closing(OutgoingMessage(key=f"k{n % 7}" if n else "") for n in range(30_000))
    with pytest.raises(PublishFailed, match="20001 of 30000") as caught:
        client.publish_many(topic, many)
    kinds = [type(answer) for answer in caught.value.published]
    assert kinds == [InvalidArgument] + [Published] * 9_999 + [ConnectionClosed] * 20_000
