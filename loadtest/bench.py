"""The benchmark suite: `make bench` runs every workload, writes bench.json and docs/benchmarks.md.

Each figure is a ratio of two things measured in turn in the same run on the same server, because machines
differ and are noisy; the server is the embedded one with its default append-only persistence.
"""

from pathlib import Path

import msgspec
import typer
import uvloop

from broker.engine import Engine
from broker.server import Server
from loadtest import engine_bench
from loadtest.report import Figure, print_table, write_docs

ROOT = Path(__file__).resolve().parent.parent


async def run(url: str, backlog: int) -> list[Figure]:
    """All workloads, one after the other."""
    engine = Engine.connect(url)
    figures: list[Figure] = []
    try:
        for part in (
            engine_bench.round_trip(engine, url),
            engine_bench.fan_out(engine),
            engine_bench.memory(engine),
            engine_bench.deep_backlog(engine, url, backlog),
        ):
            found = await part
            print_table(found)
            figures += found
    finally:
        await engine.close()
    return figures


def main(backlog: int = 1_000_000, write: bool = True) -> None:
    """Run the suite; --no-write leaves bench.json and docs/ alone."""
    with Server() as server:
        figures = uvloop.run(run(server.url, backlog))
    if write:
        (ROOT / "bench.json").write_bytes(
            msgspec.json.format(msgspec.json.encode([figure.as_json() for figure in figures]), indent=1)
        )
        write_docs(figures, ROOT / "docs")


if __name__ == "__main__":
    typer.run(main)
