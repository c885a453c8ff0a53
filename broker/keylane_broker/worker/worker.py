"""A broker worker: a listening socket, the connections on it, and the partitions that it serves.

It holds nothing that it cannot lose: all state is in Redis, and what a worker does there is fenced by the
lease of the partition.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from secrets import token_hex

import anyio

from keylane import wire
from keylane.errors import BrokerError
from keylane_broker.access.control import AccessControl
from keylane_broker.access.rates import PublishRates
from keylane_broker.cluster.membership import Membership
from keylane_broker.config import Settings
from keylane_broker.counters import Counters
from keylane_broker.engine.engine import Engine
from keylane_broker.tls import server_context
from keylane_broker.worker import outboxes
from keylane_broker.worker.advertised_store import advertised, stored_in
from keylane_broker.worker.background import Background
from keylane_broker.worker.body_deletion import LOOK, BodyDeletion
from keylane_broker.worker.body_lifetime import BodyLifetime
from keylane_broker.worker.clock import Clock
from keylane_broker.worker.connection import Connection
from keylane_broker.worker.connections import Connections
from keylane_broker.worker.context import Context
from keylane_broker.worker.partitions import Partitions
from keylane_broker.worker.requests.table import handle
from keylane_broker.worker.session_renewal import Sessions

log = logging.getLogger("keylane.broker")


class Worker:
    """One process's share of the broker."""

    def __init__(self, settings: Settings, redis_url: str, *, worker_id: str | None = None) -> None:
        self.settings = settings
        self.id = worker_id or f"{socket.gethostname().partition('.')[0]}-{os.getpid()}-{token_hex(4)}"
        self.address = ""
        self._listens_on = ("", 0)
        self._stop = asyncio.Event()
        self._hands_over = True

        release, session_ms = version("keylane"), round(settings.session * 1_000)
        self.engine = engine = Engine.connect(redis_url)
        engine.store.counters = self.counters = Counters(timing=settings.metrics)
        self.clock = Clock(engine.time_ms)
        self.access = AccessControl(
            engine.store, enabled=settings.auth, admin_token=settings.admin_token, jwt_keys=settings.jwt_keys
        )
        self.rates = PublishRates(settings.publish_rate)
        self.background = Background()
        self.connections = Connections(settings, self.background, self.counters)
        self.membership = Membership(
            engine,
            self.id,
            release=release,
            lease_ms=round(settings.partition_lease * 1_000),
            rebalance_interval=settings.rebalance_interval,
        )
        self.membership.on_tokens = lambda: self.background.start(self._look_at_tokens)
        self.partitions = Partitions(
            engine,
            self.clock,
            self.membership,
            self.background,
            session_ms=session_ms,
            on_moved=self._tell_moved,
        )
        self.sessions = Sessions(self.partitions.dispatchers, self.background, session_ms)
        self.payloads, lifetime = stored_in(settings, redis_url), settings.payload_lifetime
        self.bodies = BodyDeletion(
            engine.store,
            self.payloads,
            lifetime,
            background=self.background,
            partitions=self.partitions.by_place,
            connections=self.connections.all,
        )
        self._lifetimes = BodyLifetime(
            engine, self.clock, self.bodies.store, lifetime, self.partitions.leased
        )
        self.outboxes = outboxes.Outboxes(engine, self.partitions, self.partitions.by_place)
        engine.on_outbox = self.outboxes.wake
        engine.topic_made = self.membership.topics_changed
        engine.store.on_lost = self.partitions.reacquire_leases
        engine.on_bodies_to_delete = self.bodies.wake
        engine.on_freed = self.partitions.lanes_freed
        engine.delete_bodies = self.bodies.finish
        self._context = Context(
            settings=settings,
            release=release,
            payloads=advertised(settings, redis_url),
            http_address=lambda: self.http_address,
            # On one server at a time, so what is on its disk, or its replica, of a message is so of its body.
            payloads_beside=self.payloads == redis_url and not redis_url.startswith("redis+cluster:"),
            session_ms=session_ms,
            access=self.access,
            rates=self.rates,
            engine=engine,
            clock=self.clock,
            background=self.background,
            membership=self.membership,
            partitions=self.partitions,
            sessions=self.sessions,
            connections=self.connections,
            bodies=self.bodies,
            outboxes=self.outboxes,
        )

    @property
    def local_address(self) -> str:
        """Where it can be reached from this machine, whatever it tells clients."""
        return wire.address_of(*self._listens_on)

    @property
    def http_address(self) -> str:
        """Where clients reach its HTTP port, "" where it has none."""
        host, port = self.address.rpartition(":")[0], self.settings.http_port
        return f"{host}:{port}" if host and port else ""

    async def trouble(self) -> str:
        """Return why it cannot serve right now, "" if it can: Redis runs scripts, and it has its leases."""
        if self._stop.is_set():
            return "the worker is stopping"
        try:
            async with asyncio.timeout(self.settings.partition_lease):
                await self.partitions.check_lease()
        except (BrokerError, TimeoutError) as error:
            return f"Redis does not answer: {str(error) or 'in time'}"
        if lost := self.partitions.without_lease():
            return f"{lost} of its partitions have no lease yet"
        return ""

    async def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until stop() is called or the task is cancelled."""
        settings = self.settings
        await self.clock.set()
        await self.access.open()
        context = server_context(settings)
        listener = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._context, partial(handle, self._context)),
            settings.host,
            settings.port,
            backlog=1_024,
            ssl=context,
            ssl_handshake_timeout=None if context is None else settings.heartbeat * 3,
        )
        host, port = listener.sockets[0].getsockname()[:2]
        self._listens_on = ({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
        if host in ("0.0.0.0", "::"):  # no address that a client could come back to
            host = socket.gethostname()
        self.address = settings.advertise or wire.address_of(host, port)
        log.info("worker %s listens on %s", self.id, self.address)
        try:
            await self.membership.join(
                self.partitions, self.address, self.clock.now_ms(), http=self.http_address
            )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.membership.watch)
                tasks.start_soon(self.bodies.run)
                tasks.start_soon(self.outboxes.run)
                for period, step in (
                    (settings.partition_lease / 3, self._beat),
                    (settings.session / 3, self.sessions.renew_sessions),
                    (settings.heartbeat, self._check_heartbeats),
                    (LOOK, self.bodies.look),
                    (outboxes.LOOK, self.outboxes.look),
                    (self._lifetimes.period, self._lifetimes.extend_lifetimes),
                ):
                    tasks.start_soon(self.background.repeat, period, step)
                if ready is not None:
                    ready()
                await self._stop.wait()
                with anyio.move_on_after(settings.stop_timeout):
                    await self._finish(listener)
                tasks.cancel_scope.cancel()
        finally:
            listener.close()
            with anyio.CancelScope(shield=True):
                await self.background.cancel()
            for connection in list(self.connections.all):
                connection.abort()
            with anyio.CancelScope(shield=True):
                await self.bodies.close()
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
                await self.membership.leave(self.settings.stop_timeout / 2)
        self.background.stopping = True
        listener.close()
        for connection in self.connections.all:
            connection.stop_waiting()
        await self.partitions.finish_calls()
        await self.background.wait(self.settings.stop_timeout / 2)
        with contextlib.suppress(BrokerError):
            await self.sessions.renew_sessions()
        released = 0
        with contextlib.suppress(BrokerError):
            released = await self.partitions.release_leases()
            await self.membership.depart()
        for connection in list(self.connections.all):
            connection.close()
        log.info("worker %s gave up %d partitions and stops", self.id, released)

    async def _beat(self) -> None:
        """Renew the leases and say that we are here; then learn the time, and who is no longer let in."""
        await self.membership.beat()
        await self._look_at_tokens()
        await self.clock.set()

    async def _look_at_tokens(self) -> None:
        await self.access.refresh()
        self.connections.check_access(self.access)

    async def _check_heartbeats(self) -> None:
        self.connections.check_heartbeats(asyncio.get_running_loop().time() - 3 * self.settings.heartbeat)

    def _tell_moved(self, moved: set[str]) -> None:
        self.connections.tell_moved(moved, self.membership.owners)
