"""A broker to test with: a real server and a real worker process, each of which can be killed."""

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from broker.config import Settings
from broker.server import Server, free_port


class RunningBroker:
    """One worker on one server; a context manager that leaves nothing behind."""

    def __init__(self, server: Server | str | None = None, **settings: Any) -> None:
        """Settings as in broker.config; `server` is one that others use too, or the URL of a Redis."""
        settings.setdefault("port", free_port())
        self.settings = Settings(**settings)
        self.server = Server() if server is None else server
        self._own = server is None
        self._worker: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed on exit

    @property
    def url(self) -> str:
        """What to give to a client."""
        return f"keylane://127.0.0.1:{self.settings.port}"

    @property
    def redis_url(self) -> str:
        """Where the state is."""
        return self.server if isinstance(self.server, str) else self.server.url

    @property
    def pid(self) -> int:
        """The process id of the worker."""
        assert self._worker is not None
        return self._worker.pid

    def __enter__(self) -> Self:
        if self._own and isinstance(self.server, Server):
            self.server.start()
        self.start_worker()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._worker is not None:
                self.stop_worker()
        finally:
            if self._own and isinstance(self.server, Server):
                self.server.stop()
            self._log.close()

    def start_worker(self) -> None:
        """Start a worker on the same port as ever, and return when it serves."""
        command = [sys.executable, "-P", "-m", "broker.worker_process"]
        root = Path(__file__).resolve().parent.parent
        pipe = subprocess.PIPE
        self._worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log, cwd=root)
        order = {
            "settings": self.settings.model_dump(mode="json"),
            "redis_url": self.redis_url,
            "worker_id": "worker-0",
        }
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.write(json.dumps(order).encode() + b"\n")
        self._worker.stdin.flush()
        report = self._worker.stdout.readline()
        assert b"address" in report, (report, self.log())

    def kill_worker(self) -> None:
        """End it with SIGKILL."""
        self._end(signal.SIGKILL)

    def stop_worker(self) -> int:
        """End it with SIGTERM; answers its exit status."""
        return self._end(signal.SIGTERM)

    def log(self) -> str:
        """What the workers have logged so far."""
        self._log.seek(0)
        text = self._log.read().decode()
        self._log.seek(0, 2)
        return text

    def _end(self, how: signal.Signals) -> int:
        worker, self._worker = self._worker, None
        assert worker is not None
        worker.send_signal(how)
        status = worker.wait(20)
        for pipe in (worker.stdin, worker.stdout):
            assert pipe is not None
            pipe.close()
        return status
