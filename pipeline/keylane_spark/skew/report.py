"""Skew as files: `skew.json` for programs, `plan.json` for `keylane rebalance`, `skew.html` for people."""

from typing import Any

import msgspec

from keylane.commandline.rebalance_plan import dump_plan
from keylane_spark.files import Files
from keylane_spark.reports import plots
from keylane_spark.reports.page import Page, shown_time
from keylane_spark.reports.spans import WIDTHS
from keylane_spark.skew.findings import Skew
from keylane_spark.skew.packing import GOOD

LEAST_BARS = 6  # that there is room for: one partition is no wall
DRAWN = 64  # partitions; more would be a grey wall


def write_skew(found: Skew, out: str, files: Files) -> None:
    """Write all three."""
    files.make_folder(out)
    files.write(f"{out}/skew.json", msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    plan = dump_plan(found.moves, topic=found.topic, made_at=found.made_at, workers=found.workers)
    files.write(f"{out}/plan.json", plan)
    files.write(f"{out}/skew.html", page_of(found))


def page_of(found: Skew) -> str:
    """The report."""
    page = Page(
        f"Skew of {found.topic}",
        f"{shown_time(found.made_at)}: {found.messages:,} messages, {found.keys:,} keys, from {found.source}",
    )
    page.bullets(found.advice)
    page.heading("Partitions")
    page.picture(plots.picture(lambda axes: _partitions(axes, found)), "Messages by partition")
    page.note(f"The busiest partition has {found.imbalance:.2f} times the mean (the line).")
    if found.misplaced:
        page.note(
            f"{found.misplaced:,} messages are not where their key hashes to: their partition was named."
        )
    if found.hot_keys:
        page.heading("Hot keys")
        page.picture(
            plots.picture(lambda axes: _keys(axes, found), height=1 + 0.22 * len(found.hot_keys)), "Hot keys"
        )
        page.table(
            ["key", "messages", "% of all", "partition"],
            [(key.key, key.messages, round(100 * key.share, 1), key.partition) for key in found.hot_keys],
        )
    if found.spans:
        span = WIDTHS[found.span_ms]
        page.heading("Imbalance over time")
        page.picture(plots.picture(lambda axes: _spans(axes, found)), f"Imbalance of each {span}")
        page.note(f"The busiest partition over the mean of all, of each {span}; in grey the messages.")
    page.heading("How many partitions")
    page.picture(plots.picture(lambda axes: _candidates(axes, found)), "Imbalance by number of partitions")
    page.note(
        "As the keys hash: the busiest partition, and the busiest worker when partitions are well placed."
    )
    page.heading("Placement")
    page.picture(
        plots.picture(lambda axes: _workers(axes, found), height=1.2 + 0.4 * len(found.workers)), "Workers"
    )
    if found.moves:
        page.table(["partition", "to"], [(str(move.partition), move.worker) for move in found.moves])
        page.note("keylane rebalance --plan plan.json --dry-run")
    return page.html()


def _partitions(axes: Any, found: Skew) -> None:
    some = sorted(found.partitions, key=lambda one: -one.messages)[:DRAWN]
    mean = found.messages / max(1, len(found.partitions))
    colours = [plots.COLOURS[1] if one.messages > GOOD * mean else plots.COLOURS[0] for one in some]
    axes.bar([str(one.partition) for one in some], [one.messages for one in some], color=colours, width=0.7)
    axes.axhline(mean, color=plots.INK, linewidth=1, linestyle="--")
    axes.set_xlabel("partition, the busiest first", fontsize=8)
    axes.set_ylabel("messages", fontsize=8)
    axes.set_xlim(-0.6, max(LEAST_BARS, len(some)) - 0.4)
    if len(some) > 24:
        axes.tick_params(axis="x", labelsize=6, rotation=90)
    plots.counts(axes)


def _keys(axes: Any, found: Skew) -> None:
    names = [key.key if len(key.key) <= 32 else f"{key.key[:31]}…" for key in found.hot_keys]
    axes.barh(
        range(len(names)), [100 * key.share for key in found.hot_keys], color=plots.COLOURS[0], height=0.7
    )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlabel("% of all messages", fontsize=8)


def _spans(axes: Any, found: Skew) -> None:
    behind = axes.twinx()
    amounts = [(span.at_ms, span.messages) for span in found.spans]
    plots.steps(behind, amounts, found.span_ms, fill=True, color="#e6e9ed")
    behind.set_ylabel("messages", fontsize=8)
    behind.tick_params(labelsize=8)
    behind.spines["top"].set_visible(False)
    behind.set_ylim(bottom=0)
    plots.counts(behind)
    axes.set_zorder(behind.get_zorder() + 1)
    axes.patch.set_visible(False)
    uneven = [(span.at_ms, span.imbalance) for span in found.spans]
    plots.line(axes, uneven, found.span_ms, color=plots.COLOURS[1])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("busiest over mean", fontsize=8)
    plots.time_axis(axes, found.spans[0].at_ms, found.spans[-1].at_ms, found.span_ms)


def _candidates(axes: Any, found: Skew) -> None:
    counts = [str(one.partitions) for one in found.candidates]
    for number, what, values in (
        (0, "partition", [one.imbalance for one in found.candidates]),
        (2, "worker", [one.workers for one in found.candidates]),
    ):
        axes.plot(counts, values, color=plots.COLOURS[number], marker="o", ms=4, linewidth=0.8, label=what)
    axes.axhline(GOOD, color=plots.INK, linewidth=1, linestyle="--")
    for what, count, colour in (
        ("now", sum(one.partitions for one in found.workers), plots.INK),
        ("recommended", found.recommended, plots.COLOURS[2]),
    ):
        if count is not None:
            axes.axvline(counts.index(str(count)), color=colour, linewidth=8, alpha=0.15, label=what)
    plots.plain_log(axes)
    axes.set_xlabel("partitions", fontsize=8)
    axes.set_ylabel("busiest over mean", fontsize=8)
    plots.legend(axes)


def _workers(axes: Any, found: Skew) -> None:
    places = range(len(found.workers))
    bars = [("now", plots.COLOURS[0], [100 * one.before for one in found.workers])]
    if found.moves:
        bars.append(("with the plan", plots.COLOURS[2], [100 * one.after for one in found.workers]))
    height = 0.72 / len(bars)
    for number, (what, colour, values) in enumerate(bars):
        shift = (number - (len(bars) - 1) / 2) * (height + 0.02)
        axes.barh([at + shift for at in places], values, height=height, color=colour, label=what)
    axes.set_yticks(list(places), [one.worker for one in found.workers])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.axvline(100 / max(1, len(found.workers)), color=plots.INK, linewidth=1, linestyle="--")
    axes.set_xlabel("% of the messages (the line: their mean)", fontsize=8)
    plots.legend(axes)
