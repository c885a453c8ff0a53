"""`keylane serve --workers N`: each worker lives and dies by itself; SIGHUP replaces one after another."""

import contextlib
import json
import os
import pty
import resource
import select
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import trustme

from keylane import AsyncClient, Consumer
from keylane_broker.ports import free_port
from tests.support.commands import DEADLINE, KEYLANE, keylane, plain_signals
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow  # each broker is several processes

KEYS = [f"key-{number}" for number in range(12)]
LAST = 1_000_000


class Serving:
    """A `keylane serve --json` whose log can be read while it runs."""

    def __init__(self, folder: Path, *arguments: str, files: tuple[int, int] | None = None) -> None:
        self.log_file = folder / "log"
        command = [KEYLANE, "serve", "--json", "--data-dir", str(folder / "data"), *arguments]

        def prepare() -> None:
            plain_signals()
            if files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, files)

        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, preexec_fn=prepare)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log
        self.ready: dict[str, Any] = json.loads(line)
        self.url = self.ready["address"]
        self.ids = [worker["id"] for worker in self.ready["workers"]]
        self.ports = [int(worker["address"].rpartition(":")[2]) for worker in self.ready["workers"]]
        self.pids = [worker["pid"] for worker in self.ready["workers"]]

    @property
    def log(self) -> str:
        """What has been logged so far."""
        return self.log_file.read_text("utf-8")

    def await_log(self, text: str, times: int = 1) -> None:
        """Wait until the log has a text."""
        wait_until(lambda: self.log.count(text) >= times, lambda: f"no {text!r} in:\n{self.log}")

    def listeners(self) -> dict[int, int]:
        """The process that listens on each port."""
        children = psutil.Process(self.process.pid).children()
        found = {}
        for child in children:
            with contextlib.suppress(psutil.Error):
                for connection in child.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port in self.ports:
                        found[connection.laddr.port] = child.pid
        return found

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it with a signal, see that none of its children is left, and return its exit status."""
        everybody = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(how)
        status = self.process.wait(DEADLINE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        _, alive = psutil.wait_procs(everybody, timeout=DEADLINE)
        assert alive == [], self.log
        return status


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    """Starts a broker, on free ports unless told which."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, files: tuple[int, int] | None = None) -> Serving:
            port = () if "--port" in arguments else ("--port", "0")
            serving = Serving(tmp_path, *port, *arguments, files=files)
            stack.callback(_end_if_running, serving)
            return serving

        yield start


def _end_if_running(serving: Serving) -> None:
    if serving.process.poll() is None:
        serving.end(signal.SIGKILL)


def free_ports(count: int) -> int:
    """The first of several ports in a row that are free."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


async def test_every_worker_serves_on_a_port_of_its_own(serve: Callable[..., Serving]) -> None:
    """Worker i on port + i; a client can start from any of them, and the URL names them all."""
    first = free_ports(3)
    serving = serve("--workers", "3", "--port", str(first))
    assert serving.ids == ["worker-0", "worker-1", "worker-2"]
    assert serving.ports == [first, first + 1, first + 2]
    assert serving.url == f"keylane://127.0.0.1:{first},127.0.0.1:{first + 1},127.0.0.1:{first + 2}"
    assert serving.listeners() == dict(zip(serving.ports, serving.pids, strict=True))
    for name, address in zip(serving.ids, serving.url.removeprefix("keylane://").split(","), strict=True):
        async with AsyncClient(f"keylane://{address}") as client:
            assert (await client.info()).worker == name
    assert serving.end() == 0


def test_workers_on_a_redis_of_its_own_have_names_that_nobody_else_has(
    serve: Callable[..., Serving], server_url: str
) -> None:
    """Two supervisors on one Redis cannot take each other's leases for their own."""
    serving = serve("--workers", "2", "--redis", server_url, "--advertise", "localhost")
    prefixes = {name.rpartition("-")[0] for name in serving.ids}
    assert len(prefixes) == 1
    assert [name.rpartition("-")[2] for name in serving.ids] == ["0", "1"]
    assert serving.url == "keylane://" + ",".join(f"localhost:{port}" for port in serving.ports)
    assert serving.end() == 0


def test_a_killed_worker_is_started_again_and_the_others_are_not(serve: Callable[..., Serving]) -> None:
    """On its own port and under its own name."""
    serving = serve("--workers", "3")
    os.kill(serving.pids[1], signal.SIGKILL)
    serving.await_log("worker-1 is back")
    now = serving.listeners()
    assert (now[serving.ports[0]], now[serving.ports[2]]) == (serving.pids[0], serving.pids[2])
    assert now[serving.ports[1]] != serving.pids[1]
    assert "worker-1 ended with status -9; starting it again" in serving.log
    assert serving.end(signal.SIGINT) == 0


