"""What pictures and pages of reports show: gaps stay gaps, an hour is an hour, and a phone is wide enough."""

import re
from math import isnan
from typing import Any

import pytest
from matplotlib.dates import num2date
from matplotlib.figure import Figure

from keylane_spark.reports import plots
from keylane_spark.reports.page import Page
from tests.pipeline.journals import NOON_MS

MINUTE_MS = 60_000


@pytest.fixture
def axes() -> Any:
    return Figure().subplots()


def minutes(numbers: Any) -> list[float]:
    """Where something is, in minutes after noon."""
    times = [num2date(number) for number in numbers]  # type: ignore[no-untyped-call]
    return [round((time.timestamp() * 1_000 - NOON_MS) / MINUTE_MS, 2) for time in times]


def test_a_line_ends_where_spans_have_nothing_to_say_and_one_by_itself_is_a_dot(axes: Any) -> None:
    points = [(NOON_MS + at * MINUTE_MS, 5.0 + at) for at in (0, 1, 7, 20, 21)]
    plots.line(axes, points, MINUTE_MS)
    [drawn] = axes.lines
    values = list(drawn.get_ydata())
    assert [None if isnan(value) else value for value in values] == [5, 6, None, 12, None, 25, 26]
    assert drawn.get_marker() == "o"
    places = minutes(drawn.get_xdata(orig=False))
    assert [place for place, value in zip(places, values, strict=True) if not isnan(value)] == [
        0.5,
        1.5,
        7.5,
        20.5,
        21.5,
    ]


def test_counts_are_nothing_where_there_is_none(axes: Any) -> None:
    plots.steps(axes, [(NOON_MS, 5), (NOON_MS + 3 * MINUTE_MS, 7)], MINUTE_MS)
    [drawn] = axes.patches
    values, edges, _ = drawn.get_data()
    assert list(values) == [5, 0, 0, 7]
    assert minutes(edges) == [0, 1, 2, 3, 4]


def test_a_band_is_as_wide_as_its_span(axes: Any) -> None:
    plots.bands(axes, [(NOON_MS, 10.0, 30.0)], MINUTE_MS)
    [drawn] = axes.patches
    assert (drawn.get_y(), drawn.get_height()) == (10, 20)
    assert minutes([drawn.get_x(), drawn.get_x() + drawn.get_width()]) == [0, 1]


@pytest.mark.parametrize(("spans", "shown"), [(1, 7), (3, 7), (60, 61.2)])
def test_an_axis_of_time_is_as_long_as_what_it_shows(axes: Any, spans: int, shown: float) -> None:
    """Neither years around one hour, nor one second from edge to edge."""
    last = NOON_MS + (spans - 1) * MINUTE_MS
    plots.line(axes, [(NOON_MS, 1), (last, 2)], MINUTE_MS)
    plots.time_axis(axes, NOON_MS, last, MINUTE_MS)
    left, right = minutes(axes.get_xlim())
    assert left <= 0 <= spans <= right
    assert right - left == pytest.approx(shown, rel=0.02)


def test_numbers_of_messages_are_whole(axes: Any) -> None:
    axes.plot([0, 1], [0, 2])
    plots.counts(axes)
    assert all(float(tick).is_integer() for tick in axes.yaxis.get_major_locator()())


def test_a_page_fits_a_phone() -> None:
    """Its width is that of the screen, and what is wider can be pushed aside by itself."""
    page = Page("Skew of orders", "a test")
    page.table(["key", "messages"], [("k" * 80, 3), ("a b", 4)])
    page.picture(b"png", "a picture")
    html = page.html()
    assert '<meta name="viewport" content="width=device-width">' in html
    assert re.findall(r'<div class="wide"><(\w+)', html) == ["table", "img"]
    assert len(re.findall("<table|<img", html)) == 2
    assert f'<td class="text long">{"k" * 80}</td>' in html
    assert '<td class="text short">a b</td><td class="number short">4</td>' in html
