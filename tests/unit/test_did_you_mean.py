"""What is said beside "there is no such name"."""

from keylane.errors import did_you_mean


def test_the_nearest_name_is_told() -> None:
    assert did_you_mean("ordres", ["payments", "orders", "invoices"]) == "; did you mean 'orders'?"


def test_a_name_that_nothing_is_like_is_told_nothing() -> None:
    assert did_you_mean("x", ["payments", "orders"]) == ""
    assert did_you_mean("orders", ["orders"]) == ""  # it is being deleted


def test_of_many_names_one_that_is_a_slip_away_is_told() -> None:
    """A letter too few, one too many, another one, or two in the wrong order."""
    numbered = [f"order-{number:04}" for number in range(5_000)]
    for typed, meant in (
        ("ordr-0001", "order-0001"),
        ("shipmets", "shipments"),
        ("shipmennts", "shipments"),
        ("shipnents", "shipments"),
        ("shipmenst", "shipments"),
        ("pay", "pays"),
    ):
        assert did_you_mean(typed, [*numbered, "shipments", "pays"]) == f"; did you mean {meant!r}?"
    assert did_you_mean("ordering", numbered) == ""


def test_nor_are_they_too_many_where_most_begin_alike() -> None:
    names = [f"a-prefix-of-all-{number:04x}" for number in range(0, 60_000, 61)]
    name = names[500]
    assert did_you_mean(name[:-1], names) == f"; did you mean {name!r}?"
    assert did_you_mean(f"{name[:3]}{name[4:]}", names) == f"; did you mean {name!r}?"


def test_so_many_names_that_looking_would_take_long_are_not_compared() -> None:
    assert did_you_mean("order-", [f"order-{number % 10}" for number in range(20_000)]) == ""
