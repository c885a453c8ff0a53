"""How long messages took from publish to first delivery and to ack: with_spark/latency.py, by NumPy."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from keylane_spark.auditing.findings import QUANTILES, Latency
from keylane_spark.auditing.in_memory.stretches import Ints
from keylane_spark.auditing.rules import FOREVER

_POWERS = np.array([10**digits for digits in range(19)], np.int64)


@dataclass
class Latencies:
    """Of stretches: subscription, span of publish, class of three digits, how many, and the most."""

    width_ms: int
    parts: dict[str, list[tuple[int, Ints, Ints, Ints]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, what: str, name: int, published_at: Ints, at: Ints, entries: Ints) -> None:
        known = at >= 0
        if known.any():
            taken = np.maximum(at[known] - published_at[known], 0)
            self.parts[what].append((name, published_at[known] // self.width_ms, taken, entries[known]))

    def lines(self, names: Sequence[str], cap: int) -> list[Latency]:
        found = []
        for what, parts in self.parts.items():
            name = np.concatenate([np.full(len(span), name, np.int64) for name, span, _, _ in parts])
            span, taken, entries = (np.concatenate([part[at] for part in parts]) for at in (1, 2, 3))
            for at in (np.full(len(span), -1, np.int64), span):
                found += _percentiles(what, names, name, at, self.width_ms, taken, entries)
        found.sort(key=lambda line: (-FOREVER if line.at_ms is None else -line.at_ms, *_line_of(line)))
        return sorted(found[:cap], key=lambda line: (*_line_of(line), line.at_ms or 0))


def _line_of(line: Latency) -> tuple[str, str]:
    """What a line is about."""
    return line.subscription, line.what


def _percentiles(
    what: str, names: Sequence[str], name: Ints, span: Ints, width_ms: int, taken: Ints, entries: Ints
) -> list[Latency]:
    """A line for each subscription and span; -1 is all of them."""
    unit = _POWERS[np.maximum(np.searchsorted(_POWERS, np.maximum(taken, 1), "right") - 3, 0)]
    classes = taken - taken % unit
    order = np.lexsort((classes, span, name))
    name, span, taken, entries, classes = (column[order] for column in (name, span, taken, entries, classes))
    starts = np.flatnonzero(np.r_[True, (np.diff(name) != 0) | (np.diff(span) != 0)])
    ends = np.r_[starts[1:], len(name)]
    found = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        upto = np.cumsum(entries[start:end])
        total = int(upto[-1])
        shares = {
            label: int(classes[start + int(np.searchsorted(upto, ceil(total * share)))])
            for label, share in QUANTILES.items()
        }
        at = int(span[start])
        found.append(
            Latency(
                subscription=names[int(name[start])],
                at_ms=None if at < 0 else at * width_ms,
                what=what,
                messages=total,
                **shares,
                max=int(taken[start:end].max()),
            )
        )
    return found
