"""Keeps a broker running: the embedded server, if no Redis is given, and the worker, each a child process.

    async with supervise(Settings(port=0)) as broker:
        print(broker.address, broker.redis_url)

What crashes is started again. Leaving the block stops the worker in good order, then the server; if this
process is killed, its children follow.
"""

import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from secrets import token_hex

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from broker.config import Settings
from broker.groups import unwrapped
from broker.server import Server, ServerError, free_port

__all__ = ["Running", "SupervisorError", "supervise"]

log = logging.getLogger(__name__)

START_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
CALM_SECONDS = 30.0  # after so long, an end has nothing to do with the one before
STOP_GRACE_SECONDS = 1.0
LONGEST_REPORT = 65_536


class SupervisorError(ServerError):
    """The broker could not be started."""


@dataclass
class Running:
    """A broker that serves."""

    settings: Settings
    redis_url: str
    server: Server | None
    worker: "WorkerProcess"

    @property
    def address(self) -> str:
        """host:port that the worker listens on."""
        return self.worker.address

    @property
    def url(self) -> str:
        """What to give to a client."""
        return f"keylane://{self.address}"


@contextlib.asynccontextmanager
async def supervise(settings: Settings) -> AsyncIterator[Running]:
    """Start a broker, keep it running inside the block, stop it after."""
    if not settings.port:
        # Chosen here and not by the system at each start: clients come back to the port they know.
        settings = settings.model_copy(update={"port": free_port()})
    async with _embedded_server(settings) as server:
        redis_url = server.url if server else settings.redis
        # Nobody else uses an embedded server, so the name can stay: after a crash the partitions that
        # it holds are its own at once.
        worker = WorkerProcess(settings, redis_url, "worker-0" if server else f"worker-{token_hex(4)}")
        try:
            await worker.start()
            with unwrapped():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_keep, "worker", worker.wait, worker.start)
                    if server:
                        tasks.start_soon(_keep, "embedded server", *_in_threads(server))
                    yield Running(settings, redis_url, server, worker)
                    tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await worker.stop()


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


async def _keep(name: str, wait: Callable[[], Awaitable[int]], start: Callable[[], Awaitable[None]]) -> None:
    """Start a child again whenever it ends, with longer pauses while that does not help."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        began = anyio.current_time()
        status = await wait()
        if anyio.current_time() - began > CALM_SECONDS:
            pause = FIRST_PAUSE_SECONDS
        log.warning("the %s ended with status %s; starting it again", name, status)
        while True:
            await anyio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            try:
                await start()
            except ServerError as error:
                log.error("the %s does not start, next try in %.1f s: %s", name, pause, error)
            else:
                log.info("the %s is back", name)
                break


class WorkerProcess:
    """A worker in a child process."""

    def __init__(self, settings: Settings, redis_url: str, worker_id: str) -> None:
        self.id = worker_id
        self.address = ""
        self._settings = settings
        self._redis_url = redis_url
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        """The process id of the worker that runs now."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the process and return when the worker serves; SupervisorError says why it does not."""
        await self._discard()
        self._process = process = await anyio.open_process(
            [sys.executable, "-P", "-m", "broker.worker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            # Ctrl-C in the terminal is for the supervisor to handle.
            start_new_session=True,
        )
        try:
            with anyio.fail_after(START_SECONDS):
                report = await self._converse(process)
        except TimeoutError:
            await self._discard()
            raise SupervisorError(f"the worker was not ready within {START_SECONDS:.0f} s") from None
        if "error" in report:
            await self._discard()
            raise SupervisorError(report["error"])
        self.address = report["address"]

    async def _converse(self, process: Process) -> dict[str, str]:
        """Give the order and return the report."""
        assert process.stdin is not None
        assert process.stdout is not None
        order = {
            "settings": self._settings.model_dump(mode="json"),
            "redis_url": self._redis_url,
            "worker_id": self.id,
        }
        try:
            await process.stdin.send(json.dumps(order).encode() + b"\n")
            line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", LONGEST_REPORT)
        except (anyio.BrokenResourceError, anyio.IncompleteRead):
            status = await process.wait()
            return {"error": f"the worker ended with status {status} before it was ready; see its log above"}
        report: dict[str, str] = json.loads(line)
        return report

    async def wait(self) -> int:
        """Wait until the process ends by itself and return its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask the worker to stop; kill it when the time it has for that is over."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        # The worker keeps to the same limit by itself; this is for one that cannot.
        with anyio.move_on_after(self._settings.stop_timeout + STOP_GRACE_SECONDS) as patience:
            await self._process.wait()
        if patience.cancelled_caught:
            log.warning("the worker did not stop in time; killing it")
        await self._discard()

    async def _discard(self) -> None:
        if self._process is not None:
            with anyio.CancelScope(shield=True):
                if self._process.returncode is None:
                    self._process.kill()
                await self._process.aclose()
            self._process = None
