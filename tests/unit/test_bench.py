"""What the benchmark makes of what it has measured."""

import msgspec

from loadtest.bench import Found
from loadtest.lines import BARS, LINES, figures_of
from loadtest.matched import disorder, percentiles
from loadtest.players import Order
from loadtest.report import Figure, details, summary, table
from loadtest.results import Result, Sample


def sample(rate: float, p50: float = 0.0, p99: float = 0.0) -> Sample:
    return Sample(rate, p50, p99, 1.0, 2.0, 3.0, 4.0, 0)


def test_a_message_that_overtakes_another_of_its_key_is_out_of_order() -> None:
    assert disorder([("a", 1), ("b", 1), ("a", 2), ("b", 2)]) == 0
    assert disorder([("a", 1), ("a", 3), ("a", 2)]) == 2


def test_a_message_that_is_lost_or_comes_twice_is_out_of_order_too() -> None:
    assert disorder([("a", 1), ("a", 3)]) == 1
    assert disorder([("a", 1), ("a", 1)]) == 1


def test_calls_under_way_at_once_have_keys_of_their_own() -> None:
    order = Order("", keys=20, calls=4)
    cycles = [order.keys_of(call) for call in range(order.calls)]
    assert len({next(keys) for keys in cycles for _ in range(5)}) == 20


def test_the_calls_of_a_round_publish_all_of_its_messages() -> None:
    assert list(Order("", 250, batch=100).portions()) == [100, 100, 50]


def test_latencies_are_told_in_milliseconds_and_the_first_tenth_does_not_count() -> None:
    assert percentiles([]) == (0.0, 0.0)
    assert percentiles([1.0] * 11 + [number / 1_000 for number in range(101)]) == (50.0, 99.0)


def test_every_bar_is_about_contenders_that_play() -> None:
    played = {(line.name, contender.label) for line in LINES for contender in line.contenders}
    assert len(played) == sum(len(line.contenders) for line in LINES)
    assert {(bar.line, label) for bar in BARS for label in (bar.ours, bar.baseline)} <= played


def test_a_ratio_is_one_of_medians_and_its_spread_one_of_rounds() -> None:
    line = "8 partitions, batch 100"
    rounds = {"raw": [10.0, 20.0, 30.0], "shared": [30.0, 20.0, 15.0]}
    results = [Result(line, name, [sample(rate) for rate in rates]) for name, rates in rounds.items()]
    [figure] = figures_of(results)
    assert (figure.ratio, figure.spread, figure.reached) == (1.0, (0.5, 3.0), True)


def test_lower_is_better_where_it_is_about_latency() -> None:
    line = "latency at 500/s, 1 partition"
    results = [
        Result(line, "raw, asyncio", [sample(500, 1, 2)]),
        Result(line, "shared", [sample(500, 1.5, 6)]),
    ]
    p50, p99 = figures_of(results)
    assert (p50.ratio, p50.reached, p99.ratio, p99.reached) == (1.5, True, 3.0, False)


def test_the_tables_show_what_was_measured_and_how_many_times_raw_it_is() -> None:
    labels = (
        *("raw", "raw, asyncio", "shared", "key-shared"),
        *("raw, body", "raw, asyncio, body", "shared, body"),
    )
    results = [Result("a line", label, [sample(1_000 * place)]) for place, label in enumerate(labels, 1)]
    cells = [cell.strip() for cell in summary(results)[2].split("|")]
    assert cells[2:5] == ["1,000", "2,000", "3,000 (3.00)"]
    assert summary(results)[2].endswith("7,000 (1.40) |")
    assert len(list(details(results))) == 7


def test_what_is_measured_again_takes_the_place_of_what_the_file_has() -> None:
    old = Found([Result("a line", "raw", [sample(1.0)])], [Figure("a part", 1.0, 2.0, None, "ms")])
    new = Found([Result("a line", "raw", [sample(3.0)]), Result("a line", "shared", [])], [])
    joined = msgspec.json.decode(old.join(new).as_json(), type=Found)
    assert joined == Found(new.results, old.figures)


def test_a_table_is_as_wide_as_its_cells() -> None:
    assert table(("a", "b"), [["longer", "1"]]) == [
        "| a      |   b |",
        "| ------ | --: |",
        "| longer |   1 |",
    ]
