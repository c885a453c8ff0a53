"""A broker that cannot be started says why and what to do, in one line, whatever is wrong."""

import contextlib
import ctypes
import random
import re
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keylane_broker.ports import free_port
from keylane_broker.supervise.embedded_server import ask
from loadtest.topology import replica_pair, sentinel_pair, single_server, three_node_cluster
from tests.support.commands import DEADLINE, KEYLANE, keylane, plain_signals

pytestmark = pytest.mark.slow  # each command is a process

COMMAND = re.compile(rb"(?:^|\r\n)\*\d+\r\n")
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1


def refused(*arguments: str, status: int = 1, limit: Callable[[], None] | None = None) -> str:
    """The one line that a `keylane serve` ends with."""
    words = ["serve", "--port", "0", *arguments]
    if limit is None:
        done = keylane(*words, status=None)
    else:
        done = subprocess.run([KEYLANE, *words], capture_output=True, text=True, preexec_fn=limit)
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@contextlib.contextmanager
def listener(answer: bytes | None) -> Iterator[int]:
    """A port where something answers whatever it is asked in one way; None: not at all, b"": it hangs up."""

    def talk(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while (asked := connection.recv(65_536)) and answer != b"":
                if answer is not None:  # to each of several commands that came together
                    connection.sendall(answer * max(1, len(COMMAND.findall(asked))))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=talk, args=[connection], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


# Ports


def behind_a_free_port() -> socket.socket:
    """Listens on a port behind a free one, where neither the system nor another test takes ports."""
    for port in random.sample(range(2_000, 9_000), 100):
        try:
            socket.create_server(("127.0.0.1", port - 1)).close()
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            continue
    raise AssertionError("no two ports are free")


def test_of_many_workers_only_one_line_says_that_a_port_is_in_use(tmp_path: Path) -> None:
    """Before anything was started: there is no data directory."""
    with behind_a_free_port() as taken:
        port = taken.getsockname()[1]
        line = refused("--port", str(port - 1), "--workers", "3", "--data-dir", str(tmp_path / "data"))
    assert line.startswith(f"error: 127.0.0.1:{port} is in use; ")
    assert "--port" in line
    assert not (tmp_path / "data").exists()


def test_an_http_port_that_is_in_use_is_named_with_its_flag(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ("--port", str(free_port()), "--http-port", str(port), "--log-format", "json")
        line = refused(*arguments, "--data-dir", str(tmp_path / "data"))
    assert line.startswith(f"error: 127.0.0.1:{port} is in use; ")
    assert line.endswith("--http-port")


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_no_machine_here_is_named(host: str, tmp_path: Path) -> None:
    line = refused("--insecure", "--host", host, "--port", "9", "--data-dir", str(tmp_path / "data"))
    assert f"cannot listen on {host}:9" in line
    assert "--host is an address of this machine" in line


# Data directories


def test_a_data_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refused("--data-dir", str(tmp_path / "file"))
    assert f"cannot keep data in {tmp_path / 'file'}: it is a file; " in line
    assert "--data-dir" in line
    assert "Not a directory" in refused("--data-dir", str(tmp_path / "file" / "data"))


def _without_rights() -> None:
    """Even root then may not write where its files say no."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


def test_a_data_directory_without_rights_is_named(tmp_path: Path) -> None:
    """Whether it is there, or to be made."""
    (tmp_path / "mine").mkdir(mode=0o500)
    for folder in (tmp_path / "mine", tmp_path / "mine" / "data"):
        line = refused("--data-dir", str(folder), limit=_without_rights)
        assert f"cannot keep data in {folder}: Permission denied; " in line


def _without_space() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def test_a_disk_without_space_is_named(tmp_path: Path) -> None:
    """Here a limit stands for the disk; the system's word for either is passed on."""
    line = refused("--data-dir", str(tmp_path / "data"), limit=_without_space)
    assert f"cannot keep data in {tmp_path / 'data'}: File too large; " in line


def test_data_that_the_embedded_server_cannot_read_are_said_to_be(tmp_path: Path) -> None:
    """In the server's own words, with the place of its log."""
    folder = tmp_path / "appendonlydir"
    folder.mkdir()
    (folder / "appendonly.aof.manifest").write_text("file appendonly.aof.1.incr.aof seq 1 type i\n")
    (folder / "appendonly.aof.1.incr.aof").write_text("garbage\n" * 3)
    line = refused("--data-dir", str(tmp_path))
    assert "Bad file format" in line
    assert f"see {tmp_path / 'server.log'}" in line


# What is no Redis that could be used


def test_a_redis_that_is_down_is_said_once_however_many_workers_there_are() -> None:
    port = free_port()
    line = refused("--redis", f"redis://127.0.0.1:{port}/0", "--workers", "3")
    assert f"127.0.0.1:{port}" in line
    assert line.endswith("start it, or choose another with --redis")


@pytest.mark.parametrize(
    ("scheme", "path"), [("redis+cluster", ""), ("redis+sentinel", "/mymaster")], ids=["cluster", "sentinel"]
)
def test_nodes_and_sentinels_that_are_down_are_said_to_be(scheme: str, path: str) -> None:
    line = refused("--redis", f"{scheme}://127.0.0.1:{free_port()}{path}")
    assert "Redis cannot be reached" in line
    assert "object" not in line
    assert "<" not in line


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://no-such-host.invalid:6379/0", "check the host in --redis"),
        ("unix:///no/such/redis.sock", "/no/such/redis.sock"),
    ],
)
def test_a_host_or_socket_that_is_not_there_is_named(url: str, text: str) -> None:
    assert text in refused("--redis", url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:many/0",
        "redis://127.0.0.1:99999/0",
        "redis://127.0.0.1:6379/abc",
        "redis://127.0.0.1:6379/0?nonsense=1",
        "redis+cluster://127.0.0.1:many",
        "redis+sentinel://127.0.0.1:many/mymaster",
    ],
)
def test_a_url_that_cannot_be_meant_is_a_usage_error(url: str) -> None:
    shown = url.partition("?")[0]  # behind it may be a password
    assert refused("--redis", url, status=2).startswith(f"error: --redis is '{shown}': ")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis://bob:canary/1@127.0.0.1:6379/0", "cannot be read"),
        ("redis://bob:canary#1@127.0.0.1:6379/0", "cannot be read"),
        ("redis://:canary?1@127.0.0.1:6379/0", "cannot be read"),
        ("redis+cluster://bob:canary/1@127.0.0.1:6379", "cannot be read"),
        ("redis+sentinel://bob:canary/1@127.0.0.1:26379/mymaster", "cannot be read"),
        ("redis://bob:canary@127.0.0.1:6379/abc", "the database is 'abc'"),
        ("redis://bob:canary/1@127.0.0.1:many/0", "'many'"),
        ("http://bob:canary@127.0.0.1", "redis://"),
        ("bob:canary@127.0.0.1", "redis://"),
    ],
)
def test_a_password_that_makes_a_url_unreadable_is_not_shown(url: str, problem: str) -> None:
    said = refused("--redis", url, status=2)
    checked = keylane("doctor", "--redis", url, status=2)
    for text in (said, checked.stdout + checked.stderr):
        assert problem in text
        assert "canary" not in text


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what answers is not Redis"),
        (bytes(range(256)), "what answers is not Redis"),
        (b"", "does a Redis listen there"),
        (None, "does a Redis listen there"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", "start again when it has loaded its data"),
    ],
    ids=["http", "garbage", "hangs-up", "silence", "loading"],
)
def test_a_port_that_is_no_redis_is_said_to_be_none(answer: bytes | None, text: str) -> None:
    with listener(answer) as port:
        assert text in refused("--redis", f"redis://127.0.0.1:{port}/0", "--workers", "2")


