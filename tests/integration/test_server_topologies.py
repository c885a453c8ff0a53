"""Servers behind Sentinel and clusters with replicas go on when a master dies."""

from pathlib import Path

import pytest

from keylane_broker.supervise.embedded_server import ask
from loadtest.topology import sentinel_pair, three_node_cluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow  # a fail-over takes seconds

DEADLINE = 150.0


def test_sentinel_promotes_the_replica_of_a_master_that_dies(server_binary: Path) -> None:
    """And tells who is the master now."""
    with sentinel_pair(binary=server_binary) as pair:
        assert pair.master_port() == pair.master.port
        assert pair.url == f"redis+sentinel://127.0.0.1:{pair.port}/keylane"
        ask(pair.master.port, "SET", "a", "1")
        assert ask(pair.master.port, "WAIT", "1", "5000") == "1"
        ask(pair.port, "SENTINEL", "SET", "keylane", "down-after-milliseconds", "1000")
        pair.master.kill()
        wait_until(lambda: pair.master_port() == pair.replica.port)
        wait_until(lambda: ask(pair.replica.port, "SET", "b", "2") == "OK")
        assert ask(pair.replica.port, "GET", "a") == "1"


def test_a_cluster_promotes_the_replica_of_a_node_that_dies(server_binary: Path) -> None:
    """Each node has one, which takes its slots over."""
    config = {"cluster-node-timeout": "3000"}
    with three_node_cluster(binary=server_binary, config=config, replicas=True) as cluster:
        assert len(cluster.replicas) == 3
        ports = [node.port for node in (*cluster.nodes, *cluster.replicas)]
        assert cluster.broker_url == "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)
        cluster.nodes[1].kill()
        wait_until(lambda: "role:master" in ask(cluster.replicas[1].port, "INFO", "replication"))
        wait_until(lambda: "cluster_state:ok" in ask(cluster.nodes[0].port, "CLUSTER", "INFO"))
        assert "role:slave" in ask(cluster.replicas[0].port, "INFO", "replication")
