"""What HTTP, metrics, TLS and tokens cost: `python -m loadtest.access_bench`.

Brokers that differ in one setting play the same rounds in turn; what is compared is the CPU time that their
workers take for a message, and of REST how much it publishes. Two processes that do the same differ by more
than metrics may cost, so that is counted as well, without a bar: a scrape tells how often a worker has
measured something, and what that takes can be measured by itself; additions and the scrape are not in it.
"""

import os
import statistics
import tempfile
import time
import timeit
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import trustme
from prometheus_client.parser import text_string_to_metric_families

from keylane import Client
from keylane_broker.counters import Counters
from keylane_broker.ports import free_port
from loadtest.matched import cpu_of, running_broker
from loadtest.players import Order, Player, consume, produce
from loadtest.report import Figure, print_table

SECONDS, ROUNDS = 1.0, 12
SCRAPED = 15.0  # seconds between scrapes, as Prometheus has it; a round has its share of one
FIRST = 2_000  # messages of the round that warms up
REST_SECONDS, REST_BATCH, REST_BAR = 3.0, 100, 10_000.0
TOKEN = "a token for the benchmark"


class Contender(NamedTuple):
    """A broker, by its worker's process, and who plays with it."""

    worker: int
    metrics: str  # where they are scraped, if they are
    producer: Player
    consumer: Player

    def play(self, order: Order) -> tuple[float, float]:
        """One round: messages a second, and microseconds of the worker's CPU for each."""
        self.consumer.tell(order)
        self.consumer.expect("listening")
        before = cpu_of(self.worker)
        self.producer.tell(order)
        published, consumed = self.producer.report(), self.consumer.report()
        now, seconds = cpu_of(self.worker), consumed.ended - published.began
        spent = now - before
        if self.metrics:
            httpx.get(self.metrics, timeout=60).raise_for_status()
            spent += (cpu_of(self.worker) - now) * seconds / SCRAPED
        return order.messages / seconds, spent * 1e6 / order.messages


@contextmanager
def _with(**variables: str) -> Iterator[None]:
    """Set variables of the environment, for processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _contender(
    stack: ExitStack,
    order: Order,
    variables: dict[str, str] | None = None,
    *,
    metrics: bool = False,
    **settings: Any,
) -> Contender:
    broker = stack.enter_context(running_broker(http_port=free_port(), metrics=metrics, **settings))
    with _with(**variables or {}):
        with Client(broker.url) as client:
            client.create_topic(order.name, partitions=order.partitions)
            client.create_subscription(order.name, order.subscription_of(0))
        players = [stack.enter_context(Player(part, broker.url)) for part in (produce, consume)]
    [worker] = broker.workers
    return Contender(worker.pid, f"{broker.http_url}/metrics" if metrics else "", *players)


def _certificate(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the settings of a broker with TLS, and the file of who signed its certificate."""
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1", "localhost")
    own.private_key_and_cert_chain_pem.write_to_path(str(folder / "own.pem"))
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    return {"tls_cert": folder / "own.pem"}, str(folder / "ca.pem")


