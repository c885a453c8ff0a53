"""Whatever strangers send to a worker, they get a named error or are hung up on, and nobody else notices."""

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, ClassVar

import msgspec
import psutil
import pytest

from keylane import errors, wire
from keylane.wire import FrameReader, Type
from keylane_broker.engine.engine import Engine
from keylane_broker.inspect.topic_checker import check_topic
from tests.support.running import RunningBroker

MAX_FRAME = 4 * 1024 * 1024
CODES = {
    item.code
    for item in vars(errors).values()
    if isinstance(item, type) and issubclass(item, errors.BrokerError)
}
PATIENCE = 60.0  # seconds in which whatever is waited for has to happen
# Bytes: the tail cache, and for each of five that do not read two answers of 3 MB, in several forms. What is
# not bounded takes gigabytes.
GROWTH = 128 * 2**20

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target() -> Iterator[RunningBroker]:
    """A worker that is soon out of patience."""
    with RunningBroker(
        heartbeat=2.0, session=5.0, max_frame=MAX_FRAME, max_inflight_bytes=2 * MAX_FRAME, log_level="warning"
    ) as broker:
        yield broker


# Strangers


class Stranger:
    """A connection that sends what it likes, and keeps what comes back."""

    everyone: ClassVar[list["Stranger"]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.answers: dict[int, wire.Frame] = {}
        self.pushed: list[wire.Frame] = []  # what came with sequence 0
        self.closed = False
        self._reader = reader
        self._news = asyncio.Condition()
        self._task = asyncio.create_task(self._read())
        self.everyone.append(self)

    @classmethod
    async def connect(cls, broker: RunningBroker, *, hello: bool = True) -> "Stranger":
        """Open a connection and, as one does, say INFO."""
        stranger = cls(*await asyncio.open_connection("127.0.0.1", broker.settings.port))
        if hello:
            assert (await stranger.call(wire.Info())).type == Type.OK
        return stranger

    def send(self, data: bytes) -> None:
        """Send bytes of whatever kind."""
        self.writer.write(data)

    async def call(self, properties: wire.Properties, body: bytes = b"", sequence: int = 1) -> wire.Frame:
        """Send a request and wait for its answer."""
        self.answers.pop(sequence, None)
        self.send(wire.frame(properties, sequence, body=body))
        await self.answered({sequence})
        return self.answers[sequence]

    async def answered(self, sequences: set[int]) -> None:
        """Wait until all of them are answered, or the connection is closed."""
        await self._until(lambda: sequences <= self.answers.keys())

    async def pushed_some(self) -> None:
        """Wait until something has come unasked."""
        await self._until(lambda: bool(self.pushed))

    async def ended(self) -> None:
        """Wait until the worker has hung up."""
        await self._until(lambda: False)

    async def _until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE), self._news:
            await self._news.wait_for(lambda: self.closed or done())
        if self._task.done() and not self._task.cancelled():
            self._task.result()

    async def leave(self, *, rudely: bool = False) -> None:
        """Close, or vanish without a word."""
        if rudely:
            own = self.writer.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._task.cancel()
        self.writer.transport.abort() if rudely else self.writer.close()
        await asyncio.gather(self._task, return_exceptions=True)

    def codes(self) -> set[str]:
        """The codes of all errors so far."""
        frames = [*self.answers.values(), *self.pushed]
        return {wire.properties_of(item, wire.Error).code for item in frames if item.type == Type.ERROR}

    async def _read(self) -> None:
        frames = FrameReader(MAX_FRAME)
        try:
            with contextlib.suppress(ConnectionError):
                while data := await self._reader.read(65_536):
                    for item in frames.feed(data):
                        self._take(item)
                    async with self._news:
                        self._news.notify_all()
        finally:
            self.closed = True
            async with self._news:
                self._news.notify_all()

    def _take(self, item: wire.Frame) -> None:
        if item.type == Type.HEARTBEAT:
            self.send(wire.frame(wire.Properties(), item.sequence))
        elif item.sequence:
            assert item.sequence not in self.answers, "answered twice"
            self.answers[item.sequence] = item
        else:
            self.pushed.append(item)


@pytest.fixture(autouse=True)
async def everyone_leaves() -> AsyncIterator[None]:
    """No test leaves a stranger behind."""
    yield
    while Stranger.everyone:
        await Stranger.everyone.pop().leave()


# Somebody who is not to notice


