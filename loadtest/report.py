"""What a benchmark found: one figure per workload, as a table, as JSON and as a plot."""

import msgspec
from rich.console import Console
from rich.table import Table


class Figure(msgspec.Struct):
    """Ours against a baseline measured in the same run; the bar is on their ratio."""

    workload: str
    ours: float
    baseline: float
    bar: float
    unit: str
    at_most: bool = False

    @property
    def ratio(self) -> float:
        """Ours by the baseline's."""
        return self.ours / self.baseline

    @property
    def reached(self) -> bool:
        """Whether the bar is reached."""
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
    Console().print(table)


def row(figure: Figure) -> list[str]:
    """A figure as the cells of a table."""
    digits = 0 if figure.ours >= 1_000 else 1
    return [
        figure.workload,
        f"{figure.ours:,.{digits}f}",
        f"{figure.baseline:,.{digits}f}",
        f"{figure.ratio:.2f}",
        f"{'≤' if figure.at_most else '≥'} {figure.bar:g}",
        figure.unit,
        "reached" if figure.reached else "MISSED",
    ]
