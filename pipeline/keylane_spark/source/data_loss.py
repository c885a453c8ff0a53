"""Messages that should be there and are not: an error or a warning, as the option failOnDataLoss says."""

import logging
from collections.abc import Sequence

from keylane_spark.errors import DataLoss

_SHOWN = 5  # ranges or ids that a text names
_log = logging.getLogger("keylane.spark")


def report(fail: bool, text: str, advice: str = "") -> None:
    """Raise or log it; where there is something else to be done about it, `advice` says what."""
    if fail:
        advice = f"{advice}. To continue" if advice else "To continue"
        raise DataLoss(f"{text}. {advice} with what is left, set option failOnDataLoss to false")
    _log.warning("%s; continuing with what is left, since failOnDataLoss is false", text)


def gaps(ranges: Sequence[int], start: int, end: int) -> list[tuple[int, int]]:
    """What is missing between positions: `ranges` are first, last, … of the entries that are there.

    >>> gaps([3, 5, 8, 8], 1, 11)
    [(1, 2), (6, 7), (9, 10)]
    """
    missing = []
    for at in range(0, len(ranges), 2):
        if ranges[at] > start:
            missing.append((start, ranges[at] - 1))
        start = max(start, ranges[at + 1] + 1)
    if start < end:
        missing.append((start, end - 1))
    return missing


def some(missing: Sequence[tuple[int, int]]) -> str:
    """The first few of them, to be shown.

    >>> some([(1, 2), (7, 7)])
    '1-2, 7'
    """
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in missing[:_SHOWN]]
    return ", ".join(shown) + (", …" if len(missing) > _SHOWN else "")


def few(ids: Sequence[str]) -> str:
    """The first few ids, to be shown."""
    return ", ".join(ids[:_SHOWN]) + (", …" if len(ids) > _SHOWN else "")