async def healthy(broker: RunningBroker, topic: str, stop: asyncio.Event) -> int:
    """Publish and consume, round after round; answers how many messages came."""
    peer = await Stranger.connect(broker)
    uids = iter(range(10**9))
    rounds = 0
    while not stop.is_set() or rounds < 3:
        batch = [text for _ in range(50) for text in (f"key-{rounds % 5}", f"{topic}-{next(uids)}", "1   ")]
        reply = await peer.call(wire.Publish(topic, 0), wire.pack(batch))
        assert reply.type == Type.OK, peer.codes()
        if not rounds:
            request = wire.Subscribe(1, topic, "s", "healthy", start="earliest", mode="key_shared")
            reply = await peer.call(request)
            assert reply.type == Type.OK, peer.codes()
        found: list[str] = []
        while len(found) < len(batch) // 3:
            await peer.pushed_some()
            data = peer.pushed.pop(0)
            token = wire.properties_of(data, wire.Data).token
            ranges, texts, retries, _ = wire.unpack(data.body, list[list[Any]])
            assert not retries
            found += texts[1::3]
            receipts = [
                part
                for first, last in zip(ranges[::2], ranges[1::2], strict=True)
                for part in (f"=key-{rounds % 5}", token, first, last)
            ]
            answer = await peer.call(wire.Ack(1, 0), wire.pack(receipts))
            assert wire.properties_of(answer, wire.SettleReply).stale == []
        assert found == batch[1::3]
        rounds += 1
    await peer.call(wire.Unsubscribe(1))
    await peer.leave()
    return rounds


async def highest(process: psutil.Process, stop: asyncio.Event) -> int:
    """The most memory that a process has until told to stop looking."""
    most = 0
    while not stop.is_set():
        most = max(most, process.memory_info().rss)
        await asyncio.sleep(0.02)
    return most


@contextlib.asynccontextmanager
async def nobody_notices(broker: RunningBroker, topic: str) -> AsyncIterator[None]:
    """What happens inside disturbs neither another client, nor the worker, nor the keyspace."""
    stranger, own = await Stranger.connect(broker), f"{topic}-of-others"
    for name in (topic, own):
        assert (await stranger.call(wire.CreateTopic(name, partitions=2))).type == Type.OK
    request = wire.CreateSubscription(own, "s", mode="key_shared")
    assert (await stranger.call(request)).type == Type.OK
    process, stop = psutil.Process(broker.pid), asyncio.Event()
    before = process.memory_info().rss
    other = asyncio.create_task(healthy(broker, own, stop))
    memory = asyncio.create_task(highest(process, stop))
    try:
        yield
        stop.set()
        async with asyncio.timeout(PATIENCE):
            await other
            grown = await memory - before
    finally:
        other.cancel()
        memory.cancel()
    assert (await stranger.call(wire.Info())).type == Type.OK, "the worker does not answer any more"
    await stranger.leave()
    assert grown < GROWTH, f"the worker had {grown / 2**20:.0f} MiB more than before"
    engine = Engine.connect(broker.redis_url)
    for name in await engine.topics():
        assert await check_topic(engine, name) == []
    await engine.close()
    assert "Traceback" not in broker.log()


# Bytes


@pytest.mark.parametrize("hello", [False, True])
async def test_random_bytes_are_answered_with_an_error_and_the_end(
    target: RunningBroker, topic: str, hello: bool
) -> None:
    rng = random.Random(1)
    async with nobody_notices(target, topic):
        for _ in range(60):
            stranger = await Stranger.connect(target, hello=hello)
            # Not as the beginning of a frame that might still come to its end.
            stranger.send(b"\xff" + rng.randbytes(rng.randrange(3, 3_000)))
            await stranger.ended()
            assert stranger.codes() == {"protocol_error"}
            await stranger.leave()


@pytest.mark.parametrize("length", [0, 27, MAX_FRAME + 1, 2**31, 2**32 - 1])
async def test_a_length_that_cannot_be_ends_the_connection(
    target: RunningBroker, topic: str, length: int
) -> None:
    async with nobody_notices(target, topic):
        stranger = await Stranger.connect(target)
        stranger.send(struct.pack(">I", length))
        await stranger.ended()
        assert stranger.codes() == {"protocol_error"}
        await stranger.leave()


async def test_a_frame_that_comes_byte_by_byte_is_a_frame(target: RunningBroker, topic: str) -> None:
    async with nobody_notices(target, topic):
        stranger = await Stranger.connect(target, hello=False)
        for byte in wire.frame(wire.Info(client="slow"), 5):
            stranger.send(bytes([byte]))
            await stranger.writer.drain()
            await asyncio.sleep(0)
        await stranger.answered({5})
        assert stranger.answers[5].type == Type.OK
        await stranger.leave()


