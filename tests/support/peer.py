"""A client that speaks frames to one worker, so that tests see each of them: it neither retries nor moves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, NamedTuple, TypeVar

from keylane import wire
from keylane.wire import Frame, Properties, Type

PATIENCE = 60.0  # seconds for what should take milliseconds: machines stall

P = TypeVar("P", bound=Properties)
_STREAMS = count(1)


class Refused(Exception):
    """The answer was ERROR."""

    def __init__(self, said: wire.Error) -> None:
        super().__init__(f"{said.code}: {said.message}")
        self.code = said.code
        self.message = said.message


class Elsewhere(Exception):
    """The answer was REDIRECT."""

    def __init__(self, said: wire.Redirect) -> None:
        super().__init__(f"{said.topic}:{said.partition} is at {said.address}")
        self.said = said


class Item(NamedTuple):
    """A message as it was delivered."""

    partition: int
    entry: int
    key: str
    uid: str
    token: int
    retries: int
    held: bool


class Peer:
    """A connection to one worker; made by `connect`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pushed: list[Frame] = []  # all that came without being asked for
        self.answers_together: list[wire.Answers] = []  # that have come
        self.ended = False
        self.ignore_heartbeats = False
        self._reader = reader
        self._writer = writer
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._sequences = count(1)
        self.came: list[int] = []  # types of all frames, in their order
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._listen())

    def begin(self, request: Properties, body: bytes = b"") -> asyncio.Future[Frame]:
        """Send a request now; its answer, which may be ERROR or REDIRECT, comes as the future's result."""
        return self.begin_all([(request, body)])[0]

    def begin_all(self, requests: Iterable[tuple[Properties, bytes]]) -> list[asyncio.Future[Frame]]:
        """Send requests in one go."""
        answers, frames = [], []
        for request, body in requests:
            sequence = next(self._sequences)
            answer = self._answers[sequence] = asyncio.get_running_loop().create_future()
            if self.ended:
                answer.set_exception(ConnectionError("the worker has closed the connection"))
            answers.append(answer)
            frames.append(wire.frame(request, sequence, body=body))
        self._writer.write(b"".join(frames))
        return answers

    def begin_at(self, sequence: int, request: Properties, body: bytes) -> asyncio.Future[Frame]:
        """Send a request under a sequence of the caller's."""
        answer = self._answers[sequence] = asyncio.get_running_loop().create_future()
        self._writer.write(wire.frame(request, sequence, body=body))
        return answer

    def begin_several(self, request: Properties, parts: int, body: bytes) -> list[asyncio.Future[Frame]]:
        """Send what is as many requests in one frame; the answer to each of them."""
        sequences = [next(self._sequences) for _ in range(parts)]
        for sequence in sequences:
            self._answers[sequence] = asyncio.get_running_loop().create_future()
        answers = [self._answers[sequence] for sequence in sequences]
        self._writer.write(wire.frame(request, sequences[0], body=body))
        return answers

    async def answer(self, request: Properties, body: bytes = b"") -> Frame:
        """Ask, and wait for the OK; Refused or Elsewhere if it is none."""
        async with asyncio.timeout(PATIENCE):  # wait_for of Python 3.11 can swallow a cancellation
            return checked(await self.begin(request, body))

    async def ask(self, request: Properties, reply: type[P], body: bytes = b"") -> P:
        """The same, for the properties of the answer."""
        return wire.properties_of(await self.answer(request, body), reply)

    async def ask_body(self, request: Properties, type: Any) -> Any:
        """The same, for the body of the answer."""
        return wire.unpack((await self.answer(request)).body, type)

    def send(self, properties: Properties) -> None:
        """Send what is not answered."""
        self._writer.write(wire.frame(properties))

    def write(self, data: bytes) -> None:
        """Send bytes that need be no frame."""
        self._writer.write(data)

    async def push(self, properties: type[P], such: Callable[[P], bool] = lambda _: True) -> P:
        """Wait for a frame that was pushed, and take it."""
        async with asyncio.timeout(PATIENCE):
            while True:
                for frame in self.pushed:
                    if frame.type == properties.TYPE and such(said := wire.properties_of(frame, properties)):
                        self.pushed.remove(frame)
                        return said
                assert not self.ended, f"the connection ended before a {properties.__name__} came"
                self._news.clear()
                await self._news.wait()

    def has(self, properties: type[P], such: Callable[[P], bool] = lambda _: True) -> bool:
        """Whether a frame was pushed and not taken."""
        return any(
            frame.type == properties.TYPE and such(wire.properties_of(frame, properties))
            for frame in self.pushed
        )

    async def echo(self) -> None:
        """Wait until all that was sent to us before now has come, as far as its order tells."""
        await self.answer(wire.Heartbeat())

    async def close(self) -> None:
        """End the connection."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _listen(self) -> None:
        frames = wire.FrameReader()
        try:
            while data := await self._reader.read(65_536):
                for frame in frames.feed(data):
                    self._receive(frame)
        except OSError:
            pass
        finally:
            self.ended = True
            self._news.set()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ConnectionError("the worker has closed the connection"))
                    answer.exception()

    def _receive(self, frame: Frame) -> None:
        self.came.append(frame.type)
        if frame.type == Type.HEARTBEAT:
            if not self.ignore_heartbeats:
                self._writer.write(wire.frame(Properties(), frame.sequence))
        elif frame.type == Type.ANSWERS:
            self.answers_together.append(said := wire.properties_of(frame, wire.Answers))
            for sequence, *reply in zip(*(said.stored[at::4] for at in range(4)), strict=True):
                self._answers.pop(sequence).set_result(_ok(wire.PublishReply(*reply), sequence))
            for sequence in said.settled:
                self._answers.pop(sequence).set_result(_ok(wire.SettleReply(), sequence))
        elif frame.sequence and frame.type != Type.DELETE_BODIES:
            answer = self._answers.pop(frame.sequence)
            if not answer.done():
                answer.set_result(frame)
        else:
            self.pushed.append(frame)
            self._news.set()


def _ok(reply: Properties, sequence: int) -> Frame:
    return Frame(int(Type.OK), sequence, 0, memoryview(wire.pack(reply)), memoryview(b""))


def checked(frame: Frame) -> Frame:
    """An answer that is OK; else what it is, as an exception."""
    if frame.type == Type.ERROR:
        raise Refused(wire.properties_of(frame, wire.Error))
    if frame.type == Type.REDIRECT:
        raise Elsewhere(wire.properties_of(frame, wire.Redirect))
    assert frame.type == Type.OK, frame.type
    return frame


@asynccontextmanager
async def connect(url: str, token: str = "", version: int = 1) -> AsyncIterator[Peer]:
    """A connection to a worker, greeted, of a version of the protocol."""
    host, _, port = url.removeprefix("keylane://").rpartition(":")
    peer = Peer(*await asyncio.open_connection(host, int(port)))
    try:
        await peer.ask(wire.Info((1, version), token, "a test"), wire.InfoReply)
        yield peer
    finally:
        await peer.close()


def messages(*uids: str, key: str = "k") -> bytes:
    """The body of a PUBLISH."""
    return wire.pack([text for uid in uids for text in (key, uid, wire.pack_about(1))])


async def publish(
    peer: Peer, topic: str, partition: int, *uids: str, key: str = "k", again: bool = False
) -> wire.PublishReply:
    """Publish messages of one key."""
    request = wire.Publish(topic, partition, again=again)
    return await peer.ask(request, wire.PublishReply, messages(*uids, key=key))


class Stream:
    """A consumer on a peer, and all that it was sent."""

    def __init__(self, peer: Peer, topic: str, subscription: str, name: str) -> None:
        self.peer = peer
        self.number = next(_STREAMS)
        self.topic = topic
        self.subscription = subscription
        self.name = name
        self.mode = "shared"
        self.items: list[Item] = []

    async def open(
        self, *partitions: int, mode: str | None = None, permits: int = 1_000
    ) -> wire.SubscribeReply:
        """Subscribe, or add partitions to what is subscribed; without any, all."""
        reply = await self.peer.ask(
            wire.Subscribe(
                self.number,
                self.topic,
                self.subscription,
                self.name,
                mode,
                permits=permits,
                partitions=list(partitions) or None,
            ),
            wire.SubscribeReply,
        )
        self.mode = reply.mode
        return reply

    async def receive(self, count: int) -> list[Item]:
        """Wait for so many messages, and take them."""
        async with asyncio.timeout(PATIENCE):
            while len(self.items) < count:
                await self.peer.push(wire.Data, self._take)
        taken, self.items = self.items[:count], self.items[count:]
        return taken

    async def waiting(self) -> list[Item]:
        """All that has come by now, without taking it."""
        await self.peer.echo()
        while self.peer.has(wire.Data, lambda data: data.stream == self.number):
            await self.peer.push(wire.Data, self._take)
        return self.items

    async def ack(self, *items: Item) -> wire.SettleReply:
        """Settle messages of one partition."""
        return await self._settle(wire.Ack(self.number, items[0].partition), items)

    async def nack(self, *items: Item, delay_ms: int = 0) -> wire.SettleReply:
        """Give them back."""
        return await self._settle(wire.Nack(self.number, items[0].partition, delay_ms), items)

    async def extend(self, *items: Item, lease_ms: int = 60_000) -> wire.SettleReply:
        """Hold them for longer."""
        return await self._settle(wire.Extend(self.number, items[0].partition, lease_ms), items)

    async def _settle(self, request: Properties, items: tuple[Item, ...]) -> wire.SettleReply:
        return await self.peer.ask(request, wire.SettleReply, receipts(self.mode, *items))

    def _take(self, data: wire.Data) -> bool:
        """Unpack the frame of this Data if it is ours."""
        if data.stream != self.number:
            return False
        frame = next(
            frame
            for frame in self.peer.pushed
            if frame.type == Type.DATA and wire.properties_of(frame, wire.Data) == data
        )
        self.items += unpacked(data, frame.body)
        return True


def unpacked(data: wire.Data, body: bytes | memoryview) -> list[Item]:
    """The messages of a DATA frame."""
    ranges, flat, counted, _ = wire.unpack(body, tuple[list[int], list[str], list[int], list[str | int]])
    bounds = zip(ranges[::2], ranges[1::2], strict=True)
    entries = [entry for first, last in bounds for entry in range(first, last + 1)]
    retries = dict(zip(counted[::2], counted[1::2], strict=True))
    return [
        Item(data.partition, entry, key, uid, data.token, retries.get(entry, 0), data.held)
        for entry, key, uid in zip(entries, flat[::3], flat[1::3], strict=True)
    ]


def receipts(mode: str, *items: Item) -> bytes:
    """The body of an ACK, NACK or EXTEND."""

    def lane(item: Item) -> str:
        if mode == "shared" or (mode == "key_shared" and not item.key):
            return ""
        return "=" + item.key if mode == "key_shared" else "="

    return wire.pack([part for item in items for part in (lane(item), item.token, item.entry, item.entry)])
