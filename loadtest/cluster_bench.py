"""How the broker grows: throughput with more workers and more Redis nodes, and what a message costs in CPU.

All brokers run at once and take turns, so that a slow moment of the machine hits each of them. CPU is that of
the processes themselves, from /proc: it says what more cores would bring where this machine has none left.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from anyio.from_thread import start_blocking_portal

from keylane import Client
from keylane_broker.config import Settings
from keylane_broker.supervise.embedded_server import Server
from keylane_broker.supervise.supervisor import Running, supervise
from loadtest.matched import cpu_of
from loadtest.players import Order, Player, consume, produce
from loadtest.topology import three_node_cluster

PARTITIONS = 12  # of each topic
PAIRS = 2  # of a producer and a consumer, each pair with a topic of its own
MESSAGES = 60_000  # a round, of all pairs
ROUNDS = 5
KINDS = ((1, 1), (2, 1), (4, 1), (4, 3))  # workers, Redis nodes


class Growth(msgspec.Struct):
    """What one kind of broker did: medians of the rounds; CPU in seconds for a million messages."""

    workers: int
    nodes: int
    rate: float
    worker_cpu: float
    server_cpu: float
    client_cpu: float


class _Broker:
    """A broker with its clients, and the seconds and CPU of each round."""

    def __init__(self, stack: ExitStack, running: Running, servers: list[int], nodes: int) -> None:
        self.workers = len(running.workers)
        self.nodes = nodes
        self.client = stack.enter_context(Client(running.url))
        self._producers = [stack.enter_context(Player(produce, running.url)) for _ in range(PAIRS)]
        self._consumers = [stack.enter_context(Player(consume, running.url)) for _ in range(PAIRS)]
        self._pids = {
            "worker": [worker.pid for worker in running.workers],
            "server": servers,
            "client": [player.pid for player in (*self._producers, *self._consumers)],
        }
        self._rounds: list[dict[str, float]] = []

    def play(self, number: int) -> None:
        """One round; the first is to warm up and does not count."""
        orders = [
            Order(f"bench-growth-{number}-{pair}", MESSAGES // PAIRS, PARTITIONS, batch=500)
            for pair in range(PAIRS)
        ]
        for order in orders:
            self.client.create_topic(order.name, partitions=PARTITIONS)
        for player, order in zip(self._consumers, orders, strict=True):
            player.tell(order)
            player.expect("listening")
        before = {kind: sum(map(cpu_of, pids)) for kind, pids in self._pids.items()}
        for player, order in zip(self._producers, orders, strict=True):
            player.tell(order)
        ended = max(player.report().ended for player in self._consumers)
        began = min(player.report().began for player in self._producers)
        spent = {kind: sum(map(cpu_of, pids)) - before[kind] for kind, pids in self._pids.items()}
        for order in orders:
            self.client.delete_topic(order.name)
        if number:
            self._rounds.append({**spent, "took": ended - began})

    def result(self) -> Growth:
        """The medians of all rounds."""

        def median(what: str) -> float:
            return statistics.median(found[what] for found in self._rounds)

        cost = [median(kind) / MESSAGES * 1_000_000 for kind in ("worker", "server", "client")]
        return Growth(self.workers, self.nodes, MESSAGES / median("took"), *cost)


def run() -> list[Growth]:
    """Measure every kind of broker, in turn."""
    with ExitStack() as stack:
        brokers = [stack.enter_context(_broker(workers, nodes)) for workers, nodes in KINDS]
        for number in range(ROUNDS + 1):
            for broker in brokers:
                broker.play(number)
        return [broker.result() for broker in brokers]


@contextmanager
def _broker(workers: int, nodes: int) -> Iterator[_Broker]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if nodes == 1:
            server = stack.enter_context(Server(data_dir=folder))
            url, pids = server.url, [server.pid]
        else:
            cluster = stack.enter_context(three_node_cluster(appendonly=True))
            url = cluster.url.replace("redis://", "redis+cluster://")
            pids = [node.pid for node in cluster.nodes]
        portal = stack.enter_context(start_blocking_portal())
        settings = Settings(port=0, redis=url, workers=workers, log_level="warning")
        running = stack.enter_context(portal.wrap_async_context_manager(supervise(settings)))
        yield _Broker(stack, running, pids, nodes)


def table(found: list[Growth]) -> list[str]:
    """The figures as lines of Markdown."""
    cells: list[Callable[[Growth], str]] = [
        lambda growth: str(growth.workers),
        lambda growth: str(growth.nodes),
        lambda growth: f"{growth.rate:,.0f}",
        lambda growth: f"{growth.rate / found[0].rate:.2f}",
        lambda growth: f"{growth.worker_cpu:.1f}",
        lambda growth: f"{growth.server_cpu:.1f}",
        lambda growth: f"{growth.client_cpu:.1f}",
    ]
    heads = ["workers", "Redis nodes", "messages/s", "against one worker"]
    heads += [f"CPU s, {who}" for who in ("workers", "servers", "clients")]
    return [
        "| " + " | ".join(heads) + " |",
        "|" + "---:|" * len(heads),
        *("| " + " | ".join(cell(growth) for cell in cells) + " |" for growth in found),
    ]
