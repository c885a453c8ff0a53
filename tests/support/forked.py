"""Workers and commands as processes that start in milliseconds: forked off one that has imported them.

Importing is most of what a command does, and half a second of what each worker does. All the rest is as
ever: a process with an id, an environment, pipes, signals and an exit status. Where PYTHONPATH has changed it
imports Keylane anew.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO, Literal

from tests.support import nursery

PIPE = subprocess.PIPE
Program = Literal["keylane", "worker"]
Stream = IO[bytes] | int | None


class Forked:
    """A process, much like one of subprocess."""

    def __init__(
        self,
        program: Program,
        *arguments: str,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
        new_session: bool = False,
    ) -> None:
        """Start it; streams, environment and folder are this process's own unless given."""
        order = {
            "program": program,
            "arguments": [program, *arguments],
            "environment": dict(os.environ if environment is None else environment),
            "folder": str(folder or Path.cwd()),
            "session": new_session,
        }
        self.returncode: int | None = None
        status, teller = os.pipe()
        self._status = open(status, "rb", 0)  # noqa: SIM115 - says what has become of it, line by line
        theirs_in, self.stdin = _stream(stdin, 0)
        theirs_out, self.stdout = _stream(stdout, 1)
        theirs_err, self.stderr = _stream(stderr, 2)
        descriptors = [theirs_in, theirs_out, theirs_err, teller]
        try:
            _nursery().order(order, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self.pid = int(self._status.readline().split()[1])

    def poll(self) -> int | None:
        """The exit status if it has ended: minus the signal's number where one has killed it."""
        while self.returncode is None and self._is_told(0):
            self._hear()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, and return its exit status."""
        while self.returncode is None:
            if not self._is_told(timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._hear()
        return self.returncode

    def stop(self) -> None:
        """Send SIGSTOP, and wait until all of its threads have stopped."""
        self.send_signal(signal.SIGSTOP)
        while self.returncode is None and self._hear() != b"stopped":
            pass

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has, and nobody has told us yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _is_told(self, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self._status)
        return bool(poll.poll(None if timeout is None else timeout * 1_000))

    def _hear(self) -> bytes:
        what, number = self._status.readline().split()
        if what == b"ended":
            self.returncode = int(number)
            self._status.close()
        return what


def run(
    program: Program,
    *arguments: str,
    input: bytes = b"",
    timeout: float,
    environment: dict[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end, as subprocess.run does, and return what it has said."""
    with (
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
    ):
        stdin.write(input)
        stdin.seek(0)
        process = Forked(
            program,
            *arguments,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            environment=environment,
            folder=folder,
        )
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess((program, *arguments), status, stdout.read(), stderr.read())


class _Nursery:
    """The process that they are forked off; it ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-P", nursery.__file__], stdin=theirs.fileno())

    def order(self, order: Mapping[str, object], descriptors: list[int]) -> None:
        """Have a process forked."""
        text = json.dumps(order).encode()
        with self._lock:
            header = len(text).to_bytes(nursery.HEADER_BYTES, "big")
            socket.send_fds(self._channel, [header], descriptors)
            self._channel.sendall(text)

    def close(self) -> None:
        """Let it go."""
        self._channel.close()
        self._process.wait()


@cache
def _nursery() -> _Nursery:
    started = _Nursery()
    atexit.register(started.close)
    return started


def _stream(given: Stream, number: int) -> tuple[int, IO[bytes] | None]:
    """The child's end of a stream, and ours where it is a pipe."""
    if given == subprocess.PIPE:
        read, write = os.pipe()
        return (read, open(write, "wb", 0)) if number == 0 else (write, open(read, "rb"))
    if given == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_RDWR), None
    if given is None:
        return os.dup(number), None
    return os.dup(given if isinstance(given, int) else given.fileno()), None