def test_a_redis_that_is_too_old_is_refused() -> None:
    info = b"# Server\r\nredis_version:6.2.14\r\nredis_mode:standalone\r\nrole:master\r\n"
    with listener(b"$%d\r\n%s\r\n" % (len(info), info)) as port:
        line = refused("--redis", f"redis://127.0.0.1:{port}/0")
    assert f"127.0.0.1:{port} is Redis 6.2.14, which is too old" in line
    assert "7.0 or newer" in line


def test_passwords_that_are_missing_wrong_or_too_much_are_told_apart(server_binary: Path) -> None:
    """And none is repeated."""
    with single_server(binary=server_binary) as server:
        where = f"127.0.0.1:{server.port}/0"
        line = refused("--redis", f"redis://:secret@{where}")
        assert "remove it from the URL" in line
        ask(server.port, "CONFIG", "SET", "requirepass", "right")
        for url in (f"redis://{where}", f"redis://:secret@{where}"):
            line = refused("--redis", url, "--workers", "2")
            assert "Redis refuses the credentials" in line
            assert "redis://user:password@host:port/0" in line
            assert "secret" not in line


def test_a_database_that_is_not_there_is_named(server_binary: Path) -> None:
    with single_server(binary=server_binary) as server:
        line = refused("--redis", f"redis://127.0.0.1:{server.port}/99")
    assert "DB index is out of range" in line
    assert "choose a database that it has" in line


