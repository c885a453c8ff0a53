"""The benchmark suite: `make bench` runs every workload, writes docs/bench.json and docs/benchmarks.md.

Each figure is a ratio of two things measured in turn in the same run on the same server, because machines
differ and are noisy; the server is the embedded one with its default append-only persistence.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import typer
import uvloop
from anyio.from_thread import start_blocking_portal
from redis import Redis

from keylane import Client
from keylane_broker.config import Settings
from keylane_broker.engine.engine import Engine
from keylane_broker.supervise.embedded_server import Server
from keylane_broker.supervise.supervisor import Running, supervise
from loadtest import (
    broker_bench,
    calls_bench,
    cluster_bench,
    crowd_bench,
    engine_bench,
    recovery_bench,
    spark_bench,
)
from loadtest.report import Figure, print_table, put, write_docs

ROOT = Path(__file__).resolve().parent.parent


async def run_engine(url: str, backlog: int) -> list[Figure]:
    """The workloads of the scripts alone, one after the other."""
    engine = Engine.connect(url)
    figures: list[Figure] = []
    try:
        for part in (
            engine_bench.round_trip(engine, url),
            engine_bench.fan_out(engine),
            engine_bench.journal(engine),
            engine_bench.memory(engine),
            engine_bench.deep_backlog(engine, url, backlog),
            calls_bench.longest_calls(engine),
            calls_bench.in_order(engine),
        ):
            found = await part
            print_table(found)
            figures += found
    finally:
        await engine.close()
    return figures


def run_broker(partitions: int = 1) -> list[Figure]:
    """The workloads of the whole product."""
    figures: list[Figure] = []
    with running_broker() as broker, Client(broker.url) as client, Redis.from_url(broker.redis_url) as redis:

        @contextmanager
        def topic(name: str) -> Iterator[None]:
            client.create_topic(name, partitions=partitions)
            yield
            client.delete_topic(name)
            redis.unlink(broker_bench.by_hand(name))

        with ExitStack() as stack:
            stage = broker_bench.Stage(stack, broker.url, broker.redis_url)
            for workload in (broker_bench.latency, broker_bench.throughput):
                figures += workload(stage, topic)
        with ExitStack() as stack:
            stage = broker_bench.Stage(stack, broker.url, broker.redis_url, consumers=5)
            figures += broker_bench.fan_out(stage, topic)
        figures += crowd_bench.run(broker.url)
    print_table(figures)
    return figures


@contextmanager
def running_broker() -> Iterator[Running]:
    """What `keylane serve` starts."""
    with tempfile.TemporaryDirectory() as folder, start_blocking_portal() as portal:
        settings = Settings(port=0, data_dir=Path(folder), log_level="warning")
        with portal.wrap_async_context_manager(supervise(settings)) as broker:
            yield broker


def run_recovery() -> list[Figure]:
    """A crowd whose worker is killed."""
    figures = uvloop.run(recovery_bench.measure(recovery_bench.CROWD))
    print_table(figures)
    return figures


def run_growth() -> tuple[list[Figure], list[str]]:
    """More workers and more nodes: figures, and the table with what a message costs in CPU."""
    found = cluster_bench.run()
    first = found[0]
    figures = [
        Figure(
            f"{kind.workers} workers on {kind.nodes} Redis nodes, against 1 on 1",
            kind.rate,
            first.rate,
            None,
            "messages/s",
        )
        for kind in found[1:]
    ]
    print_table(figures)
    lines = cluster_bench.table(found)
    print(*lines, sep="\n")
    return figures, lines


def run_spark() -> tuple[list[Figure], list[str]]:
    """Rows through the data source, and the audit of a large journal in a process of its own."""
    with running_broker() as broker:
        figures = spark_bench.run(broker.url, broker.redis_url)
    print_table(figures)
    command = [sys.executable, "-m", "loadtest.audit_bench"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    said = msgspec.json.decode(done.stdout.splitlines()[-1])
    lines = [
        "| journal rows | messages | deliveries | seconds | rows/s | peak MB, JVM | peak MB, Python |",
        "|---:|---:|---:|---:|---:|---:|---:|",
        f"| {said['rows']:,} | {said['messages']:,} | {said['deliveries']:,} | {said['seconds']} "
        f"| {said['rows_per_second']:,} | {said['peak_mb']['jvm']:,} | {said['peak_mb']['python']:,} |",
    ]
    print(*lines, sep="\n")
    return figures, lines


def main(
    backlog: int = 1_000_000,
    write: bool = True,
    engine: bool = True,
    broker: bool = True,
    growth: bool = True,
    spark: bool = True,
) -> None:
    """Run the suite, or a part of it: the other figures stay. --no-write leaves files alone."""
    figures = run_broker() + run_recovery() if broker else []
    grown, lines = run_growth() if growth else ([], [])
    figures += grown
    sparked, audited = run_spark() if spark else ([], [])
    figures += sparked
    if engine:
        with Server() as server:
            figures += uvloop.run(run_engine(server.url, backlog))
    if write:
        file = ROOT / "docs" / "bench.json"
        known = msgspec.json.decode(file.read_bytes(), type=list[Figure]) if file.exists() else []
        by_name = {figure.workload: figure for figure in (*known, *figures)}
        whole = engine and broker and growth and spark
        figures = figures if whole else list(by_name.values())
        encoded = msgspec.json.encode([figure.as_json() for figure in figures])
        file.write_bytes(msgspec.json.format(encoded, indent=1))
        write_docs(figures, ROOT / "docs")
        if lines:
            put(lines, "growth", ROOT / "docs" / "benchmarks.md")
        if audited:
            put(audited, "audit", ROOT / "docs" / "benchmarks.md")


if __name__ == "__main__":
    typer.run(main)
