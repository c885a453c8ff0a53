"""Settling: acks, nacks, and extending the leases of messages."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import msgspec

from keylane.errors import Fenced, InvalidArgument, Unavailable
from keylane_broker.engine.base import EngineBase
from keylane_broker.engine.bodies import body_names
from keylane_broker.engine.checks import check_optional_ms
from keylane_broker.engine.codec import rows
from keylane_broker.engine.entries import read_entries
from keylane_broker.engine.receipts import Receipts, checked_receipts
from keylane_broker.engine.values import Lease, Receipt, SettleResult
from keylane_broker.limits import MAX_MS, MAX_REASON, MAX_TIME_MS
from keylane_broker.store.keys import partition_keys

OnStep = Callable[[Receipts, SettleResult], None]  # what a step has dealt with, and what has come of it


def _ignore(_: Receipts, __: SettleResult) -> None:
    pass


class SettleOperations(EngineBase):
    """What consumers do with messages that they hold."""

    async def ack(
        self,
        lease: Lease,
        subscription: str,
        receipts: Sequence[Receipt] | Receipts,
        names: str | None = None,
        *,
        consumer: str = "",
        on_step: OnStep = _ignore,
    ) -> SettleResult:
        """Settle leased messages for good.

        Like nack() and extend(), it takes several calls for many receipts, and `on_step` hears what each has
        done; unless `consumer` is "", only what that one holds is settled. `names` are those of the bodies,
        as body_names makes them; if None, they are looked up here.
        """
        rest = _checked(lease, receipts)
        if names is None:
            names = await self.names_of_bodies(lease, rest.ranges)
        steps = list[SettleResult]()
        while rest:
            some = "some" if steps else "all"
            answer = await self._step("ack", lease, subscription, rest, consumer, names, some, steps=steps)
            _, stale, left, record, receipt, entry = answer
            done, rest = rest.split(receipt, entry)
            gone: list[Any] = list(rows(left, 2))
            steps.append(
                SettleResult(done.stale_parts(stale), gone, records=[(record, gone)] if record else [])
            )
            on_step(done, steps[-1])
        return SettleResult.of(steps)

    async def nack(
        self,
        lease: Lease,
        subscription: str,
        receipts: Sequence[Receipt] | Receipts,
        *,
        delay_ms: int | None = None,
        until_ms: int | None = None,
        charged: bool = True,
        reason: str = "",
        consumer: str = "",
        on_step: OnStep = _ignore,
    ) -> SettleResult:
        """Give messages back, after a delay, at a time, or by default after the backoff.

        Uncharged, it is how a consumer hands back what it has not looked at. A lane goes back as a whole.
        The `reason` goes into the history of those that have no retry left.
        """
        if delay_ms is not None and until_ms is not None:
            raise InvalidArgument("nack takes delay_ms or until_ms, not both")
        if not charged and delay_ms is None and until_ms is None:
            delay_ms = 0
        until = check_optional_ms("until_ms", until_ms, 1, MAX_TIME_MS)
        delay = check_optional_ms("delay_ms", delay_ms, 0, MAX_MS)
        whom, why = "all" if charged else "none", " ".join(reason.split())[:MAX_REASON]
        rest = _checked(lease, receipts).by_lane()
        steps = list[SettleResult]()

        async def step(some: Receipts) -> list[Any]:
            answer = await self._step(
                "nack", lease, subscription, some, consumer, until, delay, whom, why, steps=steps
            )
            self.note_dead(lease, subscription, answer[-1])
            return answer

        while rest:
            _, stale, returned, receipt, entry, going_back, dead = await step(rest.first(lanes=True))
            done, rest = rest.split(receipt, entry)
            steps.append(SettleResult(done.stale_parts(stale), dead=dead))
            while going_back:  # nobody is told before a lane is back: it would be asked for meanwhile
                _, _, more, _, _, going_back, dead = await step(Receipts(going_back))
                returned += more
                steps[-1] = msgspec.structs.replace(steps[-1], dead=steps[-1].dead + dead)
            back = [(token, first, last) for _, token, first, last in rows(returned, 4)]
            steps[-1] = msgspec.structs.replace(steps[-1], returned=back)
            on_step(done, steps[-1])
        return SettleResult.of(steps)

    async def extend(
        self,
        lease: Lease,
        subscription: str,
        receipts: Sequence[Receipt] | Receipts,
        *,
        lease_ms: int | None = None,
        until_ms: int | None = None,
        at_ms: int | None = None,
        consumer: str = "",
    ) -> SettleResult:
        """Move deadlines to `lease_ms` from now, or to a time; by the clock that shows `at_ms`.

        Where it takes several calls, it returns the first deadline.
        """
        if (lease_ms is None) == (until_ms is None):
            raise InvalidArgument("extend takes lease_ms or until_ms")
        until = check_optional_ms("until_ms", until_ms, 1, MAX_TIME_MS)
        span = check_optional_ms("lease_ms", lease_ms, 0, MAX_MS)
        rest = _checked(lease, receipts)
        steps = list[SettleResult]()
        while rest:
            some = rest.first()
            answer = await self._step("extend", lease, subscription, some, consumer, until, span, steps=steps)
            _, stale, deadline_ms, now_ms, receipt, entry = answer
            done, rest = rest.split(receipt, entry)
            shift = 0 if at_ms is None else now_ms - at_ms
            steps.append(SettleResult(done.stale_parts(stale), [], deadline_ms - shift, now_ms - shift))
        return SettleResult.of(steps)

    async def _step(
        self,
        script: str,
        lease: Lease,
        subscription: str,
        receipts: Receipts,
        *arguments: str | int,
        steps: list[SettleResult],
    ) -> list[Any]:
        """Make one of several calls: once the first is done, nobody may simply repeat all of them."""
        try:
            return await self.run(script, lease, subscription, receipts.pack(), *arguments)
        except Fenced as error:
            if not steps:
                raise
            raise Unavailable(f"a part was settled before the lease ended: {error}") from error

    async def names_of_bodies(self, lease: Lease, ranges: list[tuple[int, int]]) -> str:
        """Return the names of the bodies of entries, as scripts store them."""
        tail, ledgers = self._tails.of(lease), ""
        if not all(first in tail and last in tail for first, last in ranges):
            meta = partition_keys(lease.topic, lease.partition).meta
            [ledgers] = await self.store.read_all([("HGET", meta, "ledgers")])
            if not ledgers:
                return ""  # there is no such topic, as the script will say
        parts, _ = await read_entries(self.store, tail, lease, ledgers, ranges)
        entries = chain.from_iterable(range(first, last + 1) for first, last in ranges)
        return body_names(zip(entries, rows(list(chain.from_iterable(parts)), 3), strict=True))


def _checked(lease: Lease, receipts: Sequence[Receipt] | Receipts) -> Receipts:
    return receipts if isinstance(receipts, Receipts) else checked_receipts(lease, receipts)
