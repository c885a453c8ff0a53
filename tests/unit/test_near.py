"""What is said beside "there is no such name"."""

from keylane_broker.engine.topics import near


def test_the_nearest_name_is_told() -> None:
    assert near("ordres", ["payments", "orders", "invoices"]) == "; did you mean 'orders'?"


def test_a_name_that_nothing_is_like_is_told_nothing() -> None:
    assert near("x", ["payments", "orders"]) == ""
    assert near("orders", ["orders"]) == ""  # it is being deleted


def test_so_many_names_that_looking_would_take_long_are_not_compared() -> None:
    numbered = [f"order-{number:04}" for number in range(5_000)]
    assert near("ordr-0001", numbered) == ""
    assert near("shipmets", [*numbered, "shipments"]) == ""
    assert near("pay", [*numbered, "pays"]) == "; did you mean 'pays'?"
