"""The audit as files: `audit.json` for programs, `audit.html` for people."""

from collections import defaultdict
from functools import partial
from itertools import groupby
from typing import Any

import msgspec

from keylane_spark.auditing.counts import MOST_ATTEMPTS
from keylane_spark.auditing.findings import Audit, Latency
from keylane_spark.auditing.rules import REASONS, STATES
from keylane_spark.files import Files
from keylane_spark.reports import plots
from keylane_spark.reports.page import Page, shown_ms, shown_time
from keylane_spark.reports.spans import WIDTHS

KINDS = {"complete": "good", "incomplete": "bad", "unproven": "doubt"}
SHOWN = 200  # of a long list; the JSON has more of it
DRAWN = 6  # subscriptions in one picture
LINES = (
    "published",
    "delivered",
    "acked",
    "committed",
    "filtered",
    "nacked",
    "timed_out",
    "crashed",
    "released",
    "lost",
)


def write_audit(found: Audit, out: str, files: Files) -> None:
    """Write both."""
    files.write(f"{out}/audit.json", msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    files.write(f"{out}/audit.html", page_of(found))


def page_of(found: Audit) -> str:
    """The report."""
    since = "" if found.since is None else f", of what was published since {shown_time(found.since)}"
    page = Page(
        f"Audit of {found.topic}",
        f"{shown_time(found.taken_at)}: {found.records:,} journal rows, {found.messages:,} messages{since}",
    )
    page.verdict(found.verdict, KINDS[found.verdict], found.why)
    _subscriptions(page, found)
    _lost(page, found)
    _archive(page, found)
    _latency(page, found)
    _activity(page, found)
    _coverage(page, found)
    return page.html()


def _subscriptions(page: Page, found: Audit) -> None:
    page.heading("Subscriptions")
    if not found.subscriptions:
        page.note("The journal has none.")
        return
    columns = [
        "subscription",
        "messages",
        *STATES,
        "never delivered",
        "delivered twice or more",
        "nacked",
        "timed out",
        "crashed",
    ]
    page.table(
        [column.replace("_", " ") for column in columns],
        [
            (
                one.name,
                one.messages,
                *(getattr(one, state) for state in STATES),
                one.undelivered,
                one.duplicates,
                *(one.transitions.get(what, 0) for what in ("nacked", "timed_out", "crashed")),
            )
            for one in found.subscriptions
        ],
    )
    page.note(
        "settled: acked, committed, dead-lettered, expired, skipped, deleted, filtered. backlog: not settled "
        "yet; never delivered: of the backlog. let go: the subscription was deleted or sought past them. not "
        "owed: older than the subscription, and gone before it began. Only what is lost breaks the promise."
    )
    some = found.subscriptions[:SHOWN]
    parts: dict[str, list[int]] = {state: [getattr(one, state) for one in some] for state in STATES}
    names = [one.name for one in some]
    page.picture(
        plots.picture(
            lambda axes: plots.stacked_bars(axes, names, parts, plots.STATE_COLOURS),
            height=1.2 + 0.35 * len(some),
        ),
        "What became of the messages of each subscription",
    )
    page.heading("Attempts")
    page.picture(plots.picture(lambda axes: _attempts(axes, found)), "How often messages were delivered")


def _attempts(axes: Any, found: Audit) -> None:
    some = [one for one in found.subscriptions if one.attempts][:DRAWN]
    most = max([int(times) for one in some for times in one.attempts], default=1)
    width = 0.8 / max(1, len(some))
    for number, one in enumerate(some):
        places = [times - 0.4 + width * (number + 0.5) for times in range(1, most + 1)]
        values = [one.attempts.get(str(times), 0) for times in range(1, most + 1)]
        axes.bar(places, values, width=width * 0.95, color=plots.COLOURS[number], label=one.name)
    axes.set_xticks(
        range(1, most + 1), [f"{n}+" if n == MOST_ATTEMPTS else str(n) for n in range(1, most + 1)]
    )
    axes.set_xlabel("times delivered", fontsize=8)
    axes.set_ylabel("messages, on a log scale", fontsize=8)
    plots.plain_log(axes)
    if some:
        plots.legend(axes)


def _lost(page: Page, found: Audit) -> None:
    if not found.lost_total:
        return
    page.heading("Lost messages")
    page.table(
        ["message", "subscription", "key", "published", "why"],
        [
            (
                message.message_id,
                message.subscription,
                message.key or "-",
                "-" if message.published_ms is None else shown_time(plots.moment(message.published_ms)),
                REASONS[message.reason],
            )
            for message in found.lost[:SHOWN]
        ],
    )
    if found.lost_total > SHOWN:
        page.note(f"{found.lost_total:,} in all; audit.json lists {len(found.lost):,}.")


def _archive(page: Page, found: Audit) -> None:
    archive = found.archive
    if archive is None:
        return
    page.heading("Archive")
    committed = "not in the journal" if archive.committed is None else f"{archive.committed:,}"
    page.table(
        ["", "messages"],
        [
            ("rows", f"{archive.rows:,}"),
            (f"committed by {archive.subscription}", committed),
            ("of these not in the archive", f"{archive.missing:,}"),
            ("never published", f"{archive.never_published:,}"),
            ("there more than once", f"{archive.duplicates:,}"),
            ("older than the journal", f"{archive.unproven:,}"),
            ("newer than the journal", f"{archive.newer:,}"),
            ("rows of earlier topics of this name", f"{archive.earlier:,}"),
        ],
    )
    for what, ids in (
        ("Missing", archive.missing_ids),
        ("Never published", archive.never_published_ids),
        ("More than once", archive.duplicate_ids),
    ):
        if ids:
            page.note(f"{what}: {', '.join(ids[:SHOWN])}{' …' if len(ids) > SHOWN else ''}")


def _latency(page: Page, found: Audit) -> None:
    if not found.latency:
        return
    page.heading("Latency")
    page.table(
        ["subscription", "from publish to", "messages", "p50", "p90", "p99", "max"],
        [
            (
                line.subscription,
                _event(line),
                line.messages,
                *map(shown_ms, (line.p50, line.p90, line.p99, line.max)),
            )
            for line in found.latency
        ],
    )
    over_time: dict[str, list[Latency]] = defaultdict(list)
    for line in found.latency_over_time:
        over_time[line.what].append(line)
    for _, lines in sorted(over_time.items(), reverse=True):
        title = f"From publish to {_event(lines[0])}, by {WIDTHS[found.span_ms]} of publish"
        page.picture(plots.picture(partial(_over_time, lines=lines, width=found.span_ms)), title)
        page.note(f"{title}: p50 (dots), p90 to p99 (shade).")


def _event(line: Latency) -> str:
    return "first delivery" if line.what == "delivered" else "ack"


def _over_time(axes: Any, lines: list[Latency], width: int) -> None:
    for number, (name, group) in enumerate(groupby(lines, key=lambda line: line.subscription)):
        if number == DRAWN:
            break
        some = [(line.at_ms or 0, line) for line in group]
        colour = plots.COLOURS[number]
        middles = [(at, max(1, line.p50)) for at, line in some]
        ranges = [(at, max(1, line.p90), max(1, line.p99)) for at, line in some]
        plots.line(axes, middles, width, color=colour, label=name)
        plots.bands(axes, ranges, width, color=colour, alpha=0.18)
    plots.plain_log(axes)
    axes.set_ylabel("milliseconds", fontsize=8)
    times = [line.at_ms or 0 for line in lines]
    plots.time_axis(axes, min(times), max(times), width)
    plots.legend(axes)


def _activity(page: Page, found: Audit) -> None:
    if not found.activity:
        return
    page.heading("Activity")
    page.picture(plots.picture(lambda axes: _bars(axes, found)), "What happened when")


def _bars(axes: Any, found: Audit) -> None:
    times = sorted({bar.at_ms for bar in found.activity})
    seen = [what for what in LINES if any(bar.transition == what for bar in found.activity)]
    for number, what in enumerate(seen):
        colour = plots.STATE_COLOURS["lost"] if what == "lost" else plots.COLOURS[number % len(plots.COLOURS)]
        amounts = [(bar.at_ms, bar.messages) for bar in found.activity if bar.transition == what]
        plots.steps(axes, amounts, found.span_ms, color=colour, linewidth=1.5, label=what.replace("_", " "))
    plots.counts(axes)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("messages", fontsize=8)
    plots.time_axis(axes, times[0], times[-1], found.span_ms)
    plots.legend(axes)


def _coverage(page: Page, found: Audit) -> None:
    page.heading("What the journal covers")
    page.table(
        ["partition", "published ever", "proven from entry", "unproven", ""],
        [
            (str(part.partition), part.published, part.proven_from, part.unproven, part.why)
            for part in found.coverage[:SHOWN]
        ],
    )
