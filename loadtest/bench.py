"""The benchmark suite: `make bench` runs every part, writes docs/bench.json and docs/benchmarks.md.

    python -m loadtest.bench --list                   # what there is
    python -m loadtest.bench --only "64 partitions"   # the lines whose name has this in it
    python -m loadtest.bench --quick                  # what has a bar, in two minutes

Each figure is compared with another that was measured in turn, in the same run, on the same server, because
machines differ and are noisy. The server is the embedded one, with its append-only file synced every second.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop

from keylane_broker.engine.engine import Engine
from keylane_broker.supervise.embedded_server import Server
from loadtest import (
    access_bench,
    calls_bench,
    cluster_bench,
    engine_bench,
    footprint,
    hot_key_bench,
    recovery_bench,
    semantics_bench,
)
from loadtest.lines import BARS, LINES, figures_of
from loadtest.matched import measure, running_broker, stage
from loadtest.report import DETAILS, HEADS, Figure, details, draw, print_table, put, row, summary, table
from loadtest.results import Result

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGE, FILE = DOCS / "benchmarks.md", DOCS / "bench.json"
SECONDS, ROUNDS = 12.0, 5  # of a line
QUICK_SECONDS, QUICK_ROUNDS = 6.0, 3  # and the lines with bars alone
SINGLES = {
    "memory of a message": footprint.memory,
    "CPU of Redis for one message": footprint.one_message,
}
QUICK = {bar.line for bar in BARS} | SINGLES.keys()
Outcome = tuple[list[Figure], dict[str, list[str]]]  # figures, and tables by the mark of their place


class Found(msgspec.Struct):
    """What docs/bench.json holds."""

    results: list[Result]
    figures: list[Figure]

    def join(self, newer: "Found") -> "Found":
        """With what has been measured again in its place."""
        results = {(one.line, one.contender): one for one in (*self.results, *newer.results)}
        figures = {one.workload: one for one in (*self.figures, *newer.figures)}
        return Found(list(results.values()), list(figures.values()))

    def as_json(self) -> str:
        """A line for each result and each figure."""
        parts: dict[str, Sequence[object]] = {
            "results": self.results,
            "figures": [figure.as_json() for figure in self.figures],
        }
        lines = {
            name: ",\n".join(msgspec.json.encode(one).decode() for one in part)
            for name, part in parts.items()
        }
        return "{" + ",\n".join(f'"{name}": [\n{text}\n]' for name, text in lines.items()) + "}\n"


def run_lines(wanted: Callable[[str], bool], seconds: float, rounds: int) -> Found:
    """The whole broker, line by line."""
    found = Found([], [])
    lines = [line for line in LINES if wanted(line.name)]
    singles = [part for name, part in SINGLES.items() if wanted(name)]
    if not lines and not singles:
        return found
    with stage() as on:
        for line in lines:
            results = measure(on, line, seconds, rounds)
            print(*table(DETAILS, details(results), words=2), "", sep="\n", flush=True)
            found.results += results
        found.figures += figures_of(found.results)
        for part in singles:
            found.figures += part(on, seconds, rounds)
    print_table(found.figures)
    return found


def run_scripts() -> Outcome:
    """The scripts alone, in large keyspaces."""

    async def run(url: str) -> list[Figure]:
        engine = Engine.connect(url)
        try:
            return [
                *await engine_bench.fan_out(engine),
                *await engine_bench.journal(engine),
                *await engine_bench.deep_backlog(engine, url),
                *await calls_bench.longest_calls(engine),
                *await calls_bench.in_order(engine),
            ]
        finally:
            await engine.close()

    with Server() as server:
        return uvloop.run(run(server.url)), {}


def run_growth() -> Outcome:
    """More workers and more nodes: figures, and the table with what a message costs in CPU."""
    found = cluster_bench.run()
    first = found[0]
    title = "{} workers on {} Redis nodes, against 1 on 1"
    figures = [
        Figure(title.format(kind.workers, kind.nodes), kind.rate, first.rate, None, "messages/s")
        for kind in found[1:]
    ]
    return figures, {"growth": cluster_bench.table(found)}


def run_spark() -> Outcome:
    """Rows through the data source, and the audit of a large journal in a process of its own."""
    from loadtest import spark_bench  # Spark takes its time, and every player imports this module

    with running_broker() as broker:
        figures = spark_bench.run(broker.url, broker.redis_url)
    command = [sys.executable, "-m", "loadtest.audit_bench"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    said = msgspec.json.decode(done.stdout.splitlines()[-1])
    heads = "journal rows", "messages", "deliveries", "seconds", "rows/s", "peak MB, JVM", "peak MB, Python"
    values = [said[name] for name in ("rows", "messages", "deliveries", "seconds", "rows_per_second")]
    values += [said["peak_mb"][name] for name in ("jvm", "python")]
    return figures, {"audit": table(heads, [[f"{value:,}" for value in values]], words=0)}


PARTS: dict[str, Callable[[], Outcome]] = {
    "hot key": lambda: (hot_key_bench.run(), {}),
    "recovery": lambda: (uvloop.run(recovery_bench.measure(recovery_bench.CROWD)), {}),
    "access": lambda: (access_bench.run(), {}),
    "scripts": run_scripts,
    "message semantics": lambda: (semantics_bench.run(), {}),
    "growth": run_growth,
    "Spark": run_spark,
}


def main(
    only: Annotated[list[str] | None, typer.Option(help="Run what has this in its name.")] = None,
    seconds: Annotated[float, typer.Option(help="Seconds of a line.")] = SECONDS,
    rounds: Annotated[int, typer.Option(help="Rounds of a line.")] = ROUNDS,
    quick: Annotated[bool, typer.Option(help="Run what has a bar, briefly.")] = False,
    write: Annotated[bool, typer.Option(help="Write what was run to docs; a whole run always is.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Say what there is.")] = False,
) -> None:
    """Run the suite, or a part of it."""
    if names:
        print(*(line.name for line in LINES), *SINGLES, *PARTS, sep="\n")
        return
    if quick:
        seconds, rounds = QUICK_SECONDS, QUICK_ROUNDS

    def wanted(name: str) -> bool:
        return (not quick or name in QUICK) and (
            not only or any(part.lower() in name.lower() for part in only)
        )

    found = run_lines(wanted, seconds, rounds)
    tables: dict[str, list[str]] = {}
    for name, part in PARTS.items():
        if wanted(name):
            figures, said = part()
            print_table(figures)
            found.figures += figures
            tables |= said
    if only or quick:
        found = msgspec.json.decode(FILE.read_bytes(), type=Found).join(found)
    if write or not (only or quick):
        save(found, tables)


def save(found: Found, tables: dict[str, list[str]]) -> None:
    """Write docs/bench.json, and what the page shows of it."""
    FILE.write_text(found.as_json(), "utf-8")
    tables |= {
        "lines": summary(found.results),
        "details": table(DETAILS, details(found.results), words=2),
        "figures": table(HEADS, map(row, found.figures)),
    }
    for mark, lines in tables.items():
        put(lines, mark, PAGE)
    draw([figure for figure in found.figures if figure.bar is not None], DOCS / "benchmarks.png")


if __name__ == "__main__":
    typer.run(main)
