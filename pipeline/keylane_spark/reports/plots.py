"""Pictures for reports: drawn by matplotlib, as bytes of PNG that a page can hold."""

import io
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import nan
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no screen here

from matplotlib import dates, ticker
from matplotlib.figure import Figure

LEAST_SPANS = 7  # that an axis of time has room for
INK = "#1d2733"
COLOURS = ("#2a6fbb", "#e08a1e", "#3a9c5f", "#b03a5b", "#6f5bb0", "#4aa3a8", "#8a6d3b", "#7a8794")
STATE_COLOURS = {
    "settled": "#3a9c5f",
    "backlog": "#9cc3ea",
    "let_go": "#b9c0c8",
    "not_owed": "#dfe3e7",
    "lost": "#c6283a",
}


def picture(draw: Callable[[Any], None], *, width: float = 9.0, height: float = 3.4) -> bytes:
    """Draw on fresh axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes: Any = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8)
    axes.grid(axis="y", color="#e6e9ed", linewidth=0.8)
    axes.set_axisbelow(True)
    draw(axes)
    made = io.BytesIO()
    figure.savefig(made, format="png", dpi=130)
    return made.getvalue()


def moment(ms: float) -> datetime:
    """Milliseconds as a time."""
    return datetime.fromtimestamp(ms / 1_000, UTC)


def time_axis(axes: Any, first_ms: int, last_ms: int, width_ms: int) -> None:
    """Make the x axis one of times, just as long as the spans from first to last, and a few at least."""
    spans = (last_ms - first_ms) // width_ms + 1
    around = max(0, LEAST_SPANS - spans) / 2 + spans / 100
    axes.set_xlim(moment(first_ms - around * width_ms), moment(last_ms + (1 + around) * width_ms))
    locator = dates.AutoDateLocator(minticks=3, maxticks=9)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    axes.xaxis.get_offset_text().set_fontsize(8)
    axes.set_xlabel("UTC", fontsize=8)


def line(axes: Any, points: Sequence[tuple[int, float]], width_ms: int, **style: Any) -> None:
    """A line through spans; it ends where one has nothing to say, and one by itself is a dot."""
    times, values, before = [], [], None
    for at_ms, value in sorted(points):
        if before is not None and at_ms - before > width_ms:
            times.append(moment(at_ms))
            values.append(nan)
        times.append(moment(at_ms + width_ms / 2))
        values.append(value)
        before = at_ms
    axes.plot(times, values, marker="o", ms=3, **style)


def bands(axes: Any, ranges: Sequence[tuple[int, float, float]], width_ms: int, **style: Any) -> None:
    """From a lower to an upper value, as wide as the span."""
    times = [moment(at_ms) for at_ms, _, _ in ranges]
    heights = [upper - lower for _, lower, upper in ranges]
    lowers = [lower for _, lower, _ in ranges]
    width = timedelta(milliseconds=width_ms)
    axes.bar(times, heights, width, lowers, align="edge", linewidth=0, **style)


def steps(axes: Any, points: Sequence[tuple[int, float]], width_ms: int, **style: Any) -> None:
    """Counts by span: nothing where there is none."""
    amounts = dict(points)
    first, last = min(amounts), max(amounts)
    edges = range(first, last + width_ms + 1, width_ms)
    values = [amounts.get(at_ms, 0) for at_ms in edges[:-1]]
    axes.stairs(values, dates.date2num([moment(at_ms) for at_ms in edges]), **style)  # type: ignore[no-untyped-call]
    axes.xaxis_date()


def counts(axes: Any, which: str = "y") -> None:
    """Write 12k and 3M for big numbers."""
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_locator(ticker.MaxNLocator(6, integer=True, steps=(1, 2, 5, 10)))
    axis.set_major_formatter(ticker.EngFormatter(sep=""))


def plain_log(axes: Any) -> None:
    """A log scale that says 1, 10 and 1000."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.tick_params(which="minor", colors=INK, labelsize=8)
    axes.yaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(2, 0.5)))  # only where there is room


def legend(axes: Any, columns: int = 1) -> None:
    """Beside the picture, where it hides nothing."""
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), ncols=columns)


def stacked_bars(
    axes: Any, names: Sequence[str], parts: Mapping[str, Sequence[int]], colours: dict[str, str]
) -> None:
    """A horizontal bar for each name, made of parts."""
    left = [0] * len(names)
    for part, values in parts.items():
        if any(values):
            axes.barh(names, values, left=left, height=0.6, color=colours[part], label=part.replace("_", " "))
            left = [before + value for before, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.grid(visible=False)
    counts(axes, "x")
    axes.set_xlabel("messages", fontsize=8)
    legend(axes)
