"""Throw-away servers in the shapes that Keylane runs on: one, a pair, a pair behind Sentinel, a cluster."""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from keylane_broker.errors import AddressInUse, ServerError
from keylane_broker.ports import free_port
from keylane_broker.supervise.embedded_server import HOST, LAUNCH, PORT_ATTEMPTS, Server, ask, find_binary

__all__ = [
    "Cluster",
    "ReplicaPair",
    "SentinelPair",
    "replica_pair",
    "sentinel_pair",
    "single_server",
    "three_node_cluster",
]

GHOST_ADDRESS = f"{HOST}:1@1"  # nothing ever answers there
SLOT_RANGES = ("0-5460", "5461-10922", "10923-16383")
READY_SECONDS = 60.0
MASTER_NAME = "keylane"
SENTINEL_CONFIG = """
port {port}
bind {host}
dir {folder}
sentinel monitor {name} {host} {master} 1
sentinel down-after-milliseconds {name} 60000
sentinel failover-timeout {name} 5000
"""
POLL_SECONDS = 0.002
# Other ways to copy a master's data to a replica wait for others who might want it too, or for a slow timer.
PROMPT_SYNC = {"repl-diskless-sync": "no", "repl-diskless-load": "swapdb"}


@dataclass(frozen=True)
class ReplicaPair:
    """A server and the replica that follows it."""

    master: Server
    replica: Server


@dataclass(frozen=True)
class SentinelPair:
    """A server, its replica, and a Sentinel that promotes the replica when the server dies."""

    master: Server
    replica: Server
    port: int  # of the Sentinel

    @property
    def url(self) -> str:
        """What `--redis` takes."""
        return f"redis+sentinel://{HOST}:{self.port}/{MASTER_NAME}"

    def fail_over(self) -> None:
        """Have Sentinel promote the replica now, be the master alive or dead.

        By itself it calls a master down only after a minute: on a busy machine one that lives may take long.
        """
        _wait_until(lambda: ask(self.port, "SENTINEL", "FAILOVER", MASTER_NAME) == "OK")

    def master_port(self) -> int:
        """The port of the server that is the master now, by what Sentinel says."""
        [line] = [line for line in ask(self.port, "INFO", "sentinel").splitlines() if "master0:" in line]
        return int(line.partition("address=")[2].partition(",")[0].rpartition(":")[2])


@dataclass(frozen=True)
class Cluster:
    """Three masters that share the 16384 slots, and perhaps a replica of each."""

    nodes: tuple[Server, ...]
    replicas: tuple[Server, ...] = ()  # of the node in the same place

    @property
    def url(self) -> str:
        """The address of one node, from which a client finds the others."""
        return self.nodes[0].url

    @property
    def broker_url(self) -> str:
        """What `--redis` takes: any of these nodes tells of the others."""
        addresses = ",".join(f"{HOST}:{node.port}" for node in (*self.nodes, *self.replicas))
        return f"redis+cluster://{addresses}"

    def fail_over(self, place: int) -> None:
        """Have the replica of a node take its slots over now, be the node alive or dead."""
        ask(self.replicas[place].port, "CLUSTER", "FAILOVER", "TAKEOVER")


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
    settings = {**PROMPT_SYNC, **(config or {})}
    with Server(appendonly=appendonly, binary=binary, config=settings) as master:
        settings["replicaof"] = f"{HOST} {master.port}"
        with Server(appendonly=appendonly, binary=binary, config=settings) as replica:
            _wait_for_each([replica], lambda port: "master_link_status:up" in _replication(port))
            _wait_for_each([master], lambda port: "state=online" in _replication(port))
            yield ReplicaPair(master, replica)


@contextlib.contextmanager
def sentinel_pair(
    *,
    appendonly: bool = False,
    binary: str | Path | None = None,
    config: Mapping[str, str] | None = None,
) -> Iterator[SentinelPair]:
    """Run a master and a replica behind a Sentinel that knows both."""
    with (
        replica_pair(appendonly=appendonly, binary=binary, config=config) as pair,
        tempfile.TemporaryDirectory(prefix="keylane-sentinel-") as folder,
    ):
        port = free_port()
        file = Path(folder) / "sentinel.conf"
        file.write_text(
            SENTINEL_CONFIG.format(
                port=port, host=HOST, folder=folder, name=MASTER_NAME, master=pair.master.port
            )
        )
        process = subprocess.Popen(
            ["/bin/sh", "-c", LAUNCH, "sh", str(binary or find_binary()), str(file), "--sentinel"],
            stdin=subprocess.PIPE,  # when this process dies, Sentinel does too
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _wait_until(lambda: "slaves=1" in ask(port, "INFO", "sentinel"))
            yield SentinelPair(pair.master, pair.replica, port)
        finally:
            process.kill()
            process.communicate(b"\n")


@contextlib.contextmanager
def three_node_cluster(
    *,
    appendonly: bool = False,
    binary: str | Path | None = None,
    config: Mapping[str, str] | None = None,
    replicas: bool = False,
) -> Iterator[Cluster]:
    """Run three masters that agree that the cluster is up; with `replicas`, one of each beside it."""
    settings = {"cluster-enabled": "yes", "cluster-node-timeout": "5000", **PROMPT_SYNC, **(config or {})}
    nodes = _start_nodes(appendonly, binary, settings)
    try:
        _take_over(nodes)
        with contextlib.ExitStack() as stack:
            followers = [
                stack.enter_context(_replica_of(node, appendonly, binary, settings))
                for node in nodes
                if replicas
            ]
            everybody = f"cluster_known_nodes:{len(nodes) + len(followers)}"
            _wait_for_each([*nodes, *followers], lambda port: _agrees(port, "cluster_state:ok", everybody))
            yield Cluster(tuple(nodes), tuple(followers))
    finally:
        for node in nodes:
            node.stop()


@contextlib.contextmanager
def _replica_of(
    master: Server, appendonly: bool, binary: str | Path | None, settings: Mapping[str, str]
) -> Iterator[Server]:
    """Run a replica of a node of a cluster, which has caught up with it."""
    config = {**settings, "cluster-port": str(free_port())}
    with Server(appendonly=appendonly, binary=binary, config=config) as replica:
        name, address, *_ = next(
            line.split() for line in ask(master.port, "CLUSTER", "NODES").splitlines() if "myself" in line
        )
        bus_port = address.rpartition("@")[2].partition(",")[0]
        ask(replica.port, "CLUSTER", "MEET", HOST, str(master.port), bus_port)
        _wait_until(lambda: name in ask(replica.port, "CLUSTER", "NODES"))
        _wait_until(lambda: ask(replica.port, "CLUSTER", "REPLICATE", name) == "OK")
        _wait_until(lambda: "master_link_status:up" in _replication(replica.port))
        yield replica


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
    for server in servers:
        _wait_until(lambda port=server.port: condition(port))  # type: ignore[misc]


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        with contextlib.suppress(OSError, ServerError):  # still starting, or does not know yet
            if condition():
                return
        if time.monotonic() > deadline:
            raise ServerError(f"the servers did not find together in {READY_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
