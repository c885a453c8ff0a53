"""What a consumer holds: which messages a nack takes along, which are listed again, and when leases end."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.consume.block import BUFFERED, HANDED, SETTLED, SETTLING, STALE, Block, Span
from keylane.consume.lanes import Lanes
from keylane.consume.leases import Leases
from keylane.consume.reopening import Reopening
from keylane.errors import StaleReceipt
from tests.support.blocks import LEASE, block


class Held(Leases):
    """Leases that note what they give back."""

    def __init__(self, mode: str = "shared") -> None:
        self.credited: list[tuple[int, int]] = []
        self.given_back: list[Span] = []
        super().__init__(lambda partition, count: self.credited.append((partition, count)), self._back)
        self.mode = mode

    def _back(self, spans: list[Span]) -> None:
        self.given_back += spans

    def take(self, held: Block) -> Block:
        """Add a block that the application gets at once."""
        self.add(held)
        for index in range(len(held)):
            assert self.hand(held, index) == (held.states[index] == HANDED)
        return held


def states(held: Block) -> list[int]:
    return list(held.states)


# Nacks


def test_a_nack_voids_what_is_behind_it_in_its_lane_and_nothing_else() -> None:
    leases = Held("key_shared")
    first = leases.take(block([(1, "a"), (2, "b"), (3, "a"), (4, "")]))
    second = leases.take(block([(5, "a"), (6, "b")], token=2))
    leases.rewind([(first, 0, 1)])
    assert states(first) == [HANDED, HANDED, STALE, HANDED]
    assert states(second) == [STALE, HANDED]


@pytest.mark.parametrize("mode", ["exclusive", "failover"])
def test_a_nack_voids_all_that_is_behind_it_where_a_partition_is_one_lane(mode: str) -> None:
    leases = Held(mode)
    here = leases.take(block(3))
    there = leases.take(block(3, partition=1))
    leases.rewind([(here, 1, 2)])
    assert states(here) == [HANDED, HANDED, STALE]
    assert states(there) == [HANDED] * 3


def test_what_comes_behind_a_nack_whose_message_does_not_come_again_is_given_back() -> None:
    """It may have become a dead letter: then what was behind it comes by itself, before the answer."""
    leases = Held("key_shared")
    first = leases.take(block([(1, "a"), (2, "a")]))
    leases.rewind([(first, 0, 1)])
    leases.add(behind := block([(2, "a"), (3, "b")], token=2))
    assert not leases.hand(behind, 0)
    assert leases.rewound([(first, 0, 1)]) == [(behind, 0, 1)]
    assert leases.rewound([(first, 0, 1)]) == []
    assert states(behind) == [SETTLING, BUFFERED]


def test_what_comes_behind_a_nack_that_is_not_answered_is_void_until_the_nacked_one_comes_again() -> None:
    leases = Held("key_shared")
    first = leases.take(block([(1, "a")]))
    leases.rewind([(first, 0, 1)])
    leases.add(behind := block([(2, "a"), (3, "b")], token=2))
    assert states(behind) == [SETTLING, BUFFERED]
    leases.add(again := block([(1, "a"), (2, "a")], token=3))
    assert states(behind) == [STALE, BUFFERED]
    assert states(again) == [BUFFERED, BUFFERED]
    leases.add(more := block([(4, "a")], token=4))
    assert states(more) == [BUFFERED]


def test_once_a_nack_is_answered_all_that_comes_counts() -> None:
    leases = Held("key_shared")
    first = leases.take(block([(1, "a")]))
    leases.rewind([(first, 0, 1)])
    leases.rewound([(first, 0, 1)])
    leases.add(behind := block([(2, "a")], token=2))
    assert states(behind) == [BUFFERED]


# The end of leases


def test_a_message_that_comes_again_outdates_the_one_we_had() -> None:
    leases = Held("key_shared")
    old = leases.take(block([(1, "a"), (2, "a")]))
    leases.take(block([(2, "a"), (3, "a")], token=2))
    assert states(old) == [HANDED, STALE]


def test_a_lane_whose_deadline_has_passed_goes_back_and_a_message_without_one_is_stale() -> None:
    leases = Held("key_shared")
    late = leases.take(block([(1, "a"), (2, "")]))
    leases.lapse(late, 0)
    leases.lapse(late, 1)
    assert leases.given_back == [(late, 0, 1)]
    assert states(late) == [HANDED, STALE]


def test_leases_that_a_worker_has_ended_are_stale_but_for_what_is_being_settled() -> None:
    leases = Held()
    held = leases.take(block(4))
    other = leases.take(block([(9, "")], token=2))
    held.states[1] = SETTLING
    leases.lose(0, [1, 1, 3])
    assert states(held) == [STALE, SETTLING, STALE, HANDED]
    assert held.ended == {1}, "its own answer says what became of it"
    leases.void(0, 1)
    assert states(held) == [STALE, SETTLING, STALE, STALE]
    assert states(other) == [HANDED]
    leases.clear()
    assert states(other) == [STALE]
    assert not leases.blocks


@pytest.mark.parametrize(
    ("state", "why"),
    [(SETTLING, "already being settled"), (SETTLED, "already settled"), (STALE, "its lease has ended")],
)
def test_what_cannot_be_settled_says_why(state: int, why: str) -> None:
    leases = Held()
    held = leases.take(block(1))
    leases.check(held, 0)
    held.states[0] = state
    with pytest.raises(StaleReceipt, match=f"message 0:7-1: .*{why}"):
        leases.check(held, 0)


def test_what_the_application_does_not_have_is_withdrawn_and_cannot_be_handed_out_then() -> None:
    leases = Held()
    leases.add(held := block(4))
    assert leases.hand(held, 1)
    assert leases.withdraw() == [(held, 0, 1), (held, 2, 4)]
    assert not leases.hand(held, 0)
    leases.paused = True
    leases.add(more := block([(9, "")], token=2))
    assert not leases.hand(more, 0)


# Lanes


def test_what_happens_to_one_message_of_a_lane_moves_the_deadline_of_all() -> None:
    lanes = Lanes()
    lanes.mode = "key_shared"
    held = block([(1, "a"), (2, "b"), (3, "")], now=0.0)
    lanes.restart([(held, 0, 1)], 50.0)
    later = block([(4, "a"), (5, "b")], now=1.0)
    assert [lanes.deadline(held, index) for index in range(3)] == [50.0, LEASE, LEASE]
    assert [lanes.deadline(later, index) for index in range(2)] == [50.0, LEASE + 1]


def test_lanes_are_forgotten_when_nothing_is_held_of_them() -> None:
    leases = Held("key_shared")
    for entry in range(5_000):
        held = leases.take(block([(entry + 1, f"k{entry}")], token=entry + 1))
        leases.settle_range(held, 0, 1)
        leases.restart([(held, 0, 1)], 1e9)
    assert len(leases._moved[0]) < 2_000


@given(
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from("ab") | st.just("")), min_size=1, max_size=20).map(
        lambda messages: sorted(dict(messages).items())
    ),
    st.sampled_from(["shared", "key_shared", "exclusive"]),
)
def test_each_receipt_stands_for_entries_in_a_row_of_one_lane(
    messages: Sequence[tuple[int, str]], mode: str
) -> None:
    lanes = Lanes()
    lanes.mode = mode
    held = block(messages)
    covered: list[int] = []
    for lane, start, stop in lanes.runs(held, 0, len(held)):
        indexes = range(start, stop)
        covered += indexes
        assert {lanes.lane(held, index) for index in indexes} == {lane}
        entries = [held.entries[index] for index in indexes]
        assert entries == list(range(entries[0], entries[0] + len(entries)))
    assert covered == list(range(len(held)))


# Partitions that are opened again


def test_what_a_worker_lists_stays_ours_and_what_it_does_not_went_to_others() -> None:
    leases = Held()
    reopening = Reopening(leases)
    held = leases.take(block(3))
    with reopening.foreseeing([0]):
        reopening.reopen([0], 2)
    assert states(held) == [HANDED] * 3, "until all is listed"
    reopening.keep(listed := block([(1, ""), (3, "")]))
    assert states(held) == [HANDED, STALE, HANDED]
    assert states(listed) == [SETTLED, SETTLED], "we have these"


def test_what_came_while_a_worker_looked_may_be_in_its_list() -> None:
    leases = Held()
    reopening = Reopening(leases)
    with reopening.foreseeing([0]):
        came = leases.take(block(1))
        reopening.note(came)
        leases.settle_range(came, 0, 1)
        reopening.reopen([0], 1)
    reopening.keep(listed := block(1))
    assert states(listed) == [SETTLED], "it was settled after the worker had looked"


def test_where_nothing_is_listed_all_is_void_and_what_is_being_settled_is_in_doubt() -> None:
    leases = Held()
    reopening = Reopening(leases)
    held = leases.take(block(2))
    other = leases.take(block(1, partition=1))
    held.states[1] = SETTLING
    reopening.reopen([0], 0)
    assert states(held) == [STALE, SETTLING]
    assert held.ended == {1}
    assert states(other) == [HANDED]