def test_while_the_system_is_short_of_files_children_wait_and_the_broker_goes_on(
    serve: Callable[..., Serving],
) -> None:
    serving = serve("--workers", "2")
    supervisor = psutil.Process(serving.process.pid)
    _, most = resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE)
    # One file is left, for whatever it may log or look at: no pipe can be made.
    resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, (supervisor.num_fds() + 1, most))
    os.kill(serving.pids[1], signal.SIGKILL)
    serving.await_log(f"{serving.ids[1]} does not start", times=2)
    server = next(child for child in supervisor.children() if "server" in child.name())
    server.kill()
    serving.await_log("the embedded server does not start", times=2)
    assert serving.process.poll() is None
    resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, (most, most))
    serving.await_log("the embedded server is back")
    serving.await_log(f"{serving.ids[1]} is back")
    assert serving.end() == 0


def test_sighup_replaces_one_worker_after_the_other(serve: Callable[..., Serving]) -> None:
    """At no time more than one of them is away; more of them meanwhile count once."""
    serving = serve("--workers", "3")
    serving.process.send_signal(signal.SIGHUP)
    serving.await_log("rolling restart of 3 workers")
    for _ in range(5):
        serving.process.send_signal(signal.SIGHUP)
    fewest = 3

    def look() -> bool:
        nonlocal fewest
        fewest = min(fewest, len(serving.listeners()))
        return serving.log.count("rolling restart: done") == 2

    wait_until(look, lambda: serving.log)
    assert fewest >= 2
    now = serving.listeners()
    assert sorted(now) == sorted(serving.ports)
    assert not set(now.values()) & set(serving.pids)
    for number in (1, 2, 3):
        assert serving.log.count(f"rolling restart: worker {number} of 3 is back") == 2
    assert "starting it again" not in serving.log
    assert serving.end() == 0
    assert serving.log.count("rolling restart of 3 workers") == 2


def certificate(folder: Path) -> bytes:
    """Write a new certificate with its key into a file, and return it."""
    own = trustme.CA().issue_cert("127.0.0.1", "localhost")
    own.private_key_and_cert_chain_pem.write_to_path(str(folder / "own.pem"))
    return ssl.PEM_cert_to_DER_cert(own.cert_chain_pems[0].bytes().decode())


def shown(port: int) -> bytes:
    """The certificate that somebody who connects is shown."""
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port), timeout=DEADLINE))


def test_sighup_takes_up_a_new_certificate_and_a_broken_one_disturbs_nobody(
    serve: Callable[..., Serving], tmp_path: Path
) -> None:
    first = certificate(tmp_path)
    http = free_ports(2)
    serving = serve("--tls-cert", str(tmp_path / "own.pem"), "--workers", "2", "--port", str(free_ports(2)),
                    "--http-port", str(http))  # fmt: skip
    ports = [*serving.ports, http, http + 1]
    assert {shown(port) for port in ports} == {first}
    second = certificate(tmp_path)
    assert {shown(port) for port in ports} == {first}
    serving.process.send_signal(signal.SIGHUP)
    serving.await_log("rolling restart: done")
    assert {shown(port) for port in ports} == {second}
    (tmp_path / "own.pem").write_text("half of a file")
    before = serving.listeners()
    serving.process.send_signal(signal.SIGHUP)
    serving.await_log("no rolling restart, the workers go on with what they have read: TLS cannot be set up")
    assert serving.listeners() == before
    assert {shown(port) for port in ports} == {second}
    third = certificate(tmp_path)
    serving.process.send_signal(signal.SIGHUP)
    serving.await_log("rolling restart: done", times=2)
    assert {shown(port) for port in ports} == {third}
    assert serving.end() == 0


