"""How long a partition was not served: figures of what happened to a cluster under load."""

import json
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from tests.chaos.crowd import Asked

REPORT = "KEYLANE_CHAOS_REPORT"  # names a file to which figures are added, one JSON object a line


class Disturbance(NamedTuple):
    """Something that was done to a cluster: when it began and ended, and whose service it may interrupt."""

    what: str
    began: float
    ended: float
    partitions: Sequence[int]


class Gap(NamedTuple):
    """What a disturbance did to the service; seconds, None if it has nothing to say."""

    event: str
    after: float  # the start of the run
    partitions: int  # concerned
    gap: float | None  # the longest time without an answered publish on one of these partitions
    back: float | None  # from the event until each of them had answered a publish sent after it
    waited: float | None  # the longest that a publish sent to one of them waited for its answer


def measure(disturbances: Sequence[Disturbance], publishes: Iterable[Asked], start: float) -> list[Gap]:
    """The gaps that followed each disturbance, until all its partitions served again or the next began."""
    by_partition: dict[int, list[Asked]] = defaultdict(list)
    for publish in publishes:
        by_partition[publish.partition].append(publish)
    found = []
    for number, item in enumerate(disturbances):
        following = disturbances[number + 1].began if number + 1 < len(disturbances) else item.ended
        each = [_gap(by_partition[partition], item.began, following) for partition in item.partitions]
        longest = [max(figures) for figures in zip(*(gap for gap in each if gap is not None), strict=True)]
        gap, back, waited = longest if longest and None not in each else (None, None, None)
        found.append(Gap(item.what, item.began - start, len(item.partitions), gap, back, waited))
    return found


def _gap(publishes: list[Asked], began: float, following: float) -> tuple[float, float, float] | None:
    """Of one partition: longest silence, time until it was back, longest wait."""
    back = min((publish.answered for publish in publishes if publish.at >= began), default=None)
    if back is None:
        return None
    end = max(back, following)
    answers = [publish.answered for publish in publishes]
    near = answers[max(bisect_left(answers, began) - 1, 0) : bisect_left(answers, end) + 1]
    silence = max((later - earlier for earlier, later in pairwise(near)), default=0.0)
    waited = max(p.answered - p.at for p in publishes if p.answered >= began and p.at <= end)
    return silence, back - began, waited


def table(gaps: Iterable[Gap]) -> str:
    """The figures for people."""
    lines = [f"{'s':>6}  {'event':44} {'partitions':>10} {'gap':>6} {'back':>6} {'waited':>6}  (ms)"]
    for gap in gaps:
        figures = (gap.gap, gap.back, gap.waited)
        texts = ["-" if figure is None else str(round(figure * 1_000)) for figure in figures]
        columns = " ".join(f"{text:>6}" for text in texts)
        lines.append(f"{gap.after:6.2f}  {gap.event:44} {gap.partitions:10} {columns}")
    return "\n".join(lines)


def report(run: str, gaps: Iterable[Gap], **about: object) -> None:
    """Print the figures, and add them to the file that is named for them."""
    gaps = list(gaps)
    print(f"\n{run}: {about}\n{table(gaps)}")
    if file := os.environ.get(REPORT):
        with open(file, "a", encoding="utf-8") as out:
            for gap in gaps:
                seconds = {
                    name: value if name == "event" or value is None else round(value, 3)
                    for name, value in gap._asdict().items()
                }
                out.write(json.dumps({"run": run, **about, **seconds}) + "\n")
