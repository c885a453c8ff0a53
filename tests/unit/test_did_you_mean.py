"""What is said beside "there is no such name"."""

from keylane.errors import did_you_mean


def test_the_nearest_name_is_told() -> None:
    assert did_you_mean("ordres", ["payments", "orders", "invoices"]) == "; did you mean 'orders'?"


def test_a_name_that_nothing_is_like_is_told_nothing() -> None:
    assert did_you_mean("x", ["payments", "orders"]) == ""
    assert did_you_mean("orders", ["orders"]) == ""  # it is being deleted


def test_so_many_names_that_looking_would_take_long_are_not_compared() -> None:
    numbered = [f"order-{number:04}" for number in range(5_000)]
    assert did_you_mean("ordr-0001", numbered) == ""
    assert did_you_mean("shipmets", [*numbered, "shipments"]) == ""
    assert did_you_mean("pay", [*numbered, "pays"]) == "; did you mean 'pays'?"
