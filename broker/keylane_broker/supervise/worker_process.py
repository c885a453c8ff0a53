"""A worker in a child process: how it starts, what it is told, and how it ends."""

import contextlib
import json
import logging
import signal
import subprocess
import sys

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from keylane_broker.config import Settings
from keylane_broker.errors import ServerError

__all__ = ["SupervisorError", "WorkerProcess"]

log = logging.getLogger("keylane.broker")

START_SECONDS = 30.0
STOP_GRACE_SECONDS = 1.0
LONGEST_REPORT = 65_536


class SupervisorError(ServerError):
    """The broker could not be started."""


class WorkerProcess:
    """A worker in a child process."""

    def __init__(self, settings: Settings, redis_url: str, worker_id: str) -> None:
        self.id = worker_id
        self.address = ""
        self._settings = settings
        self._redis_url = redis_url
        self._process: Process | None = None
        self._serves = False
        self._told = False  # to stop: a second signal could hit it when it does not listen any more

    @property
    def http_url(self) -> str:
        """Where it serves HTTP, "" where it does not."""
        settings = self._settings
        host = self.address.rpartition(":")[0]
        scheme = "https" if settings.tls_cert else "http"
        return f"{scheme}://{host}:{settings.http_port}" if settings.http_port and host else ""

    @property
    def pid(self) -> int:
        """The process id of the worker that runs now."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the process and return when the worker serves; SupervisorError says why it does not."""
        await self._discard()
        self._process = process = await self._open()
        try:
            with anyio.fail_after(START_SECONDS):
                report = await self._converse(process)
        except TimeoutError:
            await self._discard()
            raise SupervisorError(f"{self.id} was not ready within {START_SECONDS:.0f} s") from None
        if "error" in report:
            await self._discard()
            raise SupervisorError(report["error"])
        self.address = report["address"]
        self._serves = True

    async def _open(self) -> Process:
        try:
            return await anyio.open_process(
                [sys.executable, "-P", "-m", "keylane_broker.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None,
                # Ctrl-C in the terminal is for the supervisor to handle.
                start_new_session=True,
            )
        except OSError as error:
            # uvloop says no more than that it is error -1.
            raise SupervisorError(
                f"{self.id} cannot be started: {error}; the system may be out of files, processes or memory"
            ) from error

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
            return {"error": f"{self.id} ended with status {status} before it was ready; see its log above"}
        report: dict[str, str] = json.loads(line)
        return report

    async def wait(self) -> int:
        """Wait until the process ends and return its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, *, hand_over: bool) -> None:
        """End the worker in good order; kill it when the time it has for that is over.

        With `hand_over` its partitions go to other workers first; without, nobody is to have them after it.
        """
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if not self._serves:
                process.kill()  # it does not listen yet, and has nothing to give up
            elif not self._told:
                self._told = True
                process.send_signal(signal.SIGTERM if hand_over else signal.SIGINT)
        # The worker keeps to the same limit by itself; this is for one that cannot.
        with anyio.move_on_after(self._settings.stop_timeout + STOP_GRACE_SECONDS) as patience:
            await process.wait()
        if patience.cancelled_caught:
            log.warning("%s did not stop in time; killing it", self.id)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _discard(self) -> None:
        self._serves = self._told = False
        if self._process is not None:
            with anyio.CancelScope(shield=True):
                if self._process.returncode is None:
                    self._process.kill()
                await self._process.aclose()
            self._process = None

    async def close(self) -> None:
        """Leave nothing of the process behind."""
        await self._discard()