async def test_frames_that_are_never_finished_take_no_room_from_others(
    target: RunningBroker, topic: str
) -> None:
    """Many small beginnings are kept; the large ones end when they are too much together."""
    publish = wire.frame(wire.Publish(topic, 0), 9, body=bytes(MAX_FRAME - 1_000))
    async with nobody_notices(target, topic):
        small = [await Stranger.connect(target) for _ in range(50)]
        for number, stranger in enumerate(small):
            stranger.send(publish[: number + 1])
        large = [await Stranger.connect(target) for _ in range(6)]
        for stranger in large:
            stranger.send(publish[:-1])
        async with asyncio.timeout(PATIENCE):
            ends = [asyncio.create_task(stranger.ended()) for stranger in large]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        assert set().union(*(stranger.codes() for stranger in large)) <= {"overloaded"}
        for stranger in [*small, *large]:
            await stranger.leave()
        await asyncio.gather(*ends)


# Frames that are whole, and wrong


def samples(topic: str) -> list[tuple[wire.Properties, list[Any] | None]]:
    """A good request of every type, with its body."""
    receipts = ["=key-0", 1, 1, 2, "", 1, 3, 3]
    return [
        (wire.Heartbeat(), None),
        (wire.CreateTopic(topic, 2, 1_000, True), None),
        (wire.DeleteTopic("no-such-topic"), None),
        (wire.Topics(), None),
        (wire.DescribeTopic(topic, True), None),
        (wire.CreateSubscription(topic, "f", backoff=(0.1, 2.0, 1.0, 0.1), exist_ok=True), None),
        (wire.DeleteSubscription(topic, "no-such-subscription"), None),
        (wire.DescribeSubscription(topic, "f"), None),
        (wire.ChangeSubscription(topic, "f", False), None),
        (wire.Seek(topic, "f", "earliest"), None),
        (wire.Peek(topic, "f", 0, 5), None),
        (wire.Publish(topic, 1, "memory", 1_000, True), ["key-0", "uid", "1   "]),
        (wire.Subscribe(7, topic, "f", "c", "shared", "latest", 1_000, 100, [0, 1]), None),
        (wire.Flow(7, 5, False), None),
        (wire.Publishes(topic, [1], [1], ["nobody-knows"], [1], [1], [0], [0]), ["key-0", "uid-1", "1   "]),
        (wire.Ack(7, 0), receipts),
        (wire.Ack(7, 0, [1, "body"]), receipts),
        (wire.Acks([7], [0], [2], [[]]), receipts),
        (wire.Nack(7, 1, 5, None, False), receipts),
        (wire.Extend(7, 0, None, 1), receipts),
        (wire.Unsubscribe(7), None),
        (wire.CreateSubscription(topic, "r", "cursor", exist_ok=True), None),
        (wire.Read(topic, 0, 1, 1, 10, False), None),
        (wire.Offsets(topic, "r"), None),
        (wire.Claim(topic, "r", "reader", 1_000, False), None),
        (wire.Commit(topic, "r", "reader", {0: 1, 1: 1}), None),
    ]


HOSTILE: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan")),
    *("", "x", "\0", "=", "*", "a\nb", "é" * 40_000, "0:0-0", "time:99999999999999", "9:1-99999999999999"),
    *(b"\xff", [], [1], [-1, 2**64 - 1], ["x"], [[[]]], {}, {"a": 1}, msgspec.msgpack.Ext(5, b"x")),
    *([0.0] * 4, [float("inf"), 1, 1, 1], [2.0, 0.5, 1.0, 7.0], list(range(20_000))),
]


def variants(topic: str) -> Iterator[tuple[Type, bytes, bytes]]:
    """Every request with each of its properties, and its body, replaced by each hostile value."""
    for properties, body in samples(topic):
        plain = msgspec.structs.asdict(properties)
        packed = wire.pack(body) if body is not None else b""
        for value in HOSTILE:
            for name in plain:
                yield properties.TYPE, wire.pack({**plain, name: value}), packed
            yield properties.TYPE, wire.pack(value), packed
            if body is None:
                continue
            yield properties.TYPE, wire.pack(plain), wire.pack(value)
            for place in range(4):
                changed = [*body[:place], value, *body[place + 1 :]]
                yield properties.TYPE, wire.pack(plain), wire.pack(changed)
        for name in plain:
            yield properties.TYPE, wire.pack({key: plain[key] for key in plain if key != name}), packed


def raw_frame(type: int, sequence: int, properties: bytes, body: bytes) -> bytes:
    """A frame of any type around any bytes."""
    head = struct.pack(">IIQQI", 28 + len(properties) + len(body), type, sequence, 0, len(properties))
    return head + properties + struct.pack(">I", len(body)) + body


