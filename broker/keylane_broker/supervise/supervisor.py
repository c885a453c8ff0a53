"""Keeps a broker running: the embedded server, if no Redis is given, and the workers, each a child process.

    async with supervise(Settings(port=0, workers=4)) as broker:
        print(broker.url, broker.redis_url)

What crashes is started again, and nothing else is disturbed. Leaving the block stops the workers in good
order, then the server; if this process is killed, its children follow.
"""

import contextlib
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex

import anyio

from keylane_broker.config import Settings
from keylane_broker.errors import ServerError, unwrapped
from keylane_broker.inspect.fitness import require_fit
from keylane_broker.ports import check_free, choose_ports
from keylane_broker.supervise.embedded_server import Server
from keylane_broker.supervise.open_files import allow_connections
from keylane_broker.supervise.restarts import Restarter
from keylane_broker.supervise.worker_process import SupervisorError, WorkerProcess
from keylane_broker.tls import server_context

__all__ = ["Running", "SupervisorError", "supervise"]

log = logging.getLogger("keylane.broker")


@dataclass
class Running:
    """A broker that serves."""

    settings: Settings
    redis_url: str
    server: Server | None
    workers: list[WorkerProcess]
    _restart: anyio.Event = field(default_factory=anyio.Event)

    @property
    def addresses(self) -> list[str]:
        """host:port of each worker, as clients are told."""
        return [worker.address for worker in self.workers]

    @property
    def http_url(self) -> str:
        """Where the first worker serves HTTP, "" where none does."""
        return self.workers[0].http_url

    @property
    def url(self) -> str:
        """What to give to a client."""
        return f"keylane{'s' if self.settings.tls_cert else ''}://{','.join(self.addresses)}"

    def restart(self) -> None:
        """Replace one worker after the other; asked for again meanwhile, do it once more after that."""
        self._restart.set()

    async def restart_when_asked(self, restarters: list[Restarter]) -> None:
        """Do so, for ever."""
        while True:
            await self._restart.wait()
            self._restart = anyio.Event()
            try:
                check_files(self.settings)  # else each worker would end, and none could begin
            except ServerError as error:
                log.error("no rolling restart, the workers go on with what they have read: %s", error)
                continue
            log.info("rolling restart of %d workers", len(self.workers))
            for number, (worker, restarter) in enumerate(zip(self.workers, restarters, strict=True), 1):
                # The others take its partitions over before it ends; for one alone nobody does.
                await restarter.replace(
                    partial(worker.stop, hand_over=len(self.workers) > 1 or not self.server)
                )
                log.info("rolling restart: worker %d of %d is back", number, len(self.workers))
            log.info("rolling restart: done")


@contextlib.asynccontextmanager
async def supervise(settings: Settings) -> AsyncIterator[Running]:
    """Start a broker, keep it running inside the block, stop it after."""
    ports, http_ports = ports_of(settings)
    # What all of the workers would find out is said once, before anything runs.
    check_free(settings.host, ports)
    if settings.http_port:
        check_free(settings.host, http_ports, "--http-port")
    check_files(settings)
    allow_connections(settings.max_connections)
    if settings.redis:
        await require_fit(settings.redis)
    async with _embedded_server(settings) as server:
        redis_url = server.url if server else settings.redis
        workers = _workers(
            settings, list(zip(ports, http_ports, strict=True)), redis_url, embedded=server is not None
        )
        broker = Running(settings, redis_url, server, workers)
        restarters = [Restarter(worker.id, worker.wait, worker.start) for worker in workers]
        try:
            await _start(workers)
            with unwrapped():
                async with anyio.create_task_group() as tasks:
                    if server:
                        tasks.start_soon(Restarter("the embedded server", *_in_threads(server)).run)
                    for restarter in restarters:
                        tasks.start_soon(restarter.run)
                    tasks.start_soon(broker.restart_when_asked, restarters)
                    yield broker
                    tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                # Nobody else uses an embedded server; on another there may be workers of other machines.
                await _stop(workers, hand_over=server is None)


def check_files(settings: Settings) -> None:
    """Raise ServerError if there is a file that a worker would not start with."""
    server_context(settings)
    if settings.auth and settings.jwt_keys is not None:
        from keylane_broker.access.jwt_keys import JwtKeys  # slow to import

        JwtKeys(settings.jwt_keys)


def ports_of(settings: Settings) -> tuple[list[int], list[int]]:
    """Return the port and the HTTP port of each worker; where ports are to be free ones, so are those."""
    ports = choose_ports(settings.port, settings.workers)
    if not settings.http_port:
        return ports, [0] * len(ports)
    first = settings.http_port if settings.port else 0
    return ports, choose_ports(first, settings.workers, ports)


def _workers(
    settings: Settings, ports: list[tuple[int, int]], redis_url: str, *, embedded: bool
) -> list[WorkerProcess]:
    """Return one for each pair of ports; these and its name stay however often it is started again."""
    # Nobody else uses an embedded server, so these names can be the same for ever: after a crash the
    # partitions that a worker holds are its own at once.
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().partition(".")[0])
    prefix = "worker" if embedded else f"{host or 'worker'}-{token_hex(3)}"
    return [
        WorkerProcess(settings.of_worker(number, *pair), redis_url, f"{prefix}-{number}")
        for number, pair in enumerate(ports)
    ]


async def _start(workers: list[WorkerProcess]) -> None:
    """Start all at once; if some cannot, say why."""
    errors: list[str] = []

    async def start(worker: WorkerProcess) -> None:
        try:
            await worker.start()
        except SupervisorError as error:
            errors.append(str(error))

    async with anyio.create_task_group() as tasks:
        for worker in workers:
            tasks.start_soon(start, worker)
    if errors:
        raise SupervisorError("; ".join(dict.fromkeys(errors)))


async def _stop(workers: list[WorkerProcess], *, hand_over: bool) -> None:
    """Stop all at once, so that none takes over what the next gives up."""
    async with anyio.create_task_group() as tasks:
        for worker in workers:
            tasks.start_soon(partial(worker.stop, hand_over=hand_over))
    for worker in workers:
        await worker.close()


@contextlib.asynccontextmanager
async def _embedded_server(settings: Settings) -> AsyncIterator[Server | None]:
    if settings.redis:
        yield None
        return
    server = Server(data_dir=settings.data_dir)
    try:
        await anyio.to_thread.run_sync(server.start)
        yield server
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(server.stop)


def _in_threads(server: Server) -> tuple[Callable[[], Awaitable[int]], Callable[[], Awaitable[None]]]:
    async def wait() -> int:
        return await anyio.to_thread.run_sync(server.wait, abandon_on_cancel=True)

    async def start() -> None:
        await anyio.to_thread.run_sync(server.start)

    return wait, start
