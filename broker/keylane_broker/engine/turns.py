"""The ordinary case in one call: what came for a partition meanwhile is settled, stored and leased at once.

Each call is a pair: what to send, and what its answer means. In between its caller waits as it likes.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import Any, NamedTuple

from keylane_broker.engine.base import EngineBase
from keylane_broker.engine.codec import pack, pack_capacities, rows
from keylane_broker.engine.receipts import Receipts
from keylane_broker.engine.values import Capacity, Fetched, Lease, PublishResult, Share
from keylane_broker.store.keys import partition_keys, subscription_keys
from keylane_broker.store.store import Call

AT_ONCE = 64  # messages in a call; with more, what a call costs by itself is little
SETTLED = 1_000  # messages that are settled in one


class WholeAck(NamedTuple):
    """What a consumer settles, just as it was leased to it; "" is whoever holds it."""

    consumer: str
    receipts: Receipts


class Turn(NamedTuple):
    """What has come of a turn; `record` is that of the bodies of what was settled, "" for none."""

    published: PublishResult
    fetched: Fetched
    record: str


class TurnOperations(EngineBase):
    """What a partition's owner does most of the time; where that is not ordinary, nothing is done."""

    def turn_call(
        self,
        lease: Lease,
        subscription: str,
        flat: list[str],
        consumers: Sequence[Capacity],
        *,
        others: int = 0,
        acks: Sequence[WholeAck] = (),
        names: str = "",
    ) -> Call:
        """Return the call that settles, appends key, uid and about of each message, and leases these."""
        receipts = _receipts(acks) if acks else ""
        named = pack_capacities(consumers)
        arguments = (lease.text, subscription, pack(flat), named, others, receipts, names)
        return "subscription/turn", _turn_keys(lease.topic, lease.partition, subscription), arguments

    def take_turn(
        self,
        lease: Lease,
        flat: list[str],
        consumers: Sequence[Capacity],
        answer: list[Any],
        at_ms: int | None = None,
    ) -> Turn:
        """Return what the answer OK to it means, and learn from it; times by the clock that shows `at_ms`."""
        _, now_ms, first, marks_due_ms, token, mode, ledgers, found, kept, cursor, record = answer
        count = len(flat) // 3
        published = PublishResult(lease.epoch, first, count, 0, now_ms, {}, "memory", count, marks_due_ms)
        self._tails.add(lease, flat, published, sum(map(len, flat)))
        delivered = cursor - first + 1
        self._messages[partition_keys(lease.topic, lease.partition).lease] += count + delivered
        if at_ms is not None:
            kept[1::2] = [deadline - now_ms + at_ms for deadline in kept[1::2]]
        prefix, shares = f"{now_ms} ", dict[int, Share]()
        for index, start, end in rows(found, 3):
            part = flat[(start - first) * 3 : (end - first + 1) * 3]
            part[2::3] = [prefix + about for about in part[2::3]]
            if (share := shares.get(index)) is None:
                shares[index] = Share(consumers[index].consumer, [start, end], part)
            else:
                share.ranges.extend((start, end))
                share.flat.extend(part)
        fetched = Fetched(
            mode,
            token,
            now_ms if at_ms is None else at_ms,
            0,
            delivered < count,
            cursor,
            ledgers,
            found,
            list(shares.values()),
            kept,
            [],
            [],
            [],
            [],
        )
        return Turn(published, fetched, record)

    def ack_whole_call(
        self, lease: Lease, subscription: str, acks: Sequence[WholeAck], names: str = ""
    ) -> Call:
        """Return the call that settles what was leased, all of it or nothing."""
        keys = _whole_keys(lease.topic, lease.partition, subscription)
        return "subscription/ack_whole", keys, (lease.text, subscription, _receipts(acks), names)


@lru_cache(maxsize=65_536)
def _whole_keys(topic: str, partition: int, subscription: str) -> tuple[str, ...]:
    """The keys of lua/lib/ordinary.lua."""
    keys = subscription_keys(topic, partition, subscription)
    return (
        keys.lease,
        keys.meta,
        keys.log,
        keys.subs,
        keys.sub,
        keys.lanes,
        keys.runs,
        keys.deadlines,
        keys.retries,
        keys.bodies,
    )


@lru_cache(maxsize=65_536)
def _turn_keys(topic: str, partition: int, subscription: str) -> tuple[str, ...]:
    """The keys of lua/subscription/turn.lua."""
    keys, its = partition_keys(topic, partition), subscription_keys(topic, partition, subscription)
    return (
        *_whole_keys(topic, partition, subscription),
        its.ready,
        its.consumers,
        keys.marks_0,
        keys.marks_1,
        keys.delayed_data,
    )


def _receipts(acks: Sequence[WholeAck]) -> bytes:
    """Pack receipts as lua/lib/whole_leases.lua wants them."""
    flat: list[str | int] = []
    for consumer, receipts in acks:
        flat += chain.from_iterable(zip(repeat(consumer), *receipts.columns, strict=False))
    return pack(flat)