async def test_an_application_goes_on_through_a_rolling_restart(serve: Callable[..., Serving]) -> None:
    """No publish fails, and everything is delivered, in order for each key."""
    serving = serve("--workers", "3")
    received: dict[str, list[int]] = {key: [] for key in KEYS}

    async def consume(consumer: Consumer) -> None:
        async for message in consumer:
            received[message.key or ""].append(int(message.attributes["n"]))
            await message.ack()
            if all(numbers[-1:] == [LAST] for numbers in received.values()):
                return

    async with AsyncClient(serving.url) as client:
        await client.create_topic("orders", partitions=6)
        async with (
            client.subscribe("orders", "billing", mode="key_shared") as consumer,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(consume, consumer)
            serving.process.send_signal(signal.SIGHUP)
            rounds = 0
            while "rolling restart: done" not in serving.log:
                for key in KEYS:
                    await client.publish("orders", b"", key=key, attributes={"n": str(rounds)})
                rounds += 1
            for key in KEYS:
                await client.publish("orders", b"", key=key, attributes={"n": str(LAST)})
    assert rounds > 1
    assert all(numbers == [*range(rounds), LAST] for numbers in received.values())
    assert serving.end() == 0


def test_a_rolling_restart_waits_for_a_worker_that_cannot_come_back(serve: Callable[..., Serving]) -> None:
    """It says why, and goes on when the worker is there."""
    serving = serve("--workers", "2")
    with _squatting(serving, serving.ports[0]):
        serving.await_log("worker-0 does not start")
        assert serving.listeners() == {serving.ports[1]: serving.pids[1]}
        assert f"127.0.0.1:{serving.ports[0]} is in use" in serving.log
    serving.await_log("rolling restart: done")
    assert len(serving.listeners()) == 2
    assert serving.end() == 0


@contextlib.contextmanager
def _squatting(serving: Serving, port: int) -> Iterator[None]:
    """Send SIGHUP, and take the port as soon as its worker has left it."""
    serving.process.send_signal(signal.SIGHUP)
    end = time.monotonic() + DEADLINE
    while True:
        try:
            listener = socket.create_server(("127.0.0.1", port))
            break
        except OSError:
            assert time.monotonic() < end
    with listener:
        yield


def test_a_stop_in_the_middle_of_a_rolling_restart_leaves_nothing(serve: Callable[..., Serving]) -> None:
    """Neither a worker on its way out nor one on its way in."""
    serving = serve("--workers", "3")
    serving.process.send_signal(signal.SIGHUP)
    serving.await_log("rolling restart: worker 1 of 3 is back")
    assert serving.end() == 0
    assert "Traceback" not in serving.log


def test_a_worker_that_does_not_stop_is_killed_in_the_end(serve: Callable[..., Serving]) -> None:
    """Here it cannot even hear the signal."""
    serving = serve("--workers", "2", "--stop-timeout", "0.5")
    os.kill(serving.pids[0], signal.SIGSTOP)
    assert serving.end() == 0
    assert "worker-0 did not stop in time; killing it" in serving.log


def test_a_port_of_one_of_them_in_use_is_an_error_that_says_which(tmp_path: Path) -> None:
    """And nothing is left running."""
    first = free_ports(3)
    with socket.create_server(("127.0.0.1", first + 2)):
        words = ["serve", "--workers", "3", "--port", str(first), "--data-dir", str(tmp_path)]
        done = keylane(*words, status=1)
    assert done.stdout == ""
    assert f"error: 127.0.0.1:{first + 2} is in use" in done.stderr
    for port in range(first, first + 3):
        socket.create_server(("127.0.0.1", port)).close()


def test_when_its_terminal_is_closed_it_stops(tmp_path: Path) -> None:
    """A SIGHUP that nobody sent is no wish for a restart."""
    pid, terminal = pty.fork()
    if pid == 0:
        plain_signals()
        os.execv(KEYLANE, [KEYLANE, "serve", "--port", "0", "--data-dir", str(tmp_path)])
    shown = b""
    end = time.monotonic() + DEADLINE
    while b"is ready at" not in shown:
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 65_536)
    process = psutil.Process(pid)
    everybody = [process, *process.children(recursive=True)]
    os.close(terminal)
    assert os.waitpid(pid, 0)[0] == pid
    _, alive = psutil.wait_procs(everybody, timeout=DEADLINE)
    assert alive == []


def test_as_many_clients_as_are_allowed_can_connect_where_few_files_are_allowed_at_first(
    serve: Callable[..., Serving],
) -> None:
    """A service of systemd may open 1,024 unless it asks for more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    serving = serve("--http-port", "0", files=(64, most))
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", serving.ports[0]))) for _ in range(100)
        ]
        assert keylane("topic", "list", "--json", KEYLANE_SERVER=serving.url).stdout == "[]\n"
        for connection in connections:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):  # it is open, and nothing has been said
                connection.recv(1)
    assert "open files" not in serving.log


def test_a_limit_of_open_files_that_cannot_be_raised_is_warned_of(serve: Callable[..., Serving]) -> None:
    """Once, and before anybody is cut off."""
    serving = serve("--http-port", "0", "--workers", "2", files=(100, 128))
    assert serving.log.count("a worker may have 128 open files, too few for max_connections 10000") == 1
