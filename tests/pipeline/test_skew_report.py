"""What is concluded, said and written of skew: no Spark is needed for that."""

import json
from pathlib import Path

import pytest

from keylane.wire import partition_of
from keylane_spark.files import LocalFiles
from keylane_spark.reports.spans import WIDTHS, width_of
from keylane_spark.skew.findings import Cluster, HotKey, Keys, Skew, Times, conclude
from keylane_spark.skew.packing import PERIOD
from keylane_spark.skew.report import write_skew
from tests.pipeline.journals import NOON_MS

MINUTE_MS = 60_000


def keys_of(amounts: dict[str, int], count: int) -> Keys:
    """These keys, each with so many messages."""
    by_hash: dict[int, int] = {}
    for key, amount in amounts.items():
        place = partition_of(key, PERIOD)
        by_hash[place] = by_hash.get(place, 0) + amount
    most = sorted(amounts, key=lambda key: -amounts[key])[:20]
    return Keys(
        by_hash, len(amounts), 0, [HotKey(key, amounts[key], 0, partition_of(key, count)) for key in most]
    )


def skew_of(loads: dict[int, int], workers: int, amounts: dict[str, int] | None = None) -> Skew:
    """A topic of which each worker has a row of partitions, all messages in one minute."""
    names = [f"w{number}" for number in range(workers)]
    owners = {number: names[number * workers // len(loads)] for number in loads}
    keys = keys_of(amounts or {}, len(loads))
    return conclude("orders", keys, Times(MINUTE_MS, {NOON_MS: loads}), Cluster(owners, names), "a test")


@pytest.mark.slow
def test_what_is_not_worth_moving_is_not_in_the_plan_and_the_report_says_so(tmp_path: Path) -> None:
    found = skew_of({**dict.fromkeys(range(40), 1), 0: 100, 1: 6, 20: 98}, 2)
    assert (found.moves, found.moved) == ([], 0)
    assert [one.before for one in found.workers] == [one.after for one in found.workers]
    said = (
        "not worth moving: the best placement would bring the busiest worker from 1.03 to 1.01 times the "
        "mean, and move 3% of the messages for it"
    )
    assert found.advice[-1] == said
    write_skew(found, str(tmp_path), LocalFiles())
    assert json.loads((tmp_path / "plan.json").read_text())["moves"] == []
    page = (tmp_path / "skew.html").read_text()
    assert said in page
    assert "keylane rebalance" not in page
    even = skew_of(dict.fromkeys(range(4), 50), 2)
    assert (
        even.advice[-1]
        == "not worth moving: no other placement of the partitions is better by more than moving costs"
    )


@pytest.mark.slow
def test_what_is_worth_moving_is_said_with_what_it_costs(tmp_path: Path) -> None:
    found = skew_of({0: 400, 1: 400, 2: 10, 3: 10}, 2)
    assert len(found.moves) == 2
    assert found.advice[-1] == (
        "the plan moves 2 partitions of 4, with 50% of the messages: the busiest worker comes from 1.95 to "
        "1.00 times the mean"
    )
    write_skew(found, str(tmp_path), LocalFiles())
    assert "keylane rebalance --plan plan.json --dry-run" in (tmp_path / "skew.html").read_text()


def test_another_count_is_recommended_only_where_it_is_clearly_better() -> None:
    """With what it would bring; a topic is not made anew for a little, nor for a number that nobody likes."""
    spread = {f"k{number}": 10 for number in range(500)}
    loads = dict.fromkeys(range(7), 0)
    for key, amount in spread.items():
        loads[partition_of(key, 7)] += amount
    found = skew_of(loads, 3, spread)
    assert found.recommended is None
    assert "7 partitions are enough" in found.advice
    crowded = {key: 10 for key in spread if partition_of(key, 2) == 0}
    found = skew_of({0: 10 * len(crowded), 1: 0}, 2, crowded)
    assert found.recommended == 4
    assert any("4 partitions would be more even than 2" in one for one in found.advice)


def test_an_archive_that_knows_more_partitions_than_there_are_is_no_trouble() -> None:
    """A topic of that name had more of them, once."""
    names = Cluster({0: "w0", 1: "w1"}, ["w0", "w1"])
    found = conclude("orders", keys_of({}, 2), Times(MINUTE_MS, {NOON_MS: {0: 5, 5: 9}}), names, "a test")
    assert [one.partition for one in found.partitions] == [0, 1, 5]
    assert (found.messages, found.moves) == (14, [])


def test_spans_are_as_wide_as_a_person_would_make_them() -> None:
    assert [WIDTHS[width_of(length, 60)] for length in (0, 60_000, 3_600_000, 86_400_000, 10**13)] == [
        "second",
        "second",
        "minute",
        "hour",
        "week",
    ]