async def test_every_property_and_body_may_be_wrong_and_each_request_has_one_answer(
    target: RunningBroker, topic: str
) -> None:
    async with nobody_notices(target, topic):
        stranger = await Stranger.connect(target)
        asked = set()
        for sequence, (type, properties, body) in enumerate(variants(topic), 2):
            stranger.send(raw_frame(type, sequence, properties, body))
            if type != Type.FLOW:
                asked.add(sequence)
            if sequence % 50 == 0:
                await stranger.answered(asked)
        await stranger.answered(asked)
        assert not stranger.closed
        assert asked <= stranger.answers.keys()
        assert stranger.codes() <= CODES
        await stranger.leave()


async def test_damaged_frames_have_one_answer_each(target: RunningBroker, topic: str) -> None:
    """Bytes of properties and bodies are changed; the lengths stay right."""
    rng = random.Random(2)
    good = [(item.TYPE, wire.pack(item), wire.pack(body) if body else b"") for item, body in samples(topic)]
    async with nobody_notices(target, topic):
        stranger = await Stranger.connect(target)
        asked = set()
        for sequence in range(2, 1_500):
            type, *parts = rng.choice(good)
            damaged = [bytearray(part) for part in parts]
            for part in damaged:
                for _ in range(rng.randrange(4) if part else 0):
                    part[rng.randrange(len(part))] = rng.randrange(256)
            stranger.send(raw_frame(type, sequence, *map(bytes, damaged)))
            if type != Type.FLOW:
                asked.add(sequence)
            if sequence % 50 == 0:
                await stranger.answered(asked)
        await stranger.answered(asked)
        assert not stranger.closed
        assert stranger.codes() <= CODES
        await stranger.leave()


async def test_types_that_no_client_sends_are_refused_under_their_sequence(
    target: RunningBroker, topic: str
) -> None:
    async with nobody_notices(target, topic):
        stranger = await Stranger.connect(target)
        types = [0, Type.DATA, Type.ERROR, Type.REDIRECT, max(Type) + 1, 255, 2**31, 2**32 - 1]
        for sequence, type in enumerate(types, 2):
            stranger.send(raw_frame(type, sequence, b"", b""))
        await stranger.answered(set(range(2, 2 + len(types))))
        assert stranger.codes() == {"protocol_error"}
        assert {item.type for sequence, item in stranger.answers.items() if sequence > 1} == {Type.ERROR}
        await stranger.leave()


async def test_receipts_that_cross_lie_or_belong_to_others_settle_nothing(
    target: RunningBroker, topic: str
) -> None:
    """A stranger on the same subscription tries to settle what another consumer holds."""
    rng = random.Random(3)
    async with nobody_notices(target, topic):
        owner, thief = await Stranger.connect(target), await Stranger.connect(target)
        request = wire.Subscribe(1, topic, "f", "owner", "key_shared", permits=50, lease_ms=60_000)
        await owner.call(request)
        batch = [text for number in range(50) for text in (f"key-{number % 3}", f"owned-{number}", "1   ")]
        await owner.call(wire.Publish(topic, 1), wire.pack(batch))
        await owner.pushed_some()
        token = wire.properties_of(owner.pushed[0], wire.Data).token
        await thief.call(wire.Subscribe(1, topic, "f", "thief"))
        asked = set()
        for sequence in range(2, 400):
            lane = rng.choice(["", "=", "=key-0", "=key-9", "#1", "="])
            number = rng.choice([token - 1, token + 1, 1])
            receipts = [lane, number, rng.randrange(-2, 60), rng.choice([5, 60, 2**40, 2**63])] * 2
            kind = rng.choice([wire.Ack(1, 1), wire.Nack(1, 1), wire.Extend(1, 1, lease_ms=1)])
            thief.send(wire.frame(kind, sequence, body=wire.pack(receipts)))
            asked.add(sequence)
        await thief.answered(asked)
        assert thief.codes() == {"invalid_argument"}
        described = await owner.call(wire.DescribeSubscription(topic, "f"))
        assert wire.properties_of(described, wire.SubscriptionReply).leased == 50
        for stranger in (owner, thief):
            await stranger.call(wire.Unsubscribe(1))
            await stranger.leave()


async def test_a_stream_can_be_opened_once_only_however_fast_one_asks(
    target: RunningBroker, topic: str
) -> None:
    async with nobody_notices(target, topic):
        stranger = await Stranger.connect(target)
        for number in range(20):
            request = wire.Subscribe(7, topic, "f", f"c{number}")
            stranger.send(wire.frame(request, 2 + number))
        await stranger.answered(set(range(2, 22)))
        opened = [item for item in stranger.answers.values() if item.type == Type.OK]
        assert len(opened) == 2, "INFO and one SUBSCRIBE"
        assert stranger.codes() <= {"invalid_argument", "protocol_error"}
        await stranger.leave()
        await consumers_are_gone(target, topic)


