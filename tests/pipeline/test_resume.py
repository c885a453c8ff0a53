"""Where a checkpoint resumes, compared with what a broker says: without one."""

from typing import Any

import pytest

from keylane.errors import SubscriptionMoved
from keylane.types import PartitionOffsets
from keylane_spark.source.checkpoint_format import Identity
from keylane_spark.source.resume import identity_of, resume_position, same

TOPIC, SUBSCRIPTION = 7, 9  # incarnations
OF = Identity(TOPIC, SUBSCRIPTION, ledgers={0: 3})


def said(**changes: Any) -> PartitionOffsets:
    """A partition with entries 10 to 99, whose subscription is at 40."""
    facts: dict[str, Any] = {
        "partition": 0,
        "earliest": 10,
        "latest": 100,
        "position": 40,
        "sparse": 40,
        "journal_earliest": 1,
        "journal_latest": 1,
        "sought": SUBSCRIPTION,
        "incarnation": TOPIC,
        "subscription_incarnation": SUBSCRIPTION,
        "ledger": 3,
    }
    return PartitionOffsets(**(facts | changes))


def resume(at: int | None, of: Identity | None = OF, **changes: Any) -> tuple[int, list[str]]:
    """The position, and the losses that were reported."""
    losses: list[str] = []
    return resume_position("orders", "spark", said(**changes), at, of, losses.append), losses


def test_a_query_goes_on_where_its_checkpoint_is() -> None:
    assert resume(60) == (60, [])
    assert resume(40) == (40, [])
    assert resume(100) == (100, [])


def test_what_the_checkpoint_does_not_know_is_read_from_where_the_subscription_is() -> None:
    assert resume(None) == (40, [])
    assert resume(60, None) == (40, [])
    assert resume(None, position=None) == (10, [])


@pytest.mark.parametrize("change", [{"incarnation": 8}, {"subscription_incarnation": 8}])
def test_positions_in_what_was_recreated_do_not_count(change: dict[str, Any]) -> None:
    assert not same(OF, said(**change))
    assert resume(60, **change) == (40, [])


def test_a_seek_wins_over_a_checkpoint() -> None:
    with pytest.raises(SubscriptionMoved, match=r"it is at offset 40 of partition 0.*new checkpointLocation"):
        resume(60, sought=10)
    moved = Identity(TOPIC, SUBSCRIPTION, sought={0: 10})
    assert resume(60, moved, sought=10) == (60, []), "it knows of that one"


def test_entries_that_the_server_has_lost_are_a_loss() -> None:
    at, [loss] = resume(120)
    assert (at, "ends at 100" in loss, "20 messages" in loss) == (100, True, True)
    at, [loss] = resume(120, anew=90)
    assert at == 90, "others have the offsets from there on"
    at, [loss] = resume(60, anew=50)
    assert (at, "the offsets from 50 on were reused" in loss) == (50, True)
    assert resume(60, anew=70) == (60, []), "they come later"


def test_what_somebody_else_has_drained_is_a_loss() -> None:
    at, [loss] = resume(30)
    assert (at, "somebody else has drained 10 messages, offsets 30-39" in loss) == (30, True)


def test_an_identity_has_the_seeks_and_ledgers_of_each_partition() -> None:
    partitions = [said(), said(partition=1, sought=12, ledger=5)]
    assert identity_of(partitions, {}) == Identity(TOPIC, SUBSCRIPTION, {1: 12}, {0: 3, 1: 5})
    assert identity_of(partitions, {1: 4}).ledgers == {0: 3, 1: 4}, "one that has not moved keeps its ledger"
