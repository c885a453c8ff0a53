"""The partitions that a worker serves: taking those that are its own, and handing over those that are not."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator

from keylane.errors import BrokerError, TopicNotFound, Unavailable
from keylane_broker.cluster.membership import Membership
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Place
from keylane_broker.limits import MAX_PARTITIONS
from keylane_broker.store.keys import PartitionKeys, check_name
from keylane_broker.worker.background import Background
from keylane_broker.worker.clock import Clock
from keylane_broker.worker.consumer import Consumers
from keylane_broker.worker.dispatcher import Dispatcher
from keylane_broker.worker.partition import Partition

log = logging.getLogger("keylane.broker")


class Partitions:
    """Those that are a worker's own, as far as it knows."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        membership: Membership,
        background: Background,
        *,
        session_ms: int,
        on_moved: Callable[[set[str]], None],
    ) -> None:
        self.by_place: dict[Place, Partition] = {}
        self.consumers = Consumers()
        self._engine = engine
        self._clock = clock
        self._membership = membership
        self._background = background
        self._session_ms = session_ms
        self._on_moved = on_moved  # hears of topics whose partitions have other owners

    def get(self, topic: str, number: int) -> Partition:
        """Return a partition, perhaps one that has no owner yet; NotOwner if another worker serves it."""
        partition = self.by_place.get((topic, number))
        if partition is None:
            if self._background.stopping:
                raise Unavailable("the worker is stopping")
            check_name("topic", topic)
            check_int("partition", number, 0, MAX_PARTITIONS - 1)
            if self._membership.owner(topic, number) not in (None, self._membership.id):
                raise self._membership.not_owner(topic, number)
            partition = self.by_place[topic, number] = Partition(
                topic,
                number,
                engine=self._engine,
                clock=self._clock,
                membership=self._membership,
                background=self._background,
                session_ms=self._session_ms,
                consumers=self.consumers,
                on_forget=self._forget,
            )
        return partition

    def _forget(self, partition: Partition) -> None:
        place = (partition.topic, partition.number)
        if self.by_place.get(place) is partition:
            del self.by_place[place]

    def of_topic(self, topic: str) -> list[Partition]:
        """Return those of a topic that are here."""
        return [partition for partition in self.by_place.values() if partition.topic == topic]

    @property
    def holds_any(self) -> bool:
        """Whether there is a partition that this worker has the lease of."""
        return any(partition.current_lease or partition.leaving for partition in self.by_place.values())

    def leased(self) -> list[Place]:
        """Return the partitions that this worker has the lease of."""
        return [place for place, partition in self.by_place.items() if partition.current_lease]

    # Leases

    async def renew_leases(self) -> None:
        """Extend all partition leases at once."""
        held = [(one, one.current_lease) for one in self.by_place.values() if one.current_lease]
        if held:
            lease_ms = self._membership.lease_ms
            until = time.monotonic() + lease_ms / 1_000
            kept = await self._engine.renew([lease for _, lease in held], lease_ms)
            for (partition, lease), state in zip(held, kept, strict=True):
                if state and partition.current_lease is lease:
                    partition.kept_until = until
                elif state is False:
                    partition.lose_lease(lease)
            if None in kept:
                raise Unavailable(f"{kept.count(None)} of {len(kept)} leases could not be renewed")

    async def release_leases(self) -> int:
        """Give up all leases, without handing anything over; return how many there were."""
        leases = [one.current_lease for one in self.by_place.values() if one.current_lease]
        await self._engine.release_all(leases)
        return len(leases)

    def reacquire_leases(self, lost: Callable[[str], bool]) -> None:
        """Redis may have lost its newest writes: take the leases anew, so that no id is given twice.

        `lost` says of a key whether it may be so.
        """
        self._membership.read_anew()
        for partition in self.by_place.values():
            if partition.current_lease and lost(PartitionKeys.of(partition.topic, partition.number).lease):
                partition.drop_lease()

    # Owners

    def follow(self, moved: set[str]) -> None:
        """Topics have partitions with new owners: take those that are ours, hand over those that are not."""
        self._on_moved(moved)
        owners, own_id = self._membership.owners, self._membership.id
        leaving = []
        for (topic, number), partition in list(self.by_place.items()):
            owner = self._membership.owner(topic, number)
            if owner is None and topic in moved and topic not in owners:
                partition.close(TopicNotFound(f"topic {topic!r} was deleted"))
            elif owner not in (None, own_id) and not partition.leaving:
                leaving.append(partition)
        # Those with calls under way go by themselves, so that they hold up nobody.
        for group in ([p for p in leaving if not p.busy], *([p] for p in leaving if p.busy)):
            if group:
                self._background.start(self._hand_over, group)
        for topic, names in owners.items():
            for number, owner in enumerate(names):
                if owner == own_id and not self._background.stopping:
                    partition = self.get(topic, number)
                    if partition.current_lease is None and not partition.taking:
                        self._background.start(self._claim, partition)

    async def _claim(self, partition: Partition) -> None:
        """Take the lease of a partition that is ours, before anybody asks for it."""
        try:
            await partition.lease()
        except BrokerError as error:
            log.debug("%s: %s", partition, error)

    async def _hand_over(self, partitions: list[Partition]) -> None:
        """Give partitions to their new owners, when what is under way has ended."""
        stopped = await asyncio.gather(*(partition.stop_calls() for partition in partitions))
        leases = [lease for lease in stopped if lease is not None]
        try:
            if leases:
                await self._engine.release_all(leases)
                await self._engine.announce("released")
        finally:
            for partition in partitions:
                partition.redirect_consumers()
        if leases:
            log.info("handed over %d partitions", len(leases))
        self._membership.look_soon()

    # Dispatchers

    def dispatchers(self) -> Iterator[Dispatcher]:
        """Find those that have consumers."""
        for partition in self.by_place.values():
            for dispatcher in partition.dispatchers.values():
                if dispatcher.consumers:
                    yield dispatcher

    def look_again(self, topic: str | None = None, subscription: str | None = None) -> None:
        """Let the dispatchers of a subscription look again, or all."""
        for partition in list(self.by_place.values()):
            if topic in (None, partition.topic):
                for name, dispatcher in list(partition.dispatchers.items()):
                    if subscription in (None, name):
                        dispatcher.look_again()

    async def subscription_changed(self, topic: str, subscription: str) -> None:
        """Let the dispatchers of a subscription look again, on all workers."""
        self.look_again(topic, subscription)
        await self._engine.announce(f"subscription {topic} {subscription}")
