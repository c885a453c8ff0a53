"""A broker to test with: a real server and real worker processes, each of which can be killed."""

import json
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import urlsplit

from keylane_broker.config import Settings
from keylane_broker.ports import free_port
from keylane_broker.supervise.embedded_server import Server
from tests.support.forked import PIPE, Forked

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 60.0


@dataclass
class RunningWorker:
    """The place of a worker: its name and port stay, its process may come and go."""

    id: str
    settings: Settings
    process: Forked | None = None
    paused: bool = False


class RunningBroker:
    """Workers on a server; a context manager that leaves nothing behind.

    Methods that take a worker mean the first one unless told which.
    """

    def __init__(
        self,
        server: Server | str | None = None,
        *,
        workers: int = 1,
        name: str = "worker",
        http: bool = False,
        **settings: Any,
    ) -> None:
        """Settings as in keylane_broker.config; `server` is one that others use too, or the URL of a Redis.

        On a server that several brokers use, each needs a name, with which those of its workers begin.
        """
        settings.setdefault("port", free_port())
        self.settings = Settings(**settings)  # those of the first worker
        self.server = Server() if server is None else server
        self.workers: list[RunningWorker] = []
        self._name = name
        self._own = server is None
        self._http = http
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed on exit
        for _ in range(workers):
            self._make_place()

    @property
    def url(self) -> str:
        """What to give to a client: all workers are seeds."""
        return f"keylane://{','.join(url.removeprefix('keylane://') for url in self.urls)}"

    @property
    def urls(self) -> list[str]:
        """The URL of each worker alone."""
        return [f"keylane://127.0.0.1:{worker.settings.port}" for worker in self.workers]

    @property
    def http_urls(self) -> list[str]:
        """Where each worker serves HTTP."""
        return [f"http://127.0.0.1:{worker.settings.http_port}" for worker in self.workers]

    @property
    def ids(self) -> list[str]:
        """The names of the workers."""
        return [worker.id for worker in self.workers]

    @property
    def redis_url(self) -> str:
        """Where the state is."""
        return self.server if isinstance(self.server, str) else self.server.url

    @property
    def pid(self) -> int:
        """The process id of the first worker."""
        return self.pid_of(0)

    def pid_of(self, worker: int) -> int:
        """The process id of a worker."""
        return self._process(worker).pid

    def __enter__(self) -> Self:
        try:
            if self._own and isinstance(self.server, Server):
                self.server.start()
            for place in self.workers:
                self._launch(place)
            for place in self.workers:
                self._await_report(place)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the whole broker: no worker takes over what another gives up."""
        try:
            running = [number for number, place in enumerate(self.workers) if place.process]
            for number in running:
                self.resume(number)
                self._process(number).send_signal(signal.SIGINT)
            for number in running:
                self._end(number)
            self._check_secrets()
        finally:
            if self._own and isinstance(self.server, Server):
                self.server.stop()
            self._log.close()

    def _check_secrets(self) -> None:
        """Whatever a test was about: nothing has got into the log that nobody may read there."""
        for secret in (
            self.settings.admin_token,
            *(urlsplit(url).password for url in (self.redis_url, self.settings.payloads)),
        ):
            assert not secret or secret not in self.log(), "there is a secret in the log"

    def start_worker(self, worker: int = 0) -> None:
        """Start a worker on the same port as ever, and return when it serves."""
        self._launch(self.workers[worker])
        self._await_report(self.workers[worker])

    def add_worker(self) -> int:
        """Start one more worker, and return its number when it serves."""
        self._make_place()
        self.start_worker(len(self.workers) - 1)
        return len(self.workers) - 1

    def kill_worker(self, worker: int = 0) -> None:
        """End it with SIGKILL."""
        self._end(worker, signal.SIGKILL)

    def stop_worker(self, worker: int = 0) -> int:
        """End it with SIGTERM; answers its exit status."""
        return self._end(worker, signal.SIGTERM)

    def pause(self, worker: int = 0) -> None:
        """Stop its process with SIGSTOP: it neither answers nor knows that time passes."""
        if not self.workers[worker].paused:
            self._process(worker).stop()
            self.workers[worker].paused = True

    def resume(self, worker: int = 0) -> None:
        """Let a paused one go on."""
        if self.workers[worker].paused:
            self._process(worker).send_signal(signal.SIGCONT)
            self.workers[worker].paused = False

    def log(self) -> str:
        """What the workers have logged so far."""
        self._log.seek(0)
        text = self._log.read().decode()
        self._log.seek(0, 2)
        return text

    def _make_place(self) -> None:
        number = len(self.workers)
        taken = {place.settings.port for place in self.workers}
        port = self.settings.port if number == 0 else free_port()
        while port in taken:
            port = free_port()
        settings = self.settings.of_worker(number, port, free_port() if self._http else 0)
        self.workers.append(RunningWorker(f"{self._name}-{number}", settings))

    def _process(self, worker: int) -> Forked:
        process = self.workers[worker].process
        assert process is not None, f"{self.workers[worker].id} does not run"
        return process

    def _launch(self, place: RunningWorker) -> None:
        assert place.process is None, f"{place.id} runs already"
        place.process = Forked("worker", stdin=PIPE, stdout=PIPE, stderr=self._log, folder=ROOT)
        order = {
            "settings": place.settings.model_dump(mode="json"),
            "redis_url": self.redis_url,
            "worker_id": place.id,
        }
        assert place.process.stdin is not None
        place.process.stdin.write(json.dumps(order).encode() + b"\n")
        place.process.stdin.flush()

    def _await_report(self, place: RunningWorker) -> None:
        assert place.process is not None
        assert place.process.stdout is not None
        report = place.process.stdout.readline()
        assert b"address" in report, (report, self.log())

    def _end(self, worker: int, how: signal.Signals | None = None) -> int:
        process = self._process(worker)
        if how is not None:
            process.send_signal(how)
        try:
            status = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"{self.workers[worker].id} did not end:\n{self.log()}") from None
        finally:
            self.workers[worker].process = None
            self.workers[worker].paused = False
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        return status


def broker_with_scripts_of_its_own(folder: Path) -> Path:
    """Copy the broker's package and its scripts, for a test that changes these; returns the scripts' folder.

    Workers run the copy if `folder` is the first of PYTHONPATH.
    """
    package = folder / "keylane_broker"
    shutil.copytree(ROOT / "broker" / "keylane_broker", package)
    return package / "lua"
