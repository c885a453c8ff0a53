"""Throw-away servers in the shapes that Keylane runs on: alone, with a replica, as a cluster."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from broker.server import HOST, PORT_ATTEMPTS, AddressInUse, Server, ServerError, ask, free_port

__all__ = ["Cluster", "ReplicaPair", "replica_pair", "single_server", "three_node_cluster"]

GHOST_ADDRESS = f"{HOST}:1@1"  # nothing ever answers there
SLOT_RANGES = ("0-5460", "5461-10922", "10923-16383")
READY_SECONDS = 10.0
POLL_SECONDS = 0.002


@dataclass(frozen=True)
class ReplicaPair:
    """A server and the replica that follows it."""

    master: Server
    replica: Server


@dataclass(frozen=True)
class Cluster:
    """Three masters that share the 16384 slots."""

    nodes: tuple[Server, ...]

    @property
    def url(self) -> str:
        """The address of one node, from which a client finds the others."""
        return self.nodes[0].url


def single_server(
    *,
    appendonly: bool = False,
    binary: str | Path | None = None,
    config: Mapping[str, str] | None = None,
) -> Server:
    """Run one server that leaves nothing behind."""
    return Server(appendonly=appendonly, binary=binary, config=config)


@contextlib.contextmanager
def replica_pair(
    *,
    appendonly: bool = False,
    binary: str | Path | None = None,
    config: Mapping[str, str] | None = None,
) -> Iterator[ReplicaPair]:
    """Run a master and a replica that has caught up with it."""
    # The other ways to copy the data wait for a timer that ticks once a second.
    prompt_sync = {"repl-diskless-sync": "no", "repl-diskless-load": "swapdb"}
    settings = {**prompt_sync, **(config or {})}
    with Server(appendonly=appendonly, binary=binary, config=settings) as master:
        settings["replicaof"] = f"{HOST} {master.port}"
        with Server(appendonly=appendonly, binary=binary, config=settings) as replica:
            _wait_for_each([replica], lambda port: "master_link_status:up" in _replication(port))
            _wait_for_each([master], lambda port: "state=online" in _replication(port))
            yield ReplicaPair(master, replica)


@contextlib.contextmanager
def three_node_cluster(
    *,
    appendonly: bool = False,
    binary: str | Path | None = None,
    config: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """Run three masters that agree that the cluster is up."""
    settings = {"cluster-enabled": "yes", "cluster-node-timeout": "5000", **(config or {})}
    nodes = _start_nodes(appendonly, binary, settings)
    try:
        _take_over(nodes)
        yield Cluster(tuple(nodes))
    finally:
        for node in nodes:
            node.stop()


def _start_nodes(appendonly: bool, binary: str | Path | None, settings: Mapping[str, str]) -> list[Server]:
    """Start three nodes on ports that they all know beforehand."""
    for _ in range(PORT_ATTEMPTS):
        bus_ports = [free_port() for _ in SLOT_RANGES]
        nodes = [
            Server(
                port=free_port(),
                appendonly=appendonly,
                binary=binary,
                config={**settings, "cluster-port": str(bus_port)},
            )
            for bus_port in bus_ports
        ]
        _write_nodes_files(nodes, bus_ports)
        try:
            for node in nodes:
                node.start()
            return nodes
        except BaseException as error:
            for node in nodes:
                node.stop()
            if not isinstance(error, AddressInUse):
                raise
    raise AddressInUse(f"no ports for a cluster stayed free in {PORT_ATTEMPTS} attempts")


def _write_nodes_files(nodes: list[Server], bus_ports: list[int]) -> None:
    """Make each node believe in a cluster that has just lost its masters.

    A master that starts refuses writes for two seconds, in case the cluster has moved on without
    it; a replica does not. So the nodes start as replicas of masters that never existed.
    """
    ghosts, replicas = [], []
    shards = zip(nodes, bus_ports, SLOT_RANGES, strict=True)
    for epoch, (node, bus_port, slots) in enumerate(shards, start=1):
        ghost, name, address = token_hex(20), token_hex(20), f"{HOST}:{node.port}@{bus_port}"
        ghosts.append(f"{ghost} {GHOST_ADDRESS} master - 0 0 {epoch} connected {slots}")
        replicas.append(f"{name} {address} slave {ghost} 0 0 {epoch} connected")
    view = "\n".join([*ghosts, *replicas, f"vars currentEpoch {len(nodes)} lastVoteEpoch 0", ""])
    for node, line in zip(nodes, replicas, strict=True):
        own_view = view.replace(line, line.replace(" slave ", " myself,slave "))
        node.data_dir.mkdir(mode=0o700, exist_ok=True)
        (node.data_dir / "nodes.conf").write_text(own_view)


def _take_over(nodes: list[Server]) -> None:
    """Let the nodes replace the masters that never existed, and forget those."""
    _wait_for_each(nodes, lambda port: _agrees(port, "cluster_state:ok"))
    for node in nodes:
        ask(node.port, "CLUSTER", "FAILOVER", "TAKEOVER")
    # A ghost forgotten while any node still sees it own slots would leave them to nobody there:
    # nodes tell each other whom to forget.
    _wait_for_each(nodes, lambda port: not any(_ghosts(port).values()))
    for node in nodes:
        for ghost in _ghosts(node.port):
            with contextlib.suppress(ServerError):  # just told so by another node
                ask(node.port, "CLUSTER", "FORGET", ghost)
    ready = ("cluster_state:ok", "cluster_slots_ok:16384", "cluster_known_nodes:3")
    _wait_for_each(nodes, lambda port: _agrees(port, *ready))


def _replication(port: int) -> str:
    return ask(port, "INFO", "replication")


def _agrees(port: int, *facts: str) -> bool:
    return set(facts) <= set(ask(port, "CLUSTER", "INFO").split())


def _ghosts(port: int) -> dict[str, list[str]]:
    """Return the masters that never existed, as one node sees them, and their slots."""
    nodes = [line.split() for line in ask(port, "CLUSTER", "NODES").splitlines()]
    return {node[0]: node[8:] for node in nodes if node[1].startswith(GHOST_ADDRESS)}


def _wait_for_each(servers: Iterable[Server], condition: Callable[[int], bool]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    for server in servers:
        while not condition(server.port):
            if time.monotonic() > deadline:
                raise ServerError(f"the servers did not find together in {READY_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)
