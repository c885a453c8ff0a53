"""The ordinary case in one call: what came for a partition meanwhile is settled, stored and leased at once.

Each call is a pair: what to send, and what its answer means. In between its caller waits as it likes.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import Any, NamedTuple

from keylane_broker.engine.base import EngineBase
from keylane_broker.engine.codec import flat_capacities, flat_frames, pack, pack_capacities, rows
from keylane_broker.engine.receipts import Receipts
from keylane_broker.engine.values import Capacity, Fetched, Lease, NumberedFrame, PublishResult, Share
from keylane_broker.store.keys import KEPT, partition_keys, subscription_keys
from keylane_broker.store.store import Call

AT_ONCE = 1_000  # messages that are published in a call: as many as ever go together
SETTLED = 1_000  # messages that are settled in one


class WholeAck(NamedTuple):
    """What a consumer settles, just as it was leased to it; "" is whoever holds it."""

    consumer: str
    receipts: Receipts


class Turn(NamedTuple):
    """What has come of a turn; `record` is that of the bodies of what was settled, "" for none.

    It is of a `part` of them, where others are owed to somebody still.
    """

    published: PublishResult
    fetched: Fetched
    record: str
    part: bool


class _Leased(NamedTuple):
    """What scripts for the ordinary case answer about leases; times are the partition's."""

    now_ms: int
    token: int
    mode: str
    ledgers: str
    found: list[int]  # place of the consumer, first, last, …
    kept: list[Any]  # lane, deadline, …
    cursor: int

    def fetched(
        self,
        flat: list[str],
        published: PublishResult,
        consumers: Sequence[Capacity],
        at_ms: int | None,
    ) -> Fetched:
        """Return what was leased of messages just published; times by the clock that shows `at_ms`."""
        now_ms, kept, first = self.now_ms, self.kept, published.first
        if at_ms is not None:
            kept[1::2] = [deadline - now_ms + at_ms for deadline in kept[1::2]]
            now_ms = at_ms
        prefix, shares = f"{published.published_ms} ", dict[int, Share]()
        for index, start, end in rows(self.found, 3):
            part = flat[(start - first) * 3 : (end - first + 1) * 3]
            part[2::3] = [prefix + about for about in part[2::3]]
            if (share := shares.get(index)) is None:
                shares[index] = Share(consumers[index].consumer, [start, end], part)
            else:
                share.ranges.extend((start, end))
                share.flat.extend(part)
        return Fetched(
            self.mode,
            self.token,
            now_ms,
            0,
            self.cursor - first + 1 < published.stored,
            self.cursor,
            self.ledgers,
            self.found,
            list(shares.values()),
            kept,
            [],
            [],
            [],
            [],
        )


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
        frames: Sequence[NumberedFrame] = (),
    ) -> Call:
        """Return the call that settles, appends key, uid and about of each message, and leases these."""
        packed = pack([flat, flat_capacities(consumers), others, flat_frames(frames), _flat_receipts(acks)])
        arguments = (lease.text, subscription, packed, names)
        return "subscription/turn", _turn_keys(lease.topic, lease.partition, subscription), arguments

    def take_turn(
        self,
        lease: Lease,
        flat: list[str],
        consumers: Sequence[Capacity],
        answer: list[Any],
        at_ms: int | None = None,
    ) -> Turn:
        """Return what the answer OK to it means; times by the clock that shows `at_ms`.

        What follows from it is for learn_turn(): somebody waits for the messages.
        """
        _, now_ms, first, marks_due_ms, token, mode, ledgers, found, *rest = answer
        if isinstance(found, int):  # by itself
            found, rest = [found, first, first], [[], first, *rest]
        kept, cursor, *settled = rest
        record, part = settled or ("", 0)
        count = len(flat) // 3
        published = PublishResult(lease.epoch, first, count, 0, now_ms, {}, "memory", count, marks_due_ms)
        leased = _Leased(now_ms, token, mode, ledgers, found, kept, cursor)
        return Turn(published, leased.fetched(flat, published, consumers, at_ms), record, bool(part))

    def learn_turn(self, lease: Lease, flat: list[str], turn: Turn) -> None:
        """Learn from what a turn has done, before anything else is read of the partition."""
        published = turn.published
        self._tails.add(lease, flat, published, sum(map(len, flat)))
        delivered = turn.fetched.cursor - published.first + 1
        self._messages[partition_keys(lease.topic, lease.partition).lease] += published.stored + delivered

    def lease_call(
        self,
        lease: Lease,
        subscription: str,
        first: int,
        flat: list[str],
        consumers: Sequence[Capacity],
        others: int = 0,
    ) -> Call:
        """Return the call that leases what a turn of another subscription, sent just before, appends."""
        keys = _lease_keys(lease.topic, lease.partition, subscription)
        named = flat.copy()
        del named[2::3]  # key, uid, …
        arguments = (lease.text, subscription, first, pack(named), pack_capacities(consumers), others)
        return "subscription/lease_fresh", keys, arguments

    def take_leased(
        self,
        lease: Lease,
        flat: list[str],
        published: PublishResult,
        consumers: Sequence[Capacity],
        answer: list[Any],
        at_ms: int,
    ) -> Fetched:
        """Return what the answer OK to it means; times by the clock that shows `at_ms`."""
        leased = _Leased(*answer[1:])
        delivered = leased.cursor - published.first + 1
        self._messages[partition_keys(lease.topic, lease.partition).lease] += delivered
        return leased.fetched(flat, published, consumers, at_ms)

    def ack_whole_call(
        self, lease: Lease, subscription: str, acks: Sequence[WholeAck], names: str = ""
    ) -> Call:
        """Return the call that settles what was leased, all of it or nothing.

        Its answer OK goes on with what Turn calls `record` and `part`.
        """
        keys = _whole_keys(lease.topic, lease.partition, subscription)
        return "subscription/ack_whole", keys, (lease.text, subscription, pack(_flat_receipts(acks)), names)


@lru_cache(maxsize=KEPT)
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


@lru_cache(maxsize=KEPT)
def _lease_keys(topic: str, partition: int, subscription: str) -> tuple[str, ...]:
    """The keys of lua/lib/fresh_leases.lua."""
    its = subscription_keys(topic, partition, subscription)
    return *_whole_keys(topic, partition, subscription), its.ready, its.consumers


@lru_cache(maxsize=KEPT)
def _turn_keys(topic: str, partition: int, subscription: str) -> tuple[str, ...]:
    """The keys of lua/subscription/turn.lua."""
    keys = partition_keys(topic, partition)
    return *_lease_keys(topic, partition, subscription), keys.marks_0, keys.marks_1, keys.delayed_data


def _flat_receipts(acks: Sequence[WholeAck]) -> list[str | int]:
    """Return receipts as lua/lib/whole_leases.lua wants them."""
    flat: list[str | int] = []
    for consumer, receipts in acks:
        flat += chain.from_iterable(zip(repeat(consumer), *receipts.columns, strict=False))
    return flat
