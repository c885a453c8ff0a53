"""From what the worker answers to a frame to the answer for each message."""

from collections.abc import Sequence
from typing import cast

from keylane import wire
from keylane.errors import BacklogFull, PublishFailed
from keylane.produce.columns import Tally
from keylane.produce.publish_frame import PublishWaiter
from keylane.types import Published


class PartlyFull(PublishFailed, BacklogFull):
    """The backlog quota had room for some messages of a call only: to who asks, it is full."""


PartlyFull.code = BacklogFull.code


def all_published(answers: Sequence[Published | Exception]) -> list[Published]:
    """Return the answers if all messages were published, else raise PublishFailed.

    If all have failed in the same way it raises just that; if the quota had room for some only, that is a
    BacklogFull as well.
    """
    kinds = set(map(type, answers))
    if not any(issubclass(kind, Exception) for kind in kinds):
        return cast("list[Published]", answers)
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    if len(errors) == len(answers) and len(kinds) == 1:
        raise errors[0]
    full = all(isinstance(error, BacklogFull) for error in errors)
    raise (PartlyFull if full else PublishFailed)(
        f"{len(errors)} of {len(answers)} messages were not published: {errors[0]}", answers
    ) from errors[0]


def backlog_full() -> BacklogFull:
    """Return what to tell of a message for which there was no room."""
    return BacklogFull(
        "the backlog of the topic is full, and the message was not stored: publish it again when consumers "
        "have caught up, or raise backlog_quota or backlog_quota_bytes"
    )


def count_answers(waiter: PublishWaiter, reply: wire.PublishReply) -> Tally:
    """Count the answers for the messages of one call in one frame."""
    start, count = waiter.start, waiter.count
    repeated = [
        waiter.frame.flat[place * 3 + 1] for place in reply.duplicates if start <= place < start + count
    ]
    if any(start <= place < start + count for place in reply.full):
        raise backlog_full()
    rest = count - len(repeated)
    unowed = rest if reply.unowed else sum(start <= place < start + count for place in reply.unmatched)
    return Tally(rest - unowed, len(repeated), unowed, tuple(repeated))


def read_answers(
    partition: int, durability: str, waiter: PublishWaiter, reply: wire.PublishReply | None
) -> list[Published | Exception]:
    """Return the answers for the messages of one call in one frame; none if they were all refused."""
    if reply is None:
        return []
    start, count = waiter.start, waiter.count
    uids = waiter.frame.flat[start * 3 + 1 : (start + count) * 3 : 3]
    if not (reply.duplicates or reply.unowed or reply.delayed or reply.unmatched or reply.full):
        first = reply.first + start
        return [
            Published(partition, uid, reply.ledger, entry, durability)
            for entry, uid in enumerate(uids, first)
        ]
    unmatched = set(reply.unmatched)
    full = set(reply.full)
    entry = reply.first + start - sum(place < start for place in reply.duplicates.keys() | unmatched | full)
    found: list[Published | Exception] = []
    for place, uid in enumerate(uids, start):
        if (first_id := reply.duplicates.get(place)) is not None:
            ledger, _, number = first_id.partition("-")
            found.append(Published(partition, uid, int(ledger), int(number), durability, duplicate=True))
        elif place in full:
            found.append(backlog_full())
        elif reply.unowed or place in unmatched:
            found.append(Published(partition, uid, 0, 0, durability, no_subscribers=True))
        elif reply.delayed:
            found.append(Published(partition, uid, 0, 0, durability, delayed=True))
        else:
            found.append(Published(partition, uid, reply.ledger, entry, durability))
            entry += 1
    return found
