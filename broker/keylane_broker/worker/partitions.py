"""The partitions that a worker serves: taking those that are its own, and handing over those that are not."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from random import choice

from keylane.errors import BrokerError, TopicNotFound, Unavailable
from keylane_broker.cluster.membership import Membership
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.messages import EndedLease
from keylane_broker.engine.values import Place
from keylane_broker.limits import MAX_PARTITIONS
from keylane_broker.store.keys import check_name
from keylane_broker.worker.background import Background
from keylane_broker.worker.clock import Clock
from keylane_broker.worker.consumer import Consumers
from keylane_broker.worker.dispatcher import Dispatcher
from keylane_broker.worker.gathering import Gathering
from keylane_broker.worker.partition import Partition

_TOLD = 1.0  # seconds for consumers to hear of a seek
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
        self._own: list[Place] = []  # those that are to be here, when owners last changed
        self.consumers = Consumers()
        self.gathering = Gathering(engine.store)
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
            self.check(topic, number)
            partition = self.by_place[topic, number] = Partition(
                topic,
                number,
                engine=self._engine,
                clock=self._clock,
                membership=self._membership,
                background=self._background,
                session_ms=self._session_ms,
                consumers=self.consumers,
                gathering=self.gathering,
                on_forget=self._forget,
            )
        return partition

    def check(self, topic: str, number: int) -> None:
        """Raise NotOwner if another worker serves a partition, and what is wrong if there can be no such."""
        check_name("topic", topic)
        check_int("partition", number, 0, MAX_PARTITIONS - 1)
        if self._membership.owner(topic, number) not in (None, self._membership.id):
            raise self._membership.not_owner(topic, number)

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

    async def check_lease(self) -> None:
        """Have Redis run a script, which says whether one of the leases is still held."""
        if held := [one for one in self.by_place.values() if one.current_lease]:
            partition = choice(held)
            lease = partition.current_lease
            assert lease is not None
            [kept] = await self._engine.renew([lease], self._membership.lease_ms)
            if kept is False:
                partition.lose_lease(lease)
            elif kept is None:
                raise Unavailable(f"the lease of {partition} could not be renewed")
        else:
            await self._engine.workers()

    def without_lease(self) -> int:
        """Return how many partitions are to be served here, and cannot be."""
        own_id = self._membership.id
        return sum(
            partition.current_lease is None
            for (topic, number), partition in self.by_place.items()
            if self._membership.owner(topic, number) == own_id
        )

    async def finish_calls(self) -> None:
        """Wait until what is under way is through."""
        await asyncio.gather(*(partition.finish_calls() for partition in self.by_place.values()))

    async def release_leases(self) -> int:
        """Give up all leases, without handing anything over; return how many there were."""
        leases = [one.current_lease for one in self.by_place.values() if one.current_lease]
        await self._engine.release_all(leases)
        return len(leases)

    def reacquire_leases(self, lost: Collection[str]) -> None:
        """Redis may have lost its newest writes: take leases anew, so that no id is given twice.

        `lost` has their keys.
        """
        self._membership.read_anew()
        for partition in self.by_place.values() if lost else ():
            if partition.current_lease and partition.key in lost:
                partition.drop_lease()

    # Owners

    def follow(self, moved: set[str]) -> None:
        """Topics have partitions with new owners: take those that are ours, hand over those that are not."""
        if moved:
            self._on_moved(moved)
            self._leave(moved)
        for topic, number in () if self._background.stopping else self._own:
            partition = self.get(topic, number)
            if partition.current_lease is None and not partition.taking:
                self._background.start(self._claim, partition)

    def _leave(self, moved: set[str]) -> None:
        """Hand over the partitions that are no longer ours, and close those that are gone."""
        owners, own_id = self._membership.owners, self._membership.id
        self._own = [
            (topic, number)
            for topic, names in owners.items()
            for number, owner in enumerate(names)
            if owner == own_id
        ]
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
            self._engine.store.counters.handed_over += len(leases)
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
        """Let the dispatchers of a subscription look again; or all, and whoever sees to what falls due."""
        for partition in list(self.by_place.values()):
            if topic in (None, partition.topic):
                if subscription is None and partition.current_lease:
                    partition.retention.look()
                for name, dispatcher in list(partition.dispatchers.items()):
                    if subscription in (None, name):
                        dispatcher.look_again()

    def lanes_freed(self, topic: str, number: int, names: list[str]) -> None:
        """Messages of subscriptions have expired: what was behind them may be served."""
        if (partition := self.by_place.get((topic, number))) is not None:
            for name in names:
                if (dispatcher := partition.dispatchers.get(name)) is not None:
                    dispatcher.look_again()

    async def leases_ended(self, topic: str, number: int, ended: list[EndedLease]) -> None:
        """An operator has ended leases: tell the consumers, or have the worker do so that serves them."""
        partition = self.by_place.get((topic, number))
        if partition is not None and partition.current_lease:
            await partition.tell_ended(ended)
        elif ended:
            leases = " ".join(":".join(map(str, lease)) for lease in ended)
            await self._engine.announce(f"ended {topic} {number} {leases}")

    def heard_unowed(self, topic: str) -> None:
        """The log says already that messages without a subscription come: it need not do so twice."""
        if counts := self._engine.store.counters.topics.get(topic):
            counts.told_unowed = True

    def heard_ended(self, topic: str, number: str, leases: list[str]) -> None:
        """Another worker has ended leases for an operator."""
        partition = self.by_place.get((topic, int(number)))
        if partition is not None and partition.current_lease:
            parts = [lease.split(":") for lease in leases]
            ended = [
                EndedLease(name, who, int(token), int(first), int(last))
                for name, who, token, first, last in parts
            ]
            self._background.start(partition.tell_ended, ended)

    async def subscription_changed(self, topic: str, subscription: str) -> None:
        """Let the dispatchers of a subscription look again, on all workers."""
        self.look_again(topic, subscription)
        await self._engine.announce(f"subscription {topic} {subscription}")

    async def subscription_sought(self, topic: str, subscription: str) -> None:
        """A subscription was moved: before who did that goes on, its consumers here hear what is void."""
        await self.subscription_changed(topic, subscription)
        served = [one.dispatchers.get(subscription) for one in self.by_place.values() if one.topic == topic]
        waited_for = [one.sought() for one in served if one is not None and one.consumers]
        with suppress(TimeoutError):  # it is no part of the seek
            async with asyncio.timeout(_TOLD):
                await asyncio.gather(*waited_for)

    async def topic_changed(self, topic: str) -> None:
        """Have the settings of a topic followed, on all workers."""
        self.look_again(topic)
        await self._engine.announce(f"topic {topic}")
