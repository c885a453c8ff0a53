"""What a benchmark found: one figure per workload, as a table, as JSON and as a plot."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from loadtest.results import Result


class Figure(msgspec.Struct):
    """Ours against a baseline measured in the same run; the bar is on their ratio."""

    workload: str
    ours: float
    baseline: float
    bar: float | None  # None: none was set
    unit: str
    at_most: bool = False
    aim: float | None = None  # beyond the bar
    spread: tuple[float, float] | None = None  # the lowest and the highest ratio of a round

    @property
    def ratio(self) -> float:
        """Ours by the baseline's."""
        return self.ours / self.baseline

    @property
    def reached(self) -> bool:
        """Whether the bar is reached."""
        if self.bar is None:
            return True
        return self.ratio <= self.bar if self.at_most else self.ratio >= self.bar

    def as_json(self) -> dict[str, object]:
        """The object for bench.json."""
        fields = msgspec.structs.asdict(self)
        return {**fields, "ratio": round(self.ratio, 3), "reached": self.reached}


def print_table(figures: list[Figure]) -> None:
    """Show the figures on the terminal."""
    print(*table(HEADS, map(row, figures)), sep="\n", flush=True)


CPU = ("producer", "worker", "redis", "consumer")
DETAILS = ("line", "contender", "messages/s", "p50 ms", "p99 ms", *(f"{who} us" for who in CPU), "all us")
HEADS = ("workload", "ours", "baseline", "ratio", "rounds", "bar", "unit", "")


def row(figure: Figure) -> list[str]:
    """A figure as the cells of a table."""
    return [
        figure.workload,
        number(figure.ours),
        number(figure.baseline),
        f"{figure.ratio:.2f}",
        "" if figure.spread is None else f"{figure.spread[0]:.2f} to {figure.spread[1]:.2f}",
        "" if figure.bar is None else f"{'≤' if figure.at_most else '≥'} {figure.bar:g}{_aim(figure)}",
        figure.unit,
        "" if figure.bar is None else "reached" if figure.reached else "MISSED",
    ]


def _aim(figure: Figure) -> str:
    return "" if figure.aim is None else f", aim {figure.aim:g}"


def number(value: float) -> str:
    """As many digits as can be told apart."""
    return f"{value:,.{0 if value >= 1_000 else 1 if value >= 10 else 2}f}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> list[str]:
    """Markdown, as wide as its cells; the first columns are words, the others figures."""
    cells = [heads, *rows]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * width if place < words else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
    lines = [
        [
            cell.ljust(width) if place < words else cell.rjust(width)
            for place, (cell, width) in enumerate(pairs)
        ]
        for pairs in (list(zip(line, widths, strict=True)) for line in (cells[0], rule, *cells[1:]))
    ]
    return ["| " + " | ".join(line) + " |" for line in lines]


def details(results: list[Result]) -> Iterator[list[str]]:
    """Each contender of each line: how fast, and what a message cost each process."""
    for result in results:
        latency = ["", ""]
        if result.median("p99"):
            latency = [
                f"{number(result.median(what))} ({_range(result.each(what))})" for what in ("p50", "p99")
            ]
        rate = f"{number(result.median('rate'))} ({_range(result.each('rate'))})"
        cpu = [number(result.median(what)) for what in CPU]
        yield [result.line, result.contender, rate, *latency, *cpu, number(sum(map(result.median, CPU)))]


def _range(values: list[float]) -> str:
    return f"{number(min(values))} to {number(max(values))}"


def summary(results: list[Result]) -> list[str]:
    """Messages a second of the lines that are measured by hand too, and how many times that is."""
    by_line: dict[str, dict[str, Result]] = {}
    for result in results:
        by_line.setdefault(result.line, {})[result.contender] = result
    columns = (
        *("raw", "raw, asyncio", "shared", "key-shared"),
        *("raw, body", "raw, asyncio, body", "shared, body"),
    )
    rows = []
    for line, found in by_line.items():
        if not found.keys() >= set(columns) or any(result.median("p99") for result in found.values()):
            continue
        cells = []
        for label in columns:
            rate, base = found[label].median("rate"), found["raw, body" if "body" in label else "raw"]
            cells.append(
                number(rate)
                if label.startswith("raw")
                else f"{number(rate)} ({rate / base.median('rate'):.2f})"
            )
        rows.append([line, *cells])
    return table(("messages/s (times raw)", *columns), rows)


def put(lines: list[str], mark: str, page: Path) -> None:
    """Replace what is between two marks of a page."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, _, rest = page.read_text("utf-8").partition(begin)
    after = rest.partition(end)[2]
    page.write_text(f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}", "utf-8")


def draw(figures: list[Figure], path: Path) -> None:
    """A bar per workload: its ratio, with its bar as a tick."""
    import matplotlib  # takes its time, and only a whole run draws
    from matplotlib import pyplot

    matplotlib.use("Agg")
    rows = figures[::-1]
    plot, axes = pyplot.subplots(figsize=(10, 0.42 * len(rows) + 1.2), layout="constrained")
    colours = ["#2a9d8f" if figure.reached else "#e76f51" for figure in rows]
    places = range(len(rows))
    axes.barh(places, [figure.ratio for figure in rows], color=colours, height=0.6)
    axes.plot([figure.bar or 0 for figure in rows], places, "k|", markersize=16, markeredgewidth=2)
    for place, figure in zip(places, rows, strict=True):
        axes.text(0.03, place, f"{figure.ratio:.2f}", va="center", color="white", weight="bold")
    axes.set_yticks(
        places,
        [f"{figure.workload}  ({'max' if figure.at_most else 'min'} {figure.bar:g})" for figure in rows],
    )
    axes.set_xlabel("ratio to the baseline, bar as a tick")
    axes.spines[["top", "right"]].set_visible(False)
    plot.savefig(path, dpi=120)
    pyplot.close(plot)
