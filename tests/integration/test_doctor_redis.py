"""`keylane doctor --redis` sees what `keylane serve` refuses or warns of, on every master."""

import json
from pathlib import Path
from typing import Any

import pytest

from keylane_broker.supervise.embedded_server import ask
from loadtest.topology import replica_pair, single_server, three_node_cluster
from tests.support.commands import keylane
from tests.support.running import RunningBroker

pytestmark = pytest.mark.slow  # each command is a process


def findings(broker: RunningBroker, redis: str) -> dict[str, Any]:
    """What it finds, by check."""
    done = keylane("doctor", "--server", broker.url, "--redis", redis, "--json", status=None)
    found = {item["check"]: item for item in json.loads(done.stdout)}
    assert done.returncode == (0 if all(item["ok"] for item in found.values()) else 1), done.stderr
    return found


def test_eviction_and_lost_restarts_come_with_the_command_that_mends_them(
    broker: RunningBroker, server_binary: Path
) -> None:
    config = {"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}
    with single_server(binary=server_binary, config=config) as server:
        found = findings(broker, server.url)
        for check in ("eviction", "persistence"):
            command = found[check]["advice"].partition("redis-cli -h 127.0.0.1 -p ")[2].partition(" (")[0]
            port, *words = command.split()
            assert (found[check]["ok"], port) == (False, str(server.port))
            ask(server.port, *words)
        found = findings(broker, server.url)
        assert all(item["ok"] for item in found.values())
        assert found["eviction"]["detail"] == "maxmemory-policy noeviction"


def test_every_master_of_a_cluster_is_looked_at(broker: RunningBroker, server_binary: Path) -> None:
    with three_node_cluster(binary=server_binary, config={"appendonly": "yes"}) as cluster:
        ask(cluster.nodes[2].port, "CONFIG", "SET", "appendfsync", "no")
        found = findings(broker, cluster.broker_url)
    wrong = [check for check, item in found.items() if not item["ok"]]
    assert wrong == [f"persistence of 127.0.0.1:{cluster.nodes[2].port}"]
    assert sum(check.startswith("eviction of ") for check in found) == 3


def test_a_replica_is_no_redis_for_a_broker(broker: RunningBroker, server_binary: Path) -> None:
    with replica_pair(binary=server_binary) as pair:
        found = findings(broker, pair.replica.url)["redis"]
    assert not found["ok"]
    assert "name the master" in found["advice"]


def test_credentials_that_are_missing_are_asked_for(broker: RunningBroker, server_binary: Path) -> None:
    with single_server(binary=server_binary) as server:
        ask(server.port, "CONFIG", "SET", "requirepass", "secret")
        found = findings(broker, server.url)["redis"]
    assert "redis://user:password@host:port/0" in found["advice"]


def test_what_workers_and_crashes_left_is_named(broker: RunningBroker, server_binary: Path) -> None:
    with single_server(binary=server_binary, appendonly=True) as server:
        ask(server.port, "SET", "kl:controller", "w1")
        ask(server.port, "HSET", "kl:topic:bills", "state", "creating", "incarnation", "5", "partitions", "1")
        found = findings(broker, server.url)
        assert "kl:controller is 'w1' forever" in found["worker records"]["detail"]
        assert "topic bills is half-created, in state creating" in found["topics"]["detail"]
        assert not found["worker records"]["ok"]
        assert not found["topics"]["ok"]
