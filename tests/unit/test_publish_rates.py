"""How fast a token may publish."""

import pytest

from keylane import Overloaded
from keylane.retry import pause
from keylane_broker.access.identity import EVERYBODY, WORKER, Identity
from keylane_broker.access.rates import PublishRates


def test_a_token_has_so_many_messages_a_second_and_others_have_their_own() -> None:
    now = 0.0
    rates = PublishRates(10, lambda: now)
    shop, other = Identity("shop", (), "1"), Identity("shop", (), "2")
    for _ in range(10):
        rates.take(shop, 1)
    with pytest.raises(Overloaded, match="shop") as refused:
        rates.take(shop, 1)
    assert 0 < refused.value.retry_after <= 0.2
    rates.take(other, 1)
    now += refused.value.retry_after
    rates.take(shop, 1)


def test_a_batch_larger_than_the_rate_goes_through_and_is_paid_for_afterwards() -> None:
    now = 0.0
    rates = PublishRates(10, lambda: now)
    shop = Identity("shop", ())
    rates.take(shop, 1_000)
    with pytest.raises(Overloaded) as refused:
        rates.take(shop, 1)
    assert refused.value.retry_after == pytest.approx(99.1)
    now += 99.2
    rates.take(shop, 1)


def test_workers_and_a_rate_of_nothing_have_no_limit() -> None:
    rates = PublishRates(1, lambda: 0.0)
    for _ in range(10):
        rates.take(WORKER, 1)
        PublishRates(0).take(EVERYBODY, 1_000)


def test_only_the_tokens_are_remembered_that_published_last() -> None:
    rates = PublishRates(1, lambda: 0.0)
    busy = Identity("busy", ())
    for number in range(10_100):
        rates.take(Identity(str(number), ()), 5)
        if number == 0:
            rates.take(busy, 1)
        elif number % 5_000 == 0:
            with pytest.raises(Overloaded):
                rates.take(busy, 1)
    assert len(rates._left) <= 10_000


def test_who_is_asked_to_wait_does() -> None:
    assert pause(Overloaded("later", retry_after=7.0), 0) == 7.0
    assert pause(Overloaded("soon"), 0) <= 0.05
