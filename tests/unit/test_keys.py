"""Key names: readable, in one slot for each partition, and closed to strange names."""

from string import ascii_letters, digits

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from keylane.errors import InvalidName
from keylane_broker.engine import turns
from keylane_broker.store.keys import (
    SUBSCRIPTION_SUFFIXES,
    TOPICS,
    PartitionKeys,
    check_name,
    partition_keys,
    subscription_keys,
    topic_key,
)

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", fullmatch=True)
SHORT = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True)


def test_key_names_are_those_of_the_documentation() -> None:
    keys = PartitionKeys.of("orders", 3)
    assert TOPICS == "kl:topics"
    assert topic_key("orders") == "kl:topic:orders"
    assert keys.lease == "kl:{orders:3}:lease"
    assert keys.log == "kl:{orders:3}:log"
    assert keys.subscription_prefix == "kl:{orders:3}:sub:"
    assert keys.subscription("billing").sub == "kl:{orders:3}:sub:billing"
    assert keys.subscription("billing").retries == "kl:{orders:3}:sub:billing:retries"


@pytest.mark.slow
@given(topic=SHORT, partition=st.integers(0, 9_999), subscription=SHORT)
def test_all_keys_of_a_partition_share_a_slot(topic: str, partition: int, subscription: str) -> None:
    keys = PartitionKeys.of(topic, partition)
    slots = {key_slot(key.encode()) for key in (*keys, *keys.subscription(subscription))}
    assert slots == {key_slot(f"{topic}:{partition}".encode())}


@pytest.mark.slow
@given(st.lists(st.tuples(NAMES, st.integers(0, 99), NAMES), min_size=2, max_size=2, unique=True))
def test_no_two_subscriptions_share_a_key_of_their_own(places: list[tuple[str, int, str]]) -> None:
    own = []
    for topic, partition, subscription in places:
        keys = PartitionKeys.of(topic, partition)
        own.append(set(keys.subscription(subscription)) - set(keys) - {keys.bodies})
    assert len(own[0]) == len(SUBSCRIPTION_SUFFIXES)
    assert not own[0] & own[1]


@pytest.mark.slow
@given(NAMES)
def test_a_name_within_the_rules_is_given_back(name: str) -> None:
    assert check_name("topic", name) == name


@pytest.mark.slow
@given(st.text())
def test_a_name_with_anything_else_is_refused(name: str) -> None:
    if name and set(name) <= set(ascii_letters + digits + "._-") and name[0].isalnum():
        assert check_name("topic", name) == name
    else:
        with pytest.raises(InvalidName):
            check_name("topic", name)


def test_the_error_shows_the_name_but_not_all_of_a_long_one() -> None:
    with pytest.raises(InvalidName, match=r"topic name 'a:b'"):
        check_name("topic", "a:b")
    with pytest.raises(InvalidName) as caught:
        check_name("topic", "x" * 10_000)
    assert len(str(caught.value)) < 250


def test_of_many_that_come_and_go_the_keys_of_some_are_kept() -> None:
    caches = (partition_keys, subscription_keys, turns._turn_keys, turns._lease_keys, turns._whole_keys)
    for number in range(
        20_000
    ):  # as many as there are when the consumers of a multicast subscription have new names
        turns._turn_keys(f"kept-{number}", 0, f"s@{number}")
    assert max(cache.cache_info().currsize for cache in caches) < 20_000
