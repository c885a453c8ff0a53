"""The sketch of hot keys: right within its error whatever the order, and bounded."""

import random
from math import sqrt

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
    for key, samples, error in found:
        true = keys.count(key) / len(keys)
        share = samples / sketch.samples
        assert abs(share - true) <= error / sketch.samples + 5 * sqrt(samples) / sketch.samples, key
    assert found[0].key == "hot" or order != "random"


@pytest.mark.slow
def test_it_keeps_a_bounded_number_of_keys_and_the_past_fades() -> None:
    sketch = HotKeys()
    publish(sketch, [f"old-{number}" for number in range(100_000)] + ["old"] * 500_000, 1_000)
    assert sketch.hottest(1)[0].key == "old"
    publish(sketch, ["new"] * 3_500_000, 1_000)
    assert sketch.hottest(1)[0].key == "new"
    assert len(sketch.hottest(10_000)) <= 2 * KEYS
    assert sketch.samples <= 65_536


def test_messages_without_a_key_count_for_the_share_alone() -> None:
    sketch = HotKeys()
    publish(sketch, ["", "a"] * 20_000, 100)
    [found] = sketch.hottest(5)
    assert 0.4 < found.samples / sketch.samples < 0.6
