"""Where a checkpoint resumes, compared with what the broker has now of its topic and subscription."""

from collections.abc import Callable, Sequence

from keylane.types import PartitionOffsets
from keylane_spark.source.checkpoint_format import Identity
from keylane_spark.source.commits import moved_away


def same(of: Identity, said: PartitionOffsets) -> bool:
    """Whether a topic and its subscription are those of the checkpoint."""
    return (of.topic, of.subscription) == (said.incarnation, said.subscription_incarnation)


def replaced(topic: str, subscription: str, of: Identity, said: PartitionOffsets) -> str | None:
    """Which of a checkpoint's topic and subscription is another now, as a sentence; None if neither is."""
    if same(of, said):
        return None
    what = f"subscription {subscription!r} of topic {topic!r}"
    if of.topic != said.incarnation:
        what = f"topic {topic!r}"
    return (
        f"{what} was deleted and recreated since this query wrote its checkpoint, and what was published "
        "in between is not known"
    )


def identity_of(said: Sequence[PartitionOffsets], kept: dict[int, int]) -> Identity:
    """What was found, with the ledgers that are kept."""
    return Identity(
        said[0].incarnation,
        said[0].subscription_incarnation,
        {one.partition: one.sought for one in said if one.sought != one.subscription_incarnation},
        {one.partition: kept.get(one.partition, one.ledger) for one in said},
    )


def resume_position(
    topic: str,
    subscription: str,
    said: PartitionOffsets,
    at: int | None,
    of: Identity | None,
    report_loss: Callable[[str], None],
) -> int:
    """Where to go on in a partition: at the checkpoint's position `at`, unless things have changed since.

    A seek is an error, a loss is reported, and what is new is read from where the subscription is.
    """
    partition, position = said.partition, said.earliest if said.position is None else said.position
    if at is None or of is None or not same(of, said):
        return position
    if of.moves(partition) != said.sought:
        raise moved_away(
            f"subscription {subscription!r} of topic {topic!r} was moved by a seek: it is at "
            f"offset {position} of partition {partition}"
        )
    where = f"the checkpoint is at offset {at} of topic {topic!r}, partition {partition}"
    if at > said.latest:
        report_loss(
            f"{where}, which ends at {said.latest}: the server has lost what it had written last, and "
            f"{at - said.latest} messages of that were read"
        )
        return max(position, min(said.anew or said.latest, said.latest))
    if 0 < said.anew < at:
        report_loss(
            f"{where}, and the server has lost what it had written last: the offsets from "
            f"{said.anew} on were reused"
        )
        return max(position, said.anew)
    if at < position:
        report_loss(
            f"{where}, and the subscription {subscription!r} at {position}: somebody else has "
            f"drained {position - at} messages, offsets {at}-{position - 1}"
        )
    return at
