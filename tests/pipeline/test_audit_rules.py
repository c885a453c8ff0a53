"""The rules of the audit, without Spark: thousands of random partitions, some of them robbed, looked at as
they live.

That the job on Spark follows these rules is for test_audit.py.
"""

import random
from collections.abc import Iterator

import pytest

from keylane_spark.auditing.findings import ArchiveAudit, BodiesAudit, PartitionCoverage, SubscriptionAudit
from keylane_spark.auditing.verdict import verdict_of
from tests.pipeline.reference_audit import judge_plainly, lives_of, proven_from
from tests.pipeline.simulation import Look, Partition

SEEDS = 1_500


def partitions(*, thief: bool) -> Iterator[tuple[int, Partition, Look]]:
    """Random partitions, each with what a snapshot of it has."""
    for seed in range(SEEDS):
        luck = random.Random(seed)
        partition = Partition(luck, thief=thief)
        yield seed, partition, partition.live(luck.randint(10, 120))


@pytest.mark.slow
def test_on_a_live_topic_from_which_nothing_is_taken_nothing_is_called_lost() -> None:
    """However publishes, acks, seeks and deletes fall between offsets, log and journal."""
    judged = 0
    for seed, _, look in partitions(thief=False):
        found = judge_plainly(look)
        judged += sum(found.values())
        assert not [key for key in found if key[2] == "lost"], seed
    assert judged > 10_000


@pytest.mark.slow
def test_the_log_must_be_read_before_the_journal() -> None:
    """Else what was settled in between is in neither, and there are false alarms."""
    false = 0
    for seed in range(SEEDS):
        luck = random.Random(seed)
        look = Partition(luck, thief=False).live(luck.randint(10, 120), log_last=True)
        false += any(state == "lost" for _, _, state, _ in judge_plainly(look))
    assert false > 50


@pytest.mark.slow
def test_what_is_called_lost_was_taken() -> None:
    """Nothing else is."""
    lost = 0
    for seed, partition, look in partitions(thief=True):
        entries = {entry for _, entry, state, _ in judge_plainly(look) if state == "lost"}
        lost += len(entries)
        assert entries <= partition.taken.keys(), seed
    assert lost > 200


@pytest.mark.slow
def test_what_was_taken_from_those_who_owed_it_is_called_lost() -> None:
    """Unless nobody can know: it is newer than the first look, or older than the subscription."""
    certain = 0
    for seed, partition, look in partitions(thief=True):
        lost = {(name, entry) for name, entry, state, _ in judge_plainly(look) if state == "lost"}
        newest = {life.sub: life for life in lives_of(look)}
        for (name, _), entries in partition.robbed.items():
            life = newest.get(name)
            if life is None or life.ends is not None:
                continue
            starts = [mark.ranges[0][0] for mark, _ in life.marks]
            made = [before + 1 for mark, before in life.marks if mark.what == "subscribed"]
            known_from = max([proven_from(look), *starts, *made])
            for entry in entries:
                if known_from <= entry < look.latest and entry not in look.log:
                    certain += 1
                    assert (name, entry) in lost, (seed, name, entry)
    assert certain > 100


@pytest.mark.parametrize("seed", [7])
def test_a_partition_lives_the_same_life_for_the_same_seed(seed: int) -> None:
    """So that a failure can be looked at again."""
    looks = [Partition(random.Random(seed), thief=True).live(50) for _ in range(2)]
    assert looks[0] == looks[1]


ALL_BODIES = BodiesAudit(7, 7, 0)


def verdict_on(
    unproven: int = 0,
    missing: int = 0,
    committed: int | None = 5,
    bodies: BodiesAudit | None = ALL_BODIES,
    **lost: int,
) -> tuple[str, list[str]]:
    """The verdict on a topic with one partition, one subscription and an archive."""
    proof = PartitionCoverage(
        0, 9, unproven + 1, unproven, "the journal begins at entry 4" if unproven else ""
    )
    billing = SubscriptionAudit("billing", 9, 9, 0, 0, 0, 0, sum(lost.values()), 0, 9, {}, {}, lost)
    archive = ArchiveAudit("/archive", "lake", 5, 5, 0, committed, missing, 0, 0, 0)
    return verdict_of([proof], [billing], archive, bodies)


def test_the_verdict_is_the_worst_that_was_found() -> None:
    """With a sentence for each reason."""
    assert verdict_on()[0] == "complete"
    assert verdict_on(3) == ("unproven", ["partition 0: 3 messages unproven: the journal begins at entry 4"])
    doubt = "the archive: unproven, since the journal has no subscription 'lake'; name the archive's with "
    assert verdict_on(committed=None) == ("unproven", [f"{doubt}--archive-subscription"])
    word, why = verdict_on(3, missing=1, undelivered=2)
    assert word == "incomplete"
    assert why[:2] == [
        "billing: 2 messages lost: never delivered, and not in the log any more",
        "the archive lacks 1 message that lake has committed",
    ]
    assert len(why) == 3


def test_the_verdict_says_which_bodies_were_looked_for() -> None:
    """Unless all of them were."""
    fine = "every message that a subscription was owed has been delivered to it, or is in its backlog"
    assert verdict_on() == ("complete", [fine])
    assert verdict_on(bodies=None) == ("complete", [fine, "bodies not checked"])
    some = BodiesAudit(1_000, 50, 0)
    assert verdict_on(bodies=some)[1][1:] == ["bodies of 50 of 1,000 messages in the log checked"]
    assert verdict_on(1, bodies=None)[1][-1] == "bodies not checked"