def test_a_server_of_another_kind_is_told_with_the_url_to_use(server_binary: Path) -> None:
    """A replica, a Sentinel, a node of a cluster, and a single server taken for one of these."""
    with replica_pair(binary=server_binary) as pair:
        line = refused("--redis", pair.replica.url)
        assert (
            f"is a replica of 127.0.0.1:{pair.master.port}, which does not accept writes; name the master"
            in line
        )
        line = refused("--redis", f"redis+cluster://127.0.0.1:{pair.master.port}")
        assert "it is a single server: use redis://host:port/0" in line
        line = refused("--redis", f"redis+sentinel://127.0.0.1:{pair.master.port}/mymaster")
        assert "it is not a Sentinel: use redis://host:port/0" in line
    with sentinel_pair(binary=server_binary) as behind:
        line = refused("--redis", f"redis://127.0.0.1:{behind.port}/0")
        assert f"redis+sentinel://127.0.0.1:{behind.port}/" in line
        line = refused("--redis", f"redis+sentinel://127.0.0.1:{behind.port}/other")
        assert "No master found for 'other'; check the name behind the slash" in line
    with three_node_cluster(binary=server_binary) as cluster:
        port = cluster.nodes[0].port
        line = refused("--redis", f"redis://127.0.0.1:{port}/0")
        assert line.endswith(f"use redis+cluster://127.0.0.1:{port}")


# What would lose messages


def test_a_redis_that_evicts_is_refused_with_the_command_that_mends_it(server_binary: Path) -> None:
    config = {"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}
    with single_server(binary=server_binary, config=config) as server:
        line = refused("--redis", server.url, "--workers", "2")
    assert "maxmemory-policy allkeys-lru: Redis evicts messages when memory is full; " in line
    assert f"redis-cli -h 127.0.0.1 -p {server.port} CONFIG SET maxmemory-policy noeviction" in line


def test_a_cluster_is_refused_if_one_of_its_masters_evicts(server_binary: Path) -> None:
    with three_node_cluster(binary=server_binary) as cluster:
        node = cluster.nodes[1].port
        ask(node, "CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
        ask(node, "CONFIG", "SET", "maxmemory", "100mb")
        line = refused("--redis", cluster.broker_url)
    assert "CONFIG SET maxmemory-policy noeviction" in line
    assert f"-p {node} " in line


def warnings(url: str, *arguments: str) -> list[str]:
    """What the supervisor of a broker that starts says besides; the lines of workers have their names."""
    command = [KEYLANE, "serve", "--port", "0", "--redis", url, "--workers", "2", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=plain_signals) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        ready = process.stdout.readline()
        process.terminate()
        said = process.stderr.read()
        assert process.wait(DEADLINE) == 0
    assert ready.startswith("keylane is ready"), said
    return [line for line in said.splitlines() if re.search(r"(INFO|WARNING) keylane\.broker: ", line)]


def test_what_is_risky_is_warned_of_once(server_binary: Path) -> None:
    """An evicting policy without a maxmemory, and no append-only file; with one that nobody writes out."""
    config = {"maxmemory-policy": "allkeys-lru"}
    with single_server(binary=server_binary, config=config) as server:
        evicts, forgets = warnings(server.url)
        assert "WARNING" in evicts
        assert "CONFIG SET maxmemory-policy noeviction" in evicts
        assert "appendonly no: a restart of Redis loses what was confirmed" in forgets
        assert "CONFIG SET appendonly yes" in forgets
        ask(server.port, "CONFIG", "SET", "maxmemory-policy", "noeviction")
        ask(server.port, "CONFIG", "SET", "appendonly", "yes")
        ask(server.port, "CONFIG", "SET", "appendfsync", "no")
        [lazy] = warnings(server.url)
        assert "CONFIG SET appendfsync everysec" in lazy
        ask(server.port, "CONFIG", "SET", "appendfsync", "always")
        assert warnings(server.url) == []


def test_a_service_that_does_not_allow_config_is_used_with_a_hint(server_binary: Path) -> None:
    """What cannot be asked for is left to whoever runs it."""
    with single_server(binary=server_binary) as server:
        ask(server.port, "CONFIG", "SET", "appendonly", "yes")
        ask(server.port, "ACL", "SETUSER", "keylane", "on", ">pw", "~*", "&*", "+@all", "-config")
        url = server.url.replace("redis://", "redis://keylane:pw@")
        [hint] = warnings(url)
        assert "INFO" in hint
        assert "does not allow CONFIG" in hint
        ask(server.port, "CONFIG", "SET", "appendonly", "no")
        [warning] = warnings(url)
        assert "set appendonly yes in the configuration of this service" in warning
        ask(server.port, "CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
        ask(server.port, "CONFIG", "SET", "maxmemory", "100mb")
        assert "in the configuration of this service" in refused("--redis", url)
