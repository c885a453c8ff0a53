"""Spans of time for what is drawn over time: as wide as a person would make them."""

WIDTHS = {
    1_000: "second",
    10_000: "10 seconds",
    60_000: "minute",
    600_000: "10 minutes",
    3_600_000: "hour",
    6 * 3_600_000: "6 hours",
    24 * 3_600_000: "day",
    7 * 24 * 3_600_000: "week",
}  # in milliseconds


def width_of(length_ms: int, most: int) -> int:
    """The width that makes at most so many spans of a length, or nearly; the widest if none does.

    >>> WIDTHS[width_of(3_600_000, 60)]
    'minute'
    """
    return next((width for width in WIDTHS if length_ms <= width * most), max(WIDTHS))
