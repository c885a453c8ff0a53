"""A worker that does what a test says, over a real socket: for lost answers, odd orders and late errors."""

import asyncio
import ssl
from collections import defaultdict
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from keylane import wire
from keylane.times import now_ms
from keylane.wire import Frame, Properties, Type

P = TypeVar("P", bound=Properties)
PATIENCE = 60.0  # seconds for anything that a test waits for


class Request:
    """A frame that came from the client, and the means to answer it."""

    def __init__(self, link: "Link", frame: Frame, properties: Any) -> None:
        self.link = link
        self.frame = frame
        self.properties = properties
        self.body: list[Any] = wire.unpack(frame.body, list[Any]) if frame.body else []

    def ok(self, reply: Properties | None = None, body: object = None) -> None:
        """Answer with yes."""
        self.link.send(reply or Properties(), self.frame.sequence, b"" if body is None else wire.pack(body))

    def error(self, code: str, message: str = "because", **more: Any) -> None:
        """Answer with no."""
        self.link.send(wire.Error(code, message, **more), self.frame.sequence)

    def redirect(self, topic: str, partition: int, to: "ScriptedWorker | None") -> None:
        """Answer that another worker has the partition."""
        self.link.send(wire.Redirect(topic, partition, to.address if to else ""), self.frame.sequence)


class Link(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, worker: "ScriptedWorker") -> None:
        self.worker = worker
        self.transport: asyncio.Transport
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader = wire.FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.worker.links.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            kept = Frame(*frame[:3], memoryview(bytes(frame[3])), memoryview(bytes(frame[4])))
            self.worker.received(self, kept)

    def send(self, properties: Properties, sequence: int = 0, body: bytes = b"") -> None:
        """Send a frame with the worker's time."""
        time_ms = now_ms() + self.worker.drift_ms
        self.transport.write(wire.frame(properties, sequence, time_ms, body))

    def data(
        self,
        messages: list[tuple[int, str]] | int,
        *,
        token: int = 1,
        lease: float = 30.0,
        about: str = "1 1   ",
        lanes: list[str | int] | None = None,
        **more: Any,
    ) -> None:
        """Send messages: entry and key of each, or how many."""
        if isinstance(messages, int):
            messages = [(entry, "") for entry in range(1, messages + 1)]
        deadline = now_ms() + self.worker.drift_ms + round(lease * 1000)
        ranges = [entry for entry, _ in messages for _ in range(2)]
        flat = [text for entry, key in messages for text in (key, f"uid-{entry}", about)]
        data = wire.Data(more.pop("stream", 1), more.pop("partition", 0), token, deadline, "7:1", **more)
        self.send(data, body=wire.pack((ranges, flat, [], lanes or [])))

    def drop(self) -> None:
        """Break the connection."""
        self.transport.abort()


class ScriptedWorker:
    """Answers INFO and heartbeats by itself; everything else is for the test to expect and answer."""

    def __init__(self, **info: Any) -> None:
        self.links: list[Link] = []
        self.drift_ms = 0
        self.tls: ssl.SSLContext | None = None
        self.silent = False  # answers nothing any more
        self.refusal: wire.Error | None = None  # of INFO
        self.partitions = 1  # of every topic, all of them its own
        self.maps_wait = False  # the test answers who asks for the map of a topic
        self._maps: asyncio.Queue[Request] = asyncio.Queue()
        self.tokens: set[str] = set()  # that were refused
        self.info: dict[str, Any] = {"version": wire.VERSION, "payloads": "", "heartbeat_ms": 10_000, **info}
        self.cluster: ScriptedCluster | None = None
        self._waiting: dict[int, asyncio.Queue[Request]] = defaultdict(asyncio.Queue)
        self._server: asyncio.Server
        self.port = 0

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def listen(self) -> None:
        """Listen, on the same port as before if there was one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Link(self), "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Listen no more and break all connections."""
        self._server.close()
        for link in self.links:
            if not link.closed.done():
                link.drop()
            await asyncio.wait_for(link.closed, PATIENCE)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"keylane{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def link(self) -> Link:
        """The newest connection."""
        return self.links[-1]

    async def expect(self, kind: type[Properties]) -> Request:
        """The next frame of a type."""
        return await asyncio.wait_for(self._waiting[kind.TYPE].get(), PATIENCE)

    def seen(self, kind: type[Properties]) -> int:
        """How many frames of a type have come and were not looked at."""
        return self._waiting[kind.TYPE].qsize()

    async def expect_subscriber(self, mode: str = "shared", lease: float = 30.0, **more: Any) -> Request:
        """Let a consumer in."""
        request = await self.expect(wire.Subscribe)
        delivery = more.get("delivery", "at_least_once")
        request.ok(wire.SubscribeReply(mode, delivery, round(lease * 1000), more.get("partitions", 1)))
        return request

    async def expect_map(self) -> Request:
        """The next who asks for the map of a topic, if these wait."""
        return await asyncio.wait_for(self._maps.get(), PATIENCE)

    async def tell_partitions(self, count: int = 1) -> None:
        """Answer who asks for the map of a topic."""
        request = await self.expect_map()
        self.partitions = count
        request.ok(self._info(request.properties.topic))

    async def expect_leaving(self) -> None:
        """Let a consumer go."""
        (await self.expect(wire.Unsubscribe)).ok()

    def received(self, link: Link, frame: Frame) -> None:
        several = frame.type in (Type.PUBLISHES, Type.ACKS)  # to a test they are as many frames
        for part in parts_of(frame) if several else [frame]:
            self._take(link, part)

    def _take(self, link: Link, frame: Frame) -> None:
        if self.silent:
            return
        if frame.type == Type.HEARTBEAT:
            link.send(Properties(), frame.sequence)
        elif frame.type == Type.INFO and self.refusal is not None:
            self.tokens.add(wire.properties_of(frame, wire.Info).token)
            link.send(self.refusal, frame.sequence)
        elif frame.type == Type.INFO:
            asked = wire.properties_of(frame, wire.Info)
            request = Request(link, frame, asked)
            if asked.topic and self.maps_wait:
                self._maps.put_nowait(request)
            else:
                request.ok(self._info(asked.topic))
            self._waiting[frame.type].put_nowait(request)
        else:
            kinds = {kind.TYPE: kind for kind in Properties.__subclasses__() if kind.TYPE != Type.OK}
            kind = kinds.get(frame.type, Properties)  # type: ignore[call-overload]
            properties = wire.properties_of(frame, kind)
            self._waiting[frame.type].put_nowait(Request(link, frame, properties))

    def _info(self, topic: str) -> wire.InfoReply:
        return wire.InfoReply(
            **{
                "worker": "scripted",
                "release": "0",
                "workers": [wire.WorkerAddress("scripted", self.address)],
                "owners": [0] * self.partitions if topic else [],
                "time_ms": now_ms() + self.drift_ms,
                "payload_lifetime_ms": 60_000,
                "session_ms": 10_000,
                "max_frame": wire.MAX_FRAME,
                **self.info,
                **(self.cluster.info(topic) if self.cluster else {}),
            }
        )


