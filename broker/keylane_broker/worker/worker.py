"""A broker worker: a listening socket, the connections on it, and the partitions that it serves.

It holds nothing that it cannot lose: all state is in Redis, and what a worker does there is fenced by the
lease of the partition.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from importlib.metadata import version
from secrets import token_hex
from typing import Annotated, Any

import anyio
from msgspec import Meta

from keylane import wire
from keylane.errors import (
    BrokerError,
    InvalidArgument,
    Overloaded,
    SubscriptionNotFound,
    TopicNotFound,
    Unavailable,
)
from keylane_broker.cluster.membership import Member, NotOwner
from keylane_broker.config import Settings
from keylane_broker.engine.checks import check_abouts, check_dues, check_flat, check_int
from keylane_broker.engine.engine import Engine
from keylane_broker.limits import MAX_PARTITIONS
from keylane_broker.logs import Trouble
from keylane_broker.store.durability import replicas
from keylane_broker.store.keys import check_name, partition_keys
from keylane_broker.worker import eager
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.consumer import Consumer
from keylane_broker.worker.crowd import Crowd
from keylane_broker.worker.dispatcher import Dispatcher
from keylane_broker.worker.disposal import LOOK, Disposal
from keylane_broker.worker.keeping import Keeping
from keylane_broker.worker.partition import Partition
from keylane_broker.worker.requests import table as commands

log = logging.getLogger(__name__)

_PROMPT = 0.1  # seconds within which an answer of Redis tells the time
_AGAIN = 0.2  # seconds until something that is done from time to time is tried again
_AT_ONCE, _BETWEEN = 100, 0.01  # sessions are renewed of so many partitions at once, every so many seconds
_PATIENCE = 1.0  # seconds for the sessions of a partition, at least
_TEXTS = Annotated[list[str], Meta(max_length=wire.MAX_BATCH * 3)]  # bounded before memory is set aside


class Worker:
    """One process's share of the broker."""

    def __init__(self, settings: Settings, redis_url: str, *, worker_id: str | None = None) -> None:
        self.settings = settings
        self.redis_url = redis_url
        self.id = worker_id or f"{socket.gethostname().partition('.')[0]}-{os.getpid()}-{token_hex(4)}"
        self.address = ""
        self.release = version("keylane")
        self.engine = Engine.connect(redis_url)
        self.engine.store.on_lost = self._doubt
        self.payloads = (
            settings.payloads or redis_url
        )  # where clients have their bodies, unless they say otherwise
        # On one server at a time, so what is on its disk, or its replica, of a message is so of its body.
        self.payloads_beside = not settings.payloads and not redis_url.startswith("redis+cluster:")
        self.lease_ms = round(settings.partition_lease * 1_000)
        self.session_ms = round(settings.session * 1_000)
        self.partitions: dict[tuple[str, int], Partition] = {}  # that are its own, as far as it knows
        self.consumers: dict[tuple[str, str, str], Consumer] = {}  # by topic, subscription and name
        self.crowds: dict[tuple[str, str], Crowd] = defaultdict(Crowd)  # by topic and subscription
        self.connections: set[Connection] = set()
        self.stopping = False
        self.inflight = 0  # bytes of publishes under way
        self.buffered = 0  # bytes of frames that are not complete yet
        self.unsent = 0  # bytes that wait for clients to read, at most
        self.held_back: set[Connection] = set()  # not listened to for now
        self.member = Member(self)
        self._ahead_ms = 0.0  # the clock of Redis minus our monotonic one
        self.disposal = Disposal(self)
        self.keeping = Keeping(self, self.disposal.store)
        self.engine.on_doomed = self.disposal.wake
        self.engine.dispose = self.disposal.finish
        self._stop = asyncio.Event()
        self._hands_over = True
        self._missed: set[Dispatcher] = set()  # whose sessions are about to be renewed
        # serve() awaits them; a task group's own way to start one takes several times as long.
        self._tasks: set[asyncio.Task[None]] = set()

    # Life

    async def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until stop() is called or the task is cancelled."""
        loop = asyncio.get_running_loop()
        await self.set_clock()
        listener = await loop.create_server(
            lambda: Connection(self), self.settings.host, self.settings.port, backlog=1_024
        )
        host, port = listener.sockets[0].getsockname()[:2]
        if host in ("0.0.0.0", "::"):  # no address that a client could come back to
            host = socket.gethostname()
        self.address = self.settings.advertise or wire.address_of(host, port)
        log.info("worker %s listens on %s", self.id, self.address)
        try:
            await self.member.join()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.member.watch)
                tasks.start_soon(self.disposal.run)
                for period, step in (
                    (self.settings.partition_lease / 3, self.member.beat),
                    (self.settings.session / 3, self._renew_sessions),
                    (self.settings.heartbeat, self._check_heartbeats),
                    (LOOK, self.disposal.look),
                    (self.keeping.period, self.keeping.step),
                ):
                    tasks.start_soon(self._repeat, period, step)
                if ready is not None:
                    ready()
                await self._stop.wait()
                with anyio.move_on_after(self.settings.stop_timeout):
                    await self._finish(listener)
                tasks.cancel_scope.cancel()
        finally:
            listener.close()
            for task in self._tasks:
                task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(*self._tasks, return_exceptions=True)
            for connection in list(self.connections):
                connection.abort()
            with anyio.CancelScope(shield=True):
                await self.disposal.close()
            await self.engine.close()

    def stop(self, *, hand_over: bool = True) -> None:
        """Stop in good order: hand the partitions over, finish what is under way, then serve() returns.

        Without `hand_over` they are given up for whoever comes next: the whole broker stops.
        """
        self._hands_over = self._hands_over and hand_over
        self._stop.set()

    async def _finish(self, listener: asyncio.Server) -> None:
        """Answer what was asked; consumers keep their leases, for they will go on with the next worker."""
        if self._hands_over:
            with contextlib.suppress(BrokerError):
                await self.member.leave(self.settings.stop_timeout / 2)
        self.stopping = True
        listener.close()
        for connection in self.connections:
            connection.stop_waiting()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.settings.stop_timeout / 2)
        with contextlib.suppress(BrokerError):
            await self._renew_sessions()
        leases = [partition.held for partition in self.partitions.values() if partition.held]
        with contextlib.suppress(BrokerError):
            await self.engine.release_all(leases)
            await self.member.depart()
        for connection in list(self.connections):
            connection.close()
        log.info("worker %s gave up %d partitions and stops", self.id, len(leases))

    def start(self, step: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run something in the background, for as long as the worker runs; it begins at once."""
        task = eager.start(self._guard(step, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, step: Callable[..., Awaitable[object]], arguments: tuple[object, ...]) -> None:
        try:
            await step(*arguments)
        except BrokerError as error:
            log.warning("%s: %s", getattr(step, "__qualname__", step), error)
        except Exception:
            log.exception("a bug in %s; the worker goes on", getattr(step, "__qualname__", step))

    async def _repeat(self, period: float, step: Callable[[], Awaitable[None]]) -> None:
        wait = period
        trouble = Trouble(log, step.__name__.strip("_"))
        while True:
            await asyncio.sleep(wait)
            wait = period
            try:
                await step()
                trouble.is_over()
            except BrokerError as error:
                trouble.goes_on(error)
                wait = min(period, _AGAIN)
            except Exception:
                log.exception("a bug in %s; the worker goes on", step.__name__)

    # Time

    def now_ms(self) -> int:
        """The cluster's time, which is that of Redis."""
        return int(time.monotonic() * 1_000 + self._ahead_ms)

    async def set_clock(self) -> None:
        """Learn the time of Redis."""
        before = time.monotonic()
        redis_ms = await self.engine.time_ms()
        now = time.monotonic()
        if not self._ahead_ms or now - before < _PROMPT:
            self._ahead_ms = redis_ms - (before + now) * 500

    # What is done from time to time

    async def renew_leases(self) -> None:
        """Extend all partition leases at once."""
        held = [partition for partition in self.partitions.values() if partition.held]
        leases = [partition.held for partition in held if partition.held]
        if leases:
            until = time.monotonic() + self.lease_ms / 1_000
            kept = await self.engine.renew(leases, self.lease_ms)
            for partition, lease, state in zip(held, leases, kept, strict=True):
                if state and partition.held is lease:
                    partition.kept_until = until
                elif state is False:
                    partition.lose(lease)
            if None in kept:
                raise Unavailable(f"{kept.count(None)} of {len(kept)} leases could not be renewed")

    async def _renew_sessions(self) -> None:
        """Tell Redis which consumers are still here."""
        dispatchers = [
            dispatcher
            for partition in self.partitions.values()
            for dispatcher in partition.dispatchers.values()
            if dispatcher.consumers
        ]
        # Some at a time: so many calls at once would keep everybody else waiting, and the leases' renewal.
        pause = min(_BETWEEN, self.settings.session / 9 * _AT_ONCE / max(1, len(dispatchers)))
        renewed = await asyncio.gather(
            *(self._renew(one, number // _AT_ONCE * pause) for number, one in enumerate(dispatchers))
        )
        if not all(renewed):
            raise Unavailable(f"{renewed.count(False)} of {len(renewed)} subscriptions could not be renewed")

    def miss(self, consumers: Iterable[Consumer]) -> None:
        """Consumers have gone without a word: renew the others, so that no new owner waits for these."""
        for dispatcher in {d for consumer in consumers for d in consumer.dispatchers.values()}:
            if dispatcher not in self._missed:
                self._missed.add(dispatcher)
                asyncio.get_running_loop().call_later(_AGAIN, self.start, self._renew_missed, dispatcher)

    async def _renew_missed(self, dispatcher: Dispatcher) -> None:
        self._missed.discard(dispatcher)
        if not self.stopping:
            await self._renew(dispatcher)

    async def _renew(self, dispatcher: Dispatcher, wait: float = 0.0) -> bool:
        """Renew the sessions of one partition and subscription; its trouble is not that of others."""
        if wait:
            await asyncio.sleep(wait)
        try:
            # One node of a Redis Cluster that is silent must not cost the sessions on the others.
            async with asyncio.timeout(max(self.session_ms / 3_000, _PATIENCE)):
                lost = await dispatcher.partition.call(
                    lambda engine, lease: engine.touch_all(
                        lease, dispatcher.subscription, list(dispatcher.consumers), self.session_ms
                    ),
                    dispatcher.incarnation,
                )
            dispatcher.part_with(lost)
        except TimeoutError:
            return False
        except BrokerError as error:
            log.debug("%s: %s", dispatcher, error)
            dispatcher.feed()
            return isinstance(error, (TopicNotFound, SubscriptionNotFound, NotOwner))
        return True

    async def _check_heartbeats(self) -> None:
        """Ask every client for a sign of life, and close those that gave none."""
        silent = asyncio.get_running_loop().time() - 3 * self.settings.heartbeat
        for connection in list(self.connections):
            if connection.silent_since(silent):
                log.info("%s has been silent for too long", connection.peer)
                connection.abort()
            elif connection.greeted:
                connection.send(wire.Heartbeat())

    # Connections

    def admit(self, connection: Connection) -> BrokerError | None:
        """Know a new connection, or say why it cannot be."""
        if self.stopping:
            return Unavailable("the worker is stopping")
        if len(self.connections) >= self.settings.max_connections:
            return Overloaded(f"the worker has {len(self.connections)} connections, as many as it may have")
        self.connections.add(connection)
        return None

    def forget(self, connection: Connection) -> None:
        """A connection has ended."""
        self.connections.discard(connection)
        self.disposal.gone(connection)
        self.held_back.discard(connection)

    @property
    def crowded(self) -> bool:
        """Whether more publishes wait for Redis than memory is set aside for."""
        return self.inflight > self.settings.max_inflight_bytes

    def relieve(self) -> None:
        """Listen again to those that were held back, if there is room again."""
        if self.held_back and not self.crowded:
            for connection in list(self.held_back):
                connection.regulate()

    def drop_the_largest(self) -> None:
        """Close the connection that keeps most memory busy with a frame that does not end."""
        largest = max(self.connections, key=lambda connection: connection.waiting)
        log.warning("closing %s: %d bytes of an unfinished frame", largest.peer, largest.waiting)
        largest.send(wire.Error("overloaded", "too many unfinished frames; send this one again later"))
        largest.close()

    def drop_slow_readers(self) -> None:
        """Close the connections that most waits for, if it is too much for all of them together."""
        for connection in self.connections:
            connection.measure()
        while self.unsent > self.settings.max_unsent_bytes:
            slowest = max(self.connections, key=lambda connection: connection.unsent, default=None)
            if (
                slowest is None or not slowest.unsent
            ):  # it waits for such as were not let in, and end by themselves
                return
            log.warning("closing %s: %d bytes wait for it to read", slowest.peer, slowest.unsent)
            self.unsent -= slowest.unsent
            slowest.unsent = 0
            slowest.abort()

    # Partitions

    @property
    def holds_any(self) -> bool:
        """Whether there is a partition that this worker has the lease of."""
        return any(partition.held or partition.leaving for partition in self.partitions.values())

    def follow(self, moved: set[str]) -> None:
        """Topics have partitions with new owners: take those that are ours, hand over those that are not."""
        for topic in moved:
            for connection in self.connections:
                if topic in connection.topics:
                    connection.send(wire.Moved(topic))
                    if topic not in self.member.owners:  # it was deleted
                        connection.topics.discard(topic)
        leaving = []
        for (topic, number), partition in list(self.partitions.items()):
            owner = self.member.owner(topic, number)
            if owner is None and topic in moved and topic not in self.member.owners:
                partition.close(TopicNotFound(f"topic {topic!r} was deleted"))
            elif owner not in (None, self.id) and not partition.leaving:
                leaving.append(partition)
        # Those with calls under way go by themselves, so that they hold up nobody.
        for group in ([p for p in leaving if not p.busy], *([p] for p in leaving if p.busy)):
            if group:
                self.start(self._hand_over, group)
        for topic, owners in self.member.owners.items():
            for number, owner in enumerate(owners):
                if owner == self.id and not self.stopping:
                    partition = self.partition(topic, number)
                    if partition.held is None and not partition.taking:
                        self.start(self._claim, partition)

    async def _claim(self, partition: Partition) -> None:
        """Take the lease of a partition that is ours, before anybody asks for it."""
        try:
            await partition.lease()
        except BrokerError as error:
            log.debug("%s: %s", partition, error)

    async def _hand_over(self, partitions: list[Partition]) -> None:
        """Give partitions to their new owners, when what is under way has ended."""
        parted = await asyncio.gather(*(partition.part() for partition in partitions))
        leases = [lease for lease in parted if lease is not None]
        try:
            if leases:
                await self.engine.release_all(leases)
                await self.engine.announce("released")
        finally:
            for partition in partitions:
                partition.leave()
        if leases:
            log.info("handed over %d partitions", len(leases))
        self.member.stir()

    def _doubt(self, doubtful: Callable[[str], bool]) -> None:
        """Redis may have lost its newest writes: take the leases anew, so that no id is given twice."""
        self.member.doubt()
        for partition in self.partitions.values():
            if partition.held and doubtful(partition_keys(partition.topic, partition.number).lease):
                partition.doubt()

    def feed(self, topic: str | None = None, subscription: str | None = None) -> None:
        """Let the dispatchers of a subscription look again, or all."""
        for partition in list(self.partitions.values()):
            if topic in (None, partition.topic):
                for name, dispatcher in list(partition.dispatchers.items()):
                    if subscription in (None, name):
                        dispatcher.look_again()

    # What connections ask for

    def partition(self, topic: str, number: int) -> Partition:
        """A partition to serve, perhaps one that has no owner yet; NotOwner if another worker serves it."""
        partition = self.partitions.get((topic, number))
        if partition is None:
            if self.stopping:
                raise Unavailable("the worker is stopping")
            check_name("topic", topic)
            check_int("partition", number, 0, MAX_PARTITIONS - 1)
            if self.member.owner(topic, number) not in (None, self.id):
                raise self.member.not_owner(topic, number)
            partition = self.partitions[topic, number] = Partition(self, topic, number)
        return partition

    def check_publish(self, request: wire.Publish, body: memoryview) -> list[str]:
        """The messages of a PUBLISH, if they can be published."""
        if self.stopping:
            raise Unavailable("the worker is stopping")
        flat: list[str] = wire.unpack(body, _TEXTS)
        check_flat(flat)
        check_abouts(flat)
        replicas(request.durability)
        if not 0 < request.timeout_ms <= 60_000:
            raise InvalidArgument(f"timeout_ms is {request.timeout_ms}: use 1 to 60000")
        if request.due_ms is not None:
            check_dues(flat, request.due_ms)
        return flat

    async def carry_out(self, connection: Connection, frame: wire.Frame) -> tuple[Any, bytes]:
        """Answer any request that is not a PUBLISH."""
        return await commands.carry_out(self, connection, frame)
