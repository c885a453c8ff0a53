"""A worker without a process, a socket or a Redis: its parts on a fake server, and peers that speak frames.

What is repeated from time to time (heartbeats, renewals) begins with `live()`, where a test is about that:
leases and sessions last for a day, unless the settings say otherwise.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec
from fakeredis import FakeServer

from keylane import wire
from keylane_broker.access.control import AccessControl
from keylane_broker.access.rates import PublishRates
from keylane_broker.cluster.membership import Membership
from keylane_broker.config import Settings
from keylane_broker.engine.values import TopicSettings
from keylane_broker.store.keys import partition_of
from keylane_broker.worker.background import Background
from keylane_broker.worker.body_deletion import BodyDeletion
from keylane_broker.worker.clock import Clock
from keylane_broker.worker.connection import Connection, Handle
from keylane_broker.worker.connections import Connections
from keylane_broker.worker.context import Context
from keylane_broker.worker.outboxes import Outboxes
from keylane_broker.worker.partitions import Partitions
from keylane_broker.worker.requests.table import handle as answer
from keylane_broker.worker.session_renewal import Sessions
from tests.support.fake import fake_engine
from tests.support.peer import Peer


class _Transport(asyncio.Transport):
    """One end of a connection: what is written is received at the other."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: asyncio.Protocol
        self.other: _Transport
        self.reading = True
        self.closed = False
        self._waiting: list[bytes] = []

    def write(self, data: Any) -> None:
        if not self.closed:
            asyncio.get_running_loop().call_soon(self.other.receive, bytes(data))

    def receive(self, data: bytes) -> None:
        if not self.reading:
            self._waiting.append(data)
        elif not self.closed:
            self.protocol.data_received(data)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self.receive(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            loop = asyncio.get_running_loop()
            loop.call_soon(self.protocol.connection_lost, None)
            loop.call_soon(self.other.close)

    abort = close

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


class SmallWorker:
    """One of the workers on a fake server; a context manager, inside which it is a member of the cluster."""

    def __init__(
        self, server: FakeServer, name: str = "w0", *, topic: tuple[str, int] | None = None, **settings: Any
    ) -> None:
        self.name = name
        self._topic = topic  # that it makes: name and number of partitions
        self._alive: list[asyncio.Task[None]] = []
        self.settings = Settings(**{"partition_lease": 86_400.0, "session": 86_400.0, **settings})
        session_ms = round(self.settings.session * 1_000)
        self.engine = fake_engine(server)
        self.clock = Clock(self.engine.time_ms)
        self.background = Background()
        self.connections = Connections(self.settings, self.background, self.engine.store.counters)
        self.membership = Membership(
            self.engine,
            name,
            release="1",
            lease_ms=round(self.settings.partition_lease * 1_000),
            rebalance_interval=self.settings.rebalance_interval,
        )
        self.partitions = Partitions(
            self.engine,
            self.clock,
            self.membership,
            self.background,
            session_ms=session_ms,
            on_moved=lambda moved: self.connections.tell_moved(moved, self.membership.owners),
        )
        self.sessions = Sessions(self.partitions.dispatchers, self.background, session_ms)
        self.context = Context(
            settings=self.settings,
            release="1",
            http_address=lambda: "",
            payloads="file:///nowhere",
            payloads_beside=False,
            session_ms=session_ms,
            access=AccessControl(self.engine.store, enabled=False, admin_token="", jwt_keys=None),
            rates=PublishRates(self.settings.publish_rate),
            engine=self.engine,
            clock=self.clock,
            background=self.background,
            membership=self.membership,
            partitions=self.partitions,
            sessions=self.sessions,
            connections=self.connections,
            outboxes=Outboxes(self.engine, self.partitions, self.partitions.by_place),
            bodies=BodyDeletion(
                self.engine.store,
                "file:///nowhere",
                self.settings.payload_lifetime,
                background=self.background,
                partitions=self.partitions.by_place,
                connections=self.connections.all,
            ),
        )

    async def __aenter__(self) -> Self:
        await self.clock.set()
        await self.membership.join(self.partitions, f"{self.name}:9999", self.clock.now_ms())
        if self._topic is not None:
            await self.engine.create_topic(self._topic[0], TopicSettings(self._topic[1]))
            await self.membership.topics_changed()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.kill()
        await self.engine.close()

    def live(self) -> None:
        """Do from now on what a worker does from time to time: beat, look, renew sessions."""
        for period, step in (
            (self.settings.partition_lease / 3, self.membership.beat),
            (self.settings.session / 3, self.sessions.renew_sessions),
        ):
            self._alive.append(asyncio.create_task(self.background.repeat(period, step)))
        self._alive.append(asyncio.create_task(self.membership.watch()))

    async def kill(self) -> None:
        """Stop in the middle of everything."""
        self.background.stopping = True
        for task in self._alive:
            task.cancel()
        await asyncio.gather(*self._alive, return_exceptions=True)
        await self.background.cancel()
        for connection in list(self.connections.all):
            connection.abort()
        await asyncio.sleep(0.01)

    async def connect(
        self, *, handle: Handle | None = None, greet: bool = True, greeted: bool = False
    ) -> Peer:
        """Return a client, greeted; `handle` is for requests, instead of what a worker does."""
        here, there = _Transport(), _Transport()
        here.other, there.other = there, here
        reader = asyncio.StreamReader(limit=2**30)
        there.protocol = asyncio.StreamReaderProtocol(reader)
        there.protocol.connection_made(there)
        here.protocol = connection = Connection(self.context, handle or partial(answer, self.context))
        connection.greeted = greeted
        connection.connection_made(here)
        loop = asyncio.get_running_loop()
        peer = Peer(reader, asyncio.StreamWriter(there, there.protocol, reader, loop))
        if greet:
            await peer.ask(wire.Info(client="a test"), wire.InfoReply)
        return peer


def before_storing(worker: SmallWorker, hook: Callable[[int, int], Awaitable[None]]) -> None:
    """Have something awaited before each call that stores messages; it hears the partition, and how many."""
    run = worker.engine.store.run

    async def later(script: str, keys: Sequence[str], *arguments: Any) -> list[Any]:
        if place := {"partition/publish": 1, "subscription/turn": 2}.get(script):
            packed = msgspec.msgpack.decode(arguments[place])
            flat = packed[0] if script == "subscription/turn" else packed
            await hook(partition_of(keys[0])[1], len(flat) // 3)
        return await run(script, keys, *arguments)

    worker.engine.store.run = later  # type: ignore[method-assign]
