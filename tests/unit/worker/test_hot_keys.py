"""The sketch of hot keys: right within its error whatever the order, and bounded."""

import random

import pytest

from keylane_broker.worker.hot_keys import KEYS, HotKeys


def publish(sketch: HotKeys, keys: list[str], batch: int) -> None:
    """Publish messages with these keys, so many to a batch."""
    for at in range(0, len(keys), batch):
        sketch.add([text for key in keys[at : at + batch] for text in (key, "uid", "about")])


@pytest.mark.parametrize("batch", [1, 7, 1_000])
@pytest.mark.parametrize("order", ["random", "in turn"])
def test_shares_are_right_within_the_error(batch: int, order: str) -> None:
    keys = [f"cold-{number % 5_000}" for number in range(60_000)] + ["hot"] * 30_000 + ["warm"] * 10_000
    if order == "random":
        random.Random(1).shuffle(keys)
    else:
        keys = [key for _ in range(3_125) for key in ("hot", "a", "b", "c") * 8]
    sketch = HotKeys()
    publish(sketch, keys, batch)
    found = sketch.hottest(2)
    for key, messages, error in found:
        true = keys.count(key) / len(keys)
        share = messages / sketch.messages
        assert abs(share - true) <= 2 * error / sketch.messages, key
    assert found[0].key == "hot" or order != "random"


def test_few_messages_are_counted_exactly() -> None:
    sketch = HotKeys()
    publish(sketch, ["hot", "a", "hot", "b", "hot", ""] * 20, 7)
    assert sketch.messages == 120
    assert sketch.hottest(3) == [("hot", 60, 0), ("a", 20, 0), ("b", 20, 0)]


def test_the_first_messages_count_no_more_than_the_others() -> None:
    """Although all of them were looked at."""
    sketch = HotKeys()
    publish(sketch, ["first"] * 2_000 + ["then"] * 198_000, 1_000)
    shares = {found.key: found.messages / sketch.messages for found in sketch.hottest(2)}
    assert shares["then"] > 0.97
    assert abs(sketch.messages - 200_000) < 20_000


@pytest.mark.slow
def test_it_keeps_a_bounded_number_of_keys_and_the_past_fades() -> None:
    sketch = HotKeys()
    publish(sketch, [f"old-{number}" for number in range(100_000)] + ["old"] * 500_000, 1_000)
    assert sketch.hottest(1)[0].key == "old"
    publish(sketch, ["new"] * 3_500_000, 1_000)
    assert sketch.hottest(1)[0].key == "new"
    assert len(sketch.hottest(10_000)) <= 2 * KEYS
    assert sketch.messages <= 65_536 * 32


def test_messages_without_a_key_count_for_the_share_alone() -> None:
    sketch = HotKeys()
    publish(sketch, ["", "a"] * 20_000, 100)
    [found] = sketch.hottest(5)
    assert 0.4 < found.messages / sketch.messages < 0.6