def costs(seconds: float = SECONDS, rounds: int = ROUNDS) -> list[Figure]:
    """The CPU of a worker for a message, with metrics, TLS and tokens, against without."""
    order = Order("bench-access", FIRST, partitions=8, calls=4)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tls, signer = _certificate(folder)
        auth: dict[str, Any] = {"auth": True, "admin_token": TOKEN}
        contenders = {
            "metrics": _contender(stack, order, metrics=True),
            "plain": _contender(stack, order),
            "TLS": _contender(stack, order, {"SSL_CERT_FILE": signer}, **tls),
            "tokens": _contender(stack, order, {"KEYLANE_TOKEN": TOKEN}, **auth),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for number in range(rounds + 1):
            for name in list(contenders)[:: -1 if number % 2 else 1]:
                rate, micros = contenders[name].play(order)
                if number:
                    found[name].append((rate, micros))
                elif name == "plain":
                    order = order._replace(messages=max(round(rate * seconds), FIRST))
    named = {
        "metrics": "worker CPU, metrics on against off",
        "TLS": "worker CPU, TLS against plain",
        "tokens": "worker CPU, token checks against none",
    }
    bars = {"metrics": 1.01}
    return [_figure(what, found[name], found["plain"], bars.get(name)) for name, what in named.items()]


def counting() -> list[Figure]:
    """The CPU of a worker for a message, against the same without what it has spent on measuring."""
    found = []
    for name, order in {
        "batch 100": Order("bench-counting", 40_000, partitions=8),
        "singles from 50 tasks": Order("bench-counting", 6_000, partitions=8, batch=1, calls=50),
    }.items():
        with ExitStack() as stack:
            contender = _contender(stack, order, metrics=True)
            _, micros = contender.play(order)
            spent = _measuring(httpx.get(contender.metrics, timeout=60).text) * 1e6 / order.messages
        what = f"worker CPU, metrics on against off as counted, 8 partitions, {name}"
        found.append(Figure(what, micros, micros - spent, None, "us/message", at_most=True))
    return found


def _measuring(scrape: str) -> float:
    """Return the seconds that all measurements together took of which a scrape tells."""
    counters = Counters()
    histogram, now = counters.publish_seconds, counters.now
    kinds = {
        "keylane_script_seconds": lambda: counters.script_ran("x", now()),
        "keylane_publish_seconds": lambda: histogram.add(now() - now()),
        "keylane_delivery_seconds": lambda: histogram.add(now() - now()),
        "keylane_batch_messages": lambda: histogram.add(1),
    }
    counters.script_ran("x", now())
    each = {name: min(timeit.repeat(step, number=1_000, repeat=200)) / 1_000 for name, step in kinds.items()}
    return sum(
        sample.value * each[family.name]
        for family in text_string_to_metric_families(scrape)
        if family.name in each
        for sample in family.samples
        if sample.name.endswith("_count")
    )


def _figure(
    what: str, ours: list[tuple[float, float]], plain: list[tuple[float, float]], bar: float | None
) -> Figure:
    mine, theirs = ([micros for _, micros in rounds] for rounds in (ours, plain))
    ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
    return Figure(
        f"{what}, 8 partitions, batch 100",
        statistics.median(mine),
        statistics.median(theirs),
        bar,
        "us/message",
        at_most=True,
        spread=(min(ratios), max(ratios)),
    )


def rest(seconds: float = REST_SECONDS) -> list[Figure]:
    """What one worker publishes for four connections that send a hundred at a time.

    Messages a second, which are fewer on a machine that has other things to do, and its CPU for each: no more
    than it may take at the bar.
    """
    topic = "bench-rest"
    messages = [{"data": "x" * 100, "key": f"customer-{number}"} for number in range(REST_BATCH)]
    with running_broker(http_port=free_port()) as broker, Client(broker.url) as client:
        client.create_topic(topic, partitions=8)
        client.create_subscription(topic, "s")
        [worker] = broker.workers
        rates, micros = [], []
        for _ in range(3):
            before, began = cpu_of(worker.pid), time.monotonic()
            count = _post(broker.http_url, topic, messages, seconds)
            rates.append(count / (time.monotonic() - began))
            micros.append((cpu_of(worker.pid) - before) * 1e6 / count)
    what, allowed = f"REST publish, batches of {REST_BATCH} with bodies of 100 bytes", 1e6 / REST_BAR
    return [
        Figure(
            what,
            statistics.median(rates),
            REST_BAR,
            1.0,
            "messages/s",
            spread=(min(rates) / REST_BAR, max(rates) / REST_BAR),
        ),
        Figure(
            f"worker CPU, {what}",
            statistics.median(micros),
            allowed,
            1.0,
            "us/message",
            at_most=True,
            spread=(min(micros) / allowed, max(micros) / allowed),
        ),
    ]


def _post(url: str, topic: str, messages: list[dict[str, str]], seconds: float) -> int:
    """Return how many messages were published in this time."""
    body = msgspec.json.encode({"messages": messages})
    end = time.monotonic() + seconds

    def post(_: int) -> int:
        count = 0
        with httpx.Client(base_url=url, timeout=60) as http:
            while time.monotonic() < end:
                answer = http.post(
                    f"/v1/topics/{topic}/messages", content=body, headers={"Content-Type": "application/json"}
                )
                assert answer.status_code == 200, answer.text
                count += len(messages)
        return count

    with ThreadPoolExecutor(4) as threads:
        return sum(threads.map(post, range(4)))


def run() -> list[Figure]:
    """On brokers of its own."""
    return [*rest(), *counting(), *costs()]


if __name__ == "__main__":
    print_table(run())
