"""The whole broker against Redis Streams by hand, both told to do the same, in turn, on one server.

A line of the table is a workload; its contenders play one round each, then the next one each, in the other
order, so that a slow moment of the machine hits all. How many messages a round has follows from the round
before: each contender gets the same time.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from anyio.from_thread import start_blocking_portal
from redis import Redis

from keylane import Client
from keylane_broker.config import Settings
from keylane_broker.supervise.supervisor import Running, supervise
from loadtest import players, raw, raw_asyncio
from loadtest.players import Order, Player
from loadtest.results import Result, Sample

FIRST, FIRST_SECONDS = 500, 0.2  # messages of the round that warms up, or its time
LEAST, MOST = 100, 300_000  # messages of a round
EACH = 20  # messages for each consumer, at least: in fewer, their beginnings would be most of it


Side = Literal["ours", "raw", "raw, asyncio"]
_PARTS: dict[Side, tuple[Callable[[Connection, str], None], ...]] = {
    "ours": (players.produce, players.consume),
    "raw": (raw.produce, raw.consume),
    "raw, asyncio": (raw_asyncio.produce, raw_asyncio.consume),
}


class Contender(NamedTuple):
    """One side of a line."""

    label: str
    order: Order
    side: Side = "ours"


class Line(NamedTuple):
    """A workload, and those who do it."""

    name: str
    contenders: tuple[Contender, ...]


class Stage:
    """A broker, as `keylane serve` starts it, and warm producers and consumers of both kinds."""

    def __init__(self, stack: ExitStack, url: str, redis_url: str, worker: int, server: int) -> None:
        """Of the broker: its address, that of its Redis, and the process ids of its worker and its server."""
        self.url = url
        self.client = stack.enter_context(Client(url))
        self.redis: Any = stack.enter_context(Redis.from_url(redis_url, decode_responses=True))
        self.players: dict[Side, list[Player]] = {
            side: [stack.enter_context(Player(part, url if side == "ours" else redis_url)) for part in parts]
            for side, parts in _PARTS.items()
        }
        self.worker, self.server = worker, server

    def play(self, contender: Contender) -> Sample:
        """One round."""
        order = contender.order
        producer, consumer = self.players[contender.side]
        consumer.tell(order)
        consumer.expect("listening")
        before = self._spent()
        producer.tell(order)
        published, consumed = producer.report(), consumer.report()
        worker, server = (now - then for now, then in zip(self._spent(), before, strict=True))
        p50, p99 = percentiles(consumed.latencies)
        micros = 1e6 / order.deliveries
        return Sample(
            rate=round(order.deliveries / (consumed.ended - published.began), 1),
            p50=round(p50, 3),
            p99=round(p99, 3),
            producer=round(published.cpu * micros, 2),
            worker=round(worker * micros, 2),
            redis=round(server * micros, 2),
            consumer=round(consumed.cpu * micros, 2),
            disorder=disorder(consumed.handled),
        )

    def _spent(self) -> tuple[float, float]:
        return cpu_of(self.worker), cpu_of(self.server)

    @contextmanager
    def topics(self, contenders: tuple[Contender, ...]) -> Iterator[None]:
        """What the contenders publish to."""
        ours = [contender.order for contender in contenders if contender.side == "ours"]
        for order in ours:
            self.client.create_topic(order.name, partitions=order.partitions, inline=order.inline)
            for number in range(order.subscriptions):
                self.client.create_subscription(order.name, order.subscription_of(number), mode=order.mode)
        yield
        for order in ours:
            self.client.delete_topic(order.name)


@contextmanager
def stage() -> Iterator[Stage]:
    """A broker and its players."""
    with running_broker() as broker, ExitStack() as stack:
        assert broker.server is not None
        [worker] = broker.workers
        yield Stage(stack, broker.url, broker.redis_url, worker.pid, broker.server.pid)


@contextmanager
def running_broker(**more: Any) -> Iterator[Running]:
    """What `keylane serve` starts."""
    with tempfile.TemporaryDirectory() as folder, start_blocking_portal() as portal:
        settings = Settings(port=0, data_dir=Path(folder), log_level="warning", **{"http_port": 0, **more})
        with portal.wrap_async_context_manager(supervise(settings)) as broker:
            yield broker


def measure(stage: Stage, line: Line, seconds: float, rounds: int) -> list[Result]:
    """Play a line: its contenders in turn, after a round to warm up."""
    named = [
        contender._replace(order=contender.order._replace(name=f"bench-{place}", messages=_first(contender)))
        for place, contender in enumerate(line.contenders)
    ]
    samples: dict[str, list[Sample]] = {contender.label: [] for contender in named}
    each = seconds / rounds / len(named)
    with stage.topics(tuple(named)):
        for number in range(rounds + 1):
            for place in range(len(named))[:: -1 if number % 2 else 1]:
                sample = stage.play(named[place])
                if number:
                    samples[named[place].label].append(sample)
                pace = named[place].order.rate or sample.rate / named[place].order.subscriptions
                count = max(min(round(pace * each), MOST), _least(named[place].order))
                named[place] = named[place]._replace(order=named[place].order._replace(messages=count))
    return [Result(line.name, label, found) for label, found in samples.items()]


def _first(contender: Contender) -> int:
    return round(contender.order.rate * FIRST_SECONDS) or max(FIRST, _least(contender.order))


def _least(order: Order) -> int:
    return LEAST if order.rate else max(LEAST, EACH * order.consumers)


def percentiles(latencies: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile, in ms, without the first tenth: connections are being opened."""
    latencies = latencies[len(latencies) // 10 :]
    if len(latencies) < 2:
        return 0.0, 0.0
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return cuts[49] * 1_000, cuts[98] * 1_000


def disorder(handled: list[tuple[str, int]]) -> int:
    """How many messages were not handled next after the one before of their key."""
    last: dict[str, int] = {}
    wrong = 0
    for key, number in handled:
        wrong += number != last.get(key, 0) + 1
        last[key] = max(number, last.get(key, 0))
    return wrong


def cpu_of(pid: int) -> float:
    """The seconds that a process has spent on a core, with all its threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