async def consumers_are_gone(broker: RunningBroker, topic: str) -> None:
    """Wait until the only consumer is a new one: those that left without a word time out."""
    stranger = await Stranger.connect(broker)
    await stranger.call(wire.Subscribe(1, topic, "f", "new"))
    async with asyncio.timeout(PATIENCE):
        while True:
            answer = await stranger.call(wire.DescribeSubscription(topic, "f"))
            if wire.properties_of(answer, wire.SubscriptionReply).consumers == ["new"]:
                break
            await asyncio.sleep(0.05)
    await stranger.call(wire.Unsubscribe(1))
    await stranger.leave()


# Connections


async def test_clients_that_never_read_are_hung_up_on(target: RunningBroker, topic: str) -> None:
    """They ask for much, and leave it all to the worker to keep."""
    async with nobody_notices(target, topic):
        stranger = await Stranger.connect(target)
        await stranger.call(wire.CreateSubscription(topic, "f"))
        batch = [
            text
            for number in range(100)
            for text in ("", f"u{number}", wire.pack_about(1, attributes={"x": "x" * 30_000}))
        ]
        assert (await stranger.call(wire.Publish(topic, 1), wire.pack(batch))).type == Type.OK
        request = wire.frame(wire.Peek(topic, "f", limit=100), 9)
        await asyncio.gather(*(deaf_client(target, request * 1_000) for _ in range(5)))


async def deaf_client(broker: RunningBroker, requests: bytes) -> None:
    """Send requests, read nothing but the beginning of the answer to INFO, and wait until writing fails."""
    loop = asyncio.get_running_loop()
    with socket.create_connection(("127.0.0.1", broker.settings.port)) as own:
        own.setblocking(False)
        await loop.sock_sendall(own, wire.frame(wire.Info(), 1))
        await loop.sock_recv(own, 1)
        await loop.sock_sendall(own, requests)
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                while True:
                    await loop.sock_sendall(own, wire.frame(wire.Heartbeat(), 1))
                    await asyncio.sleep(0.05)


async def test_hundreds_come_and_go_and_leave_no_consumers_behind(target: RunningBroker, topic: str) -> None:
    """Some say nothing, some hello, some subscribe and are gone before the answer."""
    rng = random.Random(4)
    async with nobody_notices(target, topic):
        first = await Stranger.connect(target)
        await first.call(wire.CreateSubscription(topic, "f"))
        for number in range(400):
            stranger = await Stranger.connect(target, hello=rng.random() < 0.8)
            request = wire.frame(wire.Subscribe(1, topic, "f", f"c{rng.randrange(50)}"), 2)
            match number % 4:
                case 1:
                    stranger.send(request)
                case 2:
                    stranger.send(request[: rng.randrange(1, len(request))])
                case 3:
                    stranger.send(request + wire.frame(wire.Unsubscribe(1), 3))
            await stranger.writer.drain()
            await stranger.leave(rudely=rng.random() < 0.5)
        await first.leave()
        await consumers_are_gone(target, topic)


async def test_no_frame_of_the_worker_is_larger_than_it_said(target: RunningBroker, topic: str) -> None:
    """Messages as large as they may be, a hundred at a time."""
    async with nobody_notices(target, topic):
        stranger = await Stranger.connect(target)
        await stranger.call(wire.CreateSubscription(topic, "f"))
        about = wire.pack_about(1, attributes={"x": "x" * 60_000})
        for start in range(0, 200, 50):
            batch = [text for number in range(start, start + 50) for text in ("", f"large-{number}", about)]
            assert (await stranger.call(wire.Publish(topic, 1), wire.pack(batch))).type == Type.OK
        peeked = await stranger.call(wire.Peek(topic, "f", limit=100))
        assert not stranger.closed
        assert peeked.type == Type.OK, stranger.codes()
        for _ in range(2):  # the second time it gets them back under its name
            await stranger.call(wire.Subscribe(1, topic, "f", "c1", permits=1_000))
            found: set[str] = set()
            while len(found) < 200:
                await stranger.pushed_some()
                assert not stranger.closed
                _, texts, _, _ = wire.unpack(stranger.pushed.pop(0).body, list[list[Any]])
                found.update(texts[1::3])
            await stranger.leave(rudely=True)
            stranger = await Stranger.connect(target)
        await stranger.leave()
        await consumers_are_gone(target, topic)
