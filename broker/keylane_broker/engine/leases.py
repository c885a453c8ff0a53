"""Partition leases: one worker at a time serves a partition, in an epoch of its own."""

import asyncio
from collections.abc import Sequence

from keylane.errors import BrokerError
from keylane_broker.engine.answers import checked
from keylane_broker.engine.base import EngineBase
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.values import Lease
from keylane_broker.limits import MAX_MS, MAX_PARTITIONS, MAX_TIME_MS
from keylane_broker.store.keys import check_name, partition_keys
from keylane_broker.store.store import Call

_LEASES = 250  # that one call renews or releases
_RELEASE = 2.0  # seconds that a release may take before those who wait for it go on


class LeaseOperations(EngineBase):
    """Taking, renewing and giving up partitions."""

    async def acquire(
        self, topic: str, partition: int, worker: str, ttl_ms: int, known_epoch: int = 0
    ) -> Lease | None:
        """Take a partition and open its next ledger; returns None while another worker holds it.

        `known_epoch` is the newest epoch the caller has heard of, or its time: after a failover that lost
        writes the new epoch still has to be larger. Where it says `sweep`, a sweep is to be finished.
        """
        check_name("worker", worker)
        check_int("ttl_ms", ttl_ms, 1, MAX_MS)
        check_int("known_epoch", known_epoch, 0, MAX_TIME_MS)
        check_int("partition", partition, 0, MAX_PARTITIONS)
        keys = partition_keys(check_name("topic", topic), partition)
        known_epoch = max(known_epoch, self._tails.newest_epoch(topic, partition))
        answer = await self.store.run(
            "partition/acquire_lease",
            [
                keys.lease,
                keys.meta,
                keys.log,
                keys.journal,
                keys.delayed,
                keys.marks_0,
                keys.marks_1,
                keys.subs,
            ],
            worker,
            ttl_ms,
            known_epoch,
        )
        if answer[0] == "HELD":
            return None
        checked(answer, topic, partition=partition)
        _, epoch, sweep, now_ms, due_ms, marks_due_ms, in_use, incarnation, retains, expires = answer
        lease = Lease(
            topic,
            partition,
            worker,
            epoch,
            bool(sweep),
            now_ms,
            due_ms,
            marks_due_ms,
            tuple(in_use),
            incarnation,
            bool(retains),
            bool(expires),
        )
        self._tails.begin(lease)
        return lease

    async def renew(self, leases: Sequence[Lease], ttl_ms: int) -> list[bool | None]:
        """Extend leases, many with one call; returns False for each lost one, None where its node is away."""
        check_int("ttl_ms", ttl_ms, 1, MAX_MS)
        patience = max(ttl_ms / 3_000, 1.0)
        kept, _ = await asyncio.gather(
            self._for_leases("partition/renew_leases", leases, ttl_ms, patience=patience),
            self.store.homes.recognise(patience, self.store.connections.urgent_beside),
        )
        return kept

    async def release(self, lease: Lease) -> bool:
        """Give a partition up; returns False if it was lost before."""
        [released] = await self.release_all([lease])
        return bool(released)

    async def release_all(self, leases: Sequence[Lease]) -> list[bool | None]:
        """Give partitions up, many with one call; returns False for each that was lost, None as renew()."""
        return await self._for_leases("partition/release_leases", leases, patience=_RELEASE)

    async def _for_leases(
        self, script: str, leases: Sequence[Lease], *arguments: int, patience: float
    ) -> list[bool | None]:
        keys = [partition_keys(held.topic, held.partition).lease for held in leases]
        groups = self.store.groups(keys, _LEASES)
        calls: list[Call] = [
            (script, [keys[index] for index in group], [*arguments, *(leases[index].text for index in group)])
            for group in groups
        ]
        kept: list[bool | None] = [True] * len(leases)
        # What comes late does no harm, and those on another node must not wait for it.
        for group, answer in zip(groups, await self.store.try_all(calls, patience), strict=True):
            if isinstance(answer, BrokerError):  # one node of a cluster, perhaps
                for place in group:
                    kept[place] = None
            else:
                for index in answer[1]:
                    kept[group[index]] = False
        return kept
