"""What a benchmark found: one figure per workload, as a table, as JSON and as a plot."""

from pathlib import Path

import matplotlib
import msgspec
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table


class Figure(msgspec.Struct):
    """Ours against a baseline measured in the same run; the bar is on their ratio."""

    workload: str
    ours: float
    baseline: float
    bar: float | None  # None: none was set
    unit: str
    at_most: bool = False

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
    table = Table("workload", "ours", "baseline", "ratio", "bar", "unit", "")
    for figure in figures:
        table.add_row(*row(figure))
    Console(width=130).print(table)


def row(figure: Figure) -> list[str]:
    """A figure as the cells of a table."""
    digits = 0 if figure.ours >= 1_000 else 1
    return [
        figure.workload,
        f"{figure.ours:,.{digits}f}",
        f"{figure.baseline:,.{digits}f}",
        f"{figure.ratio:.2f}",
        "" if figure.bar is None else f"{'≤' if figure.at_most else '≥'} {figure.bar:g}",
        figure.unit,
        "" if figure.bar is None else "reached" if figure.reached else "MISSED",
    ]


def write_docs(figures: list[Figure], docs: Path) -> None:
    """Put the table between the marks in benchmarks.md and draw the plot beside it."""
    lines = ["| workload | ours | baseline | ratio | bar | unit | |", "|---|---:|---:|---:|---:|---|---|"]
    lines += ["| " + " | ".join(row(figure)) + " |" for figure in figures]
    put(lines, "figures", docs / "benchmarks.md")
    draw([figure for figure in figures if figure.bar is not None], docs / "benchmarks.png")


def put(lines: list[str], mark: str, page: Path) -> None:
    """Replace what is between two marks of a page."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, _, rest = page.read_text("utf-8").partition(begin)
    after = rest.partition(end)[2]
    page.write_text(f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}", "utf-8")


def draw(figures: list[Figure], path: Path) -> None:
    """A bar per workload: its ratio, with its bar as a tick."""
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
