"""Small values: one answer for each message and each receipt, whatever the script's short form."""

from hypothesis import given
from hypothesis import strategies as st

from keylane_broker.engine.values import Lease, Message, Published, PublishResult, SettleResult, Stale

KINDS = st.lists(st.sampled_from(["new", "duplicate"]), min_size=1, max_size=30)


@given(kinds=KINDS, owed=st.booleans(), first=st.integers(1, 1_000), ledger=st.integers(1, 99))
def test_each_message_of_a_batch_has_its_answer_in_its_place(
    kinds: list[str], owed: bool, first: int, ledger: int
) -> None:
    duplicates = {index: f"1-{index}" for index, kind in enumerate(kinds) if kind == "duplicate"}
    new = len(kinds) - len(duplicates)
    result = PublishResult(
        ledger, first, new if owed else 0, 0 if owed else new, 5, duplicates, "memory", len(kinds)
    )
    expected, entry = [], first
    for index, kind in enumerate(kinds):
        if kind == "duplicate":
            expected.append(Published(duplicates[index], duplicate=True))
        elif owed:
            expected.append(Published(f"{ledger}-{entry}"))
            entry += 1
        else:
            expected.append(Published(None, no_subscribers=True))
    assert result.each() == expected


def test_a_receipt_is_stale_if_any_part_of_it_is() -> None:
    result = SettleResult([Stale(1, 4, 4), Stale(1, 9, 9), Stale(3, 1, 2)])
    assert result.outcomes(5) == ["settled", "stale", "settled", "stale", "settled"]
    assert SettleResult([]).outcomes(0) == []


def test_a_lease_is_written_as_worker_and_epoch() -> None:
    assert Lease("orders", 3, "w1", 12).text == "w1 12"


def test_a_message_knows_its_entry() -> None:
    assert Message("12-345", "", "u", "").entry == 345
