"""Lanes: how receipts name them, and their records."""

import pytest

from keylane.wire.lanes import lane_of_mode, lanes_of_keys
from keylane_broker.engine.lanes import Lane, parse_beyond, parse_lane, parse_queued, split_by_lane
from keylane_broker.engine.values import Message


def test_keys_have_lanes_of_their_own_and_what_has_none_has_no_order() -> None:
    assert lanes_of_keys(["a", "", "="]) == ["=a", "", "=="]
    assert [lane_of_mode(mode) for mode in ("shared", "exclusive", "failover")] == ["", "=", "="]


@pytest.mark.parametrize(
    ("record", "lane"),
    [
        ("c|7|2|0|5:1-3 6:9", Lane("=a", "c", 2, 0, 0, [(5, 1, 3), (6, 9, 9)], [])),
        ("c|7|0|0|+12 5:1", Lane("=a", "c", 0, 0, 12, [(5, 1, 1)], [])),
        ("|7|1|1794803456029|", Lane("=a", "", 1, 1794803456029, 0, [], [])),
    ],
)
def test_a_record_says_who_holds_what_and_what_waits(record: str, lane: Lane) -> None:
    assert parse_lane("=a", record) == lane


def test_what_is_beyond_a_record_is_part_of_the_lane() -> None:
    beyond = [parse_beyond(f"=a\0{member}")[1] for member in ("10-11:6", "14:7")]
    lane = parse_lane("=a", "c|7|0|0|+3 5:1-2", beyond)
    assert lane.entries == [1, 2, 10, 11, 14]
    assert parse_queued("=a\x0020-22") == ("=a", range(20, 23))


def test_a_receipt_stands_for_one_lane() -> None:
    messages = {entry: Message(f"1-{entry}", key, "u", "") for entry, key in [(1, "a"), (2, "a"), (4, "b")]}
    cut = [(lane, first, last) for lane, first, last, _ in split_by_lane("key_shared", 1, 5, messages)]
    assert cut == [("=a", 1, 3), ("=b", 4, 5)]
    [(lane, first, last, found)] = split_by_lane("shared", 1, 5, messages)
    assert (lane, first, last, len(found)) == ("", 1, 5, 3)