def parts_of(frame: Frame) -> list[Frame]:
    """The PUBLISH or ACK frames that one frame stands for."""
    values: list[Any] = wire.unpack(frame.body, list[Any])
    parts: list[Properties]
    if frame.type == Type.PUBLISHES:
        said = wire.properties_of(frame, wire.Publishes)
        width, sizes = 3, said.sizes
        parts = [
            wire.Publish(
                said.topic,
                partition,
                said.durability,
                said.timeout_ms,
                place in said.again,
                incarnation=said.incarnation,
                producer=said.producers[place],
                number=said.numbers[place],
                oldest=said.oldest[place],
                named=place in said.named,
            )
            for place, partition in enumerate(said.partitions)
        ]
    else:
        acks = wire.properties_of(frame, wire.Acks)
        width, sizes = 4, acks.sizes
        parts = [wire.Ack(*part) for part in zip(acks.streams, acks.partitions, acks.bodies, strict=True)]
    assert sum(sizes) * width == len(values)
    found = []
    for place, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        body, values = wire.pack(values[: size * width]), values[size * width :]
        properties = memoryview(wire.pack(part))
        found.append(
            Frame(int(part.TYPE), frame.sequence + place, frame.timestamp_ms, properties, memoryview(body))
        )
    return found


class ScriptedCluster:
    """Workers w0, w1, … that share a partition map: `owners`, the place of the owner of each partition."""

    def __init__(self, count: int, topic: str, owners: list[int], **info: Any) -> None:
        self.workers = [ScriptedWorker(worker=f"w{number}", **info) for number in range(count)]
        self.topic = topic
        self.owners = owners
        self.incarnation = 0
        self.asked = 0  # how often the map was

    async def __aenter__(self) -> list[ScriptedWorker]:
        for worker in self.workers:
            worker.cluster = self
            await worker.listen()
        return self.workers

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self.workers:
            await worker.stop()

    def info(self, topic: str) -> dict[str, Any]:
        """What its workers answer to INFO."""
        self.asked += topic == self.topic
        return {
            "workers": [wire.WorkerAddress(item.info["worker"], item.address) for item in self.workers],
            "owners": self.owners if topic == self.topic else [],
            "incarnation": self.incarnation if topic == self.topic else 0,
        }

    def move(self, partition: int, to: int) -> None:
        """Give a partition to another worker; those who asked those that answer are told."""
        self.change([*self.owners[:partition], to, *self.owners[partition + 1 :]], self.incarnation)

    def change(self, owners: list[int], incarnation: int) -> None:
        """Have another map, perhaps of another topic of that name; those who asked are told."""
        self.owners, self.incarnation = owners, incarnation
        for worker in self.workers:
            for link in worker.links:
                if not link.closed.done() and not worker.silent:
                    link.send(wire.Moved(self.topic))
